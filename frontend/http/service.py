"""What every endpoint works with: the model, its names and defaults, and the limits of the server."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request

from quire.frontend.async_llm import LONG_TEXT, AsyncLLM
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.errors import ApiError, api_error, bad_request
from quire.frontend.http.transport.retry_after import RetryAfter
from quire.frontend.http.transport.sse import DONE, EventStream, event
from quire.frontend.metrics.server import ServerMetrics
from quire.frontend.outputs import RequestOutput
from quire.frontend.text.prompts import PromptType
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import SamplingParams

logger = logging.getLogger(__name__)

TIMEOUT_HEADER = "x-request-timeout"


@dataclass
class Service:
    """The server's one model, in an engine that may run anywhere.

    `names`: what clients may call it, the first is its own. `defaults`: its own values of sampling parameters.
    `has_chat_template`: whether it can answer conversations.
    """

    llm: AsyncLLM
    args: ServerArgs
    names: Sequence[str]
    metrics: ServerMetrics
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_chat_template: bool = True
    created: int = field(default_factory=lambda: int(time.time()))
    refusals: RetryAfter = field(default_factory=RetryAfter)
    draining: bool = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, if it has one."""
        return self.llm.tokenizer

    @property
    def name(self) -> str:
        """What answers call the model."""
        return self.names[0]

    async def warm_up(self) -> None:
        """Load what a first chat needs, so that it does not wait for that."""
        with suppress(ValueError):  # there is no template, or one that has its own mind about conversations
            await self.llm.chat_prompt([{"role": "user", "content": "Hello"}])
        _ = self.llm.answer_format  # which is found out once

    @property
    def public_names(self) -> list[str]:
        """The names that the list of models shows: without the model's folder, unless that is all."""
        return [name for name in dict.fromkeys(self.names) if not name.startswith("/")] or list(self.names[:1])

    @staticmethod
    def now() -> int:
        """The time as answers tell it: seconds since 1970."""
        return int(time.time())

    @property
    def retry_after(self) -> int:
        """Seconds after which a request that was refused is worth another try."""
        return self.refusals.seconds

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 unless `name` is the model's; a request that names none means this one."""
        if name is None or name in self.names:
            return
        known = ", ".join(self.public_names)
        raise ApiError(
            404,
            f"the model {name!r} does not exist; this server has {known}",
            code="model_not_found",
            param="model",
        )

    def check_count(self, num_prompts: int, params: SamplingParams) -> None:
        """Raises `ApiError` 400 for more completions than one body may ask for."""
        name = "n" if params.best_of is None else "best_of"
        each = getattr(params, name)
        count = num_prompts * each
        if count > self.args.max_prompts:
            raise bad_request(
                f"{num_prompts} prompts with {name}={each} are {count} completions, and one request "
                f"may have {self.args.max_prompts}; send several requests, or raise --max-prompts",
                "prompt" if num_prompts > 1 else name,
            )

    def check_template(self, chat_template: str | None) -> None:
        """Raises `ApiError` 400 for a client's own template, unless such are trusted."""
        if chat_template is not None and not self.args.trust_request_chat_template:
            raise bad_request(
                "chat_template is not taken from clients, since a template can keep the server from all other work; "
                "use the model's, or start the server with --trust-request-chat-template",
                "chat_template",
            )

    async def prepared(
        self, prompts: Sequence[str | list[int]], last: int | None, add_special_tokens: bool
    ) -> Sequence[PromptType]:
        """The prompts of a body for `generate` and `embed`, which make ready what is a body's only one themselves."""
        if len(prompts) == 1:
            return prompts
        return await self.llm.prompts(prompts, truncate_prompt_tokens=last, add_special_tokens=add_special_tokens)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of a text; those of a long one are made on another thread, while streams go on."""
        encode = functools.partial(self.require_tokenizer().encode, text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(encode) if len(text) > LONG_TEXT else encode()

    def prompt_text(self, output: RequestOutput) -> str:
        """The prompt in words, as it was given or as its tokens are read."""
        if output.prompt is not None:
            return output.prompt
        return self.require_tokenizer().decode(output.prompt_token_ids, skip_special_tokens=False)

    def refusal(self, error: Exception) -> ApiError:
        """What a client is told of an exception; a defect is logged, and told without its details."""
        refusal = api_error(error, self.retry_after)
        if refusal is None:
            logger.error("a request failed by a defect of the server", exc_info=error)
            refusal = ApiError(500, f"the server failed ({type(error).__name__}); its log tells more", code="internal")
        return refusal

    def stream(
        self, events: AsyncGenerator[bytes, None], explain: Callable[[Exception], bytes] | None = None
    ) -> EventStream:
        """The answer that is made of `events`; an error ends it as an event, OpenAI's unless `explain` makes it."""
        return EventStream(events, explain or self._last_events, self.metrics.http.stream)

    def _last_events(self, error: Exception) -> bytes:
        return event(msgspec.json.encode(self.refusal(error).body)) + DONE

    def require_tokenizer(self) -> Tokenizer:
        """Raises `ApiError` 400 when the model has none."""
        if self.tokenizer is None:
            raise bad_request("this model has no tokenizer, so it takes and gives token ids only")
        return self.tokenizer

    def timeout(self, request: Request) -> float | None:
        """Seconds that a request may take: the header's, but no more than the server's."""
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


def names_of(args: ServerArgs, model: str, demo_model: str) -> list[str]:
    """What clients may call a model: the names given, or its folder's name, and the folder itself."""
    if args.served_model_name:
        return list(args.served_model_name)
    return ["quire-demo" if model == demo_model else Path(model).name, model]
