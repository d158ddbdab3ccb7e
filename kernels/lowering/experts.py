"""Lowering of mixtures of experts.

A step's tokens are routed, grouped by expert, computed by groups, and added up (emit/experts.py). The experts of a
layer are one packed matrix, one expert after the other, so that a thread streams the columns of one expert at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.kernels.activations import FixedActivation, Xielu
from quire.kernels.adapted import AdaptedExperts, AdaptedProduct, most_ranks
from quire.kernels.emit.adapters import ENTRY_BYTES as ADAPTER_BYTES
from quire.kernels.emit.expert_adapters import ExpertShrinkKernel
from quire.kernels.emit.experts import (
    ENTRY_BYTES,
    CombineKernel,
    ExpertGemmKernel,
    GroupKernel,
    RouteKernel,
    ScatterKernel,
)
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, round_up
from quire.kernels.emit.rows import QuantizeKernel
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Experts, FeedForward, Norm
from quire.kernels.lowering.attention import AttentionLowering
from quire.kernels.lowering.fused import FusedLinear, norm_kernel
from quire.kernels.lowering.linear import Epilogue
from quire.kernels.operands import Buffer, Matrix, Operand, PackedActivations, Table, Vector, Vectors

SLOTS = "expert_slots"
"""Buffer of the grouped rows of a step's assignments, i32 [tokens][experts of a token]."""


@dataclass(frozen=True)
class Sum:
    """The destination of a residual block's output: `scale` times it is added to the f32 rows `out`, or stored."""

    out: Buffer
    scale: float = 1.0
    add: bool = True


@dataclass(frozen=True)
class _Groups:
    """Buffers of a step's assignments: the experts chosen, their weights, the grouped rows, and the list of entries."""

    numbers: Buffer
    weights: Buffer
    slots: Buffer
    entries: Buffer


def lower_experts(
    lowering: AttentionLowering, hidden: Buffer, before: Norm | None, operation: Experts, target: Sum
) -> None:
    """Lower a mixture of experts whose input are the hidden states after the norm `before`."""
    _check(operation, lowering.plan.hidden_size)
    _ExpertsLowering(lowering, operation, target).lower(hidden, before)


class _ExpertsLowering:
    def __init__(self, lowering: AttentionLowering, operation: Experts, target: Sum) -> None:
        self._lowering, self._plan = lowering, lowering.plan
        self._operation, self._target = operation, target
        self._top_k, self._count = operation.router.top_k, len(operation.experts)
        assignments = self._plan.limits.max_num_batched_tokens * self._top_k
        self._assignments = assignments
        self._grouped_rows = round_up(assignments + (TILE_ROWS - 1) * min(assignments, self._count), TILE_ROWS)

    def lower(self, hidden: Buffer, before: Norm | None) -> None:
        """Append the launches."""
        routed_by = self._operation.router.norm
        normed = self._normed(hidden, routed_by or before)
        groups = self._route(normed)
        if routed_by is not None:
            normed = self._normed(hidden, before)
        read = self._compressed(normed)
        width, sums = read.columns, self._sums(read.columns)
        first, activation = self._operation.experts[0], _activation_of(self._operation.experts[0])
        gates = [_gates(expert) for expert in self._operation.experts]
        x = self._scatter(read, gates, groups)
        inner = self._activations("expert_intermediate", first.up.outputs)
        name, epilogue = ("expert_act", "activation") if first.gate is None else ("expert_gate", "gate")
        self._gemm(name, x, gates, inner.buffer, groups, epilogue, activation, self._shrink(read, gates, groups))
        downs = [self._down(expert) for expert in self._operation.experts]
        outputs = self._plan.buffer("expert_outputs", self._grouped_rows * round_up(width, BLOCK) * 4)
        adapted = self._shrink(inner, downs, groups, grouped=True)
        self._gemm("expert_down", self._quantized(inner, downs, groups), downs, outputs, groups, "store", "", adapted)
        operands = [outputs, groups.slots, groups.weights, sums.out]
        shared = self._shared(normed)
        combine = CombineKernel("combine", width, self._top_k, sums.scale, sums.add, bool(shared))
        self._plan.add(combine, [*operands, *shared], "tokens")
        self._expand(sums.out, width)
        self._add_shared(normed)

    def _compressed(self, x: PackedActivations) -> PackedActivations:
        """Lower the layer whose outputs the experts read, if they do not read x."""
        if (linear := self._operation.compress) is None:
            return x
        latents = self._lowering.rows("expert_latents", linear.outputs)
        self._lowering.gemm("linear", x, FusedLinear((linear,)), latents)
        return self._packed(latents, linear.outputs)

    def _sums(self, width: int) -> Sum:
        """Return the destination of the experts' sum: that of the block, or rows that a layer expands."""
        if self._operation.expand is None:
            return self._target
        return Sum(self._lowering.rows("expert_latents", width), add=False)

    def _expand(self, sums: Buffer, width: int) -> None:
        """Lower the layer from the experts' sum to the destination of the block, if there is one."""
        if (layer := self._operation.expand) is None:
            return
        linear, target = FusedLinear((layer,), place=self._lowering.place_of_down), self._target
        name, kind = ("linear_add", "add") if target.add else ("linear", "store")
        self._lowering.gemm(name, self._packed(sums, width), linear, target.out, Epilogue(kind, scale=target.scale))

    def _packed(self, rows: Buffer, width: int) -> PackedActivations:
        """Lower the packing of rows, whose readers quantize it as they need."""
        packed = self._lowering.activations(f"expert_latents_{width}", width)
        kernel, operands = norm_kernel("norm", None, width, rows, packed.buffer)
        self._plan.add(kernel, operands, "tokens")
        return packed

    def _normed(self, hidden: Buffer, norm: Norm | None) -> PackedActivations:
        """Lower a norm of the hidden states, whose readers quantize it as they need."""
        normed = self._lowering.activations("normed", self._plan.hidden_size)
        kernel, operands = norm_kernel("norm", norm, self._plan.hidden_size, hidden, normed.buffer)
        self._plan.add(kernel, operands, "tokens")
        return normed

    def _route(self, x: PackedActivations) -> _Groups:
        """Lower the router and the grouping."""
        plan, router, count = self._plan, self._operation.router, self._count
        outputs = self._lowering.rows("router_outputs", count)
        linear = FusedLinear((router.linear,), place="router")
        self._lowering.gemm("router", x, linear, outputs, Epilogue(scale=router.output_scale))
        numbers, weights, slots = (
            plan.buffer(name, self._assignments * 4) for name in ("expert_numbers", "expert_weights", SLOTS)
        )
        most = min(self._assignments, count) + self._assignments // plan.context.rows_per_item
        groups = _Groups(numbers, weights, slots, plan.buffer("expert_entries", 8 + most * ENTRY_BYTES))
        kernel = RouteKernel(
            "route", count, self._top_k, router.scoring, bool(router.correction), router.normalize, router.scale,
            router.groups, router.top_groups, router.group_score, router.least_sum, bool(router.expert_scales),
        )  # fmt: skip
        operands: list[Operand] = [outputs, groups.numbers, groups.weights]
        operands += [Vector((name,), (count,)) for name in (router.correction, router.expert_scales) if name]
        plan.add(kernel, operands, "tokens")
        group = GroupKernel("group", count, self._top_k)
        rows = plan.limits.max_num_batched_tokens  # all in one item
        plan.add(group, [groups.numbers, groups.slots, groups.entries], "tokens", rows_per_item=rows)
        return groups

    def _activations(self, name: str, columns: int) -> PackedActivations:
        """Return a buffer of grouped rows. Its padding columns stay zero: no other width shares it."""
        return self._lowering.activations(f"{name}_{columns}", columns, rows=self._grouped_rows)

    def _scatter(self, x: PackedActivations, linears: list[FusedLinear], groups: _Groups) -> PackedActivations:
        """Lower the copy of the tokens to grouped rows, in the format that the experts read."""
        if self._lowering.format_of(self._all(linears), x.columns) is not None:
            return self._quantized(x, linears, groups, scatter=True)
        out = self._activations("expert_inputs", x.columns)
        kernel = ScatterKernel("scatter", x.columns, self._top_k)
        self._plan.add(kernel, [x.buffer, out.buffer, groups.slots], "tokens", repeats=self._top_k)
        return out

    def _quantized(
        self, x: PackedActivations, linears: list[FusedLinear], groups: _Groups, *, scatter: bool = False
    ) -> PackedActivations:
        """Convert grouped rows, or tokens that are to be grouped (`scatter`), to the format that the experts read."""
        layers = self._all(linears)
        quantized = self._lowering.format_of(layers, x.columns)
        if quantized is None:
            return x
        out = self._lowering.activations("grouped", x.columns, quantized, rows=self._grouped_rows)
        order = self._lowering.quantization.order_of(layers.layers, x.columns)
        operands: list[Operand] = [x.buffer, out.buffer]
        if order is not None:
            operands.append(Table("order", order))
        kernel = QuantizeKernel(
            "quantize", x.columns, quantized, order is not None, "scatter" if scatter else "slots", self._top_k
        )
        self._plan.add(kernel, [*operands, groups.slots], "tokens", repeats=self._top_k)
        return out

    @staticmethod
    def _all(linears: list[FusedLinear]) -> FusedLinear:
        """Return the layers of all experts, which have one number format and one order of inputs."""
        return FusedLinear(tuple(layer for linear in linears for layer in linear.layers), place=linears[0].place)

    def _gemm(
        self, name: str, x: PackedActivations, linears: list[FusedLinear], out: Buffer, groups: _Groups, epilogue: str,
        activation: FixedActivation, adapted: AdaptedExperts | None,
    ) -> None:  # fmt: skip
        """Lower the products of grouped rows with linear layers, one for each expert, which may be `adapted`."""
        plan, first = self._plan, linears[0]
        matrices = [self._lowering.matrix(linear, x.columns) for linear in linears]
        n = matrices[0].n
        blocks = round_up(n, BLOCK) // BLOCK
        parts = [
            replace(part, first_tile=part.first_tile + number * 2 * blocks)
            for number, matrix in enumerate(matrices)
            for part in matrix.parts
        ]
        quantized = self._lowering.format_of(self._all(linears), x.columns)
        packed = Matrix(tuple(parts), len(matrices) * blocks * BLOCK, x.columns, quantized)
        operands: list[Operand] = [x.buffer, packed, out]
        has_bias = bool(first.layers[0].bias)
        if has_bias:
            operands.append(Vectors(tuple(linear.biases for linear in linears)))
        operands.append(groups.entries)
        if adapted is not None:
            operands += [self._entry_numbers, adapted.table, adapted.products[0].short]
        kernel = ExpertGemmKernel(
            name, x.columns, n, epilogue, has_bias, activation, quantized=quantized, experts=self._count,
            top_k=self._top_k, adapter_tiles=0 if adapted is None else adapted.products[0].tiles,
        )  # fmt: skip
        plan.add(
            kernel, operands, "tokens", rows_per_item=plan.context.rows_per_item, repeats=blocks,
            copies=self._top_k, groups=self._count,
        )  # fmt: skip

    @property
    def _entry_numbers(self) -> Buffer:
        """The numbers of entries of grouped rows in a table of adapters."""
        return self._plan.buffer("expert_adapters", self._grouped_rows * 4)

    def _shrink(
        self, x: PackedActivations, linears: list[FusedLinear], groups: _Groups, *, grouped: bool = False
    ) -> AdaptedExperts | None:
        """Lower the first half of what adapters change of the experts' layers, which read tokens or `grouped` rows."""
        plan, limits = self._plan, self._plan.limits
        if not limits.max_loras:
            return None
        tiles = -(-linears[0].num_tensors * most_ranks(limits.max_lora_rank) // TILE_ROWS)
        short = plan.buffer("expert_adapter_ranks", self._grouped_rows * tiles * TILE_ROWS * 4)
        table = plan.adapter_table(self._count * ADAPTER_BYTES)
        matrices = (self._lowering.matrix(linear, x.columns) for linear in linears)
        products = tuple(AdaptedProduct(table, short, matrix, tiles) for matrix in matrices)
        plan.adapted.append(adapted := AdaptedExperts(table, products))
        kernel = ExpertShrinkKernel(
            "expert_shrink", x.columns, tiles, experts=self._count, top_k=self._top_k, grouped=grouped
        )
        of_tokens = Buffer("row_adapters", input=True)
        operands = [x.floats, of_tokens, groups.numbers, groups.slots, self._entry_numbers, table, short]
        plan.add(kernel, operands, "tokens", repeats=tiles * self._top_k)
        return adapted

    def _shared(self, x: PackedActivations) -> list[Operand]:
        """Lower a shared expert with a gate; return its outputs and those of the gate."""
        shared, gate = self._operation.shared, self._operation.shared_gate
        if shared is None or gate is None:
            return []
        outputs, gates = self._lowering.rows("shared_outputs", self._plan.hidden_size), self._lowering.rows("gates", 1)
        self._lowering.gemm("linear", self._lowering.widen(x, shared), self._down(shared), outputs)
        self._lowering.gemm("shared_gate", x, FusedLinear((gate,), place="router"), gates)
        return [outputs, gates]

    def _add_shared(self, x: PackedActivations) -> None:
        """Lower a shared expert without a gate, which adds to the output."""
        shared = self._operation.shared
        if shared is not None and self._operation.shared_gate is None:
            inner, target = self._lowering.widen(x, shared), self._target
            epilogue = Epilogue("add", scale=target.scale)
            self._lowering.gemm("linear_add", inner, self._down(shared), target.out, epilogue)

    def _down(self, expert: FeedForward) -> FusedLinear:
        return FusedLinear((expert.down,), place=self._lowering.place_of_down)


def _gates(expert: FeedForward) -> FusedLinear:
    """Return the gate and up of an expert, or its up alone if there is no gate."""
    layers = tuple(layer for layer in (expert.gate, expert.up) if layer is not None)
    return FusedLinear(layers, interleaved=len(layers) > 1)


def _check(operation: Experts, hidden_size: int) -> None:
    """Raise ModelError for a router or experts that no kernel can compute."""
    router, experts = operation.router, operation.experts
    name = router.linear.weight
    if router.linear.outputs != len(experts):
        raise ModelError(f"{name} has {router.linear.outputs} outputs for {len(experts)} experts")
    if len({_sizes(expert) for expert in experts}) != 1:
        raise ModelError(
            f"the experts of {name} must be of equal sizes, with the same activation, and all have gates or none"
        )
    _activation_of(experts[0])
    if any(expert.cutoff is not None for expert in experts):
        raise ModelError(f"the experts of {name} have a cutoff, which only other feed-forward layers may have")
    _check_latents(operation, hidden_size)
    if len(experts) % router.groups or not 1 <= router.top_groups <= router.groups:
        raise ModelError(
            f"{len(experts)} experts of {name} can't be divided into {router.groups} groups (n_group) "
            f"of which {router.top_groups} are chosen (topk_group)"
        )
    candidates = len(experts) // router.groups * router.top_groups
    if not 1 <= router.top_k <= candidates:
        raise ModelError(
            f"{router.top_k} experts for each token (num_experts_per_tok) can't be chosen from {candidates} of {name}"
        )
    if operation.shared is None and operation.shared_gate is not None:
        raise ModelError(f"{operation.shared_gate.weight} gates a shared expert, but there is none")


def _check_latents(operation: Experts, hidden_size: int) -> None:
    """Raise ModelError for experts whose outputs are not as wide as what they add up to."""
    compress, expand, name = operation.compress, operation.expand, operation.router.linear.weight
    outputs, width = operation.experts[0].down.outputs, hidden_size
    if (compress is None) != (expand is None):
        raise ModelError(f"the experts of {name} must have both a layer before and one after them, or neither")
    if compress is not None and expand is not None:
        width = compress.outputs
        if width % TILE_ROWS or expand.outputs != hidden_size:
            raise ModelError(
                f"{compress.weight} has {width} outputs (moe_latent_size) and {expand.weight} {expand.outputs}; they "
                f"must be a multiple of {TILE_ROWS}, and hidden_size, {hidden_size}"
            )
        if operation.shared_gate is not None:
            raise ModelError(f"{operation.shared_gate.weight} gates a shared expert, which {compress.weight} excludes")
    if outputs != width:
        raise ModelError(f"the experts of {name} have {outputs} outputs; they must have {width}")


def _activation_of(expert: FeedForward) -> FixedActivation:
    """Return the activation of an expert. Raises ModelError for one that needs a feed-forward layer without a gate."""
    if isinstance(expert.activation, Xielu):
        raise ModelError(f"{expert.up.weight} belongs to an expert, which xIELU does not support")
    return expert.activation


def _sizes(expert: FeedForward) -> tuple[object, ...]:
    layers = [(layer.outputs, bool(layer.bias)) for layer in (expert.up, expert.down, expert.gate) if layer is not None]
    return (*layers, expert.activation)
