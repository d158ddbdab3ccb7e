"""Steal time: CPU time that other guests of the hypervisor had."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.frontend.evaluation.replay.interference import StealTime, explain_steal


def stat(path: Path, busy: int, steal: int) -> None:
    path.write_text(f"cpu  {busy} {busy} {busy} 900 900 {busy} {busy} {steal} 70 70\ncpu0 1 1\n")


@pytest.mark.parametrize(("busy", "steal", "share"), [(0, 0, 0.0), (9, 5, 0.1), (0, 5, 1.0), (1, 0, 0.0)])
def test_the_share_is_of_busy_and_steal_time_since_the_construction(
    tmp_path: Path, busy: int, steal: int, share: float
) -> None:
    path = tmp_path / "stat"
    stat(path, 100, 50)
    counting = StealTime(path)
    stat(path, 100 + busy, 50 + steal)
    assert counting.share == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "cpu a b c d e f g h\n", None])
def test_without_counts_the_share_is_unknown(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "stat"
    if text is not None:
        path.write_text(text)
    counting = StealTime(path)
    assert counting.share is None
    stat(path, 1, 1)
    assert counting.share is None


def test_only_a_notable_share_is_explained() -> None:
    assert explain_steal(None) is None
    assert explain_steal(0.004) is None
    assert "other guests had 6.1% of this host's CPU time" in (explain_steal(0.0612) or "")


def test_this_host_has_counts() -> None:
    share = StealTime().share
    assert share is not None
    assert 0 <= share <= 1
