"""Reports as files: they are read as they were written, and other files are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import synthetic_run

from quire.frontend.evaluation.report.files import load_json, save_json
from quire.frontend.evaluation.report.summary import curve_shares, summarize

VLLM = {
    "date": "20260102-030405",
    "backend": "vllm",
    "label": None,
    "model_id": "some/model",
    "num_prompts": 3,
    "request_rate": "inf",
    "duration": 2.5,
    "completed": 2,
    "failed": 1,
    "total_input_tokens": 20,
    "total_output_tokens": 6,
    "request_throughput": 0.8,
    "output_throughput": 2.4,
    "median_ttft_ms": 150.0,
    "p99_ttft_ms": 199.0,
}
DETAILS = {
    "output_lens": [3, 3, 0],
    "ttfts": [0.1, 0.2, 0.0],
    "itls": [[0.01, 0.03], [0.02, 0.04], []],
    "errors": ["", "", "timed out"],
}


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = summarize(synthetic_run(requests=40, detailed=True))
    save_json(report, tmp_path / "run.json")
    assert load_json(tmp_path / "run.json") == report
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_non_finite_numbers_are_none_in_json(tmp_path: Path) -> None:
    report = {**VLLM, "title": "a", "curves": {}, "config": {"request_rate": float("inf")}}
    save_json(report, tmp_path / "run.json")
    assert load_json(tmp_path / "run.json")["config"] == {"request_rate": None}


def test_a_result_of_vllm_is_read_with_the_fields_that_it_has(tmp_path: Path) -> None:
    report = load_json(write(tmp_path / "base.json", VLLM))
    assert (report["title"], report["curves"]) == ("base", {})
    assert load_json(write(tmp_path / "base.json", {**VLLM, "label": "nightly"}))["title"] == "nightly"


def test_details_of_vllms_give_its_curves(tmp_path: Path) -> None:
    curves = load_json(write(tmp_path / "base.json", {**VLLM, **DETAILS}))["curves"]
    shares = curve_shares()
    gaps = [0.01, 0.02, 0.03, 0.04]
    for name, values in {"ttft": [0.1, 0.2], "tpot": [0.02, 0.03], "itl": gaps, "gap": gaps}.items():
        assert curves[name]["count"] == len(values)
        np.testing.assert_allclose(curves[name]["ms"], 1000 * np.quantile(values, shares), rtol=0.003)
    np.testing.assert_allclose(curves["e2el"]["ms"][-1], 260.0)


def test_vllms_latency_between_chunks_is_the_gap_and_its_details_give_that_of_tokens(tmp_path: Path) -> None:
    result = {**VLLM, "mean_itl_ms": 25.0, "p99_itl_ms": 40.0}
    report = load_json(write(tmp_path / "base.json", result))
    assert (report["mean_gap_ms"], report["p99_gap_ms"]) == (25.0, 40.0)
    assert not {"mean_itl_ms", "p99_itl_ms"} & report.keys()
    report = load_json(write(tmp_path / "base.json", {**result, **DETAILS, "output_lens": [3, 7, 0]}))
    assert report["mean_gap_ms"] == 25.0
    assert report["mean_itl_ms"] == pytest.approx(100 / 8)
    assert report["max_itl_ms"] == 40.0
    assert report["tokens_together_share"] == 0.5
    assert (report["curves"]["gap"]["count"], report["curves"]["itl"]["count"]) == (4, 8)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.json cannot be read: No such file or directory"):
        load_json(tmp_path / "none.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"a": 1}\n{"a": 2}'])
def test_a_file_that_is_not_json_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"run.json is not JSON: .*`vllm bench serve --save-result`"):
        load_json(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([1, 2], "it has no duration, completed, request_throughput"),
        ({"duration": 3.0, "completed": 2}, "it has no request_throughput"),
        ({**VLLM, "duration": "long"}, r"Expected `float`, got `str` - at `\$.duration`"),
        ({**VLLM, "median_ttft_ms": "150"}, "median_ttft_ms is '150', not a number"),
        ({**VLLM, "gantt": {"every": 1, "rows": [{"index": 0}]}}, "`outcome`"),
        ({**VLLM, "gantt": {"every": 0, "rows": []}}, "Expected `int` >= 1"),
        ({**VLLM, "duration": float("nan")}, "Expected `float` >= 0"),
        ({**VLLM, "curves": {"ttft": {"count": 2, "ms": ["<b>"]}}}, "Expected `float`, got `str`"),
    ],
)
def test_a_file_that_is_no_result_is_rejected_with_the_field(tmp_path: Path, value: object, told: str) -> None:
    with pytest.raises(ValueError, match=f"is not the result of a benchmark: .*{told}"):
        load_json(write(tmp_path / "run.json", value))
