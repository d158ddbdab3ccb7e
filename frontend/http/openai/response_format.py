"""What the bodies of completions and chats ask an answer to be, and what is said when that can't be followed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.frontend.errors import RequestError
from quire.frontend.http.errors import bad_request
from quire.frontend.structured_outputs import check_structured_outputs, plain_structured_outputs
from quire.frontend.text.chat.tool_grammar import rejected_grammar, tool_at_fault
from quire.frontend.text.chat.tools import ToolUse
from quire.protocol.messages import StructuredOutputs

STRUCTURED_OUTPUTS = "structured_outputs"
RESPONSE_FORMAT = "response_format"
_ONLY_FALSE = Meta(extra_json_schema={"const": False})


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema. It always holds, `strict` or not; without a schema any object does."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON of a schema."""

    json_schema: NamedSchema


class StructuralTagFormat(msgspec.Struct, tag_field="type", tag="structural_tag"):
    """vLLM's, which is refused."""


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputsField(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's: one of the first five constrains the answer; the others say where its JSON may have white space."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: Annotated[bool, _ONLY_FALSE] | None = None

    @property
    def plain(self) -> StructuredOutputs:
        """The same, checked. Raises `ApiError` 400."""
        fields = msgspec.structs.asdict(self)
        if fields.pop("disable_additional_properties"):
            raise bad_request(
                "structured_outputs.disable_additional_properties is not supported: "
                'say "additionalProperties": false in the schema',
                "structured_outputs.disable_additional_properties",
                "unsupported_parameter",
            )
        return _checked(fields, STRUCTURED_OUTPUTS)


def wanted_format(given: ResponseFormat | None) -> StructuredOutputs | None:
    """What a `response_format` asks for; None if for nothing. Raises `ApiError` 400."""
    match given:
        case JsonObjectFormat():
            return StructuredOutputs(json_object=True)
        case JsonSchemaFormat(NamedSchema(schema=None)):
            return StructuredOutputs(json_object=True)
        case JsonSchemaFormat(NamedSchema(schema=schema)):
            return _checked({"json": schema}, RESPONSE_FORMAT)
        case StructuralTagFormat():
            raise bad_request(
                "response_format of type structural_tag is not supported; give tools with strict=true, or a Lark "
                'grammar as structured_outputs={"grammar": ...}',
                RESPONSE_FORMAT,
                "unsupported_parameter",
            )
    return None


def only_one(
    structured: StructuredOutputs | None, wanted: StructuredOutputs | None, field: str = RESPONSE_FORMAT
) -> StructuredOutputs | None:
    """What of `structured_outputs` and the API's own `field` is given. Raises `ApiError` 400 for both."""
    if structured is not None and wanted is not None:
        raise bad_request(f"{field} and structured_outputs both say what the answer must be; give one of them", field)
    return wanted if structured is None else structured


@asynccontextmanager
async def blamed(field: str, tools: ToolUse | None = None) -> AsyncIterator[None]:
    """Tell a grammar that the engine refuses in words of the client's: by the tool at fault, or else by `field`.

    Raises `ToolError` or `ApiError` 400.
    """
    try:
        yield
    except RequestError as error:
        why = rejected_grammar(error)
        if why is None:
            raise
        at_fault = await asyncio.to_thread(tool_at_fault, error, tools)
        raise at_fault or bad_request(f"{field} can't be used: {why}", field) from None


def _checked(fields: dict[str, Any], field: str) -> StructuredOutputs:
    try:
        structured: StructuredOutputs = plain_structured_outputs(fields)
        check_structured_outputs(structured)
    except ValueError as error:
        where = "response_format.json_schema.schema" if field == RESPONSE_FORMAT else "structured_outputs.json"
        raise bad_request(str(error).replace("structured_outputs.json", where), field) from None
    return structured
