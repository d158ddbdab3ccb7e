"""The item that is being written: tells of its beginning, its growth and its end."""

from __future__ import annotations

from collections.abc import Sequence

from quire.frontend.http.openai.logprobs import TokenLogprob
from quire.frontend.http.openai.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    StreamEvent,
    TextDelta,
    TextDone,
)
from quire.frontend.http.openai.responses.items import FunctionCall, OutputMessage, OutputText, Reasoning, ReasoningText
from quire.frontend.http.transport.ids import new_id


class OpenMessage:
    """A message with one text."""

    def __init__(self, index: int) -> None:
        self.item = OutputMessage(id=new_id("msg", "_"))
        self._at = (self.item.id, index)
        self._index = index
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def opened(self) -> list[StreamEvent]:
        """Its beginning."""
        return [ItemAdded(output_index=self._index, item=self.item), PartAdded(*self._at, part=OutputText())]

    def grow(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> StreamEvent:
        """More of it."""
        self._text.append(text)
        self._logprobs += logprobs
        return TextDelta(*self._at, delta=text, logprobs=list(logprobs))

    def close(self, status: str, logprobs: Sequence[TokenLogprob] = ()) -> list[StreamEvent]:
        """Its end; `logprobs` are of tokens after the text."""
        text = "".join(self._text)
        self._logprobs += logprobs
        part = OutputText(text, logprobs=self._logprobs)
        self.item.content, self.item.status = [part], status
        return [
            TextDone(*self._at, text=text, logprobs=self._logprobs),
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

    def opened(self) -> list[StreamEvent]:
        """Their beginning."""
        return [ItemAdded(output_index=self._index, item=self.item), PartAdded(*self._at, part=ReasoningText())]

    def grow(self, text: str) -> StreamEvent:
        """More of them."""
        self._text.append(text)
        return ReasoningDelta(*self._at, delta=text)

    def close(self, status: str) -> list[StreamEvent]:
        """Their end."""
        part = ReasoningText("".join(self._text))
        self.item.content, self.item.status = [part], status
        return [
            ReasoningDone(*self._at, text=part.text),
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

    def opened(self) -> list[StreamEvent]:
        """Its beginning."""
        return [ItemAdded(output_index=self._index, item=self.item)]

    def grow(self, text: str) -> StreamEvent:
        """More of its arguments."""
        self._arguments.append(text)
        return ArgumentsDelta(*self._at, delta=text)

    def close(self, status: str) -> list[StreamEvent]:
        """Its end."""
        self.item.arguments, self.item.status = "".join(self._arguments), status
        return [
            ArgumentsDone(*self._at, name=self.item.name, arguments=self.item.arguments),
            ItemDone(output_index=self._index, item=self.item),
        ]


OpenItem = OpenMessage | OpenReasoning | OpenCall
