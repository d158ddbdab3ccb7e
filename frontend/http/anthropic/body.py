"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from quire.frontend.http.effort import EFFORT
from quire.frontend.http.errors import bad_request
from quire.frontend.http.openai.fields import NOT_HERE
from quire.frontend.http.transport.bodies import NOT_EMPTY, Body, Refusals
from quire.protocol.messages import StructuredOutputs

WORDS = {  # what errors name -> what it is called here
    ".function.parameters": ".input_schema",
    ".function": "",
    "'required', to a function": "'any', to 'tool'",
    "'required'": "'any'",
    "stop=": "stop_sequences=",
    "structured_outputs.json": "output_config.format.schema",
}

_KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

MESSAGES_REFUSED: Refusals = {
    "container": ((), "no code is run here"),
    "context_management": (({}, {"edits": []}, _KEEPS_ALL), NOT_HERE),
    "diagnostics": (({},), NOT_HERE),
    "fallbacks": (([],), NOT_HERE),
    "inference_geo": ((), NOT_HERE),
    "mcp_servers": (([],), "the client calls the tools"),
    "output_format": ((), 'use output_config={"format": ...}'),
    "speed": (("standard",), NOT_HERE),
    "service_tier": (("auto", "standard_only"), "all requests are served alike"),
    "user_profile_id": ((), NOT_HERE),
    "workspace_id": ((), NOT_HERE),
}


_BUDGET = Meta(description="Must be given with type enabled, and used for nothing: max_tokens bounds thoughts.")


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether the model thinks first, where its chat template has a choice. What bounds it is max_tokens."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, _BUDGET] | None = None
    display: Literal["summarized", "omitted"] | None = None

    def check(self, max_tokens: int) -> None:
        """Raises `ApiError` 400 for a budget that the answer has no room for."""
        if self.type == "enabled" and self.budget_tokens is None:
            raise bad_request("thinking.budget_tokens is missing; give it with type 'enabled'", "thinking")
        if self.budget_tokens is not None and not 0 < self.budget_tokens < max_tokens:
            raise bad_request(
                f"thinking.budget_tokens={self.budget_tokens} must be from 1 to max_tokens - 1 = {max_tokens - 1}",
                "thinking",
            )


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`effort` goes to the chat template, `format` constrains the answer."""

    effort: Annotated[str, EFFORT] | None = None
    format: OutputFormat | None = None

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """What the answer must be, None for any text."""
        return None if self.format is None else StructuredOutputs(json=self.format.schema)


class PromptFields(Body, kw_only=True):
    """What makes the prompt. `cache_control` asks for what happens anyway: prefixes stay cached."""

    refused: ClassVar[Refusals] = MESSAGES_REFUSED

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], NOT_EMPTY]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessagesBody(PromptFields, kw_only=True):
    """Anthropic's fields."""

    max_tokens: Annotated[int, Meta(description="Most tokens of the answer; no more than the context can hold.")]
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


class CountBody(PromptFields, kw_only=True):
    """Anthropic's fields of a count."""
