"""The tensors that adapters may change have the shapes that they have in checkpoints of every architecture."""

from __future__ import annotations

from collections.abc import Iterator

from checkpoint_files import load_references
from checkpoints import CHECKPOINTS

from quire.kernels.adapted import HEAD
from quire.kernels.adapters.shapes import linear_shapes, other_shapes
from quire.kernels.config import ModelConfig
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
