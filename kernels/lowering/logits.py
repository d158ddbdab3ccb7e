"""Lowering of the head: the norm before it, its product, and the columns that adapters have of their own."""

from __future__ import annotations

from quire.kernels._native import SampledRow, SampleRow
from quire.kernels.adapted import AdaptedProduct
from quire.kernels.emit.layout import BLOCK, TILE_ROWS, round_up
from quire.kernels.emit.own_columns import BLOCKS_PER_ITEM, OwnColumnsKernel
from quire.kernels.emit.rows import SpreadKernel
from quire.kernels.emit.sampling import SampleKernel
from quire.kernels.graph.operations import Logits
from quire.kernels.lowering.fused import FusedLinear
from quire.kernels.lowering.linear import Epilogue, LinearLowering, row_adapters
from quire.kernels.operands import Buffer, PackedActivations, TokenNumbers
from quire.kernels.plan import LOGIT_ROWS_AT_ONCE, ModelPlan


def lower_logits(lowering: LinearLowering, hidden: Buffer, operation: Logits, head: FusedLinear) -> None:
    """Lower the logits of the hidden states."""
    plan = lowering.plan
    x, logits = lowering.norm(hidden, operation.norm, head), Buffer("logits", input=True)
    epilogue = Epilogue(scale=operation.scale, softcap=operation.softcap)
    if not operation.offsets:
        product = lowering.gemm("logits", x, head, logits, epilogue)
        if product is not None:
            _own_columns(plan, x, head, product, logits, epilogue)
    else:
        _spread(lowering, x, operation, head, epilogue)
    if plan.context.capabilities.samples:
        _sample(plan, logits)


def _sample(plan: ModelPlan, logits: Buffer) -> None:
    """Lower sampling of all rows of logits, and that of one row once more, whose request follows theirs."""
    kernel = SampleKernel("sample", plan.vocab_size)
    others = [Buffer(name, input=True) for name in ("logit_edits", "token_masks", "changed_logits")]
    for first in (0, plan.logit_rows):
        asked = Buffer("sample_rows", input=True, offset=first * SampleRow.BYTES)
        sampled = Buffer("sampled_rows", input=True, offset=first * SampledRow.BYTES)
        plan.add(kernel, [logits, asked, sampled, *others], "logit_rows")
    plan.resampling.append(plan.launches.pop())


def _spread(
    lowering: LinearLowering, x: PackedActivations, operation: Logits, head: FusedLinear, epilogue: Epilogue
) -> None:
    """Lower the logits of some tokens of the vocabulary."""
    plan, logits = lowering.plan, Buffer("logits", input=True)
    outputs = operation.linear.outputs
    few = lowering.rows("few_logits", outputs, count=LOGIT_ROWS_AT_ONCE)
    lowering.gemm("logits", x, head, few, epilogue)
    tokens = TokenNumbers(operation.offsets, outputs, plan.vocab_size)
    plan.add(SpreadKernel("spread", outputs, plan.vocab_size), [few, tokens, logits], "logit_rows")


def _own_columns(
    plan: ModelPlan, x: PackedActivations, head: FusedLinear, product: AdaptedProduct, logits: Buffer,
    epilogue: Epilogue,
) -> None:  # fmt: skip
    """Lower the logits of rows whose adapters have columns of the head of their own."""
    matrix, table = product.matrix, product.own_columns
    assert table is not None
    padded = plan.buffers[x.floats.name].bytes + (TILE_ROWS - 1) * BLOCK * plan.dtypes.activation_bytes
    plan.buffer(x.floats.name, padded)
    biases = [] if product.biases is None else [product.biases]
    operands = [x.floats, logits, *biases, *row_adapters(head), product.table, product.short, table]
    kernel = OwnColumnsKernel(
        "own_columns", matrix.k, matrix.n, bias=bool(biases), dim=head.dim, scale=epilogue.scale,
        softcap=epilogue.softcap, adapter_tiles=product.tiles, rows=LOGIT_ROWS_AT_ONCE,
    )  # fmt: skip
    items = -(-round_up(matrix.n, BLOCK) // (BLOCK * BLOCKS_PER_ITEM))
    plan.add(kernel, operands, head.dim, rows_per_item=LOGIT_ROWS_AT_ONCE, repeats=items)
