"""Lowering of streams of hidden states, and of what residual blocks have beside them in such models.

While a layer runs, its residual blocks change the hidden states, and the first stream keeps what they were before. The
layers of streams, and those of low rank, are quantized only where the checkpoint has them so, as in llama.cpp.
"""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.emit.layout import TILE_ROWS
from quire.kernels.emit.streams import CorrectKernel, PredictKernel, RescaleKernel, StreamRouteKernel
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import (
    Graph,
    Laurel,
    Linear,
    Norm,
    PerLayerInputs,
    StreamCorrection,
    StreamPrediction,
    StreamRouter,
    Streams,
)
from quire.kernels.lowering.fused import FusedLinear, norm_kernel
from quire.kernels.lowering.linear import Epilogue, LinearLowering
from quire.kernels.lowering.per_layer_inputs import lower_per_layer_input
from quire.kernels.operands import Buffer, Operand, Vector

MAX_STREAMS = 8


def expand_streams(lowering: LinearLowering, hidden: Buffer, streams: Streams) -> None:
    """Lower the expansion of the hidden states to streams, before the first layer."""
    layers = [_small(layer) for layer in streams.expand]
    x = lowering.norm(hidden, None, *layers)
    for linear, rows in zip(layers, _streams(lowering, streams.count)[1:], strict=True):
        lowering.gemm("linear", x, linear, rows)
        _rescale(lowering, hidden, rows)


def contract_streams(lowering: LinearLowering, hidden: Buffer, streams: Streams) -> None:
    """Lower the contraction of the streams to hidden states, after the last layer."""
    others = _streams(lowering, streams.count)[1:]
    for layer, rows in zip(streams.contract, others, strict=True):
        linear = _small(layer)
        lowering.gemm("linear", lowering.norm(rows, None, linear), linear, rows)
        _rescale(lowering, hidden, rows)
    for number, rows in enumerate(others, 1):
        add_rows(lowering, rows, hidden, sum_scale=1 / streams.count if number == len(others) else 1.0)


def predict(lowering: LinearLowering, hidden: Buffer, operation: StreamPrediction, count: int) -> None:
    """Lower the predict step of AltUp, before a layer."""
    width = lowering.plan.hidden_size
    factors = _factors(lowering, hidden, operation.router, operation.coefficients)
    operands = [factors, hidden, *_streams(lowering, count)]
    lowering.plan.add(PredictKernel("predict", width, count), operands, "tokens")


def correct(
    lowering: LinearLowering, hidden: Buffer, operation: StreamCorrection, count: int, inputs: PerLayerInputs | None
) -> None:
    """Lower the correct step of AltUp, after a layer."""
    width, streams = lowering.plan.hidden_size, _streams(lowering, count)
    factors = _factors(lowering, hidden, operation.router, operation.coefficients)
    operands: list[Operand] = [factors, hidden, *streams]
    read = hidden
    if operation.scales:
        read = lowering.rows("stream_scaled", width)
        operands += [Vector((operation.scales,), (width,)), read]
    lowering.plan.add(CorrectKernel("correct", width, count, bool(operation.scales)), operands, "tokens")
    x = lower_per_layer_input(lowering, read, None, operation.block, inputs)
    output = lowering.rows("block_output", width)
    lowering.gemm("linear", x, FusedLinear((operation.block.project,)), output)
    for rows in streams[1:]:
        add_rows(lowering, output, rows, operation.after)


def lower_laurel(lowering: LinearLowering, hidden: Buffer, before: Norm | None, operation: Laurel) -> Buffer:
    """Lower the low-rank branch of a block, and return its rows."""
    width, left, right = lowering.plan.hidden_size, _small(operation.left), _small(operation.right)
    rows, output = lowering.rows("laurel", width), lowering.rows("block_output", width)
    kernel, operands = norm_kernel("norm", before, width, hidden, rows)
    lowering.plan.add(replace(kernel, output="hidden"), operands, "tokens")
    rank = operation.left.outputs
    short = lowering.rows("laurel_rank", rank)
    lowering.gemm("linear", lowering.norm(hidden, before, left), left, short)
    x = lowering.norm(short, None, right, width=rank, name=f"laurel_rank_{rank}")
    lowering.gemm("linear", x, right, output)
    add_rows(lowering, output, rows, operation.norm)
    return rows


def add_rows(
    lowering: LinearLowering, rows: Buffer, out: Buffer, norm: Norm | None = None, *, sum_scale: float = 1.0
) -> None:
    """Lower the addition of rows, or of their norm, to others, and the multiplication of the sum."""
    kernel, operands = norm_kernel("norm_add", norm, lowering.plan.hidden_size, rows, out)
    lowering.plan.add(replace(kernel, output="residual", sum_scale=sum_scale), operands, "tokens")


def check_streams(graph: Graph) -> None:
    """Raise ModelError for streams that no kernel can compute, and for layers beside blocks."""
    for residual in graph.residuals:
        if (laurel := residual.laurel) is None:
            continue
        if residual.before is None or residual.around is not None:
            raise ModelError(f"{laurel.left.weight} belongs to a block, which must have a norm before it, none around")
        if laurel.left.outputs % TILE_ROWS:
            raise ModelError(f"config.json: laurel_rank is {laurel.left.outputs}; it must be a multiple of {TILE_ROWS}")
    if (streams := graph.streams) is None:
        return
    if not 2 <= streams.count <= MAX_STREAMS:
        raise ModelError(f"config.json: altup_num_inputs is {streams.count}; it must be from 2 to {MAX_STREAMS}")
    if len(streams.layers) != graph.num_layers:
        raise ModelError(f"{len(streams.layers)} layers are to change the streams of {graph.num_layers}")
    if graph.features is not None:
        raise ModelError("a draft head can't read the hidden states of a model with streams; choose another proposer")


def _small(layer: Linear) -> FusedLinear:
    return FusedLinear((layer,), place="small")


def _streams(lowering: LinearLowering, count: int) -> list[Buffer]:
    return [lowering.rows(f"stream_{number}", lowering.plan.hidden_size) for number in range(count)]


def _factors(lowering: LinearLowering, hidden: Buffer, router: StreamRouter, coefficients: Linear) -> Buffer:
    """Lower a router and the layer that reads it, and return the rows of that."""
    first, second = _small(router.linear), _small(coefficients)
    count = router.linear.outputs
    routed, factors = lowering.rows("stream_routers", count), lowering.rows("stream_factors", coefficients.outputs)
    lowering.gemm("linear", lowering.norm(hidden, router.norm, first), first, routed, Epilogue(scale=router.scale))
    x = lowering.activations("stream_routed", count)
    lowering.plan.add(StreamRouteKernel("stream_route", count), [routed, x.buffer], "tokens")
    lowering.gemm("linear", x, second, factors)
    return factors


def _rescale(lowering: LinearLowering, hidden: Buffer, rows: Buffer) -> None:
    """Lower the scaling of rows to the root mean square of the hidden states."""
    lowering.plan.add(RescaleKernel("rescale", lowering.plan.hidden_size), [hidden, rows], "tokens")
