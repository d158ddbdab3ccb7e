"""The models that `quire serve` serves: one that is loaded at once, or several that requests load."""

from __future__ import annotations

import functools
import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import typer

from quire.frontend.children import Child, noted_children
from quire.frontend.cli.flags import AttachFlags, EngineFlags, SamplingFlags, wrong_usage
from quire.frontend.cli.model import Model, new_runner, open_model
from quire.frontend.cli.output import say
from quire.frontend.engine_args import DEMO_MODEL
from quire.frontend.http.models.loader import LoadPolicy, ModelLoader
from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.models.served_models import ServedModels
from quire.frontend.http.server_state import ServerState
from quire.frontend.http.service import ModelService, names_of
from quire.frontend.http.service_maker import ServiceMaker
from quire.frontend.hub.gguf_files import SUFFIX, gguf_models
from quire.frontend.hub.names import check_model, name_of
from quire.frontend.hub.resolve import resolve_model
from quire.frontend.kernels import ask_kernels
from quire.frontend.path_kind import what_is
from quire.protocol.engine_options import EngineOptions
from quire.protocol.options import options_of, parse_size

logger = logging.getLogger(__name__)

_SURVEY_SECONDS = 60.0  # for the headers of a model's files to be read

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:
    import asyncio

    from quire.frontend.http.args import ServerArgs


@dataclass(frozen=True)
class OpenedModels:
    """The models of a server, and the runner of its event loop."""

    models: ServedModels
    runner: asyncio.Runner


@dataclass(frozen=True)
class ModelFlags:
    """The flags that decide how models are loaded; `more`: further arguments of `AsyncLLM`."""

    engine: EngineFlags
    attach: AttachFlags
    sampling: SamplingFlags
    more: Mapping[str, Any]

    def load(self, runner: asyncio.Runner, **changes: Any) -> Model:
        """Start an engine; on any thread."""
        from quire.frontend.async_llm import AsyncLLM

        return Model(AsyncLLM(**{**self.engine.given, **self.attach.given, **self.more, **changes}), runner)

    def service(self, maker: ServiceMaker, model: Model) -> ModelService:
        """Return the service of a loaded model, with the flags' sampling values as defaults."""
        if model.llm.pooling_info.generates:
            logger.info("sampling defaults: %s", model.sampling_line(self.sampling))
        return maker.make(model.llm, model.defaults(self.sampling))


@contextmanager
def open_models(given: Sequence[str], flags: ModelFlags, server: ServerState) -> Iterator[OpenedModels]:
    """Yield the models of the server, of which only the one of a server without further ones is loaded now.

    `given`: several models, or none for the one of the engine's flags. Raises `BadParameter` for flags that contradict
    each other, and `HubError`.
    """
    _check(given, flags, server.args)
    if len(given) > 1 or server.args.models_dir is not None:
        with new_runner() as runner:
            yield OpenedModels(_several(given, flags, server, runner), runner)
        return
    if server.args.idle_timeout is not None:
        with _one_that_sleeps(flags, server) as opened:
            yield opened
        return
    with open_model(flags.engine, flags.attach, flags.more) as model:
        _note_folder(model)
        maker = ServiceMaker(server, names_of(server.args.served_model_name, model.llm.model, DEMO_MODEL))
        yield OpenedModels(ServedModels.of(flags.service(maker, model)), model.runner)


def _check(given: Sequence[str], flags: ModelFlags, args: ServerArgs) -> None:
    are_several = len(given) > 1 or args.models_dir is not None
    if args.max_loaded is not None and not are_several:
        raise typer.BadParameter("--max-loaded is for several models; name them, or give --models-dir, or omit it")
    if (flags.attach.engine_address or flags.attach.engine) and (are_several or args.idle_timeout is not None):
        raise typer.BadParameter(
            "--engine-address and --engine are for one model, whose engine this server neither starts nor ends; omit "
            "them, or further models, --models-dir and --idle-timeout"
        )
    if not are_several:
        return
    for name in ("tokenizer", "prefill_address"):
        if getattr(flags.attach, name):
            raise typer.BadParameter(f"--{name.replace('_', '-')} is for one model; omit it, or the further models")
    if args.served_model_name:
        raise typer.BadParameter("--served-model-name is for one model; several are named by their folders and files")
    if flags.engine.lora_modules:
        raise typer.BadParameter("--lora-modules are of one model; omit them, or the further models")
    if flags.engine.revision is not None:
        raise typer.BadParameter("--revision is for one model; omit it, or the further models")


@contextmanager
def _one_that_sleeps(flags: ModelFlags, server: ServerState) -> Iterator[OpenedModels]:
    """Yield one model, which is loaded, and may be unloaded and loaded again."""
    with new_runner() as runner:
        models = _sleeping(flags.load(runner), flags, server)
        try:
            yield OpenedModels(models, runner)
        finally:
            for service in models.services:  # none, if the server has run
                service.close()


def _sleeping(model: Model, flags: ModelFlags, server: ServerState) -> ServedModels:
    """Return a loaded model as one that may be unloaded: nothing else refers to it when this has returned.

    It is loaded again from the same folder, so that it stays the same if the hub has another one by then, and so are
    its adapters.
    """
    _note_folder(model)
    runner, loads = model.runner, StoppableLoads()
    again: dict[str, Any] = {"model": model.llm.model, "revision": None}
    if (info := model.llm.engine_info.adapters) is not None and info.folders:
        again["lora_modules"] = [f"{name}={folder}" for name, folder in info.folders.items()]
    maker = ServiceMaker(server, names_of(server.args.served_model_name, model.llm.model, DEMO_MODEL))
    load = loads.stoppable(lambda: flags.service(maker, flags.load(runner, **again)))
    return _managed([ServedModel.of(flags.service(maker, model), load)], flags, server, loads)


def _note_folder(model: Model) -> None:
    if model.folder is None:
        say("quire: the model has no tokenizer.json, so clients can only send token ids; put it into its folder")


def _several(given: Sequence[str], flags: ModelFlags, server: ServerState, runner: asyncio.Runner) -> ServedModels:
    """Return models that requests load. Those of the hub are downloaded now."""
    folder, loads = server.args.models_dir, StoppableLoads()
    paths = [_local(each, flags.engine.download_dir) for each in given]
    paths += [] if folder is None else _models_in(Path(folder))
    if twice := [name for name, count in Counter(map(_name, paths)).items() if count > 1]:
        raise typer.BadParameter(f"several models are named {twice[0]}; rename the folder or the file of one")

    def served(path: Path) -> ServedModel:
        maker = ServiceMaker(server, [_name(path), str(path)])
        load = loads.stoppable(lambda: flags.service(maker, flags.load(runner, model=str(path))))
        return ServedModel(maker.names, str(path), maker.metrics, load)

    return _managed([served(path) for path in paths], flags, server, loads)


def _local(given: str, download_dir: str | None) -> Path:
    """Return the folder or GGUF file of a model, which is downloaded if need be."""
    if Path(given).exists():
        with wrong_usage():
            check_model(given)
        return Path(given).absolute()
    return resolve_model(given, download_dir=download_dir)


def _models_in(folder: Path) -> list[Path]:
    """Return the models in a folder: its subfolders that are checkpoints, and its GGUF files, by their first parts."""
    if not folder.is_dir():
        raise typer.BadParameter(f"--models-dir {folder} {what_is(folder)}; give a folder with models")
    entries = sorted(folder.absolute().iterdir())
    folders = [entry for entry in entries if (entry / "config.json").is_file()]
    files = [folder.absolute() / model.files[0] for model in gguf_models(entry.name for entry in entries)]
    if not (found := folders + files):
        raise typer.BadParameter(
            f"--models-dir {folder} has no models: neither a folder with a config.json, nor a GGUF file"
        )
    return found


def _name(path: Path) -> str:
    """Return the name of a model for clients: its name at the hub, or that of its folder or file."""
    return name_of(str(path)).removesuffix(SUFFIX)


def _managed(
    models: Sequence[ServedModel], flags: ModelFlags, server: ServerState, loads: StoppableLoads
) -> ServedModels:
    """Return models that are loaded and unloaded while the server runs."""
    args, options, server.unloads_models = server.args, options_of(EngineOptions), True
    policy = LoadPolicy(
        max_loaded=args.max_loaded,
        fits=loads.stoppable(functools.partial(_fits, flags.engine)),
        keep_seconds=math.inf if args.idle_timeout is None else args.idle_timeout,
        stop_loading=loads.stop,
    )
    most = flags.engine.given.get("max_waiting_requests", options["max_waiting_requests"].default)
    return ServedModels(server, models, ModelLoader(models, policy), most)


def _fits(engine: EngineFlags, model: ServedModel) -> bool:
    """Return whether a model's engines fit into the memory that is free. Raises `ValueError` if it can't be loaded at
    all, and `RuntimeError` if that isn't known in time.
    """
    given = {
        name: parse_size(str(value)) if engine.rows[name].is_size else value
        for name, value in engine.given.items()
        if isinstance(value, (str, int, float))
    }
    if (count := engine.given.get("data_parallel_size", 1)) > 1:
        given["machine_share"] = f"0/{count}"
    [found] = ask_kernels("survey", "--options", json.dumps(given), model.path, timeout=_SURVEY_SECONDS)
    if not found["supported"]:
        raise ValueError(found["problem"])
    return bool(found["fits"])


class StoppableLoads:
    """Loads of models on other threads, which fail soon once they are stopped: the processes they start are killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of what follows
        self._starting: set[Child] = set()
        self._are_stopped = False

    def stoppable(self, load: Callable[P, T]) -> Callable[P, T]:
        """Return `load` as one that can be stopped."""

        def loading(*args: P.args, **kwargs: P.kwargs) -> T:
            started: list[Child] = []

            def note(child: Child) -> None:
                started.append(child)
                with self._lock:
                    self._starting.add(child)
                    if self._are_stopped:
                        child.kill()

            try:
                with noted_children(note):
                    return load(*args, **kwargs)
            finally:
                with self._lock:
                    self._starting -= {*started}

        return loading

    def stop(self) -> None:
        """Let all loads fail that are in progress, and those that begin from now on."""
        with self._lock:
            self._are_stopped = True
            for child in self._starting:
                child.kill()
