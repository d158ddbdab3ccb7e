"""The HTTP server as the command line sets it up."""

from __future__ import annotations

import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.frontend.chat.answer_format import AnswerFormat
from quire.frontend.cli.flags import HttpFlags, SamplingFlags
from quire.frontend.cli.model import Model
from quire.frontend.cli.output import write
from quire.frontend.engine_args import DEMO_MODEL
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.server import Serving, bind
from quire.frontend.http.service import Service, names_of

_NAMES = {
    "api_key": "api_keys",
    "api_key_file": "api_key_files",
    "served_model_name": "served_model_names",
    "allowed_origins": "cors_origins",
}
_OF_ANSWERS = ("tool_call_parser", "reasoning_parser")
_PORTS_TO_TRY = 20  # from the default one on, when none was asked for


def listen(flags: HttpFlags) -> tuple[ServerArgs, socket.socket]:
    """The arguments of the server, and its socket. Raises `ValueError` or `OSError`."""
    args = server_args(flags)
    if flags.port is not None or flags.uds is not None:
        return args, bind(args, args.port)
    for port in range(args.port, args.port + _PORTS_TO_TRY):
        try:
            return args, bind(args, port)
        except OSError as error:
            failure = error
    raise failure


def server_args(flags: HttpFlags) -> ServerArgs:
    """The arguments that the flags stand for. Raises `ValueError`."""
    given: dict[str, Any] = {}
    for name, value in asdict(flags).items():
        if name in _OF_ANSWERS:
            continue
        if isinstance(value, list):
            given[_NAMES[name]] = tuple(map(str, value))
        elif value is not None:
            given[name] = str(value) if isinstance(value, Path) else value
    return ServerArgs(**given)


def serving_of(
    model: Model, args: ServerArgs, listener: socket.socket, flags: HttpFlags, sampling: SamplingFlags
) -> Serving:
    """The server of `model`; sampling flags are the defaults of requests that leave a value out."""
    tokenizer = model.llm.tokenizer
    service = Service(
        llm=model.llm,
        args=args,
        names=names_of(args, model.llm.model, DEMO_MODEL),
        tokenizer=tokenizer,
        defaults=model.defaults(sampling),
        answer_format=_answer_format(model, flags),
    )
    return Serving(service, listener, _tell)


def _answer_format(model: Model, flags: HttpFlags) -> AnswerFormat:
    from quire.frontend.chat_template import template_sources

    source = "" if model.folder is None else template_sources(model.folder).get("default", "")
    tokenizer = model.llm.tokenizer
    added = {} if tokenizer is None else tokenizer.added_tokens
    special = frozenset() if tokenizer is None else tokenizer.special_token_ids
    return AnswerFormat.detect(
        source,
        added_tokens=added.values(),
        special_tokens=[text for token_id, text in added.items() if token_id in special],
        tool_parser=flags.tool_call_parser or "auto",
        reasoning_parser=flags.reasoning_parser or "auto",
    )


def _tell(serving: Serving) -> None:
    write(f"quire: engine listening at {serving.engine_address}\n")
    write(f"quire: serving {serving.model_name} at {serving.url}\n")
