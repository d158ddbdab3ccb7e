"""Questions to the kernels: they are asked in a process that ends with the question."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.frontend.children import Child, noted_children
from quire.frontend.kernels import ask_kernels


def test_a_question_that_takes_too_long_ends_with_its_process(demo_model: Path) -> None:
    children: list[Child] = []
    with noted_children(children.append), pytest.raises(RuntimeError, match=r"has not answered within 0\.001 s"):
        ask_kernels("survey", str(demo_model), timeout=0.001)
    assert [child.returncode is None for child in children] == [False]
