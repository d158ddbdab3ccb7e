"""The public names of the frontend."""

from __future__ import annotations

import pytest

import quire.frontend


def test_every_public_name_is_there() -> None:
    for name in quire.frontend.__all__:
        assert hasattr(quire.frontend, name), name
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = quire.frontend.Llm
