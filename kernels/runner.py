"""Loads a model and runs its steps: what the engine core sees of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.kernels import host
from quire.kernels._native import (
    Constraint,
    Jit,
    Matcher,
    Plan,
    PoolingConfig,
    Runner,
    SamplingConfig,
    Sequences,
    TokenMask,
    Vocabulary,
)
from quire.kernels.config import ModelConfig
from quire.kernels.emit.attention import Attention, tokens_per_entry
from quire.kernels.emit.gemm import Gemm
from quire.kernels.emit.layout import BLOCK, round_up
from quire.kernels.emit.products import Products
from quire.kernels.emit.value import BF16, F32, I8
from quire.kernels.errors import ModelError
from quire.kernels.models import build_plan
from quire.kernels.operands import Buffer, Kernel, KvLayer, Launch, Operand
from quire.kernels.options import (
    LoadOptions,
    check_options,
    choose_limits,
    choose_num_pages,
    choose_numbers,
    choose_threads,
)
from quire.kernels.plan import PlanBuilder
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.loader import Loader, check, weights_of
from quire.kernels.weights.quantization import choose_quantization

__all__ = [
    "Assembly",
    "Constraint",
    "Matcher",
    "ModelRunner",
    "PoolingConfig",
    "Progress",
    "SamplingConfig",
    "Sequences",
    "TokenMask",
    "Vocabulary",
    "assemble",
    "describe",
    "load_model",
    "plan_of",
]

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total)."""

_KV_DTYPES = {BF16: "bfloat16", F32: "float32", I8: "int8"}

LOGIT_ROWS_AT_ONCE = 128
"""Rows of logits that are held at once; a step that wants more computes them in turns."""


class ModelRunner:
    """A loaded model. Sequences are opened in slots; `step` extends them. Not for use by two threads at once.

    `sequences`, `step`, `collect` and `fork` are the native runner's: see native/kv_cache/sequences.h and
    native/compute/runner.h.
    """

    def __init__(
        self, native: Runner, jit: Jit, loader: Loader, plan: PlanBuilder, options: LoadOptions, *, pages: int
    ) -> None:
        self._native = native
        self._owners = (jit, loader)  # of the code and the mapped weights that the plan's launches point to
        checkpoint = loader.checkpoint
        self.architecture = ModelConfig(checkpoint.config).architecture
        self.vocab_size = plan.vocab_size
        self.hidden_size = plan.hidden_size
        self.max_model_len = plan.limits.max_model_len
        self.attention_context = plan.attention_context
        self.page_size = plan.limits.page_size
        self.num_pages = pages
        self.kv_dtype = _KV_DTYPES[plan.numbers.kv.weights]
        self.kv_bytes = pages * plan.page_bytes
        self.max_num_seqs = options.max_num_seqs
        self.eos_token_ids = checkpoint.eos_token_ids()
        self.sequences = native.sequences
        self.step = native.step
        self.collect = native.collect
        self.fork = native.fork

    @property
    def threads(self) -> int:
        """Threads that compute a step."""
        return self._native.threads


@dataclass
class Assembly:
    """A plan in memory: the addresses of its compiled kernels, packed weights and buffers."""

    native: Runner
    jit: Jit  # owns the code that launches point to
    plan: PlanBuilder
    loader: Loader
    kernels: dict[Kernel, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)

    def compile(self, isa: str, progress: Progress | None) -> None:
        """Compiles every kernel of the plan."""
        products = Products(isa, self.plan.numbers)
        for done, kernel in enumerate(self.plan.kernels, 1):
            text = kernel.emit(products) if isinstance(kernel, Gemm | Attention) else kernel.emit(self.plan.numbers)
            self.kernels[kernel] = self.jit.compile(text, [kernel.name])[0]
            if progress is not None and self.jit.compiled:
                progress("compiling kernels", done, len(self.plan.kernels))

    def allocate(self) -> None:
        """Allocates the buffers of the plan; those of a step's inputs are the native runner's."""
        self.buffers = {b.name: self.native.allocate(b.bytes) for b in self.plan.buffers.values()}
        self.buffers.update(self.native.inputs)

    def add_launches(self) -> None:
        """Hands the launches to the native runner."""
        for launch in self.plan.launches:
            self._add(self.native.head if launch.head else self.native.body, launch)
        for launch in self.plan.states:
            self._add(self.native.states, launch)

    def _add(self, target: Plan, launch: Launch) -> None:
        operands = [self.address(o) for o in launch.operands]
        target.add(self.kernels[launch.kernel], operands, launch.dim, launch.per, launch.times)

    def address(self, operand: Operand) -> int:
        """Where the operand lies."""
        if isinstance(operand, Buffer):
            return self.buffers[operand.name]
        if isinstance(operand, KvLayer):
            return self.native.kv_layer(operand.layer)
        return self.loader.addresses[operand]


def plan_of(options: LoadOptions, checkpoint: Checkpoint) -> PlanBuilder:
    """The plan of a checkpoint, which is checked to have all that the plan needs; reads no weights."""
    check_options(options)
    config = ModelConfig(checkpoint.config)
    quantization = choose_quantization(options.quantization, checkpoint, config)
    quantized = quantization.scheme is not None
    numbers = choose_numbers(options, checkpoint, quantized, host.choose_isa(options.isa).name)
    plan = PlanBuilder(numbers, choose_limits(options, config), quantization)
    build_plan(plan, config)
    check(quantization, weights_of(plan))
    return plan


def describe(options: LoadOptions) -> tuple[PlanBuilder, Checkpoint]:
    """The plan of a checkpoint folder, and the checkpoint; reads no weights."""
    checkpoint = Checkpoint(options.model)
    return plan_of(options, checkpoint), checkpoint


def assemble(plan: PlanBuilder, options: LoadOptions, progress: Progress | None = None) -> Assembly:
    """The plan in memory: weights packed, kernels compiled, KV memory mapped."""
    numbers, limits, heads = plan.numbers, plan.limits, plan.heads
    logit_rows, logit_stride = min(LOGIT_ROWS_AT_ONCE, limits.capacity), round_up(plan.vocab_size, BLOCK)
    row_bytes = 4 * (logit_stride + plan.hidden_size)
    other_bytes = plan.weight_bytes + sum(b.bytes for b in plan.buffers.values()) + logit_rows * row_bytes
    pages = choose_num_pages(options, limits, plan.page_bytes, other_bytes, parts=plan.layers * heads.kv)
    native = Runner(
        threads=choose_threads(options), pin=options.pin_threads, num_pages=pages, page_size=limits.page_size,
        vocab_size=plan.vocab_size, kv_heads=heads.kv, capacity=limits.capacity, logit_capacity=logit_rows,
        logit_stride=logit_stride, hidden_size=plan.hidden_size, tokens_per_entry=tokens_per_entry(heads.group),
        layers=plan.layers, tile_bytes=heads.tile_bytes(numbers), value_offset=heads.value_offset(numbers),
    )  # fmt: skip
    if options.pin_threads and not native.pinned:
        raise ModelError(
            f"{native.threads} threads can't be bound to a CPU each here; give fewer (--threads), or no --pin-threads"
        )
    isa = host.choose_isa(options.isa)
    jit = Jit(isa.cpu, isa.features, isa.vector_bits, str(host.cache_folder(options.cache_dir)))
    assembly = Assembly(native, jit, plan, Loader(native, plan.quantization, numbers, progress, options.weight_cache))
    assembly.compile(isa.name, progress)
    assembly.loader.load(weights_of(plan))
    assembly.allocate()
    return assembly


def load_model(options: LoadOptions, progress: Progress | None = None) -> ModelRunner:
    """Loads a checkpoint: its weights packed, its kernels compiled, its KV memory mapped.

    Raises ModelError with a message for the user when an option, the checkpoint or the host does not allow it.
    """
    plan, _ = describe(options)
    assembly = assemble(plan, options, progress)
    assembly.add_launches()
    native = assembly.native
    return ModelRunner(native, assembly.jit, assembly.loader, plan, options, pages=native.sequences.free_pages)
