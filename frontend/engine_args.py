"""The arguments of `LLM` and `AsyncLLM`: the options of an engine and of its clients, by vLLM's names."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, Self, TypeVar, cast

from quire.frontend.adapters import absolute_modules, check_enabled, max_rank_of, runtime_options
from quire.frontend.hub.names import check_model, is_gguf, is_hub_name
from quire.frontend.hub.resolve import resolve_model
from quire.frontend.vllm.options import ENGINE_OPTIONS, nearest, own_options, with_kv_host_memory, with_max_loras
from quire.frontend.vllm.script_args import add_engine_arguments
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
T = TypeVar("T")


def _takes_vllm_options(table: type[T]) -> type[T]:
    """Let the constructor of a table take vLLM's other options too, see `own_options`, and None for any default."""
    made: Any = table
    construct = made.__init__

    @functools.wraps(construct)
    def take(self: T, *args: Any, **options: Any) -> None:
        construct(self, *args, **own_options(options, options_of(table).keys()))

    made.__init__ = take
    return table


@_takes_vllm_options
@dataclass(frozen=True, kw_only=True)
class EngineArgs(ClientOptions, SupervisionOptions, HubOptions, EngineOptions):
    """Arguments with which engines are started, or reached if they are running at `engine_address` or `engine`.

    `quire info --options` lists them; vLLM's others are taken as `vllm.options` says, and None stands for the default.
    Raises `ValueError` for the first argument that is not allowed, and `TypeError` for an unknown one.
    """

    model: Annotated[str, Option("MODEL")] = field(default=DEMO_MODEL, kw_only=False)

    def __post_init__(self) -> None:
        EngineOptions.__post_init__(self)
        if self.starts_engines:
            check_model(self.model, self.revision)

    @property
    def running_engines(self) -> list[str]:
        """Addresses of the running engines to attach to."""
        first = [] if self.engine_address is None else [self.engine_address]
        return list(dict.fromkeys((*first, *self.engine)))

    @property
    def starts_engines(self) -> bool:
        """True if engines are to be started."""
        return not self.running_engines or self.data_parallel_size > 1

    @classmethod
    def from_options(cls, model: str | None, options: Mapping[str, Any]) -> EngineArgs:
        """Return the arguments for keywords as a user gave them; None stands for the default.

        A model given by its name is downloaded if need be. Raises `TypeError` for an unknown keyword, `ValueError` for
        a value that is not allowed, and `HubError`.
        """
        given = own_options(options, options_of(cls).keys())
        given = {name: _as_text(name, value) for name, value in given.items()}
        for name in ("engine", "prefill_address"):
            if isinstance(given.get(name), str):
                given[name] = (given[name],)
        if model is not None:
            given["model"] = str(model)
        check_attaching(given)
        check_enabled(given)
        if "lora_modules" in given:
            modules, download_dir = given["lora_modules"], given.get("download_dir")
            given["lora_modules"] = absolute_modules(modules, download_dir, max_rank_of(given))
        args = cls(**runtime_options(given))
        if not args.starts_engines:
            return args
        folder = resolve_model(args.model, args.revision, args.download_dir)
        drafting = _with_draft_folder(args.speculative_config, args.download_dir)
        return replace(args, model=str(folder), speculative_config=drafting, revision=None)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each argument, and for vLLM's others, to a parser or a group of one; return it.

        What is not given is None, so that `LLM(**vars(parser.parse_args()))` has the defaults.
        """
        add_engine_arguments(parser, options_of(EngineArgs))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the arguments among those of a command line; others are left to the script."""
        known = options_of(cls).keys() | ENGINE_OPTIONS.keys()
        return cls(**{name: value for name, value in vars(args).items() if name in known})

    def given(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults."""
        values = {name: (getattr(self, name), option.default) for name, option in options_of(EngineArgs).items()}
        return {name: value for name, (value, default) in values.items() if value != default}

    def settings(self) -> dict[str, object]:
        """Return the options of the engine process, its address left out."""
        options = {name: option.default for name, option in options_of(EngineOptions).items()}
        given = {name: getattr(self, name) for name, default in options.items() if getattr(self, name) != default}
        return {**given, "model": self.model, "seed": self.seed}


def check_attaching(given: Mapping[str, Any]) -> None:
    """Raise `ValueError` for arguments that an engine has from its start, if no engine is started."""
    if given.get("data_parallel_size", 1) > 1:
        return
    running = given.get("engine_address") or next(iter(given.get("engine") or ()), None)
    if running is not None and (decided := sorted(given.keys() - options_of(ClientOptions).keys())):
        raise ValueError(
            f"{', '.join(decided)} cannot be set for the engine at {running}, which is running "
            "already; leave out, or set when that engine is started"
        )


def _as_text(name: str, value: Any) -> Any:
    """Return an option's value; that of one which is a JSON object may be given as a dict."""
    return json.dumps(value) if name in _JSON and isinstance(value, Mapping) else value


def _with_draft_folder(config: str | None, download_dir: str | None = None) -> str | None:
    """Return a `speculative_config` whose draft model is a folder; one given by its name is downloaded if need be."""
    if config is None or (model := parse_speculative_config(config).model) is None:
        return config
    return json.dumps({**json.loads(config), "model": str(resolve_model(model, download_dir=download_dir).absolute())})


_JSON = ("hf_overrides", "kv_events_config", "speculative_config")

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
    settings: dict[str, bool | int | float | str | list[str] | None] = {}
    for name, given in with_kv_host_memory(with_max_loras(options), options.get("device", "auto")).items():
        if name in options_of(HubOptions):
            continue
        if name not in rows:
            if name in options_of(EngineArgs):
                raise ValueError(f"{name} cannot be changed by a reload, but {', '.join(rows)} can")
            own_options({name: given}, rows.keys())
            continue
        value = nearest(name, _as_text(name, given))
        if name == "lora_modules" and value is not None:
            value = list(absolute_modules(value, hub.get("download_dir")))
        if value is not None:
            rows[name].check(value)
        is_path = value is not None and rows[name].metavar in ("FOLDER", "MODEL")
        settings[name] = str(Path(value).absolute()) if is_path else value
    if isinstance(drafting := settings.get("speculative_config"), str):
        settings["speculative_config"] = _with_draft_folder(drafting)
    if (model := options.get("model")) is not None and (hub or is_gguf(str(model)) or is_hub_name(str(model))):
        settings["model"] = str(resolve_model(str(model), **hub))
    return Reload(settings, drain_timeout if drain else 0.0)


AsyncEngineArgs = EngineArgs
"""vLLM's name of the arguments of `AsyncLLM`."""


class MadeFromEngineArgs:
    """The constructor of `LLM`, `AsyncLLM` and `LLMEngine` that takes their arguments as one."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an object made with these arguments."""
        make: Callable[..., Self] = cls
        return make(**engine_args.given())


def takes_engine_args(
    arguments: Callable[P, EngineArgs],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator that gives a constructor the parameters of `EngineArgs`, for type checkers and editors."""
    del arguments
    return lambda constructor: cast("Callable[Concatenate[Any, P], None]", constructor)
