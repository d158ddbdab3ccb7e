"""The bodies of llama.cpp's API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from quire.frontend.http.dialects.llama_cpp.sampling import REFUSED, SamplingFields
from quire.frontend.http.shared_fields import EFFORT, MESSAGE, TOOL
from quire.frontend.http.transport.bodies import ITEMS, NOT_EMPTY, Body, Refusals

_MOST_FIELDS = Meta(max_length=64)
_PROMPT = (
    "A text; a list of token ids and texts; or a list of several such prompts, whose answers are then a list. A prompt "
    "may also be an object with prompt_string."
)


class PromptObject(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt as an object. `multimodal_data` is not supported."""

    prompt_string: str
    multimodal_data: Annotated[list[str], Meta(extra_json_schema={"maxItems": 0})] | None = None


GivenPrompt = str | PromptObject | list[int | str | list[int | str] | PromptObject]


class GenerationBody(SamplingFields, kw_only=True):
    """The fields of a completion but for its prompt."""

    stream: bool | None = None
    return_tokens: Annotated[
        bool | None, Meta(description="Return the token ids of the answer; a stream has them.")
    ] = None
    timings_per_token: Annotated[bool | None, Meta(description="Put timings into each event of a stream.")] = None
    response_fields: Annotated[
        Annotated[list[str], _MOST_FIELDS] | None,
        Meta(description="The fields to return; a field of a field as in timings/prompt_n. Others are left out."),
    ] = None
    n_indent: Annotated[
        int | None,
        Meta(description="End the answer at a line that is indented by fewer characters, the first one aside."),
    ] = None
    t_max_predict_ms: Annotated[
        float | None, Meta(description="End the answer at a line break, this many milliseconds after its first token.")
    ] = None


class LlamaCompletionBody(GenerationBody, kw_only=True):
    """The body of a completion, with llama.cpp's fields."""

    prompt: Annotated[GivenPrompt, Meta(description=_PROMPT)]


class ModelNameBody(Body, kw_only=True):
    """A body that only names a model."""


class ExtraText(msgspec.Struct, forbid_unknown_fields=True):
    """Text of another file."""

    text: str
    filename: str | None = None


class InfillBody(GenerationBody, kw_only=True):
    """The body of a request for the text between two others, with llama.cpp's fields."""

    refused: ClassVar[Refusals] = REFUSED

    input_prefix: Annotated[str, Meta(description="The text before.")]
    input_suffix: Annotated[str, Meta(description="The text after.")]
    input_extra: Annotated[
        Annotated[list[ExtraText], ITEMS] | None,
        Meta(description="Texts of other files, the most important ones last."),
    ] = None
    prompt: Annotated[str | None, Meta(description="The beginning of the text between, which follows the prefix.")] = (
        None
    )


class ApplyTemplateBody(Body, kw_only=True):
    """The body of a request for a conversation as a prompt, with llama.cpp's fields."""

    is_lenient: ClassVar[bool] = True

    messages: Annotated[list[Annotated[dict[str, Any], MESSAGE]], NOT_EMPTY, ITEMS]
    tools: Annotated[list[Annotated[dict[str, Any], TOOL]], ITEMS] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, EFFORT] | None = None


class LlamaEmbeddingBody(Body, kw_only=True):
    """The body of a request for vectors, with llama.cpp's fields."""

    is_lenient: ClassVar[bool] = True

    content: Annotated[
        GivenPrompt | None, Meta(description="The text, or a list of texts or of lists of token ids.")
    ] = None
    input: Annotated[GivenPrompt | None, Meta(description="Another name of content.")] = None
    embd_normalize: Annotated[
        int | None, Meta(description="2: scale vectors to length 1, which is the default; -1: leave them as they are.")
    ] = None
