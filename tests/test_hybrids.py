"""Models with state do all that others do: drafts, beams, grammars, forks, cached prefixes, and nothing is lost."""

from __future__ import annotations

import mmap
import os
import random
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import compare_speculation
import numpy as np
import pytest
from conftest import assert_all_pages_free
from engine_pairs import pair
from engine_process import DealerClient
from engine_signals import hit_soon
from engine_watch import wait_until
from memory_pressure import under_pressure

from quire.frontend import (
    LLM,
    BeamSearchParams,
    EngineStartError,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)
from quire.protocol.messages import EngineCoreRequest
from quire.protocol.messages import SamplingParams as EngineParams

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import RequestOutput

HYBRIDS = ("qwen3.5-grouped", "lfm2-moe", "granite4-experts", "falcon-h1-norm", "nemotron-h-experts")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
GREEDY_ALONE = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
VOCABULARY = 500


def tokens_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def ask(llm: LLM, prompts: Sequence[Sequence[int]], params: Any = GREEDY) -> list[RequestOutput]:
    return llm.generate([TokensPrompt(prompt_token_ids=[*prompt]) for prompt in prompts], params, use_tqdm=False)


def answers(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [compare_speculation.answer(output) for output in outputs]


def send(client: DealerClient, request_id: str, prompt: list[int], *, remote_prefill: bool = False) -> None:
    params = EngineParams(temperature=0.0, max_tokens=8)
    client.send(EngineCoreRequest(request_id, prompt, params, remote_prefill=remote_prefill))


def repetitive(seed: int) -> list[int]:
    """Return a prompt whose end is in it before, so that drafts are found."""
    part = tokens_of(12, seed)
    return [*part, *tokens_of(30, seed + 1), *part, *tokens_of(7, seed + 2), *part]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("options", [{}, {"num_pages": 20}, {"max_num_batched_tokens": 48, "threads": 1}], ids=str)
def test_drafts_change_no_bit(name: str, options: dict[str, Any], checkpoints: Path, engine: EngineFactory) -> None:
    """Drafts that are rejected leave no trace in the state; a draft model that is the target is mostly right."""
    model, prompts = checkpoints / name, [repetitive(seed) for seed in range(0, 48, 3)]
    params = [
        SamplingParams(temperature=0.0 if seed % 2 else 0.9, seed=seed, max_tokens=60, ignore_eos=True, logprobs=1)
        for seed in range(len(prompts))
    ]
    expected, few = answers(ask(engine(model), prompts, params)), "num_pages" in options
    for drafting in (
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
        {"method": "suffix"},
        {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3},
    ):
        llm = engine(model, speculative_config={**drafting, "adaptive": False}, **options)
        found = under_pressure(llm, partial(ask, llm, prompts, params)) if few else ask(llm, prompts, params)
        assert answers(found) == expected, drafting
    counts = llm.stats()["totals"]["speculation"]
    assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"]


@pytest.mark.parametrize("name", HYBRIDS)
def test_beams_and_samples_fork_the_state(name: str, checkpoints: Path, engine: EngineFactory) -> None:
    model, prompt = checkpoints / name, tokens_of(70)
    large = engine(model)
    small = engine(model, num_pages=24, max_num_batched_tokens=48, threads=1)
    beams = BeamSearchParams(beam_width=4, max_tokens=40, ignore_eos=True)
    found = [llm.beam_search([TokensPrompt(prompt_token_ids=prompt)], beams)[0].sequences for llm in (large, small)]
    assert [(beam.tokens, beam.cum_logprob) for beam in found[0]] == [
        (beam.tokens, beam.cum_logprob) for beam in found[1]
    ]
    assert len({tuple(beam.tokens) for beam in found[0]}) == 4
    params = SamplingParams(n=6, temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
    single = [
        ask(large, [prompt], SamplingParams(temperature=1.0, seed=3 + i, max_tokens=40, ignore_eos=True, logprobs=1))
        for i in range(6)
    ]
    together = [ask(llm, [prompt], params)[0] for llm in (large, small)]
    for output in together:
        assert [each.token_ids for each in output.outputs] == [each[0].outputs[0].token_ids for each in single]


@pytest.mark.parametrize("name", HYBRIDS)
def test_grammars_and_late_constraints(name: str, checkpoints: Path, engine: EngineFactory) -> None:
    """Beside other requests, so that a constraint may come late: its token is computed again."""
    params = [
        SamplingParams(
            temperature=1.0, seed=seed, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="[a-z ]{20}")
        )
        for seed in range(6)
    ]
    prompts = [tokens_of(40 + seed, seed) for seed in range(6)]
    llm, other = engine(checkpoints / name), engine(checkpoints / name, max_num_batched_tokens=48, num_pages=20)
    expected = [answers(ask(llm, [prompt], each)) for prompt, each in zip(prompts, params, strict=True)]
    beside = [tokens_of(30, seed) for seed in range(10, 16)]
    for each in (llm, other):
        outputs = ask(each, [*prompts, *beside], [*params, *[GREEDY] * len(beside)])
        assert [answers([output]) for output in outputs[: len(prompts)]] == expected
    assert all(len(output.outputs[0].text) == 20 for output in outputs[: len(prompts)])


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_shared_prefix_is_a_cache_hit(name: str, checkpoints: Path, engine: EngineFactory) -> None:
    """The third prompt finds what the first two share, a longer chat all of the one before, and the same prompt all."""
    llm, plain = engine(checkpoints / name), engine(checkpoints / name, enable_prefix_caching=False)
    system = tokens_of(200)
    prompts = [[*system, *tokens_of(50, seed)] for seed in (1, 2, 3)]
    found = [ask(llm, [prompt])[0] for prompt in prompts]
    assert [output.num_cached_tokens for output in found][0::2] == [0, 192]
    turn = [*prompts[2], *found[2].outputs[0].token_ids]
    again = ask(llm, [prompts[0]])[0]
    longer = ask(llm, [[*turn, *tokens_of(40, 9)]])[0]
    assert again.num_cached_tokens == 224
    assert longer.num_cached_tokens == (len(turn) - 1) // 32 * 32
    outputs = [*found, again, longer]
    expected = [ask(plain, [output.prompt_token_ids or []])[0] for output in outputs]
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]


def test_memory_is_bounded_and_snapshots_give_way(checkpoints: Path, engine: EngineFactory) -> None:
    llm = engine(checkpoints / "qwen3.5-tied", num_pages=64, max_num_seqs=4)
    total = llm.stats()["states_total"]
    for seed in range(40):
        ask(llm, [tokens_of(64 + seed, seed)], SamplingParams(max_tokens=2))
    stats = llm.stats()
    assert stats["states_total"] == total < 64
    assert stats["states_free"] + stats["states_cached"] == total
    assert stats["state_evictions"] > 0


def test_more_requests_than_records_wait(checkpoints: Path, engine: EngineFactory) -> None:
    """Without a record a request waits; all are answered as if alone."""
    prompts = [tokens_of(20 + seed, seed) for seed in range(60)]
    model = checkpoints / "qwen3.5-tied"
    llm, small = engine(model), engine(model, kv_cache_memory_bytes=6 << 20)
    assert small.stats()["states_total"] < len(prompts)
    assert answers(ask(small, prompts)) == answers(ask(llm, prompts))


def test_beams_wait_for_records(checkpoints: Path, engine: EngineFactory) -> None:
    """Two of these searches have no records at the same time, and there are wider ones than there can be."""
    model, prompts = checkpoints / "qwen3.5-tied", [tokens_of(40 + seed, seed) for seed in range(4)]
    llm, small = (engine(model, kv_cache_memory_bytes=size << 20) for size in (64, 6))
    total = small.stats()["states_total"]

    def search(llm: LLM, width: int) -> list[Any]:
        params = BeamSearchParams(beam_width=width, max_tokens=12, ignore_eos=True)
        outputs = llm.beam_search([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params)
        return [[(beam.tokens, beam.cum_logprob) for beam in output.sequences] for output in outputs]

    assert search(small, total - 1) == search(llm, total - 1)
    assert small.stats()["preemptions"] > 0
    with pytest.raises(ValueError, match=rf"beam_width={total + 1} needs as many records of state, and the engine has"):
        search(small, total + 1)


def test_memory_that_holds_no_records_is_refused(checkpoints: Path, engine: EngineFactory) -> None:
    with pytest.raises(EngineStartError, match=r"holds no page beside 9 records of state of \d+ bytes"):
        engine(checkpoints / "qwen3.5-tied", kv_cache_memory_bytes=1 << 20)


def kill(llm: LLM) -> None:
    """Kill the engine, and wait for the next one."""
    client = llm._engine.engines
    before = client.ready.engine_pid
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: client.away is None and client.ready.engine_pid != before, "no other engine came")


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_outlive_the_engine(name: str, checkpoints: Path, engine: EngineFactory) -> None:
    """What the killed engine had in its prefix cache the next one has, with the same bits; and streams go on."""
    llm, plain = engine(checkpoints / name), engine(checkpoints / name, enable_prefix_caching=False)
    prompts = [tokens_of(150 + 40 * seed, seed) for seed in range(4)]
    expected = ask(plain, prompts)
    assert answers(ask(llm, prompts)) == answers(expected)
    kill(llm)
    again = ask(llm, prompts)
    assert [output.outputs for output in again] == [output.outputs for output in expected]
    assert [output.num_cached_tokens for output in again] == [(len(prompt) - 1) // 32 * 32 for prompt in prompts]
    long = SamplingParams(temperature=0.8, seed=4, max_tokens=300, ignore_eos=True, logprobs=1)
    streams = ask(plain, prompts, long)
    hit_soon(llm, signal.SIGKILL)
    assert answers(ask(llm, prompts, long)) == answers(streams)


def test_damaged_states_are_computed_again(checkpoints: Path, engine: EngineFactory) -> None:
    model, prompt = checkpoints / "qwen3.5-tied", tokens_of(200)
    llm = engine(model)
    (expected,) = ask(llm, [prompt])
    client = llm._engine.engines
    before = client.ready.engine_pid
    os.kill(before, signal.SIGSTOP)
    (found,) = [path for path in Path(f"/proc/{before}/fd").iterdir() if "quire-kv" in str(path.readlink())]
    with found.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        end = mmap.mmap(file.fileno(), size)
        half = np.frombuffer(end, np.uint8)[size // 2 :]
        states = np.flatnonzero(half)[-4096:]  # the last bytes that were written are those of states
        half[states] ^= 255
        del half
        end.close()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: client.away is None and client.ready.engine_pid != before, "no other engine came")
    (again,) = ask(llm, [prompt])
    assert again.outputs == expected.outputs
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_come_back_from_disk(name: str, checkpoints: Path, engine: EngineFactory, tmp_path: Path) -> None:
    """With the last turn's end, which a longer chat begins with."""
    prompts = [tokens_of(150 + 40 * seed, seed) for seed in range(4)]
    plain = engine(checkpoints / name, enable_prefix_caching=False)
    expected = ask(plain, prompts)
    with LLM(str(checkpoints / name), num_pages=256, kv_disk=str(tmp_path), kv_disk_bytes="512MiB") as llm:
        assert answers(ask(llm, prompts)) == answers(expected)
        turns = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in expected]
    with LLM(str(checkpoints / name), num_pages=256, kv_disk=str(tmp_path), kv_disk_bytes="512MiB") as llm:
        again = ask(llm, prompts)
        assert [output.outputs for output in again] == [output.outputs for output in expected]
        assert [output.num_cached_tokens for output in again] == [(len(prompt) - 1) // 32 * 32 for prompt in prompts]
        llm.reset_prefix_cache()
        longer = [[*turn, *tokens_of(20, 9)] for turn in turns]
        found = ask(llm, longer)
        assert [output.num_cached_tokens for output in found] == [(len(turn) - 1) // 32 * 32 for turn in turns]
        assert [output.outputs for output in found] == [output.outputs for output in ask(plain, longer)]
        assert_all_pages_free(llm)


@pytest.mark.parametrize("name", HYBRIDS)
def test_prefixes_of_another_engine_come_with_their_state(name: str, checkpoints: Path, engine: EngineFactory) -> None:
    """Those that it has, and one that it is computing."""
    model, prompt, other = checkpoints / name, tokens_of(700), tokens_of(650, 1)
    plain = engine(model, enable_prefix_caching=False)
    expected = [output.outputs[0].token_ids for output in ask(plain, [prompt, other], GREEDY_ALONE)]
    with pair(model) as engines:
        engines.connect()
        send(engines.p, "first", prompt)
        engines.p.end("first")
        send(engines.d, "second", prompt)
        assert engines.d.tokens("second") == expected[0]
        assert max(output.num_cached_tokens for output in engines.d.outputs("second")) == 672
        send(engines.p, "third", other)
        send(engines.d, "fourth", other, remote_prefill=True)
        assert engines.d.tokens("fourth") == expected[1]
        assert max(output.num_cached_tokens for output in engines.d.outputs("fourth")) == 640
        assert engines.d.call("stats")["kv_peer_failures"] == 0
