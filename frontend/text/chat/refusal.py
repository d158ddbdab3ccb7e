"""Whose fault it is that an engine refuses the grammar of an answer."""

from __future__ import annotations

from quire.frontend.errors import RequestError
from quire.frontend.text.chat.tool_grammar import refused_schema
from quire.frontend.text.chat.tools import ToolError, ToolUse
from quire.protocol.messages import ErrorKind

_TOOK_TOO_LONG = "--grammar-timeout"  # in the engine's words


def refused_grammar(error: Exception) -> str | None:
    """What the engine says is wrong with a grammar, None if that is not what it says."""
    if not isinstance(error, RequestError) or error.kind is not ErrorKind.INVALID:
        return None
    field, _, why = str(error).partition(" can't be used: ")
    return why if why and "structured_outputs." in field else None


def tool_at_fault(error: Exception, tools: ToolUse | None) -> ToolError | None:
    """The tool whose schema is what the engine refuses; None if it is none, or can't be known.

    It may take as long as the engine took, so it is not for an event loop. Of a grammar that took the engine too long,
    it can't be known.
    """
    why = refused_grammar(error)
    return None if tools is None or why is None or _TOOK_TOO_LONG in why else refused_schema(tools)
