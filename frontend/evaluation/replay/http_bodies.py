"""Bodies of requests to OpenAI-compatible servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.frontend.evaluation.replay.target import Tokens, sampling_parameters
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
