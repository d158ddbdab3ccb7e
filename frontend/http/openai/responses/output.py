"""The items of a response while the model writes them."""

from __future__ import annotations

from collections.abc import Iterator

from quire.frontend.http.openai.logprobs import TokenLogprob
from quire.frontend.http.openai.responses.events import StreamEvent
from quire.frontend.http.openai.responses.items import Item
from quire.frontend.http.openai.responses.open_items import OpenCall, OpenItem, OpenMessage, OpenReasoning
from quire.frontend.text.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart


class Output:
    """`items` in the order in which they began; what is not done yet is empty in them."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: OpenItem | None = None
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is not certain yet

    def take(self, events: list[Event], logprobs: list[TokenLogprob]) -> Iterator[StreamEvent]:
        """Add what came of the answer; `logprobs` are of the tokens it was read from.

        They go to the text that follows from them; those of thoughts and calls, which have no place for them, are left
        out.
        """
        self._logprobs += logprobs
        said = [event for event in events if isinstance(event, ContentDelta)]
        if events and not said:
            self._logprobs = []
        for event in events:
            match event:
                case ContentDelta(text):
                    if not isinstance(self._open, OpenMessage):
                        yield from self._begin(OpenMessage(len(self.items)))
                    assert isinstance(self._open, OpenMessage)
                    yield self._open.grow(text, self._take_logprobs() if event is said[-1] else ())
                case ReasoningDelta(text):
                    if not isinstance(self._open, OpenReasoning):
                        yield from self._begin(OpenReasoning(len(self.items)))
                    assert isinstance(self._open, OpenReasoning)
                    yield self._open.grow(text)
                case ToolCallStart(_, call_id, name):
                    yield from self._begin(OpenCall(len(self.items), call_id, name))
                case ToolCallArguments(_, text):
                    assert isinstance(self._open, OpenCall)  # arguments follow the beginning of their call
                    yield self._open.grow(text)

    def end(self, status: str) -> Iterator[StreamEvent]:
        """End the last item; an answer of no text has an empty one."""
        if not self.items:
            yield from self._begin(OpenMessage(0))
        yield from self._close(status)

    def _begin(self, item: OpenItem) -> Iterator[StreamEvent]:
        yield from self._close("completed")
        self._open = item
        self.items.append(item.item)
        yield from item.opened()

    def _close(self, status: str) -> Iterator[StreamEvent]:
        match self._open:
            case None:
                return
            case OpenMessage() as message:
                yield from message.close(status, self._take_logprobs())
            case item:
                yield from item.close(status)
        self._open = None

    def _take_logprobs(self) -> list[TokenLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken
