"""The engines that a command line asks for, started."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

from bench.engines import Engine
from bench.llama_server import LlamaServer
from bench.quire_engine import AsyncQuireEngine, Configuration, QuireEngine, step_bytes
from bench.vllm_peer import VllmPeer
from bench.work import Decode


def start_engines(
    stack: contextlib.ExitStack, arguments: argparse.Namespace, max_model_len: int, threads: int
) -> list[Engine]:
    """All engines, their models loaded; `stack` ends them. Raises `BenchError`, or what `LLM` does."""
    engines: list[Engine] = []
    for start in (_start_quire, _start_vllm, _start_llama):
        for engine in start(arguments, max_model_len, threads):
            stack.callback(engine.close)
            engines.append(engine)
    return engines


def plain(arguments: argparse.Namespace) -> Configuration:
    """The model as it is."""
    return Configuration(arguments.model, arguments.dtype)


def _start_quire(arguments: argparse.Namespace, max_model_len: int, threads: int) -> Iterator[Engine]:
    kind = AsyncQuireEngine if arguments.streaming else QuireEngine
    for quantization in arguments.quantization.split(","):
        for kv_cache_dtype in arguments.kv_cache_dtype.split(","):
            mode = None if quantization == "none" else quantization
            configuration = replace(plain(arguments), quantization=mode, kv_cache_dtype=kv_cache_dtype)
            _say(configuration.name)
            yield kind(configuration, max_model_len, threads)


def _start_vllm(arguments: argparse.Namespace, max_model_len: int, threads: int) -> Iterator[Engine]:
    if arguments.vllm is not None:
        _say("vLLM, which takes a minute or two")
        yield VllmPeer(
            arguments.vllm,
            model=arguments.model,
            dtype=arguments.dtype,
            max_model_len=max_model_len,
            threads=threads,
            read=step_bytes(plain(arguments).plan()),
            streaming=arguments.streaming,
        )


def _start_llama(arguments: argparse.Namespace, max_model_len: int, threads: int) -> Iterator[Engine]:
    del max_model_len  # the server starts anew for each work
    read = step_bytes(plain(arguments).plan())

    def kv_bytes(work: Decode) -> int:
        """Those beyond a context of one token; as in Quire, 16 bits a number."""
        return read(work) - read(Decode(work.batch, 1, 0))

    for gguf in arguments.gguf:
        for mode in arguments.llama_flash_attn.split(","):
            yield LlamaServer(
                arguments.llama, gguf, mode, threads=threads, kv_bytes=kv_bytes, streaming=arguments.streaming
            )


def _say(name: str) -> None:
    print(f"starting {name} ...", file=sys.stderr, flush=True)
