"""Setup of the HTTP server from the flags."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.cli.flags import HttpFlags, wrong_usage
from quire.frontend.cli.output import say, write
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.server import Serving
from quire.frontend.http.transport.listener import bind
from quire.protocol.address import note_server
from quire.protocol.open_files import OTHER_FILES, allow_connections
from quire.protocol.options import options_of

_LEAST_CONNECTIONS = 16
_PORTS_TO_TRY = 20  # from the default port on, if none was given


def listen(flags: HttpFlags) -> tuple[ServerArgs, socket.socket]:
    """Return the arguments of the server, and its socket. Raises `BadParameter` or `OSError`."""
    args = _with_fitting_connections(server_args(flags))
    if flags.port is not None or flags.uds is not None:
        return args, bind(args, args.port)
    for port in range(args.port, args.port + _PORTS_TO_TRY):
        try:
            return args, bind(args, port)
        except OSError as error:
            failure = error
    raise failure


def _with_fitting_connections(args: ServerArgs) -> ServerArgs:
    """Return the arguments with as many connections as the limit of open files allows, and tell if these are fewer."""
    most = allow_connections(args.max_connections)
    if most == args.max_connections:
        return args
    limit, least = OTHER_FILES + most, min(_LEAST_CONNECTIONS, args.max_connections)
    advice = "raise it for this process, by `ulimit -n` or systemd's LimitNOFILE"
    if most < least:
        raise OSError(
            f"the limit of open files, {limit}, leaves room for {most} connections; the server needs one of "
            f"{OTHER_FILES + least} or more, and {OTHER_FILES + args.max_connections} for all of "
            f"max_connections={args.max_connections}; {advice}"
        )
    say(
        f"quire: at most {most} connections at once, of max_connections={args.max_connections}: the limit of open "
        f"files is {limit}; {advice}"
    )
    return replace(args, max_connections=most)


def server_args(flags: HttpFlags) -> ServerArgs:
    """Return the server arguments for the flags. Raises `BadParameter`."""
    rows = options_of(ServerArgs)
    values: dict[str, Any] = {
        name: tuple(value) if rows[name].is_list else value for name, value in flags.given.items() if name in rows
    }
    with wrong_usage():
        args = ServerArgs(**values)
        args.all_api_keys()
        args.admin_keys()
    return args


def tell(serving: Serving) -> None:
    """Print where the server and the engines of its only model listen, and note the server with each engine."""
    models, url = serving.models, serving.url
    models.loader.on_open(lambda _model, service: note_engines(service.llm, url))
    if len(models.models) == 1:
        for service in models.services:
            for engine in service.llm.engines():
                write(f"quire: engine listening at {engine.address}\n")
    write(f"quire: serving {', '.join(model.name for model in models)} at {url}\n")


def note_engines(llm: AsyncLLM, url: str) -> None:
    """Note the server with each engine of a model."""
    for engine in llm.engines():
        note_server(engine.address, url)
