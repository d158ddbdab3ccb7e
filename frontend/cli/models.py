"""`quire models`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

from quire.frontend.cli.flags import Flags, rows_of, switch, takes_flags
from quire.frontend.cli.output import CONTROLS, say, write
from quire.frontend.kernels import ask_kernels, readable_size
from quire.protocol.engine_options import HubOptions

if TYPE_CHECKING:
    from quire.frontend.hub.cache import CachedModel


_WIDEST = 10_000  # columns


class CacheFlags(Flags):
    """The option that says where models are kept."""

    rows = rows_of(HubOptions, ("download_dir",))


@takes_flags
def models(as_json: Annotated[bool, switch(None, "--json", "Print JSON.")] = False, *, cache: CacheFlags) -> None:
    """List the downloaded models: their sizes, and whether this version can load them and this machine hold them."""
    from quire.frontend.hub.cache import all_models, cache_folder

    folder = cache_folder(cache.download_dir)
    models = list(all_models(folder))
    rows = [_row(model, facts) for model, facts in zip(models, _survey(models), strict=True)]
    if as_json:
        write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    elif rows:
        _show(rows)
    else:
        say(f"{folder} has no models; `quire serve Qwen/Qwen3-0.6B` would download one")


def _survey(models: list[CachedModel]) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = ask_kernels("survey", *(str(model.path) for model in models))
    return facts


def _row(model: CachedModel, facts: dict[str, Any]) -> dict[str, Any]:
    row = {
        "name": model.name,
        "revisions": model.snapshot.revisions,
        "commit": model.snapshot.commit,
        "folder": str(model.snapshot.folder),
        "size_bytes": model.size,
        **facts,
    }
    if problem := model.problem():
        row |= {"supported": None, "fits": None, "problem": problem}
    return row


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "revision", "size", "architecture", "here", box=None, padding=(0, 2))
    for row in rows:
        revision = ", ".join(row["revisions"]) or row["commit"][:7]
        cells = (row["name"], revision, readable_size(row["size_bytes"]), row["architecture"] or "-", _verdict(row))
        table.add_row(*(escape(cell.translate(CONTROLS)) for cell in cells))
    # One line for each model where programs read: `quire models | grep Qwen`.
    width = None if sys.stdout.isatty() else max(80, Console(width=_WIDEST).measure(table).maximum)
    Console(highlight=False, width=width).print(table)


def _verdict(row: dict[str, Any]) -> str:
    if row["problem"] is not None:
        return str(row["problem"])
    memory, free = readable_size(row["memory_bytes"]), readable_size(row["available_bytes"])
    state = f", {row['state_records']} states of {readable_size(row['state_bytes'])}" if row["state_records"] else ""
    return f"fits: {memory} of {free}, and KV for {row['kv_tokens']} tokens{state}"
