"""Flags that take several values."""

from __future__ import annotations

import pytest

from quire.frontend.cli.app import spread


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("--goodput ttft:1 tpot:2 t.csv", "--goodput ttft:1 --goodput tpot:2 t.csv"),
        ("t.csv --goodput ttft:1 --goodput tpot:2", "t.csv --goodput ttft:1 --goodput tpot:2"),
        ("--compare a.json b.json c.json --clip", "--compare a.json --compare b.json --compare c.json --clip"),
        ("--compare a.json t.csv ttft:1", "--compare a.json t.csv ttft:1"),
        ("--goodput --clip", "--goodput --clip"),
        ("--output a.json --speed 2", "--output a.json --speed 2"),
    ],
)
def test_each_value_gets_a_flag_of_its_own(given: str, read: str) -> None:
    assert list(spread(given.split())) == read.split()
