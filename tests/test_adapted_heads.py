"""LoRA adapters of the head, of the embedding and of biases: what PEFT computes, for any mix of requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_clients import Client, Folders, flags_of, prompt
from engine_process import EngineUnderTest
from reference_libraries import import_reference

import_reference("peft")
adapter_answers = import_reference("adapter_answers")

TRAINED = [*range(5, 40), 199, 200, 300, 502]
"""Tokens of prompts and of answers, in blocks of columns that have others too."""

KINDS: dict[str, dict[str, Any]] = {
    "head": {"r": 5, "target_modules": ["lm_head", "q_proj"]},
    "head-magnitudes": {"r": 8, "target_modules": ["lm_head"], "use_dora": True},
    "head-bias": {"r": 8, "target_modules": ["lm_head", "up_proj"], "lora_bias": True},
    "whole-head": {"r": 4, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
    "embedding": {"r": 7, "lora_alpha": 11, "target_modules": ["embed_tokens", "down_proj"]},
    "whole-embedding": {"r": 4, "target_modules": ["k_proj"], "modules_to_save": ["embed_tokens"]},
    "both": {"r": 4, "target_modules": ["embed_tokens", "lm_head"], "use_rslora": True},
    "tokens": {"r": 4, "target_modules": ["o_proj"], "trainable_token_indices": {"embed_tokens": TRAINED}},
    "biases": {"r": 4, "target_modules": ["q_proj", "down_proj"], "bias": "all"},
    "some-biases": {"r": 4, "target_modules": ["gate_proj", "o_proj"], "bias": "lora_only", "use_dora": True},
    "all": {"r": 4, "target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
}  # fmt: skip
MODELS: dict[str, list[str]] = {
    "llama-tied-llama3": [kind for kind in KINDS if "biases" not in kind],
    "qwen3-tied": ["head", "embedding", "tokens"],
    "gemma3-window100": ["both", "tokens", "whole-embedding"],
    "llama-biases-linear": ["head", "whole-head", "embedding", "tokens", "whole-embedding", "biases", "some-biases"],
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, checkpoints: Path) -> Path:
    return checkpoints / str(request.param)


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of an adapter of each kind, and the changed model."""
    kinds = {kind: KINDS[kind] for kind in MODELS[model.name]}
    made: Folders = adapter_answers.make_adapters(model, tmp_path_factory.mktemp("heads"), kinds)
    return made


@pytest.fixture(scope="module")
def client(model: Path, folders: Folders) -> Iterator[Client]:
    flags = ["--dtype", "float32", "--max-loras", "9", *flags_of(*(folder for folder, _ in folders.values()))]
    with EngineUnderTest(model, *flags) as engine, Client(engine.address) as client:
        yield client


def test_answers_are_those_of_peft(client: Client, folders: Folders) -> None:
    adapter_answers.check_answers(client, folders)


def test_any_mix_gives_the_bits_of_each_alone(client: Client, folders: Folders) -> None:
    cases = [(seed, adapter) for seed in range(2) for adapter in ("", *(str(folder) for folder, _ in folders.values()))]
    alone, mixed = client.alone_and_mixed(cases, prompt_logprobs=0)
    assert mixed == alone
    assert all(len(logprobs) == 69 for _, _, logprobs in alone)


def test_log_probabilities_of_prompts_are_those_of_peft(client: Client, folders: Folders) -> None:
    for kind, (folder, made) in folders.items():
        client.ask(f"prompt {kind}", prompt(9), str(folder), prompt_logprobs=0)
        _, _, found = client.scored(f"prompt {kind}")
        assert found == pytest.approx(adapter_answers.scores(made, prompt(9)), abs=1e-3), kind


FORMATS = [
    ["--dtype", "float32"],
    ["--dtype", "bfloat16"],
    ["--quantization", "int8", "--kv-cache-dtype", "int8"],
    ["--quantization", "int4"],
]
STEPS = [
    ["--max-num-batched-tokens", "33", "--threads", "1"],
    ["--speculative-config", '{"method": "ngram", "adaptive": false}'],
    ["--num-pages", "14", "--max-loras", "2"],
]
"""Chunks, drafts, preemptions, and adapters that wait for one another."""


@pytest.mark.parametrize("flags", FORMATS, ids=lambda flags: flags[1])
@pytest.mark.parametrize("name", ["llama-tied-llama3", "llama-biases-linear"])
def test_bits_do_not_depend_on_the_others(name: str, flags: list[str], checkpoints: Path, tmp_path: Path) -> None:
    chosen = ["tokens", "whole-head", "embedding"] if "tied" in name else ["head", "biases", "whole-embedding"]
    for kind in chosen:
        adapter_answers.make_adapter(checkpoints / name, tmp_path / kind, **KINDS[kind])
    modules = flags_of(*(tmp_path / kind for kind in chosen))
    cases = [(seed, adapter) for seed in range(3) for adapter in ("", *(str(tmp_path / kind) for kind in chosen))]
    expected = []
    with EngineUnderTest(checkpoints / name, *flags, *modules) as engine, Client(engine.address) as client:
        for number, (seed, adapter) in enumerate(cases):
            client.ask(f"{number}", prompt(seed, 40), adapter)
            expected.append(client.answer(f"{number}"))
    assert len({tuple(tokens) for tokens, _ in expected}) == len(cases)
    for steps in STEPS:
        with EngineUnderTest(checkpoints / name, *flags, *modules, *steps) as engine, Client(engine.address) as client:
            for number, (seed, adapter) in enumerate(cases):
                client.ask(f"{number}", prompt(seed, 40), adapter)
            assert [client.answer(f"{number}") for number in range(len(cases))] == expected, steps
