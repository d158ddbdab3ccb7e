"""A plan with random weights, and steps of any size over it, for the kernel benchmark."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.kernels._native import Plan
from quire.kernels.assembly import Assembly
from quire.kernels.emit.context import Kernel
from quire.kernels.emit.kv import SplitHeadsKernel
from quire.kernels.emit.latent_heads import LatentHeadsKernel
from quire.kernels.operands import Launch
from quire.kernels.plan import LOGIT_ROWS_AT_ONCE, ModelPlan
from quire.kernels.step_inputs import StepInputs
from quire.kernels.weights.checkpoint import Checkpoint, Tensor
from quire.kernels.work import Chunk, Step

_POOL = 1 << 22
"""Number of random elements that tensors are cut from; larger tensors repeat them."""

LEAST_CHUNK = 16
"""Fewest rows for which attention is also measured as a prompt's chunk."""

_MOST_STATE_BYTES = 1 << 30
"""Most bytes of the records of state that sequences have in turns, but for one."""


class RandomCheckpoint(Checkpoint):
    """A checkpoint with every requested tensor, in bf16: matrices with deviation 0.02, vectors around 1."""

    def __init__(self, config: dict[str, object]) -> None:
        self.folder = Path("random weights")
        self.config = config
        self._random = np.random.default_rng(0)
        normal = self._random.standard_normal(_POOL, np.float32)
        self._matrices, self._vectors = (_bf16(values) for values in (normal * 0.02, normal * 0.1 + 1))

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a random tensor of that shape."""
        pool, size = self._vectors if len(shape) == 1 else self._matrices, math.prod(shape)
        start = int(self._random.integers(0, max(1, _POOL - size)))
        values = pool[start : start + size] if size <= _POOL else np.resize(pool, size)
        return Tensor(name, "bf16", shape, values.view(np.uint8))

    @property
    def formats(self) -> set[str]:
        """Dtypes of its tensors."""
        return {"bf16"}

    def drop_pages(self) -> None:
        """Do nothing, since no file is mapped."""


def _bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def decode(batch: int, context: int) -> Step:
    """Return a step of one token for each of `batch` sequences that then have `context` tokens."""
    return Step(tuple(Chunk(context - 1, 1) for _ in range(batch)), batch)


def prefill(tokens: int, context: int) -> Step:
    """Return a step of the last `tokens` of a prompt of `context` tokens."""
    return Step((Chunk(context - tokens, tokens),), 1)


def reads_context(launch: Launch) -> bool:
    """Return True for a launch of attention, whose work depends on contexts."""
    return launch.dim in ("entries", "kv_splits", "reductions")


@dataclass(frozen=True)
class StepCase:
    """A step to time: decode or prefill at a context, with all its launches or only those that read contexts."""

    kind: str
    context: int
    step: Step
    whole: bool

    def launches(self, plan: ModelPlan, only: list[str]) -> list[Launch]:
        """Return the launches to time: of the kernels whose names contain one of `only`, or all if it is empty."""
        chosen = [
            launch for launch in plan.launches if (self.whole or reads_context(launch)) and self.step.rows(launch)
        ]
        return [launch for launch in chosen if not only or any(part in launch.kernel.name for part in only)]


def choose_cases(plan: ModelPlan, rows: list[int], contexts: list[int], kv_bytes: int) -> list[StepCase]:
    """Return each number of rows as a decode step and as a prefill chunk, at every context that fits.

    At the first context that fits the whole step is timed: decode up to the rows of logits computed at once, prefill
    beyond.
    """
    cases = []
    for count in rows:
        steps = {}
        if count <= LOGIT_ROWS_AT_ONCE:
            steps["decode"] = [(context, decode(count, context)) for context in contexts]
        if count >= LEAST_CHUNK:
            longer = dict.fromkeys(max(count, context) for context in contexts)
            steps["prefill"] = [(context, prefill(count, context)) for context in longer]
        whole = True
        for kind, choices in steps.items():
            for context, step in choices:
                if context <= plan.limits.max_model_len and kv_bytes_of(plan, step) <= kv_bytes:
                    cases.append(StepCase(kind, context, step, whole))
                    whole = False
    return cases


def first_of_each(launches: list[Launch], share: float = 0.0) -> list[Launch]:
    """Return that share of each kernel's launches, at least one, in order."""
    counts = Counter(launch.kernel for launch in launches)
    taken: Counter[Kernel] = Counter()
    chosen = []
    for launch in launches:
        if taken[launch.kernel] < max(1, round(counts[launch.kernel] * share)):
            taken[launch.kernel] += 1
            chosen.append(launch)
    return chosen


class BenchModel:
    """A plan in memory, with its own `kv_bytes` of KV memory, which steps share.

    The layers of a step take regions of that memory in turn, so that each is read from memory, although the contexts of
    all layers together may exceed it.
    """

    def __init__(self, assembly: Assembly, kv_bytes: int) -> None:
        self.plan = assembly.plan
        self._assembly = assembly
        self._kv_bytes = kv_bytes
        self._kv = assembly.device.native.allocate(kv_bytes)
        self._records = _MOST_STATE_BYTES // assembly.plan.state_bytes + 1 if assembly.plan.state_bytes else 0
        self._states = assembly.device.native.allocate(self._records * assembly.plan.state_bytes)
        self._fill()

    def split(self, step: Step) -> Step:
        """Return the step with its attention split as by the runner."""
        return replace(step, split=self._inputs(step).dims["reductions"])

    def profile(self, launches: list[Launch], step: Step) -> list[float]:
        """Return the seconds of each launch, run in order in a step."""
        inputs = self._inputs(step)
        region = max(1, inputs.pages * page_bytes(self.plan))
        regions = max(1, self._kv_bytes // region)
        return self._run(launches, inputs, lambda layer: self._kv + layer % regions * region)

    def _inputs(self, step: Step) -> StepInputs:
        """Write the inputs of a step with random tokens."""
        tokens = np.random.default_rng(0).integers(0, self.plan.vocab_size, step.tokens)
        return StepInputs(self._assembly, step, tokens.astype(np.int32), self._records or None)

    def _run(self, launches: list[Launch], inputs: StepInputs, kv_of: Callable[[int], int]) -> list[float]:
        plan, memory = Plan(), replace(self._assembly.memory, kv_layer=kv_of, states=self._states)
        for launch in launches:
            self._assembly.add(plan, launch, memory)
        return self._assembly.device.native.profile(plan, inputs.dims)

    def _fill(self) -> None:
        """Run each kernel once to fill every buffer, then the kernel that writes KV until the KV memory is full."""
        limits = self.plan.limits
        pages = limits.max_num_batched_tokens // limits.block_size
        inputs = self._inputs(Step((Chunk(0, limits.block_size),) * pages, 1))
        self._run(first_of_each(self.plan.launches), inputs, functools.partial(self._fixed, 0))
        kinds = SplitHeadsKernel, LatentHeadsKernel
        writers = [launch for launch in self.plan.launches if isinstance(launch.kernel, kinds)][:1]
        size = pages * page_bytes(self.plan)
        for start in range(size, self._kv_bytes, size):
            self._run(writers, inputs, functools.partial(self._fixed, min(start, self._kv_bytes - size)))

    def _fixed(self, offset: int, layer: int) -> int:
        """Return an address in the KV memory, the same for every layer."""
        return self._kv + offset


def page_bytes(plan: ModelPlan) -> int:
    """Return the bytes of a KV page of one layer, the one with the largest."""
    return plan.limits.block_size * max(layout.token_bytes for layout in plan.kv_layouts)


def kv_bytes_of(plan: ModelPlan, step: Step) -> int:
    """Return the bytes of one layer's KV pages in a step."""
    return sum(-(-chunk.end // plan.limits.block_size) for chunk in step.chunks) * page_bytes(plan)
