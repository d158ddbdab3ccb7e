"""The benchmark of kernels runs on any model's shapes and accounts for every launch of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.kernel_limits import peak_kernel, units
from reference_libraries import import_reference
from tiny_model import CONFIG

from quire.kernels._native import Jit
from quire.kernels.devices.instruction_sets import INSTRUCTION_SETS, available_isas

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_kernels.py"
SMALL = ["--rows", "1,20", "--contexts", "300,40", "--repetitions", "1", "--threads", "2"]


def bench(folder: Path, *arguments: str) -> str:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 512}))
    command = [sys.executable, str(SCRIPT), "--model", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def kind(kernel: str) -> str:
    return kernel.rsplit("_", 1)[0]


def contexts_of(found: dict[str, Any], name: str) -> set[tuple[str, int, int]]:
    return {(r["step"], r["rows"], r["context"]) for r in found["results"] if kind(r["kernel"]) == name}


def check(result: dict[str, Any]) -> None:
    assert 0 < result["least"] <= result["seconds"] <= result["most"]
    assert result["share"] == pytest.approx(max(result["bounds"].values()) / result["seconds"])
    assert result["bounds"][result["limit"]] == max(result["bounds"].values())


@pytest.mark.parametrize("option", ["dtype=float32", "quantization=int8"])
def test_every_launch_of_a_step_is_timed_against_its_limits(tmp_path: Path, option: str) -> None:
    output = tmp_path / "kernels.json"
    text = bench(tmp_path, *SMALL, "--option", option, "--json", str(output))
    found = json.loads(output.read_text())
    assert {"memory", "cache", "fma", "launch"} <= found["limits"].keys()
    assert all(0 < limit["least"] <= limit["median"] <= limit["most"] for limit in found["limits"].values())
    for result in found["results"]:
        check(result)
        assert result["kernel"] in text
    assert {r["kernel"] for r in found["results"]} == found["plan"]["kernels"].keys()
    whole = {("decode", 1, 40), ("decode", 20, 40), ("decode", 20, 300), ("prefill", 20, 40), ("prefill", 20, 300)}
    assert contexts_of(found, "attention") == whole
    for kernel in ("attention_split", "split_reduction"):  # one sequence of two blocks, for two threads
        assert contexts_of(found, kernel) == {("decode", 1, 300)}
    for step, idle in zip(found["steps"], (["attention"], ["attention_split", "split_reduction"]), strict=True):
        launches = {kernel: n for kernel, n in found["plan"]["kernels"].items() if kind(kernel) not in idle}
        assert step["launches"] == sum(launches.values())
        assert step["shares"].keys() == launches.keys()
        assert sum(step["shares"].values()) == pytest.approx(1)
    assert [step["rows"] for step in found["steps"]] == [1, 20]


def test_only_the_kernels_that_are_named(tmp_path: Path) -> None:
    output = tmp_path / "kernels.json"
    bench(tmp_path, *SMALL, "--only", "linear_add", "--json", str(output))
    found = json.loads(output.read_text())
    assert {kind(r["kernel"]) for r in found["results"]} == {"linear_add"}
    assert not found["steps"]
    assert "linear_add" in bench(tmp_path, "--list")


def test_gemms_are_timed_in_turns_with_those_of_torch(tmp_path: Path) -> None:
    import_reference("torch")
    output = tmp_path / "kernels.json"
    text = bench(tmp_path, *SMALL, "--torch", "--json", str(output))
    results = json.loads(output.read_text())["results"]
    gemms = {r["kernel"] for r in results if r["torch_seconds"]}
    assert {kind(name) for name in gemms} == {"linear", "linear_add", "linear_gate", "logits"}
    assert all(bool(r["torch_seconds"]) == (r["kernel"] in gemms) for r in results)
    assert "torch / us" in text
    assert "torch / us" not in bench(tmp_path, *SMALL, "--only", "linear_add")


def test_without_torch_the_comparison_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, str(SCRIPT), "--model", str(tmp_path), *SMALL, "--torch"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 1
    assert done.stderr == "--torch needs torch; install it: pip install -e '.[reference]'\n"


@pytest.mark.skipif("avx512" not in available_isas(), reason="assembled for AMX, but not run")
@pytest.mark.parametrize(("unit", "instruction"), [("amx-bf16", "tdpbf16ps"), ("amx-int8", "tdpbsud")])
def test_the_peak_of_tiles_is_measured_in_registers(unit: str, instruction: str) -> None:
    isa = INSTRUCTION_SETS["amx"]
    text = peak_kernel(next(u for u in units(isa) if u.name == unit))
    assembly = Jit(isa.cpu, isa.features, isa.vector_bits).assembly(text)
    first, last = assembly.index(instruction), assembly.rindex(instruction)
    assert "tileload" not in assembly[first:last]
    assert "tilestore" not in assembly[first:last]
