"""`quire engines`: the engines that share the requests of a running server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.frontend.cli.flags import option, switch, takes_flags, wrong_usage
from quire.frontend.cli.output import CONTROLS, write
from quire.frontend.http.args import keys_of

_ANSWER_SECONDS = 30.0
_SERVER = "A server"


@dataclass(frozen=True)
class RunningServerFlags:
    """Flags for reaching a running server."""

    url: Annotated[
        str | None,
        option(_SERVER, "Its address. Default: the only server that this user runs here.", "URL"),
    ] = None
    admin_key_file: Annotated[
        Path | None, option(_SERVER, "File with the server's admin key, if it has keys.", "FILE")
    ] = None


Number = Annotated[int, typer.Argument(help="Number of the engine, as `quire engines list` shows it.", min=0)]


@takes_flags
def list_engines(
    as_json: Annotated[bool, switch(None, "--json", "Print JSON.")] = False, *, server: RunningServerFlags
) -> None:
    """List the engines of a server: their states, requests and addresses."""
    answer = _ask(server, "GET", "/engines")
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
    _show(_ask(server, "POST", "/engines", {"address": address, "prefill": prefill}))


@takes_flags
def drain(number: Number, *, server: RunningServerFlags) -> None:
    """Send an engine no more requests; those that it has go on there."""
    _show(_ask(server, "POST", f"/engines/{number}/drain"))


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
    wait = _ANSWER_SECONDS + (60.0 if drain_timeout is None else drain_timeout)
    _show(_ask(server, "POST", f"/engines/{number}/remove", body, wait))


def _ask(
    server: RunningServerFlags, method: str, path: str, body: object = None, seconds: float = _ANSWER_SECONDS
) -> dict[str, Any]:
    """Return a server's answer. Raises `RuntimeError` with its error, and `BadParameter`."""
    url = (server.url or _only_url()).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"--url {url} is no address of a server; give http://HOST:PORT")
    headers = {"Content-Type": "application/json"}
    if server.admin_key_file is not None:
        with wrong_usage():
            headers["X-Admin-Key"] = keys_of(str(server.admin_key_file))[0]
    data = None if method == "GET" else json.dumps(body or {}).encode()
    request = urllib.request.Request(url + path, data, headers, method=method)  # noqa: S310 - http, as checked above
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:  # noqa: S310
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise RuntimeError(_message(error)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise RuntimeError(f"the server at {url} can't be asked: {reason}") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"the server answered with status {error.code}"


def _only_url() -> str:
    from quire.protocol.address import is_alive, listed_addresses, noted_servers

    urls = dict.fromkeys(url for each in listed_addresses() if is_alive(each) for url in noted_servers(each))
    if len(urls) == 1:
        return next(iter(urls))
    found = f"{len(urls)} of your servers run here ({', '.join(urls)})" if urls else "no server of yours runs here"
    raise typer.BadParameter(f"{found}; name one with --url")


def _show(answer: dict[str, Any]) -> None:
    lines = [f"{'engine':>6}  {'state':8}  {'requests':>8}  {'sent':>8}  {'losses':>6}  {'pid':>8}  address"]
    for each in answer["engines"]:
        sent = sum(each["routed"].values())
        notes = ["started by the server"] * each["supervised"] + ["prefill"] * each["prefill"]
        note = f"  ({', '.join(notes)})" if notes else ""
        lines.append(
            f"{each['number']:>6}  {each['state']:8}  {each['requests']:>8}  {sent:>8}  {each['losses']:>6}  "
            f"{each['pid']:>8}  {each['address'].translate(CONTROLS)}{note}"
        )
    write("\n".join(lines) + f"\nrouter: {answer['router']}\n")
