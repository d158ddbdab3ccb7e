"""All tables that the views of a model show."""

from __future__ import annotations

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.models.served_model import ServedModel
from quire.frontend.http.operations.adapter_table import AdapterTableFeed
from quire.frontend.http.operations.engine_table import EngineTableFeed
from quire.frontend.http.operations.table_feed import TableFeed, Updates


class Tables:
    """The tables that all views of a model show, and the updates that the views wait for."""

    def __init__(self, updates: Updates, *feeds: TableFeed) -> None:
        """Show the tables of `feeds`, which notify `updates`."""
        self.updates = updates
        self._feeds = feeds

    @classmethod
    def of(cls, model: ServedModel, llm: AsyncLLM) -> Tables:
        """Return the tables of the engines of a model, which `llm` is, and of its adapters."""
        updates = Updates()
        return cls(updates, EngineTableFeed(llm, updates), AdapterTableFeed(model, updates))

    @property
    def events(self) -> list[bytes]:
        """The latest table of each kind, b"" if there is none."""
        return [feed.event for feed in self._feeds]

    def join(self) -> None:
        """Note one more viewer."""
        for feed in self._feeds:
            feed.join()

    def leave(self) -> None:
        """Note that a viewer has left."""
        for feed in self._feeds:
            feed.leave()
