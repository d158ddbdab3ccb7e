"""The choice of a device by a name that leaves it open."""

from __future__ import annotations

import logging

from quire.kernels._native import CudaDevice
from quire.kernels.host import MachineShare

logger = logging.getLogger(__name__)


def resolve_device(device: str, share: MachineShare | None = None) -> str:
    """Return the name of one device for `auto`, a GPU or else the CPUs, and for `cuda`; other names as they are.

    Engines that share a machine take its GPUs in turn.
    """
    if device not in ("auto", "cuda"):
        return device
    try:
        names, problem = CudaDevice.names(), "this machine has no GPU of NVIDIA's"
    except RuntimeError as error:
        names, problem = [], str(error)
    if names:
        number = (0 if share is None else share.index) % len(names)
        logger.info("device %s is cuda:%d (%s), of %d GPUs", device, number, names[number], len(names))
        return f"cuda:{number}"
    if device == "cuda":
        return "cuda:0"  # the error comes where it is opened
    logger.info("device auto is cpu: %s", problem)
    return "cpu"


def gpu_names() -> list[str]:
    """Return the names of the GPUs here; none without a driver."""
    try:
        return CudaDevice.names()
    except RuntimeError:
        return []
