"""The reload of an engine: streams go on in the one that takes its place, or nothing changes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_process import EngineUnderTest
from engine_watch import wait_until
from patience import PATIENCE
from quire_command import quire_command

from quire.frontend import LLM, AsyncLLM, EngineDeadError, RequestError, SamplingParams
from quire.frontend.client import launcher
from quire.frontend.client.launcher import EngineProcess, Loaded
from quire.frontend.client.reload import change, check_text
from quire.protocol.keys import generate_keys
from quire.protocol.messages import Reload

PROMPTS = ["Once upon a time", "The King said", "A fox", "There was a princess", "Far away", "In the wood"] * 3
LENGTH = 1800


def params(index: int, max_tokens: int = LENGTH) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.9, seed=index, logprobs=1)


class Streams:
    """Streams that run, and what they have got."""

    def __init__(self, llm: AsyncLLM, length: int = LENGTH) -> None:
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]
        self._llm, self._length = llm, length
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(len(PROMPTS))]

    async def _run(self, index: int) -> None:
        async for output in self._llm.generate(PROMPTS[index], params(index, self._length), output_kind="delta"):
            self.tokens[index] += output.outputs[0].token_ids

    async def begun(self) -> None:
        while min(map(len, self.tokens)) < 10:  # noqa: ASYNC110 - several streams append to it
            await asyncio.sleep(0.001)

    @property
    def num_done(self) -> int:
        return sum(task.done() for task in self._tasks)

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end(self) -> list[list[int]]:
        await asyncio.gather(*self._tasks)
        return self.tokens


async def at_rest(llm: AsyncLLM) -> dict[str, Any]:
    """Return the statistics of an engine without requests, with all pages accounted for."""
    stats = await llm.stats()
    assert (stats["running"], stats["waiting"], stats["pages_held"]) == (0, 0, 0)
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
    return stats


@asynccontextmanager
async def engine(model: Path, **options: Any) -> AsyncIterator[AsyncLLM]:
    chosen = {"num_pages": 2048, "max_model_len": 2048, "start_timeout": PATIENCE, **options}
    async with AsyncLLM(str(model), **chosen) as llm, asyncio.timeout(PATIENCE):
        yield llm


def in_engine(model: Path, work: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with engine(model, **options) as llm:
            await work(llm)

    asyncio.run(main())


@pytest.fixture(scope="module")
def other_weights(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model with the demo model's tokenizer and other weights."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(demo_model, folder)
    (file,) = folder.glob("*.safetensors")
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    numbers = np.frombuffer(content[begin:], np.uint16)  # bfloat16
    mantissa_bits = np.random.default_rng(0).integers(0, 2, len(numbers), np.uint16) << 5
    file.write_bytes(content[:begin] + (numbers ^ mantissa_bits).tobytes())
    return folder


def test_streams_move_and_get_the_same_tokens(demo_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        expected = await Streams(llm).end()
        before = llm.engine_info.engine_pid
        streams = Streams(llm)
        await streams.begun()
        await llm.reload(max_num_seqs=33, max_num_batched_tokens=512)
        assert streams.num_done < len(PROMPTS)
        assert await streams.end() == expected
        info, stats = llm.engine_info, await at_rest(llm)
        assert info.shape is not None
        assert (info.max_num_seqs, info.shape.max_num_batched_tokens, info.max_model_len) == (33, 512, 2048)
        assert stats["totals"]["cached_tokens"] > 0  # KV pages came along
        assert (llm.num_engine_losses, llm.is_away) == (0, False)
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)
        await llm.check_health()
        os.kill(info.engine_pid, signal.SIGKILL)
        wait_until(lambda: llm.num_engine_losses == 1 and not llm.is_away, "the engine was not started again")
        assert llm.engine_info.max_num_seqs == 33

    in_engine(demo_model, work)


def test_a_drained_engine_ends_what_it_has_begun_and_the_next_does_the_rest(demo_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        expected = await Streams(llm).end()
        streams = Streams(llm)
        await streams.begun()
        reload = asyncio.create_task(llm.reload(drain=True, max_num_seqs=7, max_model_len=2000))
        later: list[asyncio.Task[int]] = []

        async def ask(index: int) -> int:
            async for output in llm.generate("Once", params(index, 3)):
                last = output
            assert len(last.outputs[0].token_ids) == 3
            return llm.engine_info.max_num_seqs

        while not reload.done():
            if sum(not task.done() for task in later) < 20:
                later.append(asyncio.create_task(ask(len(later))))
            await asyncio.sleep(0.01)
        await reload
        assert streams.num_done == len(PROMPTS)
        assert await streams.end() == expected
        assert 7 in await asyncio.gather(*later)
        assert (await at_rest(llm))["totals"]["decode_tokens"] < 3 * len(later)
        assert (llm.max_model_len, llm.engine_info.max_num_seqs) == (2000, 7)

    in_engine(demo_model, work)


def test_a_drain_has_its_time(demo_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        expected = await Streams(llm).end()
        streams = Streams(llm)
        await streams.begun()
        await llm.reload(drain=True, drain_timeout=0.01)
        assert streams.num_done < len(PROMPTS)
        assert await streams.end() == expected
        await at_rest(llm)

    in_engine(demo_model, work)


def test_streams_go_on_with_other_weights(demo_model: Path, other_weights: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        expected = await Streams(llm).end()
        streams = Streams(llm)
        await streams.begun()
        await llm.reload(str(other_weights))
        tokens = await streams.end()
        assert tokens != expected
        assert [len(each) for each in tokens] == [LENGTH] * len(PROMPTS)
        for own, old in zip(tokens, expected, strict=True):
            assert own[:10] == old[:10]  # the tokens from before stay
        assert llm.model == str(other_weights)
        [alone] = (await Streams(llm).end())[:1]
        async with engine(other_weights) as fresh:
            assert alone == (await Streams(fresh).end())[0]
        await at_rest(llm)

    in_engine(demo_model, work)


def test_a_request_that_no_longer_fits_ends_with_an_error(demo_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        streams = Streams(llm)
        await streams.begun()
        await llm.reload(max_model_len=1000)
        with pytest.raises(RequestError, match="maximum context length is 1000 tokens"):
            await streams.end()
        await streams.cancel()
        await Streams(llm, 10).end()
        await at_rest(llm)

    in_engine(demo_model, work)


def test_a_reload_that_fails_changes_nothing(demo_model: Path, tmp_path: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        before = llm.engine_info
        expected = await Streams(llm, 300).end()
        streams = Streams(llm, 300)
        other = shutil.copytree(demo_model, tmp_path / "other")
        (other / "chat_template.jinja").write_text("{{ messages }}")
        empty = tmp_path / "empty"
        empty.mkdir()
        cases: list[tuple[str | None, dict[str, Any], str]] = [
            (str(tmp_path / "none"), {}, "none' is not a folder"),
            (str(empty), {}, "config.json"),
            (str(other), {}, "another tokenizer or chat template: chat_template.jinja differ"),
            (None, {"num_pages": 10**8}, "100000000 KV pages take"),
            (None, {"max_model_len": 10**6}, "max_model_len=1000000 exceeds"),
        ]
        for model, options, words in cases:
            with pytest.raises(RuntimeError, match=words):
                await llm.reload(model, **options)
        unfit: list[tuple[dict[str, Any], str]] = [
            ({"max_restarts": 3}, "max_restarts cannot be changed by a reload, but model"),
            ({"engine_address": "ipc:///x"}, "engine_address cannot be changed"),
            ({"block_size": 3}, "block_size=3"),
        ]
        for options, words in unfit:
            with pytest.raises(ValueError, match=words):
                await llm.reload(**options)
        assert await streams.end() == expected
        assert (llm.engine_info, llm.num_engine_losses) == (before, 0)
        await at_rest(llm)
        await llm.reload(max_num_seqs=5)  # a failure does not stand in the way of the next
        assert llm.engine_info.max_num_seqs == 5

    in_engine(demo_model, work)


def test_one_reload_at_a_time(demo_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        done = await asyncio.gather(llm.reload(max_num_seqs=5), llm.reload(max_num_seqs=6), return_exceptions=True)
        (error,) = [each for each in done if each is not None]
        assert "another reload is in progress" in str(error)
        assert llm.engine_info.max_num_seqs in (5, 6)

    in_engine(demo_model, work)


def test_an_engine_that_dies_while_the_next_loads_comes_back_as_it_was(demo_model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        expected = await Streams(llm, 300).end()
        reload = asyncio.create_task(llm.reload(max_num_seqs=5))
        supervisor = llm._engine.engines.supervisors[0]
        assert supervisor is not None
        while supervisor._successor is None:  # noqa: ASYNC110 - it is set by another thread
            await asyncio.sleep(0.001)
        successor = supervisor._successor.process
        os.kill(llm.engine_info.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="and the call with it"):
            await reload
        assert await Streams(llm, 300).end() == expected
        assert llm.engine_info.max_num_seqs == 256
        assert successor.ended.is_set()
        await llm.reload(max_num_seqs=5)
        assert llm.engine_info.max_num_seqs == 5

    in_engine(demo_model, work)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_does_not_take_over_leaves_the_former_settings(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(launcher, "_BEGIN_SECONDS", 0.2)
    monkeypatch.setattr(EngineProcess, "_go_on", lambda _process: None)  # what is stopped stays so

    async def work(llm: AsyncLLM) -> None:
        expected = await Streams(llm, 300).end()
        supervisor = llm._engine.engines.supervisors[0]
        assert supervisor is not None
        reload = asyncio.create_task(llm.reload(max_num_seqs=5))
        while supervisor._successor is None:  # noqa: ASYNC110 - it is set by another thread
            await asyncio.sleep(0.001)
        begin = supervisor._successor.process.begin

        def suffer_first() -> bool:
            assert supervisor._successor is None
            os.kill(pid, number)
            return begin()

        pid = supervisor._successor.process.pid
        supervisor._successor.process.begin = suffer_first  # type: ignore[method-assign]
        streams = Streams(llm, 300)
        with pytest.raises(RuntimeError, match="one with the former settings is back"):
            await reload
        assert await streams.end() == expected
        assert llm.engine_info.max_num_seqs == 256
        await at_rest(llm)

    in_engine(demo_model, work)


def test_an_engine_ends_although_a_reload_is_in_progress(demo_model: Path) -> None:
    with LLM(str(demo_model), num_pages=64) as llm:
        supervisor = llm._engine.engines.supervisors[0]
        assert supervisor is not None
        client = llm._engine.engines
        call = client.call("reload", reload=Reload({"max_num_seqs": 5}))
        wait_until(lambda: supervisor._successor is not None, "no reload began")
        assert supervisor._successor is not None
        successor = supervisor._successor.process
    assert successor.ended.wait(PATIENCE)
    assert call.done()


def quire(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = quire_command(*arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Run `quire engine` on tcp with keys; yield its address, and the folder of its keys."""
    keys = tmp_path / "keys"
    generate_keys(keys)
    flags = ["--engine-address", "tcp://127.0.0.1:*", "--curve-keys", str(keys)]
    command = quire_command("engine", "--num-pages", "64", *flags)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        word, address = process.stdout.readline().split()
        assert word == "READY"
        yield address, keys
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM


def test_the_command_is_for_administrators(served: tuple[str, Path], tmp_path: Path) -> None:
    address, keys = served
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("engine.public", "client.secret"):
        shutil.copy(keys / name, plain / name)
    reach = ["--engine-address", address, "--curve-keys"]
    refused = quire("reload", *reach, str(plain), "--max-num-seqs", "5")
    assert refused.returncode == 1
    assert "the utility call 'reload' needs the role admin" in refused.stderr
    failed = quire("reload", *reach, str(keys), "--model", str(tmp_path))
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)
    assert failed.stderr.startswith("quire: the engine did not start: ")
    done = quire("reload", *reach, str(keys), "--max-num-seqs", "5")
    assert done.returncode == 0, done.stderr
    assert f"the engine at {address} is process " in done.stderr
    with LLM(engine_address=address, curve_keys=str(plain)) as llm:
        assert llm._engine.engines.ready.max_num_seqs == 5
        assert llm.generate("Once", SamplingParams(max_tokens=3))[0].finished


def test_the_command_finds_the_only_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nobody = quire("reload", "--max-num-seqs", "5")
    assert nobody.returncode == 2
    assert "no engine of yours runs here; name one with --engine-address" in nobody.stderr
    with LLM(num_pages=64) as first:
        assert quire("reload", "--max-num-seqs", "5").returncode == 0
        assert first.generate("Once", SamplingParams(max_tokens=3))[0].finished
        assert first._engine.engines.ready.max_num_seqs == 5
        with LLM(num_pages=64) as second:
            several = quire("reload", "--max-num-seqs", "6")
            assert several.returncode == 2
            assert "2 of your engines run here" in several.stderr
            assert second.engine_address in several.stderr


def test_an_engine_without_a_supervisor_cannot_be_reloaded(demo_model: Path) -> None:
    with EngineUnderTest(demo_model) as engine:
        failed = quire("reload", "--engine-address", engine.address)
    assert failed.returncode == 1
    assert "this engine has no supervisor" in failed.stderr


def test_the_settings_that_change() -> None:
    settings = {"model": "/m", "num_pages": 64, "curve_keys": "/k", "max_num_seqs": 3}
    assert change(settings, {"kv_cache_memory_bytes": "1GiB"}) == {
        "model": "/m", "curve_keys": "/k", "max_num_seqs": 3, "kv_cache_memory_bytes": "1GiB",
    }  # fmt: skip
    assert change(settings, {"num_pages": None, "max_num_seqs": None}) == {"model": "/m", "curve_keys": "/k"}
    for changes, words in (
        ({"curve_keys": "/other"}, "curve_keys cannot be changed"),
        ({"model": None}, "model has no default"),
        ({"num_pages": 0}, "num_pages=0"),
        ({"num_pages": 1, "kv_cache_memory_bytes": 1 << 20}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=words):
            change(settings, changes)
    with pytest.raises(ValueError, match="scheduling_policy=priority cannot be changed"):
        change({**settings, "scheduling_policy": "priority"}, {"scheduling_policy": "lpm"})


def test_what_frontends_know_of_a_model_must_stay() -> None:
    old = Loaded({"tokenizer.json": "a", "merges.txt": "b"}, 100, [4])
    check_text(old, old)
    for new, words in (
        (Loaded({"tokenizer.json": "x", "vocab.json": "c"}, 100, [4]), "merges.txt, tokenizer.json, vocab.json differ"),
        (Loaded(old.text_files, 101, [4]), "vocab_size 101, and frontends know 100"),
        (Loaded(old.text_files, 100, [5]), r"eos_token_ids \[5\]"),
    ):
        with pytest.raises(ValueError, match=words):
            check_text(old, new)
