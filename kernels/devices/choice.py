"""The choice of a device by a name that leaves it open."""

from __future__ import annotations

import functools
import logging

from quire.kernels._native import CudaDevice, PtxCompiler
from quire.kernels.host import MachineShare

logger = logging.getLogger(__name__)


_OPEN = ("auto", "cuda")


@functools.cache
def resolve_device(device: str, share: MachineShare | None = None) -> str:
    """Return the name of one device for `auto`, a GPU or else the CPUs, and for `cuda`; other names as they are.

    Engines that share a machine take its usable GPUs in turn. The driver is asked, and the log told, once for each
    name.
    """
    if device not in _OPEN:
        return device
    usable, problems = usable_gpus()
    if usable:
        number = usable[(0 if share is None else share.index) % len(usable)]
        logger.info("device %s is cuda:%d, of %d GPUs", device, number, len(usable))
        return f"cuda:{number}"
    if device == "cuda":
        return "cuda:0"  # the error comes where it is opened
    logger.info("device auto is cpu: %s", "; ".join(problems))
    return "cpu"


def engines_on(device: str, share: MachineShare) -> int:
    """Return how many engines of a machine compute on the GPU of this one, which all are given the same `device`."""
    if device not in _OPEN:
        return share.count
    gpus = len(usable_gpus()[0]) or 1
    return len(range(share.index % gpus, share.count, gpus))


def usable_gpus() -> tuple[list[int], list[str]]:
    """Return the numbers of the GPUs that can compute a model, and why others, or all, can't. None is opened."""
    try:
        names = CudaDevice.names()
    except RuntimeError as error:
        return [], [str(error)]
    usable, problems = [], [] if names else ["this machine has no GPU of NVIDIA's"]
    for number, name in enumerate(names):
        try:
            PtxCompiler(CudaDevice.architecture_of(number), "")
            usable.append(number)
        except (RuntimeError, ValueError) as error:
            problems.append(f"cuda:{number} ({name}) can't be used: {error}")
    return usable, problems


def gpu_names() -> list[str]:
    """Return the names of the GPUs here; none without a driver."""
    try:
        return CudaDevice.names()
    except RuntimeError:
        return []
