"""The running server that a command asks, by its address or as the only one here."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.frontend.cli.flags import option, wrong_usage
from quire.frontend.http.args import keys_of

ANSWER_SECONDS = 30.0
"""Seconds that a server may take for an answer."""

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


def ask(
    server: RunningServerFlags, method: str, path: str, body: object = None, seconds: float = ANSWER_SECONDS
) -> Any:
    """Return a server's answer: a text, or the value of its JSON. Raises `RuntimeError` with its error, and
    `BadParameter`.
    """
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
            is_text = response.headers.get_content_type() == "text/plain"
            return response.read().decode() if is_text else json.load(response)
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
