"""`GET /props` and `/slots`: a model and its work, as clients of llama.cpp ask for them."""

from __future__ import annotations

from functools import cached_property

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.dialects.llama_cpp.sampling import GenerationSettings, SamplingFields
from quire.frontend.http.errors import ApiError
from quire.frontend.http.service import Endpoints
from quire.frontend.http.transport.responses import json_response
from quire.frontend.version import installed_version
from quire.protocol.messages import BatchEntry, Ready


class NextToken(msgspec.Struct, kw_only=True):
    """Progress of an answer: its tokens, and whether it goes on. `n_remain` is not known, -1."""

    has_next_token: bool
    n_remain: int = -1
    n_decoded: int


class Slot(msgspec.Struct, kw_only=True):
    """A place for a request that runs. `id_task`: number of the request, -1 for none."""

    id: int
    id_task: int = -1
    n_ctx: int
    speculative: bool
    is_processing: bool
    n_prompt_tokens: int
    n_prompt_tokens_processed: int
    next_token: NextToken


class DefaultSettings(msgspec.Struct, kw_only=True):
    """The context length, and the sampling values of requests that omit them."""

    n_ctx: int
    params: GenerationSettings


class Modalities(msgspec.Struct):
    """Inputs of the model besides text."""

    vision: bool = False
    audio: bool = False


class TemplateAbilities(msgspec.Struct, kw_only=True):
    """Capabilities of the chat template."""

    supports_tools: bool
    supports_tool_calls: bool
    supports_string_content: bool = True
    supports_typed_content: bool = False


class ServerProperties(msgspec.Struct, kw_only=True):
    """The server and its model. `total_slots`: requests that can run at once. `is_sleeping`: it is not loaded now."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    endpoint_slots: bool = True
    endpoint_props: bool = False
    endpoint_metrics: bool = True
    chat_template: str
    chat_template_caps: TemplateAbilities
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False


class StateEndpoints(Endpoints):
    """Handlers of the endpoints about a loaded model."""

    async def slots(self, request: Request) -> Response:
        """List the requests that run, one a slot, and the free slots. With ?fail_on_no_slot=1, 503 if none is free."""
        llm = self._service.llm
        info, snapshot = llm.engine_info, await llm.snapshot()
        running = snapshot.stats.running
        if request.query_params.get("fail_on_no_slot") == "1" and running >= info.max_num_seqs:
            raise ApiError(
                503,
                f"all {running} slots are in use; try again later",
                code="no_slot_available",
                headers={"Retry-After": str(self._service.retry_after)},
            )
        entries: list[BatchEntry | None] = [*snapshot.batch[:running]]
        entries += [None] * (info.max_num_seqs - len(entries))
        drafts = snapshot.total_draft_tokens > 0
        return json_response([_slot(i, entry, i < running, info, drafts) for i, entry in enumerate(entries)])

    @cached_property
    def properties(self) -> ServerProperties:
        """The description of the server and its model."""
        service, info = self._service, self._service.llm.engine_info
        tokenizer, has_tools = service.tokenizer, service.llm.answer_format.tool_parser is not None
        params = SamplingFields().params(service.defaults)
        special = {} if tokenizer is None else tokenizer.special_tokens
        return ServerProperties(
            default_generation_settings=DefaultSettings(
                n_ctx=info.max_model_len,
                params=SamplingFields().settings(params, service.name, info.max_model_len, stream=False),
            ),
            total_slots=info.max_num_seqs,
            model_alias=service.name,
            model_path=service.llm.model,
            modalities=Modalities(),
            chat_template=service.llm.chat_template,
            chat_template_caps=TemplateAbilities(supports_tools=has_tools, supports_tool_calls=has_tools),
            bos_token=special.get("bos_token") or "",
            eos_token=special.get("eos_token") or "",
            build_info=f"quire-{installed_version()}",
        )


def _slot(index: int, entry: BatchEntry | None, is_processing: bool, info: Ready, speculative: bool) -> Slot:
    prompt = 0 if entry is None else entry.num_prompt_tokens
    return Slot(
        id=index,
        id_task=-1 if entry is None else entry.number,
        n_ctx=info.max_model_len,
        speculative=speculative,
        is_processing=is_processing,
        n_prompt_tokens=prompt,
        n_prompt_tokens_processed=0 if entry is None else min(prompt, entry.num_computed_tokens),
        next_token=NextToken(has_next_token=is_processing, n_decoded=0 if entry is None else entry.num_output_tokens),
    )
