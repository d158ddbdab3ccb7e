"""Resident memory after loading a model and after its first step, and the peak."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY = 4, 1024, 16384, 512
PROGRAM = """
import sys
from pathlib import Path
from quire.kernels.options import LoadOptions
from quire.kernels.runner import PreparedModel

prepared = PreparedModel(LoadOptions(sys.argv[1], threads=2, max_model_len=512, kv_cache_memory_bytes=1 << 30))
runner = prepared.open()
slot = runner.sequences.open(list(range(64)), 64)
assert runner.sequences.reserve(slot, 65)
runner.step([slot], [0], [64])
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print(runner.memory.weights, runner.memory.kv, *(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "VmHWM")))
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


def write_zeros(folder: Path, demo_model: Path) -> None:
    """Write a checkpoint whose weights are the zeros of a sparse file."""
    header, end = {}, 0
    for name, shape in shapes().items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = json.loads((demo_model / "config.json").read_text()) | {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY, "layer_types": ["full_attention"] * LAYERS,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def test_weights_are_in_memory_once(demo_model: Path, tmp_path: Path) -> None:
    """Neither the mapped checkpoint nor KV pages that nobody needs stay resident, not even while loading."""
    write_zeros(tmp_path, demo_model)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    weights, kv, anonymous, peak = map(int, result.stdout.split())
    assert weights > 390e6
    assert kv == 1 << 30
    assert weights < anonymous < peak < 1.15 * weights + 250e6
