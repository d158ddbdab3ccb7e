"""Bad arguments of native functions raise Python exceptions; no call ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import native_calls
import pytest
from patience import PATIENCE

from quire.kernels import _native


def test_bad_arguments_raise_exceptions(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    with log.open("w") as stderr:
        done = subprocess.run([sys.executable, "-P", native_calls.__file__], stderr=stderr, timeout=PATIENCE)
    last = log.read_text(errors="replace")[-4000:]
    assert done.returncode == 0, f"status {done.returncode} after:\n{last}"
    called = {line.split(" ", 1)[0] for line in log.read_text(errors="replace").splitlines()}
    assert {name for name, *_ in native_calls.functions()} <= called


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("tree.count_match([10**6])", "page 1000000 is not in the tree"),
        ("tree.count_match([pages[1]])", "does not follow a root"),
        ("tree.retain(10**8)", "page 100000000 does not exist"),
        ("tree.retain(-1)", "page -1 does not exist"),
        ("tree.match(99, [1, 2])", "page 99 is not in the tree"),
        ("tree.leave(-5)", "-5 is not a root in use"),
        ("_native.RadixTree(pool, 0)", "block_size=0; give at least 1"),
        ("sequences.append(slot, 50)", r"token id 50 is not in \[0, 50\)"),
        ("sequences.share(slot, 99)", "num_computed=99 tokens of slot 0"),
        ("sequences.reserve(slot, 2**63 - 1)", "pages for 9223372036854775807 tokens of slot 0"),
        ("_native.QuantizedFormat(8).groups(0)", "k=0 inputs; give 1 to"),
    ],
)
def test_errors_name_what_was_given(code: str, error: str) -> None:
    pool = _native.PagePool(8)
    tree = _native.RadixTree(pool, 2)
    pages = pool.allocate(2)
    assert pages is not None
    tree.insert(tree.insert(tree.enter(""), [1, 2], pages[0]), [3, 4], pages[1])
    sequences = _native.Sequences(8, 4, 50)
    slot = sequences.open([1, 2], 2, cache_salt="")
    scope = {"_native": _native, **locals()}
    with pytest.raises((ValueError, RuntimeError), match=error):
        eval(code, scope)
