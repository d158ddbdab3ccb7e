"""The places of tokens in a text, compared with those that the `tokenizers` library reports."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import write

from quire.frontend.text.offsets import PromptOffsets, TextOffsets
from quire.frontend.text.tokenizer import Tokenizer

TEXTS = st.text(st.sampled_from([*"ab e,\n", "é", "œ", "日", "🙂", "😀", "👩", "\u200d"]), min_size=1, max_size=30)


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    special = {"bos_token": "<|begin|>"} if request.param == "byte_level" else {"bos_token": "<s>"}
    return Tokenizer(write(tmp_path_factory.mktemp("tokenizer"), request.param, **special))


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_the_places_in_a_text_are_those_of_its_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    offsets = PromptOffsets(tokenizer, text)
    assert [offsets.place(token) for token in encoding.ids] == [begin for begin, _ in encoding.offsets]


@pytest.mark.parametrize("text", ["a😀b", "<|begin|>a<|end|> b", "fox <|user|>"])
def test_special_tokens_around_a_text_have_no_place_and_those_in_it_have(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer(write(tmp_path, "byte_level", bos_token="<|begin|>"))
    encoding = tokenizer.backend.encode(text)
    offsets = PromptOffsets(tokenizer, text)
    places = [offsets.place(token) for token in encoding.ids]
    inner = tokenizer.backend.encode(text, add_special_tokens=False)
    assert len(encoding.ids) == len(inner.ids) + 1
    if text.startswith("<|begin|>"):  # which of the two is in the text can't be told
        assert places[2:] == [begin for begin, _ in inner.offsets][1:]
    else:
        assert places == [0, *(begin for begin, _ in inner.offsets)]


def test_all_tokens_of_a_prompt_without_a_text_are_shown(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, "byte_level", bos_token="<|begin|>"))
    token_ids = tokenizer.encode("a b")
    offsets = PromptOffsets(tokenizer, None)
    assert [offsets.place(token) for token in token_ids][:2] == [0, len("<|begin|>")]


def test_tokens_of_one_character_have_its_place_and_special_ones_have_no_width(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, "byte_level"))
    end = tokenizer.backend.token_to_id("<|end|>")
    assert end is not None
    token_ids = [
        *tokenizer.encode("a😀", add_special_tokens=False),
        end,
        *tokenizer.encode("b", add_special_tokens=False),
    ]
    hidden, shown = TextOffsets(tokenizer, begin=7), TextOffsets(tokenizer, begin=7, skip_special_tokens=False)
    places = [hidden.place(token) for token in token_ids]
    assert (places[0], set(places[1:-2]), places[-2:]) == (7, {8}, [9, 9])
    assert [shown.place(token) for token in token_ids][-2:] == [9, 9 + len("<|end|>")]


def test_a_character_may_begin_in_the_tokens_before(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, "byte_level"))
    *before, last = tokenizer.encode("😀", add_special_tokens=False)
    assert before
    offsets = TextOffsets(tokenizer, before)
    assert [offsets.place(last), offsets.place(last)] == [0, 1]


def test_without_a_tokenizer_there_is_no_text() -> None:
    offsets = TextOffsets(None, [1], 0)
    assert [offsets.place(token) for token in (1, 2)] == [0, 0]
