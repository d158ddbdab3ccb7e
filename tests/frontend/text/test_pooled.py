"""Texts that are pooled: instructions, pairs, and truncation as the tokenizers library has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pooled_checkpoints import write_tokenizer

from quire.frontend.errors import RequestError
from quire.frontend.text.pooled import PooledTexts
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.pooling_info import PoolingInfo

FOX, KING = "Once upon a time there was a fox", "the fox said: I'll eat you!"
BERT = PoolingInfo(generates=False, is_encoder=True, num_token_types=2)
INSTRUCTED = PoolingInfo(
    pooling_type="mean", prompts={"query": "fox the ", "none": ""}, default_prompt_name="query", includes_prompt=False
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def texts(model: PoolingInfo, tokenizer: Tokenizer, max_model_len: int = 64) -> PooledTexts:
    """Return the maker of prompts of a model with this context."""
    return PooledTexts(model, tokenizer, tokenizer.vocab_size, max_model_len)


def test_a_pair_has_the_tokenizer_s_form(tokenizer: Tokenizer) -> None:
    prompt = texts(BERT, tokenizer).pair(FOX, KING)
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (FOX, KING))
    begin, end = tokenizer.token_id("[CLS]"), tokenizer.token_id("[SEP]")
    assert prompt.token_ids == [begin, *first, end, *second, end]
    assert prompt.segment == len(first) + 2
    assert texts(PoolingInfo(is_encoder=True), tokenizer).pair(FOX, KING).segment == 0


@given(st.integers(0, 12), st.integers(0, 12), st.integers(5, 30))
def test_truncation_is_that_of_the_tokenizers_library(
    tokenizer: Tokenizer, num_first: int, num_second: int, most: int
) -> None:
    first, second = "fox " * num_first + "fox", "time " * num_second + "time"
    reference = Tokenizer(tokenizer.path).backend
    reference.enable_truncation(most, strategy="longest_first")
    pair, single = reference.encode(first, second), reference.encode(first)
    prompt = texts(BERT, tokenizer).pair(first, second, truncate_prompt_tokens=most)
    assert (prompt.token_ids, prompt.segment) == (pair.ids, pair.type_ids.index(1))
    assert texts(BERT, tokenizer).prompt(first, truncate_prompt_tokens=most).token_ids == single.ids


def test_truncation_to_the_context_keeps_the_last_tokens_for_a_decoder(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode(FOX)
    assert texts(PoolingInfo(), tokenizer, 6).prompt(FOX, truncate_prompt_tokens=-1).token_ids == whole[-6:]
    cut = texts(BERT, tokenizer, 6).prompt(FOX, truncate_prompt_tokens=-1).token_ids
    assert cut == [*whole[:5], whole[-1]]


def test_an_instruction_is_put_before_a_text_and_left_out_of_the_mean(tokenizer: Tokenizer) -> None:
    maker = texts(INSTRUCTED, tokenizer)
    prompt = maker.prompt(FOX)
    assert prompt.token_ids == tokenizer.encode("fox the " + FOX)
    assert prompt.num_skipped == 3  # [CLS] fox the
    for name in ("", "none"):
        assert maker.prompt(FOX, prompt_name=name).token_ids == tokenizer.encode(FOX)
        assert maker.prompt(FOX, prompt_name=name).num_skipped == 0
    assert maker.prompt([4, 5, 6]).token_ids == [4, 5, 6]


def test_lowercase_texts(tokenizer: Tokenizer) -> None:
    maker = texts(PoolingInfo(lowercase=True), tokenizer)
    assert maker.prompt("ONCE Upon").token_ids == tokenizer.encode("once upon")


def test_what_is_not_possible_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="prompt_name='x' is not one of the model's prompts; it has 'query', 'none'"):
        texts(INSTRUCTED, tokenizer).prompt(FOX, prompt_name="x")
    with pytest.raises(RequestError, match="instruction is not possible"):
        texts(BERT, tokenizer).pair(FOX, KING, instruction="Look.")
    with pytest.raises(RequestError, match="4 tokens leave no room for text beside 3 special ones"):
        texts(BERT, tokenizer).pair(FOX, KING, truncate_prompt_tokens=4)
    with pytest.raises(RequestError, match="truncate_prompt_tokens=0 leaves no tokens"):
        texts(BERT, tokenizer).prompt(FOX, truncate_prompt_tokens=0)
    with pytest.raises(RequestError, match="give some text on both sides"):
        texts(BERT, tokenizer).pair(FOX, "")
    with pytest.raises(RequestError, match="there is no tokenizer"):
        PooledTexts(BERT, None, 100, 64).pair(FOX, KING)


def test_the_tokenizer_s_own_truncation_and_padding_are_off(tokenizer: Tokenizer) -> None:
    """write_tokenizer saves both, as sentence-transformers does."""
    assert "truncation" in (Path(tokenizer.path) / "tokenizer.json").read_text()
    assert len(tokenizer.encode("fox " * 50)) == 52
    assert len(tokenizer.encode("fox")) == 3
