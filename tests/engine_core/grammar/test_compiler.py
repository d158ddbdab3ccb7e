"""Grammars that end what compiles them, and processes that are killed or stopped: the compiler goes on."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from compiler_processes import processes_of
from engine_process import EngineUnderTest
from grammar_shapes import shaped
from patience import PATIENCE

from quire.engine_core.grammar import worker as module
from quire.engine_core.grammar.compile_protocol import ENGINE_STACK_BYTES, CompileReply, worker_stack_bytes
from quire.engine_core.grammar.compiler import GrammarCompiler
from quire.engine_core.grammar.grammar import Compilation, TransientError
from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.engine_core.grammar.worker import CompilerProcess
from quire.protocol.messages import StructuredOutputs
from quire.protocol.resident_memory import heap_bytes

SIMPLE = StructuredOutputs(regex="abc")
BOMBS = {
    "references": shaped("$ref", "chain", 4000),
    "allOf": shaped("allOf", "chain", 3000),
    "properties": shaped("properties", "chain", 2000),
    "arrays": shaped("items", "chain", 3000),
    "rules": shaped("lark sequence", "chain", 8000),
    "doubled rules": shaped("lark choice", "doubled", 3000),
    "rules with text": shaped("lark texts", "chain", 3000),
    "terminals": shaped("lark terminals", "chain", 3000),
    "GBNF": shaped("gbnf sequence", "chain", 1500),
    "forward web": shaped("lark choice", "forward web", 9000),
}


def test_no_thread_that_uses_a_grammar_has_a_smaller_stack_than_a_worker() -> None:
    assert 2 * worker_stack_bytes() <= 8 << 20
    assert 32 * worker_stack_bytes() <= ENGINE_STACK_BYTES


def _object(num_properties: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(num_properties)}}


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> GrammarTokenizer:
    return GrammarTokenizer(str(demo_model))


@pytest.fixture(scope="module")
def compiler(tokenizer: GrammarTokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, seconds=PATIENCE)
    yield made
    made.stop()


def compile_in(compiler: GrammarCompiler, structured: StructuredOutputs) -> str:
    """Return the error; nothing if there is none."""
    try:
        assert compiler.build(compiler.try_out(Compilation(structured))).error is None
    except ValueError as error:
        return str(error)
    return ""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline


def be_impatient(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """Shorten all limits of time until workers have been taken so many times."""
    take, left = compiler._take, iter(range(times))
    for name in ("_LEAST_SECONDS", "_WALL_SECONDS", "_START_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)

    def take_patiently() -> module.Worker:
        if next(left, None) is None:
            monkeypatch.undo()
        return take()

    monkeypatch.setattr(compiler, "_take", take_patiently)


def have_ended(processes: list[int]) -> bool:
    return not any(is_running(process) for process in processes)


def is_running(process: int) -> bool:
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())  # empty if only its parent has yet to learn its end
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("name", BOMBS)
def test_a_grammar_that_ends_its_worker_is_an_error_and_the_next_one_is_compiled(
    compiler: GrammarCompiler, name: str
) -> None:
    assert "bytes of stack" in compile_in(compiler, BOMBS[name])
    assert compile_in(compiler, SIMPLE) == ""


TOO_WIDE = {
    "properties": StructuredOutputs(json={"anyOf": [_object(300), _object(301)]}),
    "open properties": StructuredOutputs(json={**_object(500), "additionalProperties": True}),
    "properties after a brace": StructuredOutputs(json={**_object(1500), "required": ["p1499"]}),
    "texts": StructuredOutputs(grammar="start: " + " | ".join(f'"a{index}" A' for index in range(2500)) + "\nA: /a+/"),
}


@pytest.mark.parametrize("name", TOO_WIDE)
def test_a_grammar_whose_answer_would_fail_at_once_is_refused(compiler: GrammarCompiler, name: str) -> None:
    assert "ways to go on from one place, and 2000 are allowed" in compile_in(compiler, TOO_WIDE[name])


def test_a_trial_tells_the_memory_that_a_grammar_takes(compiler: GrammarCompiler) -> None:
    """Also in a worker whose heap has free memory from grammars before; what is compiled quickly is estimated."""
    for size in (2000, 10, 3000, 2000):
        schema = {**_object(size), "required": [f"p{index}" for index in range(size)]}
        before = heap_bytes()
        trial = compiler.try_out(Compilation(StructuredOutputs(json=json.dumps(schema))))
        matcher = compiler.build(trial)
        taken = heap_bytes() - before
        if size > 10:
            assert 0.5 < (trial.matcher_bytes + trial.constraint_bytes) / taken < 2
        assert 0 < trial.constraint_bytes < trial.matcher_bytes
        del matcher


def test_a_text_that_has_ended_a_worker_is_not_tried_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = compile_in(compiler, BOMBS["references"])
    monkeypatch.setattr(CompilerProcess, "open_worker", None)
    monkeypatch.setattr(compiler, "_idle", [])
    assert compile_in(compiler, BOMBS["references"]) == words


def test_a_grammar_that_takes_too_long(tokenizer: GrammarTokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, seconds=0.05)
    slow = shaped("lark choice", "fan", 4000)
    assert "longer than the 0.05 s" in compile_in(compiler, slow)
    compiler.stop()


def test_a_compilation_ends_when_it_is_cancelled(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody waits for any more blocks no worker; here it would take longer than the test has."""
    assert compile_in(compiler, SIMPLE) == ""
    compilation, errors = Compilation(SIMPLE), list[str]()
    [_, *workers] = processes_of(os.getpid())
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    monkeypatch.setattr(module, "_LEAST_SECONDS", 10 * PATIENCE)

    def run() -> None:
        with pytest.raises(ValueError, match="nobody waits") as caught:
            compiler.try_out(compilation)
        errors.append(str(caught.value))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: compilation._worker is not None)
    compilation.cancel()
    thread.join(PATIENCE)
    assert errors


def test_killed_processes_are_replaced(compiler: GrammarCompiler) -> None:
    for number in (0, -1):  # the compiler itself, with which its workers end, and a worker
        assert compile_in(compiler, SIMPLE) == ""
        processes = processes_of(os.getpid())
        os.kill(processes[number], signal.SIGKILL)
        until(partial(have_ended, processes[number:]))
    assert compile_in(compiler, SIMPLE) == ""


def test_a_stopped_worker_is_replaced(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_in(compiler, SIMPLE) == ""
    [_, *workers] = processes_of(os.getpid())
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    be_impatient(compiler, monkeypatch, times=1)
    assert compile_in(compiler, SIMPLE) == ""


def test_a_stopped_compiler_is_replaced(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_in(compiler, SIMPLE) == ""
    [process, *_] = processes_of(os.getpid())
    compiler._close_idle()
    os.kill(process, signal.SIGSTOP)
    monkeypatch.setattr(module, "_START_SECONDS", 0.01)
    stop = compiler._process.stop

    def stop_and_be_patient() -> None:
        monkeypatch.undo()
        stop()

    monkeypatch.setattr(compiler._process, "stop", stop_and_be_patient)
    assert compile_in(compiler, SIMPLE) == ""
    assert processes_of(os.getpid())[0] != process


def test_a_compiler_and_its_workers_that_are_all_stopped_are_replaced(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compile_in(compiler, SIMPLE) == ""
    processes = processes_of(os.getpid())
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    be_impatient(compiler, monkeypatch, times=2)
    assert compile_in(compiler, SIMPLE) == ""
    assert processes_of(os.getpid())[0] not in processes


def test_workers_that_somebody_else_kills_do_not_make_a_grammar_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = compiler._reply
    monkeypatch.setattr(compiler, "_reply", lambda _compilation: CompileReply(status=-signal.SIGKILL))
    with pytest.raises(TransientError, match="send it again"):
        compiler.try_out(Compilation(SIMPLE))
    monkeypatch.setattr(compiler, "_reply", reply)
    assert compile_in(compiler, SIMPLE) == ""


def test_the_process_that_forks_has_one_thread_and_none_has_a_file_of_the_engine(compiler: GrammarCompiler) -> None:
    """With threads, to fork would be unsafe."""
    engines = os.memfd_create("of-the-engine", 0)
    os.set_inheritable(engines, True)
    compiler.stop()
    assert compile_in(compiler, SIMPLE) == ""
    os.close(engines)
    forking, *workers = processes_of(os.getpid())
    assert len(list(Path(f"/proc/{forking}/task").iterdir())) == 1
    for process in (forking, *workers):
        files = [str(file.readlink()) for file in Path(f"/proc/{process}/fd").iterdir()]
        assert not any("of-the-engine" in file for file in files)


def test_workers_end_with_the_engine_even_if_they_are_stopped(demo_model: Path) -> None:
    with EngineUnderTest(demo_model, "--preload-grammars") as engine:
        until(lambda: len(processes_of(engine.process.pid)) >= 2)
        processes = processes_of(engine.process.pid)
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        engine.process.kill()
        engine.process.wait()
        until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
