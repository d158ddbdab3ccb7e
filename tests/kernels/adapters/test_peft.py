"""Adapters that PEFT wrote change what a model computes as they do in PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from reference_libraries import import_reference

from quire.kernels.adapted import HEAD
from quire.kernels.adapters.adapter import Adapter, LowRank
from quire.kernels.adapters.peft import read_adapter
from quire.kernels.adapters.shapes import linear_shapes, other_shapes

import_reference("peft")
peft_adapters = import_reference("peft_adapters")
transformers = import_reference("transformers")

Floats = npt.NDArray[np.float32]
ATTENTION = ["q_proj", "v_proj"]
ROWS = 3


def read(folder: Path, model: str, **changes: Any) -> Adapter:
    graph = peft_adapters.graph_of(model)
    return read_adapter(folder, linear_shapes(graph), **{"max_rank": 64, "others": other_shapes(graph), **changes})


def computed(layer: LowRank, weight: Floats, bias: Floats | None, x: Floats) -> npt.NDArray[np.float64]:
    """What a linear layer with the weights [outputs, inputs] computes with an adapter, from the definition."""
    whole = weight + layer.scale * layer.b.astype(np.float64) @ layer.a
    if layer.magnitude is not None:
        whole *= (layer.magnitude / np.linalg.norm(whole, axis=1))[:, None]
    biases = [each for each in (bias, layer.bias) if each is not None]
    output: npt.NDArray[np.float64] = x @ whole.T + np.sum(biases, axis=0)
    return output


def check_layers(model: Any, adapter: Adapter) -> None:
    """Every layer that PEFT adapts is there, no other, and computes the same."""
    modules = peft_adapters.linear_modules(model)
    assert {f"{name}.weight" for name in modules} == adapter.layers.keys()
    rng = np.random.default_rng(0)
    for name, module in modules.items():
        weight, bias = module.base_layer.weight.detach().numpy(), module.base_layer.bias
        weight = weight.T if module.fan_in_fan_out else weight
        x = rng.standard_normal((ROWS, weight.shape[1]), np.float32)
        found = computed(adapter.layers[f"{name}.weight"], weight, None if bias is None else bias.detach().numpy(), x)
        np.testing.assert_allclose(found, peft_adapters.output(module, x), atol=1e-5, rtol=1e-5)


RANKS = {r"^model.layers.0.self_attn.q_proj": 2, r"layers\.\d\.mlp\.(up|gate)_proj": 3, "q_proj": 6}
ALPHAS = {r".*\.1\..*": 7, "q_proj": 5, "self_attn.q_proj": 9}
"""In the order in which PEFT saves and then matches them."""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "list": ("llama", {"target_modules": ATTENTION, "r": 4, "lora_alpha": 6}),
    "expression": ("llama", {"target_modules": r".*\.1\..*(gate|o)_proj", "lora_alpha": 3}),
    "all linear": ("llama", {"target_modules": "all-linear", "r": 1}),
    "excluded": ("qwen3-tied", {"target_modules": "all-linear", "exclude_modules": ["down_proj"]}),
    "layers": ("llama", {"target_modules": ATTENTION, "layers_to_transform": [1], "layers_pattern": "layers"}),
    "ranks and alphas": (
        "qwen3-tied",
        {"target_modules": "all-linear", "r": 4, "rank_pattern": RANKS, "alpha_pattern": ALPHAS},
    ),
    "rank-stabilized": ("llama", {"target_modules": ATTENTION, "r": 4, "use_rslora": True}),
    "DoRA": ("llama", {"target_modules": "all-linear", "r": 4, "use_dora": True, "use_rslora": True}),
    "DoRA with biases": ("llama-biases", {"target_modules": "all-linear", "use_dora": True}),
    "bias of B": ("llama-biases", {"target_modules": ATTENTION, "lora_bias": True, "lora_alpha": 3}),
    "head": ("llama", {"target_modules": ["lm_head"]}),
    "gaussian": ("llama", {"target_modules": ATTENTION, "init_lora_weights": "gaussian"}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "transposed DoRA": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_compute_what_they_do_in_peft(kind: str, tmp_path: Path) -> None:
    name, fields = KINDS[kind]
    model = peft_adapters.adapted(name, **fields)
    adapter = read(peft_adapters.save(model, tmp_path), name)
    check_layers(model, adapter)
    assert not adapter.embeddings
    assert not adapter.tokens
    assert adapter.replaced.keys() == ({HEAD} if kind == "head" else set())  # PEFT saves it where it is adapted
    assert adapter.max_rank == max(layer.rank for layer in adapter.layers.values())


@pytest.mark.parametrize("kind", ["all", "lora_only"])
@pytest.mark.parametrize("name", ["llama-biases", "gpt2"])
def test_trained_biases_replace_those_of_the_base(name: str, kind: str, tmp_path: Path) -> None:
    targets = ["c_attn", "c_fc"] if name == "gpt2" else ["q_proj", "down_proj"]
    model = peft_adapters.adapted(name, target_modules=targets, bias=kind, fan_in_fan_out=name == "gpt2")
    adapter = read(peft_adapters.save(model, tmp_path), name)
    check_layers(model, adapter)
    all_biases = {
        path.replace(".base_layer", ""): value.detach().numpy()
        for path, value in model.base_model.model.named_parameters()
        if path.endswith(".bias")
    }
    ends = "" if kind == "all" else tuple(f"{target}.bias" for target in targets)
    biases = {path: value for path, value in all_biases.items() if path.endswith(ends)}
    assert adapter.replaced.keys() == biases.keys()
    for path, value in biases.items():
        assert np.array_equal(adapter.replaced[path].to_f32(), value)


def test_saved_modules_replace_those_of_the_base(tmp_path: Path) -> None:
    model = peft_adapters.adapted(
        "llama", target_modules=ATTENTION, modules_to_save=["lm_head", "embed_tokens", "norm"]
    )
    adapter = read(peft_adapters.save(model, tmp_path), "llama")
    check_layers(model, adapter)
    expected = {
        f"{name}.weight": module.modules_to_save["default"].weight.detach().numpy()
        for name, module in model.base_model.model.named_modules()
        if hasattr(module, "modules_to_save")
    }
    assert expected.keys() >= {HEAD, "model.embed_tokens.weight", "model.norm.weight"}
    assert adapter.replaced.keys() == expected.keys()
    assert all(np.array_equal(adapter.replaced[name].to_f32(), weight) for name, weight in expected.items())


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_an_embedding_changes_as_in_peft(name: str, tmp_path: Path) -> None:
    model = peft_adapters.adapted(name, target_modules=["embed_tokens", "q_proj"], r=4, lora_alpha=6)
    adapter = read(peft_adapters.save(model, tmp_path), name)
    module = model.base_model.model.model.embed_tokens
    [(found, change)] = adapter.embeddings.items()
    tokens = np.arange(peft_adapters.VOCABULARY)
    weight = module.base_layer.weight.detach().numpy()
    assert found == "model.embed_tokens.weight"
    np.testing.assert_allclose(
        weight + change.scale * (change.b @ change.a).T, peft_adapters.output(module, tokens), atol=1e-5
    )
    assert np.array_equal(adapter.replaced[found].to_f32(), weight)  # PEFT saves it where it is adapted
    check_layers(model, adapter)


@pytest.mark.parametrize("indices", [[7, 3, 40], {"embed_tokens": [7, 3, 40]}])
@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_rows_of_tokens_replace_those_of_the_base(name: str, indices: Any, tmp_path: Path) -> None:
    model = peft_adapters.adapted(name, target_modules=ATTENTION, trainable_token_indices=indices)
    adapter = read(peft_adapters.save(model, tmp_path), name)
    check_layers(model, adapter)
    [(found, tokens)] = adapter.tokens.items()
    assert (found, tokens.tokens) == ("model.embed_tokens.weight", (7, 3, 40))
    module = model.base_model.model.model.embed_tokens
    assert np.array_equal(tokens.rows.to_f32(), peft_adapters.output(module, np.array(tokens.tokens)))
    if name == "qwen3-tied":  # the head reads them too
        x = np.random.default_rng(0).standard_normal((ROWS, peft_adapters.HIDDEN), np.float32)
        logits = peft_adapters.output(model.base_model.model.lm_head, x)[:, list(tokens.tokens)]
        np.testing.assert_allclose(x @ tokens.rows.to_f32().T, logits, atol=1e-5)


def test_a_tied_head_has_a_change_of_its_own(tmp_path: Path) -> None:
    model = peft_adapters.adapted("qwen3-tied", target_modules=["lm_head"])
    adapter = read(peft_adapters.save(model, tmp_path), "qwen3-tied")
    assert adapter.layers.keys() == {HEAD}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_of_16_bits(dtype: str, tmp_path: Path) -> None:
    torch = import_reference("torch")
    model = peft_adapters.adapted("llama", target_modules=ATTENTION).to(getattr(torch, dtype))
    adapter = read(peft_adapters.save(model, tmp_path), "llama")
    for name, module in peft_adapters.linear_modules(model).items():
        layer = adapter.layers[f"{name}.weight"]
        assert layer.stored_a.format == {"bfloat16": "bf16", "float16": "f16"}[dtype]
        assert np.array_equal(layer.a, module.lora_A["default"].weight.detach().float().numpy())
        assert np.array_equal(layer.b, module.lora_B["default"].weight.detach().float().numpy())


def test_adapters_of_models_without_a_head_have_names_without_prefix(tmp_path: Path) -> None:
    torch = import_reference("torch")
    peft = import_reference("peft")
    torch.manual_seed(0)
    base = transformers.AutoModel.from_config(peft_adapters.config_of("llama"))
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=ATTENTION))
    adapter = read(peft_adapters.save(model, tmp_path), "llama")
    assert adapter.layers.keys() == {f"model.{name}.weight" for name in peft_adapters.linear_modules(model)}
