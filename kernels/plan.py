"""Plans: kernel launches over named buffers and weights, in order. No memory is touched here.

`lowering/model.py` makes a plan of a model's graph; `runner.py` compiles its kernels, packs its weights and hands the
launches to the native runner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.kernels._native import CACHE_LINE
from quire.kernels.adapted import Adapted
from quire.kernels.attention_heads import Heads
from quire.kernels.emit.attention import AttentionKernel
from quire.kernels.emit.context import EmitContext, Kernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.head_linear import HeadLinearKernel
from quire.kernels.emit.kv import KV_TILE, KvLayout
from quire.kernels.emit.layout import Dtypes, round_up
from quire.kernels.graph.operations import Features
from quire.kernels.operands import (
    ArrayWeight,
    Buffer,
    Launch,
    Matrix,
    Operand,
    PlanLimits,
    StatePart,
    Weight,
)
from quire.kernels.weights.quantization import Quantization

HIDDEN, FEATURES = "hidden", "features"
"""Buffers of f32 rows of a step's tokens: hidden states, and what a draft head encodes as such."""

LOOKAHEAD = "lookahead"
"""Buffer of the embedding of a draft head's lookahead token."""

FINAL = "final"
LOGIT_ROWS_AT_ONCE = 128
"""Most rows of logits computed at once; a step that needs more computes them in several rounds."""


def kept_name(layer: int | str) -> str:
    """Return the buffer of the hidden states before a layer, or after the FINAL norm, that a draft head reads."""
    return f"kept_{layer}"


@dataclass
class ModelPlan:
    """Launches of a model's steps, with the buffers and sizes that they need.

    `layers` counts the attention layers, and `kv_layers` has the heads of those with KV pages; the others read theirs.
    `tokens_per_entry` is the number of query tokens of an attention entry.
    """

    context: EmitContext
    limits: PlanLimits
    quantization: Quantization
    vocab_size: int
    hidden_size: int
    kv_layers: tuple[Heads, ...]
    layers: int
    tokens_per_entry: int
    is_encoder: bool = False  # each sequence is computed whole, in one step
    is_draft_head: bool = False  # it begins with features, or with the hidden states of its step before
    num_token_types: int = 1
    launches: list[Launch] = field(default_factory=list)
    hidden_states: list[Launch] = field(default_factory=list)  # launches of steps that return hidden states
    resampling: list[Launch] = field(default_factory=list)  # the launch that samples one row of logits once more
    encoding: list[Launch] = field(default_factory=list)  # launches that encode features before a draft head's steps
    features: Features | None = None  # hidden states that steps keep for a draft head
    lent: frozenset[Matrix] = frozenset()  # matrices of another plan, whose weights this one uses
    buffers: dict[str, Buffer] = field(default_factory=dict)
    state_bytes: int = 0  # of a record of state
    adapted: list[Adapted] = field(default_factory=list)  # all that adapters may change
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json, with the fields that options replace
    _kernels: dict[Kernel, Kernel] = field(default_factory=dict)

    @property
    def dtypes(self) -> Dtypes:
        """Dtypes of the kernels."""
        return self.context.dtypes

    @property
    def logit_rows(self) -> int:
        """The most rows of logits that are computed at once."""
        return min(LOGIT_ROWS_AT_ONCE, self.limits.max_num_batched_tokens)

    @property
    def exchanged(self) -> frozenset[str]:
        """Names of the buffers that the host writes or reads in each step, besides inputs: those of draft heads."""
        kept = () if self.features is None else self.features.layers
        own = {HIDDEN} if self.is_draft_head else set()
        return frozenset({FEATURES, LOOKAHEAD, kept_name(FINAL), *map(kept_name, kept), *own})

    def buffer(self, name: str, size: int) -> Buffer:
        """Return the buffer `name`, of at least `size` bytes; operations reuse buffers by name."""
        known = self.buffers.get(name)
        if known is None or known.bytes < size:
            self.buffers[name] = Buffer(name, size)
        return Buffer(name)

    def adapter_table(self, entry_bytes: int) -> Buffer:
        """Return the table of adapters of what is entered to `adapted` next."""
        return self.buffer(f"adapters_{len(self.adapted)}", (self.limits.max_loras + 1) * entry_bytes)

    def take_state(self, size: int) -> StatePart:
        """Return a part of `size` bytes of the records of state, in whole cache lines."""
        part = StatePart(self.state_bytes, size)
        self.state_bytes += round_up(size, CACHE_LINE)
        return part

    def kernel(self, kernel: Kernel) -> Kernel:
        """Return the one kernel, with a unique name, of all launches that need the same code."""
        if kernel not in self._kernels:
            self._kernels[kernel] = replace(kernel, name=f"{kernel.name}_{len(self._kernels)}")
        return self._kernels[kernel]

    def add(
        self, kernel: Kernel, operands: Sequence[Operand], dim: str, *, rows_per_item: int = 1, repeats: int = 1,
        copies: int = 1, groups: int = 0,
    ) -> None:  # fmt: skip
        """Append a launch."""
        head = dim == "logit_rows"
        launch = Launch(self.kernel(kernel), tuple(operands), dim, rows_per_item, repeats, head, copies, groups)
        self.launches.append(launch)

    @property
    def kernels(self) -> list[Kernel]:
        """Distinct kernels."""
        return list(self._kernels.values())

    @property
    def weights(self) -> list[Weight]:
        """Distinct weights, in the order of their first use."""
        launches = (*self.encoding, *self.launches, *self.hidden_states)
        operands = (operand for launch in launches for operand in launch.operands if operand not in self.lent)
        return list(dict.fromkeys(operand for operand in operands if isinstance(operand, Matrix | ArrayWeight)))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed matrices."""
        return sum(weight.bytes(self.dtypes) for weight in self.weights if isinstance(weight, Matrix))

    @property
    def array_bytes(self) -> int:
        """Bytes of all weights that are plain arrays, without the padding of their ends."""
        return sum(weight.bytes for weight in self.weights if isinstance(weight, ArrayWeight))

    @property
    def window(self) -> int:
        """The last tokens that any layer attends to at most, itself included; 0 if a layer attends to all."""
        windows = [kernel.window for kernel in self.kernels if isinstance(kernel, AttentionKernel)]
        return max(windows) if all(windows) else 0

    @property
    def kv_layouts(self) -> tuple[KvLayout, ...]:
        """Layout of the KV tiles of each layer that has any."""
        return tuple(KvLayout(heads, self.dtypes) for heads in self.kv_layers)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of K and V of a token, in all layers."""
        return sum(layout.token_bytes for layout in self.kv_layouts)

    @property
    def page_bytes(self) -> int:
        """Bytes of a KV page, in all layers."""
        return self.limits.block_size * self.kv_token_bytes

    @property
    def page_head_bytes(self) -> frozenset[int]:
        """The sizes that the part of a KV page in one head of one layer may have, in bytes."""
        return frozenset(self.limits.block_size // KV_TILE * layout.tile_bytes for layout in self.kv_layouts)

    @property
    def attention_context(self) -> float:
        """Context length at which a token's attention takes as long as its linear layers.

        Both are bound by arithmetic, and quantized products are about four times as fast.
        """
        kernels = [launch.kernel for launch in self.launches if launch.dim == "tokens"]
        linear = [kernel for kernel in kernels if isinstance(kernel, GemmKernel)]
        work = sum(kernel.operations(1, 0) / (1 if kernel.quantized is None else 4) for kernel in linear)
        work += sum(kernel.operations(1, 0) for kernel in kernels if isinstance(kernel, HeadLinearKernel))
        return work / sum(launch.kernel.operations(0, 1) for launch in self.launches if launch.dim == "entries")
