"""LoRA adapters that come and go: `.venv/bin/python scripts/bench_adapter_loads.py --model FOLDER`.

First a stream of the base model, while requests name one new adapter after the other: the seconds to their first
tokens, and the stream's longest gaps until then. Then requests that choose among many adapters by Zipf's law, of which
few are in memory, at a fixed rate, beside the same requests of the base model: the times to the first token, the
engine's memory, and the share of requests for which no adapter had to be read.

The adapters are random, in 16 bits, and change all linear layers but the head, or those of attention alone. They are
written to --folder, and used again if they are there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench_load import quantile
from safetensors.numpy import save_file

from quire.kernels.adapted import HEAD, products_of
from quire.kernels.adapters.shapes import linear_shapes
from quire.kernels.models import build_graph
from quire.kernels.options import LoadOptions, config_of
from quire.kernels.runner import describe
from quire.protocol.messages import Abort, EngineCoreOutputs, EngineCoreRequest, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from engine_process import DealerClient, EngineUnderTest

_STREAM_TOKENS = 1900
_QUIET_TOKENS = 40  # of the stream, between two new adapters
_WARM_TOKENS = 10


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="checkpoint folder")
    add("--folder", type=Path, help="of the adapters; by default one that is removed at the end")
    add("--new", type=int, default=6, help="new adapters beside a stream (default 6)")
    add("--rank", type=int, default=40, help="rank of these (default 40)")
    add("--many", type=int, default=500, help="adapters that requests choose among (default 500)")
    add("--many-rank", type=int, default=8, help="rank of these (default 8)")
    add("--in-memory", type=int, default=16, help="of these at a time (default 16)")
    add("--requests", type=int, default=300, help="that choose an adapter; 0 for none (default 300)")
    add("--rate", type=float, default=0.6, help="requests a second (default 0.6)")
    add("--exponent", type=float, default=1.0, help="of Zipf's law (default 1.0)")
    add("--prompt", type=int, default=64, help="tokens of their prompts (default 64)")
    add("--tokens", type=int, default=16, help="tokens of their answers (default 16)")
    add("--attention-only", action="store_true", help="adapters change no feed-forward layers")
    add("--dora", action="store_true", help="adapters are DoRA, whose norms are computed when one is read")
    return parser.parse_args()


def changed_layers(model: str, attention_only: bool) -> dict[str, tuple[int, int]]:
    """Return the weights of a model that the adapters change, [outputs, inputs]."""
    options = LoadOptions(model, max_loras=1, max_model_len=2048, num_pages=64)
    plan, checkpoint = describe(options)
    shapes = linear_shapes(build_graph(config_of(options, checkpoint)))
    names = sorted({name for product in products_of(plan.adapted) for name in product.layers} - {HEAD})
    return {name: shapes[name] for name in names if "attn" in name or not attention_only}


def write_adapter(folder: Path, layers: dict[str, tuple[int, int]], rank: int, seed: int, *, dora: bool) -> Path:
    """Write a random adapter as PEFT does, unless it is there."""
    config = folder / "adapter_config.json"
    if config.exists():
        return folder
    folder.mkdir(parents=True)
    rng, tensors = np.random.default_rng(seed), {}
    for name, (outputs, inputs) in layers.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            tensors[f"{prefix}.{part}.weight"] = (rng.standard_normal(shape) * 0.01).astype(np.float16)
        if dora:
            tensors[f"{prefix}.lora_magnitude_vector.weight"] = np.ones(outputs, np.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    config.write_text(json.dumps({**fields, "target_modules": "all-linear", "use_dora": dora}))
    return folder


def greedy(tokens: int) -> SamplingParams:
    """Return the parameters of an answer of so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def measure_new(model: Path, adapters: Sequence[Path], rank: int) -> None:
    """Measure a stream while new adapters come, one after the other."""
    flags = ["--enable-lora", "--allow-runtime-lora", "--max-loras", "2", "--max-lora-rank", str(rank)]
    with EngineUnderTest(model, *flags) as engine, DealerClient(engine.address) as client:
        client.send(EngineCoreRequest("stream", [40, 50, 60], greedy(_STREAM_TOKENS)))
        times, sent, first = list[float](), list[float](), dict[int, float]()
        quiet = 0  # tokens of the stream since the last adapter's first token
        while len(first) < len(adapters) or quiet < _QUIET_TOKENS:
            message = client.receive(1.0)
            now = time.monotonic()
            if not isinstance(message, EngineCoreOutputs):
                continue
            for output in message.outputs:
                if output.finish_reason is not None and not output.new_token_ids:
                    raise SystemExit(f"{output.request_id} ended without tokens: {output}")
                if output.request_id == "stream":
                    times.append(now)
                    quiet += 1
                elif int(output.request_id) not in first:
                    first[int(output.request_id)] = now
                    quiet = 0
            if len(sent) == len(first) < len(adapters) and quiet >= _QUIET_TOKENS:
                number = len(sent)
                client.send(EngineCoreRequest(str(number), [9, 8, 7], greedy(1), adapter=str(adapters[number])))
                sent.append(now)
        client.send(Abort(["stream"]))
        client.end("stream")
    gaps = list(zip(times[1:], np.diff(times), strict=True))[_WARM_TOKENS:]
    alone = [gap for at, gap in gaps if at < sent[0]]
    print(f"stream alone: gaps of {1e3 * quantile(alone, 0.5):.0f} ms, longest {1e3 * max(alone):.0f} ms")
    longest = []
    for number, begun in enumerate(sent):
        beside = [gap for at, gap in gaps if begun < at <= first[number] + alone[0]]
        longest.append(max(beside))
        print(
            f"new adapter {number}: first token after {1e3 * (first[number] - begun):.0f} ms; "
            f"gaps of {1e3 * quantile(beside, 0.5):.0f} ms, longest {1e3 * max(beside):.0f} ms",
            flush=True,
        )
    print(f"longest gaps: median {1e3 * quantile(longest, 0.5):.0f} ms, most {1e3 * max(longest):.0f} ms")


def resident_megabytes(pid: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1e3


def measure_many(given: argparse.Namespace, adapters: Sequence[Path], choices: Sequence[int]) -> None:
    """Measure requests with the chosen adapters, or of the base model if there are none."""
    arrivals = np.cumsum(np.random.default_rng(1).exponential(1 / given.rate, len(choices)))
    flags = ["--max-num-seqs", "32", "--max-model-len", "2048"]
    if adapters:
        flags += ["--enable-lora", "--allow-runtime-lora", "--max-loras", str(given.in_memory)]
        flags += ["--max-lora-rank", str(given.many_rank)]
    sent, first, memory = dict[str, float](), dict[str, float](), list[float]()
    with EngineUnderTest(Path(given.model), *flags) as engine, DealerClient(engine.address) as client:
        begun, ended = time.monotonic(), 0
        while ended < len(choices):
            now = time.monotonic()
            if len(sent) < len(choices) and begun + arrivals[len(sent)] <= now:
                number = len(sent)
                prompt = [10 + (number * 7 + position * 13) % 1000 for position in range(given.prompt)]
                adapter = str(adapters[choices[number]]) if adapters else ""
                client.send(EngineCoreRequest(str(number), prompt, greedy(given.tokens), adapter=adapter))
                sent[str(number)] = now
                continue
            wait = begun + arrivals[len(sent)] - now if len(sent) < len(choices) else 1.0
            message = client.receive(min(wait, 1.0))
            if not isinstance(message, EngineCoreOutputs):
                continue
            now = time.monotonic()
            for output in message.outputs:
                if output.new_token_ids:
                    first.setdefault(output.request_id, now - sent[output.request_id])
                if output.finish_reason is not None:
                    ended += 1
                    if ended * 10 // len(choices) > len(memory):
                        memory.append(resident_megabytes(engine.process.pid))
        loads = client.call("stats")["adapter_loads"] if adapters else 0
    if len(first) < len(choices):
        raise SystemExit(f"{len(choices) - len(first)} requests ended without a token")
    seconds = list(first.values())
    shares = ", ".join(f"p{round(100 * share)} {quantile(seconds, share):.2f}" for share in (0.5, 0.95, 0.99))
    print(f"{'with adapters' if adapters else 'base alone'}: first token after {shares} s")
    print(f"  memory {memory[0]:.0f} MB after a tenth of the requests, {max(memory[1:]):.0f} MB at most later")
    if adapters:
        print(f"  {100 * (1 - loads / len(choices)):.0f} % of the requests without a load")


def main() -> None:
    """Run both measurements."""
    given = parse_arguments()
    layers = changed_layers(given.model, given.attention_only)
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = given.folder or Path(temporary)
        kind = "dora" if given.dora else "lora"

        def written(name: str, rank: int, number: int) -> Path:
            place = folder / f"{name}-{kind}-{rank}-{number}"
            return write_adapter(place, layers, rank, number, dora=given.dora)

        new = [written("new", given.rank, i) for i in range(given.new)]
        if new:
            size = (new[0] / "adapter_model.safetensors").stat().st_size
            print(f"{len(new)} new adapters of {size / 1e6:.1f} MB beside a stream")
            measure_new(Path(given.model), new, given.rank)
        if given.requests:
            many = [written("many", given.many_rank, i) for i in range(given.many)]
            weights = 1 / np.arange(1, given.many + 1) ** given.exponent
            rng = np.random.default_rng(1)
            choices = rng.choice(given.many, given.requests, p=weights / weights.sum()).tolist()
            size = (many[0] / "adapter_model.safetensors").stat().st_size
            print(f"{given.many} adapters of {size / 1e6:.1f} MB, {given.in_memory} in memory", flush=True)
            measure_many(given, [], choices)
            measure_many(given, many, choices)


if __name__ == "__main__":
    main()
