"""Plan of simulations: the calibrated engine, the workload, the runs, and the search for the fewest engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quire.frontend.evaluation.report.run import Run
from quire.frontend.evaluation.simulation.process import SimulationError, simulate
from quire.frontend.evaluation.simulation.progress import SimulationProgress
from quire.frontend.evaluation.simulation.records import record_of, sample_of
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.protocol.engine_shape import EngineShape
from quire.protocol.simulation import Calibration, SimulatedResult, SimulationEnd, SimulationSample, SimulationSetup
from quire.protocol.speculative_config import SpeculativeConfig

_CALIBRATE = "give a file that `quire calibrate` has written"


@dataclass(frozen=True)
class SimulatedRun:
    """A run that has ended, and the statistics of each engine."""

    run: Run
    end: SimulationEnd

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest engine, relative to the mean."""
        busy = [engine.busy_seconds for engine in self.end.engines]
        return max(busy) * len(busy) / max(sum(busy), 1e-12)

    @property
    def attainment(self) -> float:
        """Share of requests that met every limit."""
        return self.run.met["all"] / max(self.run.requests, 1)


@dataclass(frozen=True)
class Plan:
    """A workload for engines like the calibrated one. `requests` and `collector` are called anew for each run."""

    calibration: Calibration
    requests: Callable[[], Iterable[WorkloadRequest]]
    collector: Callable[[str, dict[str, Any]], Run]
    name: str  # name of the workload
    seed: int = 0
    tells_lengths: bool = True
    concurrency: int | None = None
    shape_changes: dict[str, Any] = field(default_factory=dict)
    speculative_config: SpeculativeConfig | None = None
    fetches_prefixes: bool = True

    @property
    def shape(self) -> EngineShape:
        """The calibrated engine with `shape_changes`."""
        return msgspec.structs.replace(self.calibration.engine, **self.shape_changes)

    def run(self, num_engines: int, router: str) -> Run:
        """Return a collector for a run."""
        return self.collector(self._title(num_engines, router), self._config(num_engines, router))

    def simulate(self, num_engines: int, router: str, run: Run | None = None) -> SimulatedRun:
        """Simulate one run; if it fails, `run` has the results until then.

        Raises SimulationError if the process fails, and what the workload raises.
        """
        run = run or self.run(num_engines, router)
        try:
            return self._simulate(num_engines, router, run)
        except BaseException as error:
            run.end(run.seconds or 0.0, str(error) or type(error).__name__)
            raise

    def _simulate(self, num_engines: int, router: str, run: Run) -> SimulatedRun:
        setup = SimulationSetup(
            self.shape, self.calibration.step, self.calibration.client, num_engines, router, self.seed,
            self.tells_lengths, concurrency=self.concurrency, speculative_config=self.speculative_config,
            fetch=self.calibration.fetch if self.fetches_prefixes else None,
        )  # fmt: skip
        end = None
        with SimulationProgress(f"{num_engines} engines, {router}" if num_engines > 1 else "1 engine") as progress:
            for outputs in simulate(setup, self.requests()):
                for output in outputs:
                    if isinstance(output, SimulatedResult):
                        run.add(record_of(output))
                    elif isinstance(output, SimulationSample):
                        run.sample(sample_of(output))
                        run.end(output.time)  # replaced by the next sample
                    else:
                        run.end(output.seconds)
                        end = output
                progress.show(run.seconds or 0.0, run.requests)
        if end is None:
            raise SimulationError("the simulation ended before its requests; run it again with --debug")
        return SimulatedRun(run, end)

    def _title(self, num_engines: int, router: str) -> str:
        engines = f"{num_engines} engines, {router}" if num_engines > 1 else "1 engine"
        return f"{self.name} on {engines}"

    def _config(self, num_engines: int, router: str) -> dict[str, Any]:
        return {
            "backend": "quire",
            "simulated": True,
            "model_id": self.calibration.model,
            "host": self.calibration.host,
            "engines": num_engines,
            "router": router,
            "seed": self.seed,
            "max_concurrency": self.concurrency,
            "tells_lengths": self.tells_lengths,
            "speculative_config": msgspec.to_builtins(self.speculative_config),
            "engine": msgspec.to_builtins(self.shape),
            "step_seconds": msgspec.to_builtins(self.calibration.step),
            "client_seconds": msgspec.to_builtins(self.calibration.client),
            "fetch_seconds": msgspec.to_builtins(self.calibration.fetch) if self.fetches_prefixes else None,
        }


def load_calibration(path: Path) -> Calibration:
    """Load a calibration file. Raises ValueError that names the file and what is wrong with it."""
    try:
        calibration = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {_CALIBRATE}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a calibration: {error}; {_CALIBRATE}") from error
    if calibration.step.base + calibration.step.decode <= 0:
        raise ValueError(f"{path}: a step of this engine takes no time; step.base or step.decode must be above 0")
    return calibration


def find_engines(attempt: Callable[[int], SimulatedRun], attainment: float, most: int) -> tuple[int, SimulatedRun]:
    """Return the fewest engines, at most `most`, with which a share `attainment` of the requests meets the limits.

    More engines are assumed to be never worse: their number is doubled until it is enough, and then bisected. Raises
    ValueError when `most` engines, or as many as there are requests, are not enough.
    """
    few, many = 0, 1
    while (found := attempt(many)).attainment < attainment:
        if many >= most or many >= found.run.requests:
            raise ValueError(
                f"{many} engines are not enough: {found.attainment:.2%} of the requests meet the limits, and "
                f"{attainment:.2%} should; loosen the limits of --goodput, lower --attainment, or raise --max-engines"
            )
        few, many = many, min(2 * many, most)
    while many - few > 1:
        middle = (few + many) // 2
        if (tried := attempt(middle)).attainment >= attainment:
            many, found = middle, tried
        else:
            few = middle
    return many, found
