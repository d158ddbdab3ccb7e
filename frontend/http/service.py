"""The served model as every endpoint sees it: its names and defaults, and the limits of the server."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.client.observer import OpenRequest
from quire.frontend.errors import EngineDeadError
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.errors import ApiError, api_error, bad_request
from quire.frontend.http.response_store import ResponseStore
from quire.frontend.http.transport.arriving_bodies import ArrivingBodies
from quire.frontend.http.transport.auth import Caller
from quire.frontend.http.transport.bodies import Body, decode, read_body
from quire.frontend.http.transport.long_work import LongWork
from quire.frontend.http.transport.memory import MemoryCeiling
from quire.frontend.http.transport.responses import json_response
from quire.frontend.http.transport.sse import (
    DONE,
    SERVER_SENT_EVENTS,
    EventStream,
    StreamFormat,
    cancelled_on_disconnect,
    event,
)
from quire.frontend.hub.names import name_of
from quire.frontend.metrics.server import ServerMetrics
from quire.frontend.outputs import RequestOutput
from quire.frontend.sampling import answer_room
from quire.frontend.text.prompts import PromptType
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import MAX_SALT, SamplingParams
from quire.protocol.options import parse_size

_MOST_SECONDS = 60
_NUM_RECENT = 64
_BODIES_PART = 8  # of the server's memory, for bodies that are arriving


def with_tag(name: str) -> str:
    """Return a model's name with its tag in Ollama's lists, which is `latest` if it has none."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


class RetryAfter:
    """An `Observer` that counts the open requests and keeps the times at which the latest ones finished.

    `clock`: seconds, as `time.monotonic()`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_open = 0
        self._since = clock()  # `_ends` holds every end since then
        self._ends: deque[float] = deque(maxlen=_NUM_RECENT)

    @property
    def num_open(self) -> int:
        """The number of open requests."""
        return self._num_open

    @property
    def seconds(self) -> int:
        """Whole seconds, 1 to 60, in which the open requests finish at the present rate.

        Until one has finished since the engine was idle, the estimate assumes that one finishes now, the earliest case.
        """
        seconds = (self._clock() - self._since) * self._num_open / max(1, len(self._ends))
        return min(max(1, math.ceil(seconds)), _MOST_SECONDS)

    def on_submitted(self, request: OpenRequest) -> None:
        """See `Observer`."""
        del request
        if self._num_open == 0:  # idle time says nothing about the rate
            self._since = self._clock()
            self._ends.clear()
        self._num_open += 1

    def on_first_tokens(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`."""

    def on_tokens(self, num_tokens: int, num_together: int, gaps: list[float], timestamp: float) -> None:
        """See `Observer`."""

    def on_finished(self, request: OpenRequest, timestamp: float) -> None:
        """See `Observer`. Rejected requests say nothing about the rate."""
        self._num_open -= 1
        if request.error is None:
            if len(self._ends) == self._ends.maxlen:
                self._since = self._ends[0]
            self._ends.append(timestamp)


B = TypeVar("B", bound=Body)
R = TypeVar("R")

logger = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout"
SESSION_HEADER = "x-session-id"
_BODY_BYTES = "body_bytes"  # of a request, in its scope


class Terms(TypedDict):
    """The terms on which the engine serves a request, as arguments of `generate` and `embed`."""

    timeout: float | None
    tenant: str
    cache_salt: str
    session: str | None


@dataclass
class ModelService:
    """The server's one model, in an engine that may run anywhere.

    `names`: the names that clients may use, the one that responses use first. `defaults`: the model's own sampling
    parameters. `has_chat_template`: whether it can answer conversations. `responses`: where responses are stored.
    """

    llm: AsyncLLM
    args: ServerArgs
    names: Sequence[str]
    metrics: ServerMetrics
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_chat_template: bool = True
    responses: ResponseStore | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    long_work: LongWork = field(default_factory=LongWork)
    load: RetryAfter = field(default_factory=RetryAfter)
    draining: bool = False

    def __post_init__(self) -> None:
        limit = parse_size(str(self.args.server_memory_limit))
        self.memory = MemoryCeiling(limit)
        self._arriving = ArrivingBodies(max(limit // _BODIES_PART, self.args.max_body_bytes))

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self.llm.tokenizer

    @property
    def name(self) -> str:
        """The model's name in responses."""
        return self.names[0]

    async def warm_up(self) -> None:
        """Load what the first chat needs, so that no client waits for it."""
        if self.has_chat_template:
            try:
                await self.llm.chat_prompt([{"role": "user", "content": "Hello"}])
            except ValueError as error:
                logger.warning("chats may fail: %s", error)
        _ = self.llm.answer_format  # cached from here on

    @property
    def public_names(self) -> list[str]:
        """The names that `/v1/models` lists: without the model's folder, unless it is the only one."""
        return [name for name in dict.fromkeys(self.names) if not name.startswith("/")] or list(self.names[:1])

    @staticmethod
    def now() -> int:
        """Return the time as responses give it: seconds since 1970."""
        return int(time.time())

    @property
    def retry_after(self) -> int:
        """Seconds after which a rejected request is worth another try."""
        return self.load.seconds

    def check_open(self) -> None:
        """Raise `ApiError` 503 while the server is shutting down."""
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down: it finishes open requests and accepts no new ones; send this one to "
                "another server",
                code="shutting_down",
                headers={"Retry-After": str(self.retry_after), "Connection": "close"},
            )

    def is_named(self, name: str) -> bool:
        """Return True for a name of the model, with or without its tag."""
        return with_tag(name) in map(with_tag, self.names)

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` 404 unless `name` is one of the model's or None."""
        if name is None or self.is_named(name):
            return
        known = ", ".join(self.public_names)
        raise ApiError(
            404, f"the model {name!r} does not exist; this server has {known}", code="model_not_found", param="model"
        )

    async def read(self, request: Request, kind: type[B]) -> B:
        """Return the body of a request for this model. Raises `ApiError` 400, 404, 408, 413, 415 or 503."""
        body = await self.read_any(request, kind)
        self.check_model(body.model)
        return body

    async def read_any(self, request: Request, kind: type[B]) -> B:
        """Return the body of a request, whichever model it names. Raises `ApiError` 400, 408, 413, 415 or 503."""
        address = "" if request.client is None else request.client.host
        with self._arriving.body(address) as grow:

            def reserve(num_bytes: int) -> None:
                self.memory.check()
                grow(num_bytes)

            body = await read_body(request, self.args, reserve, kind.is_lenient)
        request.scope[_BODY_BYTES] = len(body)
        party = f"{self.caller(request).key} {address}"
        return await decode(body, kind, self.long_work.runner(party, len(body)))

    async def convert(self, request: Request, work: Callable[[], R]) -> R:
        """Return `work()`, which goes through the body of a request: where tenants take turns, if the body is long."""
        return await self.llm.run_python(work, request.scope[_BODY_BYTES])

    async def respond(
        self,
        request: Request,
        whole: Callable[[], Awaitable[msgspec.Struct]],
        events: AsyncGenerator[bytes, None] | None,
        explain: Callable[[Exception], bytes] | None = None,
        form: StreamFormat = SERVER_SENT_EVENTS,
    ) -> Response:
        """Return an answer: a stream of `events`, else the `whole`, which is cancelled if the client disconnects."""
        if events is not None:
            return self.stream(events, explain, form)
        async with cancelled_on_disconnect(request.receive):
            return json_response(await whole())

    def check_count(self, num_prompts: int, params: SamplingParams) -> None:
        """Raise `ApiError` 400 for more completions than one body may request."""
        name = "n" if params.best_of is None else "best_of"
        each = getattr(params, name)
        count = num_prompts * each
        if count > self.args.max_prompts:
            raise bad_request(
                f"{num_prompts} prompts with {name}={each} are {count} completions, and one request "
                f"may have {self.args.max_prompts}; send several requests, or raise --max-prompts",
                "prompt" if num_prompts > 1 else name,
            )

    def check_texts(self, count: int, characters: int = 0) -> None:
        """Raise `ApiError` 400 for more texts than one body may have, or more characters of pairs than of a body."""
        if count > self.args.max_prompts:
            raise bad_request(
                f"{count} prompts are given, and one request may have {self.args.max_prompts}; send several requests, "
                "or raise --max-prompts"
            )
        if characters > self.args.max_body_bytes:
            raise bad_request(
                f"the texts of all pairs have {characters} characters, since each document is read with its query, and "
                f"{self.args.max_body_bytes} are allowed; send fewer documents, shorten the query, or raise "
                "--max-body-bytes"
            )

    def check_template(self, chat_template: str | None) -> None:
        """Raise `ApiError` 400 for a client's own chat template, unless the server trusts them."""
        if chat_template is not None and not self.args.trust_request_chat_template:
            raise bad_request(
                "chat_template is not accepted from clients, since a template is a program; use the model's, or start "
                "the server with --trust-request-chat-template",
                "chat_template",
            )

    async def prepared(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams, last: int | None, add_special_tokens: bool
    ) -> Sequence[PromptType]:
        """Prepare the prompts of a body for `generate`, which prepares a single prompt itself."""
        if len(prompts) == 1:
            return prompts
        return await self.llm.prompts(
            prompts,
            truncate_prompt_tokens=last,
            add_special_tokens=add_special_tokens,
            room=answer_room(params, self.llm.max_model_len),
        )

    def prompt_text(self, output: RequestOutput) -> str:
        """Return the prompt as text: as it was given, or decoded from its tokens."""
        if output.prompt is not None:
            return output.prompt
        return self.require_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)

    def api_error(self, error: Exception) -> ApiError:
        """Return the error response for an exception; a defect is logged, and its details are kept from the client."""
        response = api_error(error, self.retry_after)
        if isinstance(error, EngineDeadError) and self.llm.dead_error is None:  # else its details end the server's log
            logger.error("a request failed: %s", error)
        if response is None:
            logger.error("a request failed because of a defect in the server", exc_info=error)
            message = f"the server failed ({type(error).__name__}); its log has the details"
            response = ApiError(500, message, code="internal")
        return response

    def stream(
        self,
        events: AsyncGenerator[bytes, None],
        explain: Callable[[Exception], bytes] | None = None,
        form: StreamFormat = SERVER_SENT_EVENTS,
    ) -> EventStream:
        """Return a streamed response; an error ends it as an event, in OpenAI's shape unless `explain` is given."""
        return EventStream(events, explain or self._last_events, self.metrics.http.stream, form)

    def _last_events(self, error: Exception) -> bytes:
        return event(msgspec.json.encode(self.api_error(error).body)) + DONE

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `ApiError` 400 if the model has none."""
        if self.tokenizer is None:
            raise bad_request("this model has no tokenizer, so it accepts and returns token ids only")
        return self.tokenizer

    def caller(self, request: Request) -> Caller:
        """Return the sender of a request."""
        return cast("Caller", request.scope["caller"])

    def tenant(self, request: Request) -> str:
        """Return the party of a request that takes turns with others: its API key, or its connection without any."""
        return self.caller(request).tenant

    def terms(self, request: Request, cache_salt: str | None = None, session: str | None = None) -> Terms:
        """Return the terms on which the engine serves a request. Raises `ApiError` 400.

        `session`: the name of its conversation in the body; the header X-Session-ID comes first.
        """
        given = cache_salt or ""
        if len(given) > MAX_SALT:
            raise bad_request(f"cache_salt has {len(given)} characters; it may have {MAX_SALT}", "cache_salt")
        caller = self.caller(request)
        session = request.headers.get(SESSION_HEADER) or session
        if session is not None and len(session) > MAX_SALT:
            raise bad_request(f"the name of the session has {len(session)} characters; it may have {MAX_SALT}")
        salt = caller.cache_salt(given)
        return Terms(timeout=self.timeout(request), tenant=caller.tenant, cache_salt=salt, session=session)

    def timeout(self, request: Request) -> float | None:
        """Return the seconds that a request may take: the header's, but at most the server's."""
        text, most = request.headers.get(TIMEOUT_HEADER), self.args.request_timeout
        if text is None:
            return most
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < 1e9:
            raise bad_request(f"X-Request-Timeout: {text!r} is not a time; give seconds above 0", "X-Request-Timeout")
        return seconds if most is None else min(seconds, most)


class Endpoints:
    """Handlers of an API's endpoints."""

    def __init__(self, service: ModelService) -> None:
        self._service = service


def names_of(args: ServerArgs, model: str, demo_model: str) -> list[str]:
    """Return the names of a model: those given, or its name at the hub or its folder's name, and the folder itself."""
    if args.served_model_name:
        return list(args.served_model_name)
    name = "quire-demo" if model == demo_model else name_of(model)
    return [name, model]
