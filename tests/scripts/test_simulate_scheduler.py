"""Traces through the real scheduler in virtual time, with exact figures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import simulate_scheduler
from bench.mixed import MixedLoad
from bench.simulation import Simulation, first_token_seconds

from quire.engine_core.scheduling.policies import MAX_TIMES_PASSED_OVER
from quire.frontend.evaluation.workload.request import BLOCK_TOKENS, WorkloadRequest
from quire.frontend.evaluation.workload.sharing import infinite_cache_hits
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import FinishReason
from quire.protocol.simulation import StepTime

STEP_TIME = StepTime(0.01, 1e-5, 1e-4)


def make_requests(count: int, seed: int = 0) -> list[WorkloadRequest]:
    """Return turns of chats: most prompts extend the blocks of an earlier one."""
    random_ = random.Random(seed)
    requests: list[WorkloadRequest] = []
    blocks = 0
    for number in range(count):
        before = random_.choice(requests).blocks if requests and random_.random() < 0.7 else ()
        more = random_.randint(1, 3)
        names = (*before, *range(blocks, blocks + more))
        blocks += more
        prompt = len(names) * BLOCK_TOKENS - random_.choice([0, 1, 100, 511])
        requests.append(WorkloadRequest(0.02 * number, prompt, random_.randint(1, 40), names))
    return requests


def write_mooncake(path: Path, requests: list[WorkloadRequest]) -> Path:
    rows = [
        {
            "timestamp": round(request.arrival * 1000),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": request.blocks,
        }
        for request in requests
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def limits(requests: list[WorkloadRequest], **changes: Any) -> EngineShape:
    sizes: dict[str, Any] = {
        "vocab_size": 1 << 14,
        "max_model_len": 1 + max(request.prompt_tokens + request.output_tokens for request in requests),
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "block_size": 32,
        "num_pages": 20_000,
    }
    return EngineShape(**(sizes | changes))


def serve(requests: list[WorkloadRequest], **changes: Any) -> Simulation:
    """Serve the requests; check that each is answered and no page is held at the end."""
    simulation = Simulation(limits(requests, **changes), STEP_TIME)
    simulation.run(requests)
    sequences = simulation.engine.core.sequences
    assert sequences.held_pages == 0
    assert sequences.free_pages + sequences.cached_pages == simulation.limits.num_pages
    for request, answer in zip(requests, simulation.answers, strict=True):
        assert answer.finish_reason is FinishReason.STOP
        assert len(answer.token_times) == request.output_tokens
        assert first_token_seconds(answer) > 0
    return simulation


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_with_enough_pages_all_that_is_shared_is_found(policy: str) -> None:
    requests = make_requests(60)
    report = serve(requests, scheduling_policy=policy).report()
    assert report["cached_tokens"] == infinite_cache_hits(requests, 32) > 0
    assert report["prompt_tokens"] == sum(request.prompt_tokens for request in requests)
    assert (report["preemptions"], report["evictions"], report["wasted_tokens"]) == (0, 0, 0)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_overload_of_a_small_pool_neither_thrashes_nor_passes_over_for_ever(policy: str) -> None:
    requests = make_requests(300)
    report = serve(requests, scheduling_policy=policy, num_pages=600).report()
    assert report["waiting_most"] > 50
    assert report["evictions"] > 0
    assert report["held_mean"] > 0.5
    assert report["preemptions"] <= 0.01 * len(requests)
    assert report["most_passed_over"] <= MAX_TIMES_PASSED_OVER


def test_passed_over_requests_are_counted_from_the_events() -> None:
    """A prompt without a prefix match waits behind many with one: lpm keeps its bound exactly."""
    shared = tuple(range(4))
    requests = [WorkloadRequest(0, 4 * BLOCK_TOKENS, 20, shared), WorkloadRequest(0.001, 100, 1, (100,))]
    requests += [
        WorkloadRequest(0.002, 5 * BLOCK_TOKENS, 1, (*shared, 200 + number))
        for number in range(2 * MAX_TIMES_PASSED_OVER)
    ]
    simulation = serve(requests, scheduling_policy="lpm", max_num_seqs=1)
    passes = simulation.times_overtaken()
    assert passes[1] == max(passes) == MAX_TIMES_PASSED_OVER
    assert max(serve(requests, scheduling_policy="fcfs", max_num_seqs=1).times_overtaken()) == 0


@pytest.mark.parametrize("seconds", [(0.03, 7e-4, 1e-3), (0.02, 3e-4, 1e-3), (0.1, 4e-3, 2e-3)])
def test_a_long_prompt_among_chats_slows_them_twofold_at_most_and_lets_a_short_one_by(
    seconds: tuple[float, float, float],
) -> None:
    """With the last times, a tile of the prompt takes as long as all decodes: each step has room for only one."""
    load = MixedLoad()
    request = WorkloadRequest(0, load.longest, 1, ())
    found = load.run(limits([request]), StepTime(*seconds))
    assert found["itl_growth_p99"] <= 2
    assert found["short_ttft_chunk_times"] <= 3
    assert found["short_ttft_seconds"] < found["long_ttft_seconds"]


SMALL = StepTime(0.002, 1e-4, 5e-5)
"""Steps of a small model: decoding alone takes 2 ms."""


def first_tokens(requests: list[WorkloadRequest], **changes: Any) -> tuple[list[float], float]:
    """Return the seconds to each first token, and the longest inter-token latency."""
    simulation = Simulation(limits(requests, **changes), SMALL)
    simulation.run(requests)
    firsts = [first_token_seconds(answer) for answer in simulation.answers]
    return firsts, simulation.report()["itl_seconds"]["most"]


def prompt(arrival: float, tokens: int, number: int, output: int = 1) -> WorkloadRequest:
    """Return a request that shares nothing with others of other numbers."""
    return WorkloadRequest(arrival, tokens, output, tuple(range(20 * number, 20 * number + 20)))


def test_a_burst_of_prompts_fills_steps_up_to_the_target() -> None:
    chats = [prompt(0.1 * number, 40, number, 1000) for number in range(8)]
    burst = [prompt(1.0, 300, 100 + number) for number in range(20)]  # that take 0.6 s in all
    slow, short_gap = first_tokens(chats + burst, target_itl=0.0)
    fast, long_gap = first_tokens(chats + burst, target_itl=25.0)
    assert max(slow[8:]) > 1.0
    assert max(fast[8:]) < 0.75
    assert short_gap < 0.01 < long_gap < 0.03


def test_no_stream_of_short_prompts_starves_a_long_one() -> None:
    """Short ones alone are twice as much as the engine can do, for 12 s of computing. Tiles halve the quarter here."""
    chat, long = prompt(0.0, 40, 0, 3000), prompt(1.0, 8000, 1)
    flood = [prompt(1.001 + 0.002 * number, 40, 10 + number) for number in range(3000)]
    (_, first, *others), _ = first_tokens([chat, long, *flood], attention_context=1e6)
    assert first < 8 * 0.8
    assert sum(others) / len(others) < first


def test_requests_of_a_burst_are_answered_shortest_first() -> None:
    lengths = [700, 100, 400, 250]
    firsts, _ = first_tokens([prompt(0.0, 1500, 0), *(prompt(0.01, n, 10 + n) for n in lengths)])
    assert sorted(firsts[1:]) == [firsts[1 + lengths.index(length)] for length in sorted(lengths)]


def test_the_script_reports_hit_rates_of_all_policies_and_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_mooncake(tmp_path / "trace.jsonl", make_requests(40))
    arguments = ["trace", str(trace), "--pages", "400", "20000", "--policy", "fcfs", "lpm", "--speed", "2"]
    simulate_scheduler.main([*arguments, "--requests", "30", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(run["pages"], run["policy"]) for run in found["runs"]] == [
        (400, "fcfs"),
        (400, "lpm"),
        (20000, "fcfs"),
        (20000, "lpm"),
    ]
    assert all(run["served"] == run["requests"] == 30 for run in found["runs"])
    assert [run["hit_rate"] for run in found["runs"][2:]] == pytest.approx([found["infinite_hit_rate"]] * 2)
    assert f"an unbounded cache finds {found['infinite_hit_rate']:.2%}" in capsys.readouterr().out


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as error:
        simulate_scheduler.main(["trace", str(tmp_path / "none.jsonl")])
    assert "none.jsonl" in str(error.value)
