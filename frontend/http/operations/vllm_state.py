"""`GET /load`, `/server_info` and `/tokenizer_info`: the server and its model, as tools for vLLM ask for them."""

from __future__ import annotations

import asyncio
import json
from functools import cached_property

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.http.documentation.operation import Handler
from quire.frontend.http.errors import bad_request
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.service import Endpoints
from quire.frontend.http.transport.responses import json_response
from quire.frontend.text.chat.template_files import template_sources
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.version import installed_version

_FORMATS = ("json", "text")


class ServerLoad(msgspec.Struct):
    """The number of requests of this server that wait or run at the engines."""

    server_load: int


def load_handler(models: ServedModels) -> Handler:
    """Return the handler of `GET /load`."""

    async def load(_request: Request) -> Response:
        """Count the requests of this server that wait or run at the engines."""
        return json_response(ServerLoad(sum(service.load.num_open for service in models.services)))

    return load


class ServedModelConfig(msgspec.Struct, kw_only=True):
    """The model."""

    model: str
    served_model_name: list[str]
    architecture: str
    max_model_len: int
    vocab_size: int


class CacheConfig(msgspec.Struct, kw_only=True):
    """The KV cache: the number of its pages, and the tokens of a page."""

    block_size: int
    num_blocks: int
    cache_dtype: str


class SchedulerConfig(msgspec.Struct):
    """The scheduler."""

    max_num_seqs: int


class EngineConfig(msgspec.Struct, kw_only=True):
    """The configuration of the engine."""

    model_config: ServedModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig


class ServerInfo(msgspec.Struct, kw_only=True):
    """The version of the server, and the configuration of its engine under vLLM's name, as an object or as a text."""

    version: str
    vllm_config: EngineConfig | str


class VllmStateEndpoints(Endpoints):
    """Handlers of the endpoints about a loaded model."""

    async def server_info(self, request: Request) -> Response:
        """Describe the engine. With ?config_format=text, as a text that holds JSON."""
        form = request.query_params.get("config_format", "json")
        if form not in _FORMATS:
            raise bad_request(f"config_format={form[:100]!r} is not available; give json or text", "config_format")
        config = self._config
        shown = msgspec.json.encode(config).decode() if form == "text" else config
        return json_response(ServerInfo(version=installed_version(), vllm_config=shown))

    async def tokenizer_info(self, _request: Request) -> Response:
        """Return the fields of the model's tokenizer_config.json, and its chat template."""
        tokenizer = self._service.require_tokenizer()
        if self._tokenizer_info is None:
            self._tokenizer_info = await asyncio.to_thread(_info_of, tokenizer)
        return json_response(msgspec.Raw(self._tokenizer_info))

    _tokenizer_info: bytes | None = None

    @cached_property
    def _config(self) -> EngineConfig:
        service, info = self._service, self._service.llm.engine_info
        return EngineConfig(
            model_config=ServedModelConfig(
                model=service.llm.model,
                served_model_name=service.public_names,
                architecture=info.architecture,
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
            ),
            cache_config=CacheConfig(
                block_size=info.block_size, num_blocks=info.num_pages, cache_dtype=info.kv_cache_dtype
            ),
            scheduler_config=SchedulerConfig(info.max_num_seqs),
        )


def _info_of(tokenizer: Tokenizer) -> bytes:
    """Return what is known of a tokenizer as JSON. Its files often hold an integer of more than 64 bits."""
    info = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.config, **tokenizer.special_tokens}
    if (template := template_sources(tokenizer.path).get("default")) is not None:
        info["chat_template"] = template
    return json.dumps(info, ensure_ascii=False).encode(errors="replace")
