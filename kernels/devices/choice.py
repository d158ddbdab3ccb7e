"""The choice of a device by a name that leaves it open."""

from __future__ import annotations

import functools
import logging

from quire.kernels._native import CudaDevice
from quire.kernels.host import MachineShare

logger = logging.getLogger(__name__)


_OPEN = ("auto", "cuda")


@functools.cache
def resolve_device(device: str, share: MachineShare | None = None) -> str:
    """Return the name of one device for `auto`, a GPU or else the CPUs, and for `cuda`; other names as they are.

    Engines that share a machine take its GPUs in turn. The driver is asked, and the log told, once for each name.
    """
    if device not in _OPEN:
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


def engines_on(device: str, share: MachineShare) -> int:
    """Return how many engines of a machine compute on the GPU of this one, which all are given the same `device`."""
    gpus = len(gpu_names()) or 1
    if device not in _OPEN:
        return share.count
    return len(range(share.index % gpus, share.count, gpus))


def gpu_names() -> list[str]:
    """Return the names of the GPUs here; none without a driver."""
    try:
        return CudaDevice.names()
    except RuntimeError:
        return []
