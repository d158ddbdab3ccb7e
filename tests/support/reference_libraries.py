"""Libraries with which tests compare, and without which the quick tier does: torch, transformers and peft."""

from __future__ import annotations

from typing import Any

import pytest

is_left_out = False  # of this run, whether or not they are installed


def import_reference(name: str) -> Any:
    """Import a module of these libraries, or one that needs them; skip the test or module that cannot have it.

    torch computes with one thread: with several, the first call of a function such as the cosine may return numbers of
    low precision (https://github.com/pytorch/pytorch/issues/188792).
    """
    if is_left_out:
        pytest.skip("the quick tier compares with stored references only", allow_module_level=True)
    reason = "torch, transformers or peft is missing; `pip install '.[reference]'` brings it"
    pytest.importorskip("torch", reason=reason).set_num_threads(1)
    return pytest.importorskip(name, reason=reason)
