"""Speeds of torch and transformers on a GPU, to compare Quire's with: int8 GEMMs, and a bf16 model of random weights.

Both are imported when they are needed. PeerError says that one can't be, or that torch finds no GPU. Devices are named
as torch names them; "cpu" is one too.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bench.work_speed import WorkSpeed

_WARMUPS, _PASSES = 3, 9


class PeerError(Exception):
    """A peer that can't be measured on this machine, and why."""


def linear_shapes(config: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the outputs and inputs of the linear layers of one layer of a dense model: attention, then the MLP."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    query, key = (int(config[f"num_{kind}_heads"] * config["head_dim"]) for kind in ("attention", "key_value"))
    return [(query, hidden), (key, hidden), (key, hidden), (hidden, query), *[(inner, hidden)] * 2, (hidden, inner)]


def gemm_operations(config: dict[str, Any], rows: int) -> int:
    """Return the multiplications and additions of the linear layers of all layers, for so many rows."""
    return 2 * rows * int(config["num_hidden_layers"]) * sum(n * k for n, k in linear_shapes(config))


def int8_gemm_seconds(config: dict[str, Any], rows: int, device: str) -> float:
    """Return the median seconds of `torch._int_mm` for all linear layers, each with weights of its own, one after the
    other. Raises PeerError.
    """
    torch = _torch_on(device)

    def operand(*shape: int) -> Any:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)

    shapes = linear_shapes(config)
    inputs = {k: operand(rows, k) for _, k in shapes}
    weights = [operand(n, k) for n, k in shapes * config["num_hidden_layers"]]

    def multiply() -> None:
        for weight in weights:
            torch._int_mm(inputs[weight.shape[1]], weight.t())  # noqa: SLF001 - torch has no other int8 GEMM
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)

    return statistics.median([_seconds(multiply) for _ in range(_WARMUPS + _PASSES)][_WARMUPS:])


def compare_gemms(name: str, config: dict[str, Any], rows: int, device: str, ours: WorkSpeed | None) -> None:
    """Print the speed of `torch._int_mm`, and the share of it that Quire's int8 prefill of one prompt has, which has
    attention and the head on top. Raises PeerError.
    """
    operations = gemm_operations(config, rows)
    seconds = int8_gemm_seconds(config, rows, device)
    line = f"speed  {name:28} {rows} rows: {operations / seconds / 1e12:,.1f} TOP/s"
    if ours:
        line += f", Quire's prefill {operations / ours.prefill / 1e12:,.1f} TOP/s, {seconds / ours.prefill:.0%} of it"
    print(line, flush=True)


def model_speeds(
    config: dict[str, Any], works: Sequence[tuple[int, int]], device: str, steps: int
) -> Iterator[tuple[WorkSpeed, float | None]]:
    """Yield the speed of transformers for each work (sequences, and tokens of the prompt of each), with greedy steps on
    a static KV cache, and the seconds of a step in a CUDA graph; None without one. Raises PeerError.
    """
    torch = _torch_on(device)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
    except (ImportError, OSError) as error:
        raise PeerError(f"transformers can't be imported: {error}") from error
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).to(torch.bfloat16).eval()
    size = sum(weight.nbytes for weight in model.parameters())
    for sequences, length in works:
        prompts = torch.randint(0, config["vocab_size"], (sequences, length), device=device)
        cache = StaticCache(config=model.config, max_cache_len=length + 2 * steps + 2)
        with torch.no_grad():
            prefill = _prefill_seconds(model, prompts)
            decode, in_graph = _decode_seconds(torch, model, prompts, cache, steps)
        yield WorkSpeed(sequences, length, prefill, decode, size), in_graph


def compare_model(
    name: str,
    config: dict[str, Any],
    works: Sequence[tuple[int, int]],
    device: str,
    steps: int,
    ours: Sequence[WorkSpeed],
) -> None:
    """Print the speeds of transformers, and how many times as fast Quire is. Raises PeerError."""
    for eager, in_graph in model_speeds(config, works, device, steps):
        speed = replace(eager, decode=min(eager.decode, in_graph or eager.decode))
        line = f"speed  {name:28} {speed}"
        line += f"; {eager.decode * 1e3:.2f} ms without a CUDA graph"
        line += f", {in_graph * 1e3:.2f} ms in one" if in_graph else ""
        for mine in ours:
            if mine.is_like(speed):
                line += f"; Quire is {speed.prefill / mine.prefill:.2f} times as fast in prefill, "
                line += f"{speed.decode / mine.decode:.2f} times in decoding"
        print(line, flush=True)


def _torch_on(device: str) -> Any:
    """Return torch, with the device as its current one."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise PeerError(f"torch can't be imported: {error}") from error
    if (target := torch.device(device)).type == "cuda":
        if not torch.cuda.is_available():
            raise PeerError(f"torch {torch.__version__} finds no GPU")
        torch.cuda.set_device(target.index or 0)
    return torch


def _next_tokens(model: Any, tokens: Any, **cache: Any) -> Any:
    return model(input_ids=tokens, use_cache=True, logits_to_keep=1, **cache).logits.argmax(-1)


def _prefill_seconds(model: Any, prompts: Any) -> float:
    """Return the seconds of the second prefill, until its tokens are on the host: the first one loads kernels."""
    return [_seconds(lambda: _next_tokens(model, prompts).tolist()) for _ in range(2)][1]


def _decode_seconds(torch: Any, model: Any, prompts: Any, cache: Any, steps: int) -> tuple[float, float | None]:
    """Return the least seconds of a decode step, and of one in a CUDA graph, after a prefill into a static cache.

    The cache has room for `steps` of both and two more.
    """
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # before 5.24
    tokens = _next_tokens(model, prompts, **{name: cache})

    def step() -> None:
        tokens.copy_(_next_tokens(model, tokens, **{name: cache}))

    def least(run: Callable[[], None]) -> float:
        def one() -> None:
            run()
            tokens.tolist()

        return min(_seconds(one) for _ in range(steps))

    eager = least(step)
    replay = _captured(torch, step) if prompts.is_cuda else None
    return eager, least(replay) if replay else None


def _captured(torch: Any, step: Callable[[], None]) -> Callable[[], None] | None:
    """Return a CUDA graph of a step, which it runs once before; None if this version can't be captured."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:
        return None
    replay: Callable[[], None] = graph.replay
    return replay


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
