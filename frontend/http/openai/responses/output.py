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
    """A message with one text."""

    def __init__(self, index: int) -> None:
        self.item = OutputMessage(id=new_id("msg", "_"))
        self._at = (self.item.id, index)
        self._index = index
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def opened(self) -> list[ResponseStreamEvent]:
        """Its beginning."""
        return [ItemAdded(output_index=self._index, item=self.item), PartAdded(*self._at, part=OutputText())]

    def grow(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> ResponseStreamEvent:
        """More of it."""
        self._text.append(text)
        self._logprobs += logprobs
        return OutputTextDelta(*self._at, delta=text, logprobs=list(logprobs))

    def close(self, status: str, logprobs: Sequence[TokenLogprob] = ()) -> list[ResponseStreamEvent]:
        """Its end; `logprobs` are of tokens after the text."""
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
    """Thoughts."""

    def __init__(self, index: int) -> None:
        self.item = Reasoning(id=new_id("rs", "_"))
        self._at = (self.item.id, index)
        self._index = index
        self._text: list[str] = []

    def opened(self) -> list[ResponseStreamEvent]:
        """Their beginning."""
        return [ItemAdded(output_index=self._index, item=self.item), PartAdded(*self._at, part=ReasoningText())]

    def grow(self, text: str) -> ResponseStreamEvent:
        """More of them."""
        self._text.append(text)
        return ReasoningTextDelta(*self._at, delta=text)

    def close(self, status: str) -> list[ResponseStreamEvent]:
        """Their end."""
        part = ReasoningText("".join(self._text))
        self.item.content, self.item.status = [part], status
        return [
            ReasoningTextDone(*self._at, text=part.text),
            PartDone(*self._at, part=part),
            ItemDone(output_index=self._index, item=self.item),
        ]


class OpenCall:
    """A call of a function."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.item = FunctionCall(id=new_id("fc", "_"), call_id=call_id, name=name)
        self._at = (self.item.id, index)
        self._index = index
        self._arguments: list[str] = []

    def opened(self) -> list[ResponseStreamEvent]:
        """Its beginning."""
        return [ItemAdded(output_index=self._index, item=self.item)]

    def grow(self, text: str) -> ResponseStreamEvent:
        """More of its arguments."""
        self._arguments.append(text)
        return ArgumentsDelta(*self._at, delta=text)

    def close(self, status: str) -> list[ResponseStreamEvent]:
        """Its end."""
        self.item.arguments, self.item.status = "".join(self._arguments), status
        return [
            ArgumentsDone(*self._at, name=self.item.name, arguments=self.item.arguments),
            ItemDone(output_index=self._index, item=self.item),
        ]


OpenItem = OpenMessage | OpenReasoning | OpenCall


class ResponseOutput:
    """`items` in the order in which they began; what is not done yet is empty in them."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: OpenItem | None = None
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is not certain yet

    def take(self, events: list[Event], logprobs: list[TokenLogprob]) -> Iterator[ResponseStreamEvent]:
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

    def end(self, status: str) -> Iterator[ResponseStreamEvent]:
        """End the last item; an answer of no text has an empty one."""
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
