"""Cost of LoRA adapters in decoding steps: `.venv/bin/python scripts/bench_adapters.py --model FOLDER`.

Steps of a batch without adapters, with one adapter for all rows, and with one for each row, and of a single stream with
and without one, beside the same steps of a model that was loaded without adapters. The adapters are random, and change
all linear layers, or those that `--targets` names. With `--whole-heads N` the last N of them have a head of their own
too. The kinds of steps take turns in any order, since the load of a shared machine changes by the second; compare
ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Collection, Sequence

import numpy as np

from quire.kernels.adapted import HEAD, products_of
from quire.kernels.adapters.adapter import Adapter, LowRank
from quire.kernels.adapters.packing import pack_adapter
from quire.kernels.adapters.shapes import linear_shapes
from quire.kernels.models import build_graph
from quire.kernels.options import LoadOptions, config_of
from quire.kernels.plan import ModelPlan
from quire.kernels.runner import ModelRunner, describe, load_model
from quire.kernels.step import StepInput
from quire.kernels.weights.tensor import Tensor

WARM_STEPS = 3
PAGE = 32


def tensor(values: np.ndarray) -> Tensor:
    """Return an array as a tensor of an adapter's file."""
    return Tensor("", "f32", values.shape, np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8))


def random_adapter(
    plan: ModelPlan,
    shapes: dict[str, tuple[int, int]],
    rank: int,
    seed: int,
    *,
    targets: Collection[str] = (),
    has_head: bool = False,
) -> Adapter:
    """Return an adapter of this rank that changes the layers of these last names, by default all that adapters can."""
    rng = np.random.default_rng(seed)
    names = {name for product in products_of(plan.adapted) for name in product.layers}
    if targets:
        names = {name for name in names if name.removesuffix(".weight").rpartition(".")[2] in targets}
    layers = {}
    for name in sorted(names):
        outputs, inputs = shapes[name]
        a, b = rng.standard_normal((rank, inputs)), rng.standard_normal((outputs, rank))
        layers[name] = LowRank(tensor(a * 0.01), tensor(b * 0.01), 1.0)
    heads = {HEAD: tensor(rng.standard_normal(shapes[HEAD], np.float32) * 0.02)} if has_head else {}
    return Adapter(layers, replaced=heads)


class Decode:
    """Sequences that decode together, each with its adapter, 0 for none.

    Those of all kinds of a runner share the pages of their prompts, whatever their adapters: only times count here.
    """

    def __init__(self, runner: ModelRunner, adapters: Sequence[int], context: int, steps: int) -> None:
        self._runner, sequences = runner, runner.sequences
        self._slots = []
        for number, adapter in enumerate(adapters):
            prompt = [(number * 131 + 7 * i) % 1000 + 10 for i in range(context)]
            slot = sequences.open(prompt, context, cache_salt="")
            sequences.set_adapter(slot, adapter)
            known = sequences.start(slot, context + steps + 1)
            assert known is not None
            runner.run(StepInput([slot], [known], [context - known]))
            self._slots.append(slot)
        self._start = context
        self.seconds: list[float] = []

    def step(self) -> None:
        """Run a step, and note how long it takes."""
        count = len(self._slots)
        begun = time.perf_counter()
        self._runner.run(StepInput(self._slots, [self._start] * count, [1] * count))
        self.seconds.append(time.perf_counter() - begun)
        self._start += 1


def options_of(given: argparse.Namespace, steps: int) -> LoadOptions:
    """Return the options of both models, with pages for the prompts and for the steps of five kinds after them."""
    tail_pages = -(-(steps + 1) // PAGE) + 2
    return LoadOptions(
        given.model, threads=given.threads, quantization=given.quantization,
        max_model_len=given.context + tail_pages * PAGE, max_num_batched_tokens=max(given.context, 2048),
        num_pages=given.batch * (-(-given.context // PAGE) + 5 * tail_pages),
    )  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder")
    parser.add_argument("--threads", type=int, help="threads of both engines; by default one for each core")
    parser.add_argument("--quantization", help="int8 or int4")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a batch (default 32)")
    parser.add_argument("--ranks", default="8,16,32,64", help="ranks of the batch's adapters in turn (8,16,32,64)")
    parser.add_argument("--targets", default="", help="last names of the layers, as q_proj,v_proj (default all)")
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt (default 64)")
    parser.add_argument("--whole-heads", type=int, default=0, help="adapters with a head of their own (default none)")
    parser.add_argument("--steps", type=int, default=40, help="steps of each kind (default 40)")
    given = parser.parse_args()
    ranks = [int(rank) for rank in given.ranks.split(",")]
    targets = [name for name in given.targets.split(",") if name]
    steps = given.steps + WARM_STEPS
    common = options_of(given, steps)
    plain = load_model(common)
    options = LoadOptions(**{**vars(common), "max_loras": given.batch, "max_lora_rank": max(ranks)})
    plan, checkpoint = describe(options)
    shapes = linear_shapes(build_graph(config_of(options, checkpoint)))
    runner = load_model(options)
    num_bytes = []
    for number in range(given.batch):
        has_head = number >= given.batch - given.whole_heads
        rank = ranks[number % len(ranks)]
        adapter = random_adapter(plan, shapes, rank, number, targets=targets, has_head=has_head)
        packed = pack_adapter(plan.adapted, adapter, plan.dtypes, plan.quantization)
        runner.set_adapter(number + 1, packed)
        num_bytes.append(packed.num_bytes)
    one = ranks.index(16) + 1 if 16 in ranks else 1
    batch, each = [0] * given.batch, [*range(1, given.batch + 1)]
    kinds = {
        "batch, no adapters loaded": Decode(plain, batch, given.context, steps),
        "batch, base": Decode(runner, batch, given.context, steps),
        f"batch, one adapter of rank {ranks[one - 1]}": Decode(runner, [one] * given.batch, given.context, steps),
        f"batch, {given.batch} adapters": Decode(runner, each, given.context, steps),
        "stream, no adapters loaded": Decode(plain, [0], given.context, steps),
        "stream, base": Decode(runner, [0], given.context, steps),
        f"stream, adapter of rank {ranks[one - 1]}": Decode(runner, [one], given.context, steps),
    }
    if given.whole_heads:
        last = given.batch
        kinds["stream, adapter with a head"] = Decode(runner, [last], given.context, steps)
        kinds["batch, one adapter with a head"] = Decode(runner, [last] * given.batch, given.context, steps)
    order = list(kinds.values())
    for _ in range(steps):
        random.shuffle(order)  # a step is slower after one that reads more memory
        for decode in order:
            decode.step()
    sizes = [size / 1e6 for size in num_bytes]
    print(f"adapters of {min(sizes):.1f} to {max(sizes):.1f} MB, {sum(sizes):.0f} MB in all")
    base: list[float] = []
    for name, decode in kinds.items():
        seconds = decode.seconds[WARM_STEPS:]
        base = seconds if "no adapters" in name else base
        ratio = statistics.median(own / other for own, other in zip(seconds, base, strict=True))
        print(f"{name:36} {statistics.median(seconds) * 1e3:8.2f} ms a step   {ratio:.3f} times the first")


if __name__ == "__main__":
    main()
