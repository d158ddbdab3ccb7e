"""Runs the real `quire` command, at a terminal and without one."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import uvloop
from patience import PATIENCE
from quire_command import quire_command
from screens import Screen

from quire.engine_core.arguments import parse_arguments
from quire.frontend.cli.flags import AttachFlags, EngineFlags, flag_names
from quire.frontend.cli.model import open_model
from quire.protocol.options import command_line

SCRIPT = Path(sys.executable).parent / "quire"
QUIRE = [str(SCRIPT)] if SCRIPT.exists() else quire_command()
FLAGS = [
    "--model",
    "--dtype",
    "--max-model-len",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--kv-cache-memory-bytes",
    "--block-size",
    "--threads",
    "--pin-threads",
    "--cache-dir",
    "--engine-address",
    "--temperature",
    "--top-p",
    "--top-k",
    "--min-p",
    "--repetition-penalty",
    "--max-tokens",
    "--seed",
    "--stop",
]
MARK = "QUIRE_TEST_MARK"

needs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("quire.kernels._native") is None, reason="the native extension is not built"
)


class Command(subprocess.Popen[str]):
    """A command that is killed where a test fails: it would wait for its end for ever."""

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


class Workplace:
    """A place for commands to run: own TMPDIR, and a mark by which their processes are found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "TMPDIR": str(folder), MARK: str(folder), "TERM": "xterm", "COLUMNS": "100"}

    def run(self, *arguments: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*QUIRE, *arguments],
            input=stdin,
            cwd=cwd,
            capture_output=True,
            text=True,
            env=self.env,
            timeout=PATIENCE,
            check=False,
        )

    def start(self, *arguments: str) -> Command:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return Command([*QUIRE, *arguments], text=True, env=self.env, **pipes)

    def processes(self) -> list[int]:
        """The processes that commands started here, or that those started, and that are still there."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.folder}\0".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # it ended meanwhile, or is not ours
                continue
        return found

    def engine(self, *, exclude: int) -> int:
        return next(pid for pid in self.processes() if pid != exclude)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A workplace that must be left clean: no process, no socket, no shared memory."""
    shared = set(os.listdir("/dev/shm"))
    workplace = Workplace(tmp_path)
    yield workplace
    deadline = time.monotonic() + PATIENCE  # an engine whose owner was killed while it started it sees that for itself
    while (left := workplace.processes()) and time.monotonic() < deadline:
        select.select([], [], [], 0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    assert [path.name for path in tmp_path.rglob("*") if path.is_socket() or path.name.startswith("quire-")] == []
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if "quire" in name}


class Terminal:
    """A command at a terminal of its own, so that Ctrl-C and Ctrl-D are what they are for a user."""

    def __init__(self, place: Workplace, *arguments: str, **variables: str) -> None:
        self._master, slave = os.openpty()
        environment = {**place.env, **variables}
        self.process = subprocess.Popen(
            [*QUIRE, *arguments], env=environment, preexec_fn=lambda: os.login_tty(slave), close_fds=False
        )
        os.close(slave)
        self.seen = ""

    def expect(self, pattern: str) -> str:
        """Wait until `pattern` appears after what was expected before; return what came up to its end."""
        deadline = time.monotonic() + PATIENCE
        while (match := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come; there is {self.seen!r}"
            self.seen += self._read()
        before, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return before

    def _read(self) -> str:
        try:
            chunk = os.read(self._master, 65536)
        except OSError:  # EIO: the command has ended
            chunk = b""
        assert chunk, f"the command ended; there is {self.seen!r}"
        return chunk.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def leave(self, act: Callable[[], None]) -> int:
        """Do what ends the command, and wait for its end; return its status.

        Again if need be: a signal between the prompt and the wait for keys shows its effect with the next key.
        """
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"the command goes on; there is {self.seen!r}"
            with contextlib.suppress(OSError):  # it has just ended
                act()
            if select.select([self._master], [], [], 1.0)[0]:
                with contextlib.suppress(AssertionError):
                    self.seen += self._read()
        return self.process.wait()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def address_of(line: str) -> str:
    assert line.startswith("quire: engine listening at "), line
    return line.rsplit(" ", maxsplit=1)[-1].strip()


# ---- without an engine --------------------------------------------------------------------------


def test_help_says_everything(place: Workplace) -> None:
    place.env["COLUMNS"] = "80"
    overview = place.run("--help").stdout
    for command in (
        "serve",
        "run",
        "chat",
        "complete",
        "engine",
        "trace",
        "pull",
        "ps",
        "list",
        "info",
        "keys",
        "version",
    ):
        assert command in overview
        text = place.run(command, "--help-all").stdout
        assert "Usage: quire " + command in text
        assert max(map(len, text.splitlines())) <= 80
        if command in ("serve", "run", "chat", "complete", "trace"):
            assert [flag for flag in FLAGS if flag not in text] == []
            assert "Default: 2048." in " ".join(text.split())


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_commands_of_commands_have_the_same_kind_of_help(place: Workplace, arguments: list[str]) -> None:
    place.env["COLUMNS"] = "80"
    text = place.run(*arguments, "--help").stdout
    assert "\n  -h, --help  Show this message and exit.\n" in text
    assert re.search(r"\n  serve +[A-Z]", text)
    assert max(map(len, text.splitlines())) <= 80
    alone = place.run(*arguments)
    assert (alone.returncode, alone.stdout, alone.stderr) == (0, text, "")


def test_the_first_page_of_help_has_the_flags_that_most_users_need(place: Workplace) -> None:
    text, whole = place.run("serve", "--help").stdout, place.run("serve", "--help-all").stdout
    assert len(text.splitlines()) < len(whole.splitlines()) / 3
    assert all(flag in text for flag in ("--model MODEL", "--port N", "--memory-limit SIZE", "quire serve --help-all"))
    assert "--heartbeat-seconds" not in text
    measured = place.run("bench", "serve", "--help").stdout
    assert all(
        f"{flag} " in measured for flag in ("--num-prompts", "--request-rate", "--max-concurrency", "--base-url")
    )
    assert all(flag in measured for flag in ("--input-len", "--output-len", "--goodput", "--output FILE"))
    assert place.run("pull", "--help").stdout == place.run("pull", "--help-all").stdout


@pytest.mark.parametrize("word", ["nope", "Once"])
def test_a_word_that_is_no_model_is_no_text(place: Workplace, word: str) -> None:
    done = place.run("serve", word)
    assert done.returncode == 2
    assert f"there is no folder {word}, and models of the Hugging Face hub have names such as" in done.stderr
    assert f"--prompt {word}" in done.stderr


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model.gguf", "it has GGUF files: give the path of one, as {}/model.gguf"),
        (
            "adapter_config.json",
            "it has an adapter (LoRA): give the model that it was trained on, and the adapter by --lora-modules NAME=",
        ),
        ("pytorch_model.bin", "it has pytorch_model.bin, which is a program to run: convert it with transformers"),
    ],
)
def test_a_folder_with_something_else_says_what_to_do(place: Workplace, file: str, words: str) -> None:
    folder = place.folder / "model"
    folder.mkdir()
    (folder / file).touch()
    done = place.run("complete", "Once", "--model", str(folder))
    assert done.returncode == 1
    assert words.format(folder) in done.stderr


def test_version(place: Workplace) -> None:
    done = place.run("version")
    assert done.stdout.startswith("quire ")
    assert place.run("--version").stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["serve", "--bogus"], "No such option: --bogus"),
        (["serve", "--kv-dtype", "int8"], "No such option: --kv-dtype (Possible options: --dtype, --kv-cache-dtype"),
        (["complete", "x", "--top-k", "many"], "--top-k"),
        (["complete", "x", "--max-tokens", "0"], "--max-tokens"),
        (["keys"], "Missing argument"),
        (["trace", "x"], "Missing option '--out'"),
        (["serve", "tales.gguf"], "tales.gguf does not exist; give the path of a GGUF file"),
        (["serve", "an x", "--record", "r.jsonl"], "--record applies to the server; omit it, or the text"),
        (["serve", "--port", "0", "--record-text"], "give --record FILE as well"),
        (["trace", "--out", "/nowhere/t.json"], "give prompts, or --engine-address of a running engine"),
        (
            ["serve", "an x", "--dtype", "int3"],
            "dtype='int3' is not possible; it must be one of auto, bfloat16, float32",
        ),
        (
            ["serve", "an x", "--threads", "5000"],
            "threads=5000 is out of range; it must be a whole number from 1 to 1024",
        ),
        (["complete", "x", "--max-num-batched-tokens", "1" + "0" * 20], "it must be a whole number from 1 to 1048576"),
        (["complete", "x", "--kv-cache-memory-bytes", "1x"], "='1x' is not possible; it must be a number of bytes"),
        (["complete", "x", "--engine-address", "ipc:///nowhere/e.sock", "--threads", "2"], "threads cannot be set"),
        (["complete", "x", "--engine-address", "ftp://x"], "must start with ipc:// or tcp://"),
        (["info", "--quantization", "int3"], "quantization='int3' is not possible; it must be one of int8, int4"),
        (
            ["serve", "an x", "--quantization", "int3"],
            "quantization='int3' is not possible; it must be one of int8, int4",
        ),
        (
            ["serve", "an x", "--kv-cache-dtype", "fp8"],
            "kv_cache_dtype='fp8' is not possible; it must be one of auto, int8",
        ),
        (["complete", "x", "--top-p", "7"], "top_p=7.0 is out of range; it must be a number from 0 to 1"),
        (["serve", "--port", "99999"], "port=99999 is out of range"),
        (["serve", "--root-path", "x"], "root_path='x' must begin with /"),
        (["serve", "--ssl-keyfile", "x"], "ssl_keyfile is of no use without ssl_certfile; give both"),
        (["engine", "--engine-address", "x"], "must start with ipc:// or tcp://"),
        (["serve", "--max-loaded", "2"], "--max-loaded is for several models"),
        (["serve", "/usr", "/tmp", "--served-model-name", "x"], "--served-model-name is for one model"),
        (["serve", "/usr", "/tmp", "--record", "x"], "--record is for one model"),
        (["serve", "/usr", "/tmp/../usr"], "several models are named usr"),
        (["serve", "/usr", "tell me a tale"], "'tell me a tale' is a text among several arguments"),
        (["serve", "/usr", "/tmp", "--model", "/usr"], "the model is given twice"),
        (["serve", "/usr", "/tmp", "--prompt", "Once"], "one model continues a text"),
        (["serve", "--models-dir", "/nowhere"], "--models-dir /nowhere does not exist; give a folder with models"),
        (["serve", "--models-dir", "/proc/self/fdinfo"], "neither a folder with a config.json, nor a GGUF file"),
        (
            ["serve", "--engine-address", "ipc:///x", "--idle-timeout", "5"],
            "--engine-address and --engine are for one model",
        ),
        (["serve", "--max-requests-per-key", "3"], "is a quota of API keys, and there are none; give --api-key too"),
        (["engine", "--kv-peer", "x"], "must start with ipc:// or tcp://"),
        (
            ["serve", "--speculative-config", "{bad"],
            "speculative_config='{bad' is not a JSON object: JSON is malformed",
        ),
        (
            ["complete", "x", "--speculative-config", "{}"],
            "speculative_config: method is None; it must be one of ngram",
        ),
        (["engine", "--hf-overrides", "{bad"], "hf_overrides='{bad' is not a JSON object: JSON is malformed"),
        (
            ["reload", "--hf-overrides", "[1]"],
            "hf_overrides='[1]' is not a JSON object: Expected `object`, got `array`",
        ),
        (["bench", "latency", "--hf-overrides", "["], "hf_overrides='[' is not a JSON object"),
        (["serve", "--kv-disk-bytes", "4GiB"], "kv_disk_bytes is given without kv_disk"),
        (["run", "--num-pages", "9", "--kv-cache-memory-bytes", "1GiB"], "both size the KV cache; give one of them"),
        (["ps", "--bogus"], "No such option: --bogus"),
        (["bench", "serve", "--goodput", "ttft"], "--goodput ttft is not a limit"),
        (["bench", "serve", "--request-rate", "-1"], "rate=-1.0 is out of range"),
        (["replay", "--goodput", "ttft"], "--goodput ttft is not a limit"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(place: Workplace, arguments: list[str], what: str) -> None:
    done = place.run(*arguments)
    assert done.returncode == 2
    assert what.lower() in done.stderr.lower()
    assert done.stderr.count("\n") == 1
    assert "--help" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["complete", "x", "--model", "/nowhere"], "model='/nowhere' is not a folder"),
        (["chat", "--engine-address", "ipc:///nowhere/e.sock"], "no engine listens at ipc:///nowhere/e.sock"),
        (["info", "--model", "/nowhere"], "/nowhere"),
        (["trace", "x", "--out", "/nowhere/t.json"], "--out /nowhere/t.json: the file cannot be written (No such file"),
        (["trace", "x", "--out", "/"], "--out /: the file cannot be written (Is a directory); name another"),
        (
            ["serve", "--port", "0", "--record", "/nowhere/r"],
            "--record /nowhere/r: the file cannot be written (No such",
        ),
    ],
)
def test_errors_are_one_line_and_status_1(place: Workplace, arguments: list[str], what: str) -> None:
    done = place.run(*arguments)
    assert done.returncode == 1
    assert what in done.stderr
    assert done.stderr.startswith("quire: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert "Traceback" in place.run(*arguments, "--debug").stderr


@needs_kernels
@pytest.mark.parametrize("command", ["engine", "info"])
def test_files_in_the_current_folder_are_not_imported(place: Workplace, command: str) -> None:
    for name in ("argparse", "json", "numpy", "msgspec"):
        (place.folder / f"{name}.py").write_text(f"raise SystemExit('the {name} of the current folder')\n")
    done = place.run(command, "--model", "/nowhere", cwd=place.folder)
    assert done.returncode == 1
    assert "current folder" not in done.stderr
    assert "/nowhere" in done.stderr


@needs_kernels
def test_an_engine_refuses_wrong_sizes_in_a_line(place: Workplace) -> None:
    for flags in (
        ["--threads", "5000"],
        ["--max-num-batched-tokens", "1" + "0" * 20],
        ["--kv-cache-memory-bytes", "1x"],
    ):
        done = place.run("engine", *flags)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"quire: Invalid value: {flags[0].strip('-').replace('-', '_')}=")


def test_keys(place: Workplace) -> None:
    folder = place.folder / "keys"
    assert str(folder) in place.run("keys", str(folder)).stdout
    assert sorted(path.name for path in folder.iterdir())[:3] == ["admin.secret", "authorized_clients", "client.secret"]
    assert "already holds" in place.run("keys", str(folder)).stderr


# ---- with an engine -----------------------------------------------------------------------------


@needs_kernels
def test_complete_streams_a_text(place: Workplace) -> None:
    arguments = ["complete", "Once upon a time", "--max-tokens", "20", "--seed", "5"]
    done = place.run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 20
    assert place.run(*arguments).stdout == done.stdout
    assert place.run("complete", *arguments[2:], stdin="Once upon a time\n").stdout == done.stdout
    assert place.run(*arguments, "--echo").stdout == "Once upon a time" + done.stdout
    stop = done.stdout[8:12]
    assert place.run(*arguments, "--stop", stop).stdout.rstrip("\n") == done.stdout[: done.stdout.index(stop)].rstrip(
        "\n"
    )


@needs_kernels
def test_commands_run_on_uvloop() -> None:
    with open_model(EngineFlags(num_pages=8), AttachFlags()) as model:
        assert isinstance(model.runner.get_loop(), uvloop.Loop)


@needs_kernels
def test_flags_that_say_no_are_heard() -> None:
    flags = EngineFlags(num_pages=8, enable_prefix_caching=False, preload_grammars=False)
    with open_model(flags, AttachFlags()) as model:
        shape = model.llm.engine_info.shape
        assert shape is not None
        assert not shape.enable_prefix_caching
    line = command_line({"model": "m", **flags.given, "seed": 0, "engine_address": None})
    assert line[1:] == ["--num-pages=8", "--no-enable-prefix-caching", "--no-preload-grammars", "--seed=0"]
    parsed = parse_arguments(line)
    assert flag_names({"enable_prefix_caching": False, "num_pages": 8}) == "--no-enable-prefix-caching, --num-pages"
    assert (parsed.enable_prefix_caching, parsed.preload_grammars, parsed.pin_threads) == (False, False, False)


@needs_kernels
def test_serve_with_a_prompt_answers_and_ends(place: Workplace) -> None:
    arguments = ["Once upon a time", "--max-tokens", "20", "--temperature", "0"]
    done = place.run("serve", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == place.run("complete", *arguments).stdout
    assert place.run("serve", "--chat", "Tell me a tale", *arguments[1:]).returncode == 0


@needs_kernels
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_tokens_are_written_as_they_come_until_a_signal(place: Workplace, number: int, status: int) -> None:
    with place.start("complete", "Once", "--ignore-eos", "--max-tokens", "1500") as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 1)
        assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, err) == (status, "")


@needs_kernels
def test_the_reader_may_leave(place: Workplace) -> None:
    with place.start("complete", "Once", "--ignore-eos", "--max-tokens", "1500") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        assert process.wait(PATIENCE) == 1
        assert process.stderr.read() == ""


@needs_kernels
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_serve_without_a_terminal_listens_until_a_signal(place: Workplace, number: int, status: int) -> None:
    with place.start("serve") as process:
        address = address_of(line_of(process))
        serving = re.fullmatch(r"quire: serving quire-demo at (http://127\.0\.0\.1:\d+)\n", line_of(process))
        assert serving is not None
        done = place.run("complete", "Once", "--engine-address", address, "--max-tokens", "3")
        assert (done.returncode, done.stderr) == (0, "")
        assert place.run("serve", "--prompt", "Once", "--engine-address", address, "--max-tokens", "3").returncode == 0
        listed = json.loads(place.run("ps", "--json").stdout)
        assert [(each["address"], each["problem"], each["running"]) for each in listed] == [(address, None, 0)]
        assert listed[0]["urls"] == [serving[1]]
        shown = place.run("ps").stdout
        assert f"{listed[0]['pid']}" in shown
        assert serving[1] in shown
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out) == (status, "")
        assert re.fullmatch(r".* sampling defaults: temperature=0.7, top_p=0.9\n", err)
    gone = place.run("complete", "Once", "--engine-address", address)
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1)


@needs_kernels
def test_serve_ends_when_its_engine_dies(place: Workplace) -> None:
    with place.start("serve", "--max-restarts", "0") as process:
        address_of(line_of(process))
        os.kill(place.engine(exclude=process.pid), signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert "SIGKILL" in err


@needs_kernels
def test_a_signal_while_the_engine_starts(place: Workplace) -> None:
    """At whatever moment: nothing is left behind."""
    with place.start("serve") as process:
        deadline = time.monotonic() + PATIENCE
        while len(place.processes()) < 2 and time.monotonic() < deadline:
            select.select([], [], [], 0.01)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 143


@needs_kernels
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_engine_alone(place: Workplace, number: int, status: int) -> None:
    with place.start("engine", "--max-num-seqs", "4", "--engine-address", f"ipc://{place.folder}/e.sock") as process:
        word, address = line_of(process).split()
        assert word == "READY"
        done = place.run("complete", "Once", "--engine-address", address, "--max-tokens", "3")
        assert (done.returncode, done.stderr) == (0, "")
        out = place.folder / "t.json"
        idle = place.run("trace", "--engine-address", address, "--out", str(out), "--seconds", "0.2")
        assert idle.returncode == 0
        assert f"{out}: no steps, since the engine had no requests; send some while it is recorded\n" in idle.stderr
        assert [each["address"] for each in json.loads(place.run("ps", "--json").stdout)] == [address]
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == status


@needs_kernels
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(place: Workplace, closed: str) -> None:
    """No socket or file of the engine gets their descriptors, and what would be written goes nowhere."""
    arguments = ["complete", "Once", "--max-tokens", "3", "--temperature", "0"]
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *QUIRE, *arguments]
    done = subprocess.run(shell, env=place.env, capture_output=True, text=True, timeout=PATIENCE, check=False)
    expected = "" if closed.startswith("<&- ") or closed == ">&-" else place.run(*arguments).stdout
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@needs_kernels
def test_a_program_without_standard_streams_may_have_an_engine(place: Workplace) -> None:
    """The library leaves them closed, and its engine has memory that others can't take for stdin."""
    code = "import os; os.closerange(0, 3); from quire import LLM; LLM().generate('Once'); os._exit(7)"
    done = subprocess.run([sys.executable, "-P", "-c", code], env=place.env, timeout=PATIENCE, check=False)
    assert done.returncode == 7


@needs_kernels
def test_trace_records_prompts(place: Workplace) -> None:
    out = place.folder / "t.json"
    prompts = ["Once upon a time", "A dog"]
    done = place.run("trace", "--out", str(out), *prompts, "--max-tokens", "5", "--ignore-eos")
    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(rf"{out}: \d+ steps, 2 requests; open it in ui.perfetto.dev\n", done.stderr)
    events = json.loads(out.read_text())
    assert sum(event["name"] == "decode" for event in events) == 2
    again = place.run("trace", "--out", str(out), "Once")
    assert again.returncode == 2
    assert "exists; name another file, or give --overwrite" in again.stderr
    done = place.run("trace", "--out", str(out), "--overwrite", "Once", "--ignore-eos", "--seconds", "0.01")
    assert done.returncode == 0
    assert "finished: abort" in [event["name"] for event in json.loads(out.read_text())]
    full = place.run("trace", "--out", "/dev/full", "Once", "--max-tokens", "5")
    assert full.returncode == 1
    assert full.stderr.startswith("quire: --out /dev/full: the file cannot be written (No space left on device)")


@needs_kernels
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, 1)])
def test_trace_of_a_running_engine_keeps_what_there_is(place: Workplace, number: int, status: int) -> None:
    """A signal ends the recording, or the engine is killed."""
    out = place.folder / "t.json"
    with place.start("engine", "--max-num-seqs", "4", "--engine-address", f"ipc://{place.folder}/e.sock") as engine:
        address = line_of(engine).split()[1]
        with place.start(
            "trace", "--engine-address", address, "--reconnect-timeout", "0", "--out", str(out)
        ) as recorder:
            assert recorder.stderr is not None
            assert recorder.stderr.readline() == f"recording {address}; Ctrl-C ends it\n"
            for _ in range(2):
                done = place.run("complete", "Once", "--engine-address", address, "--max-tokens", "3", "--ignore-eos")
                assert (done.returncode, done.stderr) == (0, "")
            (engine if number == signal.SIGKILL else recorder).send_signal(number)
            _, said = recorder.communicate(timeout=PATIENCE)
        assert recorder.returncode == status
        assert said.startswith(f"{out}: 6 steps, 2 requests")
        names = [event["name"] for event in json.loads(out.read_text())]
        assert names.count("finished: length") == 2
        engine.terminate()
    if number == signal.SIGKILL:  # the engine ends by itself, without its supervisor
        (place.folder / "e.sock").unlink(missing_ok=True)


@needs_kernels
def test_chat_without_a_terminal_answers_every_line(place: Workplace) -> None:
    done = place.run(
        "chat", "--max-tokens", "8", "--temperature", "0", stdin="Tell me a tale\nAnd then?\n\n/reset\nTell me a tale\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    first = place.run("serve", "--chat", "Tell me a tale", "--max-tokens", "8", "--temperature", "0").stdout
    assert done.stdout.startswith(first)
    assert done.stdout.endswith(first)
    assert len(done.stdout) > 2 * len(first)


@needs_kernels
def test_a_chat_beyond_the_context_leaves_out_its_oldest_turns(place: Workplace) -> None:
    """Without a terminal it does so by itself; at one it asks."""
    flags = [
        "chat",
        "--max-model-len",
        "128",
        "--max-tokens",
        "16",
        "--temperature",
        "0",
        "--system",
        "You tell tales.",
    ]
    lines = ["The fox and the crow went to the river to see the moon, and the crow sang a song."] * 6
    done = place.run(*flags, stdin="\n".join(lines))
    said = r"\[left out the oldest (\d) of \d messages, which exceed the context of 128 tokens\]"
    assert done.returncode == 0
    assert done.stderr
    assert all(re.fullmatch(said, line) for line in done.stderr.splitlines()), done.stderr
    terminal = Terminal(place, *flags)
    while True:
        terminal.expect("> ")
        terminal.type(lines[0] + "\n")
        if "Leave out" in terminal.expect(
            r"\n\[16 tokens|Leave out the oldest \d of \d messages, which exceed the context"
        ):
            break
    terminal.type("n\n")
    terminal.expect(r"/reset starts a new conversation\)")
    terminal.expect("> ")
    terminal.type(lines[0] + "\n")
    terminal.expect("Leave out")
    terminal.type("\n")
    terminal.expect(said)
    terminal.expect(r"\n\[16 tokens")
    terminal.expect("> ")
    assert terminal.leave(lambda: terminal.type("/exit\n")) == 0


@needs_kernels
def test_run_chats_and_answers_once(place: Workplace) -> None:
    """Its commands are those of Ollama's, too."""
    model = str(Path(__file__).parents[2] / "frontend" / "demo_model")
    once = place.run("run", model, "Tell me", "a tale", "--max-tokens", "8", "--temperature", "0")
    assert (once.returncode, once.stderr) == (0, "")
    lines = ["/set temperature 0", '"""Tell me', 'a tale"""', "/set max-tokens 3", "/regen", "/set", "/bye", "unread"]
    chat = place.run("run", model, "--max-tokens", "8", stdin="\n".join(lines))
    assert (chat.returncode, chat.stderr) == (0, "temperature=0.0, max_tokens=3\n")
    first, second = chat.stdout.splitlines()
    assert first.startswith(second)
    demo = place.run("run", "--max-tokens", "8", "--temperature", "0", stdin="Tell me a tale")
    assert (demo.returncode, demo.stderr, demo.stdout) == (0, "", once.stdout)
    for start in ([], ["--model", model]):
        text = place.run("run", *start, "Tell me a tale", "--max-tokens", "8", "--temperature", "0")
        assert (text.returncode, text.stderr, text.stdout) == (0, "", once.stdout)
    long = place.run("run", "Tell me a tale " * 100, "--max-tokens", "8")
    assert (long.returncode, long.stderr) == (0, ""), "longer than the name of a file may be"
    named = place.run("run", "--model", model, "--max-tokens", "8", stdin="/set temperature 0\nTell me a tale")
    assert (named.returncode, named.stderr, named.stdout) == (0, "", demo.stdout)
    wrong = place.run("chat", stdin="/set temperature hot\n/set warmth 1\n/set temperature -1\n/regen\n")
    assert [line.split(";")[0] for line in wrong.stderr.splitlines()] == [
        "quire: temperature='hot' is not a number",
        "quire: warmth is not a parameter",
        "quire: temperature=-1.0 is out of range",
        "there is no answer to regenerate",
    ]


@needs_kernels
def test_a_conversation_is_shown_and_its_system_message_set(place: Workplace) -> None:
    lines = [
        "/show",
        "/set system You tell tales.",
        "/show system",
        '/set system """You tell',
        'tales of foxes."""',
        "/set parameter temperature 0",
        "/show",
        "/show template",
        "/set system",
        "/show system",
        "/show me",
        "/?",
    ]
    done = place.run("chat", "--max-model-len", "512", "--max-tokens", "8", stdin="\n".join(lines))
    assert (done.returncode, done.stdout) == (0, "")
    text = done.stderr
    assert re.match(
        r"info: +model demo_model, context of 512 tokens\nparameters: +max_tokens=8\nsystem: +there is no", text
    )
    assert "\nYou tell tales.\n" in text
    assert re.search(r"parameters: +max_tokens=8, temperature=0.0\nsystem: +You tell\ntales of foxes.\n", text)
    assert "{%- for message in messages %}" in text
    assert text.count("there is no system message") == 2
    assert "me is not known; give one of: info, parameters, system, template" in text
    assert text.endswith("is one message of many lines.\n")


@needs_kernels
def test_a_system_message_that_is_set_reaches_the_model(place: Workplace) -> None:
    flags = ["chat", "--max-tokens", "12", "--temperature", "0"]
    system = "Once a fox met a crow who sang"
    given = place.run(*flags, "--system", system, stdin="Tell me a tale\n")
    assert given.stdout != place.run(*flags, stdin="Tell me a tale\n").stdout
    for command in ("/system", "/set system"):
        assert place.run(*flags, stdin=f"{command} {system}\nTell me a tale\n").stdout == given.stdout


@needs_kernels
def test_bad_prompts_and_values(place: Workplace) -> None:
    too_long = place.run("complete", "--max-model-len", "64", stdin="fox " * 500)
    assert too_long.returncode == 1
    assert "context length is 64" in too_long.stderr
    assert place.run("complete", "x", "--top-p", "7").stderr.startswith("quire: Invalid value: top_p=7.0 is out of")
    assert place.run("complete", "x", "--temperature", "nan").returncode in (1, 2)
    lines = place.run("chat", "--max-model-len", "64", "--max-tokens", "4", stdin="fox " * 500 + "\nfox\n")
    assert lines.returncode == 0, "one bad message does not end a conversation"
    assert "context length is 64" in lines.stderr
    assert lines.stdout.strip()


@needs_kernels
@pytest.mark.parametrize(
    "command", [["complete", "Once"], ["serve", "--prompt", "Once"], ["run", "demo", "Once"], ["chat"]]
)
def test_an_empty_answer_is_said_to_be_one(place: Workplace, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "demo").symlink_to(Path(__file__).parents[2] / "frontend" / "demo_model")
    letters = [
        flag for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz,." for flag in ("--stop", letter)
    ]
    arguments = [*command, "--temperature", "0", *letters]
    done = subprocess.run(
        [*QUIRE, *arguments],
        input="Once\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=place.env,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "")
    assert done.stderr == "quire: the model's answer is empty (finish reason: stop)\n"


@needs_kernels
def test_a_model_without_a_chat_template(place: Workplace, tmp_path: Path) -> None:
    model = demo_copy(tmp_path / "model", tokenizer_config={"eos_token": "<|end|>"})
    done = place.run("chat", "--model", str(model), stdin="hello\n")
    assert done.returncode == 1
    assert "has no chat template" in done.stderr
    complete = place.run("complete", "fox", "--model", str(model), "--max-tokens", "3", "--temperature", "0")
    assert (complete.returncode, complete.stderr) == (0, "")
    run = place.run("run", str(model), "fox", "--max-tokens", "3", "--temperature", "0")
    assert (run.returncode, run.stdout) == (0, complete.stdout)
    without = f"quire: {model} has no chat template: it continues the texts that it gets, and answers no messages; "
    assert run.stderr == without + "--chat-template FILE gives it one\n"
    file = tmp_path / "plain.jinja"
    file.write_text("{% for message in messages %}{{ message.content }}{% endfor %}", encoding="utf-8")
    given = ["--chat-template", str(file), "--max-tokens", "3", "--temperature", "0"]
    chat = place.run("chat", "--model", str(model), *given, stdin="fox\n")
    assert (chat.returncode, chat.stderr) == (0, "")
    assert chat.stdout.strip()
    for arguments in (["run", str(model), "fox"], ["serve", "--chat", "--prompt", "fox", "--model", str(model)]):
        done = place.run(*arguments, *given)
        assert (done.returncode, done.stdout, done.stderr) == (0, chat.stdout, ""), arguments
    absent = place.run("chat", "--chat-template", "absent.jinja", stdin="fox\n")
    assert absent.returncode == 1
    assert "chat_template='absent.jinja' does not exist; give the path of a file with a Jinja template" in absent.stderr


def demo_copy(folder: Path, **files: Any) -> Path:
    from quire.frontend.engine_args import DEMO_MODEL

    folder.mkdir()
    for file in Path(DEMO_MODEL).iterdir():
        if file.stem not in files and file.is_file():
            (folder / file.name).symlink_to(file)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


@needs_kernels
@pytest.mark.parametrize(
    ("value", "words"),
    [(0x7F80, "can't be packed"), (0x7149, "is NaN")],  # infinity; 1e30, whose square overflows
)
def test_a_model_of_infinities_is_an_error(place: Workplace, tmp_path: Path, value: int, words: str) -> None:
    model = demo_copy(tmp_path / "model")
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8 : 8 + header_bytes])["model.embed_tokens.weight"]["data_offsets"]
    start = 8 + header_bytes
    content[start + begin : start + end] = value.to_bytes(2, "little") * ((end - begin) // 2)
    weights.unlink()
    weights.write_bytes(content)
    done = place.run("serve", "Once upon a time", "--model", str(model))
    assert done.returncode == 1
    assert words in done.stderr
    assert not done.stdout.strip()


@needs_kernels
def test_a_model_without_a_tokenizer_still_serves_token_ids(place: Workplace, tmp_path: Path) -> None:
    model = demo_copy(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    done = place.run("complete", "fox", "--model", str(model))
    assert done.returncode == 1
    assert "there is no tokenizer; give token ids" in done.stderr
    with place.start("serve", "--model", str(model)) as process:
        address = address_of(line_of(process))
        tokenizer = small_tokenizers.write(tmp_path / "other", "byte_level")
        attached = ["complete", "fox", "--engine-address", address, "--tokenizer", str(tokenizer), "--max-tokens", "3"]
        assert place.run(*attached).returncode == 0
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)


@needs_kernels
def test_info(place: Workplace) -> None:
    facts = json.loads(place.run("info", "--json").stdout)
    assert 1 <= facts["numa_nodes"] <= facts["cores"] <= facts["cpus"]
    assert facts["threads"] >= 1
    assert facts["pin_threads"] is False
    assert facts["isa"] in facts["available_isas"]
    chosen = json.loads(place.run("info", "--json", "--quantization", "int4", "--kv-cache-dtype", "int8").stdout)[
        "plan"
    ]
    assert chosen["quantized_weights"] == ["int5 in groups of 32", "int6 in groups of 32"]  # the demo model is small
    assert chosen["kv_bytes_per_token"] < facts["plan"]["kv_bytes_per_token"]
    text = place.run("info").stdout
    for word in ("instruction set", "CPUs", "cores", "NUMA nodes", "threads", "memory", "Qwen3ForCausalLM"):
        assert word in text


# ---- at a terminal ------------------------------------------------------------------------------


@needs_kernels
def test_a_conversation_at_a_terminal(place: Workplace) -> None:
    terminal = Terminal(place, "chat", "--max-tokens", "6", "--temperature", "0")
    terminal.expect(r"Type a message.*\n.*> ")
    terminal.type("Tell me a tale\n")
    first = terminal.expect(r"\[\d+ tokens, .*\]\r\n.*> ")
    terminal.type("/reset\n")
    terminal.expect("> ")
    terminal.type("Tell me a tale\n")
    again = terminal.expect(r"\[\d+ tokens, .*\]\r\n.*> ")
    assert first.split("[")[0] == again.split("[")[0]
    terminal.type("/what\n")
    terminal.expect("/what is not a command; commands are /help, ")
    terminal.type("/help\n")
    terminal.expect("/system TEXT")
    assert terminal.leave(lambda: terminal.type("/exit\n")) == 0


@needs_kernels
@pytest.mark.parametrize(
    "typed", [['"""Tell me', "", 'a tale"""'], ["Tell me\\", "a tale"]], ids=["quoted", "continued"]
)
def test_the_arrow_recalls_a_message_of_many_lines(place: Workplace, typed: list[str]) -> None:
    """In this conversation and, from the history's file, in the next one."""
    place.env["XDG_STATE_HOME"] = str(place.folder)
    up = "\x1b[A\x1b[A"  # over /reset, which is typed after each message
    answers = []
    for messages in ([typed, [up]], [[up]]):
        terminal = Terminal(place, "chat", "--no-markdown", "--max-tokens", "12", "--temperature", "0")
        terminal.expect("> ")
        for lines in messages:
            for line in lines[:-1]:
                terminal.type(f"{line}\n")
                terminal.expect(r"\.\.\. ")
            terminal.type(f"{lines[-1]}\n")
            answers.append(terminal.expect(r"\r\n\[12 tokens").split("\r\n")[-2])
            terminal.expect("> ")
            terminal.type("/reset\n")
            terminal.expect("> ")
        assert terminal.leave(partial(terminal.type, "\x04")) == 0
    assert answers == [answers[0]] * 3


def answer_at(terminal: Terminal, columns: int) -> str:
    """Return what the screen shows of an answer of 60 tokens, and leave."""
    terminal.expect("> ")
    terminal.type("Tell me a tale\n")
    answer = terminal.expect(r"\n\[60 tokens")
    screen = Screen(columns)
    screen.feed(re.sub(r"\x1b\[\?\d+[hl]", "", answer).partition("tale\r\n")[2].removesuffix("[60 tokens"))
    terminal.expect("> ")
    terminal.type("/set markdown maybe\n")
    terminal.expect("markdown='maybe' is not known; give true or false")
    assert terminal.leave(lambda: terminal.type("/exit\n")) == 0
    return screen.text


@needs_kernels
def test_answers_are_rendered_at_a_terminal_unless_told_otherwise(place: Workplace) -> None:
    """The demo model's text has no markup, so that its words are the same either way; long lines are broken here."""
    flags = ["--max-tokens", "60", "--temperature", "0"]
    rendered = answer_at(Terminal(place, "chat", *flags, NO_COLOR=""), 80)
    plain = answer_at(Terminal(place, "chat", *flags, "--no-markdown", NO_COLOR=""), 10**6)
    assert answer_at(Terminal(place, "chat", *flags, NO_COLOR="1"), 10**6) == plain
    assert max(map(len, rendered.splitlines())) < 80
    assert len(rendered.splitlines()) > 1
    assert rendered.split() == plain.split()


@needs_kernels
def test_ctrl_c_stops_the_answer_and_then_leaves(place: Workplace) -> None:
    terminal = Terminal(place, "chat", "--ignore-eos", "--max-tokens", "1800")
    terminal.expect("> ")
    terminal.type("Tell me a tale\n")
    terminal.expect(r"tale\r\n.*\w")
    terminal.type("\x03")
    terminal.expect(r"\[stopped\]\r\n.*> ")
    terminal.type("And another\n")
    terminal.expect(r"another\r\n.*\w")
    terminal.type("\x03")
    terminal.expect(r"\[stopped\]\r\n.*> ")
    assert terminal.leave(lambda: terminal.type("\x03")) == 130
    assert "Traceback" not in terminal.seen


@needs_kernels
def test_ctrl_d_leaves(place: Workplace) -> None:
    terminal = Terminal(place, "chat")
    terminal.expect("> ")
    assert terminal.leave(lambda: terminal.type("\x04")) == 0


@needs_kernels
def test_ctrl_c_ends_the_server(place: Workplace) -> None:
    terminal = Terminal(place, "serve", "--port", "0")
    terminal.expect(r"serving quire-demo at http://127\.0\.0\.1:\d+")
    terminal.type("\x03")
    assert terminal.process.wait(PATIENCE) == 130
    assert "Traceback" not in terminal.seen


@needs_kernels
def test_sigterm_at_the_prompt_leaves(place: Workplace) -> None:
    terminal = Terminal(place, "chat")
    terminal.expect("> ")
    assert terminal.leave(lambda: terminal.process.send_signal(signal.SIGTERM)) == 143
    assert "Traceback" not in terminal.seen


@needs_kernels
def test_a_terminal_that_goes_away(place: Workplace) -> None:
    terminal = Terminal(place, "chat", "--ignore-eos", "--max-tokens", "1800")
    terminal.expect("> ")
    terminal.type("Tell me a tale\n")
    terminal.expect(r"tale\r\n.*\w+ \w+ \w+")
    os.close(terminal._master)
    assert terminal.process.wait(PATIENCE) != 0
