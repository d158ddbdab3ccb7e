"""Speculative decoding changes no bit, keeps the pages, follows what it costs, and rejects what it cannot do."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import compare_speculation
import pytest
from gguf_files import write_gguf
from memory_pressure import under_pressure

from quire.frontend import LLM, BeamSearchParams, EngineStartError, SamplingParams, StructuredOutputsParams
from quire.protocol.speculative_config import METHODS, parse_speculative_config

if TYPE_CHECKING:
    from conftest import EngineFactory

REQUESTS = 48
NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 6}
SUFFIX: dict[str, Any] = {"method": "suffix"}
Given = tuple[list[str], list[SamplingParams]]


@pytest.fixture(scope="module")
def given() -> Given:
    return compare_speculation.requests(REQUESTS, 3, 48)


def answers(llm: LLM, given: Given) -> list[Any]:
    """Return all that must be equal of the answers; the third request is alone."""
    prompts, params = given
    alone = llm.generate(prompts[2:3], params[2:3], use_tqdm=False)
    return [compare_speculation.answer(output) for output in alone + llm.generate(prompts, params, use_tqdm=False)]


def totals(llm: LLM) -> dict[str, Any]:
    found: dict[str, Any] = llm.stats()["totals"]["speculation"]
    return found


def assert_counts_add_up(llm: LLM) -> None:
    """Something was accepted, and positions are accepted in order."""
    counts = totals(llm)
    per_position = counts["accepted_per_position"]
    assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"]
    assert sum(per_position) == counts["accepted_tokens"]
    assert per_position == sorted(per_position, reverse=True)
    assert per_position[0] <= counts["drafts"]


OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "chunks": {"max_num_batched_tokens": 64},
    "few-pages": {"num_pages": 20},
    "no-cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_drafts_change_no_bit(options: str, given: Given, demo_model: Path, engine: EngineFactory) -> None:
    """Whether there are as many as pay, or as many as can be."""
    expected = answers(engine(demo_model, **OPTIONS[options]), given)
    drafts = [{"method": "draft_model", "model": str(demo_model), "quantization": "int4"}, NGRAM, SUFFIX]
    for drafting in drafts:
        config = {**drafting, "adaptive": options == "bfloat16"}
        llm = engine(demo_model, speculative_config=config, **OPTIONS[options])
        ask = functools.partial(answers, llm, given)
        assert (under_pressure(llm, ask) if options == "few-pages" else ask()) == expected, config
        assert_counts_add_up(llm)


def test_a_draft_model_that_is_the_target_is_always_right(demo_model: Path, engine: EngineFactory) -> None:
    """Also for sampled requests, as both sample with the same random numbers. It does not pay, so there are few."""
    config = {"method": "draft_model", "model": str(demo_model), "num_speculative_tokens": 3}
    llm = engine(demo_model, speculative_config=config)
    params = SamplingParams(temperature=1.0, max_tokens=64, seed=5, ignore_eos=True)
    for _ in range(50):  # by how long steps took, none may be tried for a while
        llm.generate(["Once upon a time"], params, use_tqdm=False)
        if (counts := totals(llm))["draft_tokens"]:
            break
    assert counts["draft_tokens"] == counts["accepted_tokens"] > 0


def test_drafts_that_a_grammar_does_not_allow_are_not_computed(demo_model: Path, engine: EngineFactory) -> None:
    """A model drafts words, where digits are to come."""
    config = {"method": "draft_model", "model": str(demo_model), "num_speculative_tokens": 3, "adaptive": False}
    plain, llm = engine(demo_model), engine(demo_model, speculative_config=config)
    for regex, num_drafts in ((r"[0-9]{25}", 0), (r"[0-9]{3}[a-z ]{20}", 1)):
        grammar = StructuredOutputsParams(regex=regex)
        params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=grammar, logprobs=1)
        outputs = [each.generate(["Once upon a time"], params, use_tqdm=False) for each in (plain, llm)]
        assert compare_speculation.answer(outputs[0][0]) == compare_speculation.answer(outputs[1][0])
        assert totals(llm)["draft_tokens"] >= num_drafts
        assert totals(llm)["draft_tokens"] <= 60 * num_drafts


def test_forced_tokens_are_drafts_where_their_log_probabilities_are_wanted(
    demo_model: Path, engine: EngineFactory
) -> None:
    """Without any configuration. They are the tokens that one sampled token at a time gives."""
    llm = engine(demo_model)
    properties = {"a_long_name": {"enum": ["raven", "fox"]}}
    names = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    grammar = StructuredOutputsParams(json=names, disable_any_whitespace=True)
    params = [SamplingParams(temperature=0, structured_outputs=grammar, logprobs=count) for count in (None, 2)]
    skipped, drafted = [llm.generate(["Once"], each, use_tqdm=False)[0].outputs[0] for each in params]
    assert skipped.token_ids == drafted.token_ids
    counts = totals(llm)
    assert counts["draft_tokens"] > len(drafted.token_ids) // 2
    assert counts["accepted_tokens"] >= counts["draft_tokens"] - 1  # none is sampled after the last token
    assert drafted.logprobs is not None
    (given,) = llm.generate(
        {"prompt_token_ids": [*llm.get_tokenizer().encode("Once"), *drafted.token_ids]},
        SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False,
    )  # fmt: skip
    alone = (given.prompt_logprobs or [])[-len(drafted.token_ids) :]
    assert [(entry or {})[token].logprob for entry, token in zip(alone, drafted.token_ids, strict=True)] == [
        entry[token].logprob for entry, token in zip(drafted.logprobs, drafted.token_ids, strict=True)
    ]


def test_an_answer_seen_before_is_drafted(demo_model: Path, engine: EngineFactory) -> None:
    """Only under the same cache salt."""
    llm = engine(demo_model, speculative_config=SUFFIX)
    params = SamplingParams(temperature=0.8, seed=9, max_tokens=96, ignore_eos=True)

    def accepted(salt: str) -> int:
        before = int(totals(llm)["accepted_tokens"])
        llm.generate("A raven sat on a tree", params, use_tqdm=False, cache_salt=salt)
        return int(totals(llm)["accepted_tokens"]) - before

    first = accepted("a")
    again, other = max(accepted("a") for _ in range(5)), accepted("b")  # how many pay depends on the machine's load
    assert again > 20
    assert again > max(first, other)


def test_a_prediction_speeds_up_the_answer_that_it_predicts(demo_model: Path, engine: EngineFactory) -> None:
    """Without any configuration, and whatever the prediction is."""
    llm, prompt = engine(demo_model), "Once upon a time there was a king"
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=120, ignore_eos=True)
    (plain,) = llm.generate(prompt, params, use_tqdm=False)
    assert plain.outputs[0].num_accepted_drafts == totals(llm)["drafts"] == 0
    text = plain.outputs[0].text
    changed = text[: len(text) // 2] + " BUT " + text[len(text) // 2 + 20 :]
    for prediction, least in ((text, 60), (changed, 40), ("the weather is fine today, " * 9, 0)):
        accepted = []
        for _ in range(4):  # how many drafts pay depends on the machine's load
            (output,) = llm.generate({"prompt": prompt, "prediction": prediction}, params, use_tqdm=False)
            own = output.outputs[0]
            assert (own.token_ids, own.text) == (plain.outputs[0].token_ids, text)
            accepted.append(own.num_accepted_drafts)
        assert max(accepted) >= least
    assert totals(llm)["accepted_tokens"] > 100


def test_beam_searches_and_embeddings_run_beside(demo_model: Path, engine: EngineFactory) -> None:
    plain, llm = engine(demo_model), engine(demo_model, speculative_config=SUFFIX)
    for each in (plain, llm):
        each.generate("The fox and the fox and the fox", SamplingParams(max_tokens=40), use_tqdm=False)
    for width in (1, 3):
        beams = BeamSearchParams(beam_width=width, max_tokens=30)
        found = [each.beam_search(["The fox and the fox and the"], beams)[0].sequences for each in (plain, llm)]
        assert [beam.tokens for beam in found[0]] == [beam.tokens for beam in found[1]]
    vectors = [each.embed("The fox", use_tqdm=False)[0].outputs.embedding for each in (plain, llm)]
    assert vectors[0] == vectors[1]


def test_requests_that_end_in_the_middle_of_drafts_hold_no_page(demo_model: Path, engine: EngineFactory) -> None:
    """`engine` counts the pages at its end."""
    llm = engine(demo_model, speculative_config={**NGRAM, "num_speculative_tokens": 16})
    prompt = "the fox and the crow and " * 12
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in range(1, 40)]
    outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 40))


def test_synthetic_acceptance(demo_model: Path, engine: EngineFactory) -> None:
    """Where all drafts pay, as they do at one stream but in a busy moment, a step gives that many tokens."""
    config = {"method": "ngram", "num_speculative_tokens": 2, "synthetic_acceptance_length": 2.5}
    llm = engine(demo_model, speculative_config=config)
    for _ in range(20):
        llm.generate(["A raven"], SamplingParams(max_tokens=1000, ignore_eos=True), use_tqdm=False)
        if (counts := totals(llm))["drafts"] > 100:
            break
    assert counts["draft_tokens"] > 1.2 * counts["drafts"] > 100
    assert counts["accepted_tokens"] / counts["drafts"] == pytest.approx(1.5, abs=0.25)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[1]", r"speculative_config='\[1\]' is not a JSON object"),
        ({}, "method is None; it must be one of ngram, suffix, draft_model"),
        ({"method": "medusa"}, "method is 'medusa'; it must be one of ngram, suffix, draft_model"),
        ({"method": "ngram", "tree": 1}, "tree is not supported; supported are method, num_speculative_tokens"),
        ({"method": "ngram", "model": "x"}, "model does not belong to method ngram"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"method": "ngram", "prompt_lookup_min": 7, "prompt_lookup_max": 3}, "above the prompt_lookup_max of 3"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 2}, "min_token_prob is 2; it must be a number"),
        ({"method": "draft_model"}, "model is missing; method draft_model needs the folder"),
        ({"method": "ngram", "synthetic_acceptance_length": 12}, "it can be at most 9"),
    ],
)
def test_what_is_not_possible_is_rejected(config: Any, message: str, demo_model: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(demo_model), speculative_config=config)


def test_a_bound_of_the_match_stands_for_the_other() -> None:
    config = parse_speculative_config('{"method": "ngram", "prompt_lookup_max": 3}')
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 3)
    assert all(parse_speculative_config(json.dumps({"method": name, "model": None})) for name in METHODS[:2])


def test_a_draft_model_may_be_a_gguf_file(demo_model: Path, tmp_path: Path, engine: EngineFactory) -> None:
    write_gguf(demo_model, tmp_path / "draft.gguf", "Q8_0")
    config = {"model": str(tmp_path / "draft.gguf"), "num_speculative_tokens": 2, "adaptive": False}
    llm = engine(demo_model, speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    assert totals(llm)["accepted_tokens"] > 0
    (plain,) = engine(demo_model).generate("Once upon a time", params, use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_draft_model_with_another_vocabulary_is_rejected(demo_model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(demo_model, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(EngineStartError, match="have different tokens; a draft model must have the same vocabulary"):
        LLM(str(demo_model), speculative_config=json.dumps({"model": str(other)}))
