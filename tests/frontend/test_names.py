"""The public names of the frontend."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import Any

import pytest

import quire
import quire.frontend


def test_every_public_name_is_there() -> None:
    for name in quire.frontend.__all__:
        assert hasattr(quire.frontend, name), name
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = quire.frontend.Llm


def test_every_name_is_in_the_package_itself() -> None:
    package: Any = quire
    assert package.__all__ == quire.frontend.__all__
    for name in quire.frontend.__all__:
        assert getattr(quire, name) is getattr(quire.frontend, name), name
    assert quire.__version__ == importlib.metadata.version("quire")
    with pytest.raises(AttributeError, match="module 'quire' has no attribute 'Llm'"):
        _ = quire.Llm


def test_an_engine_process_imports_nothing_of_the_frontend() -> None:
    program = "import sys, quire.engine_core.arguments; print(*(name for name in sys.modules if 'frontend' in name))"
    found = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
