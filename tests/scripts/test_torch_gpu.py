"""`scripts/bench/torch_gpu.py`, on the CPU."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import pytest
from bench import torch_gpu
from bench.work_speed import WorkSpeed
from make_checkpoint import SHAPES

torch = pytest.importorskip("torch")

CONFIG: dict[str, Any] = {
    **SHAPES["qwen3-0.6b"], "vocab_size": 512, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu", "eos_token_id": 0,
}  # fmt: skip


def layers() -> Any:
    """Return the layers of the model in transformers."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIG)).model.layers


def test_the_gemms_are_those_of_the_linear_layers() -> None:
    shapes = [tuple(part.weight.shape) for part in layers()[0].modules() if isinstance(part, torch.nn.Linear)]
    assert sorted(torch_gpu.linear_shapes(CONFIG)) == sorted(shapes)
    assert torch_gpu.gemm_operations(CONFIG, 10) == 2 * 2 * 10 * sum(n * k for n, k in shapes)


def test_gemms_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    torch_gpu.compare_gemms("gemms", CONFIG, 32, "cpu", WorkSpeed(1, 32, 1e-9, 1.0, 1))
    assert re.fullmatch(
        r"speed  gemms {23} 32 rows: [0-9.]+ TOP/s, Quire's prefill [0-9,.]+ TOP/s, \d+% of it\n",
        capsys.readouterr().out,
    )


def test_decoding_goes_on_from_the_prompt() -> None:
    """Tokens of the static cache are those of `generate`."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIG)).eval()
    prompts, seen, steps = torch.randint(0, 512, (3, 8)), [], 3
    cache = transformers.StaticCache(config=model.config, max_cache_len=8 + 2 * steps + 2)
    model.register_forward_hook(lambda *given: seen.append(given[2].logits[:, -1].argmax(-1)))
    with torch.no_grad():
        torch_gpu._decode_seconds(torch, model, prompts, cache, steps)
    ours = torch.stack(seen, dim=1)
    theirs = model.generate(prompts, max_new_tokens=1 + steps, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert torch.equal(ours, theirs[:, 8:])


def test_a_model_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (one, in_graph), (three, _) = torch_gpu.model_speeds(CONFIG, [(1, 24), (3, 8)], "cpu", 2)
    assert in_graph is None
    assert one.weight_bytes == 2 * (512 * 64 + 64 + sum(weight.numel() for weight in layers().parameters()))
    assert min(one.prefill, one.decode, three.prefill, three.decode) > 0
    torch_gpu.compare_model("model", CONFIG, [(1, 24), (3, 8)], "cpu", 2, [replace(one, prefill=1e-9)])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("speed  model                        1 x 24 tokens: prefill ")
    assert "; Quire is " in first
    assert second.endswith(" ms without a CUDA graph")


def test_a_peer_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(torch_gpu.PeerError, match="finds no GPU"):
            torch_gpu.int8_gemm_seconds(CONFIG, 32, "cuda:0")
    for module in ("transformers", "torch"):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(torch_gpu.PeerError, match=f"^{module} can't be imported"):
            next(torch_gpu.model_speeds(CONFIG, [(1, 8)], "cpu", 1))
