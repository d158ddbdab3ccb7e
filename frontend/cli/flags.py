"""The flags that several commands share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from quire.frontend.cli.failures import DEBUG

F = TypeVar("F", bound=Callable[..., Any])


def option(panel: str | None, text: str, metavar: str | None = None, **more: Any) -> Any:
    """Return a flag whose default is None, meaning "not given"; its help text tells the default that holds then."""
    return typer.Option(help=text, show_default=False, metavar=metavar, rich_help_panel=panel, **more)


def switch(panel: str | None, name: str, text: str, **more: Any) -> Any:
    """Return a flag without a value."""
    return typer.Option(name, help=text, show_default=False, metavar="", rich_help_panel=panel, **more)


def _debug(value: bool) -> None:
    if value:
        os.environ[DEBUG] = "1"


_engine = functools.partial(option, "Engine")
_attach = functools.partial(option, "A running engine")
_sampling = functools.partial(option, "Sampling")
_http = functools.partial(option, "HTTP server")


@dataclass(frozen=True)
class CommonFlags:
    """Flags of every command."""

    debug: Annotated[
        bool, switch(None, "--debug", "Show the tracebacks of errors.", callback=_debug, is_eager=True)
    ] = False


@dataclass(frozen=True)
class EngineFlags:
    """How the engine is set up; what is None was not given, and the engine's default holds."""

    model: Annotated[
        Path | None,
        _engine("Checkpoint: config.json, *.safetensors, tokenizer.json. Default: the demo model.", "FOLDER"),
    ] = None
    dtype: Annotated[
        str | None,
        _engine("Of the model: auto, bfloat16, float32. Default: auto, the checkpoint's.", "TYPE"),
    ] = None
    quantization: Annotated[
        str | None,
        _engine(
            "Turn float weights into integers: int8, int4 (a scale for each 128 weights), int4-g64, int4-g32. "
            "Default: as in the checkpoint.",
            "MODE",
        ),
    ] = None
    kv_dtype: Annotated[str | None, _engine("Of KV pages: auto, int8. Default: auto, the model's.", "TYPE")] = None
    max_model_len: Annotated[
        int | None, _engine("Context length: most tokens of prompt and answer. Default: the model's.", "TOKENS", min=1)
    ] = None
    max_num_seqs: Annotated[int | None, _engine("Sequences that run at once. Default: 256.", "N", min=1)] = None
    max_num_batched_tokens: Annotated[
        int | None, _engine("Token budget of one step. Default: 2048.", "TOKENS", min=1)
    ] = None
    kv_memory: Annotated[
        str | None,
        _engine("Memory for KV pages in bytes, or such as 512MiB, 4GiB. Default: chosen by the engine.", "SIZE"),
    ] = None
    num_pages: Annotated[int | None, _engine("KV pages, in place of --kv-memory.", "N", min=1)] = None
    page_size: Annotated[int | None, _engine("Tokens in one KV page: 32, 64 or 128. Default: 32.", "TOKENS")] = None
    threads: Annotated[
        int | None, _engine("Threads of the engine. Default: QUIRE_THREADS, or one for every usable core.", "N", min=1)
    ] = None
    pin_threads: Annotated[
        bool | None,
        typer.Option(
            "--pin-threads/--no-pin-threads",
            help="Bind each thread to a CPU of its own. Default: no.",
            show_default=False,
            rich_help_panel="Engine",
        ),
    ] = None
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Keep KV pages for requests that begin with the same tokens. Default: yes.",
            show_default=False,
            rich_help_panel="Engine",
        ),
    ] = None
    scheduling_policy: Annotated[
        str | None,
        _engine(
            "Who of those that wait is next: fcfs (who came first), priority, lpm (longest cached prefix), sjf (fewest "
            "tokens to prefill). Default: fcfs.",
            "NAME",
        ),
    ] = None
    long_prefill_threshold: Annotated[
        int | None,
        _engine("Tokens of one prompt in a step. Default: as many as hardly slow the others.", "TOKENS", min=1),
    ] = None
    max_waiting_requests: Annotated[
        int | None, _engine("Requests that may wait; more are refused. Default: 4096.", "N", min=1)
    ] = None
    max_waiting_tokens: Annotated[
        int | None, _engine("Tokens of their prompts, likewise. Default: 16777216.", "TOKENS", min=1)
    ] = None
    preload_grammars: Annotated[
        bool | None,
        typer.Option(
            "--preload-grammars/--no-preload-grammars",
            help="Be ready for grammars from the start, instead of pausing all for the first one that comes. Default: "
            "yes for the HTTP server, else no.",
            show_default=False,
            rich_help_panel="Engine",
        ),
    ] = None
    grammar_timeout: Annotated[
        float | None, _engine("Most time to compile the grammar of a request. Default: 10.", "SECONDS")
    ] = None
    cache_dir: Annotated[
        Path | None, _engine("Where compiled kernels are kept. Default: quire in the user's cache folder.", "FOLDER")
    ] = None
    weight_cache: Annotated[
        Path | None,
        _engine("Keep packed weights there: later starts map them, and engines share them. Default: none.", "FOLDER"),
    ] = None


@dataclass(frozen=True)
class AttachFlags:
    """How to reach an engine that is running already."""

    address: Annotated[
        str | None,
        _attach(
            "Use the engine at ipc://PATH or tcp://HOST:PORT instead of starting one. Its own flags, those under "
            "Engine, were set when it was started, and are refused here.",
            "ADDRESS",
        ),
    ] = None
    curve_keys: Annotated[Path | None, _attach("CURVE keys for tcp://, as `quire keys` makes them.", "FOLDER")] = None
    insecure_tcp: Annotated[bool, switch("A running engine", "--insecure-tcp", "Allow tcp:// without keys.")] = False
    tokenizer: Annotated[Path | None, _attach("Folder of the tokenizer. Default: the model's.", "FOLDER")] = None


@dataclass(frozen=True)
class HttpFlags:
    """Where the HTTP server listens, for whom, and what a request may cost; what is None was not given."""

    host: Annotated[str | None, _http("Address to listen at. Default: 127.0.0.1, this machine only.", "HOST")] = None
    port: Annotated[
        int | None, _http("Port; 0 takes a free one. Default: 8000, or the next one that is free.", "N", min=0)
    ] = None
    uds: Annotated[Path | None, _http("A UNIX socket instead of host and port.", "PATH")] = None
    api_key: Annotated[
        list[str] | None,
        _http("Ask clients for this key; may be given several times. QUIRE_API_KEY holds keys as well.", "KEY"),
    ] = None
    api_key_file: Annotated[list[Path] | None, _http("Ask for one of the keys in a file, one a line.", "FILE")] = None
    served_model_name: Annotated[
        list[str] | None,
        _http("What clients call the model; may be given several times. Default: its folder's name.", "NAME"),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        _http("How the model writes tool calls: hermes, llama3_json, none. Default: as its template shows.", "NAME"),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        _http("How it writes thoughts: think, qwen3, deepseek_r1, none. Default: as its template shows.", "NAME"),
    ] = None
    root_path: Annotated[str | None, _http("Where a proxy shows the server, such as /quire.", "PATH")] = None
    allowed_origins: Annotated[
        list[str] | None, _http("Web pages of this origin may call it, * for all. Default: none (no CORS).", "ORIGIN")
    ] = None
    log_level: Annotated[
        str | None, _http("debug, info (a line for each request), warning, error. Default: info.", "LEVEL")
    ] = None
    log_format: Annotated[str | None, _http("text, or json: an object a line. Default: text.", "FORMAT")] = None
    metrics_prefix: Annotated[
        str | None, _http("Of the names at /metrics; vllm fits dashboards made for vLLM. Default: quire.", "WORD")
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None, _http("Send an OpenTelemetry span for each request there. Default: OTEL_EXPORTER_OTLP_*.", "URL")
    ] = None
    ssl_certfile: Annotated[Path | None, _http("TLS: certificate chain as PEM.", "FILE")] = None
    ssl_keyfile: Annotated[Path | None, _http("TLS: private key as PEM.", "FILE")] = None
    ssl_keyfile_password: Annotated[str | None, _http("Of the private key.", "TEXT")] = None
    max_body_bytes: Annotated[int | None, _http("Largest body of a request. Default: 33554432.", "BYTES", min=1)] = None
    body_timeout: Annotated[float | None, _http("Most seconds for a body to arrive. Default: 30.", "S")] = None
    header_timeout: Annotated[
        float | None, _http("Most seconds for the headers of a request to arrive. Default: 30.", "S")
    ] = None
    send_timeout: Annotated[
        float | None, _http("Most seconds that a client may read nothing of its answer. Default: 300.", "S")
    ] = None
    max_connections: Annotated[int | None, _http("Most connections at once. Default: 4096.", "N", min=1)] = None
    max_prompts: Annotated[
        int | None, _http("Most completions of a request: its prompts times n. Default: 1024.", "N", min=1)
    ] = None
    trust_request_chat_template: Annotated[
        bool,
        switch("HTTP server", "--trust-request-chat-template", "Let clients bring chat templates, which are programs."),
    ] = False
    request_timeout: Annotated[float | None, _http("Most seconds that a request may take. Default: no limit.", "S")] = (
        None
    )
    drain_seconds: Annotated[
        float | None, _http("Most seconds that SIGTERM gives open requests. Default: 30.", "S", min=0)
    ] = None
    keep_alive: Annotated[float | None, _http("Seconds that an idle connection is kept. Default: 60.", "S")] = None


@dataclass(frozen=True)
class RecordFlags:
    """What the HTTP server records of its requests."""

    record: Annotated[
        Path | None,
        _http(
            "Record requests in a new file, for `quire replay`: times, lengths, shared prefixes, parameters; no text.",
            "FILE",
        ),
    ] = None
    record_text: Annotated[bool, switch("HTTP server", "--record-text", "Record the texts of prompts as well.")] = False


@dataclass(frozen=True)
class SamplingFlags:
    """How tokens are drawn; what is None was not given.

    The defaults of temperature, top_p, top_k, min_p and repetition_penalty are the model's own where it has them.
    """

    max_tokens: Annotated[
        int | None,
        _sampling("Most tokens of an answer. Default: until it ends, or the context is full.", "N", min=1),
    ] = None
    temperature: Annotated[
        float | None,
        _sampling("0: always the likeliest token; higher: more varied. Default: the model's *, or 1.", "X", min=0.0),
    ] = None
    top_p: Annotated[
        float | None,
        _sampling("Draw among the likeliest tokens of this probability together. Default: the model's *, or 1.", "P"),
    ] = None
    top_k: Annotated[
        int | None,
        _sampling("Draw among this many of the likeliest tokens, 0: all. Default: the model's *, or 0.", "N"),
    ] = None
    min_p: Annotated[
        float | None,
        _sampling(
            "Draw among tokens of at least P times the likeliest's probability. Default: the model's *, or 0.", "P"
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sampling("Above 1: tokens that were there before get less likely. Default: the model's *, or 1.", "X"),
    ] = None
    presence_penalty: Annotated[
        float | None, _sampling("Taken once from the logit of each token in the answer, -2 to 2. Default: 0.", "X")
    ] = None
    frequency_penalty: Annotated[
        float | None, _sampling("Taken from it for each time it occurred, -2 to 2. Default: 0.", "X")
    ] = None
    stop: Annotated[
        list[str] | None, _sampling("End the answer before this text; may be given several times.", "TEXT")
    ] = None
    seed: Annotated[
        int | None, _sampling("The same seed draws the same answer again. Default: a fresh one.", "N", min=0)
    ] = None
    ignore_eos: Annotated[bool, switch("Sampling", "--ignore-eos", "Go on after the model's end token.")] = False


def changed(flags: Any) -> dict[str, Any]:
    """Those of a group that differ from their defaults."""
    values = dataclasses.asdict(flags)
    return {each.name: values[each.name] for each in dataclasses.fields(flags) if values[each.name] != each.default}


def flag_names(given: Mapping[str, Any]) -> str:
    """The same as one writes them, for a message."""
    return ", ".join(f"--{'no-' * (value is False)}{name.replace('_', '-')}" for name, value in given.items())


SAMPLING_NOTE = "* as its generation_config.json has it"


def takes_flags(function: F) -> Callable[..., Any]:
    """Give a command the flags of the dataclasses among its parameters: `engine: EngineFlags` gets `EngineFlags(...)`.

    Typer reads flags off a function's signature; this writes them there, once for all commands.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if _is_group(hint)}
    parameters = [
        parameter.replace(annotation=hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in groups
    ]
    for group in groups.values():
        parameters += _parameters(group)

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        values = {name: _value(group, given) for name, group in groups.items()}
        return function(**given, **values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del command.__wrapped__  # or its signature would be read
    return command


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


@functools.cache
def _hints(group: type) -> dict[str, Any]:
    return get_type_hints(group, include_extras=True)


def _parameters(group: type) -> list[inspect.Parameter]:
    """The flags of a group, and of the groups in it."""
    found = []
    for field in dataclasses.fields(group):
        hint = _hints(group)[field.name]
        if _is_group(hint):
            found += _parameters(hint)
        else:
            found.append(
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)
            )
    return found


def _value(group: type, given: dict[str, Any]) -> Any:
    """A group with its flags, which are taken out of `given`."""
    return group(
        **{name: _value(hint, given) if _is_group(hint) else given.pop(name) for name, hint in _hints(group).items()}
    )
