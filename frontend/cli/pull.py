"""`quire pull`."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.frontend.cli.flags import Flags, rows_of, takes_flags
from quire.frontend.cli.output import write
from quire.protocol.engine_options import HubOptions


class PullFlags(Flags):
    """The options of a model at the hub."""

    rows = rows_of(HubOptions)


@takes_flags
def pull(
    model: Annotated[str, typer.Argument(help="Name (ORG/NAME) of a model.", show_default=False)], *, hub: PullFlags
) -> None:
    """Download a model from the Hugging Face hub, unless it is here; print its folder.

    After a name, :TAG chooses one of its GGUF files. `quire models` lists what has been downloaded.
    """
    from quire.frontend.hub.resolve import resolve_model

    write(f"{resolve_model(model, **hub.given)}\n")
