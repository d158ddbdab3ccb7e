"""A loaded model as its endpoints see it: its names and defaults, and the limits of the server."""

from __future__ import annotations

import copy
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
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.response_store import ResponseStore
from quire.frontend.http.server_state import ServerState, body_bytes, caller_of, now
from quire.frontend.http.transport.auth import Caller
from quire.frontend.http.transport.bodies import Body
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
from quire.frontend.lora_request import LoRARequest
from quire.frontend.metrics.server import ServerMetrics
from quire.frontend.outputs import RequestOutput
from quire.frontend.sampling import answer_room
from quire.frontend.text.prompts import PromptType
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import MAX_SALT, Ready, SamplingParams

_MOST_SECONDS = 60
_NUM_RECENT = 64


def with_tag(name: str) -> str:
    """Return a model's name with its tag in Ollama's lists, which is `latest` if it has none."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def public_names(names: Sequence[str]) -> list[str]:
    """Return the names of a model that clients are told: without its folder, unless that is the only one."""
    return [name for name in dict.fromkeys(names) if not name.startswith("/")] or list(names[:1])


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
E = TypeVar("E", bound="Endpoints")
R = TypeVar("R")

logger = logging.getLogger(__name__)

SESSION_HEADER = "x-session-id"
BODY = "body"  # of a request, decoded, in its scope


class Terms(TypedDict):
    """The terms on which the engine serves a request, as arguments of `generate` and `embed`."""

    timeout: float | None
    tenant: str
    cache_salt: str
    session: str | None
    lora_request: LoRARequest | None


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model that are known from its first load on, also while it is not loaded.

    `root`: its folder. `info`: its engine's description of itself. `defaults`: its own sampling parameters.
    """

    root: str
    info: Ready
    defaults: Mapping[str, Any]
    chat_template: str
    has_chat_template: bool
    generates: bool
    calls_tools: bool
    thinks: bool


@dataclass(eq=False)
class ModelService:
    """A loaded model of the server, in an engine that may run anywhere.

    `names`: the names that clients may use, the one that responses use first. `defaults`: the model's own sampling
    parameters. `has_chat_template`: whether it can answer conversations. `adapter`: the adapter that computes requests,
    None for the model alone, see `adapted`.
    """

    llm: AsyncLLM
    server: ServerState
    names: Sequence[str]
    metrics: ServerMetrics
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_chat_template: bool = True
    load: RetryAfter = field(default_factory=RetryAfter)
    adapter: LoRARequest | None = None

    def __post_init__(self) -> None:
        self._endpoints: dict[type[Endpoints], Endpoints] = {}
        self.is_closed = False
        self.llm.add_observer(self.load)
        self.llm.add_observer(self.metrics.requests_of(self.llm.max_model_len))

    @property
    def args(self) -> ServerArgs:
        """The arguments of the server."""
        return self.server.args

    @property
    def responses(self) -> ResponseStore | None:
        """The store of responses, None if they are not stored."""
        return self.server.responses

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one."""
        return self.llm.tokenizer

    @property
    def name(self) -> str:
        """The model's name in responses."""
        return self.names[0]

    @property
    def public_names(self) -> list[str]:
        """The names that `/v1/models` lists."""
        return public_names(self.names)

    def facts(self) -> ModelFacts:
        """Return what stays known of the model. It loads the answer's format."""
        llm, answer = self.llm, self.llm.answer_format
        return ModelFacts(
            root=llm.model,
            info=llm.engine_info,
            defaults=self.defaults,
            chat_template=llm.chat_template,
            has_chat_template=self.has_chat_template,
            generates=llm.pooling_info.generates,
            calls_tools=answer.tool_parser is not None and self.has_chat_template,
            thinks=answer.reasoning_parser is not None,
        )

    def endpoints(self, kind: type[E]) -> E:
        """Return the handlers of a class for this model; they are made once."""
        if self.adapter is not None:  # it lives as long as a request, and they refer to it
            return kind(self)
        if kind not in self._endpoints:
            self._endpoints[kind] = kind(self)
        return cast("E", self._endpoints[kind])

    def adapted(self, adapter: LoRARequest) -> ModelService:
        """Return the model with an adapter, under whose name it answers: the rest is the model's own."""
        service = copy.copy(self)
        service.names, service.adapter = [adapter.lora_name], adapter
        return service

    def close(self) -> None:
        """End the engine if it was started here; it may take seconds. Any thread."""
        self.is_closed = True
        self._endpoints.clear()  # which refer to this object
        self.llm.close()

    async def warm_up(self) -> None:
        """Load what the first chat needs, so that no client waits for it."""
        if self.has_chat_template:
            try:
                await self.llm.chat_prompt([{"role": "user", "content": "Hello"}])
            except ValueError as error:
                logger.warning("chats may fail: %s", error)
        _ = self.llm.answer_format  # cached from here on

    @staticmethod
    def now() -> int:
        """Return the time as responses give it: seconds since 1970."""
        return now()

    @property
    def retry_after(self) -> int:
        """Seconds after which a rejected request is worth another try."""
        return self.load.seconds

    async def read(self, request: Request, kind: type[B]) -> B:
        """Return the body of a request, which was read to find the model that it names."""
        body = request.scope[BODY]
        assert isinstance(body, kind)
        return body

    async def convert(self, request: Request, work: Callable[[], R]) -> R:
        """Return `work()`, which goes through the body of a request: where tenants take turns, if the body is long."""
        return await self.llm.run_python(work, body_bytes(request))

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
        if isinstance(error, EngineDeadError) and self.llm.dead_error is None:  # else its details end the server's log
            logger.error("a request failed: %s", error)
        return self.server.api_error(error, self.retry_after)

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
        return caller_of(request)

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
        return Terms(
            timeout=self.timeout(request),
            tenant=caller.tenant,
            cache_salt=salt,
            session=session,
            lora_request=self.adapter,
        )

    def timeout(self, request: Request) -> float | None:
        """Return the seconds that a request may take from now on. Raises `ApiError` 400."""
        return self.server.timeout(request)


def keep_body(request: Request, body: Body) -> None:
    """Keep the body of a request for `ModelService.read`."""
    request.scope[BODY] = body


class Endpoints:
    """Handlers of an API's endpoints, for one loaded model."""

    def __init__(self, service: ModelService) -> None:
        self._service = service


def names_of(given: Sequence[str], model: str, demo_model: str) -> list[str]:
    """Return the names of a model: those given, or its name at the hub or its folder's name, and the folder itself."""
    if given:
        return list(given)
    name = "quire-demo" if model == demo_model else name_of(model)
    return [name, model]
