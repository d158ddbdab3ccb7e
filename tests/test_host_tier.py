"""KV pages of a GPU, which is emulated, go to host memory: they outlive their eviction, a crash and a reload."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import emulated_gpu
import pytest
import tiny_model
from engine_watch import wait_until
from patience import PATIENCE

from quire.frontend import LLM, EngineStartError, RequestOutput, SamplingParams
from quire.frontend.text.prompts import PromptType

OPTIONS: dict[str, Any] = {"num_pages": 64, "threads": 1, "skip_tokenizer_init": True, "start_timeout": PATIENCE}
PROMPTS: list[PromptType] = [[5 + 7 * (3 * number + place) % 120 for place in range(134)] for number in range(3)]
NUM_PAGES = len(PROMPTS) * 4  # that are full
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=6, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module", autouse=True)
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the engines a GPU."""
    with emulated_gpu.for_processes(tmp_path_factory.mktemp("gpu")):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model, of which a GPU that is emulated makes short work."""
    return str(tiny_model.write(tmp_path_factory.mktemp("models") / "tiny", tiny_model.weights()))


def ask(llm: LLM, prompts: Sequence[PromptType] = PROMPTS) -> list[RequestOutput]:
    return llm.generate(prompts, PARAMS, use_tqdm=False)


def answers(outputs: Sequence[RequestOutput]) -> list[object]:
    return [output.outputs for output in outputs]


@pytest.fixture(scope="module")
def expected(model: str) -> list[object]:
    """The answers of a CPU."""
    with LLM(model, **OPTIONS) as llm:
        return answers(ask(llm))


def check_accounts(llm: LLM) -> None:
    stats = llm.stats()
    assert stats["pages_held"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


def wait_until_kept(llm: LLM, tier: str = "host") -> None:
    """Wait until all full pages of the prompts are in a tier, or were evicted before."""
    wait_until(
        lambda: llm.stats()[f"kv_{tier}_pages"] + llm.stats()[f"kv_{tier}_pages_skipped"] >= NUM_PAGES,
        f"the pages are in the {tier} tier",
    )


def kill(llm: LLM) -> None:
    os.kill(llm._engine.engines.ready.engine_pid, signal.SIGKILL)


def test_what_is_evicted_comes_back(model: str, expected: list[object]) -> None:
    with LLM(model, device="cuda", **OPTIONS | {"num_pages": 7}) as llm:
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert answers(ask(llm, [prompt])) == [answer]
            wait_until(lambda: llm.stats()["kv_host_pages"] % 4 == 0, "the pages are in host memory")
        wait_until_kept(llm)
        assert llm.stats()["kv_host_pages_read"] == 0
        (output,) = ask(llm, PROMPTS[:1])
        assert answers([output]) == expected[:1]
        assert output.num_cached_tokens == 128
        assert llm.stats()["kv_host_pages_read"] == 4
        assert llm.stats()["kv_host_failures"] == 0
        check_accounts(llm)


def test_a_prefix_outlives_a_crash(model: str, expected: list[object]) -> None:
    with LLM(model, device="cuda", **OPTIONS) as llm:
        for num_read in (0, NUM_PAGES, NUM_PAGES):
            outputs = ask(llm)
            assert answers(outputs) == expected
            assert [output.num_cached_tokens for output in outputs] == [num_read // 3 * 32] * 3
            assert llm.stats()["kv_host_pages_read"] == num_read
            check_accounts(llm)
            wait_until_kept(llm)
            kill(llm)
        assert answers(ask(llm)) == expected
        assert llm.stats()["kv_host_failures"] == 0


def test_whatever_an_engine_was_writing_when_it_died_the_answers_are_right(model: str, expected: list[object]) -> None:
    with LLM(model, device="cuda", **OPTIONS | {"num_pages": 13}) as llm:
        for _ in range(4):
            assert answers(ask(llm)) == expected
            kill(llm)
        assert answers(ask(llm)) == expected
        assert llm.stats()["kv_host_failures"] == 0
        check_accounts(llm)


def test_a_prefix_outlives_a_reload_of_the_gpu_and_no_pool_of_a_cpu(model: str, expected: list[object]) -> None:
    """What an engine on the CPU finds is not its own, and what it leaves is not the GPU's."""
    with LLM(model, device="cuda", **OPTIONS) as llm:
        assert answers(ask(llm)) == expected
        wait_until_kept(llm)
        llm.reload(device="cuda:0")
        assert answers(ask(llm)) == expected
        assert llm.stats()["kv_host_pages_read"] == NUM_PAGES
        for device in ("cpu", "cuda", "cpu"):
            llm.reload(device=device)
            stats = llm.stats()
            assert stats["pages_cached"] == stats.get("kv_host_pages", 0) == 0
            assert ("kv_host_pages" in stats) == (device == "cuda")
            for _ in range(2):
                assert answers(ask(llm)) == expected
            check_accounts(llm)
        kill(llm)  # which the pages of a CPU outlive as ever
        outputs = ask(llm)
        assert answers(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [128] * 3


def test_another_model_begins_anew(model: str, expected: list[object], tmp_path: Path) -> None:
    weights = {name: -values for name, values in tiny_model.weights().items()}
    other = str(tiny_model.write(tmp_path / "other", weights))
    with LLM(model, device="cuda", **OPTIONS) as llm:
        assert answers(ask(llm)) == expected
        wait_until_kept(llm)
        llm.reload(model=other)
        assert llm.stats()["kv_host_pages"] == 0
        assert answers(ask(llm)) != expected
        assert llm.stats()["kv_host_pages_read"] == llm.stats()["kv_host_failures"] == 0
        check_accounts(llm)


def test_both_tiers_have_all_pages(model: str, expected: list[object], tmp_path: Path) -> None:
    """Host memory goes first; the disk has what it lost."""
    with LLM(model, device="cuda", kv_disk=str(tmp_path), **OPTIONS) as llm:
        assert answers(ask(llm)) == expected
        for tier in ("host", "disk"):
            wait_until_kept(llm, tier)
        kill(llm)
        assert answers(ask(llm)) == expected
        stats = llm.stats()
        assert (stats["kv_host_pages_read"], stats["kv_disk_pages_read"]) == (NUM_PAGES, 0)
        check_accounts(llm)
    with LLM(model, device="cuda", kv_disk=str(tmp_path), **OPTIONS) as llm:
        assert answers(ask(llm)) == expected
        stats = llm.stats()
        assert (stats["kv_host_pages_read"], stats["kv_disk_pages_read"]) == (0, NUM_PAGES)
        wait_until_kept(llm)
        check_accounts(llm)


def kv_files() -> set[Path]:
    """Return the descriptors of the memory that supervisors of this process keep."""
    return {fd for fd in Path("/proc/self/fd").iterdir() if "memfd:quire-kv " in str(fd.resolve())}


def test_the_memory_of_a_pool_is_given_back_where_there_is_no_tier(model: str, expected: list[object]) -> None:
    before = kv_files()
    with LLM(model, **OPTIONS) as llm:
        assert answers(ask(llm)) == expected
        (file,) = kv_files() - before
        assert file.stat().st_blocks > 0
        llm.reload(device="cuda", kv_host_memory=0)
        wait_until(lambda: file.stat().st_blocks == 0, "the memory is given back")
        assert answers(ask(llm)) == expected
        check_accounts(llm)
        llm.reload(device="cpu")
        assert answers(ask(llm)) == expected
        assert file.stat().st_blocks > 0


def test_a_small_tier_keeps_what_was_used_last(model: str, expected: list[object]) -> None:
    with LLM(model, device="cuda", kv_host_memory="100KiB", **OPTIONS | {"num_pages": 7}) as llm:
        for _ in range(2):
            for prompt, answer in zip(PROMPTS, expected, strict=True):
                assert answers(ask(llm, [prompt])) == [answer]
                stats = llm.stats()
                assert stats["kv_host_pages"] <= stats["kv_host_pages_total"] < NUM_PAGES
                check_accounts(llm)


def test_a_model_with_state_outlives_a_crash(checkpoints: Path) -> None:
    prompt: PromptType = [3 + 5 * place % 300 for place in range(100)]
    with LLM(str(checkpoints / "lfm2-tied"), device="cuda", **OPTIONS) as llm:
        (before,) = ask(llm, [prompt])
        wait_until(lambda: llm.stats()["kv_host_pages"] >= 4, "the pages and the state are in host memory")
        kill(llm)
        (after,) = ask(llm, [prompt])
        assert after.outputs == before.outputs
        assert llm.stats()["kv_host_pages_read"] > 0
        check_accounts(llm)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cpu", "kv_host_memory": "1GiB"}, "kv_host_memory=1073741824 keeps KV pages of a GPU .*; leave it"),
        ({"kv_host_memory": 1000}, "kv_host_memory=1000 holds no KV page, which takes .* bytes; give more, or 0"),
        ({"kv_host_memory": 1 << 59}, f"kv_host_memory={1 << 59} is too much: .* are free; lower it"),
        ({"kv_host_memory": "1GiB", "memory_limit": "1GiB"}, "memory_limit=.* leaves .* for kv_host_memory=.*; raise"),
    ],
    ids=str,
)
def test_a_tier_that_cannot_be_is_refused(model: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineStartError, match=words):
        LLM(model, **{"device": "cuda", **OPTIONS, **options})


def test_a_reload_to_the_cpu_needs_the_tier_to_be_given_up(model: str, expected: list[object]) -> None:
    with LLM(model, device="cuda", kv_host_memory="4MiB", **OPTIONS) as llm:
        assert answers(ask(llm)) == expected
        wait_until_kept(llm)
        with pytest.raises(RuntimeError, match=f"kv_host_memory={4 << 20} keeps KV pages of a GPU .*, or give 0"):
            llm.reload(device="cpu")
        assert answers(ask(llm)) == expected
        llm.reload(device="cpu", kv_host_memory=0)
        assert answers(ask(llm)) == expected
        assert "kv_host_pages" not in llm.stats()
        check_accounts(llm)


@pytest.mark.parametrize("options", [{"kv_host_memory": 0}, {"enable_prefix_caching": False}], ids=str)
def test_an_engine_without_a_tier(model: str, expected: list[object], options: dict[str, Any]) -> None:
    with LLM(model, device="cuda", **OPTIONS, **options) as llm:
        assert answers(ask(llm)) == expected
        assert "kv_host_pages" not in llm.stats()


def test_the_tier_is_within_the_memory_limit(model: str) -> None:
    with LLM(model, device="cuda", kv_host_memory="64MiB", memory_limit="2GiB", **OPTIONS) as llm:
        assert llm.stats()["memory_limit"] == 2 << 30
        assert llm.stats()["kv_host_pages_total"] > 1000
    with LLM(model, device="cuda", memory_limit="2GiB", **OPTIONS) as llm:
        stats = llm.stats()
        assert stats["memory_limit"] == 2 << 30
        assert 0 < stats["kv_host_pages_total"] <= 4 * stats["pages_total"]
