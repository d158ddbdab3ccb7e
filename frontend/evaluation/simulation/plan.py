"""What is to be simulated, and its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.frontend.evaluation.report.run import Run
from quire.frontend.evaluation.simulation.process import SimulationError, simulate
from quire.frontend.evaluation.simulation.progress import Progress
from quire.frontend.evaluation.simulation.records import record_of, sample_of
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.protocol.engine_shape import EngineShape
from quire.protocol.simulation import Calibration, SimulatedResult, SimulationEnd, SimulationSample, SimulationSetup

ROUTERS = ("round-robin", "least-loaded", "power-of-two", "sticky", "prefix-affinity")


@dataclass(frozen=True)
class Simulated:
    """A run that has ended, and what each engine did."""

    run: Run
    end: SimulationEnd

    @property
    def imbalance(self) -> float:
        """How many times as long the busiest engine was busy as the mean of all."""
        busy = [engine.busy_seconds for engine in self.end.engines]
        return max(busy) * len(busy) / max(sum(busy), 1e-12)


@dataclass(frozen=True)
class Plan:
    """A workload for engines like the calibrated one. `requests` gives it anew for each run; so does `collector`."""

    calibration: Calibration
    requests: Callable[[], Iterable[WorkloadRequest]]
    collector: Callable[[str, dict[str, Any]], Run]
    name: str  # of the workload
    seed: int = 0
    tells_lengths: bool = True
    concurrency: int | None = None
    shape_changes: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> EngineShape:
        """The calibrated engine, with what is changed about it."""
        return msgspec.structs.replace(self.calibration.engine, **self.shape_changes)

    def run(self, num_engines: int, router: str) -> Run:
        """What collects a run."""
        return self.collector(self._title(num_engines, router), self._config(num_engines, router))

    def simulate(self, num_engines: int, router: str, run: Run | None = None) -> Simulated:
        """One run; whatever ends it, `run` has what there was until then.

        Raises SimulationError if it fails, and what the workload raises.
        """
        run = run or self.run(num_engines, router)
        try:
            return self._simulate(num_engines, router, run)
        except BaseException as error:
            run.end(run.seconds or 0.0, str(error) or type(error).__name__)
            raise

    def _simulate(self, num_engines: int, router: str, run: Run) -> Simulated:
        setup = SimulationSetup(
            self.shape, self.calibration.step, self.calibration.client, num_engines, router, self.seed,
            self.tells_lengths, concurrency=self.concurrency,
        )  # fmt: skip
        end = None
        with Progress(f"{num_engines} engines, {router}" if num_engines > 1 else "1 engine") as progress:
            for outputs in simulate(setup, self.requests()):
                for output in outputs:
                    if isinstance(output, SimulatedResult):
                        run.add(record_of(output))
                    elif isinstance(output, SimulationSample):
                        run.sample(sample_of(output))
                        run.end(output.time)  # so far
                    else:
                        run.end(output.seconds)
                        end = output
                progress.show(run.seconds or 0.0, run.requests)
        if end is None:
            raise SimulationError("the simulation ended before its requests; run it again with --debug")
        return Simulated(run, end)

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
            "engine": msgspec.to_builtins(self.shape),
            "step_seconds": msgspec.to_builtins(self.calibration.step),
            "client_seconds": msgspec.to_builtins(self.calibration.client),
        }
