"""`quire ps`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from quire.frontend.cli.flags import switch, takes_flags
from quire.frontend.cli.output import CONTROLS, say, write
from quire.frontend.kernels import readable_size

_SECONDS = 3.0  # for an engine to answer


@takes_flags
def ps(as_json: Annotated[bool, switch(None, "--json", "Print JSON.")] = False) -> None:
    """List this user's engines that run: their models, devices, memory, requests, HTTP servers and addresses."""
    from quire.protocol.address import is_alive, listed_addresses

    rows = [_row(address) for address in listed_addresses() if is_alive(address)]
    if as_json:
        write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    elif rows:
        _show(rows)
    else:
        say("no engine is running; `quire serve` starts one")


def _row(address: str) -> dict[str, Any]:
    """Return what an engine tells about itself; `problem` says why it tells nothing."""
    from quire.frontend.client.engine_client import CoreClient
    from quire.frontend.errors import EngineConnectionError, EngineDeadError
    from quire.protocol.address import noted_servers

    row: dict[str, Any] = {"address": address, "urls": noted_servers(address), "problem": None}
    try:
        client = CoreClient(address, lambda _: None, timeout=_SECONDS)
    except (EngineConnectionError, EngineDeadError) as error:
        return row | {"problem": str(error)}
    try:
        stats = client.call("stats").result(_SECONDS)
        ready = client.ready
        return row | {
            "model": ready.model,
            "device": ready.device,
            "fast_matmul": ready.fast_matmul,
            "pid": ready.engine_pid,
            "memory_bytes": _resident_bytes(ready.engine_pid),
            "running": stats["running"],
            "waiting": stats["waiting"],
        }
    except (TimeoutError, EngineConnectionError, EngineDeadError) as error:
        return row | {"problem": str(error) or "it does not answer"}
    finally:
        client.close()


def _resident_bytes(pid: int) -> int | None:
    """Return the memory of a process; None where this cannot be told."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))
    except (OSError, StopIteration, ValueError):
        return None


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("model", "device", "pid", "memory", "requests", "HTTP", "address", box=None, padding=(0, 2))
    for row in rows:
        urls = ", ".join(row["urls"]) or "-"
        if row["problem"] is not None:
            cells = ["-", "-", "-", "-", row["problem"], urls, row["address"]]
        else:
            memory = "-" if row["memory_bytes"] is None else readable_size(row["memory_bytes"])
            requests = f"{row['running']} running, {row['waiting']} waiting"
            device = row["device"] + (" (fast matmul)" if row["fast_matmul"] else "")
            cells = [Path(row["model"]).name, device, f"{row['pid']}", memory, requests, urls, row["address"]]
        table.add_row(*(escape(cell.translate(CONTROLS)) for cell in cells))
    Console(highlight=False, width=None if sys.stdout.isatty() else 1000).print(table)
