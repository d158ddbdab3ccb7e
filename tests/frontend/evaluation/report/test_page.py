"""The page of a run, as text and in a real browser."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from synthetic_runs import synthetic_run

from quire.frontend.evaluation.report.html import page, write_html
from quire.frontend.evaluation.report.run import Run
from quire.frontend.evaluation.report.summary import summarize

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EVIL = """<script>alert("1")</script> & 'quoted' <b>"""


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return summarize(synthetic_run("one run"))


@pytest.fixture(scope="module")
def other() -> dict[str, Any]:
    return summarize(synthetic_run("slower", slowness=1.5, seed=1))


def empty() -> dict[str, Any]:
    run = Run("empty", {"model_id": "demo"})
    run.end(0.0, "the target could not be reached")
    return summarize(run)


def bare() -> dict[str, Any]:
    """Return a result as another tool may write it."""
    return {"title": "bare", "duration": 2.0, "completed": 5, "request_throughput": 2.5, "median_ttft_ms": 70.0}


def drawings(text: str) -> list[ET.Element]:
    """Return the figures of a page, which are XML too."""
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_a_page_is_self_contained_and_small(one: dict[str, Any], other: dict[str, Any]) -> None:
    for reports in ([one], [one, other]):
        text = page(reports)
        assert not re.search(r"<script|<link|<img|@import|url\(|src=|href=", text)
        assert len(text) < 1_500_000


def test_a_page_shows_each_part(one: dict[str, Any]) -> None:
    text = page([one])
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == [
        "Latency that users see", "Goodput", "Over time", "Engines", "Single requests", "Figures", "Errors",
        "Configuration",
    ]  # fmt: skip
    assert {"TTFT", "TPOT", "ITL", "E2E", "Running", "Waiting", "Output", "KV pages", "Prefix hits"} <= set(
        re.findall(r"<figcaption><b>(.*?)</b>", text)
    )
    for kind in ("queued", "prefill", "decode", "preempted"):
        assert f'class="{kind}"' in text


def test_curves_mark_their_percentiles(one: dict[str, Any]) -> None:
    ttft = drawings(page([one]))[0]
    titles = [element.text for element in ttft.iter("title")]
    assert [str(title).split()[2] for title in titles] == ["median", "p90", "p99"]  # of 192 values there is no p99.9
    assert [element.get("class") for element in ttft.iter("path")] == ["curve run0"]


def test_several_runs_are_overlaid(one: dict[str, Any], other: dict[str, Any]) -> None:
    ttft = drawings(page([one, other]))[0]
    assert [element.get("class") for element in ttft.iter("path")] == ["curve run0", "curve run1"]


@pytest.mark.parametrize("make", [empty, bare])
def test_a_page_of_few_figures_shows_them(make: Callable[[], dict[str, Any]], one: dict[str, Any]) -> None:
    assert "<h2>Figures</h2>" in page([make()])
    assert len(drawings(page([one, make()]))) == len(drawings(page([one])))


def test_the_reason_why_a_run_is_not_valid_is_at_the_top(one: dict[str, Any]) -> None:
    assert 'class="warning"' not in page([one])
    header = page([one, empty()]).split("</header>")[0]
    assert "Not valid: empty. </b>the run was interrupted: the target could not be reached" in header


def test_all_content_of_reports_is_escaped(one: dict[str, Any]) -> None:
    report = {
        **one, "title": EVIL, "model_id": EVIL, "backend": EVIL, "date": EVIL, "valid": False, "invalid_reason": EVIL,
        "config": {EVIL: EVIL, "list": [EVIL]}, "error_counts": [{"outcome": EVIL, "error": EVIL, "count": 1}],
        "goodput_limits": {EVIL: 3.0},
        "gantt": {"every": 1, "rows": [
            {"index": 0, "outcome": EVIL, "prompt_tokens": 1, "output_tokens": 1, "phases": [[EVIL, 0.0, 1.0]]}
        ]},
    }  # fmt: skip
    for reports in ([report], [report, report]):
        text = page(reports)
        assert "<script" not in text
        assert "<b>&quot;" not in text
        assert "&lt;script&gt;" in text


def test_too_many_runs_are_rejected(one: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a page shows 1 to 6 runs, 7 were given"):
        page([one] * 7)


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Yield a function that opens a page of reports, which must request no other URL and log no problem."""
    requested: list[str] = []
    problems: list[str] = []
    path = tmp_path / "report.html"

    def start(reports: list[dict[str, Any]], **options: Any) -> Page:
        write_html(reports, path)
        opened = browser.new_page(**options)
        opened.on("request", lambda request: requested.append(request.url))
        opened.on("console", lambda message: problems.append(message.text))
        opened.on("pageerror", lambda error: problems.append(str(error)))
        opened.goto(path.as_uri())
        return opened

    yield start
    assert set(requested) == {path.as_uri()}
    assert not problems


@pytest.mark.parametrize("width", [390, 1200])
def test_a_page_fits_the_width_of_the_screen(
    open_page: Callable[..., Page], one: dict[str, Any], other: dict[str, Any], width: int
) -> None:
    for reports in ([one], [one, other, other], [empty()], [bare(), one]):
        opened = open_page(reports, viewport={"width": width, "height": 800})
        assert opened.evaluate("document.documentElement.scrollWidth") <= width


def test_a_page_follows_the_colours_of_the_screen(open_page: Callable[..., Page], one: dict[str, Any]) -> None:
    read = "name => getComputedStyle(document.querySelector(name)).%s"
    seen = {}
    for scheme in ("light", "dark"):
        opened = open_page([one], color_scheme=scheme)
        seen[scheme] = [
            opened.evaluate(read % "backgroundColor", "body"),
            opened.evaluate(read % "fill", "svg text.tick"),
            opened.evaluate(read % "stroke", "svg path.curve"),
        ]
    assert all(light != dark for light, dark in zip(seen["light"], seen["dark"], strict=True))


def test_labels_stay_inside_their_figures(
    open_page: Callable[..., Page], one: dict[str, Any], other: dict[str, Any]
) -> None:
    opened = open_page([one, other], viewport={"width": 1200, "height": 800})
    outside = """() => [...document.querySelectorAll('svg text')].filter(word => {
      const inner = word.getBoundingClientRect(), outer = word.closest('svg').getBoundingClientRect();
      return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.bottom > outer.bottom + 1;
    }).map(word => word.textContent)"""
    assert opened.evaluate(outside) == []
