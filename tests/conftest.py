"""Fixtures of all tests: models, engines whose pages are counted at their end, a browser; nothing is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import checkpoint_files
import hypothesis
import pytest
import reference_libraries
import tiers
from patience import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from quire.frontend import LLM

REPOSITORY = Path(__file__).parents[1]
SCRATCH = REPOSITORY / "build"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire-tests"
CHROMIUM = Path("/usr/bin/chromium")
MARK = "QUIRE_TEST_SESSION"  # in the environment of every process that a test starts

# Without bytecode every engine process would compile the package's sources anew: a third of what its start costs.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

hypothesis.settings.register_profile("quire", deadline=None)  # what an example takes says how busy the machine is
hypothesis.settings.load_profile("quire")

EngineFactory = Callable[..., "LLM"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that choose among the tests, and that measure them."""
    parser.addoption("--tier", default="full", help="full, quick, or quick+TEXT with a share of the others by the text")
    parser.addoption("--write-durations", type=Path, metavar="FILE", help="write what each test takes: durations.txt")


def pytest_configure(config: pytest.Config) -> None:
    """Leave torch out of the quick tier; have the process that gathers all reports measure."""
    reference_libraries.is_left_out = config.getoption("--tier") == "quick"
    file = config.getoption("--write-durations")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_DurationWriter(file))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that the tier has not."""
    name = config.getoption("--tier")
    try:
        chosen = tiers.tier([item.nodeid for item in items], name, tiers.read_durations())
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    left_out = [item for item in items if item.nodeid not in chosen]
    items[:] = [item for item in items if item.nodeid in chosen]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


class _DurationWriter:
    """Plugin of pytest that writes what the tests take, with their fixtures."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        self._file.write_text(tiers.format_durations(self._seconds))


def _processes_of_session() -> list[str]:
    """Command lines of the other processes that carry the mark of this session."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{folder.name}: {command}")
    return found


@pytest.fixture(scope="session", autouse=True)
def session_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process of a test is left at the end, and no socket; compiled kernels are cached for all clones."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a shell's background job ignores them, and its children with it
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    tmp_path_factory.getbasetemp()  # pytest's own folders stay in the usual place
    os.environ[MARK] = uuid.uuid4().hex
    os.environ["XDG_CACHE_HOME"] = str(CACHE)
    with tempfile.TemporaryDirectory(prefix="quire-test-") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield
        tempfile.tempdir = None
        del os.environ["TMPDIR"]
        sockets = [str(path) for path in Path(folder).rglob("*") if path.is_socket()]
        assert not sockets, f"sockets are left: {sockets}"
    processes = _processes_of_session()
    assert not processes, f"processes are left: {processes}"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the model that the package ships."""
    from quire.frontend.engine_args import DEMO_MODEL

    if not (Path(DEMO_MODEL) / "config.json").exists():
        pytest.skip(f"the demo model is not in {DEMO_MODEL}")
    return Path(DEMO_MODEL)


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The folder of all checkpoints of `checkpoints.py`; written once, then kept under a hash of all they depend on."""
    folder = SCRATCH / "test-checkpoints" / checkpoint_files.key_of_all()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # one worker writes, the others wait for it
        fcntl.flock(lock, fcntl.LOCK_EX)
        checkpoint_files.write_all(folder)
    return folder


def assert_all_pages_free(llm: LLM) -> None:
    """Every KV page is accounted for, and no request holds one, once the aborts on their way have arrived."""
    deadline = time.monotonic() + PATIENCE
    while (stats := llm.stats())["running"] + stats["waiting"] + stats["pages_held"] and time.monotonic() < deadline:
        pass  # each look is a round trip to the engine
    assert stats["pages_free"] + stats["pages_cached"] + stats["pages_held"] == stats["pages_total"], stats
    assert stats["states_free"] + stats["states_cached"] + stats["states_held"] == stats["states_total"], stats
    assert stats["running"] == stats["waiting"] == stats["pages_held"] == stats["states_held"] == 0, stats


def _start(started: list[LLM], model: Path | str, options: dict[str, Any]) -> LLM:
    from quire.frontend import LLM
    from quire.frontend.client import standby

    if "kv_cache_memory_bytes" not in options:
        options = {"num_pages": 256, **options}
    with patch.object(standby, "_FIRST_SECONDS", math.inf):  # the tests of a process that stands by start their own
        started.append(LLM(str(model), **{"start_timeout": PATIENCE, **options}))
    return started[-1]


def _end(started: list[LLM]) -> None:
    """Ends the engines, all of them even if the pages of one do not add up."""
    with contextlib.ExitStack() as stack:
        for llm in started:
            stack.callback(llm.close)
            stack.callback(assert_all_pages_free, llm)


@pytest.fixture
def engine() -> Iterator[EngineFactory]:
    """Starts engines with a small KV memory; at the end of the test their pages are counted, and they end."""
    started: list[LLM] = []
    yield lambda model, **options: _start(started, model, options)
    _end(started)


@pytest.fixture(scope="module")
def module_engine() -> Iterator[EngineFactory]:
    """As `engine`, for a whole module."""
    started: list[LLM] = []
    yield lambda model, **options: _start(started, model, options)
    _end(started)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; who asks for it is skipped where it is not installed."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not there")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()
