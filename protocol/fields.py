"""Names of the fields in decoding errors: msgspec counts positions (`$[2][1]`), people know names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from msgspec.inspect import DictType, ListType, StructType, Type, UnionType, type_info

_ERROR = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>(?:\[[^]]*\])*)`)?")
_LENGTH = re.compile(r"Expected `array` of at least length (\d+), got (\d+)")
_EXCESS = re.compile(r"Expected `array` of at most length (\d+), got (\d+)")


def explain(error: Exception, frame: bytes, types: Sequence[type[msgspec.Struct]]) -> str:
    """Explain the `error` raised by decoding `frame` as one of `types`, such as `Hello.client_name: ...`."""
    if not isinstance(error, msgspec.ValidationError):
        return f"the frame is not msgpack: {error}"
    match = _ERROR.fullmatch(str(error))
    path = re.findall(r"\[([^]]*)\]", match["path"] or "") if match else []
    message = next((t for t in types if t.__struct_config__.tag == _tag(frame)), None)
    if match is None or message is None or path == ["0"]:
        known = ", ".join(f"{t.__struct_config__.tag} {t.__name__}" for t in types)
        return f"the frame is not a message ({error}); a message is an array that starts with one of the types {known}"
    place, node = _walk(type_info(message), message.__name__, path)
    if (length := _LENGTH.fullmatch(match["what"])) and isinstance(node, StructType):
        return f"{place}.{_missing(node, int(length[2]))}: the field is missing"
    if (excess := _EXCESS.fullmatch(match["what"])) and isinstance(node, StructType):
        return f"{place}: {_unknown(node, int(excess[2]) - int(excess[1]))}"
    what = match["what"]
    return f"{place}: {'in a key, ' if match['key'] else ''}{what[:1].lower()}{what[1:]}"


def _tag(frame: bytes) -> int | None:
    """Return the type number of a frame, if it starts as a message does."""
    if not frame or not (0x90 <= frame[0] <= 0x9F or frame[0] in (0xDC, 0xDD)):
        return None
    at = {0xDC: 3, 0xDD: 5}.get(frame[0], 1)
    length = int.from_bytes(frame[1:at], "big") if at > 1 else frame[0] & 0x0F
    return frame[at] if length and len(frame) > at and frame[at] < 0x80 else None


def _walk(node: Type, place: str, path: list[str]) -> tuple[str, Type]:
    """Follow msgspec's path of positions; return it in names, and the type at its end."""
    for step in path:
        node = _container(node)
        if isinstance(node, StructType) and step.isdigit():
            field = node.fields[int(step) - (node.tag is not None)]
            place, node = f"{place}.{field.name}", field.type
        else:
            place = f"{place}[{step}]"
            node = _entry(node)
    return place, _container(node)


def _entry(node: Type) -> Type:
    """Return the type of the entries of a list, or of the values of a dict."""
    if isinstance(node, ListType):
        return node.item_type
    return node.value_type if isinstance(node, DictType) else node


def _container(node: Type) -> Type:
    """Return the alternative of `node` that is a container."""
    alternatives = node.types if isinstance(node, UnionType) else (node,)
    return next((t for t in alternatives if isinstance(t, StructType | ListType | DictType)), node)


def _missing(node: StructType, given: int) -> str:
    """Return the first field that an array of `given` entries leaves out."""
    return node.fields[max(0, given - (node.tag is not None))].name


def _unknown(node: StructType, count: int) -> str:
    """Return an error for an array with `count` entries more than there are fields."""
    entries, verb = ("1 unknown field", "follows") if count == 1 else (f"{count} unknown fields", "follow")
    return f"{entries} {verb} {node.fields[-1].name}, the last" if node.fields else f"{entries}, where there are none"
