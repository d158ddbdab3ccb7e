"""A plan in memory: compiled kernels, packed weights, and buffers."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.kernels._native import (
    MASK_BITS,
    ROW_MASKS,
    KvLayerShape,
    LogitEdit,
    Plan,
    Runner,
    RunnerConfig,
    StateShape,
    edit_limit,
)
from quire.kernels.adapters.packing import PackedAdapter
from quire.kernels.devices import Device
from quire.kernels.emit.context import Kernel
from quire.kernels.emit.layout import BLOCK, round_up
from quire.kernels.kv_file import KvFile
from quire.kernels.kv_size import KvSize
from quire.kernels.memory import MemoryPlan
from quire.kernels.operands import Launch, Memory
from quire.kernels.plan import ModelPlan
from quire.kernels.weights.loader import Loader

Progress = Callable[[str, int, int], None]
"""Called as progress(task, done, total)."""

Rows = npt.NDArray[np.float32]

_FIRST_SNAPSHOT = 8
"""Pages of a long prompt before its first snapshot, and at least as many as take the memory of one."""

logger = logging.getLogger(__name__)


@dataclass
class Assembly:
    """A plan in memory: addresses of its compiled kernels, packed weights and buffers. `open_kv` completes it."""

    native: Runner
    device: Device  # owns the code and the memory that launches point to
    plan: ModelPlan
    loader: Loader
    memory_plan: MemoryPlan
    size: KvSize
    kv_file: KvFile | None  # None: the KV ends with the runner
    has_host_tier: bool = False
    kernels: dict[Kernel, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)

    def rows(self, name: str, columns: int, count: int | None = None) -> Rows:
        """Return a view of a buffer of f32 rows, one for each token of a step, or `count`."""
        shape = count or self.plan.limits.max_num_batched_tokens, round_up(columns, BLOCK)
        memory = (ctypes.c_float * math.prod(shape)).from_address(self.buffers[name])
        return np.ctypeslib.as_array(memory).reshape(shape)[:, :columns]

    def compile(self, progress: Progress | None) -> None:
        """Compile every kernel of the plan."""
        self.kernels = compile_kernels(self.plan, self.device, progress)

    def allocate(self) -> None:
        """Allocate the plan's buffers; the buffers of a step's inputs belong to the native runner."""
        native, exchanged = self.device.native, self.plan.exchanged
        for buffer in self.plan.buffers.values():
            allocate = native.allocate_exchanged if buffer.name in exchanged else native.allocate
            self.buffers[buffer.name] = allocate(buffer.bytes)
        self.buffers.update(self.native.inputs)

    @property
    def memory(self) -> Memory:
        """Addresses of the plan's operands."""
        return Memory(self.buffers, self.loader.addresses, self.native.kv_layer, self.native.states)

    @property
    def kv_model(self) -> str:
        """Name of all that the bits of KV depend on besides tokens; empty if the KV ends with the runner."""
        return "" if self.kv_file is None else self.kv_file.model

    def open_kv(self) -> None:
        """Map KV memory, and hand the launches to the native runner. Raises ModelError if another engine has the file.

        Until then another engine may have it, and work on.
        """
        if self.kv_file is not None:
            self.kv_file.prepare(self.size.pages, self.size.records)
        self.native.open_kv()
        for launch in self.plan.launches:
            self.add(self.native.head if launch.head else self.native.body, launch, self.memory)
        for launch in self.plan.hidden_states:
            self.add(self.native.hidden_states, launch, self.memory)
        for launch in self.plan.encoding:
            self.add(self.native.encoding, launch, self.memory)
        for launch in self.plan.resampling:
            self.add(self.native.resampling, launch, self.memory)

    def set_adapter(self, number: int, packed: PackedAdapter | None) -> None:
        """Write an adapter's entries to all tables, or empty ones."""
        for index, adapted in enumerate(self.plan.adapted):
            size = adapted.entry_bytes
            entry = np.zeros(size // 8, np.int64) if packed is None else packed.entries[index]
            self.device.native.write(self.buffers[adapted.table.name] + number * size, entry)

    def add(self, target: Plan, launch: Launch, memory: Memory) -> None:
        """Append a launch to a native plan."""
        operands = [operand.address(memory) for operand in launch.operands]
        sizes = (launch.rows_per_item, launch.repeats, launch.copies, launch.groups)
        target.add(self.kernels[launch.kernel], operands, launch.dim, *sizes)


def compile_kernels(plan: ModelPlan, device: Device, progress: Progress | None) -> dict[Kernel, int]:
    """Compile every kernel of a plan; return the numbers, or addresses, by which launches name them."""
    kernels = {}
    compiled = device.compile(plan.kernels, plan.context)
    for done, (kernel, number) in enumerate(zip(plan.kernels, compiled, strict=True), 1):
        kernels[kernel] = number
        if progress is not None and device.compiled:
            progress("compiling kernels", done, len(plan.kernels))
    for entry in device.rejected:
        logger.warning("kernel cache: %s; compiled again", entry)
    return kernels


def logits_shape(plan: ModelPlan) -> tuple[int, int]:
    """Return the rows of logits computed at once, and their stride, 0 for a model without logits."""
    stride = round_up(plan.vocab_size, BLOCK) if any(launch.head for launch in plan.launches) else 0
    return plan.logit_rows, stride


def logits_bytes(plan: ModelPlan) -> int:
    """Return the bytes of rows of logits and of hidden states, and of what a device reads to sample from the former."""
    rows, stride = logits_shape(plan)
    size = rows * 4 * (stride + plan.hidden_size)
    if not (stride and plan.context.capabilities.samples):
        return size
    masks = ROW_MASKS * rows * stride // MASK_BITS
    return size + 4 * (rows * stride + masks) + edit_limit(plan.vocab_size) * LogitEdit.BYTES


def open_runner(
    plan: ModelPlan, device: Device, size: KvSize, file: KvFile | None = None, *, sealed_queues: int = 0
) -> Runner:
    """Return a native runner for the plan. Raises ModelError if there is no such device."""
    state = None
    if plan.state_bytes:
        first = max(_FIRST_SNAPSHOT, plan.state_bytes // plan.page_bytes)
        state = StateShape(
            record_bytes=plan.state_bytes, num_records=size.records, snapshot_pages=first, piece_bytes=plan.page_bytes
        )
    limits = plan.limits
    kv_layers = [
        KvLayerShape(heads=layout.heads.kv, tile_bytes=layout.tile_bytes, value_offset=layout.value_offset)
        for layout in plan.kv_layouts
    ]
    logit_rows, logit_stride = logits_shape(plan)
    config = RunnerConfig(
        num_pages=size.pages, block_size=limits.block_size, vocab_size=plan.vocab_size,
        max_num_batched_tokens=limits.max_num_batched_tokens, max_logit_rows=logit_rows, logit_stride=logit_stride,
        hidden_size=plan.hidden_size, tokens_per_entry=plan.tokens_per_entry, kv_layers=kv_layers, state=state,
        window=plan.window,
        bidirectional=plan.is_encoder, samples_on_device=plan.context.capabilities.samples,
        lookahead=plan.features is not None and plan.features.lookahead,
        kv_memory_fd=None if file is None else file.fd, kv_model="" if file is None else file.model,
        sealed_queues=sealed_queues,
    )  # fmt: skip
    return Runner(config, device.native)
