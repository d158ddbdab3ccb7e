"""Lowering of what fetches a step's inputs to memory of the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from quire.kernels._native import CACHE_LINE, MAX_KV_SPLITS, STATE_WRITES, step_input_bytes
from quire.kernels.emit.fetch import FETCH_PARTS, FetchKernel
from quire.kernels.emit.layout import round_up
from quire.kernels.operands import Buffer, Launch, Operand
from quire.kernels.plan import ModelPlan

_DIMS = {
    "positions": "tokens",
    "row_adapters": "tokens",
    "kv_slots": "tokens",
    "entries": "entries",
    "kv_splits": "kv_splits",
    "reductions": "reductions",
    "state_entries": "state_entries",
    "state_writes": "state_writes",
}
"""Inputs that kernels of each layer read, and the dims of their rows."""


def fetch_inputs(plan: ModelPlan) -> None:
    """Have the plan's first launch fetch the inputs that several others read."""
    operands = (operand for launch in plan.launches for operand in launch.operands if isinstance(operand, Buffer))
    uses = Counter(operand for operand in operands if operand.input and operand.name in _DIMS)
    inputs = [operand for operand, count in uses.items() if count > 1]
    if not inputs:
        return
    most_tokens, row_bytes = plan.limits.max_num_batched_tokens, step_input_bytes()
    most_rows = {"kv_splits": MAX_KV_SPLITS, "reductions": MAX_KV_SPLITS, "state_writes": STATE_WRITES * most_tokens}
    copies: dict[Operand, Operand] = {}
    arrays = []
    for operand in inputs:
        dim, size = _DIMS[operand.name], row_bytes[operand.name]
        most = most_rows.get(dim, most_tokens)
        copies[operand] = plan.buffer(f"fetched_{operand.name}", round_up(most * size, CACHE_LINE))
        arrays.append((dim, size))
    kernel = plan.kernel(FetchKernel("fetch", tuple(arrays)))
    fetch = Launch(kernel, (*inputs, *copies.values()), "tokens", most_tokens, FETCH_PARTS * len(inputs))
    for number, launch in enumerate(plan.launches):
        plan.launches[number] = replace(launch, operands=tuple(copies.get(each, each) for each in launch.operands))
    plan.launches.insert(0, fetch)
