"""The public names of the frontend."""

from __future__ import annotations

import pytest

import quire.frontend


def test_every_public_name_is_there() -> None:
    for name in quire.frontend.__all__:
        assert getattr(quire.frontend, name).__name__ == name or name == "PromptType"
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = quire.frontend.Llm  # type: ignore[attr-defined]
