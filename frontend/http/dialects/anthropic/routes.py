"""The endpoints of Anthropic's API, with the types that `/openapi.json` describes."""

from __future__ import annotations

from starlette.routing import Route

from quire.frontend.http.dialects.anthropic.body import CountBody, MessagesBody
from quire.frontend.http.dialects.anthropic.endpoint import MessagesEndpoints
from quire.frontend.http.dialects.anthropic.errors import AnthropicErrorResponse
from quire.frontend.http.dialects.anthropic.writer import EVENTS, Message, TokenCount
from quire.frontend.http.documentation.operation import AnswerTypes, ModelOperation
from quire.frontend.http.models.served_models import ServedModels


def anthropic_routes(models: ServedModels) -> list[Route]:
    """Return the routes of Anthropic's API."""
    return [
        ModelOperation(
            models,
            "/v1/messages",
            MessagesEndpoints,
            MessagesEndpoints.create,
            AnswerTypes(Message, events=EVENTS, error=AnthropicErrorResponse),
            body=MessagesBody,
            generates=True,
            example={"messages": [{"role": "user", "content": "Tell me a tale."}], "max_tokens": 60},
        ),
        ModelOperation(
            models,
            "/v1/messages/count_tokens",
            MessagesEndpoints,
            MessagesEndpoints.count_tokens,
            AnswerTypes(TokenCount, error=AnthropicErrorResponse),
            body=CountBody,
            example={"messages": [{"role": "user", "content": "Tell me a tale."}]},
        ),
    ]
