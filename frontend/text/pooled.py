"""Prompts of texts that are pooled: with the model's instructions, as pairs, and cut where the model expects it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.frontend.errors import RequestError
from quire.frontend.text.prompts import Prompt, PromptType, check_text, checked_prompt, make_prompt, truncate
from quire.frontend.text.tokenizer import Encoded, Tokenizer
from quire.protocol.pooling_info import QWEN3_RERANKER, PoolingInfo

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QUERY_PROMPTS, _DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")

# The texts around a pair, and the pair, as the authors of Qwen3-Reranker give them.
_QWEN3_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QWEN3_PAIR = "<Instruct>: {}\n<Query>: {}\n<Document>: {}"


def query_prompt_name(model: PoolingInfo) -> str | None:
    """Return the name of the model's prompt for queries, None for its default."""
    return next((name for name in _QUERY_PROMPTS if name in model.prompts), None)


def document_prompt_name(model: PoolingInfo) -> str | None:
    """Return the name of the model's prompt for documents, None for its default."""
    return next((name for name in _DOCUMENT_PROMPTS if name in model.prompts), None)


class PooledTexts:
    """Makes the prompts of one model's texts. All methods raise `RequestError`.

    `truncate_prompt_tokens` keeps that many tokens, -1 as many as the context holds, None all. A decoder keeps the last
    tokens of a text; an encoder the first, and its special tokens, and both keep the first of a pair.
    """

    def __init__(self, model: PoolingInfo, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def prompt(
        self,
        prompt: PromptType,
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> Prompt:
        """Return the prompt of a text after the model's instruction `prompt_name`; None: its default one, "": none.

        Token ids are used unchanged.
        """
        if isinstance(prompt, Prompt):
            return prompt
        must_fit = truncate_prompt_tokens is None
        instruction = self._instruction(prompt_name)
        text = _text_of(prompt)
        if text is None or not text:
            made = make_prompt(prompt, self._tokenizer, self._vocab_size, self._max_model_len, must_fit=must_fit)
            return self._truncated(made, truncate_prompt_tokens)
        whole = instruction + text
        if self._model.lowercase:
            whole = whole.lower()
        skipped = 0 if self._model.includes_prompt else self._num_tokens(instruction, add_special_tokens)
        if self._model.is_encoder:
            made = self._cut(whole, None, truncate_prompt_tokens, add_special_tokens)
        else:
            made = make_prompt(
                whole, self._tokenizer, self._vocab_size, self._max_model_len, add_special_tokens=add_special_tokens,
                must_fit=must_fit,
            )  # fmt: skip
            made = self._truncated(made, truncate_prompt_tokens)
        return replace(made, num_skipped=min(skipped, len(made.token_ids) - 1))

    def pair(
        self,
        first: str,
        second: str,
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> Prompt:
        """Return the prompt of a query and a document, in the form that the model was trained with."""
        if not first or not second:
            raise RequestError("the prompt is empty; give some text on both sides of a pair")
        if self._model.pair_template != QWEN3_RERANKER:
            if instruction is not None:
                raise RequestError("instruction is not possible: this model's pairs have none; leave it out")
            return self._cut(first, second, truncate_prompt_tokens, add_special_tokens)
        tokenizer = self._require_tokenizer()
        around = [tokenizer.encode(text, add_special_tokens=False) for text in (_QWEN3_PREFIX, _QWEN3_SUFFIX)]
        text = _QWEN3_PAIR.format(DEFAULT_INSTRUCTION if instruction is None else instruction, first, second)
        room = self._most(truncate_prompt_tokens) - sum(map(len, around))
        check_text(text, tokenizer, self._max_model_len, must_fit=truncate_prompt_tokens is None)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if truncate_prompt_tokens is not None:
            tokens = tokens[: max(room, 1)]
        return checked_prompt(Prompt([*around[0], *tokens, *around[1]], text), self._vocab_size)

    def _cut(self, text: str, pair: str | None, last: int | None, add_special_tokens: bool) -> Prompt:
        tokenizer = self._require_tokenizer()
        for each in (text, pair):
            if each is not None:
                check_text(each, tokenizer, self._max_model_len, must_fit=last is None)
        encoded = tokenizer.encode_parts(text, pair, add_special_tokens)
        if last is not None:
            encoded = shorten(encoded, self._most(last))
        types = encoded.type_ids
        segment = types.index(1) if self._model.num_token_types > 1 and 1 in types else 0
        return checked_prompt(Prompt(encoded.token_ids, text if pair is None else None, segment), self._vocab_size)

    def _most(self, last: int | None) -> int:
        """Return the tokens that are kept. Raises `RequestError` for an invalid number."""
        if last is not None and (type(last) is not int or last < -1 or last == 0):
            truncate(Prompt([0]), last, self._max_model_len)
        return self._max_model_len if last is None or last == -1 else last

    def _truncated(self, prompt: Prompt, last: int | None) -> Prompt:
        return truncate(prompt, last if last is None else self._most(last), self._max_model_len)

    def _instruction(self, name: str | None) -> str:
        name = self._model.default_prompt_name if name is None else name
        if not name:
            return ""
        if name not in self._model.prompts:
            known = ", ".join(map(repr, self._model.prompts)) or "none"
            raise RequestError(f"prompt_name={name!r} is not one of the model's prompts; it has {known}")
        return self._model.prompts[name]

    def _num_tokens(self, instruction: str, add_special_tokens: bool) -> int:
        """Return the tokens of an instruction at the beginning of a text, without the special ones after it."""
        if not instruction:
            return 0
        parts = self._require_tokenizer().encode_parts(instruction, None, add_special_tokens).parts
        return len(parts) - next((i for i, part in enumerate(reversed(parts)) if part is not None), len(parts))

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("the prompt is text, but there is no tokenizer; give token ids, or name a tokenizer")
        return self._tokenizer


def shorten(encoded: Encoded, most: int) -> Encoded:
    """Return `most` tokens: special ones, and the first of each text, of the longer text fewer than there are.

    That is the truncation `longest_first` of the tokenizers. Raises `RequestError` if special tokens leave no room.
    """
    sizes = [encoded.parts.count(0), encoded.parts.count(1)]
    special = len(encoded.parts) - sum(sizes)
    room = most - special
    if sum(sizes) <= room:
        return encoded
    if room < 1 + (sizes[1] > 0):
        raise RequestError(f"{most} tokens leave no room for text beside {special} special ones; allow more")
    short, long = sorted(sizes)
    long = room - min(short, room // 2)
    short = room - long
    kept = [short, long] if sizes[0] <= sizes[1] else [long, short]
    counts = [0, 0]
    chosen = []
    for index, part in enumerate(encoded.parts):
        if part is not None:
            counts[part] += 1
            if counts[part] > kept[part]:
                continue
        chosen.append(index)
    token_ids, type_ids, parts = encoded
    return Encoded(
        [token_ids[index] for index in chosen],
        [type_ids[index] for index in chosen],
        [parts[index] for index in chosen],
    )


def _text_of(prompt: Any) -> str | None:
    if isinstance(prompt, Mapping) and set(prompt) == {"prompt"}:
        prompt = prompt["prompt"]
    return prompt if isinstance(prompt, str) else None
