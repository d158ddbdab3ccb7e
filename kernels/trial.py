"""A trial run of a float model, which measures how important each input of its linear layers is.

The quantization error of a weight is multiplied by its input. Some inputs of real models are hundreds of times as large
as others, always the same ones, so a search for scales that weighs errors by the mean squares of their inputs loses a
third of what an unweighted one does. A few hundred tokens show which inputs these are, and arbitrary tokens do almost
as well as a text (README.md has the figures), so that no text has to be given.

The trial streams: the float matrices are packed one after the other to the same place, each for its launch. Its
products have the same bits on all hosts, and so have the weights that are quantized by it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.kernels._native import Plan
from quire.kernels.assembly import Assembly, Progress, open_runner
from quire.kernels.emit.context import EmitContext
from quire.kernels.emit.embedding import EmbeddingKernel
from quire.kernels.emit.experts import ExpertGemmKernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, Dtypes, round_up
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph
from quire.kernels.kv_size import KvSize, plan_memory
from quire.kernels.lowering.experts import SLOTS
from quire.kernels.lowering.model import lower
from quire.kernels.models import build_graph
from quire.kernels.operands import Buffer, Launch, Matrix, MatrixPart, Operand, PlanLimits
from quire.kernels.options import LoadOptions, choose_device, config_of
from quire.kernels.plan import LOGIT_ROWS_AT_ONCE, ModelPlan
from quire.kernels.step_inputs import StepInputs
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.loader import Importance, Loader
from quire.kernels.weights.quantization import Quantization
from quire.kernels.work import Chunk, Step

logger = logging.getLogger(__name__)

NUM_TOKENS = 256
"""Tokens of a sequence of the trial, unless the model takes fewer."""

Floats = npt.NDArray[np.float32]

_RUNS = 64
"""Places of the vocabulary that arbitrary tokens come from, each with as many neighbours as a tile has rows."""

_FLOOR = 1e-5  # of the mean, added to all
_BLOCK_SIZE = 32
_GOLDEN = 0x9E3779B97F4A7C15  # its multiples, modulo 2^64, are spread evenly


@dataclass(frozen=True)
class TrialTokens:
    """Tokens of a trial, of sequences of `lengths`, and the part of the vocabulary that they come from.

    The part is made of runs of rows, each as long as a tile, of which `rows` are the first ones. `places`, i32
    [tokens], are the tokens' rows in it.
    """

    rows: Sequence[int]
    places: npt.NDArray[np.int32]
    lengths: Sequence[int]

    @classmethod
    def arbitrary(cls, vocab_size: int, count: int) -> TrialTokens:
        """Return one sequence of arbitrary tokens, always the same ones, from all parts of the vocabulary."""
        if vocab_size <= TILE_ROWS * _RUNS:
            rows = list(range(0, vocab_size, TILE_ROWS))
        else:
            rows = [(vocab_size - TILE_ROWS) * run // (_RUNS - 1) for run in range(_RUNS)]
        spread = np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN) >> np.uint64(32)
        places = (spread % np.uint64(min(vocab_size, len(rows) * TILE_ROWS))).astype(np.int32)
        return cls(rows, places, (count,))

    @classmethod
    def of_passages(cls, passages: Sequence[Sequence[int]], vocab_size: int) -> TrialTokens:
        """Return the tokens of passages, a sequence each. Raises ModelError for one that the vocabulary lacks."""
        tokens = np.concatenate([np.array(passage, np.int64) for passage in passages])
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ModelError(f"a token of the text has an id outside the model's vocabulary of {vocab_size}")
        tiles, order = np.unique(tokens // TILE_ROWS, return_inverse=True)
        places = order * TILE_ROWS + tokens % TILE_ROWS
        return cls((tiles * TILE_ROWS).tolist(), places.astype(np.int32), [len(passage) for passage in passages])


class TrialLayer(NamedTuple):
    """A product of the trial; the inputs of experts are those of all of them together."""

    matrix: Matrix
    of_experts: bool


@dataclass(frozen=True)
class TrialRun:
    """The trial run of a float checkpoint. It is a `weights.loader.ImportanceTrial`.

    `passages`: token ids of passages of a text, at most NUM_TOKENS of each count; arbitrary tokens if there are none.
    """

    options: LoadOptions
    checkpoint: Checkpoint
    progress: Progress | None = None
    passages: Sequence[Sequence[int]] = ()

    @cached_property
    def _graph(self) -> Graph:
        return build_graph(config_of(self.options, self.checkpoint))

    @property
    def described(self) -> str:
        """See ImportanceTrial."""
        return repr(self._graph)

    def run(self) -> Importance:
        """Return the mean squares of the inputs of the linear layers. Raises ModelError."""
        return {
            (part.tensor, part.first_k): squares
            for layer, inputs in self.inputs()
            for squares in (mean_squares(inputs, layer.matrix),)
            for part in layer.matrix.parts
        }

    def inputs(self) -> Iterator[tuple[TrialLayer, Floats]]:
        """Yield the linear layers in order, each with its inputs, f32 [tokens, k]. Raises ModelError."""
        longest, vocab_size = min(NUM_TOKENS, self._graph.max_positions), self._graph.embedding.vocab_size
        if self.passages:
            tokens = TrialTokens.of_passages([passage[:longest] for passage in self.passages], vocab_size)
        else:
            tokens = TrialTokens.arbitrary(vocab_size, longest)
        limits = PlanLimits(len(tokens.places), longest, _BLOCK_SIZE)
        options = replace(self.options, pin_threads=False)
        context = EmitContext(choose_device(options).capabilities, Dtypes("bf16", "bf16", "f32"))
        plan = lower(self._graph, context, limits, Quantization(self.checkpoint))
        return _StreamedPlan(_with_rows(plan, tokens.rows), tokens, options).run(self.progress)


def mean_squares(inputs: Floats, matrix: Matrix) -> Floats:
    """Return the mean squares of a linear layer's inputs, f32 [k].

    A little of their mean is added, so that inputs that happen to be zero count too.
    """
    squares = np.square(inputs)
    mean: Floats = functools.reduce(np.add, squares) / np.float32(len(squares))
    if not np.isfinite(mean).all():
        logger.warning("the inputs of %s are too large to be squared; they count alike", matrix.parts[0].tensor)
        return np.ones_like(mean)
    mean += np.float32(_FLOOR) * functools.reduce(np.add, mean) / np.float32(len(mean))
    return mean


def _with_rows(plan: ModelPlan, rows: Sequence[int]) -> ModelPlan:
    """Return the plan with an embedding of runs of the vocabulary from `rows` on, in place of the whole one."""

    def pick(operand: Operand) -> Operand:
        if not isinstance(operand, Matrix):
            return operand
        (part,) = operand.parts
        known = [row if row < part.whole_n else 0 for row in rows]  # tables of per-layer inputs may be shorter
        parts = [
            MatrixPart(
                part.tensor,
                min(TILE_ROWS, part.whole_n - row),
                part.k,
                first_tile=tile,
                first=row,
                tensor_n=part.whole_n,
            )
            for tile, row in enumerate(known)
        ]
        return replace(operand, parts=tuple(parts), n=TILE_ROWS * len(rows))

    launches = [
        replace(launch, operands=tuple(map(pick, launch.operands)))
        if isinstance(launch.kernel, EmbeddingKernel)
        else launch
        for launch in plan.launches
    ]
    return replace(plan, launches=launches, vocab_size=min(plan.vocab_size, TILE_ROWS * len(rows)))


class _StreamedPlan:
    """A plan in memory, whose float matrices are packed one at a time to the same place."""

    def __init__(self, plan: ModelPlan, tokens: TrialTokens, options: LoadOptions) -> None:
        self._plan, self._tokens = plan, tokens
        launches = [launch for launch in plan.launches if not _computes_logits(launch)]
        self._matrices = [operand for launch in launches for operand in launch.operands if isinstance(operand, Matrix)]
        pages = sum(-(-length // plan.limits.block_size) for length in tokens.lengths)
        most = max(matrix.bytes(plan.dtypes) for matrix in self._matrices)
        buffers = sum(buffer.bytes for buffer in plan.buffers.values())
        size = KvSize(pages, len(tokens.lengths) + 1 if plan.state_bytes else 0)
        memory = plan_memory(options, most + plan.array_bytes, buffers, size.bytes(plan.page_bytes, plan.state_bytes))
        device = choose_device(options)
        native = open_runner(plan, device, size)
        loader = Loader(device.native, plan.quantization, plan.dtypes)
        loader.upload(plan.weights)
        loader.addresses |= dict.fromkeys(self._matrices, device.native.allocate_matrix(most))
        self._assembly = Assembly(native, device, plan, loader, memory, size, None)

    def run(self, progress: Progress | None) -> Iterator[tuple[TrialLayer, Floats]]:
        """Run the launches in order, and yield the products with their inputs."""
        assembly = self._assembly
        assembly.compile(progress)
        assembly.allocate()
        assembly.native.open_kv()
        device, buffer = assembly.device.native, assembly.device.native.matrix_buffer()
        chunks = tuple(Chunk(0, length) for length in self._tokens.lengths)
        step = Step(chunks, min(len(self._tokens.places), LOGIT_ROWS_AT_ONCE))
        inputs = StepInputs(assembly, step, self._tokens.places)
        done, total = 0, sum(matrix.bytes(self._plan.dtypes) for matrix in self._matrices)
        for launch in self._plan.launches:
            for matrix in (operand for operand in launch.operands if isinstance(operand, Matrix)):
                if isinstance(launch.kernel, GemmKernel | ExpertGemmKernel):
                    layer = TrialLayer(matrix, isinstance(launch.kernel, ExpertGemmKernel))
                    yield layer, self._inputs_of(launch, matrix.k)
                if _computes_logits(launch):
                    return
                device.clear(assembly.loader.addresses[matrix], matrix.bytes(self._plan.dtypes))  # also its padding
                assembly.loader.pack(matrix, buffer)
                done += matrix.bytes(self._plan.dtypes)
                if progress is not None:
                    progress("measuring inputs", done, total)
            native = Plan()
            assembly.add(native, launch, assembly.memory)
            device.run(native, inputs.dims)

    def _inputs_of(self, launch: Launch, k: int) -> Floats:
        """Return a product's inputs, f32 [tokens, k]."""
        source, width = launch.operands[0], round_up(k, BLOCK)
        assert isinstance(source, Buffer)
        panels = self._read(source.name, np.float32)
        panels = panels[: len(panels) // (width * TILE_ROWS) * width * TILE_ROWS]
        rows = panels.reshape(-1, width // BLOCK, TILE_ROWS, BLOCK).swapaxes(1, 2).reshape(-1, width)
        inputs: Floats = rows[self._rows_of(launch), :k]
        return inputs

    def _rows_of(self, launch: Launch) -> npt.NDArray[np.int32]:
        """Return the rows of a product's input that the step fills: of experts, those that tokens have got."""
        tokens = len(self._tokens.places)
        if isinstance(launch.kernel, ExpertGemmKernel):
            return self._read(SLOTS, np.int32)[: tokens * launch.copies]
        return np.arange(min(tokens, LOGIT_ROWS_AT_ONCE) if launch.head else tokens, dtype=np.int32)

    def _read(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a copy of a buffer."""
        copy = np.empty(self._plan.buffers[name].bytes, np.uint8)
        self._assembly.device.native.read(self._assembly.buffers[name], copy)
        return copy.view(dtype)


def _computes_logits(launch: Launch) -> bool:
    """Return True for the product with the head, whose inputs are wanted, but not its outputs."""
    return launch.head and isinstance(launch.kernel, GemmKernel)
