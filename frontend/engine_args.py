"""The arguments of `LLM` and `AsyncLLM`: the options of an engine and of its clients, by vLLM's names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, cast

from quire.frontend.hub.names import check_model, is_gguf, is_hub_name
from quire.frontend.hub.resolve import resolve_model
from quire.frontend.vllm_args import reject
from quire.protocol.engine_options import (
    SECONDS_OR_ZERO,
    ClientOptions,
    EngineOptions,
    HubOptions,
    SupervisionOptions,
)
from quire.protocol.messages import Reload
from quire.protocol.options import Option, options_of
from quire.protocol.speculative_config import parse_speculative_config

DEMO_MODEL = str(Path(__file__).parent / "demo_model")

P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class EngineArgs(ClientOptions, SupervisionOptions, HubOptions, EngineOptions):
    """Arguments with which an engine is started, or reached if it is running at `engine_address`.

    `quire info --options` lists them. Raises `ValueError` for the first argument that is not allowed.
    """

    model: Annotated[str, Option("MODEL")] = field(default=DEMO_MODEL, kw_only=False)

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        if self.engine_address is None:
            check_model(self.model, self.revision)

    @classmethod
    def from_options(cls, model: str | None, options: Mapping[str, Any]) -> EngineArgs:
        """Return the arguments for keywords as a user gave them; None stands for the default.

        A model given by its name is downloaded if need be. Raises `TypeError` for an unknown keyword, `ValueError` for
        a value that is not allowed, and `HubError`.
        """
        rows = options_of(cls)
        for name, value in options.items():
            if name not in rows:
                reject(name, value, set(rows))
        given = {name: value for name, value in options.items() if name in rows and value is not None}
        given = {name: _as_text(name, value) for name, value in given.items()}
        if model is not None:
            given["model"] = str(model)
        if "engine_address" in given and (decided := sorted(given.keys() - options_of(ClientOptions).keys())):
            raise ValueError(
                f"{', '.join(decided)} cannot be set for the engine at {given['engine_address']}, which is running "
                "already; leave out, or set when that engine is started"
            )
        if "prefill_address" in given and "engine_address" not in given:
            given.setdefault("kv_peer", given["prefill_address"])
        args = cls(**given)
        if args.engine_address is not None:
            return args
        folder = resolve_model(args.model, args.revision, args.download_dir)
        drafting = _with_draft_folder(args.speculative_config, args.download_dir)
        return replace(args, model=str(folder), speculative_config=drafting, revision=None, download_dir=None)

    def settings(self) -> dict[str, object]:
        """Return the options of the engine process, its address left out."""
        options = {name: option.default for name, option in options_of(EngineOptions).items()}
        given = {name: getattr(self, name) for name, default in options.items() if getattr(self, name) != default}
        return {**given, "model": self.model, "seed": self.seed}


def _as_text(name: str, value: Any) -> Any:
    """Return an option's value; that of one which is a JSON object may be given as a dict."""
    return json.dumps(value) if name in _JSON and isinstance(value, Mapping) else value


def _with_draft_folder(config: str | None, download_dir: str | None = None) -> str | None:
    """Return a `speculative_config` whose draft model is a folder; one given by its name is downloaded if need be."""
    if config is None or (model := parse_speculative_config(config).model) is None:
        return config
    return json.dumps({**json.loads(config), "model": str(resolve_model(model, download_dir=download_dir).absolute())})


_JSON = ("hf_overrides", "speculative_config")

DRAIN_SECONDS = 60.0
"""Seconds that requests which have begun get to end in the engine before, if a reload is to drain it."""


def reload_arguments(options: Mapping[str, Any], *, drain: bool, drain_timeout: float) -> Reload:
    """Return the arguments of a reload with these options changed, None for the default of one; paths are absolute.

    A model given by its name is downloaded if need be. Raises `TypeError` for an unknown option, `ValueError` for one
    that a reload cannot change or a value that is not allowed, and `HubError`.
    """
    SECONDS_OR_ZERO.check("drain_timeout", drain_timeout)
    rows = options_of(EngineOptions)
    hub = {name: value for name, value in options.items() if name in options_of(HubOptions) and value is not None}
    if hub and options.get("model") is None:
        raise ValueError(f"{', '.join(hub)} can be set for a model given by its name; give model as well")
    settings: dict[str, bool | int | float | str | None] = {}
    for name, given in options.items():
        value = _as_text(name, given)
        if name in options_of(HubOptions):
            continue
        if name not in rows:
            if name in options_of(EngineArgs):
                raise ValueError(f"{name} cannot be changed by a reload, but {', '.join(rows)} can")
            reject(name, value, set(rows))
        if value is not None:
            rows[name].check(value)
        is_path = value is not None and rows[name].metavar in ("FOLDER", "MODEL")
        settings[name] = str(Path(value).absolute()) if is_path else value
    if isinstance(drafting := settings.get("speculative_config"), str):
        settings["speculative_config"] = _with_draft_folder(drafting)
    if (model := options.get("model")) is not None and (hub or is_gguf(str(model)) or is_hub_name(str(model))):
        settings["model"] = str(resolve_model(str(model), **hub))
    return Reload(settings, drain_timeout if drain else 0.0)


def takes_engine_args(
    arguments: Callable[P, EngineArgs],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator that gives a constructor the parameters of `EngineArgs`, for type checkers and editors."""
    del arguments
    return lambda constructor: cast("Callable[Concatenate[Any, P], None]", constructor)
