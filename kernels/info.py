"""`python -m quire.kernels.info [--model FOLDER]`: this host and a model's plan, as JSON on standard output."""

from __future__ import annotations

import argparse
import platform
import sys
from pathlib import Path
from typing import Any

import msgspec

from quire.kernels import host
from quire.kernels._native import affinity_cpus, default_threads, llvm_version, physical_cores
from quire.kernels.config import ModelConfig
from quire.kernels.devices.choice import gpu_names
from quire.kernels.devices.cuda import Cuda, local_bytes
from quire.kernels.devices.instruction_sets import available_isas, choose_isa
from quire.kernels.devices.ptx_assembler import find_assembler
from quire.kernels.fit import advised
from quire.kernels.memory import PROGRAM_BYTES
from quire.kernels.operands import Matrix
from quire.kernels.options import LoadOptions, choose_device
from quire.kernels.plan import ModelPlan
from quire.kernels.pooling.pooler import Pooler
from quire.kernels.runner import choose_memory, describe, pooler_of
from quire.kernels.weights.quantization import MODES


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def host_info() -> dict[str, Any]:
    """Return the capabilities of this machine."""
    cpus = affinity_cpus()
    cores = physical_cores(cpus)
    return {
        "cpu": _cpu_name(),
        "cpus": len(cpus),
        "cores": len(cores),
        "numa_nodes": len({core.node for core in cores}),
        "isa": choose_isa().name,
        "available_isas": available_isas(),
        "threads": default_threads(),
        "pin_threads": LoadOptions.pin_threads,
        "memory_bytes": host.available_memory(),
        "gpus": gpu_names(),
        "llvm_version": llvm_version(),
        "cache_dir": str(host.cache_folder()),
    }


def quantized_formats(plan: ModelPlan) -> list[str]:
    """Return the formats of the plan's quantized matrices."""
    formats = {matrix.quantized for matrix in plan.weights if isinstance(matrix, Matrix) and matrix.quantized}
    return sorted(f"int{form.bits}" + (f" in groups of {form.group}" if form.group else "") for form in formats)


def memory_info(plan: ModelPlan, options: LoadOptions) -> dict[str, int]:
    """Return the memory of an engine's process by purpose, with its KV pages. Raises ModelError."""
    size, memory = choose_memory(plan, options)
    return {
        "memory_limit_bytes": memory.limit,
        "buffer_bytes": memory.buffers,
        "kv_bytes": memory.kv,
        "kv_pages": size.pages,
        "state_records": size.records,
        "program_bytes": PROGRAM_BYTES,
        "reserve_bytes": memory.reserve,
    }


def tasks_of(pooler: Pooler) -> list[str]:
    """Return what the model can do."""
    tasks = {"generate": pooler.generates, "embed": pooler.embedding_size > 0, "classify": bool(pooler.labels)}
    return [name for name, can in tasks.items() if can]


def plan_info(plan: ModelPlan, architecture: str) -> dict[str, Any]:
    """Return a model's plan: sizes in bytes, and the number of launches of each kernel in a step."""
    launches: dict[str, int] = {}
    for launch in plan.launches:
        launches[launch.kernel.name] = launches.get(launch.kernel.name, 0) + 1
    return {
        "architecture": architecture,
        "layers": plan.layers,
        "vocab_size": plan.vocab_size,
        "max_model_len": plan.limits.max_model_len,
        "weights": plan.dtypes.rounding,
        "quantized_weights": quantized_formats(plan),
        "kv": plan.dtypes.kv.weights,
        "weight_bytes": plan.weight_bytes,
        "kv_bytes_per_token": plan.kv_token_bytes,
        "launches_per_step": len(plan.launches),
        "kernels": launches,
    }


def gpu_kernels(plan: ModelPlan, gpu: Cuda) -> dict[str, Any]:
    """Return the threads and sizes of a plan's kernels on a GPU; registers where NVIDIA's assembler is found."""
    assembler = find_assembler()
    sizes = {}
    for kernel in plan.kernels:
        ptx, shape = gpu.ptx(kernel, plan.context), gpu.shape(kernel, plan.context)
        sizes[kernel.name] = {
            "threads_per_item": shape.threads_per_item,
            "threads_per_block": shape.threads_per_block,
            "ptx_bytes": len(ptx),
            "local_bytes": local_bytes(ptx),
            "asked_shared_bytes": shape.shared_bytes,
        }
        if assembler is not None:
            sizes[kernel.name] |= assembler.resources(ptx)
    return sizes


def model_info(options: LoadOptions) -> dict[str, Any]:
    """Return a model's plan, with the memory of an engine, or with the sizes of its kernels on a GPU."""
    plan, checkpoint = describe(options)
    info = plan_info(plan, ModelConfig(checkpoint.config).architecture)
    info["tasks"] = tasks_of(pooler_of(options, checkpoint))
    device = choose_device(options)
    if isinstance(device, Cuda):
        info |= {"device": options.device, "fast_matmul": options.fast_matmul}
        return info | {"device_kernels": gpu_kernels(plan, device)}
    with advised(options):
        return info | memory_info(plan, options)


def main() -> int:
    """Print the information; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m quire.kernels.info", description=__doc__)
    parser.add_argument("--model", help="checkpoint folder whose plan is printed")
    parser.add_argument("--quantization", help=f"one of {', '.join(MODES)}")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or int8")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--memory-limit", type=int, help="bytes of an engine's process")
    parser.add_argument("--max-loras", type=int, default=0, help="LoRA adapters, for which the plan has kernels too")
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU's architecture, as cuda:sm_90")
    parser.add_argument("--fast-matmul", action="store_true", help="products of bf16 by a GPU's tensor cores")
    arguments = parser.parse_args()
    try:
        info = host_info()
        if arguments.model:
            options = LoadOptions(
                arguments.model,
                dtype=arguments.dtype,
                quantization=arguments.quantization,
                kv_cache_dtype=arguments.kv_cache_dtype,
                memory_limit=arguments.memory_limit,
                max_loras=arguments.max_loras,
                device=arguments.device,
                fast_matmul=arguments.fast_matmul,
            )
            info["plan"] = model_info(options)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(info), indent=2).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
