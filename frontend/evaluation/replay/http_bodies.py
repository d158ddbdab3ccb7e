"""Bodies of requests to OpenAI-compatible servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.frontend.evaluation.replay.parameters import parameters_of
from quire.frontend.evaluation.replay.target import Tokens
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.text.tokenizer import Tokenizer

EndpointType = Literal["completions", "chat"]
PromptAs = Literal["tokens", "text"]

PATHS: dict[EndpointType, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

_UNKNOWN = ("bad_words_token_ids",)  # to servers: it is what an engine makes of bad_words


@dataclass(frozen=True)
class Bodies:
    """Writes requests as the server at the other end takes them.

    `prompt_as`: token ids, or the text that `tokenizer` makes of them, which may have a few tokens more or less when
    the server reads it. `extra` is put into each body, and null there takes a field out. Raises `ValueError` for text
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
        """The body of a request. Raises `ValueError` when a chat has no text to send."""
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
        asked = {name: value for name, value in parameters_of(request).items() if name not in _UNKNOWN}
        if self.endpoint == "chat" and "logprobs" in asked:
            asked["top_logprobs"], asked["logprobs"] = asked["logprobs"], True
        return asked

    def _prompt(self, request: WorkloadRequest, tokens: Tokens) -> dict[str, Any]:
        if self.endpoint == "chat":
            content = [{"role": "user", "content": request.text}] if request.text is not None else None
            return {"messages": request.messages or content or self._as_message(request, tokens)}
        if request.text is not None:
            return {"prompt": request.text}
        if request.messages is not None:
            raise ValueError("the trace has messages; send them with --endpoint-type chat")
        made = tokens(request)
        return {"prompt": made if self.tokenizer is None or self.prompt_as == "tokens" else self.tokenizer.decode(made)}

    def _as_message(self, request: WorkloadRequest, tokens: Tokens) -> list[dict[str, Any]]:
        if self.tokenizer is None:
            raise ValueError("a chat needs text; name the folder of the model's tokenizer with --tokenizer")
        return [{"role": "user", "content": self.tokenizer.decode(tokens(request))}]
