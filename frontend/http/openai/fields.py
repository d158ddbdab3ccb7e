"""The fields that bodies of completions and chats share: sampling, constraints, and how the engine treats a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from quire.frontend.http.errors import bad_request
from quire.frontend.http.shared_fields import NOT_HERE, RESPONSE_FORMAT, STRUCTURED_OUTPUTS
from quire.frontend.http.transport.bodies import Body, Refusals
from quire.frontend.http.transport.responses import GivenId
from quire.frontend.outputs import CompletionOutput
from quire.frontend.structured_outputs import check_structured_outputs, plain_structured_outputs
from quire.protocol.messages import LOGIT_BIAS, SAMPLING_LENGTHS, SAMPLING_RANGES, SamplingParams, StructuredOutputs

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


_OFF = (0, 0.0)
_SAMPLERS = "use temperature, top_p, top_k and min_p"
_CACHED = "prefixes stay cached until their KV pages are needed"

LLAMA_CPP: Refusals = {  # fields that clients of llama.cpp send to OpenAI's endpoints too
    "cache_prompt": ((True, False), _CACHED),
    "dry_multiplier": (_OFF, "use repetition_penalty"),
    "dynatemp_range": (_OFF, "the temperature does not vary"),
    "grammar": (("",), 'use structured_outputs={"grammar": "..."}'),
    "id_slot": ((-1, 0), "requests have no slots"),
    "json_schema": ((), "use response_format"),
    "lora": (([],), "give the name of the adapter as the model"),
    "mirostat": ((0,), _SAMPLERS),
    "n_predict": ((-1,), "use max_tokens"),
    "n_probs": ((0,), "use logprobs"),
    "reasoning_format": (
        ("auto", "deepseek"),
        "thoughts are in reasoning_content; include_reasoning=false leaves them out",
    ),
    "repeat_last_n": ((-1,), "penalties apply to all tokens"),
    "repeat_penalty": ((1, 1.0), "use repetition_penalty"),
    "return_progress": ((False,), "a stream begins with the first token"),
    "samplers": ((), f"they are always the same; {_SAMPLERS}"),
    "timings_per_token": ((False,), "POST /completion has them"),
    "typical_p": ((1, 1.0), _SAMPLERS),
    "xtc_probability": (_OFF, _SAMPLERS),
}

REFUSED: Refusals = {
    **LLAMA_CPP,
    "audio": ((), "only text is supported"),
    "bootstrap_host": ((), NOT_HERE),
    "chat_template_content_format": (("auto", "string"), "only POST /v1/chat/completions takes it"),
    "detokenize": ((True,), "answers have text; return_token_ids=true gives the token ids as well"),
    "function_call": ((), "it is deprecated; use tool_choice"),
    "functions": ((), "it is deprecated; use tools"),
    "guided_choice": ((), 'use structured_outputs={"choice": [...]}'),
    "guided_decoding_backend": ((), "there is one backend"),
    "guided_grammar": ((), 'use structured_outputs={"grammar": "..."}'),
    "guided_json": ((), 'use structured_outputs={"json": {...}}'),
    "guided_regex": ((), 'use structured_outputs={"regex": "..."}'),
    "kv_transfer_params": ((), NOT_HERE),
    "logits_processors": (([],), "no code of clients is run"),
    "media_io_kwargs": (({},), "only text is supported"),
    "mm_processor_kwargs": (({},), "only text is supported"),
    "modalities": ((["text"],), "only text is supported"),
    "moderation": ((), NOT_HERE),
    "prediction": ((), NOT_HERE),
    "prompt_cache_options": (({}, {"mode": "implicit"}), _CACHED),
    "prompt_cache_retention": (("in_memory", "in-memory", "24h"), _CACHED),
    "repetition_detection": ((), NOT_HERE),
    "response_role": (("assistant",), "answers are the assistant's"),
    "service_tier": (("auto", "default"), "all requests are served alike; use priority"),
    "store": ((False,), "nothing is stored"),
    "thinking_token_budget": ((), "what bounds thoughts is the limit of all tokens"),
    "truncation_side": (("left",), "truncate_prompt_tokens keeps the last tokens"),
    "verbosity": (
        ("medium",),
        "ask for it in the prompt, or by chat_template_kwargs if the chat template knows it",
    ),
    "vllm_xargs": (({},), NOT_HERE),
    "web_search_options": ((), NOT_HERE),
}


# Ranges in bodies, which have further names, and take any negative seed for a fresh one.
RANGES = {
    **SAMPLING_RANGES,
    "seed": SAMPLING_RANGES["seed"]._replace(low=-math.inf),
    "max_completion_tokens": SAMPLING_RANGES["max_tokens"],
    "max_output_tokens": SAMPLING_RANGES["max_tokens"],
    "top_logprobs": SAMPLING_RANGES["logprobs"],
}

LENGTHS = {**SAMPLING_LENGTHS, "stop_sequences": SAMPLING_LENGTHS["stop"]}


_TOKEN_IDS = Meta(extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}})
_BIAS = Meta(extra_json_schema={"minimum": LOGIT_BIAS.low, "maximum": LOGIT_BIAS.high})


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a stream: usage in a last chunk (`include_usage`), in every chunk (`continuous_usage_stats`)."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding that hides lengths from eavesdroppers; answers have none


class GenerationFields(Body, kw_only=True):
    """Fields of a body that asks for text; None means left out. Names and meanings are OpenAI's and vLLM's."""

    refused: ClassVar[Refusals] = REFUSED

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: Annotated[dict[int, Annotated[float, _BIAS]], _TOKEN_IDS] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_route: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: StructuredOutputsField | None = None

    priority: int | None = None
    cache_salt: str | None = None
    request_id: GivenId | None = None

    # Accepted, without an effect on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def session(self) -> str | None:
        """The name of the conversation, for routers."""
        return self.prompt_cache_key or self.user


_SAMPLING = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias",
    "ignore_eos", "min_tokens", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "prompt_logprobs",
)  # fmt: skip


def sampling_params(
    fields: GenerationFields, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Return the sampling parameters of a body; fields left out have the model's `defaults`, or the library's.

    Raises `ApiError` 400 for fields that cannot be combined; values are checked where the request is made.
    """
    given = {name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None}
    params = {**defaults, **given, "max_tokens": max_tokens, "logprobs": logprobs}
    if fields.structured_outputs is not None:
        params["structured_outputs"] = fields.structured_outputs.plain
    if params.get("seed", 0) < 0:
        del params["seed"]  # -1: a fresh one, as llama.cpp has it
    if fields.use_beam_search:
        params = _beam_search(fields, params)
    elif fields.length_penalty not in (None, 1.0) or fields.early_stopping:
        raise bad_request(
            "length_penalty and early_stopping belong to a beam search; set use_beam_search, or omit them"
        )
    if fields.stream:
        _check_streaming(fields)
    elif fields.stream_options is not None:
        raise bad_request("stream_options has a meaning only with stream=true", "stream_options")
    return SamplingParams(**params)


def known_end(completion: CompletionOutput) -> tuple[str | None, int | str | None]:
    """Return the finish reason of a completion in OpenAI's values, and its stop reason, which tells of a time limit."""
    if completion.finish_reason == "timeout":
        return "length", "timeout"
    return completion.finish_reason, completion.stop_reason


def check_top_logprobs(given: int | None) -> None:
    """Raise `ValueError` for `top_logprobs` out of range."""
    RANGES["top_logprobs"].check("top_logprobs", given)


def _beam_search(fields: GenerationFields, params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a beam search as vLLM has it: `n` beams, all returned, without sampling defaults."""
    width = fields.n or 1
    asked = {name: value for name, value in params.items() if getattr(fields, name, None) is not None}
    asked.pop("temperature", None)
    if "structured_outputs" in params:
        raise bad_request("structured_outputs has no meaning in a beam search; leave it out", "structured_outputs")
    return {
        **asked,
        "n": width,
        "beam_width": width,
        "length_penalty": 1.0 if fields.length_penalty is None else fields.length_penalty,
        "early_stopping": bool(fields.early_stopping),
        "max_tokens": params["max_tokens"],
        "logprobs": params["logprobs"],
    }


def _check_streaming(fields: GenerationFields) -> None:
    if fields.use_beam_search:
        raise bad_request("a beam search has its answers only at its end; set stream=false", "use_beam_search")
    if fields.best_of is not None and fields.best_of > (fields.n or 1):
        raise bad_request("best_of chooses at the end, so nothing can be streamed; set stream=false", "best_of")
    if fields.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs are not streamed; set stream=false", "prompt_logprobs")
