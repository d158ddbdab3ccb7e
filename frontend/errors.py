"""The exceptions that the frontend raises; each message says what happened and what can be done."""

from __future__ import annotations

from quire.protocol.messages import ErrorKind

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class RequestError(ValueError):
    """A request that cannot be served: bad input, or refused by the engine.

    `index` is its place in the batch; `kind` tells whose fault it is; `code` is OpenAI's word for it, where clients act
    upon one.
    """

    def __init__(
        self,
        message: str,
        index: int | None = None,
        kind: ErrorKind = ErrorKind.INVALID,
        code: str | None = None,
    ) -> None:
        super().__init__(message if index is None else f"prompt {index}: {message}")
        self.index = index
        self.kind = kind
        self.code = code


class RequestTimeoutError(RequestError):
    """The time that a request was given was up before it had a result."""


class ChatTemplateError(ValueError):
    """A conversation cannot be written as a prompt: no template, a broken one, or messages that it refuses."""


class EngineStartError(RuntimeError):
    """The engine process ended, or stayed silent, before it was ready; carries the engine's own message."""


class EngineConnectionError(RuntimeError):
    """No connection to an engine: nobody listens there, it does not answer, or it speaks another version."""


class EngineDeadError(RuntimeError):
    """The engine ended, or stopped answering, while it was in use. Every open request ends with this error."""


def kind_of(value: object) -> str:
    """What an error says that `value` is: the name of its type, but JSON's word for None."""
    return "null" if value is None else f"a {type(value).__name__}"
