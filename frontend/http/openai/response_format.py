"""Constraints on answers: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.frontend.http.errors import bad_request
from quire.frontend.http.shared_fields import RESPONSE_FORMAT, STRUCTURED_OUTPUTS
from quire.frontend.structured_outputs import check_structured_outputs, plain_structured_outputs
from quire.protocol.messages import StructuredOutputs

_ONLY_FALSE = Meta(extra_json_schema={"const": False})


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A JSON schema. It is always enforced, `strict` or not; without a schema, any object is allowed."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that follows a schema."""

    json_schema: NamedSchema


class StructuralTagFormat(msgspec.Struct, tag_field="type", tag="structural_tag"):
    """vLLM's structural tags, which are not supported."""


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputsField(msgspec.Struct, forbid_unknown_fields=True):
    """A constraint in vLLM's form: exactly one of the first five fields; the others set the white space of JSON."""

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
        """The constraint, checked. Raises `ApiError` 400."""
        fields = msgspec.structs.asdict(self)
        if fields.pop("disable_additional_properties"):
            raise bad_request(
                "structured_outputs.disable_additional_properties is not supported: "
                'set "additionalProperties": false in the schema',
                "structured_outputs.disable_additional_properties",
                "unsupported_parameter",
            )
        return _checked(fields, STRUCTURED_OUTPUTS)


def wanted_format(given: ResponseFormat | None) -> StructuredOutputs | None:
    """Return the constraint of a `response_format`, None without one. Raises `ApiError` 400."""
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


def _checked(fields: dict[str, Any], field: str) -> StructuredOutputs:
    try:
        structured: StructuredOutputs = plain_structured_outputs(fields)
        check_structured_outputs(structured)
    except ValueError as error:
        where = "response_format.json_schema.schema" if field == RESPONSE_FORMAT else "structured_outputs.json"
        raise bad_request(str(error).replace("structured_outputs.json", where), field) from None
    return structured
