"""The options of an engine: of the model and the scheduler, of the engine's process, and of its clients.

Names are vLLM's wherever vLLM has one. `num_pages` is not called `num_gpu_blocks_override`: there is no GPU, and no
profiled number that it would override.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quire.protocol.options import MAX_INT32, MAX_INT64, Option, Range, check_options

if TYPE_CHECKING:
    from quire.protocol.keys import Security

DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = ("int8", "int4", "int4-g64", "int4-g32", "gptq", "awq", "compressed-tensors")
KV_CACHE_DTYPES = ("auto", "int8")
BLOCK_SIZES = (32, 64, 128)
SCHEDULING_POLICIES = ("fcfs", "priority", "lpm", "sjf")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

SECONDS = Range(0, 10**9, closed=False)  # 30 years, which every clock can count
SECONDS_OR_ZERO = Range(0, 10**9)
COUNT = Range(1, MAX_INT32)
STEP_TOKENS = 1 << 20

_model = functools.partial(Option, "Model")
_kv = functools.partial(Option, "KV cache")
_scheduling = functools.partial(Option, "Scheduling")
_grammars = functools.partial(Option, "Structured outputs")
_socket = functools.partial(Option, "Socket")
_process = functools.partial(Option, "Engine process")
_client = functools.partial(Option, "A running engine")
_chat = functools.partial(Option, "Chat")

Model = Annotated[
    str, _model("Checkpoint: config.json, *.safetensors, tokenizer.json.", "FOLDER", unset="the demo model")
]
ShutdownTimeout = Annotated[
    float,
    _process("Seconds that SIGTERM gives open requests to end; new ones are rejected.", "S", range=SECONDS_OR_ZERO),
]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the model and the scheduler. Raises `ValueError` for the first value that is not allowed."""

    model: Model
    dtype: Annotated[
        str,
        _model(
            "Dtype of the model; auto: bfloat16 for 16-bit and quantized checkpoints, else float32.",
            "TYPE",
            choices=DTYPES,
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        _model(
            "Quantize float weights: int8, int4 (a scale for each 128 weights), int4-g64, int4-g32. gptq, awq and "
            "compressed-tensors confirm that a checkpoint is such a one.",
            "MODE",
            choices=QUANTIZATIONS,
            unset="as in the checkpoint",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        _model("Context length: tokens of a prompt and its answer.", "TOKENS", range=COUNT, unset="the model's"),
    ] = None
    threads: Annotated[
        int | None,
        _model("Threads that compute.", "N", range=Range(1, 1024), unset="QUIRE_THREADS, or one for every usable core"),
    ] = None
    pin_threads: Annotated[bool, _model("Bind each thread to a CPU of its own.")] = False
    cache_dir: Annotated[
        str | None, _model("Keep compiled kernels there.", "FOLDER", unset="quire in the user's cache folder")
    ] = None
    weight_cache: Annotated[
        str | None, _model("Keep packed weights there: later starts map them, and engines share them.", "FOLDER")
    ] = None
    kv_cache_dtype: Annotated[
        str, _kv("Dtype of the KV cache; auto: the model's.", "TYPE", choices=KV_CACHE_DTYPES)
    ] = "auto"
    block_size: Annotated[int, _kv("Tokens of a KV page.", "TOKENS", choices=BLOCK_SIZES)] = 32
    kv_cache_memory_bytes: Annotated[
        int | str | None,
        _kv("Memory for KV pages, as 4GiB or 512MiB.", "SIZE", unset="up to 4GiB or half of the free memory"),
    ] = None
    num_pages: Annotated[
        int | None, _kv("KV pages, in place of kv_cache_memory_bytes.", "N", range=COUNT, unset="as the memory allows")
    ] = None
    enable_prefix_caching: Annotated[bool, _kv("Keep KV pages for requests that begin with the same tokens.")] = True
    max_num_seqs: Annotated[int, _scheduling("Sequences that run at once.", "N", range=Range(1, 1 << 16))] = 256
    max_num_batched_tokens: Annotated[
        int, _scheduling("Token budget of a step.", "TOKENS", range=Range(1, STEP_TOKENS))
    ] = 2048
    scheduling_policy: Annotated[
        str,
        _scheduling(
            "Order of waiting requests: fcfs (first come, first served), priority (lowest `priority` first), lpm "
            "(longest cached prefix first), sjf (fewest tokens to prefill first).",
            "NAME",
            choices=SCHEDULING_POLICIES,
        ),
    ] = "fcfs"
    long_prefill_token_threshold: Annotated[
        int,
        _scheduling(
            "Tokens of one prompt in a step; 0: as many as hardly slow decoding requests down.",
            "TOKENS",
            range=Range(0, STEP_TOKENS),
        ),
    ] = 0
    max_waiting_requests: Annotated[int, _scheduling("Most waiting requests; more are rejected.", "N", range=COUNT)] = (
        4096
    )
    max_waiting_tokens: Annotated[
        int, _scheduling("Most prompt tokens of waiting requests; more are rejected.", "TOKENS", range=COUNT)
    ] = 1 << 24
    grammar_timeout: Annotated[
        float, _grammars("Seconds that compiling the grammar of a request may take.", "S", range=SECONDS)
    ] = 10.0
    preload_grammars: Annotated[
        bool,
        _grammars(
            "Prepare the tokenizer for grammars at the start. Otherwise the first request with structured_outputs "
            "pauses all others meanwhile, a second with a large vocabulary.",
            unset="yes for the HTTP server, else no",
        ),
    ] = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.kv_cache_memory_bytes is not None and self.num_pages is not None:
            raise ValueError("kv_cache_memory_bytes and num_pages both size the KV cache; give one of them")


@dataclass(frozen=True, kw_only=True)
class SocketOptions:
    """Options of a socket, an engine's or a client's."""

    curve_keys: Annotated[str | None, _socket("CURVE keys for tcp://, as `quire keys` makes them.", "FOLDER")] = None
    insecure_tcp: Annotated[bool, _socket("Allow tcp:// without keys, for anyone who reaches the port.")] = False

    @property
    def security(self) -> Security:
        """Security of a socket. Raises KeyFileError if both options are given."""
        from quire.protocol.keys import Security

        return Security(None if self.curve_keys is None else Path(self.curve_keys), self.insecure_tcp)


@dataclass(frozen=True, kw_only=True)
class EngineProcessOptions(SocketOptions, EngineOptions):
    """Options of an engine process, `python -m quire.engine_core` or `quire engine`."""

    engine_address: Annotated[
        str | None,
        _socket("Listen at ipc://PATH or tcp://HOST:PORT.", "ADDRESS", unset="a socket in a fresh private folder"),
    ] = None
    seed: Annotated[
        int, _process("Seed of the seeds that requests without one are given.", "N", range=Range(0, MAX_INT64))
    ] = 0
    shutdown_timeout: ShutdownTimeout = 30.0
    heartbeat_seconds: Annotated[float, _process("Seconds between heartbeats.", "S", range=SECONDS)] = 1.0
    log_level: Annotated[str, _process("Least level of messages on stderr.", "LEVEL", choices=LOG_LEVELS)] = "warning"
    die_with_parent: Annotated[
        int | None,
        _process(
            "End when this process is gone; 0: the one that started the engine.",
            "PID",
            range=Range(0, MAX_INT32),
            unset="no process",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ClientOptions(SocketOptions):
    """Options of a client. Unlike an engine's they can also be set for an engine that is running already."""

    engine_address: Annotated[
        str | None,
        _client(
            "Attach to the engine at ipc://PATH or tcp://HOST:PORT instead of starting one. Options of the model and "
            "the scheduler were set when that engine was started, and are rejected.",
            "ADDRESS",
            unset="start an engine",
        ),
    ] = None
    start_timeout: Annotated[
        float,
        _client("Seconds after which an engine that is not ready or does not answer is given up.", "S", range=SECONDS),
    ] = 600.0
    tokenizer: Annotated[str | None, _client("Folder of the tokenizer.", "FOLDER", unset="the model's")] = None
    skip_tokenizer_init: Annotated[bool, _client("Use no tokenizer: prompts and answers are token ids.")] = False
    seed: Annotated[
        int | None,
        _client(
            "Seed of the seeds that requests without one are given.",
            "N",
            range=Range(0, MAX_INT64),
            unset="a fresh one",
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        _chat(
            "Format of the model's tool calls.",
            "NAME",
            choices=("none", "hermes", "llama3_json", "json_call"),
            unset="as its chat template shows",
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        _chat(
            "Format of the model's thoughts.",
            "NAME",
            choices=("none", "think", "qwen3", "deepseek_r1"),
            unset="as its chat template shows",
        ),
    ] = None
