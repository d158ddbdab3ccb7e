"""LoRA adapters as users give them: names with folders, checked before an engine reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.frontend.hub.adapters import resolve_adapter
from quire.frontend.hub.cache import ADAPTER_CONFIG
from quire.frontend.hub.names import is_adapter_name, is_gguf
from quire.frontend.lora_request import LoRARequest, absolute, check_name
from quire.frontend.path_kind import NOWHERE, what_is
from quire.protocol.engine_options import EngineOptions
from quire.protocol.messages import AdapterInfo
from quire.protocol.options import options_of

MAX_CONFIG_BYTES = 1 << 21
_SHORT = 100  # bytes of a value that is decoded

Modules = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


class _GivenModule(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter as vLLM has it in JSON."""

    name: str
    path: str
    base_model_name: str | None = None


class _Config(msgspec.Struct):
    """Fields of an adapter_config.json that are read. All else is only skipped: 2 MiB take milliseconds, and the values
    of a hostile one would hold the GIL for seconds."""

    peft_type: msgspec.Raw = msgspec.Raw(b"null")
    r: msgspec.Raw = msgspec.Raw(b"null")


def absolute_modules(given: Modules, download_dir: str | None = None, max_rank: int | None = None) -> tuple[str, ...]:
    """Return `lora_modules` as NAME=FOLDER with absolute paths; each may be given as vLLM's JSON object too.

    One that is given by its name at the hub is downloaded if need be; `download_dir` as for a model. Raises
    `ValueError` for one that is not there, that is no adapter at first sight, or that has a larger rank than
    `max_rank`, and `HubError`.
    """
    several = map(_name_and_path, _several(given))
    return tuple(f"{name}={_checked(name, path, download_dir, max_rank)}" for name, path in several)


def check_modules(given: Modules, max_rank: int | None = None) -> None:
    """Raise `ValueError` as `absolute_modules` does, without a look at the hub."""
    for name, path in map(_name_and_path, _several(given)):
        check_name(name)
        if not is_adapter_name(path):
            check_files(absolute(path), max_rank)


def _several(given: Modules) -> Sequence[str | Mapping[str, Any]]:
    return [given] if isinstance(given, str | Mapping) else given


def as_module(given: str) -> str:
    """Return an adapter of a command line as NAME=FOLDER; in vLLM it may be JSON. Raises `ValueError`."""
    return "=".join(_name_and_path(given)) if given.lstrip().startswith("{") else given


def _name_and_path(given: str | Mapping[str, Any]) -> tuple[str, str]:
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        name, _, path = given.partition("=")
        if not name or not path:
            raise ValueError(f"lora_modules={given!r:.200} is no NAME=FOLDER, as stories=/models/stories-lora")
        return name, path
    try:
        module = (
            msgspec.json.decode(given, type=_GivenModule)
            if isinstance(given, str)
            else msgspec.convert(given, _GivenModule)
        )
    except (msgspec.DecodeError, TypeError) as error:
        raise ValueError(f"lora_modules={given!r:.200} has no name and path: {error}") from None
    if "=" in module.name:
        raise ValueError(f"the name {module.name!r:.100} of an adapter has a =, which ends a name; leave it out")
    return module.name, module.path


def _checked(name: str, given: str, download_dir: str | None, max_rank: int | None) -> str:
    """Return the absolute path of an adapter that has a name."""
    check_name(name)
    path = resolve_adapter(given, download_dir) if is_adapter_name(given) else absolute(given)
    check_files(path, max_rank)
    return path


def check_enabled(given: Mapping[str, Any]) -> None:
    """Raise `ValueError` if options name adapters and turn them off."""
    if given.get("lora_modules") and given.get("enable_lora") is False:
        raise ValueError("lora_modules names adapters, and enable_lora=False turns them off; give one of the two")


def max_rank_of(given: Mapping[str, Any]) -> int:
    """Return the largest rank of the adapters of an engine for which these options are given."""
    rank: int = given.get("max_lora_rank", options_of(EngineOptions)["max_lora_rank"].default)
    return rank


def check_files(path: str, max_rank: int | None = None) -> None:
    """Raise `ValueError` for a path that is no adapter at first sight, or one of a larger rank.

    The engine reads all of it when the first request names it.
    """
    kind, advice = what_is(path), "give the folder that PEFT has written, or a GGUF file"
    if kind == "is a file" and is_gguf(path):
        return
    if kind != "is a folder":
        raise ValueError(f"the adapter {path:.200} {kind:.200}; {advice}")
    config = Path(path, ADAPTER_CONFIG)
    if (kind := what_is(config)) == NOWHERE:
        raise ValueError(f"the adapter {path} has no {ADAPTER_CONFIG}; {advice}")
    if kind != "is a file":  # a pipe could wait for ever
        raise ValueError(f"{config} {kind}; {advice}")
    method, rank = _read_config(config)
    if method != "LORA":
        raise ValueError(f"{config} has peft_type {method!r}, and adapters are of type 'LORA'; merge others")
    if max_rank is not None and isinstance(rank, int) and rank > max_rank:
        raise ValueError(f"{config} has rank {rank}, and max_lora_rank is {max_rank}; start the engine with {rank}")


def _read_config(path: Path) -> tuple[Any, Any]:
    """Return `peft_type` and `r` of a config. Raises `ValueError`."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ValueError(f"{path} has more than {MAX_CONFIG_BYTES} bytes; it is not the config of an adapter")
        config = msgspec.json.decode(content, type=_Config)
        return _short_value(config.peft_type), _short_value(config.r)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}; give a folder that PEFT has written") from None


def _short_value(value: msgspec.Raw) -> Any:
    """Return a value of a few bytes; of others the text where they begin."""
    text = bytes(value)
    return msgspec.json.decode(text) if len(text) <= _SHORT else text[:_SHORT].decode(errors="replace")


def check_known(adapter: LoRARequest, info: AdapterInfo | None) -> None:
    """Raise `ValueError` for an adapter that requests to an engine may not name."""
    if info is None:
        raise ValueError(
            f"lora_request names {adapter.lora_path}, and the engine was started without adapters; start it with "
            "enable_lora=True"
        )
    if not info.takes_any and adapter.lora_path not in info.folders.values():
        raise ValueError(
            f"lora_request names {adapter.lora_path}, which is none of the engine's lora_modules; start it with this "
            "one, or with allow_runtime_lora"
        )


def runtime_options(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options of an engine that belongs to the caller, whose requests may then name any adapter."""
    return {"allow_runtime_lora": True, **given} if given.get("enable_lora") else given
