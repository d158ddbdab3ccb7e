"""`quire engines`: the engines that share the requests of a running server."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from quire.frontend.cli.flags import option, switch, takes_flags
from quire.frontend.cli.output import CONTROLS, write
from quire.frontend.cli.running_server import ANSWER_SECONDS, RunningServerFlags, ask

Number = Annotated[int, typer.Argument(help="Number of the engine, as `quire engines list` shows it.", min=0)]


@takes_flags
def list_engines(
    as_json: Annotated[bool, switch(None, "--json", "Print JSON.")] = False, *, server: RunningServerFlags
) -> None:
    """List the engines of a server: their states, requests and addresses."""
    answer = ask(server, "GET", "/engines")
    if as_json:
        write(json.dumps(answer, indent=2, ensure_ascii=False) + "\n")
    else:
        _show(answer)


@takes_flags
def add(
    address: Annotated[str, typer.Argument(help="ipc://PATH or tcp://HOST:PORT of a running engine.")],
    prefill: Annotated[bool, switch(None, "--prefill", "It computes prompts for the other engines only.")] = False,
    *,
    server: RunningServerFlags,
) -> None:
    """Let a running engine share the requests of a server. It must have the same model."""
    _show(ask(server, "POST", "/engines", {"address": address, "prefill": prefill}))


@takes_flags
def drain(number: Number, *, server: RunningServerFlags) -> None:
    """Send an engine no more requests; those that it has go on there."""
    _show(ask(server, "POST", f"/engines/{number}/drain"))


@takes_flags
def remove(
    number: Number,
    drain_timeout: Annotated[
        float | None,
        option(None, "Seconds that its requests may go on there; then they move. Default: 60.", "S", min=0.0),
    ] = None,
    *,
    server: RunningServerFlags,
) -> None:
    """Remove an engine when its requests have ended. One that the server has started ends then."""
    body = {} if drain_timeout is None else {"drain_timeout": drain_timeout}
    wait = ANSWER_SECONDS + (60.0 if drain_timeout is None else drain_timeout)
    _show(ask(server, "POST", f"/engines/{number}/remove", body, wait))


def _show(answer: dict[str, Any]) -> None:
    lines = [
        f"{'engine':>6}  {'state':8}  {'requests':>8}  {'sent':>8}  {'losses':>6}  {'device':8}  {'pid':>8}  address"
    ]
    for each in answer["engines"]:
        sent = sum(each["routed"].values())
        notes = ["started by the server"] * each["supervised"] + ["prefill"] * each["prefill"]
        notes += ["fast matmul"] * each["fast_matmul"]
        note = f"  ({', '.join(notes)})" if notes else ""
        lines.append(
            f"{each['number']:>6}  {each['state']:8}  {each['requests']:>8}  {sent:>8}  {each['losses']:>6}  "
            f"{each['device']:8}  {each['pid']:>8}  {each['address'].translate(CONTROLS)}{note}"
        )
    write("\n".join(lines) + f"\nrouter: {answer['router']}\n")
