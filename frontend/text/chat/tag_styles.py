"""The tags in which models write the arguments of a call, a tag for each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from quire.frontend.text.chat.scanning import match_mark

MAX_KEY = 256
_KEY = rf"[^<>\n]{{1,{MAX_KEY}}}"
_KEY_SO_FAR = re.compile(rf"[^<>\n]{{0,{MAX_KEY}}}")


@dataclass(frozen=True)
class TagStyle:
    r"""The text `NAME` `name_end` and for each argument `open` KEY `key_end` VALUE `close`, then `end`.

    An empty `name_end` is the tag that follows the name. `key_end` are marks that may have white space between them.
    Models write `gap` after the name, after tags and around values where `is_spaced`; readers need none of it.
    """

    open: str
    key_end: tuple[str, ...]
    close: str
    end: str
    name_end: str = ""
    gap: str = "\n"
    is_spaced: bool = False

    @cached_property
    def name_pattern(self) -> re.Pattern[str]:
        """Pattern of the name, in its group 1, and in group 2 of what shows that it has ended."""
        end = rf"\s*{re.escape(self.name_end)}" if self.name_end else r"\s*(?=<)"
        return re.compile(rf'\s*([^\s<>"]{{1,256}})({end})?')

    @cached_property
    def tag_pattern(self) -> re.Pattern[str]:
        """Pattern of a tag: in its group 2 the key of an argument, no such group at the end of the call."""
        key_end = r"\s*".join(re.escape(mark) for mark in self.key_end)
        return re.compile(rf"\s*({re.escape(self.end)}|{re.escape(self.open)}({_KEY}?){key_end})")

    def may_be_tag(self, text: str) -> bool:
        """Return True if `text`, which is no tag yet, may begin one."""
        if not text.startswith(self.open):
            return self.open.startswith(text) or self.end.startswith(text)
        rest = _KEY_SO_FAR.sub("", text[len(self.open) :], count=1)
        for mark in self.key_end:
            end = match_mark(rest, mark) if rest else 0
            if not end:
                return end == 0
            rest = rest[end:]
        return False


FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
INVOKE, END_INVOKE = '<invoke name="', "</invoke>"
ARG_KEY, END_ARG_KEY, ARG_VALUE, END_ARG_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"

QWEN3_CODER = TagStyle(PARAMETER, (">",), END_PARAMETER, END_FUNCTION, name_end=">", is_spaced=True)
SEED_OSS = TagStyle(PARAMETER, (">",), END_PARAMETER, END_FUNCTION, name_end=">")
MINIMAX_M2 = TagStyle('<parameter name="', ('">',), END_PARAMETER, END_INVOKE, name_end='">')
GLM45 = TagStyle(ARG_KEY, (END_ARG_KEY, ARG_VALUE), END_ARG_VALUE, "</tool_call>")
GLM47 = TagStyle(ARG_KEY, (END_ARG_KEY, ARG_VALUE), END_ARG_VALUE, "</tool_call>", gap="")
