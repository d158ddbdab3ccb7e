"""Sampling parameters: validation, and the parameters that the engine sees."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from quire.frontend.sampling import SamplingParams, SeedSource, check_length, engine_params, validate
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import MAX_COMPLETIONS, MAX_SEED, StructuredOutputs


def test_what_vllm_takes_for_off_is_off() -> None:
    params = validate(SamplingParams(top_k=-1, stop="\n", temperature=0))  # type: ignore[arg-type]
    assert (params.top_k, params.stop, params.temperature) == (0, ["\n"], 0.0)


def test_the_given_parameters_are_left_as_they_are() -> None:
    given_params = SamplingParams(stop=["a"], top_k=-1)
    checked = validate(given_params)
    assert checked.stop is not None
    checked.stop.append("b")
    assert (given_params.stop, given_params.top_k) == (["a"], -1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n=0 is out of range; it must be from 1 to 1024"),
        ({"n": MAX_COMPLETIONS + 1}, "n=1025"),
        ({"temperature": -0.1}, r"temperature=-0\.1"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_p": 1.01}, "top_p=1.01 is out of range; it must be from 0 to 1"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_k": 2.5}, r"top_k=2\.5 is of the wrong type"),
        ({"min_p": 1.5}, r"min_p=1\.5"),
        ({"presence_penalty": 2.1}, r"presence_penalty=2\.1"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3"),
        ({"repetition_penalty": 0}, r"repetition_penalty=0\.0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": MAX_SEED + 1}, f"seed={MAX_SEED + 1}"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens=20 is more than max_tokens=10"),
        ({"logprobs": 21}, "logprobs=21"),
        ({"best_of": 0}, "best_of=0"),
        ({"n": 3, "best_of": 2}, "best_of=2 is less than n=3"),
        ({"beam_width": -1}, "beam_width=-1"),
        ({"beam_width": 2, "n": 3}, "n=3 is more than beam_width=2"),
        ({"beam_width": 2, "stop": ["a"]}, r"stop=\['a'\] has no meaning in a beam search"),
        ({"beam_width": 2, "best_of": 2}, "best_of=2 has no meaning in a beam search"),
        ({"length_penalty": math.nan}, "length_penalty=nan"),
        ({"early_stopping": "always"}, "early_stopping='always' is of the wrong type"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
        ({"stop": ["a", ""]}, "holds an empty string"),
        ({"bad_words": [" "]}, "holds an empty string"),
        ({"bad_words": ["a\ud800"]}, "lone surrogate"),
        ({"stop": ["a"], "detokenize": False}, "detokenize=False"),
        ({"stop_token_ids": [100]}, "stop_token_ids names token id 100; ids go from 0 to 99"),
        ({"allowed_token_ids": []}, "allows nothing"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids names token id -1"),
        ({"bad_words_token_ids": [[1], []]}, "at least one token id"),
        ({"logit_bias": {3: 101.0}}, r"logit_bias\[3\]=101\.0"),
        ({"logit_bias": {100: 1.0}}, "logit_bias names token id 100"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias="),
        ({"detokenize": 1}, "detokenize=1"),
    ],
)
def test_a_bad_field_is_named_with_what_is_allowed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(SamplingParams(**fields), vocab_size=100)


def test_a_length_beyond_the_context_says_what_fits() -> None:
    with pytest.raises(ValueError, match="lower max_tokens to 1096 or less"):
        check_length(SamplingParams(max_tokens=5000), 3000, 4096)
    with pytest.raises(ValueError, match="this model's maximum context length is 4096 tokens; lower min_tokens"):
        check_length(SamplingParams(max_tokens=None, min_tokens=5000), 3000, 4096)
    with pytest.raises(ValueError, match="shorten it to 4095 or less"):
        check_length(SamplingParams(max_tokens=None), 4096, 4096)
    with pytest.raises(ValueError, match="more KV memory"):
        check_length(SamplingParams(), 64, 4096, pool_tokens=64)
    check_length(SamplingParams(max_tokens=1096), 3000, 4096)


def test_the_engine_sees_n_requests_with_derived_seeds_and_no_text(demo_model: Path) -> None:
    params = validate(SamplingParams(n=3, stop=["x"], prompt_logprobs=1, include_stop_str_in_output=True))
    each = engine_params(params, MAX_SEED, Tokenizer(demo_model))
    assert [one.seed for one in each] == [MAX_SEED, 0, 1]
    assert [one.prompt_logprobs for one in each] == [1, None, None]
    assert all((one.n, one.stop, one.include_stop_str_in_output) == (1, None, False) for one in each)


def test_bad_words_become_a_grammar(demo_model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(demo_model)
    params = validate(SamplingParams(bad_words=["the", " king"], bad_words_token_ids=[[7]]))
    [only] = engine_params(params, 0, tokenizer)
    assert (only.bad_words, only.bad_words_token_ids) == (None, [[7]])
    assert only.structured_outputs is not None
    assert only.structured_outputs.kinds == ["grammar"]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        engine_params(params, 0, None)
    (tmp_path / "tokenizer.json").write_bytes((demo_model / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json, and there is none; use bad_words_token_ids"):
        engine_params(params, 0, tokenizer)


@pytest.mark.parametrize("is_skipped", [True, False])
def test_special_tokens_within_a_bad_word_do_not_hide_it(tmp_path: Path, is_skipped: bool) -> None:
    """Those that the text does not show vanish from it; the others part what is beside them."""
    letters = ["t", "h", "e", "<", ">", "|"]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({each: number for number, each in enumerate(letters)}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|a|>", "<|e|>", "|the|", "<|eos|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    params = validate(SamplingParams(bad_words=["the", "e<|a"], skip_special_tokens=is_skipped))
    [only] = engine_params(params, 0, tokenizer)
    assert only.structured_outputs is not None
    grammar = LLMatcher.grammar_from_lark(only.structured_outputs.grammar or "")
    fresh = LLMatcher(LLTokenizer(backend.to_str(), eos_token=9), grammar)
    assert fresh.deep_copy().try_consume_tokens([0, 1, 7, 5]) == (2 if is_skipped else 4)
    for ids in itertools.product(range(9), repeat=4):
        if fresh.deep_copy().try_consume_tokens(list(ids)) == 4:
            text = tokenizer.decode(ids, skip_special_tokens=is_skipped)
            assert not [word for word in ("the", "e<|a") if word in text], (ids, text)


def test_bad_words_beside_a_grammar_become_the_tokens_of_both_forms(demo_model: Path) -> None:
    tokenizer = Tokenizer(demo_model)
    answer = StructuredOutputs(regex=".*")
    params = SamplingParams(bad_words=["the", " king", "who"], bad_words_token_ids=[[7]], structured_outputs=answer)
    [only] = engine_params(validate(params), 0, tokenizer)
    assert only.structured_outputs == answer
    assert only.bad_words_token_ids is not None
    assert only.bad_words_token_ids[0] == [7]
    texts = [tokenizer.decode(ids) for ids in only.bad_words_token_ids[1:]]
    assert texts == ["the", " the", "king", " king", "who", " who"]


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"stop=\['x'\] needs a tokenizer; use stop_token_ids"):
        engine_params(validate(SamplingParams(stop="x")), 0, None)  # type: ignore[arg-type]
    assert engine_params(validate(SamplingParams(stop=[])), 0, None)[0].stop is None


def test_a_bad_word_that_has_no_tokens_is_refused(tmp_path: Path) -> None:
    """BPE that knows neither bytes nor an unknown token drops the characters that it has not."""
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    answer = StructuredOutputs(regex=".*")
    with pytest.raises(ValueError, match=r"bad_words=\['a', 'é'\]: the tokenizer has no tokens for 'é'; leave it out"):
        engine_params(SamplingParams(bad_words=["a", "é"], structured_outputs=answer), 0, tokenizer)
    [only] = engine_params(SamplingParams(bad_words=["ab"], structured_outputs=answer), 0, tokenizer)
    assert only.bad_words_token_ids == [[0, 1]]


@given(st.integers(min_value=0, max_value=MAX_SEED))
def test_the_same_seed_gives_the_same_seeds(seed: int) -> None:
    first, second = SeedSource(seed), SeedSource(seed)
    seeds = [first.next() for _ in range(4)]
    assert seeds == [second.next() for _ in range(4)]
    assert len(set(seeds)) == 4
    assert all(0 <= each <= MAX_SEED for each in seeds)


def test_without_a_seed_every_source_differs() -> None:
    assert SeedSource().next() != SeedSource().next()
