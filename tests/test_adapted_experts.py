"""LoRA adapters of experts and routers: what PEFT computes, for any mix of requests, stacked or one by one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_clients import Client, Folders, flags_of, prompt
from engine_process import EngineUnderTest
from reference_libraries import import_reference
from safetensors.numpy import load_file, save_file

import_reference("peft")
adapter_answers = import_reference("adapter_answers")

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "experts": {"r": 3, "target_modules": ["q_proj"], "target_parameters": STACKS, "use_rslora": True},
    "downs": {"r": 5, "lora_alpha": 9, "target_modules": [], "target_parameters": STACKS[1:]},
    "ranks": {
        "r": 4, "target_modules": ["v_proj", "lm_head"], "target_parameters": STACKS,
        "rank_pattern": {"gate_up_proj": 2}, "alpha_pattern": {"down_proj": 20},
    },
    "routers": {"r": 4, "target_modules": ["o_proj"], "target_parameters": ["mlp.gate.weight"]},
    "shared": {"r": 4, "target_modules": "all-linear", "target_parameters": STACKS},
}  # fmt: skip
MODELS: dict[str, list[str]] = {
    "qwen3-moe": ["experts", "downs", "ranks", "routers"],
    "qwen2-moe-normalized": ["shared", "routers"],
    "gpt-oss-window100": ["experts", "downs"],
    "mixtral-window100": ["experts"],
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, checkpoints: Path) -> Path:
    return checkpoints / str(request.param)


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of an adapter of each kind, and the changed model."""
    kinds = {kind: KINDS[kind] for kind in MODELS[model.name]}
    made: Folders = adapter_answers.make_adapters(model, tmp_path_factory.mktemp("experts"), kinds)
    return made


@pytest.fixture(scope="module")
def client(model: Path, folders: Folders) -> Iterator[Client]:
    flags = ["--dtype", "float32", *flags_of(*(folder for folder, _ in folders.values()))]
    with EngineUnderTest(model, *flags) as engine, Client(engine.address) as client:
        yield client


def test_answers_are_those_of_peft(client: Client, folders: Folders) -> None:
    adapter_answers.check_answers(client, folders)


def test_any_mix_gives_the_bits_of_each_alone(client: Client, folders: Folders) -> None:
    cases = [(seed, adapter) for seed in range(2) for adapter in ("", *(str(folder) for folder, _ in folders.values()))]
    alone, mixed = client.alone_and_mixed(cases)
    assert mixed == alone


def take_apart(source: Path, target: Path, inner: int, count: int) -> Path:
    """Write an adapter of stacked experts as one of the layers of each expert."""
    shutil.copytree(source, target)
    made: dict[str, np.ndarray] = {}
    for name, tensor in load_file(source / "adapter_model.safetensors").items():
        module, half = name.removesuffix(".weight").rsplit(".lora_", 1)
        at = module.removesuffix(".base_layer")
        if not at.endswith(".experts"):
            made[name] = tensor
            continue
        is_down = module == at  # the outer parameter
        rows = {"down_proj": slice(None)} if is_down else {"gate_proj": slice(inner), "up_proj": slice(inner, None)}
        own = np.split(tensor, count) if half == "A" else [tensor[:, expert::count] for expert in range(count)]
        for expert, values in enumerate(own):
            for part, some in rows.items():
                made[f"{at}.{expert}.{part}.lora_{half}.weight"] = np.array(values if half == "A" else values[some])
    save_file(made, target / "adapter_model.safetensors")
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | {"target_parameters": None}))
    return target


@pytest.mark.parametrize(
    "flags",
    [["--dtype", "float32"], ["--dtype", "bfloat16"], ["--quantization", "int8"], ["--quantization", "int4"]],
    ids=lambda flags: flags[-1],
)
def test_adapters_of_each_expert_answer_as_stacked_ones(flags: list[str], checkpoints: Path, tmp_path: Path) -> None:
    """And in few tokens a step, in a small pool, and beside the base."""
    model = checkpoints / "qwen3-moe"
    adapter_answers.make_adapter(model, tmp_path / "stacked", **KINDS["experts"])
    single = take_apart(tmp_path / "stacked", tmp_path / "single", 64, 40)
    answers = []
    for more in ([], ["--max-num-batched-tokens", "33", "--num-pages", "14", "--threads", "1"]):
        modules = flags_of(tmp_path / "stacked", single)
        with EngineUnderTest(model, *flags, *more, *modules) as engine, Client(engine.address) as client:
            adapters = {"base": "", "stacked": str(tmp_path / "stacked"), "single": str(single)}
            for name, adapter in adapters.items():
                client.ask(name, prompt(3), adapter)
            answers.append({name: client.answer(name) for name in adapters})
    assert answers[0] == answers[1]
    assert answers[0]["stacked"] == answers[0]["single"] != answers[0]["base"]
    with EngineUnderTest(model, *flags) as engine, Client(engine.address) as client:
        client.ask("base", prompt(3))
        assert client.answer("base") == answers[0]["base"]
