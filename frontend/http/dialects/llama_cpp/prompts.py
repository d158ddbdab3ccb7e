"""Prompts in the forms of llama.cpp's API: texts, token ids, and both in one list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from quire.frontend.http.dialects.llama_cpp.body import GivenPrompt, PromptObject
from quire.frontend.http.errors import bad_request
from quire.frontend.http.service import ModelService
from quire.frontend.http.transport.bodies import MAX_ITEMS
from quire.frontend.text.prompts import check_text

OnePrompt = str | list[int] | list[int | str]


def split(service: ModelService, given: GivenPrompt, field: str) -> tuple[list[OnePrompt], bool]:
    """Return the prompts of `field`, and whether they are one that is not in a list of prompts. Raises `ApiError` 400.

    A list of token ids is one prompt, and so is one of token ids and texts; a list of texts is as many.
    """
    if not isinstance(given, list):
        return [_one(given, field)], True
    if not given:
        raise bad_request(f"{field} is an empty list; give at least one prompt", field)
    _check_length(service, given, field, service.args.max_prompts)
    kinds = set(map(type, given))
    if kinds in ({int}, {int, str}):
        return [cast("list[int | str]", given)], True
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
    most = service.llm.max_model_len + MAX_ITEMS
    if len(prompt) > most:
        raise bad_request(
            f"a prompt has {len(prompt)} token ids and texts, and {most} are allowed; shorten it", "prompt"
        )
    texts = [part for part in prompt if isinstance(part, str)]
    if not texts:
        return [part for part in prompt if isinstance(part, int)]
    encoded = await encode_all(service, texts, must_fit=True)
    parts = iter(encoded.parts)
    found = [*encoded.lead] if isinstance(prompt[0], str) else []
    for part in prompt:
        found += [part] if isinstance(part, int) else next(parts)
    return found


def _check_length(service: ModelService, given: Sequence[object], field: str, least: int = 0) -> None:
    """Raise `ApiError` 400 for more token ids and texts than a prompt can have, before they are looked at."""
    most = max(service.llm.max_model_len + MAX_ITEMS, least)
    if len(given) > most:
        raise bad_request(f"{field} has {len(given)} token ids and texts, and {most} are allowed; shorten it", field)


class EncodedTexts(NamedTuple):
    """The token ids of several texts, and the token that the tokenizer puts before a prompt, if they need one."""

    lead: list[int]
    parts: list[list[int]]


async def encode_all(service: ModelService, texts: Sequence[str], *, must_fit: bool) -> EncodedTexts:
    """Return the token ids of several texts of one prompt, which will be cut unless they `must_fit` the context.

    Raises `RequestError` if they are too long.
    """
    tokenizer, most = service.require_tokenizer(), service.llm.max_model_len

    def encode() -> EncodedTexts:
        check_text("".join(texts), tokenizer, most, must_fit=must_fit)
        parts = tokenizer.encode_batch(texts, add_special_tokens=False)
        has_lead = bool(parts) and parts[0][:1] == tokenizer.lead
        return EncodedTexts([] if has_lead else tokenizer.lead, parts)

    return await service.llm.run_long(encode, texts)
