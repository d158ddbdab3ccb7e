"""A cross build for ARM, in an emulator, gives the bits of this host. `scripts/test --arch aarch64` makes the build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import model_bits
import pytest
from patience import PATIENCE

from quire.kernels.devices.instruction_sets import available_isas

REPOSITORY = Path(__file__).parents[1]
CROSS = REPOSITORY / "build" / "aarch64"
PYTHON = CROSS / "bin" / "python"
CPUS = {"neon-dotprod": "neoverse-n1", "neon": "cortex-a53"}
"""Processors that the emulator knows, by the best instruction set that each has."""
CASES = [("neon-dotprod", "bfloat16"), ("neon-dotprod", "int8-int8-kv"), ("neon", "int4")]
ALL_CASES = [(isa, form) for isa in CPUS for form in model_bits.FORMATS]

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no cross build; scripts/test --arch aarch64 makes one"),
    pytest.mark.skipif(
        not (shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")),
        reason="there is no emulator; install qemu-user",
    ),
    pytest.mark.skipif(os.uname().machine == "aarch64", reason="this host runs the tests itself"),
]


def emulated(isa: str, *arguments: str) -> str:
    """Run the emulated Python on a processor that has this instruction set at best, and return its output."""
    paths = f"{CROSS / 'packages'}:{CROSS / 'site'}"
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "QEMU_CPU": CPUS[isa]}
    environment.pop("QUIRE_ISA", None)
    done = subprocess.run(
        [PYTHON, *arguments], env=environment, capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("isa", CPUS)
def test_it_names_the_instruction_set(isa: str) -> None:
    info = json.loads(emulated(isa, "-m", "quire.kernels.info"))
    assert info["isa"] == isa
    assert info["available_isas"] == [*CPUS][[*CPUS].index(isa) :]


@pytest.mark.parametrize(("isa", "form"), ALL_CASES if os.environ.get("QUIRE_TEST_AARCH64") == "all" else CASES)
def test_tokens_log_probabilities_and_hidden_states_have_the_bits_of_this_host(
    demo_model: Path, isa: str, form: str
) -> None:
    options = [f"{name}={value}" for name, value in model_bits.FORMATS[form].items()]
    found = json.loads(emulated(isa, model_bits.__file__, str(demo_model), "best", *options))
    expected = model_bits.bits(str(demo_model), available_isas()[-1], **model_bits.FORMATS[form])
    assert found == expected
    assert len({answer["hidden"] for answer in found}) == len(model_bits.LENGTHS)
