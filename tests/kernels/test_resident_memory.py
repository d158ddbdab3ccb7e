"""Resident memory after loading a model and after its first step, and the peak, of several number formats."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_conversion import keys_of
from gguf_files import add_metadata, vocabulary

from quire.kernels.gguf.folder import model_folder

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 2, 1024, 16384, 65536
METHODS = {
    "bf16": None,
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False},
}
"""How safetensors files have the linear layers, and their quantization_config."""
PROGRAM = """
import sys
from pathlib import Path
from quire.kernels.options import LoadOptions
from quire.kernels.runner import PreparedModel, StepInput

options = {} if sys.argv[2] == "None" else {"quantization": sys.argv[2]}
options |= {"threads": 2, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 30}
prepared = PreparedModel(LoadOptions(sys.argv[1], **options))
runner = prepared.open()
slot = runner.sequences.open(list(range(64)), 64)
assert runner.sequences.reserve(slot, 65)
runner.run(StepInput([slot], [0], [64]))
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
sizes = [int(status[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS", "VmHWM")]
print(runner.memory.weights, runner.memory.kv, *sizes)
"""


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model whose weights are mostly those of its feed-forward layers."""
    found: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for i in range(LAYERS):
        attention = {"q_proj": (256, HIDDEN), "k_proj": (128, HIDDEN), "v_proj": (128, HIDDEN), "o_proj": (HIDDEN, 256)}
        feed_forward = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN)}
        found |= {f"layers.{i}.self_attn.{name}": shape for name, shape in attention.items()}
        found |= {f"layers.{i}.mlp.{name}": shape for name, shape in feed_forward.items()}
        found |= {f"layers.{i}.mlp.down_proj": (HIDDEN, INTERMEDIATE)}
        found |= {f"layers.{i}.self_attn.{name}_norm": (64,) for name in ("q", "k")}
        found |= {f"layers.{i}.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    return {f"model.{name}.weight": shape for name, shape in found.items()}


def entries(method: str) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield name, dtype, shape and bytes of an element of each tensor."""
    for name, shape in shapes().items():
        if method == "bf16" or "_proj." not in name:
            yield name, "BF16", shape, 2
        elif method == "fp8":
            yield name, "F8_E4M3", shape, 1
            yield f"{name}_scale_inv", "BF16", (shape[0] // 128, shape[1] // 128), 2
        else:
            module, n, k = name.removesuffix(".weight"), *shape
            yield f"{module}.qweight", "I32", (k // 8, n), 4
            yield f"{module}.qzeros", "I32", (k // 128, n // 8), 4
            yield f"{module}.scales", "F16", (k // 128, n), 2


def config_of(demo_model: Path) -> dict[str, Any]:
    """Return config.json of the model."""
    own: dict[str, Any] = json.loads((demo_model / "config.json").read_text())
    return own | {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY, "layer_types": ["full_attention"] * LAYERS,
    }  # fmt: skip


def write_zeros(folder: Path, demo_model: Path, method: str) -> None:
    """Write a checkpoint whose weights are the zeros of a sparse file."""
    header, end = {}, 0
    for name, dtype, shape, element_bytes in entries(method):
        begin, end = end, end + element_bytes * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = config_of(demo_model) | {"quantization_config": METHODS[method]}
    (folder / "config.json").write_text(json.dumps(config))


def write_gguf_zeros(folder: Path, demo_model: Path, kind: str) -> Path:
    """Write a GGUF file whose weights are the zeros of a sparse file; return the model folder that it stands for."""
    config, type_ = config_of(demo_model), gguf.GGMLQuantizationType[kind]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, LAYERS)
    writer = gguf.GGUFWriter(folder / "zeros.gguf", "qwen3")
    add_metadata(writer, {f"qwen3.{key}": value for key, value in keys_of(config).items()} | vocabulary(demo_model))
    for name, shape in shapes().items():
        stored, form = names.get_name(name, (".weight",)), type_ if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        block, block_bytes = gguf.GGML_QUANT_SIZES[form]
        size = math.prod(shape) // block * block_bytes
        assert stored is not None
        writer.add_tensor_info(stored, shape, np.dtype(np.float32), size, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    sizes = sum(-(-tensor.nbytes // 32) * 32 for tensor in writer.tensors[0].values())
    written = (folder / "zeros.gguf").stat().st_size
    os.truncate(folder / "zeros.gguf", -(-written // 32) * 32 + sizes)
    return model_folder(folder / "zeros.gguf", folder / "made")


@pytest.mark.parametrize(
    ("storage", "quantization", "least"),
    [
        *((method, *mode) for method in ("bf16", "fp8") for mode in ((None, 330e6), ("int8", 165e6), ("int4", 80e6))),
        ("gptq", None, 180e6),
        ("Q8_0", None, 180e6),
        ("Q4_K", None, 95e6),
        ("Q6_K", None, 135e6),
    ],
)
def test_weights_are_in_memory_once(
    storage: str, quantization: str | None, least: float, demo_model: Path, tmp_path: Path
) -> None:
    """Neither the mapped checkpoint nor KV pages that nobody needs stay resident, not even while loading."""
    folder = tmp_path
    if storage in METHODS:
        write_zeros(tmp_path, demo_model, storage)
    else:
        folder = write_gguf_zeros(tmp_path, demo_model, storage)
    command = [sys.executable, "-c", PROGRAM, str(folder), str(quantization)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    weights, kv, anonymous, resident, peak = map(int, result.stdout.split())
    assert weights > least
    assert kv == 1 << 30
    assert weights < anonymous < weights + 130e6
    assert peak < 1.15 * resident
