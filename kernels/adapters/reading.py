"""Reading of adapters, in whichever format they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from quire.kernels.adapters import peft
from quire.kernels.adapters.adapter import Adapter
from quire.kernels.adapters.changeable import Changeable
from quire.kernels.adapters.changed_head import NO_HEAD, ClassifierHead
from quire.kernels.adapters.gguf import read_gguf_adapter
from quire.kernels.adapters.shapes import linear_shapes, other_shapes, unread_shapes
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Attention, Graph


def read_adapter(
    path: Path, graph: Graph, max_rank: int, changeable: Changeable, head: ClassifierHead = NO_HEAD,
    model_class: str = "",
) -> Adapter:  # fmt: skip
    """Read an adapter of a model, PEFT's folder or a GGUF file; `head` classifies. Raises ModelError.

    Changes of layers that nothing reads are left out. `model_class` is the class of the model in its config.json.
    """
    unread = unread_shapes(graph)
    changeable = replace(changeable, layers=changeable.layers | unread.keys())
    adapter = _read(path, graph, max_rank, changeable, head, unread, model_class)
    return replace(adapter, layers={name: layer for name, layer in adapter.layers.items() if name not in unread})


def _read(
    path: Path, graph: Graph, max_rank: int, changeable: Changeable, head: ClassifierHead,
    unread: Mapping[str, tuple[int, int]], model_class: str,
) -> Adapter:  # fmt: skip
    """Read an adapter with its changes of layers that nothing reads."""
    shapes, others = {**linear_shapes(graph), **unread}, {**other_shapes(graph), **head.shapes}
    for name, shape in head.shapes.items():
        if len(shape) == 2:
            shapes[name] = shape[0], shape[1]
    if path.is_dir():
        return peft.read_adapter(path, shapes, max_rank=max_rank, others=others, changeable=changeable)
    if not path.exists():
        raise ModelError(f"{path} does not exist; give a folder that PEFT has written, or a GGUF file")
    heads = next((layer.heads for layer in graph.attentions if isinstance(layer, Attention)), None)
    if heads is None:
        raise ModelError(f"{path} is no folder, and GGUF adapters of this model's attention are not supported")
    return read_gguf_adapter(
        path, shapes, heads=heads, max_rank=max_rank, others=others, changeable=changeable, model_class=model_class
    )
