"""The next engine reads KV from disk instead of computing it again, and gives the same answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_watch import wait_until

from quire.frontend import LLM, RequestOutput, SamplingParams, TokensPrompt

PROMPTS = [[(7 * i + 13 * j) % 1000 + 1 for j in range(520)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=1.2, seed=3, max_tokens=12, logprobs=2)


def ask(llm: LLM, params: SamplingParams = GREEDY, prompts: Sequence[list[int]] = PROMPTS) -> list[RequestOutput]:
    return llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params)


def answers(outputs: Sequence[RequestOutput]) -> list[object]:
    return [output.outputs for output in outputs]


def num_cached(outputs: Sequence[RequestOutput]) -> list[int | None]:
    return [output.num_cached_tokens for output in outputs]


def num_handled(llm: LLM) -> int:
    stats = llm.stats()
    return int(stats["kv_disk_pages"] + stats["kv_disk_pages_skipped"])


def check_accounts(llm: LLM) -> None:
    stats = llm.stats()
    assert stats["pages_held"] == 0
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> list[object]:
    with LLM(str(demo_model), num_pages=256) as llm:
        return [*answers(ask(llm)), *answers(ask(llm, SAMPLED))]


def test_the_second_start_knows_the_prompts_of_the_first(
    demo_model: Path, tmp_path: Path, expected: list[object]
) -> None:
    for cached in (0, 512):
        with LLM(str(demo_model), num_pages=256, kv_disk=str(tmp_path / "kv"), kv_disk_bytes="64MiB") as llm:
            outputs = ask(llm)
            assert num_cached(outputs) == [cached] * 4
            assert [*answers(outputs), *answers(ask(llm, SAMPLED))] == expected
            assert llm.stats()["kv_disk_pages_read"] == cached // 32 * 4
            check_accounts(llm)


def test_layers_with_kv_of_different_sizes_come_back(checkpoints: Path, tmp_path: Path) -> None:
    model = str(checkpoints / "gemma4-keys-as-values")
    with LLM(model, num_pages=256) as llm:
        expected = answers(ask(llm, SAMPLED))
    for cached in (0, 512):
        with LLM(model, num_pages=256, kv_disk=str(tmp_path / "kv")) as llm:
            outputs = ask(llm, SAMPLED)
            assert num_cached(outputs) == [cached] * 4
            assert answers(outputs) == expected
            check_accounts(llm)


def test_pages_that_memory_had_no_room_for_come_back(demo_model: Path, tmp_path: Path, expected: list[object]) -> None:
    with LLM(str(demo_model), num_pages=20, kv_disk=str(tmp_path)) as llm:
        assert answers(ask(llm)) == expected[:4]
        wait_until(lambda: num_handled(llm) >= 64, "all pages are on disk, or were evicted before")
        assert answers(ask(llm, SAMPLED)) == expected[4:]
        stats = llm.stats()
        assert stats["kv_disk_pages_read"] > 0 or stats["kv_disk_pages_skipped"] > 0
        check_accounts(llm)


@pytest.mark.parametrize("is_flipped", [True, False])
def test_damaged_pages_are_computed_again(
    demo_model: Path, tmp_path: Path, expected: list[object], is_flipped: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with LLM(str(demo_model), num_pages=256, kv_disk=str(tmp_path)) as llm:
        ask(llm)
    (path,) = tmp_path.glob("*.pages")
    if is_flipped:
        path.write_bytes(bytes(255 - byte for byte in path.read_bytes()))
    with LLM(str(demo_model), num_pages=256, kv_disk=str(tmp_path)) as llm:
        if not is_flipped:
            os.truncate(path, 10_000)
        assert [*answers(ask(llm)), *answers(ask(llm, SAMPLED))] == expected
        assert llm.stats()["kv_disk_failures"] > 0
        check_accounts(llm)
    assert "is damaged" in capfd.readouterr().err


_WRITES_PAGES = """
import sys, time
from quire.frontend import LLM, SamplingParams, TokensPrompt
prompts = [TokensPrompt(prompt_token_ids=[(7 * i + 13 * j) % 1000 + 1 for j in range(520)]) for i in range(4)]
if __name__ == "__main__":
    llm = LLM(sys.argv[1], num_pages=256, kv_disk=sys.argv[2])
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    while llm.stats()["kv_disk_pages"] < 64:
        time.sleep(0.01)
    print("written", flush=True)
    time.sleep(1000)
"""


def test_an_engine_that_is_started_again_goes_on_with_the_folder(
    demo_model: Path, tmp_path: Path, expected: list[object]
) -> None:
    with LLM(str(demo_model), num_pages=256, kv_disk=str(tmp_path)) as llm:
        for _ in range(2):
            assert answers(ask(llm)) == expected[:4]
            wait_until(lambda: llm.stats()["kv_disk_pages"] >= 64, "all pages are on disk")
            os.kill(llm._engine.engines.ready.engine_pid, signal.SIGKILL)
        assert answers(ask(llm, SAMPLED)) == expected[4:]
        assert llm.stats()["kv_disk_failures"] == 0
        check_accounts(llm)


def test_an_engine_killed_with_its_supervisor_leaves_what_it_wrote(
    demo_model: Path, tmp_path: Path, expected: list[object]
) -> None:
    command = [sys.executable, "-c", _WRITES_PAGES, str(demo_model), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.kill()
    with LLM(str(demo_model), num_pages=256, kv_disk=str(tmp_path)) as llm:
        wait_until(lambda: llm.stats()["kv_disk_pages"] >= 64, "the engine of the killed process has ended")
        outputs = ask(llm)
        assert num_cached(outputs) == [512] * 4
        assert answers(outputs) == expected[:4]
        check_accounts(llm)


def test_a_folder_that_cannot_be_used_is_told_and_done_without(
    demo_model: Path, tmp_path: Path, expected: list[object], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with LLM(str(demo_model), num_pages=256, kv_disk=str(tmp_path / "file" / "kv")) as llm:
        assert answers(ask(llm)) == expected[:4]
        assert llm.stats()["kv_disk_failures"] == 1
    assert "Not a directory; going on without it" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_disk": "x", "enable_prefix_caching": False}, "kv_disk keeps pages of the prefix cache"),
        ({"kv_disk_bytes": "1GiB"}, "without kv_disk"),
        ({"kv_disk": "x", "kv_disk_bytes": "many"}, "kv_disk_bytes='many'"),
        ({"kv_disk": ""}, "kv_disk=''"),
    ],
)
def test_options_that_make_no_sense_are_rejected(demo_model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(str(demo_model), **options)
