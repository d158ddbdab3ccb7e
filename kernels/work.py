"""What a launch can't do without: the bytes it must touch and the operations it must compute, whatever its code."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels._native import MAX_KV_SPLITS, step_input_bytes
from quire.kernels.emit.attention import BLOCK_TOKENS, Attention
from quire.kernels.emit.gemm import Gemm
from quire.kernels.emit.products import Products
from quire.kernels.emit.rows import Embedding
from quire.kernels.operands import Buffer, KvLayer, Launch, Matrix, Operand, Rows, Table, Vector
from quire.kernels.plan import PlanBuilder

_INPUT_BYTES = step_input_bytes()
"""Bytes a row of what the runner fills in; `logits` depends on the vocabulary."""


@dataclass(frozen=True)
class Chunk:
    """One sequence's part of a step: `tokens` tokens from position `start` on."""

    start: int
    tokens: int

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.tokens

    def pairs(self, window: int) -> int:
        """Pairs of a token and one that it attends to; `window` 0 for no limit."""
        return sum(min(position + 1, window or position + 1) for position in range(self.start, self.end))

    def context(self, window: int) -> int:
        """Tokens whose K and V are read."""
        return self.end - (max(0, self.start + 1 - window) if window else 0)


@dataclass(frozen=True)
class Step:
    """The sizes of a step: its sequences' chunks, and the rows whose logits are wanted. The attention of the first
    `split` chunks, of one token each, is split into blocks of KV."""

    chunks: tuple[Chunk, ...]
    logit_rows: int
    split: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)

    def chunks_of(self, launch: Launch) -> tuple[Chunk, ...]:
        """The chunks that the launch takes part in."""
        if launch.dim in ("kv_splits", "reductions"):
            return self.chunks[: self.split]
        return self.chunks[self.split :] if launch.dim == "entries" else self.chunks

    def rows(self, launch: Launch) -> int:
        """Rows that the launch computes."""
        return self.logit_rows if launch.dim == "logit_rows" else sum(c.tokens for c in self.chunks_of(launch))


@dataclass(frozen=True)
class Work:
    """Bytes of weights and KV, which come from memory; bytes of activations, which may lie in a cache; operations
    (a multiply-add is two) of the multiply-add unit `unit`. Each byte counts once, read or written."""

    memory: int
    activations: int
    operations: int
    unit: str


def work_of(plan: PlanBuilder, launch: Launch, step: Step, isa: str) -> Work:
    """The work of one launch in a step."""
    memory = sum(_memory(plan, launch, operand, step) for operand in launch.operands)
    activations = sum(_activations(plan, launch, operand, step) for operand in launch.operands)
    return Work(memory, activations, _operations(launch, step), _unit(plan, launch, isa))


def _unit(plan: PlanBuilder, launch: Launch, isa: str) -> str:
    """The multiply-add unit of the launch's products: fma, vnni, amx-bf16 or amx-int8."""
    if isinstance(launch.kernel, Gemm) and launch.kernel.integers is not None:
        return "amx-int8" if isa == "amx" else "vnni"
    return "amx-bf16" if Products(isa, plan.numbers).uses_tiles else "fma"


def _operations(launch: Launch, step: Step) -> int:
    """Those of products; others are few beside their bytes."""
    kernel = launch.kernel
    if isinstance(kernel, Gemm):
        return kernel.operations(step.rows(launch))
    if isinstance(kernel, Attention):
        return kernel.operations(sum(chunk.pairs(kernel.window) for chunk in step.chunks_of(launch)))
    return 0


def _memory(plan: PlanBuilder, launch: Launch, operand: Operand, step: Step) -> int:
    """Bytes of weights or KV that the launch touches of an operand: of tables only the rows that it looks up."""
    rows = step.rows(launch)
    if isinstance(operand, Matrix):
        size = operand.bytes(plan.numbers)
        return size * rows // operand.n if isinstance(launch.kernel, Embedding) else size
    if isinstance(operand, KvLayer):
        tokens = rows
        if isinstance(launch.kernel, Attention):
            tokens = sum(chunk.context(launch.kernel.window) for chunk in step.chunks_of(launch))
        return plan.heads.token_bytes(plan.numbers) * tokens
    if isinstance(operand, Table):
        size = operand.values.nbytes
        return size if operand.values.ndim == 1 else size // len(operand.values) * rows
    if isinstance(operand, Rows):
        return 4 * operand.columns * rows
    return 4 * sum(operand.sizes) if isinstance(operand, Vector) else 0


def _activations(plan: PlanBuilder, launch: Launch, operand: Operand, step: Step) -> int:
    """Bytes of a buffer. One that launches of different widths share counts as the widest."""
    if not isinstance(operand, Buffer):
        return 0
    if operand.name == "partials":
        blocks = sum(-(-chunk.end // BLOCK_TOKENS) for chunk in step.chunks_of(launch))
        return blocks * plan.buffers[operand.name].bytes // MAX_KV_SPLITS
    if operand.input:
        return step.rows(launch) * _INPUT_BYTES.get(operand.name, 4 * plan.vocab_size)
    return step.rows(launch) * (plan.buffers[operand.name].bytes // plan.limits.capacity)
