"""JSON schemas of the structs of bodies and answers, with the accepted ranges of values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from quire.frontend.http.openai.fields import LENGTHS, RANGES
from quire.frontend.http.transport.bodies import Body
from quire.protocol.options import Length

DESCRIPTIONS: Mapping[str, str] = {
    # The prompt
    "model": "One of the names that /v1/models lists. Default: the served model.",
    "prompt": "A text, a list of texts, a list of token ids, or a list of such lists.",
    "messages": "The conversation so far, oldest message first.",
    "input": "A text, a list of texts, a list of token ids, or a list of such lists.",
    "tokens": "Token ids.",
    "data_1": "Another name of text_1.",
    "data_2": "Another name of text_2.",
    "queries": "Another name of text_1.",
    "text_1": "A text, or as many as text_2 has.",
    "text_2": "A text, or a list of texts, each to be compared with text_1 or the text of its index there.",
    "query": "The text to which documents are compared.",
    "top_n": "Return only this many documents, the most similar; 0: all, which is the default.",
    "return_documents": "Repeat the documents' texts in the answer, which is the default.",
    "tools": "The functions that the model may call.",
    "tool_choice": "The tools that the model may or must call: auto, none, required, or the name of one.",
    "parallel_tool_calls": "True if an answer may contain several calls.",
    "stream": "Send the answer as server-sent events while it is generated.",
    "stream_options": "Extra information in a stream; only with stream=true.",
    "system": "The system prompt: a text, or blocks of text.",
    "instructions": "The system prompt.",
    "previous_response_id": "The stored response whose conversation goes on. Needs a server that stores responses.",
    "store": "Whether to store the response. Default: yes, on a server that stores responses.",
    # Length
    "max_tokens": "Maximum number of tokens of an answer. Default: 16 for a completion, for a chat the rest of the "
    "context.",
    "max_completion_tokens": "The same as max_tokens.",
    "max_output_tokens": "Maximum number of tokens of the answer. Default: the rest of the context.",
    "min_tokens": "Minimum number of tokens of an answer.",
    "stop": "Texts that end the answer, which does not include them.",
    "stop_sequences": "Texts that end the answer, which does not include them.",
    "stop_token_ids": "Tokens that end the answer.",
    "ignore_eos": "Continue after the model's end-of-sequence token.",
    "include_stop_str_in_output": "Keep the stop text in the answer.",
    # Sampling
    "temperature": "0 always takes the likeliest token; higher values vary more. Default: the model's own, or 1.",
    "top_p": "Sample from the likeliest tokens whose probabilities add up to this; 0: take the likeliest.",
    "top_k": "Sample from this many of the likeliest tokens; 0 or -1: from all.",
    "min_p": "Sample from tokens with at least this fraction of the likeliest token's probability.",
    "presence_penalty": "Subtracted from the logit of each token that the answer already has.",
    "frequency_penalty": "Subtracted from a token's logit for each time that the answer already has it.",
    "repetition_penalty": "Above 1 makes tokens of the prompt and of the answer less likely.",
    "logit_bias": "Added to the logits of tokens: from token id to a number from -100 to 100.",
    "allowed_token_ids": "Sample from these tokens only.",
    "bad_words": "Texts that the answer must not contain.",
    "seed": "The same seed gives the same answer again. Default, or if negative: a random one.",
    # Several answers
    "n": "Number of answers.",
    "best_of": "Generate this many answers, and return the n with the highest probability per token.",
    "use_beam_search": "Find the n likeliest answers by a beam search of width n instead of sampling.",
    "length_penalty": "For a beam search: above 0 prefers longer answers.",
    "early_stopping": "For a beam search: end when n answers have ended.",
    # Form of the answer
    "response_format": "The form of the answer: text, json_object, or json_schema with a schema.",
    "text": "The form of the answer: text, json_object, or json_schema with a schema.",
    "output_config": "The form of the answer, by a JSON schema; effort is handed to the chat template.",
    "structured_outputs": "The form of the answer, by one of json, regex, choice and grammar.",
    "echo": "Begin the answer with the prompt.",
    "logprobs": "Return log probabilities: true or false for a chat, for a completion the number of likeliest tokens.",
    "top_logprobs": "Number of likeliest tokens to return at each position; with logprobs=true.",
    "prompt_logprobs": "Return the prompt's log probabilities, with this many likeliest tokens at each position.",
    "return_token_ids": "Return the token ids of the prompt and of the answer.",
    "return_route": "Return the engines that the request was sent to, and why, as route of each choice.",
    "return_tokens_as_token_ids": "Write tokens in log probabilities as token_id:N.",
    "return_token_strs": "Return the text of each token.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "spaces_between_special_tokens": "Put spaces between special tokens that are shown.",
    "encoding_format": "Vectors as lists of numbers, or as base64 of little-endian float32.",
    "dimensions": "Keep only this many of a vector's values, the first ones.",
    "normalize": "Scale vectors to length 1, which is the default.",
    "pooling_type": "The vector of a text: its last or first hidden state, or the mean or maximum of all.",
    "task": "embed or classify. Default: embed, if the model gives embeddings.",
    "prompt_name": "The model's instruction to put before each text, empty for none.",
    "instruction": "What a reranker that was trained with instructions is to look for.",
    "use_activation": "False: logits in place of scores.",
    "include_reasoning": "True to include the model's thoughts in the answer, as reasoning_content.",
    "include": "Additional output: the log probabilities of the text.",
    "reasoning": "The reasoning effort, which goes to the chat template. Thoughts are returned in full.",
    "thinking": "Thinking before the answer, where the chat template has a choice. Default: the template's.",
    "reasoning_effort": "The reasoning effort, for the chat template; none also turns its thinking off.",
    "think": "Thinking before the answer: true, false, or a reasoning effort. Default: the template's choice.",
    # Making the prompt
    "raw": "Continue the prompt as it is, without the chat template.",
    "chat_template": "A Jinja template instead of the model's; rejected unless the server trusts its clients.",
    "chat_template_kwargs": "Variables for the chat template.",
    "chat_template_content_format": "Give the chat template the contents of messages as texts (string) or as lists of "
    "parts (openai), or in the form that it takes (auto). Default: the server's --chat-template-content-format.",
    "add_generation_prompt": "End the prompt with the beginning of the assistant's answer, which is the default.",
    "continue_final_message": "Continue the last message instead of answering it.",
    "documents": "The texts to rank, or another name of text_2; in a chat, passed to the chat template.",
    "add_special_tokens": "Begin the prompt with the tokenizer's special tokens. Default: true, but false for a chat, "
    "whose template writes them.",
    "truncate_prompt_tokens": "Keep only the last tokens of the prompt, this many; -1: as many as leave "
    "room in the context for the answer, a quarter of it if that has no limit.",
    "prediction": "Text that much of the answer will probably repeat, so that it comes sooner. It changes no token.",
    # Scheduling
    "verbosity": "Accepted and ignored; ask for it in the prompt.",
    "priority": "Lower values go first where the engine's scheduling policy uses it.",
    "cache_salt": "Cached prefixes are shared only among requests with the same salt.",
    # Engines
    "address": "ipc://PATH or tcp://HOST:PORT of a running engine.",
    "drain_timeout": "Seconds that the engine's requests may go on there; then they move. Default: 60.",
    # Constraints and options in Ollama's form
    "format": "'json' for an answer that is a JSON object, or the JSON schema that it follows.",
    "options": "How to sample the answer, and how Ollama would run the model.",
    "name": "Another name of model.",
    # Fields without effect
    "keep_alive": "The time of idleness after which the model is unloaded, such as 5m; 0: after the answer, -1: never. "
    "Ignored where the server's one model stays loaded.",
    "insecure": "Accepted and ignored; nothing is downloaded.",
    "user": "Names the conversation for routers of several engines, unless there is a prompt_cache_key.",
    "metadata": "Accepted and ignored.",
    "safety_identifier": "Accepted and ignored.",
    "cache_control": "Accepted and ignored; prefixes are cached automatically.",
    "prompt_cache_key": "Names the conversation for routers of several engines; prefixes are cached automatically.",
    "request_id": "The end of the answer's id; use the header X-Request-Id to name a request in logs.",
}


Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/"
_NUMBERS = ("integer", "number")


class Schemas:
    """The schemas of types, and the components to which they refer."""

    def __init__(self, types: Iterable[Any]) -> None:
        kinds = list(dict.fromkeys(types))
        found, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE + "{name}")
        self._of = dict(zip(kinds, found, strict=True))
        self.components: dict[str, Schema] = components
        for schema in self.components.values():
            if "description" in schema:
                schema["description"] = inspect.cleandoc(schema["description"])
            if schema.get("additionalProperties") is False:
                schema["additionalProperties"] = {"type": "null"}  # null is the same as leaving a field out

    def of(self, kind: Any) -> Schema:
        """Return the schema of one of the types, usually a reference."""
        return dict(self._of[kind])

    def describe_body(self, kind: type[Body], models: Sequence[str], vocab_size: int | None) -> None:
        """Add to a body's fields their meaning and range, and add the fields that are not supported.

        Integers in the lists of a body are token ids, below the size of the vocabulary if that is known.
        """
        component = self.components[self._of[kind]["$ref"].removeprefix(_REFERENCE)]
        properties = component["properties"]
        for name, schema in properties.items():
            if name in DESCRIPTIONS:
                schema.setdefault("description", DESCRIPTIONS[name])
            if name in RANGES:
                _limit(schema, RANGES[name])
            if name in LENGTHS:
                _limit_length(schema, LENGTHS[name])
            for branch in _branches(schema):
                if branch.get("type") == "array":
                    _limit(branch.get("items", {}), (0, math.inf if vocab_size is None else vocab_size - 1, True))
        if "model" in properties:
            properties["model"] = {"enum": [*models, None], "description": DESCRIPTIONS["model"]}
        for name, why in sorted(kind.refused.items()):
            properties[name] = _unsupported(*why)


def _branches(schema: Schema) -> list[Schema]:
    """Return the alternatives of a schema."""
    return list(schema.get("anyOf", [schema]))


def _limit(schema: Schema, limits: tuple[float, float, bool]) -> None:
    """Set the bounds of a number, also where it is an alternative or an item of a list."""
    low, high, closed = limits
    for branch in _branches(schema):
        if branch.get("type") == "array":
            _limit(branch.get("items", {}), limits)
        if branch.get("type") not in _NUMBERS:
            continue
        if math.isfinite(low):
            branch.setdefault("minimum" if closed else "exclusiveMinimum", low)
        if math.isfinite(high):
            branch.setdefault("maximum", high)


def _limit_length(schema: Schema, length: Length) -> None:
    """Set the most entries of a list or an object, and the most characters of a text."""
    for branch in _branches(schema):
        if branch.get("type") == "array":
            branch["maxItems"] = length.most
        elif branch.get("type") == "object":
            branch["maxProperties"] = length.most
        elif branch.get("type") == "string":
            branch["maxLength"] = length.total or length.most


def _unsupported(harmless: tuple[object, ...], why: str) -> Schema:
    """Return the schema of a field that is not supported: only null and values that change nothing are accepted."""
    return {"enum": [None, *harmless], "description": f"Not supported: {why}.", "x-refused": True}
