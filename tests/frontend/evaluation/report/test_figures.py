"""Runs with one title get distinct titles."""

from __future__ import annotations

from typing import Any

from quire.frontend.evaluation.report.figures import with_distinct_titles


def names(*reports: dict[str, Any]) -> list[str]:
    return [report["title"] for report in with_distinct_titles(list(reports))]


def test_different_titles_stay() -> None:
    assert names({"title": "a", "config": {"speed": 1}}, {"title": "b", "config": {"speed": 2}}) == ["a", "b"]


def test_equal_titles_are_extended_by_their_differences() -> None:
    configs = [{"seed": 0, "speed": 1, "chunk_size": 8}, {"seed": 0, "speed": 2, "chunk_size": 8}]
    reports = [{"title": "a", "config": config} for config in configs]
    assert names(*reports, {"title": "b"}) == ["a, speed 1", "a, speed 2", "b"]


def test_equal_runs_are_numbered() -> None:
    assert names({"title": "a"}, {"title": "b"}, {"title": "a"}) == ["a (run 1)", "b", "a (run 3)"]
