"""Every message that crosses a process boundary, as msgspec Structs.

All messages are msgpack arrays (`array_like`), and each direction is one tagged
union (`ClientMessage`, `EngineMessage`), so a frame decodes into a declared type or not at all. Times are
seconds of the engine's monotonic clock. Token ids are ints in `[0, vocab_size)`.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

import msgspec

from quire.protocol.engine_shape import EngineShape

PROTOCOL_VERSION = 3


class FinishReason(enum.IntEnum):
    """Why a request ended; `str(reason)` is the word that users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    TIMEOUT = 4

    def __str__(self) -> str:
        return self.name.lower()


class ErrorKind(enum.IntEnum):
    """Whose fault it is that a request ended with ERROR, and so what its client may do."""

    INVALID = 1  # the request's: it can't be served as it is
    OVERLOADED = 2  # too many wait: send it again later
    SHUTTING_DOWN = 3  # send it to another engine
    FAILED = 4  # the engine's


class EventType(enum.IntEnum):
    """What happened to a request inside the engine."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3
    FIRST_TOKEN = 4
    FINISHED = 5


class StructuredOutputs(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """What the text of an answer must be. One of the first five is given; names and meanings are vLLM's.

    `json`: a JSON schema, as text or as an object; `regex`: one that the whole text matches, in the syntax of Rust's
    `regex`; `choice`: one of these texts; `grammar`: Lark, or GBNF as llama.cpp has it; `json_object`: any JSON object.
    Where JSON may have whitespace there is none, a space or two, or a line break with some indentation, so that no
    model writes blanks for ever; or what the regular expression `whitespace_pattern` allows; or none at all with
    `disable_any_whitespace`.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    @property
    def kinds(self) -> list[str]:
        """The names of those of the first five that are given."""
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        return [*given, "json_object"] if self.json_object else given


class SamplingParams(msgspec.Struct, array_like=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """How tokens of a request are drawn, and when it ends. Field names and meanings are vLLM's.

    `stop`, `bad_words`, `detokenize`, `skip_special_tokens`, `spaces_between_special_tokens`,
    `include_stop_str_in_output`, `n` and `best_of` concern text, or several requests, and are carried out by the
    frontend; the engine reads the rest, and refuses `stop`, `bad_words`, `best_of` and an `n` above 1.

    `best_of`: so many completions are made, of which the `n` with the highest log probability per token are returned.
    `beam_width`: 0, or that of a beam search, which gives the `n` best sequences at its end; `length_penalty` and
    `early_stopping` belong to it and mean what they do in `transformers`.
    `structured_outputs`: what the text must be. A grammar decides before everything else: what it demands is drawn even
    where `bad_words`, `allowed_token_ids` or `min_tokens` ban it. An eos token, or one of `stop_token_ids`, may be
    drawn where the text may end. When it can only end, the answer does, whatever `ignore_eos` and `min_tokens` say.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    best_of: int | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    structured_outputs: StructuredOutputs | None = None


class PoolingParams(msgspec.Struct, array_like=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """How the hidden states of a prompt become its embedding. Names and defaults are vLLM's.

    `pooling_type`: the state of the last token, or the mean of all tokens' states, each after the model's final norm.
    A mean computes every token, whatever the prefix cache holds; what it computes is kept there for others.
    `dimensions`: how many of the values to keep, the first of them, which makes sense for models that were trained for
    it (Matryoshka embeddings); None for all. `normalize`: what is kept is then scaled to length 1.
    """

    pooling_type: Literal["last", "mean"] = "last"
    dimensions: int | None = None
    normalize: bool = True


class EngineCoreEvent(msgspec.Struct, array_like=True, gc=False):
    """One event of a request, with the engine's monotonic time in seconds."""

    type: EventType
    timestamp: float


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities at one position: the chosen token first, then the top-N in falling order.

    `token_ids` and `logprobs` have 1 + N entries; `rank` is the chosen token's rank in the vocabulary, 1 the likeliest.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class BeamSequence(msgspec.Struct, array_like=True, gc=False):
    """One result of a beam search: its new tokens, their log probabilities, and the sum of these."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    cumulative_logprob: float
    finish_reason: FinishReason
    stop_reason: int | None = None


class EngineCoreRequest(msgspec.Struct, array_like=True, gc=False, tag=1, forbid_unknown_fields=True):
    """Client to engine: generate. `request_id` is unique per client; `eos_token_ids` end it unless `ignore_eos`.

    Requests with a lower `priority` come first where the engine's policy looks at it. KV pages are shared only among
    requests of the same `cache_salt`. `timeout`: seconds after its arrival at the engine at which the request ends.
    `shares_prompt_with` is the id of an earlier request of this client with the same prompt and salt, which is computed
    once for both; it has no effect if that request has ended. With `pooling` nothing is generated: the request ends with its
    embedding when the prompt is computed, and reads nothing of `sampling_params`, which are the defaults.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int] = []
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    shares_prompt_with: str | None = None
    pooling: PoolingParams | None = None


class Abort(msgspec.Struct, array_like=True, gc=False, tag=2, forbid_unknown_fields=True):
    """Client to engine: end these requests. Each that is still running gets its terminal output (ABORT)."""

    request_ids: list[str]


class Hello(msgspec.Struct, array_like=True, gc=False, tag=3):
    """Client to engine, first message of a connection.

    The one message that may have fields of a later version, so that what is refused is the version.
    """

    protocol_version: int
    client_name: str = ""


class Ping(msgspec.Struct, array_like=True, gc=False, tag=4, forbid_unknown_fields=True):
    """Client to engine: I am alive; answered with Pong."""


class UtilityCall(msgspec.Struct, array_like=True, gc=False, tag=5, forbid_unknown_fields=True):
    """Client to engine: one of `stats`, `reset_cache`, `pin_prefix`, `unpin_prefix`, `trace_start`, `trace_stop`,
    `snapshot`, `shutdown`.

    `token_ids` and `cache_salt` say which prefix.
    """

    call_id: int
    method: str
    token_ids: list[int] = []
    cache_salt: str = ""


class Goodbye(msgspec.Struct, array_like=True, gc=False, tag=6, forbid_unknown_fields=True):
    """Client to engine: the client leaves now; its remaining requests are aborted."""

    reason: str = ""


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """What one or more steps added to one request. The output with a `finish_reason` is the request's last.

    `stop_reason` is the token id of `stop_token_ids` that stopped it, None for an eos token; `error` says what was
    wrong when `finish_reason` is ERROR, and `error_kind` whose fault it is. `prompt_logprobs` come once, with the first
    output after the prompt was computed (entry 0 is None). `events` keep their times however many outputs are merged
    into one. A beam search tells nothing but its `beams`, the best first, with its end; a request with `pooling`
    nothing but its `pooled` vector, as little-endian f32, with STOP. `is_whole`: it stopped as its grammar allows
    nothing more, so that its last token belongs to the text.
    """

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: list[TokenLogprobs] | None = None
    new_prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    events: list[EngineCoreEvent] = []
    num_cached_tokens: int = 0
    beams: list[BeamSequence] | None = None
    error_kind: ErrorKind | None = None
    pooled: bytes | None = None
    is_whole: bool = False


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """The engine after one step. Pages are KV pages: `free + cached + held == total` always.

    Tokens and seconds are those of the step: of prompts (and what is computed again after a preemption, and what a
    grammar has forced), of decodes, and the prompt tokens of requests that it started which were found in the cache.
    `preemptions`, `evictions` (pages) and `wasted_tokens` (computed again after a preemption) are counted from the
    engine's start.
    """

    step: int = 0
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    wasted_tokens: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    pages_total: int = 0
    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0
    update_seconds: float = 0.0


class SequenceTrace(msgspec.Struct, array_like=True, gc=False):
    """What one step computed of one request: tokens `[start, start + count)`. Its beams count as one.

    `number` is the request's in order of arrival, of all clients together; `request_id` is unique per client only.
    """

    number: int
    request_id: str
    start: int
    count: int


class RequestEvent(msgspec.Struct, array_like=True, gc=False):
    """One event of any client's request. `num_cached_tokens` is for SCHEDULED: what need not be computed (again)."""

    number: int
    request_id: str
    type: EventType
    timestamp: float
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None


class BatchEntry(msgspec.Struct, array_like=True, gc=False):
    """What a step computed of one request, and how far that request is now. Beams count as one, but for `count`.

    `number` is the request's in order of arrival; `count`: tokens that the step computed of it.
    """

    number: int
    in_prefill: bool
    count: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int


class WaitingEntry(msgspec.Struct, array_like=True, gc=False):
    """A request that waits, since `seconds` ago it arrived; `status` is that of the engine, in lower case."""

    number: int
    num_prompt_tokens: int
    seconds: float
    status: str


class HotPrefix(msgspec.Struct, array_like=True, gc=False):
    """A beginning that many requests have found in the prefix cache.

    `hits`: how many have; `pages`: how long it is; `users`: how many hold it now, pins included. The tokens are those
    of its first page and, if that is another one, of its last; none are told of a prefix under a `cache_salt`, which
    is there to keep it from others.
    """

    hits: int
    pages: int
    users: int
    is_salted: bool = False
    first_token_ids: list[int] = []
    last_token_ids: list[int] = []


class PageMap(msgspec.Struct, array_like=True, gc=False):
    """The KV pool as a picture, its pages of `page_size` tokens in order.

    `num_pages`: how many are free, held by one request, shared by several, cached (only the prefix cache has them) and
    pinned. With one page a cell, `cells` has the state of each page as a byte: its place in that order. With more,
    it is [cells][5]: the part of each state in the cell's pages, of 255.
    """

    page_size: int
    num_pages: list[int]
    pages_per_cell: int
    cells: bytes


class EngineSnapshot(msgspec.Struct, array_like=True, gc=False):
    """The engine at one moment, the result of `snapshot`. `timestamp`: seconds of the engine's monotonic clock.

    `batch`: the requests of the last step, also those that ended with it, and `waiting`, in the queue's order: the
    first of them, since there may be any number; `batch_size` and `stats.waiting` count all. `prefixes`: most hits
    first. The totals count tokens since the engine's start; prefill includes what was computed again. `seconds`:
    how long the snapshot kept the engine, so that whoever asks can ask seldom enough.
    """

    timestamp: float
    stats: SchedulerStats
    batch: list[BatchEntry]
    batch_size: int
    waiting: list[WaitingEntry]
    waiting_tokens: int
    page_map: PageMap
    prefixes: list[HotPrefix]
    total_prefill_tokens: int
    total_decode_tokens: int
    seconds: float = 0.0


class EngineCoreOutputs(msgspec.Struct, array_like=True, gc=False, tag=11):
    """Engine to client: increments for the requests of this client that one step advanced."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None
    timestamp: float = 0.0


class Ready(msgspec.Struct, array_like=True, gc=False, tag=12):
    """Engine to client, the answer to Hello: what a client needs to know of the engine; `shape` has all its sizes."""

    protocol_version: int
    model: str
    architecture: str
    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    max_num_seqs: int
    engine_pid: int
    heartbeat_seconds: float
    eos_token_ids: list[int] = []
    hidden_size: int = 0
    shape: EngineShape | None = None
    kv_cache_dtype: str = ""
    kv_cache_bytes: int = 0


class UtilityResult(msgspec.Struct, array_like=True, gc=False, tag=13):
    """Engine to client: the answer to a UtilityCall; `error` is set when it failed."""

    call_id: int
    result: Any = None
    error: str | None = None


class ErrorMessage(msgspec.Struct, array_like=True, gc=False, tag=14):
    """Engine to client: a frame was refused; `fatal` when the connection is of no use (wrong version)."""

    message: str
    fatal: bool = False


class Pong(msgspec.Struct, array_like=True, gc=False, tag=15):
    """Engine to client: I am alive; answers Ping and is also sent unasked every heartbeat.

    `last_step_age` is how many seconds ago the loop last stepped or was idle.
    """

    last_step_age: float = 0.0


class EngineGoodbye(msgspec.Struct, array_like=True, gc=False, tag=16):
    """Engine to client: the engine is going away; no more outputs follow."""

    reason: str = ""


class StepTrace(msgspec.Struct, array_like=True, gc=False, tag=17):
    """Engine to client, after `trace_start`: what one step did for all clients, and what happened since the one before.

    `begin`: when the step began; then it scheduled, executed and updated for the seconds that `stats` says. The first
    `stats.decode_tokens` of `sequences` decode, the others prefill. Without a step `stats` is None. `dropped`: so many
    traces before this one were lost, since the client did not read. `last`: the answer to `trace_stop`.
    """

    begin: float
    stats: SchedulerStats | None = None
    sequences: list[SequenceTrace] = []
    events: list[RequestEvent] = []
    dropped: int = 0
    last: bool = False


ClientMessage = EngineCoreRequest | Abort | Hello | Ping | UtilityCall | Goodbye
EngineMessage = EngineCoreOutputs | Ready | UtilityResult | ErrorMessage | Pong | EngineGoodbye | StepTrace
