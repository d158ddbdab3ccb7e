"""Prompts in the forms of llama.cpp's API: texts, token ids, and both in one list."""

from __future__ import annotations

from collections.abc import Sequence

from quire.frontend.http.errors import bad_request
from quire.frontend.http.llama_cpp.body import GivenPrompt, PromptObject
from quire.frontend.http.service import ModelService
from quire.frontend.text.prompts import check_text
from quire.frontend.text.tokenizer import Tokenizer

OnePrompt = str | list[int] | list[int | str]


def split(given: GivenPrompt, field: str) -> tuple[list[OnePrompt], bool]:
    """Return the prompts of `field`, and whether they are one that is not in a list of prompts. Raises `ApiError` 400.

    A list of token ids is one prompt, and so is one of token ids and texts; a list of texts is as many.
    """
    if not isinstance(given, list):
        return [_one(given, field)], True
    if not given:
        raise bad_request(f"{field} is an empty list; give at least one prompt", field)
    kinds = set(map(type, given))
    if kinds in ({int}, {int, str}):
        return [[part for part in given if isinstance(part, (int, str))]], True
    if int in kinds:
        raise bad_request(f"{field} mixes token ids and prompts; give a list of either", field)
    return [_one(part, f"{field}[{index}]") for index, part in enumerate(given)], False


def _one(part: str | int | list[int | str] | PromptObject, where: str) -> OnePrompt:
    if isinstance(part, PromptObject):
        if part.multimodal_data:
            raise bad_request(
                f"{where}.multimodal_data is not supported: only text is; leave it out",
                f"{where}.multimodal_data",
                "unsupported_parameter",
            )
        return part.prompt_string
    assert not isinstance(part, int)
    return part


async def with_ids(service: ModelService, prompts: Sequence[OnePrompt]) -> list[str | list[int]]:
    """Return `prompts` with token ids in the place of texts in those that mix both. Raises `ApiError` 400."""
    return [await _plain(service, prompt) for prompt in prompts]


async def _plain(service: ModelService, prompt: OnePrompt) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    texts = [part for part in prompt if isinstance(part, str)]
    if not texts:
        return [part for part in prompt if isinstance(part, int)]
    encoded = iter(await encode_all(service, texts, must_fit=True))
    found = leading_tokens(service.require_tokenizer()) if isinstance(prompt[0], str) else []
    for part in prompt:
        found += [part] if isinstance(part, int) else next(encoded)
    return found


async def encode_all(service: ModelService, texts: Sequence[str], *, must_fit: bool) -> list[list[int]]:
    """Return the token ids of several texts of one prompt, which will be cut unless they `must_fit` the context.

    Raises `RequestError` if they are too long.
    """
    tokenizer, most = service.require_tokenizer(), service.llm.max_model_len

    def encode() -> list[list[int]]:
        check_text("".join(texts), tokenizer, most, must_fit=must_fit)
        return tokenizer.encode_batch(texts, add_special_tokens=False)

    return await service.llm.run_long(encode, texts)


def leading_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the token that the tokenizer puts before a text, if there is one."""
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and tokenizer.encode("")[:1] == [begin] else []
