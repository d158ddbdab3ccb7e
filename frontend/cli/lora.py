"""`quire lora`: the LoRA adapters of a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.frontend.cli.flags import option, switch, takes_flags
from quire.frontend.cli.output import CONTROLS, write
from quire.frontend.cli.running_server import RunningServerFlags, ask
from quire.frontend.lora_request import absolute


@takes_flags
def list_adapters(
    as_json: Annotated[bool, switch(None, "--json", "Print JSON.")] = False, *, server: RunningServerFlags
) -> None:
    """List the adapters of a server: their names, the open requests that name them, and their paths."""
    adapters = [card for card in ask(server, "GET", "/v1/models")["data"] if card["parent"] is not None]
    write(json.dumps({"adapters": adapters}, indent=2, ensure_ascii=False) + "\n" if as_json else _table(adapters))


@takes_flags
def load(
    adapter: Annotated[str, typer.Argument(help="NAME=PATH: a folder or a GGUF file on the server's machine.")],
    model: Annotated[str | None, option(None, "Of several models, the one that it is for.", "MODEL")] = None,
    load_inplace: Annotated[
        bool, switch(None, "--load-inplace", "Let a name that is in use stand for this path from now on.")
    ] = False,
    *,
    server: RunningServerFlags,
) -> None:
    """Serve an adapter as a model. The first request that names it has the engine read it."""
    name, _, path = adapter.partition("=")
    if not name or not path:
        raise typer.BadParameter(f"{adapter!r} is no NAME=PATH, as stories=/models/stories-lora")
    path = absolute(path) if Path(path).exists() else path  # the server has another working directory, maybe machine
    body = {"lora_name": name, "lora_path": path, "load_inplace": load_inplace}
    _tell(ask(server, "POST", "/v1/load_lora_adapter", body if model is None else body | {"model": model}))


@takes_flags
def unload(
    name: Annotated[str, typer.Argument(help="Name of the adapter, as `quire lora list` shows it.")],
    *,
    server: RunningServerFlags,
) -> None:
    """Serve an adapter no longer. Requests that have begun go on."""
    _tell(ask(server, "POST", "/v1/unload_lora_adapter", {"lora_name": name}))


def _tell(answer: str) -> None:
    write(answer.translate(CONTROLS) + "\n")


def _table(adapters: list[dict[str, Any]]) -> str:
    names = [each["id"].translate(CONTROLS) for each in adapters]
    width = max(map(len, ["adapter", *names]))
    lines = [f"{'adapter':{width}}  {'requests':>8}  path"]
    for name, each in zip(names, adapters, strict=True):
        lines.append(f"{name:{width}}  {each['requests']:>8}  {each['root'].translate(CONTROLS)}")
    return "\n".join(lines) + "\n"
