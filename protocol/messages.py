"""Every message that crosses a process boundary, as msgspec Structs.

All messages are msgpack arrays (`array_like`), and each direction is one tagged union (`ClientMessage`,
`EngineMessage`), so a frame decodes into a declared type or not at all. Times are seconds of the engine's monotonic
clock. Token ids are ints in `[0, vocab_size)`.
"""

from __future__ import annotations

import copy
import enum
from typing import Annotated, Any, Literal, Self

import msgspec

from quire.protocol.engine_shape import EngineShape
from quire.protocol.options import F32_MAX, MAX_INT64, Length, Option, Range, lengths_of, options_of

PROTOCOL_VERSION = 16


class Role(enum.StrEnum):
    """Role of a client at the engine: the calls and fields that it may use."""

    CLIENT = "client"  # its own requests, and `stats`
    ADMIN = "admin"  # whatever concerns others as well


class FinishReason(enum.IntEnum):
    """Reason for which a request ended; `str(reason)` is the word that users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    TIMEOUT = 4

    def __str__(self) -> str:
        return self.name.lower()


class ErrorKind(enum.IntEnum):
    """Cause of an ERROR, and so what a client may do about it."""

    INVALID = 1  # the request cannot be served as it is
    OVERLOADED = 2  # too many requests are waiting: send it again later
    SHUTTING_DOWN = 3  # the engine ends: send the request to another one
    FAILED = 4  # the engine failed
    UNAVAILABLE = 5  # the engine lacks something that it is likely to have soon: send it again later


class EventType(enum.IntEnum):
    """Kind of an event of a request inside the engine."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3
    FIRST_TOKEN = 4
    FINISHED = 5


MAX_ABORTED = 1 << 14
"""Requests that one Abort may name."""

MAX_TOKENS = 1 << 21
"""Tokens of a list: what is longer is rejected before it is decoded, which would hold others up."""

TokenIds = Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)]

MAX_CONSTRAINT = 1 << 18
"""Characters of a JSON schema or a grammar."""


class StructuredOutputs(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """Constraint on the text of an answer. One of the first five is given; names and meanings are vLLM's.

    `json`: a JSON schema, as text or as an object; `regex`: one that the whole text matches, in the syntax of Rust's
    `regex`; `choice`: one of these texts; `grammar`: Lark, or GBNF as llama.cpp has it; `json_object`: any JSON object.
    Whitespace in JSON is limited to a space or two, or a line break with some indentation, so that no model writes
    blanks for ever; or to the regular expression `whitespace_pattern`; or to none with `disable_any_whitespace`.
    """

    json: Annotated[str | dict[str, Any] | None, Length(MAX_CONSTRAINT)] = None
    regex: Annotated[str | None, Length(16_384)] = None
    choice: Annotated[list[str] | None, Length(1000, 65_536)] = None
    grammar: Annotated[str | None, Length(MAX_CONSTRAINT)] = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: Annotated[str | None, Length(1024)] = None

    @property
    def kinds(self) -> list[str]:
        """Names of the constraints that are given."""
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        return [*given, "json_object"] if self.json_object else given


MAX_COMPLETIONS = 1024
MAX_LOGPROBS = 20
MAX_SEED = MAX_INT64  # 63 bits, so that they fit any signed 64-bit reader
LOGIT_BIAS = Range(-100.0, 100.0)
PRIORITY = Range(-1_000_000, 1_000_000)
MAX_SALT = 1024
"""Characters of a `cache_salt`."""

MAX_ADDRESS = 1024
"""Characters of an engine's address in a message."""

MAX_PATH = 4096
"""Characters of an adapter's path."""

MAX_NAMED_PEERS = 256
"""Engines that a client names at once as KV peers of another."""

MAX_WATCHED_SALTS = 1 << 14
"""Salts of which a client can watch the prefixes."""

MAX_TENANT = 256
"""Characters of a `tenant`."""

_PENALTY = Range(-2.0, 2.0)
_COMPLETIONS = Range(1, MAX_COMPLETIONS)
_LOGPROBS = Range(0, MAX_LOGPROBS)


_MAX_TOKEN_LISTS = 4096
_TokenLists = Annotated[list[list[int]], msgspec.Meta(max_length=_MAX_TOKEN_LISTS)]  # decoding many takes a second


class SamplingParams(msgspec.Struct, array_like=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of a request, and when it ends. Field names and meanings are vLLM's.

    `stop`, `bad_words`, `detokenize`, `skip_special_tokens`, `spaces_between_special_tokens`,
    `include_stop_str_in_output`, `n` and `best_of` concern text or several requests and are carried out by the
    frontend. The engine reads the rest, and rejects `stop`, `bad_words`, `best_of` and an `n` above 1.

    `length_penalty` and `early_stopping` belong to a beam search and mean what they do in `transformers`.
    `structured_outputs`: constraint on the text. A grammar comes before everything else: the tokens that it forces are
    appended even where `bad_words`, `allowed_token_ids` or `min_tokens` ban them. An eos token, or one of
    `stop_token_ids`, may be sampled where the text may end. Where it can only end, the answer ends, whatever
    `ignore_eos` and `min_tokens` say.

    Sampling:
        n: Completions of a prompt.
        presence_penalty: Subtracted once from the logit of each token in the answer.
        frequency_penalty: Subtracted from the logit of a token for each time it occurred.
        repetition_penalty: Above 1: tokens of the prompt and the answer become less likely.
        temperature: 0: always the likeliest token; higher: more varied.
        top_p: Sample among the likeliest tokens with this total probability; 0: the likeliest; 1: all.
        top_k: Sample among this many of the likeliest tokens; 0 or -1: all.
        min_p: Sample among tokens of at least P times the likeliest's probability.
        seed: The same seed gives the same answer. Default: a fresh one.
        stop: End the answer before this text.
        stop_token_ids: End the answer with any of these tokens.
        bad_words: Texts that are never part of the answer, whatever tokens write them.
        ignore_eos: Go on after the model's end token.
        max_tokens: Tokens of the answer; None: up to the context length.
        min_tokens: Tokens before which the answer cannot end.
        logprobs: Log probabilities of this many tokens at each position.
        prompt_logprobs: The same for the prompt's tokens.
        best_of: Completions to make; the n with the highest log probability per token are returned. Default: n.
        beam_width: Width of a beam search, which returns its n best sequences; 0: none.
        length_penalty: Power of its length that a beam's log probability is divided by.
    """

    n: Annotated[int, Option("N", _COMPLETIONS)] = 1
    presence_penalty: Annotated[float, Option("X", _PENALTY)] = 0.0
    frequency_penalty: Annotated[float, Option("X", _PENALTY)] = 0.0
    repetition_penalty: Annotated[float, Option("X", Range(0.0, F32_MAX, closed=False))] = 1.0
    temperature: Annotated[float, Option("X", Range(0.0, F32_MAX))] = 1.0
    top_p: Annotated[float, Option("P", Range(0.0, 1.0))] = 1.0
    top_k: Annotated[int, Option("N", Range(-1, MAX_INT64))] = 0
    min_p: Annotated[float, Option("P", Range(0.0, 1.0))] = 0.0
    seed: Annotated[int | None, Option("N", Range(0, MAX_SEED))] = None
    stop: Annotated[list[str] | None, Option("TEXT"), Length(256, 4096)] = None
    stop_token_ids: Annotated[list[int] | None, Option("ID"), Length(4096)] = None
    bad_words: Annotated[list[str] | None, Option("TEXT"), Length(1024, 8192)] = None
    ignore_eos: Annotated[bool, Option()] = False
    max_tokens: Annotated[int | None, Option("N", Range(1, MAX_INT64))] = 16
    min_tokens: Annotated[int, Option("N", Range(0, MAX_INT64))] = 0
    logprobs: Annotated[int | None, Option("N", _LOGPROBS)] = None
    prompt_logprobs: Annotated[int | None, Option("N", _LOGPROBS)] = None
    logit_bias: Annotated[dict[int, float] | None, Length(16_384)] = None
    allowed_token_ids: Annotated[list[int] | None, Length(65_536)] = None
    bad_words_token_ids: Annotated[_TokenLists | None, Length(_MAX_TOKEN_LISTS, 65_536)] = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    best_of: Annotated[int | None, Option("N", _COMPLETIONS)] = None
    beam_width: Annotated[int, Option("N", Range(0, MAX_COMPLETIONS))] = 0
    length_penalty: Annotated[float, Option("X", Range(-10.0, 10.0))] = 1.0
    early_stopping: bool | Literal["never"] = False
    structured_outputs: StructuredOutputs | None = None

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Return parameters where None stands for a field's default; `max_tokens=None` is a value of its own.

        As in vLLM the token ids of `logit_bias` may be text, as they are in JSON, and its values are clamped to the
        allowed range. Raises `ValueError` for text that is no token id.
        """
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if (biases := given.get("logit_bias")) is not None:
            low, high, _ = LOGIT_BIAS
            given["logit_bias"] = {_token_id(token): min(max(bias, low), high) for token, bias in biases.items()}
        return cls(**given)

    def clone(self) -> Self:
        """Return a copy that shares no list or dict with these."""
        return copy.deepcopy(self)


def _token_id(given: int | str) -> int:
    try:
        return int(given)
    except ValueError:
        raise ValueError(f"logit_bias has {given!r}; its keys are token ids, as numbers or text") from None


SAMPLING_RANGES = {name: row.range for name, row in options_of(SamplingParams).items() if row.range is not None}
"""Ranges of the numbers among sampling parameters."""

SAMPLING_LENGTHS = lengths_of(SamplingParams)
"""Most entries of the lists and dicts among sampling parameters, so that none of them takes long to check or apply."""

STRUCTURED_LENGTHS = lengths_of(StructuredOutputs)
"""The same for the lists of a constraint."""


class PoolingParams(msgspec.Struct, array_like=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    """Pooling of the hidden states of a prompt into its embedding, or the scores of its labels. Names are vLLM's.

    `pooling_type`: the hidden state of the last or the first token, or the mean or the maximum over all tokens, after
    the model's final norm. All but the last compute every token, whatever the prefix cache holds, and fill the cache
    for others. `dimensions`: keep the first values, this many, for models that were trained for it (Matryoshka
    embeddings); None keeps all. `normalize`: scale the kept values to length 1. `num_skipped`: tokens at the beginning
    that a mean or a maximum leaves out. `task`: "embed", or "classify", to which only `use_activation` applies: False
    gives logits instead of scores. None stands for the model's own.
    """

    pooling_type: Literal["last", "mean", "cls", "max"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    num_skipped: Annotated[int, msgspec.Meta(ge=0)] = 0
    task: Literal["embed", "classify"] = "embed"
    use_activation: bool | None = None

    def clone(self) -> Self:
        """Return a copy."""
        return copy.deepcopy(self)


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

    Requests with a lower `priority` come first under the scheduling policy "priority". Requests share KV pages only if
    they have the same `cache_salt`. `timeout`: seconds after its arrival at the engine at which the request ends.
    `shares_prompt_with` is the id of an earlier request of this client with the same prompt and salt: the prompt is
    computed once for both. It is ignored if that request has ended already. With `pooling` nothing is generated: the
    request ends with its embedding when the prompt is computed; `sampling_params` must be the defaults.
    `generated_token_ids` are those that an engine which is gone has generated already: the request goes on after them
    as it would have there, and they count for its lengths, penalties and grammar. Tenants share the engine fairly:
    every client is one, and an administrator may send a request for another, named in `tenant`. Those whose names begin
    alike up to a "/" are a group, and have their grammars compiled in turn, as one tenant would. With `remote_prefill`
    another engine, a KV peer of this one, is about to compute the prompt: the request waits for its KV pages, as long
    as some come. `kv_source` is the address of that peer, or of one that has pages of the prompt, which are fetched if
    that takes less time than computing them; "": the peer that the engine was started with. `identity` is a random
    number that the request keeps when it is sent again: an engine knows by it which requests the ones before it have
    died of. 0: the request has none, and is never suspected. `segment`: the position at which the second text of a pair
    begins, for a model that tells them apart; 0: there is one. `predicted_token_ids`: what it will probably generate;
    where that is right the answer comes sooner, and it never changes. `adapter`: the folder or file of the LoRA adapter
    that changes the model for this request, as the engine sees it; "": none. KV pages are shared by requests whose
    adapters have the same contents.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling_params: SamplingParams
    eos_token_ids: TokenIds = []
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    timeout: float | None = None
    shares_prompt_with: str | None = None
    pooling: PoolingParams | None = None
    generated_token_ids: TokenIds = []
    tenant: str = ""
    remote_prefill: bool = False
    identity: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)] = 0
    segment: Annotated[int, msgspec.Meta(ge=0)] = 0
    predicted_token_ids: TokenIds = []
    kv_source: Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS)] = ""
    adapter: Annotated[str, msgspec.Meta(max_length=MAX_PATH)] = ""


class Abort(msgspec.Struct, array_like=True, gc=False, tag=2, forbid_unknown_fields=True):
    """Client to engine: end these requests. Each that has not ended yet gets its terminal output (ABORT)."""

    request_ids: Annotated[list[str], msgspec.Meta(max_length=MAX_ABORTED)]


class Hello(msgspec.Struct, array_like=True, gc=False, tag=3):
    """Client to engine, first message of a connection.

    The only message that may have unknown fields: of a later version, so that the error names the version.
    """

    protocol_version: int
    client_name: str = ""


class Ping(msgspec.Struct, array_like=True, gc=False, tag=4, forbid_unknown_fields=True):
    """Client to engine: heartbeat, answered with Pong."""


class Reload(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Arguments of the utility call `reload`: another process takes the engine's place, with other settings.

    `settings`: options of `EngineOptions` by name, None for an option's default; the others stay as they are.
    `drain_timeout`: seconds that requests which have begun get to end in the engine before; others wait for the new
    one meanwhile. 0: all move at once.
    """

    settings: dict[str, bool | int | float | str | list[str] | None] = {}
    drain_timeout: float = 0.0


MAX_SHOWN_RUNS = 128
MAX_SHOWN_BRANCHES = 200
ShownBranches = Annotated[
    dict[int, Annotated[int, msgspec.Meta(ge=0, le=MAX_SHOWN_BRANCHES)]], msgspec.Meta(max_length=MAX_SHOWN_RUNS)
]


class UtilityCall(msgspec.Struct, array_like=True, gc=False, tag=5, forbid_unknown_fields=True):
    """Client to engine: call one of `stats`, `reset_cache`, `pin_prefix`, `unpin_prefix`, `trace_start`, `trace_stop`,
    `snapshot`, `prefix_tree`, `reload`, `shutdown`. All but `stats` concern other clients too, and need the role ADMIN.

    `token_ids` and `cache_salt` name the prefix to pin or unpin. `shown`: how many branches the tree has of some of its
    runs, by their ids.
    """

    call_id: int
    method: str
    token_ids: TokenIds = []
    cache_salt: str = ""
    reload: Reload | None = None
    shown: ShownBranches = {}


class Goodbye(msgspec.Struct, array_like=True, gc=False, tag=6, forbid_unknown_fields=True):
    """Client to engine: the client leaves now; its remaining requests are aborted."""

    reason: str = ""


class KvHello(msgspec.Struct, array_like=True, gc=False, tag=7, forbid_unknown_fields=True):
    """Engine to engine, as its client: what KV have you? Answered with KvWelcome, maybe seconds later."""


class KvFetch(msgspec.Struct, array_like=True, gc=False, tag=8, forbid_unknown_fields=True):
    """Engine to engine, as its client: send the KV pages of a prefix, `count` of them from number `first` on.

    `token_ids` are those of the prefix and one more. `fetch_id` is unique per client. With `is_expected` the prompt is
    being computed, or is about to be: pages follow as they are computed. Answered with a KvPage for each page in turn,
    as far as KvAck allows, and a KvFetched in any case.
    """

    fetch_id: int
    token_ids: TokenIds
    cache_salt: str
    first: int
    count: int
    is_expected: bool = False


class KvAck(msgspec.Struct, array_like=True, gc=False, tag=9, forbid_unknown_fields=True):
    """Engine to engine: so many pages of a fetch have been taken; more may be sent."""

    fetch_id: int
    count: int


class KvCancel(msgspec.Struct, array_like=True, gc=False, tag=10, forbid_unknown_fields=True):
    """Engine to engine: a fetch is given up. No answer."""

    fetch_id: int


class WatchPrefixes(msgspec.Struct, array_like=True, gc=False, tag=21, forbid_unknown_fields=True):
    """Ask for a `PrefixReport` of all that is cached under these salts, and of what comes and goes there from now on.

    For administrators. Each message adds salts to those before, up to `MAX_WATCHED_SALTS` of a client.
    """

    salts: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=MAX_SALT)]], msgspec.Meta(max_length=MAX_WATCHED_SALTS)
    ]


class KvPeers(msgspec.Struct, array_like=True, gc=False, tag=23, forbid_unknown_fields=True):
    """Name engines from which this one may fetch KV pages, in place of those that this client has named before.

    For administrators. The engine leaves them when the client leaves it.
    """

    addresses: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS)]], msgspec.Meta(max_length=MAX_NAMED_PEERS)
    ]


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """Increment of a request by one or more steps. The output with a `finish_reason` is the request's last.

    `stop_reason`: the token id of `stop_token_ids` that stopped it, None for an eos token. `error` and `error_kind`
    explain the `finish_reason` ERROR. `new_prompt_logprobs` come once, with the first output after the prompt was
    computed (entry 0 is None). `events` keep their times however many outputs are merged into one. A beam search has
    one output, its last, with its `beams`, the best first; a request with `pooling` one with its `pooled` vector as
    little-endian f32, and STOP. `is_whole`: the request stopped because its grammar allows nothing more, so that its
    last token belongs to the text. The last output has the numbers of drafts that have held, and not.
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
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """State of the engine after one step. Pages are KV pages: `free + cached + held == total` always.

    So it is with the records of state of a model that keeps it in place of KV (`states_...`); others have none.

    Tokens and seconds are those of the step. `prefill_tokens`: tokens of prompts, recomputed tokens after a preemption
    and forced tokens; `cached_tokens`: prompt tokens of admitted requests that were found in the prefix cache.
    `preemptions`, `evictions` (pages), `state_evictions` (snapshots) and `wasted_tokens` (computed again after a
    preemption) count from the engine's start.
    `draft_tokens` were computed beside those of `decode_tokens`, and of them `accepted_tokens` have held.
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
    draft_tokens: int = 0
    accepted_tokens: int = 0
    states_free: int = 0
    states_cached: int = 0
    states_held: int = 0
    states_total: int = 0
    state_evictions: int = 0


class SequenceTrace(msgspec.Struct, array_like=True, gc=False):
    """Part of a step that belongs to one request: tokens `[start, start + count)`. Its beams count as one.

    The last `num_drafts` of the tokens were drafted, and the first `num_accepted` of these have held.

    `number` is the request's in order of arrival, of all clients together; `request_id` is unique per client only.
    """

    number: int
    request_id: str
    start: int
    count: int
    num_drafts: int = 0
    num_accepted: int = 0


class RequestEvent(msgspec.Struct, array_like=True, gc=False):
    """One event of any client's request. `num_cached_tokens`: for SCHEDULED, tokens found in the prefix cache."""

    number: int
    request_id: str
    type: EventType
    timestamp: float
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None


class BatchEntry(msgspec.Struct, array_like=True, gc=False):
    """A request in the batch of a step, and its progress. Beams count as one, except in `count`.

    `number`: the request's, in order of arrival; `count`: tokens that the step computed of it.
    """

    number: int
    in_prefill: bool
    count: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int


class WaitingEntry(msgspec.Struct, array_like=True, gc=False):
    """A waiting request, which arrived `seconds` ago; `status` is the engine's, in lower case."""

    number: int
    num_prompt_tokens: int
    seconds: float
    status: str


class HotPrefix(msgspec.Struct, array_like=True, gc=False):
    """A prefix that many requests have found in the prefix cache.

    `hits`: requests that found it; `pages`: its length; `users`: those that hold it now, pins included. The tokens are
    those of its first page and, if that is another one, of its last; a prefix with a `cache_salt` has none here, since
    the salt keeps it from others.
    """

    hits: int
    pages: int
    users: int
    is_salted: bool = False
    first_token_ids: list[int] = []
    last_token_ids: list[int] = []


class PageMap(msgspec.Struct, array_like=True, gc=False):
    """Picture of the KV pool, its pages of `block_size` tokens in order.

    `num_pages`: numbers of free pages, of pages held by one request, shared by several, cached (held by the prefix
    cache alone), and pinned. With one page a cell, `cells` has a byte for each page: the index of its state in that
    order. With more, it is [cells][5]: the share of each state in the cell's pages, out of 255.
    """

    block_size: int
    num_pages: list[int]
    pages_per_cell: int
    cells: bytes


class EngineSnapshot(msgspec.Struct, array_like=True, gc=False):
    """The engine at one moment, the result of `snapshot`. `timestamp`: seconds of the engine's monotonic clock.

    `batch`: requests of the last step, including those that ended with it; `waiting`: waiting requests in the order of
    the queue. Both are cut; `batch_size` and `stats.waiting` count all. `prefixes`: most hits first. The totals count
    tokens since the engine's start; prefill includes recomputation, and decode the drafts that have held. `seconds`:
    time that the snapshot took, so that clients can choose how often to ask.
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
    total_draft_tokens: int = 0
    total_accepted_tokens: int = 0


class PrefixRun(msgspec.Struct, array_like=True, gc=False):
    """A node of the prefix cache: pages that follow each other without a branch, since all who had one had the next.

    `id`: that of no later run while its first page stays; an ended salt may give its own to another salt. `parent`:
    index of the run that it follows. A salt is a run without pages, and what follows it is salted too. `hits`: requests
    that found its first page, or any page below a salt; `users`: those that hold its first page now, pins included.
    `num_pages`: its own, by their states as in `PageMap`: a page may be evicted if it is cached, the last ones of a run
    first. `branches` and `pages_below` count all runs that follow it and their pages, whether the tree has them or not;
    `is_next_evicted`: its last page is the least recently used one. The tokens are the first of its first page and, if
    that is another one, of its last; salted runs have none here, since the salt keeps them from others.
    """

    id: int
    parent: int
    is_salted: bool
    hits: int
    users: int
    num_pages: list[int]
    branches: int
    pages_below: int
    is_next_evicted: bool = False
    first_token_ids: list[int] = []
    last_token_ids: list[int] = []


class PrefixTree(msgspec.Struct, array_like=True, gc=False):
    """A part of the prefix cache as a tree, the result of `prefix_tree`.

    `runs`: parents first, the runs of one parent by their hits; the first is the cache as a whole, with the id -1 and
    no pages of its own. `seconds`: time that it took, so that clients can choose how often to ask.
    """

    block_size: int
    runs: list[PrefixRun]
    seconds: float = 0.0


class EngineCoreOutputs(msgspec.Struct, array_like=True, gc=False, tag=11):
    """Engine to client: increments for the requests of this client that one step advanced."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None
    timestamp: float = 0.0


class AdapterInfo(msgspec.Struct, frozen=True):
    """The LoRA adapters that requests to an engine may name.

    `folders`: those that have names, by these. `takes_any`: requests may name others too. `max_loras`: those in memory
    at a time. `max_rank`: the largest rank.
    """

    folders: dict[str, str] = {}
    takes_any: bool = False
    max_loras: int = 0
    max_rank: int = 0


class Ready(msgspec.Struct, array_like=True, gc=False, tag=12):
    """Engine to client, the answer to Hello: facts about the engine that clients need; `shape` has all its sizes.

    `role` is the client's. `text_files` is a hash of the tokenizer's and the chat templates' files: an engine in
    another's place has the same. `adapters`: None if requests may name none. `device`: cpu, or a GPU as cuda:0, whose
    product is named by `device_product`; its bits are those of a CPU unless it has `fast_matmul`.
    """

    protocol_version: int
    model: str
    architecture: str
    max_model_len: int
    vocab_size: int
    num_pages: int
    block_size: int
    max_num_seqs: int
    engine_pid: int
    heartbeat_seconds: float
    eos_token_ids: list[int] = []
    hidden_size: int = 0
    shape: EngineShape | None = None
    kv_cache_dtype: str = ""
    kv_cache_bytes: int = 0
    role: Role = Role.ADMIN
    memory_limit: int = 0  # bytes that the engine's process may take
    has_kv_peer: bool = False  # the engine was started with a KV peer
    text_files: str = ""
    adapters: AdapterInfo | None = None
    device: str = "cpu"
    device_product: str = ""
    fast_matmul: bool = False


class UtilityResult(msgspec.Struct, array_like=True, gc=False, tag=13):
    """Engine to client: the answer to a UtilityCall; `error` is set when it failed."""

    call_id: int
    result: Any = None
    error: str | None = None


class ErrorMessage(msgspec.Struct, array_like=True, gc=False, tag=14):
    """Engine to client: a frame was rejected; `fatal` if the connection is unusable (wrong version)."""

    message: str
    fatal: bool = False


class Pong(msgspec.Struct, array_like=True, gc=False, tag=15):
    """Engine to client: heartbeat; the answer to Ping, and also sent unasked.

    `last_step_age`: seconds since the loop last stepped or was idle.
    """

    last_step_age: float = 0.0


class EngineGoodbye(msgspec.Struct, array_like=True, gc=False, tag=16):
    """Engine to client: the engine ends; no more outputs follow.

    If it `gives_way`, another one takes its place, to which clients send their open requests again.
    """

    reason: str = ""
    gives_way: bool = False


class StepTrace(msgspec.Struct, array_like=True, gc=False, tag=17):
    """Engine to client, after `trace_start`: one step for all clients, and the events since the step before.

    `begin`: start of the step, which then scheduled, executed and updated for the seconds in `stats`. The first
    `stats.decode_tokens` of `sequences` decode, the others prefill. Without a step `stats` is None. `dropped`: traces
    lost before this one because the client did not read. `last`: the answer to `trace_stop`.
    """

    begin: float
    stats: SchedulerStats | None = None
    sequences: list[SequenceTrace] = []
    events: list[RequestEvent] = []
    dropped: int = 0
    last: bool = False


class KvWelcome(msgspec.Struct, array_like=True, gc=False, tag=18):
    """The answer to KvHello. Engines with the same `format` have the same KV for the same tokens, bit for bit."""

    format: str


class KvPage(msgspec.Struct, array_like=True, gc=False, tag=19):
    """The KV of a page, the one after those that were sent before. `checksum`: that of `data`.

    `data` is any contiguous buffer, and travels as a frame of its own.
    """

    fetch_id: int
    checksum: int
    data: Any = None


class KvFetched(msgspec.Struct, array_like=True, gc=False, tag=20):
    """The end of a fetch; `error` if it was not for want of pages. `count`: pages that there were to be sent."""

    fetch_id: int
    error: str | None = None
    count: int = 0


class PrefixReport(msgspec.Struct, array_like=True, gc=False, tag=22):
    """Pages that the prefix cache has lost since the last report, and then those that it has gained.

    It is what `WatchPrefixes` asks for. A prefix of full pages is known by a number of 64 bits. `roots`: the numbers of
    the empty prefixes of salts that have not been told before. `removed`: prefixes whose last page has gone. `stored`:
    pages that follow one another; each entry is the number of the prefix before them, those of the prefixes that end
    with each of them, and the tokens of all. Prefixes come after those that they extend. All pages may take several
    reports. `refusal`: why the engine doesn't watch the salts of the last `WatchPrefixes`; then it tells nothing else.
    """

    roots: list[tuple[int, str]] = []
    removed: list[int] = []
    stored: list[tuple[int, list[int], list[int]]] = []
    refusal: str = ""


ClientMessage = (
    EngineCoreRequest
    | Abort
    | Hello
    | Ping
    | UtilityCall
    | Goodbye
    | KvHello
    | KvFetch
    | KvAck
    | KvCancel
    | WatchPrefixes
    | KvPeers
)
KvMessage = KvHello | KvAck | KvCancel  # those that need not wait for the engine's step to end
EngineMessage = (
    EngineCoreOutputs
    | Ready
    | UtilityResult
    | ErrorMessage
    | Pong
    | EngineGoodbye
    | StepTrace
    | PrefixReport
    | KvWelcome
    | KvPage
    | KvFetched
)
