"""The size of the KV cache, by the options and the memory of the device, and the plan of the whole process."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from quire.kernels import host
from quire.kernels._native import HUGE_PAGE
from quire.kernels.devices import Device
from quire.kernels.devices.choice import engines_on
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.kv_file import KvFile
from quire.kernels.memory import PROGRAM_BYTES, MemoryPlan, reserve_above, reserve_beside, reserve_within
from quire.kernels.operands import PlanLimits
from quire.kernels.options import LoadOptions, choose_device

DEFAULT_KV_BYTES = 4 << 30
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
_PAGES_OF_SNAPSHOT = 4  # of the prefix cache, for each of which there is at most one record of state
_LEAST_RECORDS = 8
_STEPS_OF_PAGES = 4  # of an encoder, whose prompts leave nothing behind


class KvSize(NamedTuple):
    """Number of KV pages, and of records of state, none if the model has no state."""

    pages: int
    records: int = 0

    def bytes(self, page_bytes: int, record_bytes: int) -> int:
        """Return the memory that they take, at so many bytes each."""
        return self.pages * page_bytes + self.records * record_bytes


def choose_kv_size(
    options: LoadOptions,
    limits: PlanLimits,
    page_bytes: int,
    other_bytes: int,
    *,
    head_bytes: Collection[int],
    record_bytes: int = 0,
    whole: bool = False,
    file: KvFile | None = None,
    shared_bytes: int = 0,
    adapter_bytes: int = 0,
    thread_bytes: int = 0,
    device: Device | None = None,
) -> KvSize:
    """Return the size of a pool next to weights and buffers of `other_bytes`, maybe in a file.

    All of them lie in the memory of `device`, by default the options', where threads take `thread_bytes` besides; a
    memory_limit is for the host's alone.

    A page's bytes lie in a place for each KV head of all layers; `head_bytes` has their sizes. By default as many pages
    as the file holds already, or else as all sequences together could fill, up to 4 GiB or half of the memory that is
    left; with a memory_limit up to what it leaves, and at least for one sequence of max_model_len; on a GPU up to what
    gpu_memory_utilization leaves next to `adapter_bytes`. With `whole` prompts, which are computed in one step each and
    then gone, no more than a few steps fill. `shared_bytes` of the weights are in memory already, that of all engines.

    Records of state, of `record_bytes` each, take up to half of that memory: as many as there are sequences, and one
    for each few pages. A number of pages that is given is kept, so that they come on top.
    """
    device = device or choose_device(options)
    other_bytes += thread_bytes
    free = _free_memory(device, other_bytes, shared_bytes, thread_bytes)
    longest = -(-limits.max_model_len // limits.block_size)
    limit = options.memory_limit if device.in_host_memory else None
    within = None if limit is None else limit - PROGRAM_BYTES - reserve_within(limit) - other_bytes
    left = free + (0 if file is None else file.resident_bytes) - other_bytes
    if options.num_pages is not None:
        pages = options.num_pages
        records = _num_records(options, record_bytes, pages * page_bytes, pages)
    elif options.kv_cache_memory_bytes is None and file is not None and file.size is not None:
        pages, records = file.size
    elif options.kv_cache_memory_bytes is not None:
        size = options.kv_cache_memory_bytes
        records = _num_records(options, record_bytes, size, size // page_bytes)
        pages = _whole_stripes((size - records * record_bytes) // page_bytes, longest, head_bytes)
    else:
        if device.own_memory is not None:
            most = _most_on_gpu(options, device, device.own_memory, other_bytes, adapter_bytes, thread_bytes)
        else:
            most = _most_on_host(options, left, within)
        useful = _useful_pages(options, limits, whole)
        records = _num_records(options, record_bytes, most, min(most // page_bytes, useful))
        pages = min((most - records * record_bytes) // page_bytes, useful)
        if within is not None:
            pages = max(pages, longest)  # what is served at all is served at any length, or there is an error
        pages = _whole_stripes(pages, longest, head_bytes)
    chosen = KvSize(pages, records)
    size = chosen.bytes(page_bytes, record_bytes)
    if pages < 1:
        given = left if options.kv_cache_memory_bytes is None else options.kv_cache_memory_bytes
        raise _no_page(given, limits.block_size, page_bytes, chosen, record_bytes)
    if within is not None and size > within:
        raise _over_limit(options, other_bytes, size)
    if size > left:
        raise _over_memory(options, device, chosen, left, page_bytes, record_bytes)
    return chosen


def _most_on_host(options: LoadOptions, left: int, within: int | None) -> int:
    """Return the bytes that KV pages take at most of the host's `left`, and `within` a ceiling, unless chosen."""
    if within is not None:
        return min(within, left)
    return min(DEFAULT_KV_BYTES, left // 2 // host.MachineShare.parse(options.machine_share).count)


def _most_on_gpu(
    options: LoadOptions, device: Device, total: int, other_bytes: int, adapter_bytes: int, thread_bytes: int
) -> int:
    """Return the bytes that KV pages take at most of a GPU's `total`, unless their size is chosen.

    Raises MemoryShortageError if gpu_memory_utilization is more than is free, or less than others take.
    """
    given, free = options.gpu_memory_utilization, device.available_memory()
    engines = engines_on(options.device, host.MachineShare.parse(options.machine_share))
    wanted = int(total * (given or DEFAULT_GPU_MEMORY_UTILIZATION)) // engines
    if given is None and wanted > free:  # others use the GPU
        wanted = int(free * DEFAULT_GPU_MEMORY_UTILIZATION)
    means = f"gpu_memory_utilization={given or DEFAULT_GPU_MEMORY_UTILIZATION:g} means {wanted} bytes for this engine"
    if wanted > free:
        lower = math.floor(100 * free * engines / total) / 100
        raise MemoryShortageError(f"{means}, but {free} are free{_place(device)}; free some, or lower it to {lower:g}")
    if wanted < other_bytes:
        raise MemoryShortageError(f"{means}, and {_taken(other_bytes, thread_bytes)}; raise it")
    left = wanted - other_bytes
    return int((left - min(adapter_bytes, left // 2)) * options.kv_share)


def describe_smaller_pool(
    options: LoadOptions, limits: PlanLimits, size: KvSize, page_bytes: int, device: Device, *, whole: bool = False
) -> str | None:
    """Return a line about KV pages that others on a GPU leave no room for; None if none are missing, or were chosen."""
    chosen = options.num_pages, options.kv_cache_memory_bytes, options.gpu_memory_utilization
    useful = _useful_pages(options, limits, whole)
    if device.own_memory is None or any(each is not None for each in chosen) or size.pages >= useful:
        return None
    engines, free = (
        engines_on(options.device, host.MachineShare.parse(options.machine_share)),
        device.available_memory(),
    )
    if int(device.own_memory * DEFAULT_GPU_MEMORY_UTILIZATION) // engines <= free:
        return None
    return (
        f"{free} of {device.own_memory} bytes are free{_place(device)}; others may use it, as the engine before does "
        f"during a reload: there are {size.pages} KV pages of {page_bytes} bytes, and up to {useful} could be used; "
        "free some, or start the engine before with a lower gpu_memory_utilization"
    )


def _free_memory(device: Device, other_bytes: int, shared_bytes: int, thread_bytes: int) -> int:
    """Return the bytes that are free for weights, buffers and KV. Raises ModelError unless the first two fit."""
    free = device.available_memory() + shared_bytes
    if free < other_bytes:  # whatever a file of KV holds may be in use until the pool is mapped
        raise MemoryShortageError(
            f"{_taken(other_bytes, thread_bytes)} bytes, but {free} are free{_place(device)}"
            f"{host.describe_address_limit()}; free some, or choose a smaller model or lower max_num_batched_tokens"
        )
    return free


def _taken(other_bytes: int, thread_bytes: int) -> str:
    """Return words about what takes memory beside KV pages."""
    what = "weights, buffers and local memory of threads" if thread_bytes else "weights and buffers"
    return f"{what} take {other_bytes}"


def _place(device: Device) -> str:
    """Return words about the memory of a device; none if it is the host's."""
    return "" if device.in_host_memory else f" on device {device.name}"


def _useful_pages(options: LoadOptions, limits: PlanLimits, whole: bool) -> int:
    """Return the pages that all sequences together could fill, or a few steps of `whole` prompts."""
    longest = -(-limits.max_model_len // limits.block_size)
    useful = longest * options.max_num_seqs
    if not whole:
        return useful
    step = -(-limits.max_num_batched_tokens // limits.block_size) + options.max_num_seqs
    return min(useful, max(longest, _STEPS_OF_PAGES * step))


def _no_page(kv_bytes: int, block_size: int, page_bytes: int, size: KvSize, record_bytes: int) -> ModelError:
    """Return the error for KV memory of so many bytes, which holds no page."""
    beside = f" beside {size.records} records of state of {record_bytes} bytes" if size.records else ""
    return ModelError(
        f"KV memory of {kv_bytes} bytes holds no page{beside}: a page of {block_size} tokens takes {page_bytes} bytes; "
        "raise kv_cache_memory_bytes"
    )


def _num_records(options: LoadOptions, record_bytes: int, kv_bytes: int, pages: int) -> int:
    """Return the records of state for KV memory of so many bytes, in which there would be so many pages."""
    if record_bytes == 0:
        return 0
    wanted = options.max_num_seqs + pages // _PAGES_OF_SNAPSHOT
    least = min(options.max_num_seqs, _LEAST_RECORDS) + 1
    return max(min(wanted, kv_bytes // 2 // record_bytes), least)


def _chosen_size(options: LoadOptions) -> str:
    for name in ("kv_cache_memory_bytes", "num_pages"):
        if (value := getattr(options, name)) is not None:
            return f"{name}={value} is too much: "
    return ""


def _lower_size(options: LoadOptions, left: int, page_bytes: int, state_bytes: int) -> str:
    """Return the advice for KV pages that don't fit into the bytes that are left beside so much state."""
    pages = (left - state_bytes) // page_bytes
    if pages < 1 or (options.num_pages is None and options.kv_cache_memory_bytes is None):
        return "free some, or set kv_cache_memory_bytes or num_pages"
    if options.num_pages is not None:
        return f"lower num_pages to {pages} or less, or leave it out"
    return f"lower kv_cache_memory_bytes to {left} or less, or leave it out"


def _over_memory(
    options: LoadOptions, device: Device, size: KvSize, left: int, page_bytes: int, record_bytes: int
) -> MemoryShortageError:
    """Return the error for KV pages and records of state that take more than the bytes that are left."""
    return MemoryShortageError(
        f"{_chosen_size(options)}{size.pages} KV pages take {size.bytes(page_bytes, record_bytes)} bytes, but {left} "
        f"are free{_place(device)} next to the weights{host.describe_address_limit()}; "
        f"{_lower_size(options, left, page_bytes, size.records * record_bytes)}"
    )


def _over_limit(options: LoadOptions, other_bytes: int, kv_bytes: int) -> MemoryShortageError:
    assert options.memory_limit is not None
    reserve = reserve_above(PROGRAM_BYTES + other_bytes + kv_bytes)
    needed = PROGRAM_BYTES + other_bytes + kv_bytes + reserve
    is_chosen = options.num_pages is not None or options.kv_cache_memory_bytes is not None
    return MemoryShortageError(
        f"memory_limit={options.memory_limit} is below the {needed} bytes that are needed: weights and buffers "
        f"{other_bytes}, KV pages {'as chosen' if is_chosen else 'for one sequence of max_model_len'} {kv_bytes}, "
        f"program {PROGRAM_BYTES}, requests {reserve}; raise it, or lower "
        f"{'kv_cache_memory_bytes or num_pages' if is_chosen else 'max_model_len or max_num_batched_tokens'}"
    )


def plan_memory(
    options: LoadOptions, weights: int, buffers: int, kv_bytes: int, *, shared_bytes: int = 0, on_device: bool = False,
    adapters: int = 0,
) -> MemoryPlan:  # fmt: skip
    """Return the plan of a process with a pool that `choose_kv_size` has chosen, maybe in a device's memory.

    `adapters`: what they may take, of which a process without a ceiling of its own has at most half of what is left.
    """
    if options.memory_limit is None or on_device:
        left = host.available_memory() + (0 if on_device else shared_bytes - weights - buffers - kv_bytes)
        share = left // host.MachineShare.parse(options.machine_share).count
        adapters = 0 if on_device else max(0, min(adapters, share // 2))
        return MemoryPlan(weights, buffers, kv_bytes, reserve_beside(share - adapters), on_device, adapters=adapters)
    reserve = options.memory_limit - PROGRAM_BYTES - weights - buffers - kv_bytes
    return MemoryPlan(weights, buffers, kv_bytes, reserve)


def _whole_stripes(pages: int, least: int, head_bytes: Collection[int]) -> int:
    """Return a number of pages with which each head of a layer ends where a huge page does, if that loses at most 1/16.

    Otherwise the memory that a step touches of every head lies on two huge pages each, and both become resident. At
    least `least` pages are kept.
    """
    lost = pages % math.lcm(*(HUGE_PAGE // math.gcd(HUGE_PAGE, size) for size in head_bytes))
    return pages - lost if lost * 16 <= pages and pages - lost >= least else pages
