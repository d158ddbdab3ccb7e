"""A real engine process, spoken to over its socket: how it starts, serves, rests and ends."""

from __future__ import annotations

import faulthandler
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import HEARTBEAT, DealerClient, EngineUnderTest, command
from engine_watch import halted
from patience import PATIENCE

from quire.engine_core import process
from quire.protocol.address import default_address
from quire.protocol.codec import MAX_FRAME_BYTES
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    EngineCoreRequest,
    EngineGoodbye,
    ErrorMessage,
    FinishReason,
    Goodbye,
    Ready,
    SamplingParams,
    UtilityCall,
)


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[EngineUnderTest]:
    with EngineUnderTest(demo_model) as started:
        yield started
        with DealerClient(started.address) as client:
            client.wait_until_at_rest()
        started.process.send_signal(signal.SIGTERM)
        assert started.ended() == 0


@pytest.fixture
def client(engine: EngineUnderTest) -> Iterator[DealerClient]:
    with DealerClient(engine.address) as connected:
        yield connected
        connected.send(Goodbye())
        connected.socket.close(linger=1000)


def test_ready_has_all_that_a_client_needs(engine: EngineUnderTest, client: DealerClient, demo_model: Path) -> None:
    ready = client.first(Ready)
    assert ready.model == str(demo_model)
    assert (ready.engine_pid, ready.num_pages, ready.block_size) == (engine.process.pid, 256, 32)
    assert ready.vocab_size > 256
    assert ready.heartbeat_seconds == HEARTBEAT


def test_a_request_streams_its_tokens_and_the_same_ones_again(client: DealerClient) -> None:
    client.request("a", 30)
    client.request("b", 30)
    assert len(client.tokens("a")) == 30
    assert client.tokens("a") == client.tokens("b")
    assert len(client.outputs("a")) > 1
    assert client.end("a").finish_reason is FinishReason.LENGTH
    client.wait_until_at_rest()


def test_bad_requests_are_rejected_and_a_good_one_is_unharmed(client: DealerClient) -> None:
    client.request("good", 100)
    client.request("long", 10**6)
    client.request("nan", temperature=float("nan"))
    client.send(EngineCoreRequest("empty", [], SamplingParams()))
    for name in ("long", "nan", "empty"):
        assert client.end(name).finish_reason is FinishReason.ERROR
    assert "maximum context length" in (client.end("long").error or "")
    assert len(client.tokens("good")) == 100


def test_frames_that_are_no_messages_are_answered_and_do_no_harm(engine: EngineUnderTest, client: DealerClient) -> None:
    client.request("good", 200)
    with DealerClient(engine.address) as noisy:
        noisy.first(Ready)
        frames = [[b"\xc1"], [b""], [b"\x93\x01\x02\x03"], [b"a", b"b"], [b"\x00" * (MAX_FRAME_BYTES + 1)]]
        for frame in frames:
            noisy.socket.send_multipart(frame)
        noisy.until(lambda: sum(isinstance(m, ErrorMessage) for m in noisy.messages) == len(frames))
        assert not any(m.fatal for m in noisy.messages if isinstance(m, ErrorMessage))
        noisy.request("still", 4)
        assert len(noisy.tokens("still")) == 4
    assert len(client.tokens("good")) == 200
    assert client.call("stats")["frames_refused"] >= 5


def test_a_client_of_another_version_is_rejected_at_once(engine: EngineUnderTest) -> None:
    with DealerClient(engine.address, version=PROTOCOL_VERSION + 1) as stranger:
        error = stranger.first(ErrorMessage)
        assert error.fatal
        assert f"protocol version {PROTOCOL_VERSION + 1}" in error.message


def test_a_client_that_says_nothing_costs_nothing(engine: EngineUnderTest, client: DealerClient) -> None:
    with DealerClient(engine.address, version=None):
        client.request("a")
        assert len(client.tokens("a")) == 8


def test_the_requests_of_a_silent_client_are_aborted(demo_model: Path) -> None:
    """One at a time, its requests would take much longer than the test waits."""
    flags = "--max-num-seqs", "1", "--heartbeat-seconds", "0.2"
    with EngineUnderTest(demo_model, *flags) as engine:
        with DealerClient(engine.address, heartbeat=math.inf) as silent:
            silent.first(Ready)
            for index in range(1000):
                silent.request(str(index), None)
            gone = 0
            while not gone:  # each look is a client of its own, which lives too briefly to be silent
                with DealerClient(engine.address) as witness:
                    gone = witness.call("stats")["clients_silent"]
        with DealerClient(engine.address) as witness:
            witness.wait_until_at_rest()
            witness.request("a")
            assert len(witness.tokens("a")) == 8


def cpu_seconds(process_id: int) -> float:
    """The CPU time of all threads of a process (its clock id as clock_getcpuclockid makes it)."""
    return time.clock_gettime((~process_id << 3) | 2)


def test_at_rest_it_uses_less_than_a_hundredth_of_a_core(demo_model: Path) -> None:
    """The engine has worked, and a client is attached."""
    flags = "--heartbeat-seconds", "1"
    with EngineUnderTest(demo_model, *flags) as engine, DealerClient(engine.address, heartbeat=1.0) as client:
        client.request("a", 20)
        client.end("a")
        client.wait_until_at_rest()
        began, used = time.monotonic(), cpu_seconds(engine.process.pid)
        while (elapsed := time.monotonic() - began) < 5:
            client.receive(1.0)  # heartbeats of the engine, Pings of the client
        assert (cpu_seconds(engine.process.pid) - used) / elapsed < 0.01


def test_sigterm_lets_requests_end_and_takes_no_more(demo_model: Path) -> None:
    with EngineUnderTest(demo_model) as engine, DealerClient(engine.address) as client:
        client.request("a", 1900)
        client.until(lambda: len(client.outputs("a")) > 0)
        with halted(engine.process.pid):
            engine.process.send_signal(signal.SIGTERM)
            client.request("late", 1)
        late = "late"
        while (end := client.end(late)).finish_reason is not FinishReason.ERROR:  # it has come before the signal
            late += "r"
            client.request(late, 1)
        assert "shutting down" in (end.error or "")
        assert len(client.tokens("a")) == 1900
        client.first(EngineGoodbye)
        assert engine.ended() == 0


def test_sigterm_has_its_limit(demo_model: Path) -> None:
    with (
        EngineUnderTest(demo_model, "--shutdown-timeout", "0.1", "--max-num-seqs", "1") as engine,
        DealerClient(engine.address) as client,
    ):
        for index in range(50):
            client.request(str(index), None)
        client.until(lambda: len(client.outputs("0")) > 0)
        while client.call("stats")["waiting"] < 49:
            pass  # each look is a round trip
        engine.process.send_signal(signal.SIGTERM)
        assert client.end("49").finish_reason is FinishReason.ABORT
        assert engine.ended() == 0


@pytest.mark.parametrize("how", ["SIGINT", "shutdown"])
def test_sigint_and_shutdown_end_it(demo_model: Path, how: str) -> None:
    with EngineUnderTest(demo_model) as engine, DealerClient(engine.address) as client:
        client.request("a", None if how == "SIGINT" else 200)
        client.until(lambda: len(client.outputs("a")) > 0)
        if how == "SIGINT":
            engine.process.send_signal(signal.SIGINT)
            assert client.end("a").finish_reason is FinishReason.ABORT
        else:
            client.send(UtilityCall(1, "shutdown"))
            assert client.end("a").finish_reason is FinishReason.LENGTH
        client.first(EngineGoodbye)
        assert engine.ended() == 0


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_orphan_ends_without_a_goodbye_and_leaves_no_file(demo_model: Path, *, is_stopped: bool) -> None:
    """Clients wait for whoever starts an engine there again."""
    address = default_address()
    arguments = command(demo_model, "--engine-address", address, "--die-with-parent", "0")
    script = f"import subprocess; subprocess.run({arguments!r})"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith(b"READY")
        with DealerClient(address) as client:
            pid = client.first(Ready).engine_pid
            end_of_engine = os.pidfd_open(pid)
            client.request("a", None)
            client.until(lambda: len(client.outputs("a")) > 0)
            if is_stopped:
                os.kill(pid, signal.SIGSTOP)
            parent.kill()
            assert select.select([end_of_engine], [], [], PATIENCE)[0]
            while client.receive() is not None:
                pass
            assert not any(isinstance(message, EngineGoodbye) for message in client.messages)
            assert client.outputs("a")[-1].finish_reason is None
    os.close(end_of_engine)
    assert not Path(address.removeprefix("ipc://")).parent.exists()


# Runs in the engine, as its `sitecustomize`: loading the model waits in native code that holds the interpreter.
_WAITS = """
import sys
if "quire.engine_core" in sys.orig_argv:
    import ctypes, os
    from quire.kernels.runner import PreparedModel
    def wait(*_arguments, **_options):
        print(os.getpid(), flush=True)
        ctypes.PyDLL(None).pause()
    PreparedModel.__init__ = wait
"""


def test_an_engine_that_waits_for_its_files_ends_with_its_parent(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_WAITS)
    arguments = command(demo_model, "--die-with-parent", "0")
    script = f"import subprocess; subprocess.run({arguments!r})"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        end_of_engine = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert select.select([end_of_engine], [], [], PATIENCE)[0]
    os.close(end_of_engine)


def start_error(model: Path, *flags: str) -> str:
    """Return the error of an engine that does not start."""
    result = subprocess.run(command(model, *flags), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    return result.stderr


def test_an_address_in_use_is_rejected_and_its_owner_unharmed(engine: EngineUnderTest, demo_model: Path) -> None:
    assert start_error(demo_model, "--engine-address", engine.address).startswith(
        f"error: address '{engine.address}' is in use by another process"
    )
    with DealerClient(engine.address) as client:  # only now: it sends no heartbeats while the other engine starts
        client.request("a")
        assert len(client.tokens("a")) == 8


def test_memory_for_less_than_a_page_is_rejected(demo_model: Path) -> None:
    arguments = [
        flag for flag in command(demo_model, "--kv-cache-memory-bytes", "1KiB") if flag not in {"--num-pages", "256"}
    ]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: KV memory of 1024 bytes holds no page")


def test_threads_without_a_cpu_each_cannot_be_pinned(demo_model: Path) -> None:
    threads = len(os.sched_getaffinity(0)) + 1
    error = start_error(demo_model, "--pin-threads", "--threads", str(threads))
    assert error.startswith(f"error: {threads} threads can't be bound to a CPU each here; give fewer (--threads)")


def test_pinned_threads_give_the_same_tokens(demo_model: Path, client: DealerClient) -> None:
    client.request("pinned")
    with EngineUnderTest(demo_model, "--pin-threads") as engine, DealerClient(engine.address) as other:
        other.request("pinned")
        assert other.tokens("pinned") == client.tokens("pinned")


def test_a_missing_model_is_rejected(tmp_path: Path) -> None:
    error = start_error(tmp_path / "nothing")
    assert error.startswith("error: ")
    assert "nothing" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--kv-cache-memory-bytes", "lots"],
            "'lots' is not possible; it must be a number of bytes above 0, or text such as '4GiB'",
        ),
        (["--kv-cache-memory-bytes", "4GiB"], "give one of them"),
        (["--kv-cache-memory-bytes", "9" * 400 + "G"], "it must be a number of bytes"),
        (["--max-num-seqs", "0"], "max_num_seqs=0 is out of range; it must be a whole number from 1 to 65536"),
        (["--max-num-batched-tokens", "1" + "0" * 20], "must be a whole number from 1 to 1048576"),
        (["--num-pages", "9" * 5000], "must be a whole number from 1 to 2147483647"),
        (["--threads", "5000"], "threads=5000 is out of range; it must be a whole number from 1 to 1024"),
        (["--wibble"], "unrecognized arguments: --wibble"),
        (
            ["--shutdown-timeout", "nan"],
            "shutdown_timeout=nan is out of range; it must be a number from 0 to 1000000000",
        ),
    ],
)
def test_wrong_arguments_are_named(flags: list[str], words: str, tmp_path: Path) -> None:
    result = subprocess.run(command(tmp_path, *flags), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("too wide"), "too wide"),
        (RuntimeError("no thread"), "no thread"),
        (
            MemoryError("9 bytes are refused"),
            "memory ran out (MemoryError: 9 bytes are refused); free some",
        ),
        (MemoryError(), "memory ran out (MemoryError); free some"),
        (OverflowError("too large"), "too large"),
    ],
)
def test_any_failure_to_load_a_model_is_one_line(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(process, "PreparedModel", load)
    monkeypatch.setattr(faulthandler, "enable", lambda: None)
    assert process.main(["--model", "/some/model"]) == 1
    shown = capfd.readouterr().err
    assert shown.startswith(f"error: the model in /some/model cannot be loaded: {text}")
    assert shown.count("\n") == 1


@pytest.mark.parametrize("mebibytes", [100, 280, 400, 600])
def test_a_limit_of_address_space_is_named_in_one_line(demo_model: Path, mebibytes: int) -> None:
    limited = ["prlimit", f"--as={mebibytes << 20}", *command(demo_model)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # it needs less, and would end the process by itself
    result = subprocess.run(limited, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert "ulimit -v" in result.stderr
    assert str(mebibytes << 20) in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_kv_cache_beyond_the_limit_of_address_space_is_rejected(demo_model: Path) -> None:
    arguments = ["prlimit", f"--as={2 << 30}", *command(demo_model), "--num-pages", "100000"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 1
    assert "100000 KV pages take" in result.stderr
    assert f"limits the address space to {2 << 30} bytes" in result.stderr
