"""Checkpoints of random weights have the tensors of published ones."""

from __future__ import annotations

import pytest
from make_checkpoint import SHAPES, all_shapes, chosen_layers
from reference_libraries import import_reference

PUBLISHED = {
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
    "block_sparse_moe.router": "block_sparse_moe.router.layer",
}
"""Names of Granite's files that transformers changes when it reads them."""


@pytest.mark.parametrize(
    "shape", ["qwen3-0.6b", "qwen3.5-0.8b", "lfm2-1.2b", "granite-4-tiny", "gemma-3n-e2b", "gemma-4-e2b"]
)
def test_tensors_are_those_that_transformers_has(shape: str) -> None:
    torch, transformers = import_reference("torch"), import_reference("transformers")
    sizes = {"vocab_size": 512, "vocab_size_per_layer_input": 512, "num_local_experts": 8}
    config = SHAPES[shape] | {"hidden_act": "silu"} | sizes
    config |= chosen_layers(config, 7)
    fields = {name: value for name, value in config.items() if name != "architectures"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        )
    expected = {}
    for name, tensor in model.state_dict().items():
        for read, published in PUBLISHED.items():
            name = name.replace(read, published)
        expected[name] = tuple(tensor.shape)
    expected.pop("lm_head.weight")  # tied
    assert {name: shape for name, shape, _ in all_shapes(config)} == expected
