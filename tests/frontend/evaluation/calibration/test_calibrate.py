"""`quire calibrate` on the real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from patience import PATIENCE
from typer.testing import CliRunner, Result

from quire.frontend import AsyncLLM, SamplingParams
from quire.frontend.cli.app import app
from quire.frontend.evaluation.calibration import calibrate as calibration
from quire.frontend.evaluation.calibration import trust
from quire.frontend.evaluation.calibration.calibrate import calibrate
from quire.frontend.evaluation.calibration.fetches import FetchError
from quire.frontend.evaluation.replay.engine_target import EngineTarget
from quire.protocol.simulation import Calibration, FetchTime, StepWork


def _calibrate(file: Path, *flags: str) -> Result:
    """Calibrate an engine for 5 s, and for longer where a busy host makes too few steps in that time."""
    for seconds in (5, 20, 80):
        arguments = ["calibrate", "-o", str(file), "--seconds", str(seconds), "--max-num-seqs", "8", *flags]
        result = CliRunner().invoke(app, arguments)
        is_fitted = "longer" not in str(result.exception) and "could be held out" not in result.stderr
        if is_fitted and "one after 5 ms" in result.stderr:  # and so the time after no rest at all is known
            break
    return result


def test_a_calibration_is_written_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "host.json"
    result = _calibrate(file, "--force")  # a busy host leaves doubts
    assert result.exit_code == 0, result.output
    found = msgspec.json.decode(file.read_bytes(), type=Calibration)
    assert found.engine.max_num_seqs == 8
    assert found.engine.max_num_batched_tokens == 2048
    assert found.model.endswith("demo_model")
    assert found.steps > 0  # as many as the host has made in that time
    for work in (StepWork(100, 0, 0, 10000), StepWork(0, 4, 400, 0)):
        assert 0 < found.step.seconds(work) < 1
    assert 0 <= found.client.to_engine < 1  # nothing where the engine took longer to wake for a burst than for one
    assert 0 < found.client.to_client < 1
    assert 0 < found.client.to_next < 0.1
    assert 0 < found.client.to_wake < 1
    assert found.client.rests
    assert all(0 <= rest.later < 1 for rest in found.client.rests)
    assert 0 < found.fetch.answer < 1
    assert 0 < found.fetch.token < 0.1
    assert 0 < found.fetch.connect < 60
    assert found.fetch != FetchTime()
    assert "fetches of 2047 tokens: " in result.stderr
    assert str(file) in result.stdout
    assert found.held_out_error is not None
    assert [f"not to be trusted: {doubt}" for doubt in found.doubts] == [
        line for line in result.stderr.splitlines() if line.startswith("not to be trusted")
    ]


def test_where_nothing_can_be_fetched_the_times_of_it_are_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> FetchTime:
        raise FetchError("a fetch of KV pages is for administrators")

    monkeypatch.setattr(calibration, "measure_fetches", refuse)
    file = tmp_path / "host.json"
    result = _calibrate(file, "--force")
    assert result.exit_code == 0, result.output
    assert msgspec.json.decode(file.read_bytes(), type=Calibration).fetch == FetchTime()
    assert "assumed ones, since none were measured: a fetch of KV pages is for administrators" in result.stderr


def test_a_fit_that_cannot_be_trusted_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "LEAST_STEPS", 10**9)
    file = tmp_path / "host.json"
    result = _calibrate(file)
    assert result.exit_code == 1
    assert not file.exists()
    assert str(result.exception) == (
        f"{file} was not written: the fit cannot be trusted, as said above; or give --force"
    )
    assert "decode steps were measured, and at least 1000000000 are needed; raise --seconds" in result.stderr


def test_an_unwritable_file_is_rejected_before_anything_runs(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["calibrate", "-o", str(tmp_path / "none" / "host.json")])
    assert "the file cannot be written" in str(result.exception)


def test_a_busy_engine_is_not_calibrated() -> None:
    async def main() -> None:
        async with AsyncLLM() as llm, asyncio.timeout(PATIENCE):
            params = SamplingParams(max_tokens=1000, ignore_eos=True)
            stream = llm.generate("Once", params)
            await anext(stream)
            target = await asyncio.to_thread(EngineTarget.from_options, None, engine_address=llm.engine_address)
            with pytest.raises(ValueError, match="is serving other requests"):
                await calibrate(target, 5)
            await stream.aclose()
            await target.close()

    asyncio.run(main())
