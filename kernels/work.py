"""Lower bounds of a launch's work: the bytes it must touch and the operations it must compute, whatever its code."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels._native import MAX_KV_SPLITS, step_input_bytes
from quire.kernels.emit.attention import BLOCK_TOKENS, AttentionKernel
from quire.kernels.emit.embedding import EmbeddingKernel
from quire.kernels.emit.experts import ExpertGemmKernel
from quire.kernels.operands import (
    ArrayWeight,
    Buffer,
    KvLayer,
    Launch,
    Matrix,
    Operand,
    QueryScales,
    RopeTable,
    StatePart,
    TensorRows,
)
from quire.kernels.plan import ModelPlan

_INPUT_BYTES = step_input_bytes()
"""Bytes per row of the runner's inputs; a row of `logits` depends on the vocabulary."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in a step: `tokens` tokens from position `start` on."""

    start: int
    tokens: int

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.tokens

    def pairs(self, window: int) -> int:
        """Return the number of pairs of a token and one that it attends to; `window` 0 means no limit."""
        return sum(min(position + 1, window or position + 1) for position in range(self.start, self.end))

    def context(self, window: int) -> int:
        """Return the number of tokens whose K and V are read."""
        return self.end - (max(0, self.start + 1 - window) if window else 0)


@dataclass(frozen=True)
class Step:
    """Sizes of a step: the chunks of its sequences, and the number of rows whose logits are needed.

    The attention of the first `split` chunks, of one token each, is split over blocks of KV.
    """

    chunks: tuple[Chunk, ...]
    logit_rows: int
    split: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)

    def chunks_of(self, launch: Launch) -> tuple[Chunk, ...]:
        """Return the chunks that the launch computes."""
        if launch.dim in ("kv_splits", "reductions"):
            return self.chunks[: self.split]
        return self.chunks[self.split :] if launch.dim == "entries" else self.chunks

    def rows(self, launch: Launch) -> int:
        """Return the number of rows that the launch computes."""
        return self.logit_rows if launch.dim == "logit_rows" else sum(c.tokens for c in self.chunks_of(launch))


@dataclass(frozen=True)
class Work:
    """Work of a launch.

    `memory`: bytes of weights and KV, which come from memory. `activations`: bytes of activations, which may be in a
    cache. `operations` of the multiply-add unit `unit`; a multiply-add is two. Each byte counts once, read or written.
    """

    memory: int
    activations: int
    operations: int
    unit: str


def work_of(plan: ModelPlan, launch: Launch, step: Step) -> Work:
    """Return the work of one launch in a step. Operations other than products are few compared with their bytes."""
    memory = sum(_memory(plan, launch, operand, step) for operand in launch.operands)
    activations = sum(_activations(plan, launch, operand, step) for operand in launch.operands)
    kernel, pairs = launch.kernel, 0
    if isinstance(kernel, AttentionKernel):
        pairs = sum(chunk.pairs(kernel.window) for chunk in step.chunks_of(launch))
    operations = kernel.operations(step.rows(launch), pairs)
    return Work(memory, activations, operations, kernel.unit(plan.context))


def _memory(plan: ModelPlan, launch: Launch, operand: Operand, step: Step) -> int:
    """Return the bytes of weights or KV that the launch touches; of tables only the rows that it looks up.

    Of experts, those that are chosen count, as many as there would be if each were chosen equally often.
    """
    rows, kernel = step.rows(launch), launch.kernel
    match operand:
        case Matrix():
            size = operand.bytes(plan.dtypes)
            if isinstance(kernel, ExpertGemmKernel):
                size = int(size * kernel.active(rows) / kernel.experts)
            return size * rows // operand.n if isinstance(kernel, EmbeddingKernel) else size
        case KvLayer():
            tokens = rows
            if isinstance(kernel, AttentionKernel):
                tokens = sum(chunk.context(kernel.window) for chunk in step.chunks_of(launch))
            return plan.kv_layouts[operand.layer].token_bytes * tokens
        case StatePart():
            return 2 * operand.bytes * len(step.chunks)
        case RopeTable() | QueryScales() | TensorRows():
            return operand.row_bytes * rows
        case ArrayWeight():
            return operand.bytes
    return 0


def _activations(plan: ModelPlan, launch: Launch, operand: Operand, step: Step) -> int:
    """Return the bytes of a buffer. A buffer that launches of different widths share counts as the widest."""
    if not isinstance(operand, Buffer):
        return 0
    if operand.name == "partials":
        blocks = sum(-(-chunk.end // BLOCK_TOKENS) for chunk in step.chunks_of(launch))
        return blocks * plan.buffers[operand.name].bytes // MAX_KV_SPLITS
    if operand.input:
        return step.rows(launch) * _INPUT_BYTES.get(operand.name, 4 * plan.vocab_size)
    return step.rows(launch) * (plan.buffers[operand.name].bytes // plan.limits.max_num_batched_tokens)
