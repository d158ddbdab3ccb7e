"""Start of the engines that a command line asks for."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace

from bench.engines import BenchEngine
from bench.llama_server import LlamaServer
from bench.quire_engine import AsyncQuireEngine, Configuration, QuireEngine, step_bytes
from bench.vllm_peer import VllmPeer
from bench.work import Decode


def start_engines(
    stack: contextlib.ExitStack, arguments: argparse.Namespace, max_model_len: int, threads: int
) -> list[BenchEngine]:
    """Return all engines with their models loaded; `stack` ends them. Raises `BenchError`, or what `LLM` raises."""
    engines: list[BenchEngine] = []
    for start in (_start_quire, _start_vllm, _start_llama):
        for engine in start(arguments, max_model_len, threads):
            stack.callback(engine.close)
            engines.append(engine)
    return engines


def unquantized(arguments: argparse.Namespace) -> Configuration:
    """Return the configuration without quantization."""
    return Configuration(arguments.model, arguments.dtype)


def _start_quire(arguments: argparse.Namespace, max_model_len: int, threads: int) -> Iterator[BenchEngine]:
    kind = AsyncQuireEngine if arguments.streaming else QuireEngine
    choices = itertools.product(
        arguments.device.split(","), arguments.quantization.split(","), arguments.kv_cache_dtype.split(","),
        (None, *arguments.speculative_config),
    )  # fmt: skip
    for device, quantization, kv_cache_dtype, drafting in choices:
        configuration = replace(
            unquantized(arguments),
            device=device,
            quantization=None if quantization == "none" else quantization,
            kv_cache_dtype=kv_cache_dtype,
            speculative_config=drafting,
        )
        _announce(configuration.name)
        yield kind(configuration, max_model_len, threads)


def _start_vllm(arguments: argparse.Namespace, max_model_len: int, threads: int) -> Iterator[BenchEngine]:
    if arguments.vllm is None:
        return
    drafting = arguments.vllm_speculative_config
    for config in (None, *([] if drafting is None else [json.loads(drafting)])):
        _announce("vLLM, which takes a minute or two")
        yield VllmPeer(
            arguments.vllm,
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_len=max_model_len,
            threads=threads,
            read=step_bytes(unquantized(arguments).plan()),
            streaming=arguments.streaming,
            speculative_config=config,
        )


def _start_llama(arguments: argparse.Namespace, max_model_len: int, threads: int) -> Iterator[BenchEngine]:
    del max_model_len  # the server restarts for each work
    read = step_bytes(unquantized(arguments).plan())

    def kv_bytes(work: Decode) -> int:
        """Return the bytes beyond a context of one token; as in Quire, 16 bits an element."""
        return read(work) - read(Decode(work.batch, 1, 0))

    for gguf in arguments.gguf:
        for mode in arguments.llama_flash_attn.split(","):
            for spec_type in (None, *([arguments.llama_spec_type] if arguments.llama_spec_type else [])):
                yield LlamaServer(arguments.llama, gguf, mode, threads=threads, kv_bytes=kv_bytes, spec_type=spec_type)


def _announce(name: str) -> None:
    print(f"starting {name} ...", file=sys.stderr, flush=True)
