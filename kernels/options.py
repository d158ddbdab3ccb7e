"""The options that a model is loaded with, checked against the model and the host."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from quire.kernels import host
from quire.kernels._native import HUGE_PAGE, default_threads
from quire.kernels.config import ModelConfig
from quire.kernels.devices import Device, instruction_sets
from quire.kernels.devices.choice import resolve_device
from quire.kernels.devices.cpu import Cpu
from quire.kernels.devices.cuda import Cuda
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.layout import PAIRED, Dtypes
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.kv_file import KvFile
from quire.kernels.memory import PROGRAM_BYTES, MemoryPlan, reserve_above, reserve_beside, reserve_within
from quire.kernels.operands import PlanLimits
from quire.kernels.rope import MAX_POSITIONS
from quire.kernels.weights.checkpoint import Checkpoint

DTYPES = ("auto", "bfloat16", "float32")
KV_CACHE_DTYPES = ("auto", "int8")
BLOCK_SIZES = (32, 64, 128)
DEFAULT_KV_BYTES = 4 << 30
_PAGES_OF_SNAPSHOT = 4  # of the prefix cache, for each of which there is at most one record of state
_LEAST_RECORDS = 8
_STEPS_OF_PAGES = 4  # of an encoder, whose prompts leave nothing behind

# Largest values of the options that count something, at least 1 of each.
MOST = {
    "max_model_len": MAX_POSITIONS,
    "max_num_seqs": 65536,
    "max_num_batched_tokens": 1 << 20,
    "num_pages": (1 << 31) - 1,
    "threads": 1024,
}


@dataclass(frozen=True)
class LoadOptions:
    """Options of a model, named as those of the engine. `None` means: by the model or by the host.

    `model`: checkpoint folder. `dtype`: of weights, KV and products (`auto`: bf16 for 16-bit checkpoints, else f32).
    `max_model_len`: tokens of a sequence. `block_size`: tokens of a KV page. `kv_cache_memory_bytes` or `num_pages`:
    size of the KV cache. `pin_threads`: bind every thread to a CPU of its own. `device`: `cpu`, `cuda` or `cuda:` and a
    GPU's number, or `auto`; `cuda:sm_90` and other architectures only compile. `fast_matmul`: tensor cores multiply by
    bf16 weights, and their bits differ from the CPU's. `cache_dir`: compiled kernels. `isa`: one of INSTRUCTION_SETS in
    devices/instruction_sets.py. `quantization`: one of quantization.MODES for a float checkpoint, or the checkpoint's
    own method. `kv_cache_dtype`: `auto` or `int8`. `weight_cache`: folder where packed weights are kept for the next
    start. `kv_memory_fd`: file descriptor of the memory of KV pages, which the next engine takes over. `weights_fd`:
    file descriptor of the memory of packed weights, which other engines have too. `memory_limit`: bytes of the whole
    process. `machine_share`: "I/N" for one of N engines, which share the memory that is left. `hf_overrides`: fields
    that replace those of config.json, as a JSON object. `max_loras`: adapters that are in memory at a time, each of a
    rank up to `max_lora_rank`.
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 32
    kv_cache_memory_bytes: int | None = None
    num_pages: int | None = None
    threads: int | None = None
    pin_threads: bool = False
    device: str = "cpu"
    fast_matmul: bool = False
    cache_dir: str | None = None
    isa: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    weight_cache: str | None = None
    kv_memory_fd: int | None = None
    weights_fd: int | None = None
    memory_limit: int | None = None
    machine_share: str | None = None
    hf_overrides: str | None = None
    max_loras: int = 0
    max_lora_rank: int = 64

    def overrides(self) -> dict[str, Any]:
        """Return the fields that replace those of config.json. Raises ModelError."""
        if self.hf_overrides is None:
            return {}
        try:
            return msgspec.json.decode(self.hf_overrides, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            raise ModelError(f"hf_overrides={self.hf_overrides[:100]!r} is not a JSON object: {error}") from None


def config_of(options: LoadOptions, checkpoint: Checkpoint) -> ModelConfig:
    """Return config.json with the fields that the options replace."""
    return ModelConfig(checkpoint.config | options.overrides())


def choose_device(options: LoadOptions) -> Device:
    """Return the device that computes the model. Raises ModelError."""
    cache = host.cache_folder(options.cache_dir)
    threads = choose_threads(options)
    device = resolve_device(options.device, host.MachineShare.parse(options.machine_share))
    kind, _, name = device.partition(":")
    if kind == "cuda":
        return Cuda(name, cache, threads, pin_threads=options.pin_threads)
    if device != "cpu":
        raise ModelError(f"device is {device[:100]!r}; it must be auto, cpu, cuda, or as cuda:0 or cuda:sm_90")
    if options.fast_matmul:
        raise ModelError(
            f"fast_matmul multiplies on tensor cores, and device is {options.device}, which is the CPU here; give the "
            "device cuda, or leave fast_matmul out"
        )
    isa = instruction_sets.choose_isa(options.isa)
    return Cpu(isa, cache, threads, pin_threads=options.pin_threads)


def choose_context(options: LoadOptions, checkpoint: Checkpoint, quantized: bool) -> EmitContext:
    """Return what the model's kernels are emitted for. A `quantized` checkpoint counts as 16-bit, even with f32 scales.

    Raises ModelError.
    """
    capabilities = choose_device(options).capabilities
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if "f32" in checkpoint.formats and not quantized else "bfloat16"
    integer_kv = options.kv_cache_dtype == "int8"
    if dtype == "float32":
        if options.fast_matmul:
            raise ModelError(
                f"fast_matmul multiplies bfloat16, and the model {options.model} is computed in float32; give the "
                "dtype bfloat16, or leave fast_matmul out"
            )
        return EmitContext(capabilities, Dtypes("f32", "f32", "f32", integer_kv))
    activations = capabilities.bf16_activations
    weights = PAIRED if activations == PAIRED else "bf16"
    return EmitContext(capabilities, Dtypes(weights, "bf16", activations, integer_kv), options.fast_matmul)


def check_options(options: LoadOptions) -> None:
    """Raise ModelError for a value that no model and no host allows."""
    choices = {"dtype": DTYPES, "kv_cache_dtype": KV_CACHE_DTYPES, "block_size": BLOCK_SIZES}
    for name, allowed in choices.items():
        if (value := getattr(options, name)) not in allowed:
            raise ModelError(f"{name} is {value!r}; it must be one of {', '.join(map(str, allowed))}")
    for name, most in MOST.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            raise ModelError(f"{name} is {value}; it must be from 1 to {most}")
    if options.num_pages is not None and options.kv_cache_memory_bytes is not None:
        raise ModelError("num_pages and kv_cache_memory_bytes both size the KV cache; give one of them")


def choose_limits(options: LoadOptions, longest: int, default: int | None = None, *, whole: bool = False) -> PlanLimits:
    """Return the sizes that the plan is made for; the model supports sequences of up to `longest` tokens.

    `default`: the length if the options name none. `whole`: a step holds the longest sequence.
    """
    length = options.max_model_len or default or longest
    if length > longest:
        raise ModelError(f"max_model_len={length} exceeds the {longest} positions of the model; lower it")
    if length > MAX_POSITIONS:
        raise ModelError(f"the model has {length} positions; choose a max_model_len of at most {MAX_POSITIONS}")
    most = max(options.max_num_batched_tokens, length) if whole else options.max_num_batched_tokens
    return PlanLimits(most, length, options.block_size, options.max_loras, options.max_lora_rank)


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
    device: Device | None = None,
) -> KvSize:
    """Return the size of a pool next to weights and buffers of `other_bytes`, maybe in a file.

    All of them lie in the memory of `device`, by default the options'; a memory_limit is for the host's alone.

    A page's bytes lie in a place for each KV head of all layers; `head_bytes` has their sizes. By default as many pages
    as the file holds already, or else as all sequences together could fill, up to 4 GiB or half of the memory that is
    left; with a memory_limit up to what it leaves, and at least for one sequence of max_model_len. With `whole`
    prompts, which are computed in one step each and then gone, no more than a few steps fill. `shared_bytes` of the
    weights are in memory already, that of all engines.

    Records of state, of `record_bytes` each, take up to half of that memory: as many as there are sequences, and one
    for each few pages. A number of pages that is given is kept, so that they come on top.
    """
    device = device or choose_device(options)
    free = _free_memory(device, other_bytes, shared_bytes)
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
        share = left // 2 // host.MachineShare.parse(options.machine_share).count
        most = min(DEFAULT_KV_BYTES, share) if within is None else min(within, left)
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
        raise MemoryShortageError(
            f"{_chosen_size(options)}{pages} KV pages take {size} bytes, but {left} are free{_place(device)} next to "
            f"the weights{host.describe_address_limit()}; "
            f"{_lower_size(options, left, page_bytes, records * record_bytes)}"
        )
    return chosen


def _free_memory(device: Device, other_bytes: int, shared_bytes: int) -> int:
    """Return the bytes that are free for weights, buffers and KV. Raises ModelError unless the first two fit."""
    free = device.available_memory() + shared_bytes
    if free < other_bytes:  # whatever a file of KV holds may be in use until the pool is mapped
        raise MemoryShortageError(
            f"weights and buffers take {other_bytes} bytes, but {free} are free{_place(device)}"
            f"{host.describe_address_limit()}; free some, or choose a smaller model or lower max_num_batched_tokens"
        )
    return free


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


def choose_threads(options: LoadOptions) -> int:
    """Return how many threads compute: as chosen, or by QUIRE_THREADS, or the cores that this process may use."""
    try:
        return options.threads or default_threads()
    except ValueError as error:  # from QUIRE_THREADS
        raise ModelError(str(error)) from None
