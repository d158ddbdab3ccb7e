"""Request fields that vLLM takes and Quire does not have: arguments, keys of prompts, fields of parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec

from quire.frontend.vllm.options import ForeignOption, take

P = ParamSpec("P")
R = TypeVar("R")


def _refused(why: str, *holds: object) -> ForeignOption:
    return ForeignOption(why, is_refused=True, holds=holds)


def _idle(why: str, *holds: object) -> ForeignOption:
    return ForeignOption(why, is_refused=False, holds=holds)


_ONLY_TEXT = _refused("models read text only; give text or token ids")
_NO_EMBEDDINGS = _refused("a prompt cannot be given as embeddings; give text or token ids")
_NO_PLUGINS = _refused("there are no plugins that would read it")
_ONE_VECTOR = _refused("an output has one vector for a prompt")
_CACHED = _idle("cached tokens change no result; requests of a cache_salt of their own share none", False)

REQUEST_OPTIONS = {
    "prompt_adapter_request": _refused("there are no prompt adapters; give lora_request"),
    "mm_processor_kwargs": _ONLY_TEXT,
    "multi_modal_data": _ONLY_TEXT,
    "prompt_embeds": _NO_EMBEDDINGS,
    "prompt_token_ids": _refused('give the prompt as {"prompt_token_ids": [...]}'),
    "prompt_text": _refused("a prompt that is given as text has it in its output"),
    "tokenization_kwargs": _refused("give truncate_prompt_tokens and add_special_tokens as arguments"),
    "guided_options_request": _refused("give SamplingParams with structured_outputs"),
    "trace_headers": _refused("AsyncLLM.generate takes them as trace=TraceContext(headers=...)"),
    "data_parallel_rank": _refused("an engine is one process", 0),
    "session_id": _refused("the prefix cache finds earlier turns by their tokens"),
    "kv_hints": _refused("the prefix cache finds KV pages by their tokens"),
    "reasoning_ended": _refused("the chat template decides where thoughts end"),
    "reasoning_parser_kwargs": _refused("a reasoning_parser has no options"),
    "concurrency_limit": _refused("max_num_seqs bounds the running requests"),
}
"""Arguments of `generate` and the other methods."""

PROMPT_KEYS = {
    "multi_modal_data": _ONLY_TEXT,
    "multi_modal_uuids": _ONLY_TEXT,
    "media_io_kwargs": _ONLY_TEXT,
    "mm_processor_kwargs": _ONLY_TEXT,
    "prompt_embeds": _NO_EMBEDDINGS,
    "prompt_is_token_ids": _NO_EMBEDDINGS,
    "encoder_prompt": _refused("there are no encoder-decoder models"),
    "decoder_prompt": _refused("there are no encoder-decoder models"),
    "token_type_ids": _refused("the tokenizer makes them, for pairs given to score"),
    "prompt_token_offsets": _refused("token ids are used as they are"),
    "cache_salt": _refused("it is an argument of the method"),
}
"""Keys of a prompt that is a dict."""

SAMPLING_FIELDS = {
    "guided_decoding": _refused("give structured_outputs"),
    "logits_processors": _refused("give logit_bias, bad_words, allowed_token_ids or structured_outputs"),
    "truncate_prompt_tokens": _refused("it is an argument of generate and chat"),
    "prompt_logprob_token_ids": _refused("prompt_logprobs has the most likely tokens"),
    "prompt_logprob_start": _refused("prompt_logprobs has all positions", 0),
    "logprob_token_ids": _refused("logprobs has the most likely tokens"),
    "flat_logprobs": _refused("logprobs are a dict for each position", False),
    "watermarking": _refused("answers have no watermark", False),
    "thinking_token_budget": _refused("max_tokens bounds the whole answer"),
    "repetition_detection": _refused("repetition_penalty makes repetitions less likely"),
    "skip_reading_prefix_cache": _CACHED,
    "stream_interval": _idle("an output has all that there is when it is read", 1),
    "skip_clone": _idle("parameters are copied where they change", False),
    "extra_args": _NO_PLUGINS,
    "trace_decode_token_ids": _refused("Quire has nothing of the kind"),
    "routed_experts_prompt_start": _refused("Quire has nothing of the kind", 0),
}
"""Fields of `SamplingParams`."""

POOLING_FIELDS = {
    "softmax": _refused("give use_activation"),
    "activation": _refused("give use_activation"),
    "truncate_prompt_tokens": _refused("it is an argument of embed, classify, encode and score"),
    "step_tag_id": _ONE_VECTOR,
    "returned_token_ids": _ONE_VECTOR,
    "late_interaction_params": _ONE_VECTOR,
    "requires_token_ids": _idle("outputs have the token ids of the prompt", False),
    "skip_reading_prefix_cache": _CACHED,
    "output_kind": _idle("there is one output, at the end", "final_only"),
    "extra_kwargs": _NO_PLUGINS,
}
"""Fields of `PoolingParams`."""

STRUCTURED_FIELDS = {
    "structural_tag": _refused("give json, regex, choice or grammar"),
    "disable_additional_properties": _refused('give a schema with "additionalProperties": false', False),
}
"""Fields of `StructuredOutputsParams`."""

BEAM_SEARCH_FIELDS = {
    "structured_outputs": _refused("a beam search has no constraint"),
    "skip_special_tokens": _refused("the text of a sequence has none", True),
    "watermarking": _refused("answers have no watermark", False),
}
"""Fields of `BeamSearchParams`."""


def takes_vllm_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Let a method take vLLM's further arguments of a request, as `take` does."""

    @functools.wraps(method)
    def taking(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in REQUEST_OPTIONS.keys() & kwargs.keys():
            take(name, kwargs.pop(name), REQUEST_OPTIONS)
        return method(*args, **kwargs)

    return taking


def with_vllm_fields(
    struct: type[msgspec.Struct],
    name: str,
    module: str,
    table: Mapping[str, ForeignOption],
    **own: object,
) -> type[msgspec.Struct]:
    """Return a subclass of parameters that also takes the fields of `table`, as `take` does.

    `name` and `module`: where pickles find the subclass. `own`: further fields with their defaults, which only this
    process reads.
    """

    def check(self: msgspec.Struct) -> None:
        for field, row in table.items():
            if (value := getattr(self, field)) is not None:
                take(field, value, {field: row})

    kind: Any = Any
    return msgspec.defstruct(
        name,
        [(field, kind, default) for field, default in {**dict.fromkeys(table), **own}.items()],
        bases=(struct,),
        namespace={"__post_init__": check, "__doc__": struct.__doc__},
        module=module,
        kw_only=True,
        repr_omit_defaults=True,
    )
