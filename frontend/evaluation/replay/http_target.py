"""OpenAI-compatible server as a target, and the bodies of requests to it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

import msgspec

from quire.frontend.evaluation.replay.http_answer import StreamedResponse, WholeResponse
from quire.frontend.evaluation.replay.http_pool import HttpPool
from quire.frontend.evaluation.replay.prometheus import sample_of
from quire.frontend.evaluation.replay.record import RequestRecord, RunClock, TargetSample
from quire.frontend.evaluation.replay.target import Send, TargetError, TargetInfo, Tokens, sampling_parameters
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.text.tokenizer import Tokenizer

EndpointType = Literal["completions", "chat"]
PromptAs = Literal["tokens", "text"]

PATHS: dict[EndpointType, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

_UNKNOWN = ("bad_words_token_ids",)  # to servers: an engine makes it from bad_words


@dataclass(frozen=True)
class Bodies:
    """Encoder of requests in the form that the server takes.

    `prompt_as`: token ids, or the text that `tokenizer` makes of them, which may have a few tokens more or less when
    the server tokenizes it. `extra` is merged into each body; null there removes a field. Raises `ValueError` for text
    without a tokenizer.
    """

    model: str
    endpoint: EndpointType = "completions"
    prompt_as: PromptAs = "tokens"
    tokenizer: Tokenizer | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prompt_as == "text" and self.tokenizer is None:
            raise ValueError("prompts as text are made of tokens by a tokenizer; name its folder with --tokenizer")

    def encode(self, request: WorkloadRequest, tokens: Tokens) -> bytes:
        """Return the body of a request. Raises `ValueError` when a chat has no text to send."""
        body = {
            "model": self.model,
            **self._prompt(request, tokens),
            **self._parameters(request),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return msgspec.json.encode({name: value for name, value in body.items() if value is not None})

    def _parameters(self, request: WorkloadRequest) -> dict[str, Any]:
        requested = {name: value for name, value in sampling_parameters(request).items() if name not in _UNKNOWN}
        if self.endpoint == "chat" and "logprobs" in requested:
            requested["top_logprobs"], requested["logprobs"] = requested["logprobs"], True
        return requested

    def _prompt(self, request: WorkloadRequest, tokens: Tokens) -> dict[str, Any]:
        if self.endpoint == "chat":
            content = [{"role": "user", "content": request.text}] if request.text is not None else None
            return {"messages": request.messages or content or self._as_message(request, tokens)}
        if request.text is not None:
            return {"prompt": request.text}
        if request.messages is not None:
            raise ValueError("the trace has messages; send them with --endpoint-type chat")
        token_ids = tokens(request)
        if self.tokenizer is None or self.prompt_as == "tokens":
            return {"prompt": token_ids}
        return {"prompt": self.tokenizer.decode(token_ids)}

    def _as_message(self, request: WorkloadRequest, tokens: Tokens) -> list[dict[str, Any]]:
        if self.tokenizer is None:
            raise ValueError("a chat needs text; name the folder of the model's tokenizer with --tokenizer")
        return [{"role": "user", "content": self.tokenizer.decode(tokens(request))}]


_OWN_LIMITS = (errno.EMFILE, errno.ENFILE)  # then a connection fails for want of file descriptors here
_MOST_BUILD_CHARACTERS = 200
_ANSWER_SECONDS = 30.0  # for requests that generate nothing


@dataclass(frozen=True)
class HttpOptions:
    """Options of the connection to a server. `model` None: the first that it serves; the rest is as in `Bodies`."""

    base_url: str
    endpoint: EndpointType = "completions"
    model: str | None = None
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    prompt_as: PromptAs = "tokens"
    tokenizer: Tokenizer | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)


class _Meta(msgspec.Struct):
    """llama.cpp's metadata of a model. Its training context is not used, since the server may give it another."""

    n_vocab: int | None = None


class _SlotSettings(msgspec.Struct):
    n_ctx: int


class _Properties(msgspec.Struct):
    """llama.cpp's `/props`, all of whose settings are of a slot, which serves one request at a time."""

    default_generation_settings: _SlotSettings | None = None
    build_info: str | None = None


class _Version(msgspec.Struct):
    version: str


class _Model(msgspec.Struct):
    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    meta: _Meta | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_Found = TypeVar("_Found", _Properties, _Version)


class HttpTarget:
    """A server that has answered; `open` makes one. The server is never ended here."""

    def __init__(
        self, pool: HttpPool, options: HttpOptions, model: _Model, max_model_len: int | None, build: str | None
    ) -> None:
        self._pool = pool
        self._bodies = Bodies(model.id, options.endpoint, options.prompt_as, options.tokenizer, options.extra_body)
        self._path = PATHS[options.endpoint]
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        meta = model.meta or _Meta()
        tokenizer = options.tokenizer
        self.info = TargetInfo(
            f"openai-{options.endpoint}",
            model.id,
            options.base_url,
            max_model_len,
            meta.n_vocab or (tokenizer.backend.get_vocab_size() if tokenizer else None),
            tokenizer.special_token_ids if tokenizer else frozenset(),
            build,
        )

    @classmethod
    async def open(cls, options: HttpOptions) -> Self:
        """Ask the server for its models. Raises `TargetError` when it does not answer, `ValueError` for bad options."""
        key = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
        pool = HttpPool(options.base_url, {**key, **options.headers})
        models = await _models(pool, options.base_url)
        wanted = next((model for model in models if options.model in (None, model.id)), None)
        if wanted is None:
            if options.model is None:
                raise TargetError(f"the server at {options.base_url} names no model; name one with --model")
            wanted = _Model(options.model)  # a proxy may serve models that it does not list
        properties = await _fetch(pool, "/props", _Properties) or _Properties()
        slot = properties.default_generation_settings
        build = await _build(pool, models, properties)
        return cls(pool, options, wanted, wanted.max_model_len or (slot.n_ctx if slot else None), build)

    def prepare(self, request: WorkloadRequest, tokens: Tokens) -> Send:
        """Encode the whole request."""
        data = self._pool.encode("POST", self._path, self._bodies.encode(request, tokens))

        async def send(record: RequestRecord, clock: RunClock) -> None:
            answer = StreamedResponse(record, clock)
            try:
                await self._pool.exchange(data, answer)
            except OSError as error:
                answer.fail(str(error))
                await self._check_alive()
            except ValueError as error:
                answer.fail(str(error))
            else:
                answer.end()

        return send

    async def sample(self, clock: RunClock) -> TargetSample | None:
        """Return the state from GET /metrics, empty if that fails this time; None if the server has no such page."""
        page = await self._ask("GET", "/metrics")
        if page is None:
            return TargetSample(clock.now())
        return sample_of(page.body.decode(errors="replace"), clock.now()) if page.status == 200 else None

    async def reset_cache(self) -> bool:
        """Empty the prefix cache by vLLM's endpoint, where the server has it."""
        page = await self._ask("POST", "/reset_prefix_cache")
        return page is not None and page.status == 200

    async def wait_dead(self) -> str:
        """Wait until the server no longer listens; return what happened."""
        return await asyncio.shield(self._dead)

    async def close(self) -> None:
        """Drop the connections."""
        self._pool.close()

    async def _check_alive(self) -> None:
        """Find out, after a failed connection, if the server is gone."""
        try:
            (await self._pool.connect()).close()
        except OSError as error:
            if error.errno not in _OWN_LIMITS and not self._dead.done():
                self._dead.set_result(f"the server at {self.info.address} is gone: {error}")

    async def _ask(self, method: str, path: str) -> WholeResponse | None:
        answer = WholeResponse()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._pool.exchange(self._pool.encode(method, path), answer)
        except OSError:
            await self._check_alive()
            return None
        except ValueError:
            return None
        return answer


async def _models(pool: HttpPool, base_url: str) -> list[_Model]:
    """Return the models that the server lists; none if it has no such list."""
    answer = WholeResponse()
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await pool.exchange(pool.encode("GET", "/v1/models"), answer)
    except (OSError, ValueError) as error:
        why = str(error) or f"no answer within {_ANSWER_SECONDS:g} s"
        raise TargetError(f"no server answers at {base_url} ({why}); start one, or check --base-url") from error
    if answer.status in (401, 403):
        raise TargetError(
            f"the server at {base_url} rejects the API key (status {answer.status}); give the right one with --api-key"
        )
    try:
        return msgspec.json.decode(answer.body, type=_Models).data if answer.status == 200 else []
    except (ValueError, RecursionError) as error:
        raise TargetError(f"the server at {base_url} is not OpenAI-compatible: /v1/models has {error}") from None


async def _build(pool: HttpPool, models: list[_Model], properties: _Properties) -> str | None:
    """Return the name of the server, from the owner of its models, and its version; None if it says neither."""
    version = await _fetch(pool, "/version", _Version)
    words = [models[0].owned_by if models else None, version.version if version else properties.build_info]
    return " ".join(word for word in words if word)[:_MOST_BUILD_CHARACTERS] or None


async def _fetch(pool: HttpPool, path: str, kind: type[_Found]) -> _Found | None:
    """Return the answer of an endpoint, None from a server that has another one or none."""
    answer = WholeResponse()
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await pool.exchange(pool.encode("GET", path), answer)
        return msgspec.json.decode(answer.body, type=kind) if answer.status == 200 else None
    except (OSError, ValueError, RecursionError):
        return None
