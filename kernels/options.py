"""The options that a model is loaded with, checked against the model and the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.kernels import host
from quire.kernels._native import default_threads
from quire.kernels.config import ModelConfig
from quire.kernels.devices import Device, instruction_sets
from quire.kernels.devices.choice import resolve_device
from quire.kernels.devices.cpu import Cpu
from quire.kernels.devices.cuda import Cuda
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.layout import PAIRED, Dtypes
from quire.kernels.errors import ModelError
from quire.kernels.operands import PlanLimits
from quire.kernels.rope import MAX_POSITIONS
from quire.kernels.weights.checkpoint import Checkpoint

DTYPES = ("auto", "bfloat16", "float32")
KV_CACHE_DTYPES = ("auto", "int8")
BLOCK_SIZES = (32, 64, 128)

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
    process. `kv_host_memory`: bytes of host memory for a tier below the KV pages of a GPU; 0: no tier.
    `machine_share`: "I/N" for one of N engines, which share the memory that is left. `hf_overrides`: fields that
    replace those of config.json, as a JSON object. `max_loras`: adapters that are in memory at a time, each of a rank
    up to `max_lora_rank`. `gpu_memory_utilization`: the part of a GPU's memory that weights, buffers, adapters and, by
    default, KV pages take. `kv_share`: the part of what the others leave of it that is for KV pages; what else the
    engine loads has the rest.
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
    kv_host_memory: int | None = 0
    machine_share: str | None = None
    hf_overrides: str | None = None
    max_loras: int = 0
    max_lora_rank: int = 64
    gpu_memory_utilization: float | None = None
    kv_share: float = 1.0

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
    if options.max_loras < 0:
        raise ModelError(f"max_loras is {options.max_loras}; it must be 0 or more")
    for name in ("gpu_memory_utilization", "kv_share"):
        if (part := getattr(options, name)) is not None and not 0 < part <= 1:
            raise ModelError(f"{name} is {part}; it must be above 0 and at most 1")
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


def choose_threads(options: LoadOptions) -> int:
    """Return how many threads compute: as chosen, or by QUIRE_THREADS, or the cores that this process may use."""
    try:
        return options.threads or default_threads()
    except ValueError as error:  # from QUIRE_THREADS
        raise ModelError(str(error)) from None
