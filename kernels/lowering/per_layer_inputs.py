"""Lowering of per-layer inputs, and of the blocks that read them.

The inputs of all layers are f32 rows that live as long as a step: rows of their own embedding, to which the norms of
the projected hidden states are added. A block's gate multiplies by its layer's columns in the epilogue of its product.
"""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.emit.layout import BLOCK
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph, Norm, PerLayerInput, PerLayerInputs
from quire.kernels.lowering.fused import FusedLinear, norm_kernel
from quire.kernels.lowering.linear import Epilogue, LinearLowering
from quire.kernels.operands import Buffer, PackedActivations


def per_layer_rows(lowering: LinearLowering, inputs: PerLayerInputs, layer: int = 0) -> Buffer:
    """Return the rows of the inputs, from the columns of a layer on."""
    return replace(lowering.rows("per_layer_inputs", inputs.embedding.hidden_size), offset=4 * layer * inputs.width)


def add_projections(lowering: LinearLowering, hidden: Buffer, inputs: PerLayerInputs) -> None:
    """Lower what is added to the embedding's rows, which are there."""
    linear, columns = FusedLinear((inputs.projection,), place="small"), inputs.embedding.hidden_size
    projections = lowering.rows("per_layer_projections", columns)
    lowering.gemm("linear", lowering.norm(hidden, None, linear), linear, projections, Epilogue(scale=inputs.scale))
    rows = per_layer_rows(lowering, inputs)
    kernel, operands = norm_kernel("norm_add", inputs.norm, inputs.width, projections, rows)
    kernel = replace(kernel, output="residual", scale=inputs.multiplier)
    lowering.plan.add(kernel, operands, "tokens", repeats=columns // inputs.width)


def lower_per_layer_input(
    lowering: LinearLowering,
    hidden: Buffer,
    before: Norm | None,
    operation: PerLayerInput,
    inputs: PerLayerInputs | None,
) -> PackedActivations:
    """Lower a block up to its last linear layer, whose input is returned."""
    if inputs is None:
        raise ModelError(f"{operation.gate.weight} reads per-layer inputs, but the model's graph has none")
    gate, out = FusedLinear((operation.gate,)), lowering.activations("per_layer_gated", inputs.width)
    factors = per_layer_rows(lowering, inputs, operation.layer)
    epilogue = Epilogue("gating", operation.activation, out_columns=inputs.embedding.hidden_size, factors=factors)
    lowering.gemm("linear_gating", lowering.norm(hidden, before, gate), gate, out.buffer, epilogue)
    return out


def check_per_layer_inputs(graph: Graph) -> None:
    """Raise ModelError for per-layer inputs that no kernel can compute."""
    inputs = graph.per_layer_inputs
    if inputs is None:
        return
    layers = [residual.block.layer for residual in graph.residuals if isinstance(residual.block, PerLayerInput)]
    layers += [] if graph.streams is None else [correction.block.layer for _, correction in graph.streams.layers]
    table, needed = inputs.embedding, inputs.width * (1 + max(layers, default=0))
    if inputs.width % BLOCK or table.hidden_size % inputs.width or table.hidden_size < needed:
        raise ModelError(
            f"config.json: hidden_size_per_layer_input is {inputs.width}; it must be a multiple of {BLOCK}, and "
            f"{table.weight} must have that for each layer: {needed} columns, not {table.hidden_size}"
        )
    if table.vocab_size < graph.embedding.vocab_size and not table.first_for_others:
        raise ModelError(
            f"config.json: vocab_size_per_layer_input is {table.vocab_size}; it must be at least vocab_size, "
            f"{graph.embedding.vocab_size}"
        )
    if graph.features is not None and graph.features.lookahead:
        raise ModelError(f"a draft head's lookahead token has no row in {table.weight}; choose another draft head")
