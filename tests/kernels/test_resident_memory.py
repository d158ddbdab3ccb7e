"""Resident memory after loading a model and after its first step, and the peak, of several number formats."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 2, 1024, 16384, 65536
BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
PROGRAM = """
import sys
from pathlib import Path
from quire.kernels.options import LoadOptions
from quire.kernels.runner import PreparedModel

options = {} if sys.argv[2] == "None" else {"quantization": sys.argv[2]}
options |= {"threads": 2, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 30}
prepared = PreparedModel(LoadOptions(sys.argv[1], **options))
runner = prepared.open()
slot = runner.sequences.open(list(range(64)), 64)
assert runner.sequences.reserve(slot, 65)
runner.step([slot], [0], [64])
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


def entries(fp8: bool) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yield name, dtype, shape and bytes of an element of each tensor."""
    for name, shape in shapes().items():
        if fp8 and "_proj." in name:
            yield name, "F8_E4M3", shape, 1
            yield f"{name}_scale_inv", "BF16", (shape[0] // 128, shape[1] // 128), 2
        else:
            yield name, "BF16", shape, 2


def write_zeros(folder: Path, demo_model: Path, fp8: bool) -> None:
    """Write a checkpoint whose weights are the zeros of a sparse file."""
    header, end = {}, 0
    for name, dtype, shape, element_bytes in entries(fp8):
        begin, end = end, end + element_bytes * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = json.loads((demo_model / "config.json").read_text()) | {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY, "layer_types": ["full_attention"] * LAYERS,
        **({"quantization_config": BLOCK} if fp8 else {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_weights_are_in_memory_once(quantization: str | None, fp8: bool, demo_model: Path, tmp_path: Path) -> None:
    """Neither the mapped checkpoint nor KV pages that nobody needs stay resident, not even while loading."""
    write_zeros(tmp_path, demo_model, fp8)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(quantization)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    weights, kv, anonymous, resident, peak = map(int, result.stdout.split())
    assert weights > {None: 330e6, "int8": 165e6, "int4": 80e6}[quantization]
    assert kv == 1 << 30
    assert weights < anonymous < weights + 130e6
    assert peak < 1.15 * resident
