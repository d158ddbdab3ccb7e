"""The supervisor of an engine: whatever ends or stops the process, the requests go on, or the end is clear."""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import shutil
import signal
import subprocess
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from engine_signals import hit_soon
from engine_watch import wait_until
from patience import PATIENCE
from quire_command import quire_command

from quire.frontend import LLM, AsyncLLM, EngineDeadError, RequestOutput, SamplingParams
from quire.frontend.activity import Activity
from quire.frontend.client import launcher, standby
from quire.frontend.client import supervisor as module
from quire.frontend.client.engine_client import Delivery
from quire.frontend.client.launcher import Beat, EngineProcess
from quire.frontend.client.supervisor import MachinePart, ProcessTimeouts, Supervisor
from quire.frontend.client.weight_files import WeightFiles
from quire.protocol.address import default_address, remove_address
from quire.protocol.engine_options import SupervisionOptions
from quire.protocol.messages import EngineCoreOutputs, SchedulerStats

LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.9, seed=3, logprobs=1)
PROMPTS = ["Once upon a time", "The King said"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_a_batch_outlives_its_engine(demo_model: Path, number: signal.Signals) -> None:
    with LLM(str(demo_model), num_pages=256, step_timeout=2.0) as llm:
        expected = [output.outputs for output in llm.generate(PROMPTS, LONG)]
        before = llm._engine.engines.ready.engine_pid
        hit_soon(llm, number)
        assert [output.outputs for output in llm.generate(PROMPTS, LONG)] == expected
        assert llm._engine.engines.ready.engine_pid != before
        stats = llm.stats()
        assert (stats["pages_held"], stats["pages_free"] + stats["pages_cached"]) == (0, 256)
        assert not Path(f"/proc/{before}").exists()


def test_while_the_engine_is_away_health_says_so_and_requests_wait(demo_model: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(str(demo_model), num_pages=256) as llm, asyncio.timeout(PATIENCE):
            await llm.check_health()
            os.kill(llm.engine_info.engine_pid, signal.SIGKILL)
            while not llm.is_away:  # noqa: ASYNC110 - it is set by another thread
                await asyncio.sleep(0)
            with pytest.raises(EngineDeadError, match="being started again"):
                await llm.check_health()
            outputs = [output async for output in llm.generate("Once", SamplingParams(max_tokens=3))]
            assert outputs[-1].finished
            await llm.check_health()
            assert (llm.num_engine_losses, llm.dead_error) == (1, None)

    asyncio.run(main())


def test_an_engine_that_dies_again_and_again_is_given_up(demo_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model, model)
    with LLM(str(model), num_pages=64, max_restarts=2) as llm:
        (model / "config.json").unlink()
        os.kill(llm._engine.engines.ready.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="3 times in a row, and is not started again"):
            llm.generate("Once", SamplingParams(max_tokens=3))


def test_an_engine_that_is_told_to_end_is_not_started_again(demo_model: Path) -> None:
    with LLM(str(demo_model), num_pages=64) as llm:
        client = llm._engine.engines
        client.call("shutdown")
        wait_until(lambda: client.dead is not None, "the engine went on")
        with pytest.raises(EngineDeadError, match="has ended"):
            llm.generate("Once", SamplingParams(max_tokens=3))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_that_somebody_else_asks_to_end_gives_way_to_another(
    demo_model: Path, number: signal.Signals
) -> None:
    with LLM(str(demo_model), num_pages=256) as llm:
        expected = [output.outputs for output in llm.generate(PROMPTS, LONG)]
        client = llm._engine.engines
        before = client.ready.engine_pid
        hit_soon(llm, number)
        assert [output.outputs for output in llm.generate(PROMPTS, LONG)] == expected
        wait_until(lambda: client.away is None and client.ready.engine_pid != before, "no other engine came")
        assert [output.outputs for output in llm.generate(PROMPTS, LONG)] == expected
        assert client.num_losses == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_asks_for_no_end_does_nothing_to_an_engine(demo_model: Path, number: signal.Signals) -> None:
    with LLM(str(demo_model), num_pages=256) as llm:
        expected = [output.outputs for output in llm.generate(PROMPTS, LONG)]
        client = llm._engine.engines
        before = client.ready.engine_pid
        hit_soon(llm, number)
        assert [output.outputs for output in llm.generate(PROMPTS, LONG)] == expected
        assert (client.ready.engine_pid, client.num_losses) == (before, 0)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a process stand by soon."""
    monkeypatch.setattr(module, "_TICK_SECONDS", 0.1)
    monkeypatch.setattr(standby, "_FIRST_SECONDS", 0.1)


def process_that_stands_by(llm: LLM, *, instead_of: EngineProcess | None = None) -> EngineProcess:
    """Return the process that stands by, once there is one."""
    supervisor = llm._engine.engines.supervisors[0]
    assert supervisor is not None
    wait_until(lambda: supervisor._standby.process not in (None, instead_of), "no process stood by")
    assert supervisor._standby.process is not None
    return supervisor._standby.process


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_dies_as_it_stands_by_is_replaced(
    demo_model: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    with LLM(str(demo_model), num_pages=64) as llm:
        first = process_that_stands_by(llm)
        os.kill(first.pid, number)
        second = process_that_stands_by(llm, instead_of=first)
        os.kill(llm._engine.engines.ready.engine_pid, signal.SIGKILL)
        assert llm.generate("Once", SamplingParams(max_tokens=3))[0].outputs[0].token_ids
        assert llm._engine.engines.ready.engine_pid == second.pid
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("quire: the standby engine ")]
    assert len(lines) == 1
    assert lines[0].endswith("; starting another one")
    assert number is signal.SIGINT or f"was killed by {number.name}" in lines[0]  # which Python turns into an error


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("is_continued", [True, False])
def test_a_process_that_is_stopped_as_it_stands_by_does_not_stand_in_the_way(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, *, is_continued: bool
) -> None:
    """It is continued; if that does not help, another one is started."""
    if not is_continued:
        monkeypatch.setattr(launcher, "_BEGIN_SECONDS", 0.2)
        monkeypatch.setattr(launcher.EngineProcess, "_go_on", lambda _process: None)
    with LLM(str(demo_model), num_pages=64) as llm:
        pids = llm._engine.engines.ready.engine_pid, process_that_stands_by(llm).pid
        os.kill(pids[1], signal.SIGSTOP)
        os.kill(pids[0], signal.SIGKILL)
        assert llm.generate("Once", SamplingParams(max_tokens=3))[0].outputs[0].token_ids
        assert (llm._engine.engines.ready.engine_pid == pids[1]) is is_continued


# Runs in each engine, as its `sitecustomize`: where the flag is, loading waits in native code, with the GIL.
_WAITS_ONCE = """
import sys
if "quire.engine_core" in sys.orig_argv:
    import ctypes
    from pathlib import Path
    from quire.kernels.runner import PreparedModel
    flag, init = Path({flag!r}), PreparedModel.__init__
    def wait(*arguments, **options):
        if flag.exists():
            flag.unlink()
            ctypes.PyDLL(None).pause()
        init(*arguments, **options)
    PreparedModel.__init__ = wait
"""


def test_an_engine_that_does_nothing_as_it_loads_is_given_up(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "_SAMPLE_SECONDS", 0.2)
    monkeypatch.setattr(launcher, "_MOST_IDLE_SAMPLES", 10)
    flag = tmp_path / "flag"
    (tmp_path / "sitecustomize.py").write_text(_WAITS_ONCE.format(flag=str(flag)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LLM(str(demo_model), num_pages=64) as llm:
        flag.touch()
        os.kill(llm._engine.engines.ready.engine_pid, signal.SIGKILL)
        assert llm.generate("Once", SamplingParams(max_tokens=3))[0].outputs[0].token_ids
    assert "did nothing for 10 s, while reading the model's files" in capfd.readouterr().err


def test_an_engine_that_waits_for_the_one_that_packs_is_not_given_up(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd = os.memfd_create("quire-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.lockf(fd, fcntl.LOCK_EX)  # as an engine that packs
    flags = ["--model", str(demo_model), "--num-pages", "64", "--beat-seconds", "1", "--weights-fd", str(fd)]
    process = EngineProcess([*flags, "--engine-address", default_address()], kept_fds=[fd])
    num_samples = 0

    def find_idle(activity: Activity) -> None:
        nonlocal num_samples
        if process._stage.waits:
            activity.num_idle_samples += 1000
            num_samples += 1
        if num_samples == 3:
            fcntl.lockf(fd, fcntl.LOCK_UN)

    monkeypatch.setattr(launcher, "_SAMPLE_SECONDS", 0.1)
    monkeypatch.setattr(Activity, "sample", find_idle)
    address = process.wait_ready(PATIENCE)
    assert num_samples >= 3
    process.stop(PATIENCE)
    remove_address(address)
    os.close(fd)


def test_a_process_finds_the_weights_of_the_one_before(demo_model: Path) -> None:
    files, settings = WeightFiles(), {"model": str(demo_model), "num_pages": 64}
    ready = threading.Semaphore(0)
    supervisor = Supervisor(
        default_address(), settings, SupervisionOptions(), timeouts=ProcessTimeouts(PATIENCE, 0.0),
        part=MachinePart("0/1", files), on_ready=lambda _address: ready.release(),
    )  # fmt: skip
    supervisor.wait_ready()
    pids = [supervisor.pid]
    assert ready.acquire(timeout=PATIENCE)
    os.kill(supervisor.pid, signal.SIGKILL)
    assert ready.acquire(timeout=PATIENCE)
    pids.append(supervisor.pid)
    (mapping,) = [line for line in Path(f"/proc/{pids[1]}/maps").read_text().splitlines() if "quire-weights" in line]
    assert pids[0] != pids[1]
    assert int(mapping.split()[4]) == os.fstat(files.of(settings).fd).st_ino
    supervisor.stop()


def test_a_file_of_weights_is_closed_when_nobody_needs_it() -> None:
    files = WeightFiles()
    one = files.of({"model": "a", "max_num_seqs": 4})
    assert files.of({"model": "a", "max_num_seqs": 5}) is one
    other = files.of({"model": "a", "quantization": "int8"})
    fd = one.fd
    assert other.fd != fd
    del one
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    os.fstat(other.fd)


class HungProcess:
    """A process that beats and makes no step, or does not beat; time passes at once."""

    def __init__(self, step_age: float, *, beats: bool) -> None:
        self.ended = self
        self.last_beat = Beat(step_age, SchedulerStats(step=17))
        self._beats = beats
        self._num_beats = 0
        self.seconds = 0.0

    @property
    def num_beats(self) -> int:
        self._num_beats += self._beats
        return self._num_beats

    def wait(self, timeout: float) -> bool:
        """Wait for the end; in vain."""
        self.seconds += timeout
        return False

    def abort(self) -> None:
        """End it."""


@pytest.mark.parametrize(
    ("process", "step_timeout", "words", "seconds"),
    [
        (HungProcess(61.0, beats=True), 60.0, r"ended no step for 61 s \(step_timeout=60\).*step=17", 2.0),
        (HungProcess(61.0, beats=True), 3.0, r"ended no step for 61 s \(step_timeout=3\).*step=17", 1.2),
        (HungProcess(0.0, beats=False), 60.0, "gave no sign of life for 10 s", 11.0),
        (HungProcess(0.0, beats=False), 0.0, "gave no sign of life for 10 s", 11.0),
        (HungProcess(0.0, beats=False), 3.0, "gave no sign of life for 3 s", 3.6),
        (HungProcess(0.0, beats=False), 2.5, "gave no sign of life for 2.5 s", 3.0),
        (HungProcess(0.0, beats=False), 0.1, "gave no sign of life for 2 s", 2.2),
    ],
)
def test_an_engine_that_hangs_is_ended_with_its_last_state(
    monkeypatch: pytest.MonkeyPatch, process: HungProcess, step_timeout: float, words: str, seconds: float
) -> None:
    monkeypatch.setattr(Supervisor, "_spawn", lambda self: None)
    options = SupervisionOptions(step_timeout=step_timeout, max_restarts=0)
    supervisor = Supervisor("ipc:///nowhere", {}, options, timeouts=ProcessTimeouts(1.0, 1.0))
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(supervisor._watch(process))  # type: ignore[arg-type]
    assert process.seconds == pytest.approx(seconds)
    os.close(supervisor._kv_memory)


def start_engine(address: str) -> subprocess.Popen[str]:
    command = quire_command("engine", "--num-pages", "256", "--engine-address", address)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"READY {address}\n"
    return process


def test_when_the_supervisor_alone_is_killed_streams_go_on_with_the_next_engine(tmp_path: Path) -> None:
    """Its engine ends with it, and says no goodbye."""
    address = f"ipc://{tmp_path}/engine.sock"
    prompts = [f"Once upon a time there were {number} goats" for number in range(20)]
    with start_engine(address) as first, LLM(engine_address=address) as llm:
        expected = [output.outputs for output in llm.generate(prompts, LONG)]
        client = llm._engine.engines
        engine, deliver = os.pidfd_open(client.ready.engine_pid), client._deliver

        def hit(delivery: Delivery) -> None:
            if isinstance(delivery, EngineCoreOutputs) and delivery.outputs:
                client._deliver = deliver
                first.kill()
            deliver(delivery)

        client._deliver = hit
        answers: Future[list[RequestOutput]] = Future()
        thread = threading.Thread(target=lambda: answers.set_result(llm.generate(prompts, LONG)))
        thread.start()
        assert select.select([engine], [], [], PATIENCE)[0]
        with start_engine(address) as second:
            assert [output.outputs for output in answers.result(PATIENCE)] == expected
            second.send_signal(signal.SIGTERM)
            assert second.wait(PATIENCE) == 128 + signal.SIGTERM
        thread.join()
        os.close(engine)
    assert not Path(address.removeprefix("ipc://")).exists()


def test_quire_engine_starts_its_engine_again(demo_model: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine.sock"
    command = quire_command("engine", "--num-pages", "64", "--engine-address", address)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"READY {address}\n"
        with LLM(engine_address=address) as llm:
            expected = llm.generate(PROMPTS, LONG)[1].outputs
            hit_soon(llm, signal.SIGKILL)
            assert llm.generate(PROMPTS, LONG)[1].outputs == expected
        assert process.stdout.readline() == f"READY {address}\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert "quire: the engine was killed by SIGKILL" in err
    assert not Path(address.removeprefix("ipc://")).exists()


_FAILS_ONCE = """
import sys
if "quire.engine_core" in sys.orig_argv:
    from pathlib import Path
    from quire.{module} import {name}
    flag, call = Path({flag!r}), {name}.{method}
    def failing(self, *arguments):
        result = call(self, *arguments)
        if {condition} and flag.exists():
            flag.unlink()
            raise RuntimeError("out of luck")
        return result
    {name}.{method} = failing
"""


def fail_once(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, method: str, condition: str = "True") -> Path:
    """Have a method, Class.name, fail in engines after it has done its work, once the file that is returned is there
    and the condition holds of `self`."""
    flag, (name, _, function) = folder / "flag", method.partition(".")
    text = _FAILS_ONCE.format(flag=str(flag), module=module, name=name, method=function, condition=condition)
    (folder / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return flag


def test_an_engine_that_fails_in_python_leaves_its_requests_to_the_next(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flag = fail_once(monkeypatch, tmp_path, "engine_core.engine", "EngineCore.step", "self.last_step.step > 30")
    with LLM(str(demo_model), num_pages=256) as llm:
        expected = [output.outputs for output in llm.generate(PROMPTS, LONG)]
        flag.touch()
        assert [output.outputs for output in llm.generate(PROMPTS, LONG)] == expected
        assert not flag.exists()
        stats = llm.stats()
        assert (stats["pages_held"], stats["pages_free"] + stats["pages_cached"]) == (0, 256)
    assert "RuntimeError: out of luck" in capfd.readouterr().err


def test_a_step_that_fails_once_its_full_pages_are_shared_is_computed_again(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The prompt begins with cached pages, and fills another one up."""
    flag = fail_once(monkeypatch, tmp_path, "kernels.runner", "ModelRunner.submit")
    prompt, params = list(range(5, 133)), SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(str(demo_model), num_pages=64) as llm:
        [expected] = llm.generate([prompt], params)
        assert llm.reset_prefix_cache()
        llm.generate([prompt[:97]], params)
        flag.touch()
        [found] = llm.generate([prompt], params)
        assert not flag.exists()
        assert found.num_cached_tokens == 96
        assert found.outputs == expected.outputs
        stats = llm.stats()
        assert (stats["pages_held"], stats["pages_free"] + stats["pages_cached"]) == (0, 64)
    assert "computed again, in parts" in capfd.readouterr().err


@pytest.mark.usefixtures("soon")
def test_a_forked_child_keeps_nothing_of_the_engine_open(demo_model: Path) -> None:
    with LLM(str(demo_model), num_pages=256) as llm:
        supervisor = llm._engine.engines.supervisors[0]
        assert supervisor is not None
        stdin = process_that_stands_by(llm)._process.stdin
        assert stdin is not None
        fds = [supervisor._kv_memory, stdin.fileno()]
        if (child := os.fork()) == 0:
            os._exit(sum(Path(f"/proc/self/fd/{fd}").exists() for fd in fds))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(Path(f"/proc/self/fd/{fd}").exists() for fd in fds)
        assert llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
