"""`POST /completion`, `/infill`, `/apply-template` and `/embedding`, which texts go through."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.conversation import tools_of_chat
from quire.frontend.http.dialects.llama_cpp.body import (
    ApplyTemplateBody,
    GenerationBody,
    InfillBody,
    LlamaCompletionBody,
    LlamaEmbeddingBody,
)
from quire.frontend.http.dialects.llama_cpp.infill import InfillTokens, infill_prompt
from quire.frontend.http.dialects.llama_cpp.prompts import encode_all, split, with_ids
from quire.frontend.http.dialects.llama_cpp.sampling import FIELD_NAMES, bias_pairs
from quire.frontend.http.dialects.llama_cpp.task import LlamaTask
from quire.frontend.http.errors import bad_request, errors_at, errors_renamed
from quire.frontend.http.openai.embeddings import PoolingBody, embed_all
from quire.frontend.http.service import Endpoints
from quire.frontend.http.shared_fields import effort_kwargs
from quire.frontend.http.transport.ignored import note_ignored
from quire.frontend.http.transport.responses import json_response
from quire.frontend.text.prompts import Prompt
from quire.protocol.messages import SAMPLING_LENGTHS, PoolingParams, SamplingParams

_NORMALIZE = {None: True, 2: True, -1: False}  # by embd_normalize


class RenderedConversation(msgspec.Struct):
    """A conversation as the chat template writes it."""

    prompt: str


class LlamaEmbedding(msgspec.Struct):
    """The vector of one text, as a list of one vector."""

    index: int
    embedding: list[list[float]]


class LlamaEndpoints(Endpoints):
    """Handlers of the endpoints that texts go through."""

    async def completion(self, request: Request) -> Response:
        """Continue a prompt with a `Completion`, several with a list of them, or with a stream of events."""
        service = self._service
        body = await service.read(request, LlamaCompletionBody)
        given, is_one = split(service, body.prompt, "prompt")
        params = await self._params(body, len(given))
        with errors_renamed(FIELD_NAMES), errors_at("prompt"):
            prompts = await service.llm.prompts(await with_ids(service, given))
        task = LlamaTask(service, body, request, prompts, params, is_one=is_one)
        return await self._respond(request, body, task, params)

    async def infill(self, request: Request) -> Response:
        """Fill in the text between a prefix and a suffix. Only for models that were trained for it."""
        service = self._service
        body = await service.read(request, InfillBody)
        tokens = InfillTokens.of(service.require_tokenizer())
        params = await self._params(body, 1, is_infill=True)
        params.stop_token_ids = [*(params.stop_token_ids or []), *tokens.ends]
        prompt = Prompt(await infill_prompt(service, body, tokens))
        task = LlamaTask(service, body, request, [prompt], params, is_one=True)
        return await self._respond(request, body, task, params)

    async def apply_template(self, request: Request) -> Response:
        """Write a conversation as a prompt. A last message of the assistant is left open, to be continued."""
        body = await self._service.read(request, ApplyTemplateBody)
        use = await self._service.convert(request, lambda: tools_of_chat(request, body.messages, body.tools))
        last = body.messages[-1] if body.messages else {}
        has_text = bool(last.get("content")) or not (last.get("tool_calls") or last.get("reasoning_content"))
        continues = last.get("role") == "assistant" and has_text and not last.get("tool_calls")
        kwargs = {**effort_kwargs(body.reasoning_effort, "reasoning_effort"), **(body.chat_template_kwargs or {})}
        prompt = await self._service.llm.chat_prompt(
            body.messages,
            tools=None if use is None else use.for_template(),
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continue_final_message=continues,
            chat_template_kwargs=kwargs,
        )
        return json_response(RenderedConversation(prompt.text or ""))

    async def embedding(self, request: Request) -> Response:
        """Turn texts into vectors."""
        service = self._service
        body = await service.read(request, LlamaEmbeddingBody)
        if (body.content is None) == (body.input is None):
            raise bad_request("give the text as content, or as input, which is the same", "content")
        if body.embd_normalize not in _NORMALIZE:
            raise bad_request(
                f"embd_normalize={body.embd_normalize} is not supported; give 2 for vectors of length 1, or -1 for "
                "vectors as they are",
                "embd_normalize",
                "unsupported_parameter",
            )
        field = "input" if body.content is None else "content"
        given, _ = split(service, body.input if body.content is None else body.content, field)  # type: ignore[arg-type]
        service.check_texts(len(given))
        params = PoolingParams(normalize=_NORMALIZE[body.embd_normalize])
        outputs = await embed_all(service, await with_ids(service, given), params, PoolingBody(), request, field=field)
        return json_response(
            [LlamaEmbedding(index, [output.outputs.embedding]) for index, output in enumerate(outputs)]
        )

    async def _params(self, body: GenerationBody, num_prompts: int, *, is_infill: bool = False) -> SamplingParams:
        service = self._service
        service.require_tokenizer()
        params = body.params(service.defaults, is_infill=is_infill)
        service.check_count(num_prompts, params)
        if body.logit_bias:
            await self._add_bias(params, body.logit_bias)
        return params

    async def _add_bias(self, params: SamplingParams, given: Any) -> None:
        """Add a `logit_bias` to the parameters. Raises `ApiError` or `ValueError`."""
        pairs = bias_pairs(given)
        texts = [token for token, _ in pairs if isinstance(token, str)]
        encoded = (await encode_all(self._service, texts, must_fit=False)).parts if texts else []
        SAMPLING_LENGTHS["logit_bias"].check("logit_bias, as token ids,", [token for part in encoded for token in part])
        parts = iter(encoded)
        biases, banned = dict(params.logit_bias or {}), list(params.bad_words_token_ids or [])
        for token, bias in pairs:
            for token_id in [token] if isinstance(token, int) else next(parts):
                if bias is None:
                    banned.append([token_id])
                else:
                    biases[token_id] = bias
        params.logit_bias, params.bad_words_token_ids = biases or None, banned or None

    async def _respond(
        self, request: Request, body: GenerationBody, task: LlamaTask, params: SamplingParams
    ) -> Response:
        events = task.events() if body.stream else None
        note_ignored(request, body.ignored(params, self._service.llm.max_model_len))
        return await self._service.respond(request, task.whole, events, task.explain)
