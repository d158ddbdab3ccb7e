"""Errors in the words of the API that was asked, where it has other ones than Chat Completions and the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quire.frontend.http.errors import bad_request, field_of
from quire.frontend.text.chat.tools import ToolError
from quire.protocol.errors import ProtocolError
from quire.protocol.messages import ErrorKind


@contextmanager
def worded(words: Mapping[str, str]) -> Iterator[None]:
    """What is refused about tools or parameters, with each key of `words` replaced, in their order, by its value.

    Raises `ApiError` 400 then.
    """
    try:
        yield
    except ToolError as error:
        raise bad_request(_replaced(str(error), words), _replaced(error.param, words)) from None
    except ValueError as error:
        if isinstance(error, ProtocolError) or getattr(error, "kind", ErrorKind.INVALID) is not ErrorKind.INVALID:
            raise  # it is too large, or the engine's fault
        message = _replaced(str(error), words)
        raise bad_request(message, field_of(message), getattr(error, "code", None)) from None


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for theirs, ours in words.items():
        text = text.replace(theirs, ours)
    return text
