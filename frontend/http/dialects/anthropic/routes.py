"""The endpoints of Anthropic's API, with the types that `/openapi.json` describes."""

from __future__ import annotations

from starlette.routing import Route

from quire.frontend.http.dialects.anthropic.body import CountBody, MessagesBody
from quire.frontend.http.dialects.anthropic.endpoint import MessagesEndpoints
from quire.frontend.http.dialects.anthropic.errors import AnthropicErrorResponse
from quire.frontend.http.dialects.anthropic.writer import EVENTS, Message, TokenCount
from quire.frontend.http.documentation.operation import AnswerTypes, Operation
from quire.frontend.http.service import ModelService


def anthropic_routes(service: ModelService) -> list[Route]:
    """Return the routes of Anthropic's API."""
    messages = MessagesEndpoints(service)
    return [
        Operation(
            "/v1/messages",
            messages.create,
            AnswerTypes(Message, events=EVENTS, error=AnthropicErrorResponse),
            body=MessagesBody,
            generates=True,
            example={"messages": [{"role": "user", "content": "Tell me a tale."}], "max_tokens": 60},
        ),
        Operation(
            "/v1/messages/count_tokens",
            messages.count_tokens,
            AnswerTypes(TokenCount, error=AnthropicErrorResponse),
            body=CountBody,
            example={"messages": [{"role": "user", "content": "Tell me a tale."}]},
        ),
    ]
