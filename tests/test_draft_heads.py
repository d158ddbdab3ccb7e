"""Draft heads (EAGLE, EAGLE-3) compute what torch does, and drafts of theirs change no bit."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from memory_pressure import under_pressure
from reference_libraries import import_reference

from quire.frontend import LLM, EngineStartError, SamplingParams
from quire.kernels.draft_head import DraftHead, features_for, load_draft_head
from quire.kernels.errors import ModelError
from quire.kernels.options import LoadOptions
from quire.kernels.runner import ModelRunner, PreparedModel, SamplingConfig
from quire.kernels.step import StepInput

if TYPE_CHECKING:
    from conftest import EngineFactory

heads = import_reference("draft_heads")

METHODS = {"eagle3": "eagle3", "confu": "eagle3", "eagle": "eagle"}
"""Methods by heads: confu is an EAGLE-3 head with a lookahead token."""
PROMPTS = [[random.Random(number).randrange(heads.VOCAB) for _ in range(6 + 7 * number)] for number in range(8)]
LONG = [random.Random(99).randrange(heads.VOCAB) for _ in range(700)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = heads.write_target(tmp_path_factory.mktemp("target"))
    return folder


def load(folder: Path, method: str, target: Path, **options: Any) -> tuple[ModelRunner, DraftHead]:
    """Load a model and its head."""
    given = LoadOptions(str(target), num_pages=64, **{"dtype": "float32", **options})
    runner = PreparedModel(given, features=features_for(str(folder), METHODS[method], given)).open()
    return runner, load_draft_head(str(folder), METHODS[method], given, given, runner)


def features_after(runner: ModelRunner, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Return the features of tokens, computed in two steps."""
    slot = runner.sequences.open(tokens, len(tokens), sampling=SamplingConfig(temperature=0))
    runner.sequences.start(slot, len(tokens))
    found = []
    for start, count in ((0, 17), (17, len(tokens) - 17)):
        runner.run(StepInput([slot], [start], [count]))
        found.append(np.concatenate([rows[:count] for rows in runner.features()], axis=1))
    return np.concatenate(found)


@pytest.mark.parametrize("variant", ["eagle3", "eagle", "confu", "speculators"])
def test_a_head_computes_what_torch_does(variant: str, target: Path, tmp_path: Path) -> None:
    """Also when it drafts on from its own hidden states."""
    method, tokens, size = variant.replace("speculators", "eagle3"), PROMPTS[5], 30
    head = heads.new_head(method, target, norm_before_residual=variant == "speculators")
    config = heads.head_config(method)
    if variant == "speculators":
        (outer, layer) = ("architectures", "draft_vocab_size"), dict(config)
        own = {name: layer.pop(name) for name in outer} | {"eagle_aux_hidden_state_layer_ids": list(heads.KEPT)}
        del layer["eagle_config"]
        config = {**own, "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
        config["transformer_layer_config"] = layer
    expected = heads.reference_logprobs(head, target, tokens, 3)
    runner, loaded = load(heads.write_head(tmp_path, head, config), method, target)
    features = features_after(runner, tokens)
    if variant == "confu":
        features = np.concatenate([features, np.zeros_like(features)], axis=1)
    sampling = SamplingConfig(temperature=0, logprobs=5)
    slot = loaded.sequences.open(tokens[1 : size + 1], size, sampling=sampling, cache_salt=None)
    loaded.sequences.start(slot, size + 4)
    loaded.run(StepInput([slot], [0], [11]), [features[:11]])
    result = loaded.run(StepInput([slot], [11], [size - 11]), [features[11:size]])
    for number in range(3):
        if number:
            loaded.sequences.truncate(slot, size + number - 1, recompute_last=False)
            loaded.sequences.append(slot, tokens[size + number])
            result = loaded.go_on([0], StepInput([slot], [size + number - 1], [1]))
        logprobs = result.logprobs(0)
        assert logprobs is not None
        ids, values, _ = logprobs[0]
        assert values == pytest.approx([expected[number][size - 1, token].item() for token in ids], abs=1e-4)
        assert ids[0] == expected[number][size - 1].argmax()


def test_features_are_kept_only_where_they_are_wanted(target: Path, tmp_path: Path) -> None:
    """Without them, a step computes the same, and leaves those of the step before."""
    runner, _ = load(heads.write_head(tmp_path, heads.new_head("eagle3", target)), "eagle3", target)
    slots = [
        runner.sequences.open(prompt, len(prompt), sampling=SamplingConfig(temperature=0)) for prompt in PROMPTS[3:5]
    ]
    results = []
    for slot, prompt, keeps in zip(slots, PROMPTS[3:5], (True, False), strict=True):
        runner.set_keeps_features(keeps)
        runner.sequences.start(slot, len(prompt) + 1)
        runner.run(StepInput([slot], [0], [len(prompt)]))
        results.append([rows[: len(prompt)].copy() for rows in runner.features()])
    count = len(PROMPTS[3])
    assert all(np.array_equal(kept, later[:count]) for kept, later in zip(*results, strict=True))
    again = runner.sequences.open(PROMPTS[4], len(PROMPTS[4]), sampling=SamplingConfig(temperature=0), cache_salt=None)
    runner.set_keeps_features(True)
    runner.sequences.start(again, len(PROMPTS[4]) + 1)
    runner.run(StepInput([again], [0], [len(PROMPTS[4])]))
    assert not np.array_equal(runner.features()[0][:count], results[0][0])
    tokens = [runner.sequences.tail(slot, len(PROMPTS[4])) for slot in (slots[1], again)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_lookahead_token_is_computed_as_a_token_is(dtype: str, target: Path, tmp_path: Path) -> None:
    """Its embedding is that of a token here, and so all its features are that token's."""
    token, prompt, folder = 77, PROMPTS[4], heads.write_head(tmp_path, heads.new_head("confu", target))
    runner, _ = load(folder, "confu", target, dtype=dtype)
    greedy = SamplingConfig(temperature=0)
    known, other = (runner.sequences.open(prompt, len(prompt), sampling=greedy) for _ in range(2))
    for slot in (known, other):
        runner.sequences.start(slot, len(prompt) + 8)
    (answer,) = runner.run(StepInput([known], [0], [len(prompt)])).token_ids
    runner.sequences.append(known, token)
    runner.run(StepInput([known], [len(prompt)], [2]))
    expected = [rows[1].copy() for rows in runner.features()]
    runner.run(StepInput([other], [0], [len(prompt)]))
    for draft in (1, 2):
        runner.sequences.append(other, draft)
    runner.set_lookahead(heads.embedding_of(target, token, dtype))
    result = runner.run(StepInput([other], [len(prompt)], [3], [2], [(0, [5, 6]), (0, [])]))
    assert result.lookahead_rows == {0: 3 + 3 + 1}
    for rows, row in zip(runner.features(), expected, strict=True):
        assert np.array_equal(rows[result.lookahead_rows[0]], row)
    assert answer
    assert not np.array_equal(runner.features()[-1][1], expected[-1])
    free = runner.sequences.free_pages + runner.sequences.cached_pages
    with pytest.raises(ValueError, match="it must have drafts and no constraint"):
        runner.run(StepInput([other], [len(prompt)], [1], [0], [(0, [])]))
    assert runner.sequences.free_pages + runner.sequences.cached_pages == free


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_head_may_be_quantized_and_its_model_too(quantization: str, target: Path, tmp_path: Path) -> None:
    """They share matrices in whatever format the model has them."""
    folder = heads.write_head(tmp_path, heads.new_head("eagle", target))
    runner, loaded = load(folder, "eagle", target, quantization=quantization)
    features = features_after(runner, PROMPTS[5])
    slot = loaded.sequences.open(PROMPTS[5][1:], 40, sampling=SamplingConfig(temperature=0), cache_salt=None)
    loaded.sequences.start(slot, 50)
    assert loaded.run(StepInput([slot], [0], [40]), [features[:40]]).token_ids[0]


def greedy(target: Path) -> list[list[int]]:
    """Return the prompts with greedy answers, 100 tokens each."""
    params = [SamplingParams(temperature=0, max_tokens=100 - len(prompt), ignore_eos=True) for prompt in PROMPTS]
    with LLM(str(target), skip_tokenizer_init=True, dtype="float32", num_pages=64) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(PROMPTS, outputs, strict=True)]


def answers(llm: LLM) -> list[Any]:
    """Return all answers, those of requests alone first: drafts pay for these."""
    kinds = (
        {"temperature": 0}, {"temperature": 0, "logprobs": 2}, {"temperature": 0.3, "seed": 5},
        {"temperature": 1.0, "seed": 6, "n": 2}, {"temperature": 0.3, "seed": 7, "presence_penalty": 0.4},
    )  # fmt: skip
    given = [
        (prompt, SamplingParams(max_tokens=90, ignore_eos=True, **kind))
        for prompt in PROMPTS for kind in kinds
    ]  # fmt: skip
    given.append((LONG, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)))
    prompts, params = [each[0] for each in given], [each[1] for each in given]
    outputs = [llm.generate([prompts[number]], params[number], use_tqdm=False)[0] for number in (0, 2, 5, -1, 0)]
    outputs += llm.generate(prompts, params, use_tqdm=False)
    return [[(part.token_ids, part.logprobs, part.finish_reason) for part in output.outputs] for output in outputs]


OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8", "dtype": "bfloat16"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "int8", "dtype": "bfloat16"},
    "chunks": {"max_num_batched_tokens": 64},
    "few-pages": {"num_pages": 34},
    "no-cache": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads that have learned the greedy answers by heart."""
    found = {}
    for method in METHODS:
        head = heads.new_head(method, target)
        heads.train(head, target, greedy(target))
        found[method] = heads.write_head(tmp_path_factory.mktemp(method), head)
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_drafts_of_heads_change_no_bit(
    options: str, target: Path, trained: dict[str, Path], engine: EngineFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor does drafting fail, which would only be logged."""
    plain = functools.partial(engine, target, skip_tokenizer_init=True, **OPTIONS[options])
    expected = answers(plain())
    for method, folder in trained.items():
        config = {
            "method": METHODS[method],
            "model": str(folder),
            "num_speculative_tokens": 5,
            "adaptive": options == "int4",
        }
        if options == "int8":
            config["quantization"] = "int8"
        llm = plain(speculative_config=config)
        ask = functools.partial(answers, llm)
        assert (under_pressure(llm, ask) if options == "few-pages" else ask()) == expected, method
        counts = llm.stats()["totals"]["speculation"]
        assert counts["accepted_tokens"] <= counts["draft_tokens"]
        assert counts["accepted_tokens"] > 0 or config["adaptive"]  # drafts that do not pay may pause
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("method", METHODS)
def test_what_a_head_has_learned_is_accepted(
    method: str, target: Path, trained: dict[str, Path], engine: EngineFactory
) -> None:
    """Answers that it knows by heart, each alone."""
    drafting = {"num_speculative_tokens": 3, "adaptive": False}
    config = {"method": METHODS[method], "model": str(trained[method]), **drafting}
    llm = engine(target, skip_tokenizer_init=True, dtype="float32", speculative_config=config)
    for prompt in PROMPTS:
        params = SamplingParams(temperature=0, max_tokens=100 - len(prompt), ignore_eos=True)
        llm.generate([prompt], params, use_tqdm=False)
    counts = llm.stats()["totals"]["speculation"]
    assert counts["accepted_tokens"] > 0.4 * counts["draft_tokens"] > 40


def broken(folder: Path, **fields: Any) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {**config, **fields}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 999}, "has a vocabulary of 999 tokens"),
    "class": ({"architectures": ["MedusaModel"]}, "architecture 'MedusaModel' is not supported"),
    "method": ({"architectures": ["EagleLlamaForCausalLM"]}, "is a draft head of method eagle, and method is 'eagle3'"),
    "layers": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 25]}}, "it must list layers of the model"),
    "twice": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, "names a layer twice"),
    "no aux": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
    "outputs": ({"draft_vocab_size": 50}, "lm_head.weight has shape"),
    "offsets": ({}, "makes output 95 the token 9"),
    "width": ({"hidden_size": 64}, "can't share that of a model of another hidden_size"),
}


@pytest.mark.parametrize("case", BAD)
def test_heads_that_do_not_fit_are_refused(case: str, target: Path, tmp_path: Path) -> None:
    fields, words = BAD[case]
    head = heads.new_head("eagle3", target)
    if case == "offsets":
        head.d2t[-1] = 900
    heads.write_head(tmp_path, head, {**heads.head_config("eagle3"), **fields})
    with pytest.raises(ModelError, match=words):
        load(tmp_path, "eagle3", target)


def test_the_engine_says_what_is_wrong_with_a_head(target: Path, tmp_path: Path) -> None:
    for folder, words in ((target, "model.fc.weight of shape .128, 384. is missing"), (tmp_path, "config.json")):
        config = json.dumps({"method": "eagle3", "model": str(folder)})
        with pytest.raises(EngineStartError, match=words):
            LLM(str(target), skip_tokenizer_init=True, speculative_config=config)
