"""All layers of latent attention may be changed but `kv_b_proj`, which an error names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from adapter_files import PREFIX, write_adapter

from quire.kernels.adapters.changeable import changeable_in
from quire.kernels.adapters.reading import read_adapter
from quire.kernels.adapters.shapes import linear_shapes
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.models import build_graph
from quire.kernels.options import LoadOptions
from quire.kernels.runner import describe

RANK = 2


@pytest.mark.parametrize("model", ["deepseek2-dense", "deepseek3-dense-yarn", "glm4-moe-lite"])
def test_the_layer_that_can_not_be_changed_is_named(model: str, checkpoints: Path, tmp_path: Path) -> None:
    plan, checkpoint = describe(LoadOptions(str(checkpoints / model), max_loras=1, max_lora_rank=8))
    graph, changeable = build_graph(ModelConfig({**plan.config})), changeable_in(plan.adapted, checkpoint)
    shapes = linear_shapes(graph)
    of_attention = [name for name in shapes if ".layers.0.self_attn." in name]
    assert len(of_attention) > 3
    for name in of_attention:
        outputs, inputs = shapes[name]
        at = f"{PREFIX}{name.removesuffix('.weight')}"
        halves = {"A": np.ones((RANK, inputs), np.float32), "B": np.ones((outputs, RANK), np.float32)}
        folder = write_adapter(tmp_path, {f"{at}.lora_{half}.weight": array for half, array in halves.items()})
        if "kv_b_proj" not in name:
            assert read_adapter(folder, graph, 8, changeable).layers.keys() == {name}
            continue
        with pytest.raises(
            ModelError, match=f"target_modules changes {name}, which can't be changed for some requests"
        ):
            read_adapter(folder, graph, 8, changeable)
