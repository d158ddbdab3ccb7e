"""The engine process: load the model, open the socket, say READY, run the loop, end cleanly."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.engine_core.adapters import Adapters
from quire.engine_core.arguments import load_options, parse_arguments
from quire.engine_core.crash_journal import CrashJournal
from quire.engine_core.engine import EngineCore, EngineParts
from quire.engine_core.features import make_features
from quire.engine_core.grammar.compiler import GrammarCompiler
from quire.engine_core.grammar.grammars import Grammars
from quire.engine_core.grammar.tokenizer import PRELOADING_THREAD, GrammarTokenizer
from quire.engine_core.host import EngineHost, refuse_reload
from quire.engine_core.kv_events import KvEvents, start_kv_events
from quire.engine_core.kv_tiers.disk_files import DiskFiles
from quire.engine_core.kv_tiers.file_tier import FileTier
from quire.engine_core.kv_tiers.host_file import HostFile, discard, least_bytes
from quire.engine_core.kv_tiers.page_server import PageServer
from quire.engine_core.kv_tiers.peer import KvPeer
from quire.engine_core.kv_tiers.peers import PeerSet
from quire.engine_core.kv_tiers.tier import KvTier
from quire.engine_core.loop import EngineLoop
from quire.engine_core.memory import MemoryGuard
from quire.engine_core.speculation.start import features_needed, start_speculation
from quire.engine_core.supervisor_link import Stages, SupervisorLink, wait_to_begin, write_line
from quire.engine_core.transport.server import ClientLimits, EngineCallbacks, EngineServer, Inbox
from quire.kernels.errors import ModelError
from quire.kernels.fit import advised
from quire.kernels.host import MachineShare
from quire.kernels.runner import ModelRunner, PreparedModel
from quire.kernels.weights.shared_weights import WAITING
from quire.protocol.address import default_address, remove_orphaned
from quire.protocol.codec import MAX_REPLY_BYTES
from quire.protocol.engine_options import DEFAULT_DISK_SIZE, EngineProcessOptions
from quire.protocol.engine_shape import EngineShape
from quire.protocol.errors import AddressError, KeyFileError
from quire.protocol.kv_events import parse_kv_events_config
from quire.protocol.log_limit import LimitedHandler
from quire.protocol.memory_limit import explain_failure
from quire.protocol.messages import PROTOCOL_VERSION, AdapterInfo, Ping, Ready
from quire.protocol.model_files import hash_of_all, hash_text_files
from quire.protocol.options import parse_size
from quire.protocol.parent_death import end_with_parent, outlive_parent
from quire.protocol.pooling_info import PoolingInfo
from quire.protocol.supervision import GAVE_WAY

_SWITCH_SECONDS = 3e-4  # about a step's Python for 256 requests
_GRACE_SECONDS = 0.5  # for the supervisor to end the engine for good, if both have got the same signal
_ORPHANED = 1  # exit status, which nobody is left to see

T = TypeVar("T")

logger = logging.getLogger(__name__)

_BAR_CELLS = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one engine; return the exit status. Errors go to stderr."""
    parsed = parse_arguments(arguments)
    faulthandler.enable()
    logging.basicConfig(
        level=parsed.log_level.upper(),
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        handlers=[LimitedHandler()],
    )
    parent = None if parsed.die_with_parent is None else parsed.die_with_parent or os.getppid()
    if parent is not None:
        end_with_parent(parent)
    try:
        if parsed.standby == "program" and not wait_to_begin():
            return 0
        share = MachineShare.parse(parsed.machine_share)
        return _run(replace(parsed, threads=share.take_cores(parsed.threads)), parent)
    except (ModelError, AddressError, KeyFileError) as error:
        print("\n" * sys.stderr.isatty() + f"error: {error}", file=sys.stderr)  # progress may stand on the line
        status = 1
    except KeyboardInterrupt:  # before and while the model loads; later SIGINT has a handler
        status = 128 + signal.SIGINT
    if any(thread.name == PRELOADING_THREAD for thread in threading.enumerate()):
        _leave(status)
    return status


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn an error for want of memory into a ModelError, which is shown as one line."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ModelError) or (words := explain_failure(error)) is None:
            raise
        raise ModelError(words) from error


def _run(parsed: EngineProcessOptions, parent: int | None) -> int:
    is_supervised = parsed.beat_seconds is not None
    link = SupervisorLink() if is_supervised else None
    stages = Stages(is_supervised)
    with _explained():
        stages.begin("reading the tokenizer's files")
        text = TextParts.load(parsed)
        stages.begin("reading the model's files")
        model = _load(parsed, lambda: _prepare(parsed, stages))
        if is_supervised:
            known = {"vocab_size": model.vocab_size, "eos_token_ids": model.eos_token_ids}
            write_line("LOADED", {"text_files": text.files, **known})
        if parsed.standby == "model" and not wait_to_begin():
            return 0
        stages.begin("mapping the KV memory")
        core, server, loop = _assemble(parsed, link, text, _load(parsed, model.open))
    _handle_signals(loop, parsed)
    status = 1
    try:
        with _explained():
            stages.begin("opening the socket")
            server.start(EngineCallbacks(core.reject_early, core.is_open, core.receive_kv, core.report_sent))
        if parent is not None:
            outlive_parent(parent, lambda: _leave_orphaned(server.address))
        write_line("READY", server.address)
        if link is not None and parsed.beat_seconds is not None:
            link.start(parsed.beat_seconds, core, server, loop)
        tune_interpreter()
        try:
            ends = loop.run()
        except Exception:
            if loop.is_supervised:
                _leave(status)  # without a word to the clients, who go on with the next engine
            raise
        if not ends and link is not None:
            link.leave()
            server.give_way()
            _leave(GAVE_WAY)
        status = 0
    finally:
        server.stop()
        if not core.stop():
            _leave(status)
    return status


def _handle_signals(loop: EngineLoop, parsed: EngineProcessOptions) -> None:
    """End at SIGTERM when the open requests have ended, and at SIGINT at once.

    A supervised engine is ended for good by its supervisor only, and by a line. A signal of anybody else has it give
    way to another one, at SIGINT without waiting for the requests that have begun.
    """
    if not loop.is_supervised:
        signal.signal(signal.SIGTERM, lambda *_: loop.drain())
        signal.signal(signal.SIGINT, lambda *_: loop.stop())
        return
    for number, seconds in ((signal.SIGTERM, parsed.shutdown_timeout), (signal.SIGINT, 0.0)):
        signal.signal(number, lambda *_, seconds=seconds: loop.give_way(seconds, least=_GRACE_SECONDS))


def _leave_orphaned(address: str) -> None:
    """End at once, without a word to the clients: whoever starts an engine at the address again gets them.

    The socket's file goes first, while nobody else can have one there.
    """
    remove_orphaned(address)
    os._exit(_ORPHANED)


@dataclass(frozen=True)
class TextParts:
    """The model's text files: the tokenizer for grammars, with what compiles them, and the hashes of all."""

    compiler: GrammarCompiler
    files: dict[str, str]

    @classmethod
    def load(cls, parsed: EngineProcessOptions) -> TextParts:
        """Load them, the tokenizer only if that is wanted at the start."""
        compiler = GrammarCompiler(GrammarTokenizer(parsed.model), seconds=parsed.grammar_timeout)
        if parsed.preload_grammars:
            compiler.preload()
        return cls(compiler, hash_text_files(parsed.model))


def _assemble(
    parsed: EngineProcessOptions, link: SupervisorLink | None, text: TextParts, runner: ModelRunner
) -> tuple[EngineCore, EngineServer, EngineLoop]:
    if parsed.kv_memory_fd is not None and runner.kv_survives:
        _log_take_over(runner)
    memory = MemoryGuard(runner.memory)
    _log_model(runner, memory)
    inbox: Inbox = queue.SimpleQueue()

    def wake() -> None:
        inbox.put((b"", Ping()))

    limits = _make_limits(parsed, runner)
    server = EngineServer(
        parsed.engine_address or default_address(),
        _make_ready(parsed, runner, limits, hash_of_all(text.files)),
        inbox,
        ClientLimits(max_clients=parsed.max_clients, max_waiting_bytes=memory.backlog_bytes, memory_limit=memory.limit),
        parsed.security,
    )
    journal = CrashJournal(parsed.crash_journal_fd)
    if link is not None and journal.num_explained_deaths:
        write_line("BLAMED", {"num_deaths": journal.num_explained_deaths})
    peers, events = _start_peers(parsed, runner), _start_kv_events(parsed, runner, wake)
    chosen = [
        start_speculation(parsed, load_options(parsed), runner, limits),
        events,
        _start_adapters(parsed, runner, wake, events),
        peers,
    ]
    page_server = _start_page_server(parsed, runner, server, wake)
    core = EngineCore(
        runner,
        limits,
        server.send,
        EngineParts(
            make_features(
                runner.sequences, limits, server.send, journal=journal, page_server=page_server, chosen=chosen
            ),
            Grammars(text.compiler, wake=wake, most_bytes=memory.grammar_bytes),
            _start_tiers(parsed, runner),
            peers,
            memory,
        ),
        EngineHost(
            wake,
            refuse_reload if link is None else link.reload,
            lambda: msgspec.structs.asdict(server.counters) | memory.stats(),
            is_supervised=link is not None,
        ),
        seed=parsed.seed,
    )
    loop = EngineLoop(
        core,
        server,
        inbox,
        drain_seconds=parsed.shutdown_timeout,
        is_supervised=link is not None,
    )
    return core, server, loop


def _log_model(runner: ModelRunner, memory: MemoryGuard) -> None:
    """Log what computes the model, and the memory of the process."""
    logger.info("the model is computed by %s", " ".join(filter(None, (runner.device, runner.device_product))))
    if runner.fast_matmul:
        logger.info("fast_matmul: bits are those of this kind of GPU, and not the CPU's")
    logger.info("memory: at most %d bytes (%s)", memory.limit, runner.memory.describe())


def _leave(status: int) -> None:
    """End the process at once: a normal exit would crash in a thread that is inside llguidance."""
    if (error := sys.exc_info()[1]) is not None:
        logger.error("the engine failed", exc_info=error)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _load(parsed: EngineProcessOptions, load: Callable[[], T]) -> T:
    """Carry out a part of loading the model. Raises ModelError, whatever the reason for the failure."""
    try:
        return load()
    except ModelError:
        raise
    except (ValueError, MemoryError, OverflowError, RuntimeError) as error:
        words = explain_failure(error) or str(error) or type(error).__name__
        raise ModelError(f"the model in {parsed.model} cannot be loaded: {words}") from error


def _prepare(parsed: EngineProcessOptions, stages: Stages) -> PreparedModel:
    shows_progress = sys.stderr.isatty()

    def progress(what: str, done: int, total: int) -> None:
        stages.begin(what, waits=what == WAITING)
        if shows_progress:
            _show_progress(what, done, total)

    options = load_options(parsed)
    with advised(options):
        features = features_needed(parsed, options)
        prepared = PreparedModel(options, progress, sealed_queues=int(parsed.kv_disk is not None), features=features)
    given = options.kv_host_memory
    if prepared.has_host_tier and given is not None and given < (least := least_bytes(prepared.page_bytes)):
        raise ModelError(f"kv_host_memory={given} holds no KV page, which takes {least} bytes; give more, or 0")
    if prepared.computes_whole_prompts:
        _check_encoder(parsed)
    return prepared


def _log_take_over(runner: ModelRunner) -> None:
    taken, dropped = runner.num_taken_over_pages, runner.num_dropped_pages
    logger.log(
        logging.WARNING if dropped else logging.INFO,
        "took over %d KV pages (%d tokens) of the engine before; dropped %d that were damaged or follow such a page",
        taken, taken * runner.block_size, dropped,
    )  # fmt: skip


def _start_tiers(parsed: EngineProcessOptions, runner: ModelRunner) -> list[KvTier]:
    """Start the tiers of this machine, those nearer to this engine first."""
    tiers, queues, model, page_bytes = [], [*runner.sealed_queues], runner.kv_model, runner.page_bytes
    memory = runner.host_tier
    if memory is not None and memory.bytes >= least_bytes(page_bytes):
        tiers.append(
            FileTier("host", lambda: HostFile(memory.fd, memory.bytes, model, page_bytes), runner, queues.pop())
        )
    elif parsed.kv_memory_fd is not None and not runner.kv_survives:  # an engine before may have left its KV there
        threading.Thread(target=discard, args=[parsed.kv_memory_fd], name="quire-discard", daemon=True).start()
    if memory is not None and not tiers:
        logger.warning("%d bytes of host memory are left for KV pages of the device, and hold none", memory.bytes)
    if parsed.kv_disk is not None:
        folder, size = Path(parsed.kv_disk), parse_size(str(parsed.kv_disk_bytes or DEFAULT_DISK_SIZE))
        tiers.append(FileTier("disk", lambda: DiskFiles(folder, size, model, page_bytes), runner, queues.pop()))
    for tier in tiers:
        tier.start()
    return [*tiers]


def _start_peers(parsed: EngineProcessOptions, runner: ModelRunner) -> PeerSet | None:
    """Start the peers, if there is a cache for their pages. Raises AddressError or KeyFileError."""
    if not parsed.enable_prefix_caching or runner.computes_whole_prompts:
        return None

    def start(address: str) -> KvPeer:
        if address == parsed.engine_address:
            raise AddressError(f"kv_peer={address} is the address of this engine itself; name another engine's")
        peer = KvPeer(address, parsed.security, runner, runner.block_size)
        peer.start()
        return peer

    return PeerSet(start, parsed.kv_peer)


def _check_encoder(parsed: EngineProcessOptions) -> None:
    """Raise ModelError for an option that an encoder cannot honour, as it computes each prompt in one step."""
    reasons = {
        "kv_disk": "keeps KV of prompts that begin alike, of which an encoder keeps none",
        "kv_host_memory": "keeps KV of prompts that begin alike, of which an encoder keeps none",
        "kv_peer": "fetches KV of prompts that begin alike, of which an encoder keeps none",
        "long_prefill_token_threshold": "splits prompts, and an encoder computes each in one step",
    }
    if parse_kv_events_config(parsed.kv_events_config or "{}").is_enabled:
        raise ModelError("kv_events_config tells of KV that prompts share, and an encoder keeps none; leave it out")
    for name, reason in reasons.items():
        if given := getattr(parsed, name):
            raise ModelError(f"{name}={given} {reason}; leave it out")


def _start_kv_events(parsed: EngineProcessOptions, runner: ModelRunner, wake: Callable[[], None]) -> KvEvents | None:
    """Start the publishing of KV events, if it is wanted. Raises AddressError."""
    config = parse_kv_events_config(parsed.kv_events_config or "{}")
    if not config.is_enabled:
        return None
    return start_kv_events(config, runner.sequences, runner.block_size, wake, parsed.adapter_folders)


def _start_adapters(
    parsed: EngineProcessOptions, runner: ModelRunner, wake: Callable[[], None], events: KvEvents | None
) -> Adapters | None:
    """Return what gives requests their adapters, if they may have any."""
    if not parsed.serves_adapters:
        return None
    folders = None if parsed.allow_runtime_lora else frozenset(parsed.adapter_folders.values())
    note = None if events is None else events.note_adapter
    return Adapters(runner, parsed.max_loras, folders, wake, note=note)


def _start_page_server(
    parsed: EngineProcessOptions, runner: ModelRunner, server: EngineServer, wake: Callable[[], None]
) -> PageServer | None:
    """Start the page server, if there are pages to serve that a message can hold."""
    if not parsed.enable_prefix_caching or runner.computes_whole_prompts or runner.page_bytes > MAX_REPLY_BYTES:
        return None
    pages = PageServer(runner, server.send, wake)
    pages.start()
    return pages


def _make_limits(parsed: EngineProcessOptions, runner: ModelRunner) -> EngineShape:
    return EngineShape(
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        block_size=runner.block_size,
        num_pages=runner.num_pages,
        attention_context=runner.attention_context,
        enable_prefix_caching=parsed.enable_prefix_caching and not runner.computes_whole_prompts,
        scheduling_policy=parsed.scheduling_policy,
        target_itl=parsed.target_itl,
        long_prefill_token_threshold=parsed.long_prefill_token_threshold,
        max_waiting_requests=parsed.max_waiting_requests,
        max_waiting_tokens=parsed.max_waiting_tokens,
        hidden_size=runner.embedding_size,
        max_waiting_requests_per_client=parsed.max_waiting_requests_per_client,
        pooling=_pooling_info(runner),
        num_states=0 if (states := runner.sequences.states) is None else states.total,
    )


def _pooling_info(runner: ModelRunner) -> PoolingInfo:
    pooler, own = runner.pooler, runner.pooler.embedding
    return PoolingInfo(
        generates=pooler.generates, embeds=pooler.embedding_size > 0, pooling_type=own.pooling_type,
        normalize=own.normalize, labels=pooler.labels, activation=pooler.activation,
        classifier_pooling=pooler.classifier_pooling, prompts=own.prompts,
        default_prompt_name=own.default_prompt_name, includes_prompt=own.includes_prompt, similarity=own.similarity,
        lowercase=own.lowercase, pair_template=pooler.pair_template, is_encoder=runner.computes_whole_prompts,
        num_token_types=runner.num_token_types,
    )  # fmt: skip


def _make_ready(parsed: EngineProcessOptions, runner: ModelRunner, limits: EngineShape, text_files: str) -> Ready:
    return Ready(
        protocol_version=PROTOCOL_VERSION,
        model=os.path.abspath(parsed.model),  # noqa: PTH100 - clients may have another working directory; links stay
        architecture=runner.architecture,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        num_pages=runner.num_pages,
        block_size=runner.block_size,
        max_num_seqs=runner.max_num_seqs,
        engine_pid=os.getpid(),
        heartbeat_seconds=parsed.heartbeat_seconds,
        eos_token_ids=runner.eos_token_ids,
        hidden_size=runner.embedding_size,
        shape=limits,
        kv_cache_dtype=runner.kv_dtype,
        kv_cache_bytes=runner.kv_bytes,
        memory_limit=runner.memory.limit,
        has_kv_peer=parsed.kv_peer is not None,
        text_files=text_files,
        adapters=_adapter_info(parsed),
        device=runner.device,
        device_product=runner.device_product,
        fast_matmul=runner.fast_matmul,
    )


def _adapter_info(parsed: EngineProcessOptions) -> AdapterInfo | None:
    if not parsed.serves_adapters:
        return None
    return AdapterInfo(parsed.adapter_folders, parsed.allow_runtime_lora, parsed.max_loras, parsed.max_lora_rank)


def tune_interpreter() -> None:
    """Turn the garbage collector off (the loop collects when idle), and let the IO thread have its turn soon."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.disable()


def _show_progress(what: str, done: int, total: int) -> None:
    share = min(done / max(total, 1), 1.0)
    bar = ("━" * int(share * _BAR_CELLS)).ljust(_BAR_CELLS, "╌")
    end = "\n" if share == 1 else ""
    print(f"\r{what:<18} {bar} {share:4.0%}", end=end, file=sys.stderr, flush=True)
