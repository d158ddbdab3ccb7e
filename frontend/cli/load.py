"""The flags that say how requests are sent."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.frontend.cli.flags import option

if TYPE_CHECKING:
    from quire.frontend.evaluation.replay.load import Load

_load = functools.partial(option, "Load (default: an open loop, each request at its time)")


@dataclass(frozen=True)
class LoadFlags:
    """How requests are sent; what is None was not given."""

    concurrency: Annotated[
        int | None, _load("A closed loop: so many users, each sends when it has its answer.", "N", min=1)
    ] = None
    max_concurrency: Annotated[
        int | None, _load("An open loop of at most so many at once; the wait for room counts as lag.", "N", min=1)
    ] = None
    warmup: Annotated[
        int, _load("Send so many before, in no figure, and empty the prefix cache. Default: 0.", "N", min=0)
    ] = 0
    request_timeout: Annotated[float | None, _load("End a request after so long. Default: never.", "S", min=0)] = None

    def load(self) -> Load:
        """What the runner takes."""
        from quire.frontend.evaluation.replay.load import Load

        if self.concurrency is not None and self.max_concurrency is not None:
            raise typer.BadParameter("--concurrency is a closed loop, --max-concurrency an open one; give one of them")
        return Load(self.concurrency, self.max_concurrency, self.request_timeout or None, self.warmup)

    @property
    def given(self) -> dict[str, Any]:
        """Those that were given, for the report, where either kind of concurrency has vLLM's name."""
        given = {name: value for name, value in asdict(self).items() if value}
        return {**given, "max_concurrency": self.concurrency or self.max_concurrency}
