"""Scripts written for vLLM run once their imports name `quire`: each does what one of vLLM's examples does."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_tokenizers
import tiny_model
from patience import PATIENCE
from quire_command import quire_command

SCRIPTS = Path(__file__).parent / "support" / "vllm_scripts"
MANUAL = Path(__file__).parents[1] / "frontend" / "README.md"
LABELS = {"0": "tale", "1": "recipe", "2": "letter"}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts, with their imports changed by the command of the manual."""
    found = re.search(r"^sed .*$", MANUAL.read_text(), re.MULTILINE)
    assert found is not None
    folder = tmp_path_factory.mktemp("scripts")
    for path in SCRIPTS.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    *command, last = shlex.split(found[0])
    assert last.endswith(".py")
    subprocess.run([*command, *map(str, folder.glob("*.py"))], check=True)
    return folder


def run(script: Path, *arguments: object) -> tuple[Any, str]:
    """Return what a script prints as JSON, and what it writes to stderr."""
    command = [sys.executable, "-P", str(script), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classification model of random weights with three labels."""
    return write_classifier(tmp_path_factory.mktemp("models") / "classifier", LABELS)


def write_classifier(folder: Path, labels: dict[str, str]) -> Path:
    """Write a classification model of random weights with these labels."""
    small_tokenizers.write(folder, "byte_level")
    tensors = {name: tensor for name, tensor in tiny_model.weights().items() if name != "lm_head.weight"}
    random = np.random.default_rng(1)
    tensors["model.embed_tokens.weight"] = random.standard_normal((512, 64)).astype(np.float32)
    tensors["score.weight"] = random.standard_normal((len(labels), 64)).astype(np.float32)
    more = {"architectures": ["LlamaForSequenceClassification"], "vocab_size": 512, "id2label": labels}
    return tiny_model.write(folder, tensors, {**tiny_model.CONFIG, **more})


def test_a_script_cleans_up_between_two_models(scripts: Path, demo_model: Path) -> None:
    (ids, engines, text), errors = run(scripts / "two_models.py", demo_model)
    assert ids == [text, text]
    assert engines == [1, 0, 1]
    assert errors.count("attention_config=AttentionConfig(backend='FLASH_ATTN') has no effect") == 1


def test_texts_are_continued(scripts: Path, demo_model: Path) -> None:
    outputs, errors = run(scripts / "basic.py", demo_model)
    assert [prompt for prompt, _, _ in outputs] == ["Once upon a time", "There was a king who", "In a forest far away"]
    assert all(text and finished for _, text, finished in outputs)
    warnings = re.findall(r"UserWarning: (\w+)=(\S+) has no effect: there is no GPU", errors)
    assert sorted(warnings) == [("enforce_eager", "True"), ("gpu_memory_utilization", "0.5")]
    assert f"{scripts / 'basic.py'}:9: UserWarning" in errors


def test_an_engine_is_set_by_the_command_line(scripts: Path, demo_model: Path) -> None:
    given = [
        "--model",
        demo_model,
        "--max_tokens=5",
        "--temperature",
        0,
        "--num-pages",
        64,
        "-tp",
        1,
        "--no-enable-lora",
    ]
    (prompt, token_ids, pages), errors = run(scripts / "generate.py", *given)
    assert (prompt, len(token_ids), pages) == ("The fox said to the goose", 5, 64)
    assert "Warning" not in errors


def test_conversations_are_answered(scripts: Path, demo_model: Path) -> None:
    (alone, batch, prompt), _ = run(scripts / "chat.py", demo_model)
    assert alone
    assert batch == [alone] * 3
    assert prompt == "You tell tales. Hello Good day to you. Tell me of the fox. "


def test_texts_are_classified(scripts: Path, classifier: Path) -> None:
    probs, errors = run(scripts / "classify.py", "--model", classifier, "--dtype", "float")
    assert [len(each) for each in probs] == [3, 3]
    assert [math.fsum(each) for each in probs] == pytest.approx([1.0, 1.0])
    assert "trust_remote_code=True has no effect" in errors
    assert "runner" not in errors


def test_texts_are_embedded(scripts: Path, demo_model: Path) -> None:
    (embedded, encoded), _ = run(scripts / "embed.py", demo_model)
    assert embedded == encoded
    assert np.linalg.norm(embedded, axis=1) == pytest.approx([1.0, 1.0], rel=1e-5)


def test_texts_are_scored(scripts: Path, demo_model: Path) -> None:
    scores, _ = run(scripts / "score.py", demo_model)
    assert len(scores) == 2
    assert all(-1 <= score <= 1.001 for score in scores)


def test_texts_get_rewards(scripts: Path, tmp_path: Path) -> None:
    (rewards, logits, scores), _ = run(scripts / "reward.py", write_classifier(tmp_path / "reward", {"0": "reward"}))
    assert rewards == logits
    assert [len(reward) for reward in rewards] == [1, 1]
    assert rewards[0] != rewards[1]
    assert scores == [[pytest.approx(1 / (1 + math.exp(-reward[0])))] for reward in rewards]


def test_prompts_are_pooled_on_an_event_loop(scripts: Path, demo_model: Path) -> None:
    (found, alone), _ = run(scripts / "async_llm_pooling.py", demo_model)
    (first, vector), (second, other) = found
    assert (first, second) == ("request-0", "request-1")
    assert vector == alone != other


def test_a_shared_prefix_is_found(scripts: Path, demo_model: Path) -> None:
    (is_same, cached), _ = run(scripts / "prefix_caching.py", demo_model)
    assert is_same
    assert all(count > 0 for count in cached)


def test_answers_keep_to_constraints(scripts: Path, demo_model: Path) -> None:
    texts, _ = run(scripts / "structured_outputs.py", demo_model)
    assert texts["choice"] in ("Good", "Evil")
    assert re.fullmatch(r"[a-z]{3,6}@tales\.com", texts["regex"])
    assert json.loads(texts["json"])["animal"] in ("fox", "goose")
    assert texts["grammar"] in ("the fox sleeps", "the goose sleeps")


def test_the_seed_of_an_engine_makes_answers_reproducible(scripts: Path, demo_model: Path) -> None:
    first, _ = run(scripts / "reproducibility.py", demo_model)
    assert run(scripts / "reproducibility.py", demo_model)[0] == first


def test_a_model_calls_a_tool(scripts: Path, demo_model: Path) -> None:
    (results, finished), _ = run(scripts / "chat_with_tools.py", demo_model)
    assert results
    assert all(result.startswith("It rains in ") for result in results)
    assert finished


def test_an_engine_is_driven_step_by_step(scripts: Path, demo_model: Path) -> None:
    outputs, _ = run(scripts / "llm_engine.py", "--model", demo_model, "--num-pages", 128, "--swap-space", 0)
    assert [request_id for request_id, _ in outputs] == ["0", "1", "2"]
    assert [len(counts) for _, counts in outputs] == [1, 1, 2]
    assert all(0 < count <= 16 for _, counts in outputs for count in counts)


def test_answers_stream(scripts: Path, demo_model: Path) -> None:
    (deltas, cumulative, final), _ = run(scripts / "async_llm_streaming.py", demo_model)
    assert len(deltas) > 1
    assert ["".join(deltas)] == cumulative[-1:] == final


def test_metrics_are_read(scripts: Path, demo_model: Path) -> None:
    found, errors = run(scripts / "metrics.py", demo_model)
    assert found["counters"]["vllm:generation_tokens"] == 16
    assert found["counters"]["vllm:request_success"] == 0  # of the last reason, "stop"
    assert found["gauges"]["vllm:num_requests_running"] == 0
    assert found["histograms"]["vllm:e2e_request_latency_seconds"][1:] == [2, 2]
    assert found["histograms"]["vllm:e2e_request_latency_seconds"][0] > 0
    assert all(name.startswith("vllm:") for kind in found.values() for name in kind)
    assert "Warning" not in errors


def test_what_cannot_be_had_is_refused_in_words(scripts: Path, demo_model: Path) -> None:
    (said, finished), _ = run(scripts / "refusals.py", demo_model)
    assert finished
    asked = {"lora_request", "lora_request of a chat", "multi_modal_data", "prompt_embeds", "logits_processors"}
    assert said.keys() == asked | {"tensor_parallel_size", "reward", "token_embed", "token_classify"}
    assert said.pop("reward") == (
        "this model gives no rewards; it generates text and embeds; load a reward model: a ...ForSequence"
        "Classification of one label"
    )
    for task in ("token_embed", "token_classify"):
        assert said.pop(task) == (
            f"pooling_task='{task}' is not possible: a prompt has one vector here, and not one for each of its tokens; "
            "it must be 'embed' or 'classify'"
        )
    assert said.pop("lora_request").endswith("was started without adapters; start it with enable_lora=True")
    assert "lora_request" in said.pop("lora_request of a chat")
    assert all(" is not supported: " in message for message in said.values())
    assert said["multi_modal_data"].startswith("prompt 0: multi_modal_data={'image': [0, 0,")
    assert len(said["multi_modal_data"]) < 250


def test_a_command_takes_the_flags_of_vllm(demo_model: Path) -> None:
    flags = "--max_tokens 4 -tp 1 --gpu-memory-utilization=0.9 --dtype half --block_size 16 --no-enable-lora"
    command = quire_command("serve", "--model", demo_model, *flags.split(), "Once upon a time")
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.strip()
    assert re.findall(r"^quire: (\w+=\S+) (has no effect|is not available)", ended.stderr, re.MULTILINE) == [
        ("dtype='half'", "is not available"),
        ("block_size=16", "is not available"),
        ("gpu_memory_utilization=0.9", "has no effect"),
    ]
