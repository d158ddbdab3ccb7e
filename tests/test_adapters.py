"""LoRA adapters in the engine: what PEFT computes, for any mix of requests, and nothing of one in the other's pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from adapter_clients import LENGTH, Client, Folders, flags_of, prompt
from checkpoints import CHECKPOINTS
from engine_process import EngineUnderTest
from reference_libraries import import_reference
from safetensors.numpy import load_file, save_file

from quire.engine_core.adapters import adapter_salt
from quire.kernels.adapters.changeable import Changeable
from quire.kernels.adapters.reading import read_adapter
from quire.kernels.adapters.shapes import linear_shapes
from quire.kernels.config import ModelConfig
from quire.kernels.models import build_graph
from quire.kernels.weights.checkpoint import Checkpoint
from quire.protocol.messages import EngineCoreRequest, ErrorKind, FinishReason, SamplingParams

import_reference("peft")
torch = import_reference("torch")
adapter_answers = import_reference("adapter_answers")
best, greedy, make_adapter = adapter_answers.best, adapter_answers.greedy, adapter_answers.make_adapter

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "attention": {"r": 5, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    "ranks": {
        "r": 4, "target_modules": "all-linear", "rank_pattern": {"q_proj": 33, "layers.0.mlp.up_proj": 1},
        "alpha_pattern": {"down_proj": 9},
    },
    "magnitudes": {"r": 8, "target_modules": "all-linear", "use_dora": True},
    "biases": {"r": 6, "target_modules": ["o_proj", "gate_proj", "up_proj"], "lora_bias": True},
    "one-layer": {"r": 16, "target_modules": ["k_proj", "down_proj"], "layers_to_transform": [1]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of an adapter of each kind, and the changed model."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        kind: (root / kind, make_adapter(checkpoints / "llama-tied-llama3", root / kind, **fields))
        for kind, fields in KINDS.items()
    }


@pytest.fixture(scope="module", params=[[], ["--max-num-batched-tokens", "48", "--threads", "1"]], ids=["", "chunks"])
def client(request: pytest.FixtureRequest, checkpoints: Path, folders: Folders) -> Iterator[Client]:
    modules = [f"--lora-modules={kind}={folder}" for kind, (folder, _) in folders.items()]
    flags = ["--dtype", "float32", "--max-loras", "8", *modules, *request.param]
    with EngineUnderTest(checkpoints / "llama-tied-llama3", *flags) as engine, Client(engine.address) as client:
        yield client


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_peft(kind: str, client: Client, folders: Folders) -> None:
    folder, model = folders[kind]
    client.ask(kind, prompt(1), str(folder))
    tokens, logprobs = client.answer(kind)
    expected = greedy(model, prompt(1))
    assert tokens == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=1e-3)


def test_any_mix_gives_the_bits_of_each_alone(client: Client, folders: Folders) -> None:
    chosen = ["", *(str(folder) for folder, _ in folders.values())]
    cases = [(seed, adapter) for seed in range(3) for adapter in chosen]
    alone, mixed = client.alone_and_mixed(cases)
    assert mixed == alone
    assert len({tuple(tokens) for tokens, _, _ in alone[: len(chosen)]}) == len(chosen)


def cached(client: Client, request_id: str) -> int | None:
    return next(output.num_cached_tokens for output in client.outputs(request_id) if output.events)


def test_pages_are_shared_with_no_other_adapter(client: Client, folders: Folders) -> None:
    first, other = folders["plain"][0], folders["magnitudes"][0]
    tokens = prompt(77, 200)
    for name, adapter in (("a", str(first)), ("b", str(other)), ("c", ""), ("again", str(first))):
        client.ask(name, tokens, adapter)
        client.answer(name)
    assert [cached(client, name) for name in ("a", "b", "c", "again")] == [0, 0, 0, 192]


def test_no_cache_salt_names_the_pages_of_an_adapter(client: Client, folders: Folders, checkpoints: Path) -> None:
    """Neither a request of the base nor one of another adapter finds them, whatever it knows of the files."""
    folder, tokens = folders["plain"][0], prompt(78, 200)
    checkpoint = Checkpoint(str(checkpoints / "llama-tied-llama3"))
    graph = build_graph(ModelConfig(checkpoint.config))
    digest = read_adapter(folder, graph, 64, Changeable(frozenset(linear_shapes(graph)), checkpoint)).digest
    for name, salt in (("first", "s"), ("again", "s"), ("long", "s" * 1024), ("long again", "s" * 1024)):
        client.ask(name, tokens, str(folder), cache_salt=salt)
        client.answer(name)
    assert [cached(client, name) for name in ("first", "again", "long", "long again")] == [0, 192, 0, 192]
    own = adapter_salt(digest, "s")
    for adapter in ("", str(folders["biases"][0])):
        for salt in (f"{digest} s", digest, own[1:]):
            client.ask(f"{adapter} {salt}", tokens, adapter, cache_salt=salt)
            client.answer(f"{adapter} {salt}")
            assert cached(client, f"{adapter} {salt}") == 0
        client.ask(f"{adapter} NUL", tokens, adapter, cache_salt=own)
        assert "has a NUL character" in (client.end(f"{adapter} NUL").error or "")


def copies(source: Path, target: Path, count: int) -> list[Path]:
    """Return folders of the same adapter."""
    return [Path(shutil.copytree(source, target / str(number))) for number in range(count)]


def test_more_adapters_than_there_is_room_for_take_turns(checkpoints: Path, folders: Folders, tmp_path: Path) -> None:
    """Two at a time: others wait until one is not in use, and none is lost. Copies share pages."""
    model, all_folders = checkpoints / "llama-tied-llama3", [folder for folder, _ in folders.values()]
    same = copies(all_folders[0], tmp_path, 3)
    flags = ["--dtype", "float32", "--max-loras", "2", "--num-pages", "40", *flags_of(*all_folders, *same)]
    with EngineUnderTest(model, *flags) as engine, Client(engine.address) as client:
        expected = {}
        for folder in all_folders:
            client.ask(folder.name, prompt(3), str(folder))
            expected[folder.name] = client.answer(folder.name)
        names = [folder for _ in range(3) for folder in all_folders]
        for number, folder in enumerate(names):
            client.ask(f"{number}", prompt(3), str(folder))
        assert [client.answer(f"{number}") for number in range(len(names))] == [expected[each.name] for each in names]
        for folder in same:
            client.ask(str(folder), prompt(3), str(folder))
            assert client.answer(str(folder)) == expected["plain"]
            assert cached(client, str(folder)) == 64


def test_bad_adapters_are_errors_of_their_own_requests(checkpoints: Path, folders: Folders, tmp_path: Path) -> None:
    model, good = checkpoints / "llama-tied-llama3", folders["plain"][0]
    empty = tmp_path / "empty"
    empty.mkdir()
    (infinite,) = copies(good, tmp_path / "infinite", 1)
    tensors = load_file(infinite / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = np.inf
    save_file(tensors, infinite / "adapter_model.safetensors")
    (large,) = copies(folders["ranks"][0], tmp_path / "large", 1)
    flags = ["--dtype", "float32", "--max-lora-rank", "16", *flags_of(good, empty, infinite, large)]
    with EngineUnderTest(model, *flags) as engine, Client(engine.address) as client:
        client.ask("long", prompt(1), str(good), min_tokens=LENGTH)
        bad = {"empty": (empty, "adapter_config.json"), "infinite": (infinite, "inf"), "large": (large, "rank")}
        for name, (folder, _) in bad.items():
            client.ask(name, prompt(2), str(folder))
        client.ask("unknown", prompt(2), str(tmp_path / "elsewhere"))
        for name, (folder, words) in bad.items():
            end = client.end(name)
            assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.INVALID)
            assert f"adapter={str(folder)!r} can't be used: " in (end.error or "")
            assert words in (end.error or "")
        assert "is not one of this engine" in (client.end("unknown").error or "")
        assert len(client.answer("long")[0]) == LENGTH
        client.ask("after", prompt(1), str(good), min_tokens=LENGTH)
        assert client.answer("after") == client.answer("long")


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
OTHER_MODELS: dict[str, list[dict[str, Any]]] = {
    "qwen3-tied": [{"target_modules": ATTENTION, "use_dora": True, "r": 3}],
    "gemma3-window100": [{"target_modules": ["q_proj", "down_proj"], "use_dora": True}],
    "phi3-long": [{"target_modules": "all-linear", each: True} for each in ("lora_bias", "use_dora")],
    "qwen3-moe-window": [{"target_modules": ATTENTION}, {"target_modules": ["k_proj", "o_proj"], "lora_bias": True}],
}


@pytest.mark.parametrize("name", [checkpoint.name for checkpoint in CHECKPOINTS])
def test_linear_layers_of_every_architecture_are_adapted(name: str, checkpoints: Path, tmp_path: Path) -> None:
    """Also where a tensor holds several layers: gates and ups, or heads of queries and of gates in turn."""
    excluded = ["kv_b_proj"]  # unpacked latents, which we refuse to adapt
    if name.startswith(("falcon-h1", "nemotron-h")):
        excluded.append("out_proj")  # which PEFT refuses to adapt
    model = make_adapter(checkpoints / name, tmp_path, target_modules="all-linear", exclude_modules=excluded, r=3)
    with (
        EngineUnderTest(checkpoints / name, "--dtype", "float32", *flags_of(tmp_path)) as engine,
        Client(engine.address) as client,
    ):
        client.ask("adapted", prompt(4), str(tmp_path))
        tokens, logprobs = client.answer("adapted")
    expected = best(model, prompt(4), tokens)
    assert tokens == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=1e-3)


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_answers_of_other_models_are_those_of_peft(name: str, checkpoints: Path, tmp_path: Path) -> None:
    """With norms of queries and keys, windows, other norms around layers, and beside experts."""
    kinds = {tmp_path / str(number): fields for number, fields in enumerate(OTHER_MODELS[name])}
    models = {folder: make_adapter(checkpoints / name, folder, **fields) for folder, fields in kinds.items()}
    flags = ["--dtype", "float32", *flags_of(*models)]
    with EngineUnderTest(checkpoints / name, *flags) as engine, Client(engine.address) as client:
        for folder in models:
            client.ask(str(folder), prompt(4), str(folder))
        for folder, model in models.items():
            tokens, logprobs = client.answer(str(folder))
            expected = best(model, prompt(4), tokens)
            assert tokens == expected[0]
            assert logprobs == pytest.approx(expected[1], abs=1e-3)


@pytest.mark.parametrize(("quantization", "least"), [("int8", 20), ("int4", 12)])
def test_compressed_queries_of_quantized_models_are_adapted(
    quantization: str, least: int, checkpoints: Path, tmp_path: Path
) -> None:
    """As many first tokens are those of PEFT's float model as without an adapter."""
    folder = checkpoints / "deepseek3-dense-yarn"
    made = make_adapter(folder, tmp_path, target_modules=["q_b_proj"], lora_alpha=64)
    prompts = [prompt(seed, 12) for seed in range(24)]
    with torch.no_grad():
        expected = made(torch.tensor(prompts)).logits[:, -1].argmax(-1).tolist()
        with made.disable_adapter():
            of_base = made(torch.tensor(prompts)).logits[:, -1].argmax(-1).tolist()
    flags = ["--quantization", quantization, *flags_of(tmp_path)]
    with EngineUnderTest(folder, *flags) as engine, Client(engine.address) as client:
        for number, tokens in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=1)
            client.send(EngineCoreRequest(f"{number}", tokens, params, adapter=str(tmp_path)))
        found = [client.answer(f"{number}")[0] for number in range(len(prompts))]
    assert sum([token] == one for token, one in zip(expected, found, strict=True)) >= least
    assert sum([token] == one for token, one in zip(of_base, found, strict=True)) < least // 2


def write_gguf(folder: Path, path: Path, heads: dict[str, int]) -> Path:
    """Write the adapter of a Llama folder as llama.cpp's convert_lora_to_gguf.py does."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 16.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        if ".lora_" not in name:
            continue  # whole tensors, as in the base
        module, half = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        if half.startswith("embedding_"):
            half = half[-1]
            tensor = tensor.T if half == "A" else tensor
        count = heads.get(module.rsplit(".", 1)[-1], 0) if half == "B" else 0
        if count:  # of q and k, whose rows the conversion permutes
            tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        stem = names.get_name(module)
        writer.add_tensor(f"{stem}.weight.lora_{half.lower()}", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["llama-tied-llama3", "llama-biases-linear"])
@pytest.mark.parametrize("modules", ["all-linear", ["embed_tokens", "lm_head", "k_proj"]], ids=["layers", "head"])
def test_a_gguf_file_answers_as_the_folder_that_it_was_made_of(
    modules: Any, name: str, checkpoints: Path, tmp_path: Path
) -> None:
    made = make_adapter(checkpoints / name, tmp_path / "folder", target_modules=modules, r=5, lora_alpha=16)
    heads = {"q_proj": made.config.num_attention_heads, "k_proj": made.config.num_key_value_heads}
    file = write_gguf(tmp_path / "folder", tmp_path / "adapter.gguf", heads)
    flags = ["--dtype", "float32", *flags_of(tmp_path / "folder", file)]
    with EngineUnderTest(checkpoints / name, *flags) as engine, Client(engine.address) as client:
        for adapter in (tmp_path / "folder", file):
            client.ask(adapter.name, prompt(5), str(adapter))
        assert client.answer(file.name) == client.answer("folder")
        client.ask("base", prompt(5))
        assert client.answer("base") != client.answer(file.name)


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "bfloat16"],
        ["--dtype", "bfloat16", "--quantization", "int8", "--kv-cache-dtype", "int8"],
        ["--quantization", "int4"],
        ["--speculative-config", '{"method": "ngram", "adaptive": false}'],
        ["--num-pages", "14"],
    ],
    ids=lambda flags: flags[-1],
)
@pytest.mark.parametrize("name", ["llama-tied-llama3", "qwen3.5-grouped"])
def test_bits_do_not_depend_on_the_others(
    name: str, flags: list[str], checkpoints: Path, folders: Folders, tmp_path: Path
) -> None:
    """With drafts and preemptions, quantized weights, and states; requests have one, several or no samples."""
    model = checkpoints / name
    modules = ["o_proj", "down_proj", "in_proj_qkv"] if name.startswith("qwen") else ["q_proj", "up_proj", "down_proj"]
    made = [tmp_path / f"r{rank}" for rank in (4, 12)]
    for folder, rank in zip(made, (4, 12), strict=True):
        make_adapter(model, folder, r=rank, target_modules=modules)
    with EngineUnderTest(model, *flags, *flags_of(*made)) as engine, Client(engine.address) as client:
        cases = [(seed, str(adapter)) for seed in range(4) for adapter in ("", *made)]
        alone = []
        for number, (seed, adapter) in enumerate(cases):
            client.ask(f"alone {number}", prompt(seed, 40), adapter)
            alone.append(client.answer(f"alone {number}"))
        for number, (seed, adapter) in enumerate(cases):
            client.ask(f"mixed {number}", prompt(seed, 40), adapter)
        assert [client.answer(f"mixed {number}") for number in range(len(cases))] == alone
        assert len({tuple(tokens) for tokens, _ in alone[:3]}) == 3


@pytest.mark.parametrize(
    "flags",
    [["--dtype", "float32"], ["--dtype", "bfloat16"], ["--quantization", "int8"], ["--quantization", "int4"]],
    ids=lambda flags: flags[-1],
)
@pytest.mark.parametrize("name", ["gemma3-window100", "qwen3-moe", "deepseek3-dense-yarn"])
def test_rows_without_an_adapter_have_the_bits_of_a_model_without(
    name: str, flags: list[str], checkpoints: Path, tmp_path: Path
) -> None:
    """Also beside rows with one."""
    model, prompts = checkpoints / name, [prompt(seed, 40) for seed in range(3)]
    make_adapter(model, tmp_path, target_modules=["o_proj", "lm_head"])
    with EngineUnderTest(model, *flags) as engine, Client(engine.address) as client:
        for number, tokens in enumerate(prompts):
            client.ask(f"{number}", tokens)
        expected = [client.answer(f"{number}") for number in range(len(prompts))]
    with EngineUnderTest(model, *flags, *flags_of(tmp_path)) as engine, Client(engine.address) as client:
        for number, tokens in enumerate(prompts):
            client.ask(f"adapted {number}", tokens, str(tmp_path))
            client.ask(f"{number}", tokens)
        assert [client.answer(f"{number}") for number in range(len(prompts))] == expected
        assert [client.answer(f"adapted {number}") for number in range(len(prompts))] != expected
