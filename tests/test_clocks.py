"""A step of the wall clock changes nothing but dates: whatever waits or measures reads the monotonic clock."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("protocol", "frontend", "engine_core", "kernels")

WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "time.localtime"}
DATED = {
    "engine_core/kv_events.py": "`ts` of a batch, and its number, which grows from one engine to the next",
    "frontend/evaluation/calibration/calibrate.py": "date of a calibration",
    "frontend/evaluation/report/run.py": "date of a report",
    "frontend/http/dialects/ollama/writer.py": "`created_at` of an answer",
    "frontend/http/server_state.py": "`created` of an answer",
    "frontend/llm_engine.py": "`arrival_time` of a request, as vLLM's callers have it",
    "frontend/metrics/adapters.py": "value of `lora_requests_info`, of which pickers read the latest",
    "frontend/metrics/tracing.py": "times of a span, as OTLP has them",
    "frontend/text/chat/template.py": "`strftime_now` of chat templates",
    "protocol/address.py": "age of a folder that was left, whose time the file system has",
}


def test_only_dates_are_read_from_the_wall_clock() -> None:
    files = [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]
    reading = {str(path.relative_to(REPOSITORY)) for path in files if _calls(path.read_text()) & WALL_CLOCK}
    assert reading == set(DATED)


def test_native_code_reads_the_steady_clock_alone() -> None:
    wall_clock = re.compile(r"system_clock|CLOCK_REALTIME|gettimeofday|\btime\((nullptr|NULL|0)\)")
    files = [path for pattern in ("*.cpp", "*.h") for path in (REPOSITORY / "kernels/native").rglob(pattern)]
    assert len(files) > 20
    assert [str(path) for path in files if wall_clock.search(path.read_text())] == []


def _calls(source: str) -> set[str]:
    """Return the dotted names that a module calls."""
    return {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
