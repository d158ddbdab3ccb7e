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
    "positions": ("tokens", 1),
    "row_adapters": ("tokens", 1),
    "kv_slots": ("tokens", 1),
    "entries": ("entries", 1),
    "kv_splits": ("kv_splits", 1),
    "reductions": ("reductions", 1),
    "state_entries": ("state_entries", 1),
    "state_writes": ("tokens", STATE_WRITES),
}
"""Inputs that kernels of each layer read: the dim of their rows, and how many there are at most for each."""


def fetch_inputs(plan: ModelPlan) -> None:
    """Have the plan's first launch fetch the inputs that several others read."""
    operands = (operand for launch in plan.launches for operand in launch.operands if isinstance(operand, Buffer))
    uses = Counter(operand for operand in operands if operand.input and operand.name in _DIMS)
    inputs = [operand for operand, count in uses.items() if count > 1]
    if not inputs:
        return
    most_tokens, row_bytes = plan.limits.max_num_batched_tokens, step_input_bytes()
    copies: dict[Operand, Operand] = {}
    arrays = []
    for operand in inputs:
        dim, count = _DIMS[operand.name]
        most = MAX_KV_SPLITS if dim in ("kv_splits", "reductions") else most_tokens
        size = count * row_bytes[operand.name]
        copies[operand] = plan.buffer(f"fetched_{operand.name}", round_up(most * size, CACHE_LINE))
        arrays.append((dim, size))
    kernel = plan.kernel(FetchKernel("fetch", tuple(arrays)))
    fetch = Launch(kernel, (*inputs, *copies.values()), "tokens", most_tokens, FETCH_PARTS * len(inputs))
    for number, launch in enumerate(plan.launches):
        plan.launches[number] = replace(launch, operands=tuple(copies.get(each, each) for each in launch.operands))
    plan.launches.insert(0, fetch)
