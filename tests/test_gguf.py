"""GGUF files as models: the same bits as the folder they were made of, and quantized types near the float model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf_files import write_gguf

from quire.frontend import SamplingParams
from quire.frontend.hub.names import name_of
from quire.frontend.hub.resolve import resolve_model
from quire.kernels.devices.instruction_sets import available_isas
from quire.kernels.weights.gguf_checkpoint import open_checkpoint
from quire.kernels.weights.quantized.gguf import TYPES

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import LLM

PROMPTS = ["Once upon a time there was a king", "The fox", "In the wood there lived a poor woman and her children"]
GREEDY = SamplingParams(temperature=0, max_tokens=48, logprobs=3, prompt_logprobs=1, ignore_eos=True)


def answers(llm: LLM, prompts: list[Any]) -> list[tuple[Any, ...]]:
    """Return tokens and log probabilities of prompts and greedy answers, to the last bit."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [(o.prompt_token_ids, o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def test_a_bf16_file_of_the_demo_model_is_the_demo_model(
    demo_model: Path, tmp_path: Path, engine: EngineFactory
) -> None:
    file = tmp_path / "tales.gguf"
    write_gguf(demo_model, file, "BF16")
    llm = engine(file)
    assert answers(llm, PROMPTS) == answers(engine(demo_model), PROMPTS)
    folder = resolve_model(str(file))
    assert name_of(str(folder)) == "tales"
    assert folder == resolve_model(str(file)), "it is made once"
    assert open_checkpoint(str(folder)).eos_token_ids() == [2, 4]


def mixed(name: str) -> str:
    """Return the type of a tensor in a file like Q4_K_M, with more bits for some layers; an up is unlike its gate."""
    if "embed" in name or "v_proj" in name or ("down_proj" in name and ".1." in name):
        return "Q6_K"
    return "Q8_0" if "o_proj" in name or ("up_proj" in name and ".2." in name) else "Q4_K"


@pytest.mark.parametrize("kind", [*TYPES, "F16", mixed], ids=lambda kind: getattr(kind, "__name__", kind))
def test_quantized_files_are_near_their_float_twins(
    kind: str | Callable[[str], str], demo_model: Path, tmp_path: Path, engine: EngineFactory,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    """Their weights are the same numbers; only activations are rounded, to 8 bits in groups of 32."""
    file, twin = tmp_path / "tales.gguf", tmp_path / "twin.gguf"
    write_gguf(demo_model, twin, "F32", replaced=write_gguf(demo_model, file, kind))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)

    def logprobs(model: Path) -> np.ndarray:
        llm = engine(model, dtype="float32")
        output = llm.generate([" ".join(PROMPTS)], params, use_tqdm=False)[0]
        assert output.prompt_logprobs is not None
        return np.array([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:] if entry])

    difference = logprobs(file) - logprobs(twin)
    root_mean_square = np.sqrt(np.mean(difference**2))
    record_property("root_mean_square", f"{root_mean_square:.1e}")
    assert root_mean_square < 0.12


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", mixed], ids=lambda kind: getattr(kind, "__name__", kind))
def test_answers_do_not_depend_on_batch_chunks_or_threads(
    kind: str | Callable[[str], str], demo_model: Path, tmp_path: Path, engine: EngineFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file = tmp_path / "tales.gguf"
    write_gguf(demo_model, file, kind)
    alone = [answers(engine(file, threads=1, max_num_batched_tokens=32), [prompt])[0] for prompt in PROMPTS]
    for isa in available_isas():
        monkeypatch.setenv("QUIRE_ISA", isa)
        assert answers(engine(file, threads=2), PROMPTS) == alone, isa


def test_a_model_in_parts_is_the_whole_model(demo_model: Path, tmp_path: Path, engine: EngineFactory) -> None:
    whole = tmp_path / "tales.gguf"
    tensors = write_gguf(demo_model, whole, "Q8_0")
    write_gguf(demo_model, whole, "Q8_0", part_tensors=len(tensors) // 2 + 1)
    parts = sorted(path.name for path in tmp_path.glob("tales-*"))
    assert parts == ["tales-00001-of-00002.gguf", "tales-00002-of-00002.gguf"]
    assert answers(engine(tmp_path / parts[0]), PROMPTS) == answers(engine(whole), PROMPTS)


def test_a_folder_may_have_the_name_of_a_file(demo_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tales.gguf"
    folder.symlink_to(demo_model)
    assert resolve_model(str(folder)) == folder


def test_parts_of_a_file(demo_model: Path, tmp_path: Path, engine: EngineFactory) -> None:
    whole = tmp_path / "tales.gguf"
    write_gguf(demo_model, whole, "Q8_0")
    folder = resolve_model(str(whole))
    assert (
        json.loads((folder / "config.json").read_text())["quantization_config"]["types"]["model.embed_tokens"] == "Q8_0"
    )
    part = tmp_path / "tales-00002-of-00002.gguf"
    part.write_bytes(whole.read_bytes())
    with pytest.raises(ValueError, match=r"give its first part, tales-00001-of-00002.gguf"):
        resolve_model(str(part))
    part.rename(tmp_path / "tales-00001-of-00002.gguf")
    with pytest.raises(ValueError, match=r"tales-00002-of-00002.gguf: No such file.*needs all of its parts"):
        resolve_model(str(tmp_path / "tales-00001-of-00002.gguf"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(100), "does not begin with the letters GGUF"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 16, "promises 18446744073709551615 tensors"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        resolve_model(str(file))
    assert "\n" not in str(caught.value)
