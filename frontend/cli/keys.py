"""`quire keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.frontend.cli.flags import CommonFlags, takes_flags
from quire.frontend.cli.output import write


@takes_flags
def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write the keys; made if it is absent.")],
    *,
    common: CommonFlags,
) -> None:
    """Make CURVE keys, with which an engine can listen on tcp://.

    The engine needs the folder; a client on another host needs engine.public and client.secret of it.
    """
    del common
    from quire.protocol.keys import generate_keys

    generate_keys(folder)
    write(f"keys written; use them with: quire engine --engine-address tcp://0.0.0.0:5555 --curve-keys {folder}\n")
