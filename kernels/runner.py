"""Loading a model and running its steps: this package's interface to the engine core."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.kernels import host
from quire.kernels._native import (
    Constraint,
    DeviceLostError,
    Matcher,
    PoolingConfig,
    PrefixWatch,
    SamplingConfig,
    Sequences,
    StepResult,
    TextProposer,
    TextProposerConfig,
    TokenMask,
    Vocabulary,
    checksum,
)
from quire.kernels.adapted import most_bytes
from quire.kernels.adapters.blocks import Blocks, block_bytes
from quire.kernels.adapters.changeable import changeable_in
from quire.kernels.adapters.changed_head import ClassifierHead
from quire.kernels.adapters.packing import PackedAdapter, pack_adapter
from quire.kernels.adapters.reading import read_adapter
from quire.kernels.assembly import Assembly, Progress, Rows, compile_kernels, logits_bytes, open_runner
from quire.kernels.config import ModelConfig
from quire.kernels.devices import Device
from quire.kernels.emit.builder import BF16, F32, I8
from quire.kernels.emit.layout import ELEMENT_BYTES
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Features
from quire.kernels.host_tier import HostTierMemory, has_host_tier, open_host_tier
from quire.kernels.kv_file import KvFile, kv_format, model_name
from quire.kernels.kv_size import KvSize, choose_kv_size, describe_smaller_pool, plan_memory
from quire.kernels.lowering.model import lower
from quire.kernels.memory import MemoryPlan
from quire.kernels.models import build_graph, classifier_of, logits_of, multimodal
from quire.kernels.operands import Matrix
from quire.kernels.options import (
    LoadOptions,
    check_options,
    choose_context,
    choose_device,
    choose_limits,
    config_of,
)
from quire.kernels.plan import FINAL, LOOKAHEAD, ModelPlan, kept_name
from quire.kernels.pooling.pooler import Pooler, choose_pooler
from quire.kernels.pooling.sentence_transformers import max_seq_length
from quire.kernels.step import StepInput
from quire.kernels.trial import TrialRun
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.gguf_checkpoint import open_checkpoint
from quire.kernels.weights.loader import ImportanceTrial, Loader, check, packing_key
from quire.kernels.weights.quantization import choose_quantization
from quire.kernels.weights.shared_weights import SharedWeights

__all__ = [
    "Constraint",
    "DeviceLostError",
    "Matcher",
    "MemoryPlan",
    "Pooler",
    "PoolingConfig",
    "PrefixWatch",
    "SamplingConfig",
    "Sequences",
    "StepInput",
    "TextProposer",
    "TextProposerConfig",
    "TokenMask",
    "Vocabulary",
    "checksum",
]

logger = logging.getLogger(__name__)

_KV_DTYPES = {BF16: "bfloat16", F32: "float32", I8: "int8"}


class ModelRunner:
    """A loaded model. Sequences are opened in slots; steps extend them. Not thread-safe.

    Steps, forks and copies of KV pages are the native runner's; other threads may copy pages, too: see
    native/kv_cache/sequences.h, native/compute/runner.h and native/kv_cache/page_io.h.
    """

    def __init__(
        self, assembly: Assembly, options: LoadOptions, pooler: Pooler, host_tier: HostTierMemory | None = None
    ) -> None:
        self._native = native = assembly.native
        self._plan = assembly.plan
        self._format, self._format_lock = "", threading.Lock()
        self._assembly = assembly  # owns the code that launches point to
        checkpoint, plan = assembly.loader.checkpoint, assembly.plan
        self.pooler = pooler
        self.computes_whole_prompts = plan.is_encoder
        self.num_token_types = plan.num_token_types
        self.max_num_batched_tokens = plan.limits.max_num_batched_tokens
        pages = native.sequences.free_pages + native.sequences.cached_pages
        self.context = plan.context
        self.architecture = config_of(options, checkpoint).architecture
        self.vocab_size = plan.vocab_size
        self.embedding_size = pooler.embedding_size
        self.max_model_len = plan.limits.max_model_len
        self.attention_context = plan.attention_context
        self.kv_model = assembly.kv_model
        self.block_size = plan.limits.block_size
        self.num_pages = pages
        self.kv_dtype = _KV_DTYPES[plan.dtypes.kv.weights]
        self.kv_bytes = pages * plan.page_bytes
        self.memory = assembly.memory_plan
        self.host_tier = host_tier
        self.sealed_queues = native.sealed_queues
        self.kv_survives = options.kv_memory_fd is not None and assembly.device.in_host_memory
        self.device, self.device_product = assembly.device.name, assembly.device.product
        self.fast_matmul = plan.context.fast_matmul
        self.num_taken_over_pages = native.num_taken_over_pages
        self.num_dropped_pages = native.num_dropped_pages
        self.max_num_seqs = options.max_num_seqs
        self.eos_token_ids = checkpoint.eos_token_ids()
        self.sequences = native.sequences
        self.page_bytes = native.page_bytes
        self.max_loras = plan.limits.max_loras
        self.max_lora_rank = plan.limits.max_lora_rank
        self._adapters: dict[int, PackedAdapter | None] = {}
        self._adapter_blocks = None if assembly.device.in_host_memory else Blocks(assembly.device.native)

    def submit(self, step: StepInput) -> StepResult:
        """Compute a step. Raises ValueError for one that cannot be computed; nothing has changed then."""
        return self._native.step(step.slots, step.starts, step.counts, step.num_drafts or None, step.branches)

    def collect(self, handle: StepResult) -> StepResult:
        """Return the result of a step that was submitted: steps are computed as they are submitted."""
        return handle

    def run(self, step: StepInput) -> StepResult:
        """Submit a step, and return its result."""
        return self.collect(self.submit(step))

    def collect_pending(self, result: StepResult) -> dict[int, list[int]]:
        """Add pending spans to the result of the last step, at least one, and return them by row."""
        return self._native.collect(result)

    def fork(self, slot: int, source: int, num_computed: int, num_tokens: int) -> bool:
        """Give a slot without pages what another has computed; return False if there are too few pages."""
        return self._native.fork(slot, source, num_computed, num_tokens)

    def read_adapter(self, path: Path) -> tuple[str, PackedAdapter]:
        """Return the adapter of a folder or GGUF file, for `set_adapter`, and a hash of its contents. Any thread.

        Raises ModelError, and MemoryShortageError for one that others would have to make room for. It takes a time that
        grows with the adapter's bytes, mostly without the GIL.
        """
        plan, checkpoint = self._plan, self._plan.quantization.checkpoint
        element_bytes, free_bytes = ELEMENT_BYTES[plan.dtypes.weights], self._free_bytes
        head = ClassifierHead(self.pooler.parts, plan.hidden_size)
        changeable = changeable_in(
            plan.adapted, checkpoint, element_bytes=element_bytes, free_bytes=free_bytes, head=head.shapes
        )
        config = ModelConfig({**plan.config})
        graph = build_graph(config)
        adapter = read_adapter(path, graph, self.max_lora_rank, changeable, head, config.architecture)
        packed = pack_adapter(
            plan.adapted, adapter, plan.dtypes, plan.quantization, self._adapter_blocks, free_bytes, head
        )
        return adapter.digest, packed

    def _free_bytes(self) -> int:
        """Return the memory that is left for reading adapters, which takes that of the process on every device."""
        return min(host.available_memory(), self.memory.high - host.resident_memory())

    def set_adapter(self, number: int, packed: PackedAdapter | None) -> None:
        """Let sequences with the adapter `number`, from 1 on, be computed by this one, which must outlive them."""
        self._assembly.set_adapter(number, packed)
        self._native.set_pooling_head(number, None if packed is None else packed.head)
        self._adapters[number] = packed

    def copy_page(self, page: int, copy: npt.NDArray[np.uint8]) -> int:
        """Copy the KV of a page to `copy`, `page_bytes` bytes; return the checksum of the copy. Any thread."""
        return self._native.copy_page(page, copy)

    def fill_page(self, page: int, copy: npt.NDArray[np.uint8]) -> int:
        """Fill a page that nobody else uses with a copy of one; return its checksum. Any thread."""
        return self._native.fill_page(page, copy)

    def set_synthetic_acceptance(self, probability: float) -> None:
        """Take each draft for right with this probability, whatever is sampled: for benchmarks."""
        self._native.set_synthetic_acceptance(probability)

    def set_keeps_features(self, keeps: bool) -> None:
        """Set whether the next steps keep hidden states for a draft head."""
        self._native.set_keeps_features(keeps)

    def features(self) -> list[Rows]:
        """Return views of the features of the last step's tokens, one for each that the model was loaded to keep.

        Steps keep them until `set_keeps_features(False)`.
        """
        plan, kept = self._plan, self._plan.features
        names = [] if kept is None else [*map(kept_name, kept.layers), *([kept_name(FINAL)] if kept.final else [])]
        return [self._assembly.rows(name, plan.hidden_size) for name in names]

    def set_lookahead(self, embedding: npt.NDArray[np.float32]) -> None:
        """Give the lookahead token this embedding, f32 [hidden_size]."""
        self._assembly.rows(LOOKAHEAD, self._plan.hidden_size, 1)[0] = embedding

    def lend(self, names: Collection[str]) -> dict[Matrix, int]:
        """Return the packed matrices of the tensors `names`, and where they lie. Raises ModelError."""
        addresses = self._assembly.loader.addresses
        matrices = [weight for weight in self._plan.weights if isinstance(weight, Matrix)]
        found = {matrix: addresses[matrix] for matrix in matrices if {part.tensor for part in matrix.parts} <= {*names}}
        missing = {*names} - {part.tensor for matrix in found for part in matrix.parts}
        if missing:
            raise ModelError(f"the draft head shares {' and '.join(sorted(missing))}, which the model has not")
        return found

    def kv_format(self) -> str:
        """Return a hash of all that the bits of KV depend on besides tokens: also other hosts may compare it.

        The first call reads the whole checkpoint and may take seconds, but not the GIL. Any thread.
        """
        with self._format_lock:
            self._format = self._format or kv_format(self._plan, self.device_product)
        return self._format

    @property
    def threads(self) -> int:
        """Number of threads that compute a step."""
        return self._assembly.device.native.threads


def plan_of(options: LoadOptions, checkpoint: Checkpoint, features: Features | None = None) -> ModelPlan:
    """Return the plan of a checkpoint, once all tensors that it needs are there; no weights are read.

    Its steps keep `features` for a draft head.
    """
    check_options(options)
    config = config_of(options, checkpoint)
    quantization = choose_quantization(options.quantization, checkpoint, config)
    quantized = quantization.scheme is not None
    context = choose_context(options, checkpoint, quantized)
    graph = replace(build_graph(config), features=features)
    longest = max_seq_length(checkpoint.folder) or graph.max_positions
    limits = choose_limits(options, graph.max_positions, min(longest, graph.max_positions), whole=graph.is_encoder)
    plan = replace(lower(graph, context, limits, quantization), config=config.fields)
    check(quantization, plan.weights)
    if context.fast_matmul and all(each.quantized for each in plan.weights if isinstance(each, Matrix)):
        logger.warning("fast_matmul has no effect: all weights are quantized, whose products are exact as they are")
        return replace(plan, context=replace(context, fast_matmul=False))
    return plan


def pooler_of(options: LoadOptions, checkpoint: Checkpoint) -> Pooler:
    """Return the pooler of a checkpoint, with the weights of its head. Raises ModelError."""
    config = config_of(options, checkpoint)
    return choose_pooler(config, build_graph(config), logits_of(config), classifier_of(config), checkpoint)


def describe(options: LoadOptions, features: Features | None = None) -> tuple[ModelPlan, Checkpoint]:
    """Return the plan of a checkpoint folder, and the checkpoint; no weights are read."""
    checkpoint = open_checkpoint(options.model)
    return plan_of(options, checkpoint, features), checkpoint


def choose_memory(
    plan: ModelPlan,
    options: LoadOptions,
    file: KvFile | None = None,
    shared_bytes: int = 0,
    device: Device | None = None,
) -> tuple[KvSize, MemoryPlan]:
    """Return the size of the KV cache, maybe in a file, and the memory of the whole process. Raises ModelError.

    `shared_bytes` of the weights are in the memory of other engines already. `device`: by default the options'.
    """
    device = device or choose_device(options)
    buffers = sum(b.bytes for b in plan.buffers.values()) + logits_bytes(plan)
    weights = plan.weight_bytes + plan.array_bytes
    on_device, most_loras = not device.in_host_memory, plan.limits.max_loras
    adapter = most_bytes(plan.adapted, plan.limits.max_lora_rank, ELEMENT_BYTES[plan.dtypes.weights])
    blocks = (most_loras + 1) * block_bytes(adapter) if on_device and most_loras else 0  # one more is being read
    size = choose_kv_size(
        options, plan.limits, plan.page_bytes, weights + buffers, head_bytes=plan.page_head_bytes,
        record_bytes=plan.state_bytes, adapter_bytes=blocks, thread_bytes=device.thread_memory,
        whole=plan.is_encoder, file=file, shared_bytes=shared_bytes, device=device,
    )  # fmt: skip
    kv_bytes = size.bytes(plan.page_bytes, plan.state_bytes)
    return size, plan_memory(
        options, weights, buffers, kv_bytes, shared_bytes=shared_bytes, on_device=on_device,
        adapters=most_loras * adapter,
    )  # fmt: skip


def _claim_weights(
    plan: ModelPlan, fd: int, trial: ImportanceTrial | None, progress: Progress | None
) -> SharedWeights | None:
    """Return the file `fd` of the plan's weights, to be read or to be filled; None if it has others."""
    matrices = [weight for weight in plan.weights if isinstance(weight, Matrix)]
    key = packing_key(plan.quantization, matrices, plan.dtypes, trial)
    shared = SharedWeights(fd, key, plan.weights, plan.dtypes)
    if shared.claim(progress):
        return shared
    logger.warning("weights_fd=%d has other weights; those of this engine take memory of their own", fd)
    return None


def _with_memory_of(device: Device, options: LoadOptions) -> LoadOptions:
    """Return the options without the memory of files that a device can't use."""
    if device.in_host_memory:
        return options
    if options.weights_fd is not None:
        logger.info("weights on the device %s are those of this engine alone, whatever weights_fd has", device.name)
    return replace(options, kv_memory_fd=None, weights_fd=None)


def assemble(
    plan: ModelPlan,
    options: LoadOptions,
    progress: Progress | None = None,
    *,
    sealed_queues: int = 0,
    trial: ImportanceTrial | None = None,
) -> Assembly:
    """Put the plan into memory: pack weights, compile kernels; KV memory is left to `open_kv`.

    Float weights are quantized by the importance of their inputs that `trial` measures; it is run only if needed.
    """
    limits, device = plan.limits, choose_device(options)
    options = _with_memory_of(device, options)
    has_tier = has_host_tier(options, device, whole=plan.is_encoder)
    fd, sealed_queues = options.kv_memory_fd, sealed_queues + has_tier
    if fd is None and sealed_queues:
        fd = os.memfd_create("quire-kv")  # until this process ends
    file = None if fd is None else KvFile(fd, model_name(plan, device.product))
    shared = None if options.weights_fd is None else _claim_weights(plan, options.weights_fd, trial, progress)
    shared_bytes = 0 if shared is None else shared.resident_bytes
    size, memory = choose_memory(plan, options, file, shared_bytes, device)
    kernels = compile_kernels(plan, device, progress)
    if device.thread_memory:  # which is known only now
        size, memory = choose_memory(plan, options, file, shared_bytes, device)
        logger.info("threads of device %s take %d bytes of its memory", device.name, device.thread_memory)
    if smaller := describe_smaller_pool(options, limits, size, plan.page_bytes, device, whole=plan.is_encoder):
        logger.warning("%s", smaller)
    if options.gpu_memory_utilization is not None and device.own_memory is None:
        logger.warning("gpu_memory_utilization=%g has no effect: there is no GPU", options.gpu_memory_utilization)
    is_chosen = options.num_pages is not None or options.kv_cache_memory_bytes is not None
    if not is_chosen and size.pages * limits.block_size < limits.max_model_len:
        logger.warning(
            "%d KV pages hold %d tokens, and max_model_len is %d: longer requests will be rejected; set "
            "kv_cache_memory_bytes, or lower max_model_len",
            size.pages, size.pages * limits.block_size, limits.max_model_len,
        )  # fmt: skip
    native = open_runner(plan, device, size, file, sealed_queues=sealed_queues)
    loader = Loader(device.native, plan.quantization, plan.dtypes, progress, options.weight_cache, trial, shared)
    assembly = Assembly(native, device, plan, loader, memory, size, file, has_tier, kernels)
    loader.load(plan.weights)
    assembly.allocate()
    return assembly


class PreparedModel:
    """A checkpoint whose weights are packed and whose kernels are compiled; `open` gives it KV memory."""

    def __init__(
        self,
        options: LoadOptions,
        progress: Progress | None = None,
        *,
        sealed_queues: int = 0,
        features: Features | None = None,
    ) -> None:
        """Load it, maybe while another engine has the file of KV memory.

        `sealed_queues`: number of `ModelRunner.sealed_queues` that tell which KV pages are full, each for a thread that
        copies them elsewhere; the tier of host memory has one more. Steps keep `features` for a draft head.

        Raises ModelError with a message for the user if an option, the checkpoint or the host does not allow it.
        """
        self._options = options
        plan, checkpoint = describe(options, features)
        if multimodal.has_other_parts(config := config_of(options, checkpoint)):
            logger.warning("only the text part of %s is loaded: no images, audio or video", config.architecture)
        self._pooler = pooler_of(options, checkpoint)
        trial = TrialRun(options, checkpoint, progress)
        self._assembly = assemble(plan, options, progress, sealed_queues=sealed_queues, trial=trial)
        self._pooler.load(self._assembly.native)
        self.has_host_tier = self._assembly.has_host_tier
        self.page_bytes = plan.page_bytes
        self.vocab_size = plan.vocab_size
        self.computes_whole_prompts = plan.is_encoder
        self.eos_token_ids = checkpoint.eos_token_ids()

    def open(self) -> ModelRunner:
        """Map KV memory, with the pages that an engine before has left there. Raises ModelError."""
        assembly, limit, host_tier = self._assembly, self._options.memory_limit, None
        assembly.open_kv()
        if assembly.memory_plan.on_device:
            plan = assembly.memory_plan.measured(host.resident_memory(), limit)
            if self.has_host_tier:
                host_tier = open_host_tier(self._options, plan.kv, plan.program)
                plan = plan.with_host_tier(host_tier.bytes, limit)
            assembly.memory_plan = plan
        return ModelRunner(assembly, self._options, self._pooler, host_tier)


def load_model(options: LoadOptions, progress: Progress | None = None) -> ModelRunner:
    """Load a checkpoint: pack its weights, compile its kernels, map its KV memory. Raises ModelError."""
    return PreparedModel(options, progress).open()
