"""Inputs of a step that is run launch by launch, without the native runner's sequences."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from quire.kernels.assembly import Assembly
from quire.kernels.emit.kv import KV_TILE
from quire.kernels.work import Step


class StepInputs:
    """Inputs of a step, written to the runner's memory, and its `dims`. Pages and states are numbered from 0 on."""

    def __init__(
        self, assembly: Assembly, step: Step, token_ids: npt.NDArray[np.int32], records: int | None = None
    ) -> None:
        """Write the inputs of a step that computes `token_ids`, i32 [tokens].

        Sequences have records of state of their own, or with `records` they take so many in turns.
        """
        plan, chunks = assembly.plan, step.chunks
        size, at_once = plan.limits.block_size, plan.tokens_per_entry
        counts = [-(-chunk.end // size) for chunk in chunks]
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        self.pages = sum(counts)
        self._table = np.arange(self.pages, dtype=np.int32)  # entries point into it
        positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        slots = [first * size + places for first, places in zip(firsts, positions, strict=True)]
        entries: list[tuple[int, int, int, int, int]] = []
        states, writes = [], []
        row = 0
        for number, (chunk, first) in enumerate(zip(chunks, firsts, strict=True)):
            record = number % (records or len(chunks)) * plan.state_bytes
            states.append((row, record if chunk.start else -1, number, 1))
            writes.append((row + chunk.tokens, record))
            table = assembly.device.native.page_list(self._table[first:])
            for done in range(0, chunk.tokens, at_once):
                tokens, position = min(at_once, chunk.tokens - done), chunk.start + done
                context = chunk.end if plan.is_encoder else position + tokens
                entries.append((row + done, tokens, position, table, context))
            row += chunk.tokens
        arrays: dict[str, npt.NDArray[np.int32] | npt.NDArray[np.int64]] = {
            "token_ids": token_ids,
            "positions": np.concatenate(positions).astype(np.int32),
            "kv_slots": np.concatenate(slots).astype(np.int64),
            "entries": np.array(entries, np.int64),
            "logit_rows": np.arange(step.tokens - step.logit_rows, step.tokens, dtype=np.int32),
        }
        if plan.state_bytes:
            arrays |= {"state_entries": np.array(states, np.int64), "state_writes": np.array(writes, np.int64)}
        for name, array in arrays.items():
            ctypes.memmove(assembly.native.inputs[name], array.ctypes.data, array.nbytes)
        sizes = {
            "tokens": step.tokens,
            "logit_rows": step.logit_rows,
            "max_num_batched_tokens": plan.limits.max_num_batched_tokens,
            "kv_tiles": self.pages * size // KV_TILE,
            "state_entries": len(states) if plan.state_bytes else 0,
            "state_writes": len(writes) if plan.state_bytes else 0,
        }
        self.dims = assembly.native.split_attention(sizes | {"entries": len(entries)})
