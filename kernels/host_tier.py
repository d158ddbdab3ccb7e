"""The host memory of a tier below the KV pages of a device that has memory of its own: how much, and where.

It lies in a file, usually a memfd, beside the memory of the process, whose ceiling counts it (kernels/memory.py).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from quire.kernels import host
from quire.kernels.devices import Device
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.memory import reserve_within
from quire.kernels.options import LoadOptions

logger = logging.getLogger(__name__)

_DEFAULT_PART = 4  # of the free memory of the host: a quarter
_DEFAULT_POOLS = 4  # and as many pages as so many pools of the device


@dataclass(frozen=True)
class HostTierMemory:
    """Memory that pages may take in the file `fd`: so many `bytes`, none where there is no room for any."""

    fd: int
    bytes: int


def has_host_tier(options: LoadOptions, device: Device, *, whole: bool) -> bool:
    """Return True if a tier of host memory is to be below the device's KV pages, of which `whole` prompts keep none.

    Raises ModelError if it is asked for where it can't be.
    """
    given = options.kv_host_memory
    if device.in_host_memory and given:
        if options.device == "auto":
            logger.warning("kv_host_memory=%d has no effect: there is no GPU, and KV pages are in host memory", given)
            return False
        raise ModelError(
            f"kv_host_memory={given} keeps KV pages of a GPU in host memory, where those of device {device.name} are "
            "anyway; leave it out, or give 0; kv_cache_memory_bytes sizes the KV pages"
        )
    return given != 0 and not device.in_host_memory and not whole


def open_host_tier(options: LoadOptions, pool_bytes: int, program: int) -> HostTierMemory:
    """Return the memory of the tier below a pool of so many bytes, in a process whose `program` takes so many.

    By default a quarter of the free memory of the host, which engines that share the machine divide, at most four times
    the pool, and within a memory_limit what it leaves beside program and requests. What the file holds already is free
    for this engine.
    Raises MemoryShortageError if there is less memory than is asked for, and ModelError if the file is unusable.
    """
    fd = options.kv_memory_fd
    try:
        fd = os.memfd_create("quire-kv-host") if fd is None else fd  # which ends with this process
        os.set_inheritable(fd, False)
        taken = os.fstat(fd).st_blocks * 512
    except OSError as error:
        raise ModelError(
            f"kv_memory_fd={fd}: {error.strerror}; give a memfd that the engine inherits, or leave it out"
        ) from None
    given, limit = options.kv_host_memory, options.memory_limit
    available = host.available_memory()
    free = available + taken
    within = free if limit is None else max(0, limit - program - reserve_within(limit))
    if given is None:
        share = available // host.MachineShare.parse(options.machine_share).count + taken
        return HostTierMemory(fd, min(share // _DEFAULT_PART, _DEFAULT_POOLS * pool_bytes, within))
    if given > free:
        raise MemoryShortageError(
            f"kv_host_memory={given} is too much: {free} bytes of host memory are free; lower it to that or less, or "
            "leave it out"
        )
    if given > within:
        raise MemoryShortageError(
            f"memory_limit={limit} leaves {within} bytes for kv_host_memory={given}, beside {program} for the program "
            f"and {reserve_within(limit or 0)} for requests; raise it, or lower kv_host_memory"
        )
    return HostTierMemory(fd, given)
