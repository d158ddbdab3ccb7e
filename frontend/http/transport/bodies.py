"""Request bodies: read within bounds of size and time, and decoded into their declared types."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import ClientDisconnect, Request

from quire.frontend.http.args import ServerArgs
from quire.frontend.http.errors import CLIENT_CLOSED_REQUEST, ApiError, bad_request
from quire.frontend.http.transport.conversion import AT, can_convert, converted, unknown_field
from quire.frontend.http.transport.long_work import RunPiece, at_once
from quire.frontend.http.transport.value_counts import (
    MAX_CONTAINERS,
    MAX_TEXTS,
    MAX_VALUES,
    has_few_marks,
    has_few_values,
)

Refusals = Mapping[str, tuple[tuple[object, ...], str]]
"""Known fields that are not supported: the values that change nothing, and why others are rejected."""


NOT_EMPTY = Meta(extra_json_schema={"minItems": 1})  # only documents a list; its reader checks it

MAX_ITEMS = 4096
"""Messages of a conversation, items of an input, tools."""

ITEMS = Meta(max_length=MAX_ITEMS)


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request's body; an unknown field is an error, and so is one of `refused` with a value that has a meaning.

    `is_lenient`: the API's clients may leave out the header Content-Type, or give one of another type.
    """

    refused: ClassVar[Refusals] = {}
    is_lenient: ClassVar[bool] = False

    model: str | None = None

    @property
    def named(self) -> str | None:
        """The name of the model that the request is for, None if it names none."""
        return self.model

    @property
    def adapter_scales(self) -> Mapping[int, float]:
        """The scales that the request gives adapters by their numbers in `GET /lora-adapters`: 1 for one, 0 for others.

        Raises `ApiError` 400.
        """
        return {}

    @property
    def keep_seconds(self) -> float | None:
        """The seconds of idleness after which the model is to be unloaded, None if the body doesn't say."""
        return None

    @staticmethod
    def unknown_model(name: str, known: Sequence[str]) -> ApiError:
        """Return the error for a model that the server doesn't have, in the words of the API."""
        return unknown_model(name, known)


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    """Return the error of status 404 for a name that is not among those of the server's models."""
    message = f"the model {name!r} does not exist; this server has {', '.join(known)}"
    return ApiError(404, message, code="model_not_found", param="model")


T = TypeVar("T", bound=Body)
S = TypeVar("S", bound=msgspec.Struct)

_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)


async def read_body(
    request: Request, args: ServerArgs, reserve: Callable[[int], None], is_lenient: bool = False
) -> bytes:
    """Return the body of a request. Raises `ApiError` 415, 413 or 408, and what `reserve` does of each part's bytes.

    `is_lenient`: accept JSON of any type, except from web pages. Their browsers ask before they send JSON to another
    origin, but not before they send plain text.
    """
    if not is_lenient or "origin" in request.headers:
        _check_type(request)
    _check_headers(request, args.max_body_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(args.body_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > args.max_body_bytes:
                    raise _too_large(size, args.max_body_bytes)
                reserve(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {args.body_timeout:g} s ({size} bytes did); send it faster",
            code="request_timeout",
        ) from None
    except ClientDisconnect:
        raise ApiError(
            CLIENT_CLOSED_REQUEST, "the client closed the connection before it had sent its request"
        ) from None
    else:
        return b"".join(chunks)
    finally:
        chunks.clear()  # the traceback of an error would keep them


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415,
            f"the body is of type {kind or 'none'}; send JSON, with the header Content-Type: application/json",
            code="unsupported_media_type",
        )


def _check_headers(request: Request, most: int) -> None:
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise ApiError(415, f"the body is encoded as {encoding}; send it as it is", code="unsupported_media_type")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise _too_large(int(length), most)


def _too_large(size: int, most: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {size} bytes or more, and {most} are allowed; send less, or raise --max-body-bytes",
        code="request_too_large",
    )


async def decode(body: bytes, kind: type[T], run: RunPiece = at_once) -> T:
    """Return the body as a `kind`; `run` runs the pieces of the work. Raises `ApiError` 400 that names the field."""
    if not body:
        raise bad_request("the body is empty; send a JSON object")
    if not (await run(partial(has_few_marks, body)) or await run(partial(has_few_values, body))):
        raise ApiError(
            413,
            f"the body has too many values; it may have {MAX_VALUES} in all, {MAX_TEXTS} texts, and {MAX_CONTAINERS} "
            "lists, objects and fields of objects; send several requests",
            code="request_too_large",
        )
    try:
        return await _decoded(body, kind, run)
    except msgspec.ValidationError as error:
        raise explain(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply; nest it less", code="invalid_json") from None


async def _decoded(body: bytes, kind: type[T], run: RunPiece) -> T:
    try:
        return await run(partial(msgspec.json.decode, body, type=kind))
    except msgspec.ValidationError as error:
        if not can_convert(error):
            await run(partial(_check_json, body))
            raise
    given = await run(partial(msgspec.json.decode, body))
    return await run(lambda: converted(without_refused(given, kind.__struct_fields__, kind.refused), kind))


def _check_json(body: bytes) -> None:
    """Raise `DecodeError` if the body is not JSON: an earlier error may hide that it breaks off."""
    with suppress(msgspec.ValidationError, RecursionError):  # it is JSON, but no value can hold it
        msgspec.json.decode(body)


def without_refused(
    given: Mapping[str, Any], known: Collection[str], refused: Refusals, where: str = ""
) -> dict[str, Any]:
    """Return `given` without fields that change nothing: harmless ones of `refused`, and unknown ones that are null.

    `where`: the path of this part of the body. Raises `ApiError` 400 for one of `refused` with any other value.
    """
    fields = {name: value for name, value in given.items() if value is not None or name in known}
    for name in refused.keys() & fields.keys():
        harmless, why = refused[name]
        value, place = fields.pop(name), f"{where}.{name}".removeprefix(".")
        if not any(_same(value, each) for each in harmless):
            raise bad_request(f"{place} is not supported: {why}", place, "unsupported_parameter")
    return fields


def _same(given: object, known: object) -> bool:
    """Return whether two values are equal in JSON, where 0 is not false."""
    return type(given) is type(known) and given == known


def convert(value: Any, kind: type[S], where: str, refused: Refusals | None = None) -> S:
    """Return the part of a body at `where` as a struct. Raises `ApiError` 400 that names the field at fault."""
    try:
        if refused and isinstance(value, Mapping):
            value = without_refused(value, kind.__struct_fields__, refused, where)
        return converted(value, kind)
    except msgspec.ValidationError as error:
        raise explain(error, where) from None


def explain(error: msgspec.ValidationError, where: str = "") -> ApiError:
    """Return an error of status 400 that names the field as the client wrote it, in the part of the body at `where`."""
    match = AT.fullmatch(str(error))
    path = (where + ((match["path"] or "") if match else "")).removeprefix(".")
    what = match["what"] if match else str(error)
    if (unknown := unknown_field(error)) is not None:
        name = f"{path}.{unknown}".removeprefix(".")
        return bad_request(f"{name} is not a known field; leave it out, or check its spelling", name, "unknown_field")
    if (missing := _MISSING.fullmatch(what)) is not None:
        name = f"{path}.{missing['name']}".removeprefix(".")
        return bad_request(f"{name} is missing; it is required", name, "missing_field")
    if not path:
        return bad_request(f"the body is invalid: {what[:1].lower()}{what[1:]}")
    return bad_request(f"{path}: {what[:1].lower()}{what[1:]}", path, "invalid_value")
