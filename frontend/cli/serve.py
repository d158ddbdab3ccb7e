"""`quire serve`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.frontend.cli.evaluation import check_evaluation
from quire.frontend.cli.flags import (
    AttachFlags,
    EngineFlags,
    HttpFlags,
    RecordFlags,
    SamplingFlags,
    TemplateFlags,
    switch,
    takes_flags,
)
from quire.frontend.cli.model import Model, open_model, starts_engines
from quire.frontend.cli.output import PrintedAnswer, say, tolerate_encoding
from quire.frontend.hub.names import is_gguf, is_hub_name
from quire.frontend.path_kind import what_is

if TYPE_CHECKING:
    from quire.frontend.evaluation.workload.recorder import TraceRecorder


@takes_flags
def serve(
    given: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|PROMPT",
            help="Folder, GGUF file or name (ORG/NAME) of a model to serve, like --model; several are loaded by the "
            "first requests for them. Or a text of several words to continue.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--prompt", help="Continue this text on stdout and exit.", metavar="TEXT", show_default=False),
    ] = None,
    as_message: Annotated[
        bool, switch(None, "--chat", "Treat PROMPT as a message to answer, with the model's chat template.")
    ] = False,
    *,
    http: HttpFlags,
    recording: RecordFlags,
    engine: EngineFlags,
    attach: AttachFlags,
    template: TemplateFlags,
    sampling: SamplingFlags,
) -> None:
    """Start an engine and an HTTP server, for browsers and for clients of OpenAI, Anthropic, Ollama and llama.cpp.

    It serves until SIGTERM, which lets open requests finish, or Ctrl-C, which does not. Others can attach to its engine
    with --engine-address. Several models have an engine each, which the first request for it starts. With a text
    instead of a model: stream the answer to stdout and exit, without a server.
    """
    tolerate_encoding()
    models, prompt = _models_or_text(given or [])
    if models and engine.model is not None:
        raise typer.BadParameter("the model is given twice; omit --model or the argument")
    if prompt is not None and text is not None:
        raise typer.BadParameter("the text is given twice; omit --prompt or the argument")
    if models and text is None and len(models) == 1 and http.models_dir is None:
        engine, models = engine.with_values(model=models[0]), []
    prompt = text if prompt is None else prompt
    if prompt is None:
        _serve(models, http, recording, engine, attach, template, sampling)
        return
    if len(models) > 1:
        raise typer.BadParameter("one model continues a text; omit the further models, or --prompt")
    if models:
        engine = engine.with_values(model=models[0])
    if recording.record is not None:
        raise typer.BadParameter("--record applies to the server; omit it, or the text")
    with open_model(engine, attach, template.given) as model:
        answer_once(model, prompt, sampling, as_message=as_message)


def _models_or_text(given: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the arguments as models, or as a text to continue. Raises `BadParameter`."""
    models = [each for each in given if _is_model(each)]
    texts = [each for each in given if each not in models]
    if len(texts) > 1 or (texts and models):
        raise typer.BadParameter(
            f"{texts[0]!r} is a text among several arguments; give models only, or one text, or the text as --prompt"
        )
    return models, texts[0] if texts else None


def _is_model(argument: str) -> bool:
    """Return True for a folder, a GGUF file or a name. Raises `BadParameter` for a word that is no model's."""
    if is_text(argument):
        return False
    if Path(argument).is_dir() or (is_gguf(argument) and Path(argument).is_file()):
        return True
    if not ("/" in argument or is_gguf(argument)):
        raise typer.BadParameter(
            f"there is no folder {argument}, and models of the Hugging Face hub have names such as Qwen/Qwen3-0.6B; to "
            f"continue a text of one word, give --prompt {argument}"
        )
    if is_gguf(argument):
        raise typer.BadParameter(f"{argument} {what_is(argument)}; give the path of a GGUF file")
    if not is_hub_name(argument):
        raise typer.BadParameter(
            f"there is no folder {argument}, and no model of the Hugging Face hub has such a name; give the folder of "
            "a checkpoint, a name such as Qwen/Qwen3-0.6B, or continue a text with --prompt"
        )
    return True


def is_text(argument: str) -> bool:
    """Return True for several words, or none, that are no path of a model."""
    if len(argument.split()) == 1:
        return False
    try:
        return not Path(argument).is_dir() and not is_gguf(argument)
    except OSError:  # longer than any path
        return True


def answer_once(model: Model, prompt: str, sampling: SamplingFlags, *, as_message: bool) -> None:
    """Stream the answer to a message, or the continuation of a text, to stdout."""
    params = model.params(sampling)
    answer = PrintedAnswer()
    if as_message:
        outputs = model.llm.chat([{"role": "user", "content": prompt}], params, output_kind="delta")
    else:
        outputs = model.llm.generate(prompt, params, output_kind="delta")
    try:
        model.runner.run(answer.stream(outputs))
    except BaseException:
        answer.end_line()
        raise
    answer.end()
    if sys.stderr.isatty():
        say(f"[{answer.summary}]")


def _serve(
    models: Sequence[str],
    http: HttpFlags,
    recording: RecordFlags,
    engine: EngineFlags,
    attach: AttachFlags,
    template: TemplateFlags,
    sampling: SamplingFlags,
) -> None:
    import signal

    from quire.frontend.cli.http import listen, tell
    from quire.frontend.cli.served_models import ModelFlags, open_models
    from quire.frontend.http.response_store import response_store
    from quire.frontend.http.server import Serving
    from quire.frontend.http.server_state import ServerState
    from quire.frontend.http.transport.listener import removed
    from quire.frontend.http.transport.logs import configure_logging
    from quire.protocol.address import forget_server

    if recording.record is not None and (len(models) > 1 or http.models_dir is not None):
        raise typer.BadParameter("--record is for one model; omit it, or the further models")
    engine = _with_defaults(engine, http, attach)
    may_load = _loads_adapters(http, engine, attach)
    args, listener = listen(http)  # before the model loads, so that a port in use is reported at once
    configure_logging(args.log_level, args.log_format)  # type: ignore[arg-type] # the table has checked it
    parsers = {"tool_call_parser": http.tool_call_parser, "reasoning_parser": http.reasoning_parser}
    flags = ModelFlags(engine, attach, sampling, {**parsers, **template.given})
    with (
        listener,
        removed(args.uds),
        response_store(args) as responses,
        _recorder(recording) as recorder,
        open_models(models, flags, ServerState(args, responses, may_load, engine.download_dir)) as opened,
    ):
        loader = opened.models.loader
        if recorder is not None:
            loader.on_open(lambda _model, service: service.llm.add_observer(recorder))
        addresses = [each.address for service in opened.models.services for each in service.llm.engines()]
        serving = Serving(opened.models, listener, tell)
        try:
            received = opened.runner.get_loop().run_until_complete(serving.run())
        finally:
            for address in addresses:  # of an engine that goes on without this server
                forget_server(address)
        if received is None:
            raise RuntimeError(str(loader.dead_error))
    if received is signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + received)


def _with_defaults(engine: EngineFlags, http: HttpFlags, attach: AttachFlags) -> EngineFlags:
    """Return the flags of an engine with the defaults of one that a server starts."""
    if engine.preload_grammars is None and starts_engines(engine, attach):  # a later load would pause all streams
        engine = engine.with_values(preload_grammars=True)
    if (engine.enable_lora or engine.lora_modules) and engine.allow_runtime_lora is None:
        engine = engine.with_values(allow_runtime_lora=http.admin_key_file is not None)
    return engine


def _loads_adapters(http: HttpFlags, engine: EngineFlags, attach: AttachFlags) -> bool:
    """Return whether clients may load adapters: as a flag says, or with the admin key. Raises `BadParameter`."""
    has_engine, folders = starts_engines(engine, attach), http.allowed_lora_folders or ()
    may = bool(engine.allow_runtime_lora) or (not has_engine and http.admin_key_file is not None)
    if folders and not may:
        raise typer.BadParameter(
            "--allowed-lora-folders is for clients that load adapters; give --enable-lora and --allow-runtime-lora or "
            "--admin-key-file as well, or omit it"
        )
    for folder in folders if has_engine else ():  # those of another's engine may be on another machine
        if (kind := what_is(folder)) != "is a folder":
            raise typer.BadParameter(f"--allowed-lora-folders {folder:.200} {kind:.200}; give a folder with adapters")
    return may


@contextmanager
def _recorder(recording: RecordFlags) -> Iterator[TraceRecorder | None]:
    """Open the recorder of requests, if requested; report at the end. Raises OSError, or `BadParameter`."""
    if recording.record is None:
        if recording.record_text:
            raise typer.BadParameter("--record-text needs a file to record to; give --record FILE as well")
        yield None
        return
    check_evaluation("--record")
    from quire.frontend.evaluation.workload.recorder import TraceRecorder

    try:
        recorder = TraceRecorder(recording.record, with_text=recording.record_text)
    except OSError as error:
        raise OSError(f"--record {error}") from error
    try:
        with recorder:
            yield recorder
    finally:
        count = recorder.num_recorded
        say(f"recorded {count} requests in {recording.record}" if count else "recorded no requests; there is no file")
