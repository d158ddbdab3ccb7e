"""The items of a response while the model writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.frontend.http.openai.logprobs import TokenLogprob
from quire.frontend.http.openai.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseStreamEvent,
)
from quire.frontend.http.openai.responses.response import (
    FunctionCall,
    Item,
    OutputMessage,
    OutputText,
    Reasoning,
    ReasoningText,
)
from quire.frontend.http.transport.responses import new_id
from quire.frontend.text.chat.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart


class OpenMessage:
    """Builds a message with one text."""

    def __init__(self, index: int) -> None:
        self.item = OutputMessage(id=new_id("msg", "_"))
        self._at = (self.item.id, index)
        self._index = index
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def opened(self) -> list[ResponseStreamEvent]:
        """Begin the message."""
        return [ItemAdded(output_index=self._index, item=self.item), PartAdded(*self._at, part=OutputText())]

    def grow(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> ResponseStreamEvent:
        """Add a piece of text."""
        self._text.append(text)
        self._logprobs += logprobs
        return OutputTextDelta(*self._at, delta=text, logprobs=list(logprobs))

    def close(self, status: str, logprobs: Sequence[TokenLogprob] = ()) -> list[ResponseStreamEvent]:
        """End the message; `logprobs` are those of tokens after the text."""
        text = "".join(self._text)
        self._logprobs += logprobs
        part = OutputText(text, logprobs=self._logprobs)
        self.item.content, self.item.status = [part], status
        return [
            OutputTextDone(*self._at, text=text, logprobs=self._logprobs),
            PartDone(*self._at, part=part),
            ItemDone(output_index=self._index, item=self.item),
        ]


class OpenReasoning:
    """Builds an item of thoughts."""

    def __init__(self, index: int) -> None:
        self.item = Reasoning(id=new_id("rs", "_"))
        self._at = (self.item.id, index)
        self._index = index
        self._text: list[str] = []

    def opened(self) -> list[ResponseStreamEvent]:
        """Begin the item."""
        return [ItemAdded(output_index=self._index, item=self.item), PartAdded(*self._at, part=ReasoningText())]

    def grow(self, text: str) -> ResponseStreamEvent:
        """Add a piece of thoughts."""
        self._text.append(text)
        return ReasoningTextDelta(*self._at, delta=text)

    def close(self, status: str) -> list[ResponseStreamEvent]:
        """End the item."""
        part = ReasoningText("".join(self._text))
        self.item.content, self.item.status = [part], status
        return [
            ReasoningTextDone(*self._at, text=part.text),
            PartDone(*self._at, part=part),
            ItemDone(output_index=self._index, item=self.item),
        ]


class OpenCall:
    """Builds a function call."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.item = FunctionCall(id=new_id("fc", "_"), call_id=call_id, name=name)
        self._at = (self.item.id, index)
        self._index = index
        self._arguments: list[str] = []

    def opened(self) -> list[ResponseStreamEvent]:
        """Begin the call."""
        return [ItemAdded(output_index=self._index, item=self.item)]

    def grow(self, text: str) -> ResponseStreamEvent:
        """Add a piece of the arguments."""
        self._arguments.append(text)
        return ArgumentsDelta(*self._at, delta=text)

    def close(self, status: str) -> list[ResponseStreamEvent]:
        """End the call."""
        self.item.arguments, self.item.status = "".join(self._arguments), status
        return [
            ArgumentsDone(*self._at, name=self.item.name, arguments=self.item.arguments),
            ItemDone(output_index=self._index, item=self.item),
        ]


OpenItem = OpenMessage | OpenReasoning | OpenCall


class ResponseOutput:
    """Builds the items of a response from the events of its answer.

    `items` are in the order in which they began; the contents of the last one are empty until it has ended.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: OpenItem | None = None
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is still undecided

    def take(self, events: list[Event], logprobs: list[TokenLogprob]) -> Iterator[ResponseStreamEvent]:
        """Add events of the answer; `logprobs` are those of the tokens from which they were parsed.

        They are attached to the text of these tokens; thoughts and calls have no field for theirs.
        """
        self._logprobs += logprobs
        texts = [event for event in events if isinstance(event, ContentDelta)]
        if events and not texts:
            self._logprobs = []
        for event in events:
            match event:
                case ContentDelta(text):
                    if not isinstance(self._open, OpenMessage):
                        yield from self._begin(OpenMessage(len(self.items)))
                    assert isinstance(self._open, OpenMessage)
                    yield self._open.grow(text, self._take_logprobs() if event is texts[-1] else ())
                case ReasoningDelta(text):
                    if not isinstance(self._open, OpenReasoning):
                        yield from self._begin(OpenReasoning(len(self.items)))
                    assert isinstance(self._open, OpenReasoning)
                    yield self._open.grow(text)
                case ToolCallStart(_, call_id, name):
                    yield from self._begin(OpenCall(len(self.items), call_id, name))
                case ToolCallArguments(_, text):
                    assert isinstance(self._open, OpenCall)  # a call begins before its arguments
                    yield self._open.grow(text)

    def end(self, status: str) -> Iterator[ResponseStreamEvent]:
        """End the last item; an answer without text gets an empty message."""
        if not self.items:
            yield from self._begin(OpenMessage(0))
        yield from self._close(status)

    def _begin(self, item: OpenItem) -> Iterator[ResponseStreamEvent]:
        yield from self._close("completed")
        self._open = item
        self.items.append(item.item)
        yield from item.opened()

    def _close(self, status: str) -> Iterator[ResponseStreamEvent]:
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
