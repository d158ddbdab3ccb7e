"""`POST /v1/responses`: answer a conversation of items with items."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.client.observer import TraceContext
from quire.frontend.http.conversation import Turn
from quire.frontend.http.errors import ApiError, errors_renamed
from quire.frontend.http.openai.fields import sampling_params
from quire.frontend.http.openai.responses.body import ResponsesBody, messages_of, tool_use
from quire.frontend.http.openai.responses.writer import ResponseWriter
from quire.frontend.http.service import Endpoints
from quire.frontend.http.shared_fields import effort_kwargs
from quire.frontend.http.transport.responses import new_id


class ResponsesEndpoint(Endpoints):
    """Handlers of the Responses API."""

    async def create(self, request: Request) -> Response:
        """Answer a conversation with a `Response`, or with a stream of events."""
        service = self._service
        body = await service.read(request, ResponsesBody)
        body.check()
        answer_id = new_id("resp", "_", body.request_id)
        with errors_renamed(body.field_names):
            conversation = await self._turn(body, request, answer_id).begin(service)
        writer = ResponseWriter(service, body, conversation, answer_id)
        events = writer.stream() if body.stream else None
        return await service.respond(request, writer.whole, events, writer.explain)

    async def stored(self, request: Request) -> Response:
        """Reject a request for a stored response. Raises `ApiError` 404."""
        name = request.path_params["id"].partition("/")[0]
        raise ApiError(
            404,
            f"there is no response {name!r}: this server stores none; keep the answer of POST /v1/responses",
            code="response_not_found",
            param="response_id",
        )

    def _turn(self, body: ResponsesBody, request: Request, answer_id: str) -> Turn:
        service = self._service
        effort = effort_kwargs(None if body.reasoning is None else body.reasoning.effort, "reasoning.effort")
        kwargs = {**effort, **(body.chat_template_kwargs or {})}
        return Turn(
            messages=messages_of(body.input, body.instructions),
            params=sampling_params(body, service.defaults, body.max_output_tokens, body.num_logprobs),
            tools=tool_use(body.tools, body.tool_choice, body.parallel_tool_calls),
            template={"chat_template_kwargs": kwargs},
            truncate=body.truncate_prompt_tokens,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            timeout=service.timeout(request),
            tenant=service.tenant(request),
            structured_outputs=body.format,
            format_field="text.format.schema",
            trace=TraceContext("chat", request.headers, answer_id),
        )
