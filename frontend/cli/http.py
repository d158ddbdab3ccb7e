"""Setup of the HTTP server from the flags."""

from __future__ import annotations

import atexit
import logging
import socket
from dataclasses import replace
from typing import Any

from quire.frontend.cli.flags import HttpFlags, SamplingFlags, wrong_usage
from quire.frontend.cli.model import Model
from quire.frontend.cli.output import say, write
from quire.frontend.engine_args import DEMO_MODEL
from quire.frontend.http.args import ServerArgs
from quire.frontend.http.response_store import ResponseStore
from quire.frontend.http.server import Serving
from quire.frontend.http.service import ModelService, names_of
from quire.frontend.http.transport.listener import bind
from quire.frontend.http.transport.logs import configure_logging
from quire.frontend.metrics.otlp import request_spans
from quire.frontend.metrics.server import ServerMetrics
from quire.protocol.address import note_server
from quire.protocol.open_files import OTHER_FILES, allow_connections
from quire.protocol.options import options_of

logger = logging.getLogger(__name__)

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


def serving_of(
    model: Model,
    args: ServerArgs,
    listener: socket.socket,
    sampling: SamplingFlags,
    responses: ResponseStore | None = None,
) -> Serving:
    """Return the server of `model`; sampling flags are the defaults of requests that omit a value."""
    llm, names = model.llm, names_of(args, model.llm.model, DEMO_MODEL)
    configure_logging(args.log_level, args.log_format)  # type: ignore[arg-type] # the table has checked it
    metrics = ServerMetrics(model_name=names[0], max_model_len=llm.max_model_len, prefix=args.metrics_prefix)
    llm.add_observer(metrics.requests)
    if (spans := request_spans(args.otlp_traces_endpoint, names[0])) is not None:
        llm.add_observer(spans)
        atexit.register(spans.close)
    service = ModelService(
        llm=llm,
        args=args,
        names=names,
        metrics=metrics,
        defaults=model.defaults(sampling),
        has_chat_template=model.has_chat_template,
        responses=responses,
    )
    llm.add_observer(service.load)
    if llm.pooling_info.generates:
        logger.info("sampling defaults: %s", model.sampling_line(sampling))
    return Serving(service, listener, _tell)


def _tell(serving: Serving) -> None:
    for address in serving.engine_addresses:
        note_server(address, serving.url)
        write(f"quire: engine listening at {address}\n")
    write(f"quire: serving {serving.model_name} at {serving.url}\n")
