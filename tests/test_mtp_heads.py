"""Heads for multi-token prediction compute what torch does, and drafts of theirs change no bit."""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf_files import write_gguf
from memory_pressure import under_pressure
from quantized_checkpoints import by_name, quantization_config, write_dequantized, write_quantized
from quantized_checkpoints import load as load_tensors
from reference_libraries import import_reference
from test_fp8_models import write_fp8

from quire.frontend import LLM, EngineStartError, SamplingParams
from quire.kernels.draft_head import DraftHead, features_for, load_draft_head
from quire.kernels.gguf.folder import model_folder
from quire.kernels.options import LoadOptions
from quire.kernels.quantize import SaveRequest, quantize
from quire.kernels.runner import ModelRunner, PreparedModel, SamplingConfig
from quire.kernels.step import StepInput
from quire.protocol.speculative_config import parse_speculative_config

if TYPE_CHECKING:
    from conftest import EngineFactory

heads = import_reference("mtp_heads")

MODELS = (
    "qwen3-next-experts",
    "qwen3.5-tied",
    "qwen3.5-moe",
    "glm4-moe-groups",
    "glm4-moe-lite",
    "deepseek3-experts-yarn",
)
DRAFTED = ("qwen3-next-experts", "qwen3.5-tied", "glm4-moe-groups", "deepseek3-experts-yarn")
"""Models whose heads learn something."""
PROMPTS = [[random.Random(number).randrange(500) for _ in range(6 + 7 * number)] for number in range(6)]
LENGTH = 70  # of the texts that a head learns


def load(folder: Path, **options: Any) -> tuple[ModelRunner, DraftHead]:
    """Load a model and its head."""
    given = LoadOptions(str(folder), num_pages=64, **{"dtype": "float32", **options})
    runner = PreparedModel(given, features=features_for(None, "mtp", given)).open()
    return runner, load_draft_head(None, "mtp", given, given, runner)


def features_after(runner: ModelRunner, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Return the features of tokens, computed in two steps."""
    slot = runner.sequences.open(tokens, len(tokens), sampling=SamplingConfig(temperature=0))
    runner.sequences.start(slot, len(tokens))
    found = []
    for start, count in ((0, 17), (17, len(tokens) - 17)):
        runner.run(StepInput([slot], [start], [count]))
        found.append(np.concatenate([rows[:count] for rows in runner.features()], axis=1))
    return np.concatenate(found)


def assert_drafts(folder: Path, expected: list[Any], tokens: list[int], size: int) -> None:
    """The head of a checkpoint gives the tokens these log probabilities, in as many rounds."""
    runner, loaded = load(folder)
    features = features_after(runner, tokens)
    sampling = SamplingConfig(temperature=0, logprobs=5)
    slot = loaded.sequences.open(tokens[1 : size + 1], size, sampling=sampling, cache_salt=None)
    loaded.sequences.start(slot, size + 4)
    loaded.run(StepInput([slot], [0], [11]), [features[:11]])
    result = loaded.run(StepInput([slot], [11], [size - 11]), [features[11:size]])
    for number, logprobs_of_round in enumerate(expected):
        if number:
            loaded.sequences.truncate(slot, size + number - 1, recompute_last=False)
            loaded.sequences.append(slot, tokens[size + number])
            result = loaded.go_on([0], StepInput([slot], [size + number - 1], [1]))
        logprobs = result.logprobs(0)
        assert logprobs is not None
        ids, values, _ = logprobs[0]
        assert values == pytest.approx([logprobs_of_round[token].item() for token in ids], abs=2e-4)
        assert ids[0] == logprobs_of_round.argmax()


@pytest.mark.parametrize("name", MODELS)
def test_a_head_computes_what_torch_does(name: str, checkpoints: Path, tmp_path: Path) -> None:
    """Also when it drafts on from its own output. Experts may be stacked in the files, as those of Qwen3.5 are."""
    drafted, tokens = heads.Drafted.random(checkpoints / name), PROMPTS[5]
    folder = drafted.write(checkpoints / name, tmp_path / name, splits_experts=name != "qwen3.5-moe")
    assert_drafts(folder, drafted.logprobs(tokens, 30, 3), tokens, 30)


@pytest.mark.parametrize("name", ["qwen3.5-tied", "qwen3.5-moe"])
def test_a_head_may_be_that_of_a_text_part(name: str, checkpoints: Path, tmp_path: Path) -> None:
    drafted, tokens = heads.Drafted.random(checkpoints / name), PROMPTS[5]
    written = drafted.write(checkpoints / name, tmp_path / name, splits_experts=False)
    architecture = f"Qwen3_5{'Moe' if name.endswith('moe') else ''}ForConditionalGeneration"
    folder = heads.as_multimodal(written, tmp_path / "whole", architecture)
    assert_drafts(folder, drafted.logprobs(tokens, 30, 2), tokens, 30)


@pytest.fixture(scope="module")
def trained(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with heads that have learned the greedy answers by heart."""
    found = {}
    for name in DRAFTED:
        with LLM(str(checkpoints / name), skip_tokenizer_init=True, dtype="float32", num_pages=64) as llm:
            texts = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, greedy(llm), strict=True)]
        drafted = heads.Drafted.random(checkpoints / name)
        drafted.train(texts)
        found[name] = drafted.write(checkpoints / name, tmp_path_factory.mktemp("trained") / name)
    return found


def greedy(llm: LLM) -> list[list[int]]:
    """Return greedy answers to the prompts, each alone, that end where the texts do."""
    params = [SamplingParams(temperature=0, max_tokens=LENGTH - len(prompt), ignore_eos=True) for prompt in PROMPTS]
    return [
        llm.generate([prompt], each, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, each in zip(PROMPTS, params, strict=True)
    ]


def answers(llm: LLM) -> list[Any]:
    """Return all answers, those of some requests alone first."""
    kinds = (
        {"temperature": 0}, {"temperature": 0, "logprobs": 2}, {"temperature": 0.3, "seed": 5},
        {"temperature": 1.0, "seed": 6, "n": 2}, {"temperature": 0.3, "seed": 7, "presence_penalty": 0.4},
    )  # fmt: skip
    given = [(prompt, SamplingParams(max_tokens=50, ignore_eos=True, **kind)) for prompt in PROMPTS for kind in kinds]
    prompts, params = [each[0] for each in given], [each[1] for each in given]
    outputs = [llm.generate([prompts[number]], params[number], use_tqdm=False)[0] for number in (0, 2, 5, 0)]
    outputs += llm.generate(prompts, params, use_tqdm=False)
    return [[(part.token_ids, part.logprobs, part.finish_reason) for part in output.outputs] for output in outputs]


OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8", "dtype": "bfloat16"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "int8", "dtype": "bfloat16"},
    "chunks": {"max_num_batched_tokens": 48},
    "few-pages": {"num_pages": 12},
}


@pytest.mark.parametrize(
    ("name", "options"), [("qwen3-next-experts", options) for options in OPTIONS]
    + [(name, options) for name in DRAFTED[1:] for options in ("float32", "int4")],
)  # fmt: skip
def test_drafts_of_heads_change_no_bit(
    name: str, options: str, trained: dict[str, Path], checkpoints: Path, engine: EngineFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Nor do the head's tensors if they are not used. Drafting does not fail, which would only be logged."""
    given = {"skip_tokenizer_init": True, **OPTIONS[options]}
    expected = answers(engine(checkpoints / name, **given))
    assert options != "float32" or answers(engine(trained[name], **given)) == expected
    drafting = {"method": "mtp", "num_speculative_tokens": 4, "adaptive": options == "int4"}
    llm = engine(trained[name], speculative_config=drafting, **given)
    ask = functools.partial(answers, llm)
    assert (under_pressure(llm, ask) if options == "few-pages" else ask()) == expected
    counts = llm.stats()["totals"]["speculation"]
    assert counts["accepted_tokens"] <= counts["draft_tokens"]
    assert counts["accepted_tokens"] > 0 or drafting["adaptive"]  # drafts that do not pay may pause
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", DRAFTED)
def test_what_a_head_has_learned_is_accepted(name: str, trained: dict[str, Path], engine: EngineFactory) -> None:
    """Answers that it knows by heart, each alone; the second draft comes from its own output."""
    config = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    llm = engine(trained[name], skip_tokenizer_init=True, dtype="float32", speculative_config=config)
    greedy(llm)
    counts = llm.stats()["totals"]["speculation"]
    assert counts["accepted_tokens"] > 0.5 * counts["draft_tokens"] > 50
    assert counts["accepted_per_position"][1] > 0.5 * counts["accepted_per_position"][0]


@pytest.mark.parametrize("recipe", ["gptq-8", "awq", "pack-4"])
@pytest.mark.parametrize("head", ["quantized", "floats", "floats-unsaid"])
def test_a_quantized_checkpoint_may_have_a_head(
    recipe: str, head: str, trained: dict[str, Path], tmp_path: Path, engine: EngineFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Its layer is quantized as the others are, or floats, whether the config says so or not.

    The layer before that is floats.
    """
    source, folder, layer = trained["glm4-moe-groups"], tmp_path / recipe, "model.layers.3."
    combine, names = (f"{layer}eh_proj",), (name for name in load_tensors(source) if name.startswith(layer))
    floats = combine if head == "quantized" else tuple(name.removesuffix(".weight") for name in names)
    write_quantized(source, folder, by_name(recipe), floats)
    if head == "floats-unsaid":
        config = json.loads((folder / "config.json").read_text())
        said = quantization_config(by_name(recipe), combine)
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    llm = engine(folder, skip_tokenizer_init=True, speculative_config=config)
    assert greedy(llm) == greedy(engine(folder, skip_tokenizer_init=True))
    assert llm.stats()["totals"]["speculation"]["accepted_tokens"] > 0
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("case", ["blocks", "compressed-channel"])
@pytest.mark.parametrize("name", ["qwen3.5-tied", "deepseek3-experts-yarn", "glm4-moe-groups"])
def test_a_head_of_an_fp8_checkpoint_has_the_bits_of_its_float_twin(
    name: str, case: str, checkpoints: Path, tmp_path: Path
) -> None:
    """The layer that combines its inputs may be FP8 too, as that of GLM and DeepSeek is here."""
    source = heads.Drafted.random(checkpoints / name).write(checkpoints / name, tmp_path / name)
    weights = write_fp8(source, tmp_path / "fp8", case)
    assert name == "qwen3.5-tied" or "model.layers.3.eh_proj.weight" in weights
    write_dequantized(source, tmp_path / "floats", weights)
    found = [drafted_logprobs(tmp_path / kind) for kind in ("fp8", "floats")]
    assert found[0] == found[1]


def drafted_logprobs(folder: Path) -> list[tuple[int, float]]:
    """Return the likeliest drafts of a head in bf16 and their log probabilities."""
    runner, loaded = load(folder, dtype="bfloat16")
    tokens = PROMPTS[5]
    features = features_after(runner, tokens)
    slot = loaded.sequences.open(tokens[1:31], 30, sampling=SamplingConfig(temperature=0, logprobs=20), cache_salt=None)
    loaded.sequences.start(slot, 30)
    logprobs = loaded.run(StepInput([slot], [0], [30]), [features[:30]]).logprobs(0)
    assert logprobs is not None
    ids, values, _ = logprobs[0]
    return list(zip(ids, values, strict=True))


@pytest.mark.parametrize("name", ["qwen3.5-tied", "glm4-moe-groups"])
def test_a_head_is_kept_when_its_model_is_saved_quantized(
    name: str, trained: dict[str, Path], tmp_path: Path, engine: EngineFactory
) -> None:
    folder = tmp_path / "int8"
    quantize(SaveRequest(model=str(trained[name]), output=str(folder), quantization="int8"))
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    llm = engine(folder, skip_tokenizer_init=True, speculative_config=config)
    assert greedy(llm) == greedy(engine(folder, skip_tokenizer_init=True))
    assert llm.stats()["totals"]["speculation"]["accepted_tokens"] > 0


@pytest.mark.parametrize("name", ["deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp"])
def test_the_method_has_other_names(name: str) -> None:
    assert parse_speculative_config(json.dumps({"method": name})).method == "mtp"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3.5-tied", r"no head for multi-token prediction: mtp\.fc\.weight is missing"),
        ("glm4-moe-groups", r"no head for multi-token prediction: model\.layers\.3\.eh_proj\.weight is missing"),
        ("qwen3-tied", "method mtp is not supported for Qwen3ForCausalLM; supported are DeepseekV3ForCausalLM"),
    ],
)
def test_a_checkpoint_without_a_head_is_refused(name: str, words: str, checkpoints: Path) -> None:
    with pytest.raises(EngineStartError, match=words):
        LLM(str(checkpoints / name), skip_tokenizer_init=True, speculative_config='{"method": "mtp"}')


def converted(folder: Path, file: Path, kind: str = "F32") -> Path:
    """Write a checkpoint with a head as a GGUF file; `kind` is the type of the head's matrices."""
    config = json.loads((folder / "config.json").read_text())
    is_glm = config["model_type"].startswith("glm4")
    config |= {"num_nextn_predict_layers": 1, "first_k_dense_replace": 1} if is_glm else {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    layer = f"model.layers.{config['num_hidden_layers']}."
    write_gguf(folder, file, lambda name: kind if layer in name and "down_proj" not in name else "F32")
    return file


@pytest.mark.parametrize("name", ["qwen3.5-tied", "qwen3.5-moe", "glm4-moe-groups", "glm4-moe-lite"])
def test_a_gguf_file_may_have_a_head(name: str, checkpoints: Path, tmp_path: Path) -> None:
    drafted, tokens = heads.Drafted.random(checkpoints / name), PROMPTS[5]
    file = converted(drafted.write(checkpoints / name, tmp_path / name), tmp_path / "model.gguf")
    assert_drafts(model_folder(file, tmp_path / "folders"), drafted.logprobs(tokens, 30, 2), tokens, 30)


@pytest.mark.parametrize("name", ["qwen3.5-tied", "glm4-moe-groups"])
def test_drafts_of_quantized_heads_of_gguf_files_change_no_bit(
    name: str, trained: dict[str, Path], tmp_path: Path, engine: EngineFactory
) -> None:
    """The layer that combines their inputs is quantized too."""
    file = converted(shutil.copytree(trained[name], tmp_path / name), tmp_path / "model.gguf", "Q8_0")
    config = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    llm = engine(file, skip_tokenizer_init=True, dtype="float32", speculative_config=config)
    assert greedy(llm) == greedy(engine(file, skip_tokenizer_init=True, dtype="float32"))
    counts = llm.stats()["totals"]["speculation"]
    assert counts["accepted_tokens"] > 0.5 * counts["draft_tokens"] > 50


def test_a_gguf_file_without_a_head_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoints / "glm4-moe-groups", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    write_gguf(folder, tmp_path / "model.gguf")
    with pytest.raises(EngineStartError, match=r"no head for multi-token prediction: model\.layers\.3\.eh_proj"):
        LLM(str(tmp_path / "model.gguf"), skip_tokenizer_init=True, speculative_config='{"method": "mtp"}')
