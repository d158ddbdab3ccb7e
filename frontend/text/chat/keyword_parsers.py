"""Tool parsers of formats with calls as Python has them."""

from __future__ import annotations

from quire.frontend.text.chat.keyword_call_reader import KeywordCallReader
from quire.frontend.text.chat.list_parsers import ListParser
from quire.frontend.text.chat.marked_calls import Reader, State, ToolParser


class Olmo3Parser(ToolParser):
    """OLMo 3: `NAME(KEY=VALUE, ...)` with literals of Python, a call on each line, between tags."""

    tag = "<function_calls>"
    closing = "</function_calls>"

    def _step_after_call(self) -> bool:
        if not self._reader.ended or self._buffer.lstrip().startswith("<"):
            return self._step_marks((self.closing, State.TEXT))
        if not self._buffer.strip():
            return False
        self._mark = ""
        self._enter(State.CALL)
        return True

    def _new_reader(self) -> Reader:
        return KeywordCallReader(self._num_calls, self._new_id, self._accepts)


class Lfm2Parser(ListParser):
    """LFM2 and LFM2.5: `[NAME(KEY=VALUE, ...), ...]` with literals of Python, between tags."""

    tag = "<|tool_call_start|>"
    end_tag = "<|tool_call_end|>"

    def _new_reader(self) -> Reader:
        return KeywordCallReader(self._num_calls, self._new_id, self._accepts)
