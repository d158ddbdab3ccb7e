"""Disk cache of packed weights: read instead of packed, verified, never mixed up, never left half written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import short_answers
from patience import PATIENCE
from quantized_checkpoints import by_name, write_quantized
from tiny_model import CONFIG, weights, write

from quire.frontend.engine_args import DEMO_MODEL
from quire.kernels.errors import ModelError
from quire.kernels.weights import loader, weight_cache

if TYPE_CHECKING:
    from conftest import EngineFactory


def answer(model: Path, folder: Path | None, **chosen: Any) -> tuple[list[int], list[float]]:
    """Return four greedy tokens and their log probabilities."""
    return short_answers.answer(
        short_answers.load(model, weight_cache=None if folder is None else str(folder), **chosen)
    )


def files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_the_second_start_reads_what_the_first_packed(
    quantization: str | None, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(demo_model, None, quantization=quantization)
    assert answer(demo_model, tmp_path, quantization=quantization) == expected
    assert files(tmp_path) == [".packed"]
    monkeypatch.setattr(loader.Loader, "_pack", lambda *_: pytest.fail("packed again"))
    assert answer(demo_model, tmp_path, quantization=quantization) == expected


def test_each_mode_and_each_checkpoint_has_a_file_of_its_own(demo_model: Path, tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(demo_model, model)
    model.chmod(0o755)
    modes: list[dict[str, Any]] = [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "float32"}]
    for mode in modes:
        answer(model, cache, **mode)
    assert files(cache) == [".packed"] * len(modes)
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.unlink()
    weights.write_bytes(data)
    answer(model, cache)
    assert files(cache) == [".packed"] * (len(modes) + 1)


def flip(path: Path, offset: int) -> None:
    """Flip a bit of the byte at `offset`, from the end if it is negative."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def pack_other_weights(path: Path) -> None:
    """Put the file of another checkpoint of the same sizes in its place."""
    other = path.parent / "other"
    shutil.copytree(DEMO_MODEL, other / "model")
    answer(other / "model", other)
    (packed,) = other.glob("*.packed")
    assert packed.stat().st_size == path.stat().st_size
    packed.replace(path)
    shutil.rmtree(other)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path, 4096), "has 4096 bytes instead of"),
        (lambda path: os.truncate(path, 0), "has 0 bytes instead of"),
        (lambda path: flip(path, 0), "is damaged in model.embed_tokens.weight (wrong checksum)"),
        (lambda path: flip(path, path.stat().st_size // 2), "is damaged in model.layers."),
        (lambda path: flip(path, -20), "has a damaged footer"),
        (lambda path: flip(path, -1), "has a damaged footer"),
        (pack_other_weights, "is the file of other weights"),
    ],
)
def test_a_damaged_file_is_rewritten(
    demo_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], words: str
) -> None:
    expected = answer(demo_model, tmp_path)
    (packed,) = tmp_path.iterdir()
    whole = packed.read_bytes()
    damage(packed)
    caplog.clear()
    assert answer(demo_model, tmp_path) == expected
    (record,) = caplog.records
    assert f"weight cache: {packed} {words}" in record.getMessage()
    assert packed.read_bytes() == whole
    assert files(tmp_path) == [".packed"]
    assert answer(demo_model, tmp_path) == expected
    assert len(caplog.records) == 1


def test_what_a_damaged_file_leaves_in_memory_is_not_packed_over(tmp_path: Path) -> None:
    """Packing leaves the padding as it is, so the file is the same only if the memory was cleared before."""
    model, cache = tmp_path / "model", tmp_path / "cache"
    tensors = weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:120]  # not whole blocks of columns
    write(model, tensors, {**CONFIG, "vocab_size": 120})
    answer(model, cache)
    (packed,) = cache.iterdir()
    whole = packed.read_bytes()
    packed.write_bytes(b"\xff" * (len(whole) - 1000) + whole[-1000:])  # with its footer
    answer(model, cache)
    assert packed.read_bytes() == whole


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 0), lambda path: flip(path, 5_000_000)])
def test_a_file_that_is_damaged_later_does_not_harm_the_engine(
    demo_model: Path, tmp_path: Path, engine: EngineFactory, damage: Callable[[Path], None]
) -> None:
    from quire.frontend import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=0.0)
    expected = engine(demo_model).generate("Once upon a time", params)[0].outputs[0].token_ids
    for _ in range(2):  # one that has written the file, one that has read it
        llm = engine(demo_model, weight_cache=str(tmp_path))
        (packed,) = tmp_path.iterdir()
        whole = packed.read_bytes()
        damage(packed)
        assert llm.generate("Once upon a time", params)[0].outputs[0].token_ids == expected
        packed.write_bytes(whole)


def test_a_file_that_cannot_be_written_is_no_error(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    expected = answer(demo_model, None)
    monkeypatch.setattr(Path, "rename", fail)
    assert answer(demo_model, tmp_path) == expected
    assert files(tmp_path) == []
    assert "can't be written: [Errno 28] No space left on device; the next start packs again" in caplog.text


def test_leftovers_of_a_killed_process_are_rewritten(demo_model: Path, tmp_path: Path) -> None:
    expected = answer(demo_model, tmp_path)
    (packed,) = tmp_path.iterdir()
    packed.rename(packed.with_suffix(".partial"))
    os.truncate(packed.with_suffix(".partial"), 5000)
    assert answer(demo_model, tmp_path) == expected
    assert files(tmp_path) == [".packed"]


def test_the_quantization_scheme_is_part_of_the_key(demo_model: Path, tmp_path: Path) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    write_quantized(demo_model, model, by_name("gptq_v2-4-asymmetric"))
    right = answer(model, cache)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq"
    (model / "config.json").write_text(json.dumps(config))
    assert answer(model, cache) != right
    assert files(cache) == [".packed"] * 2


def test_a_folder_that_cannot_be_written_is_read(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(demo_model, tmp_path)
    (tmp_path / "other.partial").write_bytes(b"x")
    monkeypatch.setattr(weight_cache, "_open_locked", lambda *_: pytest.fail("written"))
    assert answer(demo_model, tmp_path) == expected


def test_two_starts_at_once(demo_model: Path, tmp_path: Path) -> None:
    code = (
        "from quire.kernels import options, runner; import sys;"
        "runner.load_model(options.LoadOptions(sys.argv[1], num_pages=8, weight_cache=sys.argv[2]))"
    )
    command = [sys.executable, "-P", "-c", code, str(demo_model), str(tmp_path)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(PATIENCE) for process in both] == [0, 0]
    assert files(tmp_path) == [".packed"]


def test_a_failed_load_leaves_nothing(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader.Loader, "_pack", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        answer(demo_model, tmp_path)
    assert files(tmp_path) == []


def test_unusable_folders_are_rejected(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"weight cache .*file: .*; choose another folder"):
        answer(demo_model, tmp_path / "file")
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(ModelError, match="only 1000 are free there"):
        answer(demo_model, tmp_path / "full")
