"""Loads a model and runs its steps: what the engine core sees of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.kernels import host
from quire.kernels._native import Jit, Plan, Runner, default_threads
from quire.kernels.checkpoint import Checkpoint
from quire.kernels.config import ModelConfig
from quire.kernels.emit.attention import Attention, tokens_per_entry
from quire.kernels.emit.gemm import Gemm
from quire.kernels.emit.kv import KV_TILE, Heads
from quire.kernels.emit.layout import BLOCK, Numbers, round_up
from quire.kernels.emit.products import Products
from quire.kernels.errors import ModelError
from quire.kernels.models import build_plan, max_positions
from quire.kernels.operands import Buffer, Kernel, KvLayer, Limits, Operand
from quire.kernels.plan import PlanBuilder
from quire.kernels.weights import Loader, check, weights_of

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total)."""

PAGE_SIZES = (32, 64, 128)
DTYPES = ("auto", "bfloat16", "float32")
DEFAULT_KV_BYTES = 4 << 30
LOGIT_ROWS_AT_ONCE = 128
"""Rows of logits that are held at once; a step that wants more computes them in turns."""


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. `None` means: by the model or by the host.

    `model`: checkpoint folder. `dtype`: of weights, KV and products (`auto`: bf16 for 16-bit checkpoints, else f32).
    `max_model_len`: tokens of a sequence. `kv_bytes` or `num_pages`: the KV memory. `cache_dir`: compiled kernels.
    `isa`: amx, avx512 or avx2.
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    page_size: int = 32
    kv_bytes: int | None = None
    num_pages: int | None = None
    threads: int | None = None
    cache_dir: str | None = None
    isa: str | None = None


def _numbers(options: LoadOptions, config: ModelConfig, isa: str) -> Numbers:
    stored = config.fields.get("dtype") or config.fields.get("torch_dtype") or "float32"
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if stored == "float32" else "bfloat16"
    if dtype == "float32":
        return Numbers("f32", "f32", "f32")
    return Numbers("bf16", "bf16", "bf16" if isa == "amx" else "f32")


def _check_options(options: LoadOptions) -> None:
    if options.dtype not in DTYPES:
        raise ModelError(f"dtype is {options.dtype!r}; it must be one of {', '.join(DTYPES)}")
    if options.page_size not in PAGE_SIZES:
        raise ModelError(f"page_size is {options.page_size}; it must be one of {PAGE_SIZES} tokens")
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_pages", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ModelError(f"{name} is {value}; it must be at least 1")
    if options.num_pages is not None and options.kv_bytes is not None:
        raise ModelError("num_pages and the KV memory are both given; give one of them")


def _limits(options: LoadOptions, config: ModelConfig) -> Limits:
    longest = max_positions(config)
    length = options.max_model_len or longest
    if length > longest:
        raise ModelError(f"max_model_len={length} exceeds the {longest} positions of the model; lower it")
    return Limits(max(options.max_num_batched_tokens, 1), length, options.page_size)


def _num_pages(options: LoadOptions, limits: Limits, page_bytes: int) -> int:
    """Pages of the pool. By default what all sequences together could fill, up to 4 GiB or half of what is free."""
    available = host.available_memory()
    if options.num_pages is not None:
        pages = options.num_pages
    elif options.kv_bytes is not None:
        pages = options.kv_bytes // page_bytes
    else:
        longest = -(-limits.max_model_len // limits.page_size)
        pages = min(min(DEFAULT_KV_BYTES, available // 2) // page_bytes, longest * options.max_num_seqs)
    if pages < 1:
        given = options.kv_bytes if options.kv_bytes is not None else f"{available} free"
        raise ModelError(
            f"KV memory of {given} bytes holds no page: a page of {limits.page_size} tokens takes {page_bytes} bytes; "
            "give more (--kv-memory)"
        )
    if pages * page_bytes > available:
        raise ModelError(
            f"{pages} KV pages take {pages * page_bytes} bytes, but {available} are free; give less (--kv-memory)"
        )
    return pages


def _default_threads() -> int:
    try:
        return default_threads()
    except ValueError as error:  # what QUIRE_THREADS says
        raise ModelError(str(error)) from None


class ModelRunner:
    """A loaded model. Sequences are opened in slots; `step` extends them. Not for use by two threads at once.

    `open`, `reserve`, `release_pages`, `close` and `step` are the native runner's (see native/runner.h).
    """

    def __init__(
        self, native: Runner, jit: Jit, plan: PlanBuilder, options: LoadOptions, *, pages: int, architecture: str,
        eos_token_ids: list[int],
    ) -> None:  # fmt: skip
        self._native = native
        self._jit = jit  # owns the code that the plan's launches point to
        self.architecture = architecture
        self.vocab_size = plan.vocab_size
        self.max_model_len = plan.limits.max_model_len
        self.page_size = plan.limits.page_size
        self.num_pages = pages
        self.max_num_seqs = options.max_num_seqs
        self.eos_token_ids = eos_token_ids
        self.reserve = native.reserve
        self.release_pages = native.release_pages
        self.close = native.close
        self.step = native.step
        self.open = native.open

    @property
    def threads(self) -> int:
        """Threads that compute a step."""
        return self._native.threads

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return self._native.free_pages

    @property
    def held_pages(self) -> int:
        """Pages of open sequences."""
        return self._native.held_pages

    @property
    def cached_pages(self) -> int:
        """Pages kept for sequences to come."""
        return self._native.cached_pages


@dataclass
class _Assembly:
    """Turns a plan's operands into addresses and its launches into native ones."""

    native: Runner
    plan: PlanBuilder
    loader: Loader
    kv_base: int
    kv_layer_bytes: int

    def addresses_of_kernels(self, jit: Jit, isa: str, progress: Progress | None) -> dict[Kernel, int]:
        products = Products(isa, self.plan.numbers)
        addresses = {}
        for done, kernel in enumerate(self.plan.kernels, 1):
            text = kernel.emit(products) if isinstance(kernel, Gemm | Attention) else kernel.emit(self.plan.numbers)
            addresses[kernel] = jit.compile(text, [kernel.name])[0]
            if progress is not None and jit.compiled:
                progress("compiling kernels", done, len(self.plan.kernels))
        return addresses

    def add_launches(self, kernels: dict[Kernel, int]) -> None:
        buffers = {b.name: self.native.allocate(b.bytes) for b in self.plan.buffers.values()}
        buffers.update(self.native.inputs)
        for launch in self.plan.launches:
            target: Plan = self.native.head if launch.head else self.native.body
            target.add(
                kernels[launch.kernel], [self._address(o, buffers) for o in launch.operands], launch.dim, launch.per,
                launch.times,
            )  # fmt: skip

    def _address(self, operand: Operand, buffers: dict[str, int]) -> int:
        if isinstance(operand, Buffer):
            return buffers[operand.name]
        if isinstance(operand, KvLayer):
            return self.kv_base + operand.layer * self.kv_layer_bytes
        return self.loader.addresses[operand]


def describe(options: LoadOptions) -> tuple[PlanBuilder, ModelConfig]:
    """The plan of a checkpoint folder and its config; reads no weights."""
    config = ModelConfig(Checkpoint(options.model).config)
    plan = PlanBuilder(_numbers(options, config, host.choose_isa(options.isa).name), _limits(options, config))
    build_plan(plan, config)
    return plan, config


def load_model(options: LoadOptions, progress: Progress | None = None) -> ModelRunner:
    """Loads a checkpoint: its weights packed, its kernels compiled, its KV memory mapped.

    Raises ModelError with a message for the user when an option, the checkpoint or the host does not allow it.
    """
    _check_options(options)
    isa = host.choose_isa(options.isa)
    checkpoint = Checkpoint(options.model)
    config = ModelConfig(checkpoint.config)
    plan = PlanBuilder(_numbers(options, config, isa.name), _limits(options, config))
    build_plan(plan, config)
    weights = weights_of([operand for launch in plan.launches for operand in launch.operands])
    check(checkpoint, weights)
    heads = plan.heads or Heads(1, 1, 16)
    tiles_per_page = plan.limits.page_size // KV_TILE
    tile_bytes = heads.tile_bytes(plan.numbers)
    pages = _num_pages(options, plan.limits, plan.layers * tiles_per_page * tile_bytes)
    threads = options.threads or _default_threads()
    native = Runner(
        threads=threads, pin=False, num_pages=pages, page_size=plan.limits.page_size, vocab_size=plan.vocab_size,
        capacity=plan.limits.capacity, logit_capacity=min(LOGIT_ROWS_AT_ONCE, plan.limits.capacity),
        logit_stride=round_up(plan.vocab_size, BLOCK), tokens_per_entry=tokens_per_entry(heads.group),
    )  # fmt: skip
    loader = Loader(native, checkpoint, plan.numbers, progress)
    layer_bytes = pages * tiles_per_page * tile_bytes
    assembly = _Assembly(native, plan, loader, native.allocate(plan.layers * layer_bytes), layer_bytes)
    jit = Jit(isa.cpu, isa.features, isa.vector_bits, str(host.cache_folder(options.cache_dir)))
    kernels = assembly.addresses_of_kernels(jit, isa.name, progress)
    loader.load(weights)
    assembly.add_launches(kernels)
    return ModelRunner(
        native, jit, plan, options, pages=pages, architecture=config.architecture,
        eos_token_ids=checkpoint.eos_token_ids(),
    )  # fmt: skip
