"""The forms in which a prompt may be given, and `Prompt`, to which they are converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict, cast

from quire.frontend.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.vllm.fields import PROMPT_KEYS
from quire.frontend.vllm.options import take

FORMS = (
    'text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}, the latter maybe with a "prediction"'
)


LONG_TEXT = 4096
"""Characters or token ids; longer input is worked on by a thread, not on the event loop."""

MAX_TEXT_BYTES = 1 << 20
_MAX_BYTES_PER_TOKEN = 16  # of the context, for texts that need not fit it


class TextPrompt(TypedDict):
    """A prompt as text, and what its answer will probably say."""

    prompt: str
    prediction: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids, used unchanged: no special token is added."""

    prompt_token_ids: list[int]
    prediction: NotRequired[str]


Message = Mapping[str, Any]  # of a conversation: "role", "content", and other keys that the chat template reads


@dataclass(frozen=True, slots=True)
class Prompt:
    """A checked prompt: its token ids, and its text if it was given as text.

    To be pooled, `segment` is the position at which the second text of a pair begins, if the model tells them apart,
    and `num_skipped` the number of tokens of an instruction that takes no part. `predicted_token_ids`: what the answer
    will probably say.
    """

    token_ids: list[int]
    text: str | None = None
    segment: int = 0
    num_skipped: int = 0
    predicted_token_ids: list[int] = field(default_factory=list)


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | Prompt


def split_batch(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """Return `prompts` as a list of single prompts: a string, a mapping, a list of ints and a `Prompt` are one each."""
    if isinstance(prompts, (str, Mapping, Prompt)):
        return [cast("PromptType", prompts)]
    if hasattr(prompts, "tolist"):  # a numpy array or a tensor: one prompt, or a batch when it has two axes
        prompts = cast("Sequence[PromptType]", prompts.tolist())
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts is a {type(prompts).__name__}; give {FORMS}, or a list of these")
    if prompts and isinstance(prompts[0], int):
        return [cast("list[int]", list(prompts))]
    return list(prompts)


def make_prompt(
    prompt: PromptType,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_model_len: int,
    *,
    add_special_tokens: bool = True,
    must_fit: bool = True,
) -> Prompt:
    """Tokenize and check one prompt. Raises `RequestError` if it is empty, far too long or has invalid token ids.

    With `add_special_tokens` a text gets the tokenizer's special tokens around it. `must_fit`: it will not be
    truncated, see `encode_within`. A `Prompt` is returned unchanged.
    """
    if isinstance(prompt, Prompt):
        return prompt
    prompt, prediction = _without_prediction(_without_vllm_keys(prompt))
    text, token_ids = _text_or_ids(prompt)
    if text is not None:
        if tokenizer is None:
            raise RequestError("the prompt is text, but there is no tokenizer; give token ids, or name a tokenizer")
        if not text:  # a tokenizer may put a token before it, but an empty text is most likely a mistake
            raise RequestError("the prompt is empty; give some text, or the token ids to begin with")
        token_ids = encode_within(
            text, tokenizer, max_model_len, add_special_tokens=add_special_tokens, must_fit=must_fit
        )
    elif must_fit and len(token_ids) > max_model_len:
        raise _too_long(str(len(token_ids)), max_model_len)
    predicted = _encode_prediction(prediction, tokenizer, max_model_len)
    return checked_prompt(Prompt(list(token_ids), text, predicted_token_ids=predicted), vocab_size)


def _without_vllm_keys(prompt: Any) -> Any:
    """Return a prompt without the keys that only vLLM has. Raises `RequestError` for one that is not None."""
    if not isinstance(prompt, Mapping) or prompt.keys().isdisjoint(PROMPT_KEYS):
        return prompt
    for key in PROMPT_KEYS.keys() & prompt.keys():
        try:
            take(key, prompt[key], PROMPT_KEYS)
        except ValueError as error:
            raise RequestError(str(error)) from None
    return {key: value for key, value in prompt.items() if key not in PROMPT_KEYS}


def _without_prediction(prompt: Any) -> tuple[Any, str]:
    """Return a prompt without its prediction, and that. Raises `RequestError` for one that is no text."""
    if not isinstance(prompt, Mapping) or "prediction" not in prompt:
        return prompt, ""
    if not isinstance(prompt["prediction"], str):
        raise RequestError(f"prediction is a {type(prompt['prediction']).__name__}; give the text that is expected")
    return {key: value for key, value in prompt.items() if key != "prediction"}, prompt["prediction"]


def _encode_prediction(text: str, tokenizer: Tokenizer | None, max_model_len: int) -> list[int]:
    """Tokenize what an answer will probably say; what no answer could be long enough for is cut off."""
    if not text:
        return []
    if tokenizer is None:
        raise RequestError("the prediction is text, but there is no tokenizer; leave it out, or name a tokenizer")
    token_ids = encode_within(text, tokenizer, max_model_len, add_special_tokens=False, must_fit=False)
    return token_ids[:max_model_len]


def encode_within(
    text: str, tokenizer: Tokenizer, max_model_len: int, *, add_special_tokens: bool, must_fit: bool
) -> list[int]:
    """Tokenize a text. Raises `RequestError` for one that is too long, which costs seconds and GiB to tokenize.

    A text that `must_fit` the context is too long if it is known to have more tokens. Any other, and all texts of a
    tokenizer for which nothing is known (`FewestTokens.is_sound`), may have `MAX_TEXT_BYTES`, or 16 bytes for each
    token of the context.
    """
    check_text(text, tokenizer, max_model_len, must_fit=must_fit)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_text(text: str, tokenizer: Tokenizer, max_model_len: int, *, must_fit: bool) -> None:
    """Raise `RequestError` for a text that is too long to tokenize, see `encode_within`."""
    if len(text) > LONG_TEXT:
        fewest = tokenizer.fewest_tokens
        if not (must_fit and fewest.is_sound):
            most = max(MAX_TEXT_BYTES, _MAX_BYTES_PER_TOKEN * max_model_len)
            if (size := len(text.encode(errors="surrogatepass"))) > most:
                raise RequestError(f"the text has {size} bytes, and {most} can be tokenized; shorten it")
        elif (count := fewest(text)) > max_model_len:
            raise _too_long(f"at least {count}", max_model_len)


def _too_long(count: str, max_model_len: int) -> RequestError:
    return RequestError(
        f"the prompt has {count} tokens, and this model's maximum context length is {max_model_len} tokens; shorten "
        f"it to {max_model_len} or less, or keep its end with truncate_prompt_tokens",
        code=CONTEXT_LENGTH_EXCEEDED,
    )


def checked_prompt(prompt: Prompt, vocab_size: int) -> Prompt:
    """Return `prompt` if it has tokens and all ids are in the model's vocabulary; else raise `RequestError`."""
    token_ids = prompt.token_ids
    if not token_ids:
        raise RequestError("the prompt is empty; give at least one token")
    if set(map(type, token_ids)) != {int}:
        wrong = next(token for token in token_ids if type(token) is not int)
        raise RequestError(f"the prompt holds {wrong!r} ({type(wrong).__name__}) where a token id (int) is expected")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        position = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
        raise RequestError(
            f"token id {token_ids[position]} at position {position} of the prompt is outside the vocabulary; "
            f"ids go from 0 to {vocab_size - 1}"
        )
    return prompt


def truncate(prompt: Prompt, last: int | None, max_model_len: int, room: int = 1) -> Prompt:
    """Return the `last` tokens of a prompt, None for all, -1 for as many as leave `room` in the context for an answer.

    A prompt that was cut has no text. Raises `RequestError` for any other number.
    """
    if last is None:
        return prompt
    if type(last) is not int or last < -1 or last == 0:
        raise RequestError(
            f"truncate_prompt_tokens={last} leaves no tokens; give 1 or more, or -1 for as many as the context can hold"
        )
    kept = max(1, max_model_len - room) if last == -1 else last
    if len(prompt.token_ids) <= kept:
        return prompt
    return Prompt(prompt.token_ids[-kept:], predicted_token_ids=prompt.predicted_token_ids)


def _text_or_ids(prompt: Any) -> tuple[str | None, Sequence[int]]:
    """Distinguish the forms: return `(text, [])` or `(None, token ids)`."""
    if isinstance(prompt, str):
        return prompt, []
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt)
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, (list, tuple)):
        return None, prompt
    raise RequestError(f"a prompt is a {type(prompt).__name__}; give {FORMS}")


def _from_mapping(prompt: Mapping[str, Any]) -> tuple[str | None, Sequence[int]]:
    if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return prompt["prompt"], []
    if set(prompt) <= {"prompt", "prompt_token_ids"} and "prompt_token_ids" in prompt:
        text, token_ids = _text_or_ids(prompt["prompt_token_ids"])
        if text is None:
            return None, token_ids
    raise RequestError(f"a prompt has the keys {sorted(map(str, prompt))}; give {FORMS}")
