"""Errors of llguidance in words that a client understands."""

from __future__ import annotations

import re

from quire.protocol.grammar.gbnf import is_gbnf, line_of

_OVERLAPPING = "oneOf constraints are not supported"  # then it names an option, which no client can set
_TOO_WIDE = re.compile(r"row has (\d+) items; max is (\d+)")
_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): (.*)")  # line and column, the error, and then lines of the grammar


def explained(error: str, grammar: str | None = None) -> str:
    """Return the words of an error, in the lines of the client's own `grammar` if it gave one."""
    if _OVERLAPPING in error:
        return (
            "oneOf is enforced only where certainly no value fits two of its schemas; give them different types, or "
            "require in each a property with another const or type, or use anyOf"
        )
    if too_wide := _TOO_WIDE.search(error):
        return (
            f"it has {too_wide[1]} ways to go on from one place, and {too_wide[2]} are allowed; write fewer "
            "alternatives there, or require more of the properties"
        )
    if grammar is not None and is_gbnf(grammar) and (place := _PLACE.match(error)):
        line = line_of(grammar, int(place[1]))
        return f"GBNF, line {place[1]}: {place[2]}: {line}" if line else f"GBNF: {place[2]}"
    return error
