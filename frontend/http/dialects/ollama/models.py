"""The endpoints that describe the model, and those that would manage models, of which there is only this one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.dialects.ollama.body import PullBody, ShowBody
from quire.frontend.http.dialects.ollama.names import check_model
from quire.frontend.http.errors import ApiError, bad_request
from quire.frontend.http.service import Endpoints, with_tag
from quire.frontend.http.transport.responses import json_response
from quire.frontend.http.transport.sse import JSON_LINES
from quire.frontend.text.tokenizer_files import read_json

COVERED_VERSION = "0.12.6"
"""The version of Ollama whose API this is; clients compare it with the one that they need."""

_WEIGHTS = ("*.safetensors", "*.gguf")
_NEVER = "2318-01-01T00:00:00Z"  # when a model without a time to leave expires, as Ollama says it


class OllamaVersion(msgspec.Struct):
    """The version of Ollama whose API this is."""

    version: str = COVERED_VERSION


class ModelDetails(msgspec.Struct, kw_only=True):
    """Kind and size of the model; the size is empty if the weights are no GGUF file, or on another machine."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class ListedModel(msgspec.Struct, kw_only=True):
    """The model under one of its names. `modified_at`: the server's start; `digest` changes with model and tokenizer.

    `size`: bytes of the files of weights, 0 if they are on another machine.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ListedModels(msgspec.Struct):
    """The model under each of its names."""

    models: list[ListedModel]


class RunningModel(msgspec.Struct, kw_only=True):
    """The model, which stays loaded: `expires_at` is far away."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str = _NEVER
    size_vram: int = 0
    context_length: int


class RunningModels(msgspec.Struct):
    """The models in memory."""

    models: list[RunningModel]


class ShownModel(msgspec.Struct, kw_only=True):
    """The model's chat template (in Jinja), its sampling defaults, kind, sizes, and what it can do."""

    license: str = ""
    modelfile: str = ""
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Status(msgspec.Struct):
    """Outcome of a request."""

    status: str = "success"


class ModelEndpoints(Endpoints):
    """Handlers of the endpoints about models."""

    async def version(self, _request: Request) -> Response:
        """Return the version of Ollama whose API this is. Not that of this server, which is at /version."""
        return json_response(OllamaVersion())

    async def tags(self, _request: Request) -> Response:
        """List the model under each of its names."""
        return json_response(ListedModels([self._listed(with_tag(name)) for name in self._service.public_names]))

    async def running(self, _request: Request) -> Response:
        """List the models in memory, of which there is one."""
        listed = self._listed(with_tag(self._service.name))
        model = RunningModel(
            name=listed.name,
            model=listed.model,
            size=listed.size,
            digest=listed.digest,
            details=listed.details,
            context_length=self._service.llm.max_model_len,
        )
        return json_response(RunningModels([model]))

    async def show(self, request: Request) -> Response:
        """Describe the model."""
        service = self._service
        body = await service.read_any(request, ShowBody)
        check_model(service, body.named)
        model = ShownModel(
            parameters="\n".join(_parameters(service.defaults.items())),
            template=self._service.llm.chat_template,
            details=self._details,
            model_info=self._info(),
            capabilities=self._capabilities(),
            modified_at=self._started,
        )
        return json_response(model)

    async def pull(self, request: Request) -> Response:
        """Report that the model is there. No other model can be downloaded."""
        body = await self._service.read_any(request, PullBody)
        if body.named is None:
            raise bad_request("model is missing; it is required", "model", "missing_field")
        check_model(self._service, body.named)
        media_type = "application/json" if body.stream is False else JSON_LINES
        return Response(msgspec.json.encode(Status()) + b"\n", media_type=media_type)

    async def unmanaged(self, request: Request) -> Response:
        """Reject a request that would make, change or remove a model. Raises `ApiError` 400."""
        raise ApiError(
            400,
            f"{request.url.path} is not supported: this server serves one model, {self._service.name}, which is chosen "
            "when it starts: quire serve MODEL",
            code="unsupported",
        )

    def _listed(self, name: str) -> ListedModel:
        return ListedModel(
            name=name,
            model=name,
            modified_at=self._started,
            size=self._size,
            digest=self._digest,
            details=self._details,
        )

    @cached_property
    def _started(self) -> str:
        return datetime.fromtimestamp(self._service.created, UTC).isoformat().replace("+00:00", "Z")

    @cached_property
    def _details(self) -> ModelDetails:
        family = _family(self._service.llm.engine_info.architecture)
        described = self._description
        return ModelDetails(
            format="gguf" if described else "safetensors",
            family=family,
            families=[family],
            parameter_size=_short_count(described.get("num_parameters", 0)),
            quantization_level=described.get("file_type", ""),
        )

    @cached_property
    def _description(self) -> dict[str, Any]:
        """The description of a GGUF file (`kernels/gguf/description.py`), empty for other models."""
        return read_json(Path(self._service.llm.model), "gguf.json")

    @cached_property
    def _size(self) -> int:
        place = Path(self._service.llm.model)
        files = [place] if place.is_file() else [file for kind in _WEIGHTS for file in place.glob(kind)]
        return sum(file.stat().st_size for file in files if file.is_file())

    @cached_property
    def _digest(self) -> str:
        known = self._service.llm.engine_info
        identity = [known.model, known.architecture, known.text_files, str(self._size)]
        return hashlib.sha256("\0".join(identity).encode()).hexdigest()

    def _info(self) -> dict[str, Any]:
        known, family = self._service.llm.engine_info, self._details.family
        count = self._description.get("num_parameters")
        return {
            "general.architecture": family,
            "general.basename": self._service.name,
            **({} if count is None else {"general.parameter_count": count}),
            f"{family}.context_length": known.max_model_len,
            f"{family}.embedding_length": known.hidden_size,
            f"{family}.vocab_size": known.vocab_size,
        }

    def _capabilities(self) -> list[str]:
        """Return what the model can do, in Ollama's words; only models that generate nothing are for embeddings."""
        llm = self._service.llm
        if not llm.pooling_info.generates:
            return ["embedding"]
        answer = llm.answer_format
        can = {
            "completion": True,
            "tools": answer.tool_parser is not None and self._service.has_chat_template,
            "thinking": answer.reasoning_parser is not None,
        }
        return [name for name, has in can.items() if has]


def _family(architecture: str) -> str:
    """Return the family of an architecture: `qwen3` for `Qwen3ForCausalLM`."""
    return re.sub(r"(For\w+|Model)$", "", architecture).lower()


def _short_count(count: int) -> str:
    """Return a number of parameters as Ollama writes it, 134.52M or 3.2B; nothing for 0."""
    for size, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if count >= size:
            return f"{count / size:.{digits}f}".rstrip("0").rstrip(".") + letter
    return str(count or "")


def _parameters(defaults: Iterable[tuple[str, Any]]) -> list[str]:
    """Return sampling defaults as lines of a Modelfile."""
    names = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
    return [f"{names.get(name, name)} {value}" for name, value in defaults if isinstance(value, (int, float, str))]
