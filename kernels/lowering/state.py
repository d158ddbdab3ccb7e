"""Lowering of layers that keep a state in place of keys and values."""

from __future__ import annotations

import math

from quire.kernels.attention_heads import StateHeads
from quire.kernels.emit.convolution import CHANNELS_PER_ITEM, ConvolutionKernel
from quire.kernels.emit.gates import GatedNormKernel
from quire.kernels.emit.layout import TILE_ROWS, round_up
from quire.kernels.emit.state_update import StateRatesKernel, StateUpdateKernel, UnitHeadsKernel, state_bytes
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Convolution, DeltaNet, Norm, ShortConvolution, StateSpace
from quire.kernels.lowering.fused import FusedLinear
from quire.kernels.lowering.linear import LinearLowering
from quire.kernels.operands import Buffer, DecayRates, Operand, PackedActivations, Taps, Vector

_UNIT_EPSILON = 1e-6
_MOST_TAPS = 64  # each is an operand in a kernel's code
_LARGEST_KEY = 4096  # a work item has 16 columns of its matrix on the stack, 64 bytes for each element of a key
_MOST_VALUE_HEADS = 65536  # a work item has 8 bytes for each on the stack


class StateLowering:
    """Appends the launches of a layer with state, up to its last linear layer."""

    def __init__(self, lowering: LinearLowering, hidden: Buffer, before: Norm | None) -> None:
        self._lowering, self._plan = lowering, lowering.plan
        self._hidden, self._before = hidden, before

    def short_convolution(self, operation: ShortConvolution) -> PackedActivations:
        """Lower a convolution between two gates."""
        channels, projection = operation.convolution.channels, FusedLinear((operation.projection,))
        rows = self._lowering.project("state_inputs", self._hidden, self._before, projection)
        out = self._convolve(operation.convolution, rows, 3 * channels, gated=True)
        return self._lowering.norm(out, None, FusedLinear((operation.output,)), width=channels)

    def delta_net(self, operation: DeltaNet) -> PackedActivations:
        """Lower a gated delta rule."""
        heads = operation.heads
        _check_heads(heads)
        columns = heads.channels + heads.value_columns
        rows, rates = self._project(operation, columns)
        width = operation.rates[0].outputs
        kernel = StateRatesKernel("state_rates", heads.values, width, 0, operation.rate_group, steps=True)
        pairs = self._rates(kernel, [rates[-1], rates[0]], operation.decay, operation.bias)
        mixed = self._convolve(operation.convolution, rows, columns)
        unit = UnitHeadsKernel("unit_heads", heads, heads.channels, 1.0 / math.sqrt(heads.key), _UNIT_EPSILON)
        self._plan.add(unit, [mixed], "tokens", repeats=2 * heads.keys)
        update = StateUpdateKernel(
            "state_update", heads, heads.channels, queries=0, keys=heads.key_columns, values=2 * heads.key_columns,
            delta=True,
        )  # fmt: skip
        out = self._update(update, mixed, pairs)
        norm = GatedNormKernel(
            "gated_norm", heads.value_columns, heads.value, heads.value, columns, heads.channels, operation.norm.epsilon
        )
        return self._gated_norm(norm, operation.norm, out, rows)

    def state_space(self, operation: StateSpace) -> PackedActivations:
        """Lower a selective state space."""
        heads, projection = operation.heads, operation.projection
        _check_heads(heads)
        gates, columns = heads.value_columns, projection.outputs
        rows = self._lowering.project("state_inputs", self._hidden, self._before, FusedLinear((projection,)))
        kernel = StateRatesKernel(
            "state_rates", heads.values, columns, gates + heads.channels, scale=operation.time_scale,
            least=operation.least, most=operation.most,
        )  # fmt: skip
        pairs = self._rates(kernel, [rows], operation.decay, operation.bias)
        mixed = self._convolve(operation.convolution, rows, columns, first=gates)
        keys = heads.value_columns
        update = StateUpdateKernel(
            "state_update", heads, heads.channels, queries=keys + heads.key_columns, keys=keys, values=0, skip=True
        )
        out = self._update(update, mixed, pairs, Vector((operation.skip,), (heads.values,)))
        group, norm = gates // operation.norm_groups, operation.norm
        if gates % operation.norm_groups or group % TILE_ROWS:
            raise ModelError(
                f"{gates} columns of a gated norm can't be divided into {operation.norm_groups} groups of tiles"
            )
        gate = GatedNormKernel(
            "gated_norm", gates, group, gates, columns, 0, norm.epsilon if norm is not None else 0.0,
            operation.gate_first, norm is not None, operation.gate_scale,
        )  # fmt: skip
        return self._gated_norm(gate, norm, out, rows)

    def _project(self, operation: DeltaNet, columns: int) -> tuple[Buffer, list[Buffer]]:
        """Lower the projections, all but the rates side by side; return the rows of these, and those of each rate."""
        lowering, projections = self._lowering, FusedLinear(operation.projections)
        rates = [FusedLinear((layer,), place="router") for layer in operation.rates]
        runs = lowering.runs(projections, self._plan.hidden_size)
        x = lowering.norm(self._hidden, self._before, *runs, *rates)
        rows = [lowering.rows(f"state_rates_{number}", rate.layers[0].outputs) for number, rate in enumerate(rates)]
        for rate, out in zip(rates, rows, strict=True):
            lowering.gemm("linear", x, rate, out)
        return lowering.multiply("state_inputs", x, runs, columns), rows

    def _convolve(
        self, operation: Convolution, rows: Buffer, columns: int, *, first: int = 0, gated: bool = False
    ) -> Buffer:
        """Lower a convolution of columns of the rows, from number `first` on."""
        channels, taps = operation.channels, operation.taps
        if channels % TILE_ROWS or first % TILE_ROWS or not 2 <= taps <= _MOST_TAPS:
            raise ModelError(
                f"{operation.weight} has {channels} channels and {taps} taps; they must be a multiple of {TILE_ROWS}, "
                f"and from 2 to {_MOST_TAPS}"
            )
        out = self._lowering.rows("convolved", channels)
        kernel = ConvolutionKernel(
            "convolution", channels, taps, columns, first, operation.activation, bool(operation.bias), gated
        )
        state, weight = (
            self._plan.take_state((taps - 1) * channels * 4),
            Taps(operation.weight, channels, taps, operation.scales),
        )
        operands: list[Operand] = [*_ENTRIES, rows, state, weight, out]
        if operation.bias:
            operands.append(Vector((operation.bias,), (channels,)))
        self._plan.add(kernel, operands, "state_entries", repeats=-(-channels // CHANNELS_PER_ITEM))
        return out

    def _rates(self, kernel: StateRatesKernel, rows: list[Buffer], decay: str, bias: str) -> Buffer:
        out = self._lowering.rows("state_decays", 2 * round_up(kernel.values, TILE_ROWS))
        biases = Vector((bias,), (kernel.values,))
        self._plan.add(kernel, [*rows, DecayRates(decay, kernel.values), biases, out], "tokens")
        return out

    def _update(self, kernel: StateUpdateKernel, rows: Buffer, rates: Buffer, *skip: Operand) -> Buffer:
        heads = kernel.heads
        out, state = (
            self._lowering.rows("state_outputs", heads.value_columns),
            self._plan.take_state(state_bytes(heads)),
        )
        operands = [*_ENTRIES, rows, rates, state, out, *skip]
        self._plan.add(kernel, operands, "state_entries", repeats=heads.values * (heads.value // TILE_ROWS))
        return out

    def _gated_norm(self, kernel: GatedNormKernel, norm: Norm | None, rows: Buffer, gates: Buffer) -> PackedActivations:
        out = self._lowering.activations("state_mixed", kernel.width)
        operands: list[Operand] = [rows, gates, out.buffer]
        if norm is not None:
            operands.append(Vector((norm.weight,), (kernel.weights,), offset=norm.weight_offset))
        self._plan.add(kernel, operands, "tokens", repeats=kernel.width // kernel.group)
        return out


_ENTRIES = Buffer("state_entries", input=True), Buffer("state_writes", input=True)


def _check_heads(heads: StateHeads) -> None:
    """Raise ModelError for heads that no kernel can compute."""
    if heads.key % TILE_ROWS or heads.value % TILE_ROWS or heads.values % heads.keys:
        raise ModelError(
            f"layers with state have {heads.values} value heads of {heads.value} elements, and {heads.keys} key heads "
            f"of {heads.key}; there must be a multiple of value heads, and of {TILE_ROWS} elements each"
        )
    if heads.key > _LARGEST_KEY or heads.values > _MOST_VALUE_HEADS:
        raise ModelError(
            f"layers with state have {heads.values} value heads and key heads of {heads.key} elements; there may be up "
            f"to {_MOST_VALUE_HEADS} value heads, and up to {_LARGEST_KEY} elements"
        )
