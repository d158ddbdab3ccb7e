"""The flags for an HTTP server as the target, in place of an engine."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.frontend.cli.flags import AttachFlags, EngineFlags, changed, flag_names, option

if TYPE_CHECKING:
    from quire.frontend.evaluation.replay.http_target import HttpOptions

_server = functools.partial(option, "An HTTP server")
_FOR_SERVERS_TOO = ("model", "tokenizer", "max_model_len")
_CHOICES = {"endpoint_type": ("completions", "chat"), "prompt_as": ("tokens", "text")}


@dataclass(frozen=True)
class ServerFlags:
    """Flags of an OpenAI-compatible server; None means not given."""

    base_url: Annotated[
        str | None,
        _server("Send to the OpenAI-compatible server at http://HOST:PORT; --model names one of its models.", "URL"),
    ] = None
    endpoint_type: Annotated[str | None, _server("completions or chat. Default: completions.", "NAME")] = None
    prompt_as: Annotated[
        str | None, _server("Prompts as tokens, or as text made by --tokenizer. Default: tokens.", "FORM")
    ] = None
    api_key: Annotated[str | None, _server("Key that the server asks for.", "KEY")] = None
    header: Annotated[list[str] | None, _server("A further header; may be given several times.", "NAME:VALUE")] = None
    extra_body: Annotated[
        str | None, _server('Further fields for each body, such as {"top_k": 20}; null leaves one out.', "JSON")
    ] = None

    def options(self, engine: EngineFlags, attach: AttachFlags) -> HttpOptions:
        """Return the options for `HttpTarget.open`. Raises `BadParameter`, also for flags that only an engine has."""
        from quire.frontend.evaluation.replay.http_target import HttpOptions
        from quire.frontend.text.tokenizer import Tokenizer

        assert self.base_url is not None
        given_for_engine = {**engine.given, **attach.given}
        if given := {name: value for name, value in given_for_engine.items() if name not in _FOR_SERVERS_TOO}:
            raise typer.BadParameter(f"{flag_names(given)} cannot be set for a server at --base-url; leave out")
        if self.endpoint_type == "chat" and self.prompt_as == "tokens":
            raise typer.BadParameter("--prompt-as tokens cannot be sent as a chat, which is text; leave it out")
        return HttpOptions(
            self.base_url,
            endpoint=self._choice("endpoint_type"),
            model=None if engine.model is None else str(engine.model),
            api_key=self.api_key,
            headers=dict(_header(each) for each in self.header or ()),
            prompt_as=self._choice("prompt_as"),
            tokenizer=None if attach.tokenizer is None else Tokenizer(str(attach.tokenizer)),
            extra_body=_fields(self.extra_body),
        )

    def refuse(self) -> None:
        """Raise `BadParameter` for flags that mean nothing without a server."""
        if given := changed(self):
            raise typer.BadParameter(f"{flag_names(given)} is for an HTTP server; name one with --base-url")

    def _choice(self, name: str) -> Any:
        choices = _CHOICES[name]
        value = getattr(self, name) or choices[0]
        if value not in choices:
            raise typer.BadParameter(
                f"{flag_names({name: value})} {value} is not known; it can be {' or '.join(choices)}"
            )
        return value


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise typer.BadParameter(f"--header {text!r} is not a header; give NAME:VALUE")
    return name.strip(), value.strip()


def _fields(text: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise typer.BadParameter(f"--extra-body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise typer.BadParameter(f'--extra-body {text} is not an object; give one such as {{"top_k": 20}}')
    return fields
