"""The tensors that adapters may change have the shapes that they have in checkpoints of every architecture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import load_references
from checkpoints import CHECKPOINTS
from safetensors.numpy import save_file

from quire.kernels.adapted import HEAD
from quire.kernels.adapters.adapter import Adapter
from quire.kernels.adapters.changeable import Changeable
from quire.kernels.adapters.reading import read_adapter
from quire.kernels.adapters.shapes import linear_shapes, other_shapes, unread_shapes
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph
from quire.kernels.models import ARCHITECTURES
from quire.kernels.weights.checkpoint import stored_names

EXPERTS = ".experts."  # which checkpoints may have stacked
OTHER_EMBEDDINGS = (".wpe.weight", ".embed_tokens_per_layer.weight")


def models() -> Iterator[tuple[Graph, dict[str, tuple[int, ...]]]]:
    """Yield the graph of each model of the tests, and the shapes of the tensors in its checkpoint."""
    for checkpoint in CHECKPOINTS:
        references = load_references(checkpoint.name)
        config = ModelConfig(references.config)
        shapes = {name: tuple(shape) for name, shape in references.shapes.items()}
        yield ARCHITECTURES[config.architecture](config), shapes


def test_every_tensor_has_the_shape_that_it_has_in_a_checkpoint() -> None:
    for graph, stored in models():
        for name, shape in {**linear_shapes(graph), **other_shapes(graph)}.items():
            given = next((stored[key] for key in stored_names(name) if key in stored), None)
            if given is None:
                assert EXPERTS in name or name == HEAD, name
                continue
            assert given in (shape, shape[::-1]), name


def test_every_matrix_of_a_checkpoint_is_there() -> None:
    for graph, stored in models():
        known = {key for name in (*linear_shapes(graph), *other_shapes(graph)) for key in stored_names(name)}
        matrices = {name for name, shape in stored.items() if len(shape) == 2 and name.endswith(".weight")}
        assert not [name for name in matrices - known if not name.endswith(OTHER_EMBEDDINGS)]


def test_every_norm_of_a_checkpoint_is_there() -> None:
    for graph, stored in models():
        known = {key for name in other_shapes(graph) for key in stored_names(name)}
        norms = {name for name, shape in stored.items() if len(shape) == 1 and "norm" in name.split(".")[-2]}
        assert not norms - known, sorted(norms - known)[:5]


def read(folder: Path, graph: Graph, names: Iterable[str]) -> Adapter:
    """Write an adapter of ones that changes these layers, and read it."""
    folder.mkdir()
    shapes, tensors = {**linear_shapes(graph), **unread_shapes(graph)}, {}
    for name in names:
        outputs, inputs = shapes.get(name, (64, 64))
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = np.ones((4, inputs), np.float32)
        tensors[f"{module}.lora_B.weight"] = np.ones((outputs, 4), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    changeable = Changeable(frozenset(linear_shapes(graph)), None)  # type: ignore[arg-type]
    return read_adapter(folder, graph, 64, changeable)


@pytest.mark.parametrize("name", ["gemma3n-window100", "gemma4-shared-window100"])
def test_an_adapter_may_change_layers_that_nothing_reads(name: str, tmp_path: Path) -> None:
    """Earlier releases of transformers gave keys and values to layers that read those of another one."""
    config = ModelConfig(load_references(name).config)
    graph = ARCHITECTURES[config.architecture](config)
    queries = [weight for weight in linear_shapes(graph) if weight.endswith("q_proj.weight")]
    unread = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (3, 4, 5) for part in "kv"]
    assert sorted(unread_shapes(graph)) == unread
    expected = read(tmp_path / "queries", graph, queries)
    found = read(tmp_path / "all", graph, [*queries, *unread])
    assert found.layers.keys() == set(queries)
    assert found.digest == expected.digest
    with pytest.raises(ModelError, match="not of this base model"):
        read(tmp_path / "wrong", graph, [*queries, "model.layers.6.self_attn.k_proj.weight"])
