"""The exceptions of the frontend; each message says what happened and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from quire.protocol.messages import ErrorKind

T = TypeVar("T")

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class RequestError(ValueError):
    """A request that cannot be served: invalid input, or rejected by the engine.

    `index` is its place in the batch; `kind` is the class of the error; `code` is OpenAI's error code, if any.
    """

    def __init__(
        self, message: str, index: int | None = None, kind: ErrorKind = ErrorKind.INVALID, code: str | None = None
    ) -> None:
        super().__init__(message if index is None else f"prompt {index}: {message}")
        self.index = index
        self.kind = kind
        self.code = code


def named(index: int, make: Callable[[Any], T], given: Any) -> T:
    """Return `make(given)`; its `ValueError` becomes a `RequestError` that names the prompt by its index."""
    try:
        return make(given)
    except ValueError as error:
        raise RequestError(str(error), index, code=getattr(error, "code", None)) from None


class RequestTimeoutError(RequestError):
    """A request that timed out before it had a result."""


class ChatTemplateError(ValueError):
    """A conversation that cannot be rendered as a prompt: no template, a broken one, or messages that it rejects."""


class HubError(RuntimeError):
    """A model that cannot be had from the Hugging Face hub, nor from its cache on this machine."""


class EngineStartError(RuntimeError):
    """An engine process that ended, or did not answer, before it was ready; with the engine's own message."""


class EngineConnectionError(RuntimeError):
    """A failed connection: no engine listens there, the engine does not answer, or speaks another protocol version."""


class EngineDeadError(RuntimeError):
    """An engine that ended or stopped answering while it was in use. Every open request ends with this error.

    `summary` is for everyone. `details` are for the owner of the engine: they may hold addresses, paths and stacks.
    """

    def __init__(self, summary: str, details: str = "") -> None:
        super().__init__(summary, details)
        self.summary = summary
        self.details = details

    def __str__(self) -> str:
        return f"{self.summary}: {self.details}" if self.details else self.summary


def kind_of(value: object) -> str:
    """Return the name of `value`'s type for an error message, `null` for None."""
    return "null" if value is None else f"a {type(value).__name__}"
