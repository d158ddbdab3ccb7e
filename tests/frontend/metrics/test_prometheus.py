"""The metrics of a server, as Prometheus parses them, after real requests to a real engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from memory_pressure import under_pressure
from parsed_metrics import ParsedMetrics, parse_open_metrics
from patience import PATIENCE

from quire.frontend import LLM, AsyncLLM, RequestError, RequestTimeoutError, SamplingParams, TokensPrompt
from quire.frontend.metrics import server
from quire.frontend.metrics.server import ServerMetrics
from quire.frontend.text.prompts import Prompt, PromptType

if TYPE_CHECKING:
    from conftest import EngineFactory

TTFT = [
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
]
PER_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
REQUEST = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
LENGTHS: list[float] = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]  # the demo model's context holds 2048

# Metrics that vLLM's dashboards read: gauges and counters with their own labels; histograms.
GAUGES: dict[str, set[str]] = {
    "num_requests_running": set(),
    "num_requests_waiting": set(),
    "num_requests_waiting_by_reason": {"reason"},
    "kv_cache_usage_perc": set(),
    "engine_sleep_state": {"sleep_state"},
    "cache_config_info": {
        *("block_size", "cache_dtype", "device", "enable_prefix_caching", "fast_matmul", "kv_cache_memory_bytes"),
        *("num_gpu_blocks", "num_pages"),
    },
    "gpu_cache_usage_perc": set(),
    "lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
}
COUNTERS: dict[str, set[str]] = {
    "prompt_tokens": set(),
    "prompt_tokens_cached": set(),
    "prompt_tokens_by_source": {"source"},
    "generation_tokens": set(),
    "num_preemptions": set(),
    "request_success": {"finished_reason"},
    "prefix_cache_queries": set(),
    "prefix_cache_hits": set(),
    "gpu_prefix_cache_queries": set(),
    "gpu_prefix_cache_hits": set(),
    "admission_rejections": {"reason"},
    "spec_decode_num_drafts": set(),
    "spec_decode_num_draft_tokens": set(),
    "spec_decode_num_accepted_tokens": set(),
    "spec_decode_num_accepted_tokens_per_pos": {"position"},
}
HISTOGRAMS: dict[str, Sequence[float]] = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": PER_TOKEN,
    "request_time_per_output_token_seconds": PER_TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "request_params_max_tokens": LENGTHS,
    "iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
    "request_params_n": [1, 2, 5, 10, 20],
    "request_num_preemptions": [1, 2, 3, 4, 5, 10, 20],
}
OWN = {
    *(
        "engine_up",
        "engine_losses",
        "requests_routed",
        "engine_clients",
        "kv_pages",
        "kv_pages_free",
        "kv_pages_cached",
        "kv_pages_held",
    ),
    *("engine_steps", "engine_preemptions", "engine_evictions", "engine_wasted_tokens", "engine_frames_refused"),
    *("engine_clients_silent", "engine_clients_gone", "engine_clients_slow", "engine_outputs_merged"),
    *("engine_messages_dropped", "engine_prefill_tokens", "engine_decode_tokens", "engine_prefix_cache_queries"),
    *("engine_prefix_cache_hits", "engine_step_phase_seconds", "engine_step_seconds", "requests_in_flight"),
    *("kv_peer_pages_served", "generation_tokens_together"),
    *("inter_token_latency_fine_seconds", "request_queue_time_fine_seconds"),
    *("engine_clients_rejected", "engine_resident_memory_bytes", "engine_memory_limit_bytes"),
    *("engine_memory_sheddings", "http_requests", "http_request_duration_seconds", "http_streams_in_flight"),
}

Body = Callable[[AsyncLLM, ServerMetrics], Awaitable[None]]


@pytest.fixture(autouse=True)
def patient_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapes wait for the engine's statistics, however busy the machine is."""
    monkeypatch.setattr(server, "STATS_SECONDS", PATIENCE)


@pytest.fixture(scope="module")
def llm(module_engine: EngineFactory, demo_model: Path) -> LLM:
    return module_engine(demo_model)


def greedy(max_tokens: int, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)  # type: ignore[arg-type]


def play(llm: LLM, body: Body, **options: str) -> None:
    """Run `body` with a frontend of its own."""

    async def main() -> None:
        async with AsyncLLM(engine_address=llm.engine_address) as each, asyncio.timeout(PATIENCE):
            metrics = ServerMetrics(model_name='a "model"\\', **options)
            each.add_observer(metrics.requests_of(each.max_model_len))
            await body(each, metrics)

    asyncio.run(main())


async def complete(llm: AsyncLLM, prompt: str | list[int], params: SamplingParams, seconds: float | None = None) -> int:
    """Run a request to its end; return its number of tokens."""
    outputs = [output async for output in llm.generate(prompt, params, timeout=seconds)]
    return sum(len(completion.token_ids) for completion in outputs[-1].outputs)


async def scrape(llm: AsyncLLM, metrics: ServerMetrics) -> ParsedMetrics:
    page, content_type = await server.render([(metrics, llm)])
    assert content_type.startswith("text/plain; version=0.0.4")
    return ParsedMetrics(page)


def test_names_labels_and_buckets_are_those_that_dashboards_read(llm: LLM) -> None:
    async def body(each: AsyncLLM, metrics: ServerMetrics) -> None:
        metrics.http.request("/v1/completions", "POST", 200, 0.1)
        page = await scrape(each, metrics)
        names = {name.removeprefix("vllm:") for name in page.families if name.startswith("vllm:")}
        assert names == {*GAUGES, *COUNTERS, *HISTOGRAMS} | OWN
        assert "process_cpu_seconds" in page.families
        common = {"model_name", "engine"}
        for kind, families in (("gauge", GAUGES), ("counter", COUNTERS)):
            for name, labels in families.items():
                assert page.families[f"vllm:{name}"].type == kind
                assert page.labels(f"vllm:{name}") == labels | common
        for name, bounds in HISTOGRAMS.items():
            assert page.families[f"vllm:{name}"].type == "histogram"
            assert page.bounds(f"vllm:{name}") == [*bounds, float("inf")]
            assert page.labels(f"vllm:{name}") == {"le"} | common
        for name in ("inter_token_latency_fine_seconds", "request_queue_time_fine_seconds"):
            assert page.bounds(f"vllm:{name}")[0] == 0.0001
        assert page.get("vllm:engine_up", model_name='a "model"\\', engine="0") == 1

    play(llm, body, prefix="vllm")


def test_open_metrics_have_the_same_values(llm: LLM) -> None:
    async def body(each: AsyncLLM, metrics: ServerMetrics) -> None:
        await complete(each, "Once", greedy(8))
        text = await scrape(each, metrics)
        accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
        page, content_type = await server.render([(metrics, each)], accept)
        assert content_type.startswith("application/openmetrics-text; version=1.0.0")
        other = ParsedMetrics(page, parse_open_metrics)
        assert other.families.keys() == text.families.keys()
        for name in HISTOGRAMS:
            assert other.counts(f"quire:{name}") == text.counts(f"quire:{name}")
        for name, labels in COUNTERS.items():
            if not labels:
                assert other[f"quire:{name}_total"] == text[f"quire:{name}_total"]

    play(llm, body)


def test_counts_are_those_of_the_requests(llm: LLM) -> None:
    prompt = list(range(100, 170))  # two pages and some

    async def body(each: AsyncLLM, metrics: ServerMetrics) -> None:
        await each.reset_prefix_cache()
        num_tokens = [await complete(each, prompt, greedy(10)) for _ in range(2)]
        num_tokens.append(await complete(each, prompt, SamplingParams(max_tokens=5, n=3, seed=1, ignore_eos=True)))
        assert num_tokens == [10, 10, 15]
        page = await scrape(each, metrics)
        assert page["quire:requests_in_flight"] == 0
        assert page["quire:prompt_tokens_total"] == page["quire:prefix_cache_queries_total"] == 210
        assert page["quire:prompt_tokens_cached_total"] == page["quire:prefix_cache_hits_total"] == 128
        assert page["quire:generation_tokens_total"] == page["quire:request_generation_tokens_sum"] == 35
        assert page.get("quire:request_success_total", finished_reason="length") == 3
        for name in HISTOGRAMS.keys() - {"inter_token_latency_seconds", "iteration_tokens_total"}:
            assert page[f"quire:{name}_count"] == 3, name
        assert page["quire:e2e_request_latency_seconds_sum"] > page["quire:time_to_first_token_seconds_sum"] > 0

    play(llm, body)


def test_a_request_starts_before_its_prompt_is_tokenized(llm: LLM) -> None:
    async def body(each: AsyncLLM, metrics: ServerMetrics) -> None:
        begun = time.monotonic()
        tokenized: list[float] = []
        tokenize = each._engine.prompt

        def slow(prompt: PromptType, **options: Any) -> Prompt:
            tokenized.append(time.monotonic() - begun)
            return tokenize(prompt, **options)

        each._engine.prompt = slow  # type: ignore[method-assign]
        stream = each.generate("Once", greedy(2))
        outputs = [output async for output in stream]
        assert outputs[-1].metrics.arrival_time - begun <= tokenized[0]
        assert (await scrape(each, metrics))["quire:time_to_first_token_seconds_count"] == 1

    play(llm, body)


def test_embeddings_count_their_prompts(llm: LLM) -> None:
    async def body(each: AsyncLLM, metrics: ServerMetrics) -> None:
        await each.reset_prefix_cache()
        prompt: TokensPrompt = {"prompt_token_ids": list(range(100, 170))}
        for _ in range(2):
            await each.embed(prompt)
        with pytest.raises(RequestTimeoutError):
            await each.embed({"prompt_token_ids": [1] * 2000}, timeout=1e-9)
        page = await scrape(each, metrics)
        assert page["quire:requests_in_flight"] == 0
        assert page["quire:prompt_tokens_total"] == 140
        assert page["quire:prompt_tokens_cached_total"] == 64
        assert page["quire:request_prompt_tokens_sum"] == 2140
        assert page["quire:generation_tokens_total"] == page["quire:request_generation_tokens_count"] == 0
        assert page["quire:e2e_request_latency_seconds_count"] == 3
        assert page.get("quire:request_success_total", finished_reason="stop") == 2
        assert page.get("quire:request_success_total", finished_reason="timeout") == 1

    play(llm, body)


def test_finish_reasons_are_counted(llm: LLM) -> None:
    async def leave(each: AsyncLLM) -> None:
        stream = each.generate("Once", greedy(1900))
        await anext(stream)
        await stream.aclose()

    async def abort(each: AsyncLLM) -> None:
        stream = each.generate("Once", greedy(1900), "mine")
        await anext(stream)
        await each.abort("mine")
        assert [output async for output in stream][-1].outputs[0].finish_reason == "abort"

    async def body(each: AsyncLLM, metrics: ServerMetrics) -> None:
        await leave(each)
        await abort(each)
        await complete(each, "Once", greedy(1900), seconds=0.01)
        await complete(each, "Once", SamplingParams(temperature=0.0, max_tokens=50, stop=["e"]))
        with pytest.raises(RequestError):
            await complete(each, "Once", greedy(5000))
        page = await scrape(each, metrics)
        assert page["quire:requests_in_flight"] == 0
        ends = {"stop": 1, "length": 0, "abort": 2, "timeout": 1, "error": 0}
        for reason, count in ends.items():
            assert page.get("quire:request_success_total", finished_reason=reason) == count, reason
        assert page["quire:e2e_request_latency_seconds_count"] == 4

    play(llm, body)


def test_metrics_of_the_engine_are_the_same_for_all_frontends_and_others_add_up(llm: LLM) -> None:
    async def body(each: AsyncLLM, metrics: ServerMetrics) -> None:
        async with AsyncLLM(engine_address=llm.engine_address) as other:
            own = ServerMetrics(model_name="other")
            other.add_observer(own.requests_of(other.max_model_len))
            before = await scrape(each, metrics)
            await asyncio.gather(
                *(complete(each, "Once", greedy(20)) for _ in range(3)), complete(other, "A", greedy(7))
            )
            pages = [await scrape(each, metrics), await scrape(other, own)]
            stats = await each.stats()
        assert [page["quire:generation_tokens_total"] for page in pages] == [60, 7]
        for name in (
            "engine_steps_total",
            "engine_decode_tokens_total",
            "iteration_tokens_total_count",
            "kv_pages_free",
        ):
            assert pages[0][f"quire:{name}"] == pages[1][f"quire:{name}"]
        decodes = pages[0]["quire:engine_decode_tokens_total"] - before["quire:engine_decode_tokens_total"]
        assert decodes == 67 - 4  # the first of each comes with its prompt
        kv = {name: pages[0][f"quire:kv_{name}"] for name in ("pages_free", "pages_cached", "pages_held", "pages")}
        assert kv["pages_free"] + kv["pages_cached"] + kv["pages_held"] == kv["pages"] == stats["pages_total"]
        assert pages[0]["quire:engine_clients"] == 3
        assert pages[0]["quire:iteration_tokens_total_count"] == pages[0]["quire:engine_steps_total"] == stats["step"]
        tokens = pages[0]["quire:engine_prefill_tokens_total"] + pages[0]["quire:engine_decode_tokens_total"]
        assert pages[0]["quire:iteration_tokens_total_sum"] == tokens
        phases = ("schedule", "execute", "update")
        seconds = sum(pages[0].get("quire:engine_step_phase_seconds_total", phase=phase) for phase in phases)
        assert pages[0]["quire:engine_step_seconds_sum"] == pytest.approx(seconds)

    play(llm, body)


def test_rejected_and_preempted_requests(engine: EngineFactory, demo_model: Path) -> None:
    small = engine(demo_model, num_pages=20, max_num_seqs=8, max_waiting_requests=100)

    async def rejected(each: AsyncLLM, metrics: ServerMetrics) -> None:
        calls = [complete(each, "Once", greedy(30)) for _ in range(256)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, RequestError)]
        page = await scrape(each, metrics)
        assert errors
        assert page.get("quire:admission_rejections_total", reason="queue_full") == len(errors)
        assert page.get("quire:request_success_total", finished_reason="length") == 256 - len(errors)

    async def preempted(each: AsyncLLM, metrics: ServerMetrics) -> None:
        prompts = [[number] * 40 for number in range(100, 108)]
        await asyncio.gather(*(complete(each, prompt, greedy(100)) for prompt in prompts))
        page = await scrape(each, metrics)
        counts.append(page["quire:request_num_preemptions_sum"])
        assert counts[-1] <= page["quire:num_preemptions_total"] == page["quire:engine_preemptions_total"]
        assert page.get("quire:request_success_total", finished_reason="length") == 8

    async def watched(each: AsyncLLM, metrics: ServerMetrics) -> None:
        page = await scrape(each, metrics)
        assert page["quire:num_preemptions_total"] == small.stats()["preemptions"] > 0  # of no request that ended here
        assert page["quire:request_num_preemptions_sum"] == 0

    play(small, rejected)
    counts: list[float] = []
    under_pressure(small, lambda: play(small, preempted))
    assert counts[-1] > 0
    play(small, watched)


def test_the_configuration_of_the_cache_is_in_labels(engine: EngineFactory, demo_model: Path) -> None:
    sizes = 6 * 2 * 2 * 64  # layers, keys and values, their heads, values of a head
    for options, labels in (
        (
            {},
            {"cache_dtype": "bfloat16", "enable_prefix_caching": "True", "kv_cache_memory_bytes": f"{640 * 2 * sizes}"},
        ),
        (
            {"kv_cache_dtype": "int8", "enable_prefix_caching": False},
            {"cache_dtype": "int8", "enable_prefix_caching": "False"},
        ),
    ):

        async def body(each: AsyncLLM, metrics: ServerMetrics, labels: dict[str, str] = labels) -> None:
            page = await scrape(each, metrics)
            assert page.get("quire:cache_config_info", num_gpu_blocks="20", block_size="32", **labels) == 1

        play(engine(demo_model, num_pages=20, **options), body)


def test_neither_a_silent_nor_a_dead_engine_blocks_a_scrape(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STATS_SECONDS", 0.1)

    async def main() -> None:
        async with AsyncLLM(str(demo_model), num_pages=64, max_restarts=0) as each, asyncio.timeout(PATIENCE):
            metrics = ServerMetrics(model_name="demo")
            each.add_observer(metrics.requests_of(each.max_model_len))
            await complete(each, "Once", greedy(5))
            os.kill(each.engine_info.engine_pid, signal.SIGSTOP)
            silent = await scrape(each, metrics)
            assert silent["quire:engine_up"] == 1
            os.kill(each.engine_info.engine_pid, signal.SIGKILL)
            while each.dead_error is None:  # noqa: ASYNC110 - a client without requests gets no notice
                await asyncio.sleep(0)
            dead = await scrape(each, metrics)
            assert dead["quire:engine_up"] == 0
            for page in (silent, dead):
                assert page["quire:generation_tokens_total"] == 5
                assert "quire:num_requests_running" not in page.families

    asyncio.run(main())


def test_an_invalid_prefix_is_rejected() -> None:
    for prefix in ("", "1st", "a:b", "a b", "é"):
        with pytest.raises(ValueError, match="metrics_prefix"):
            ServerMetrics(model_name="demo", prefix=prefix)


def test_an_unknown_method_has_no_series_of_its_own(llm: LLM) -> None:
    async def body(each: AsyncLLM, metrics: ServerMetrics) -> None:
        for method in ("GET", "FOO", "BAR"):
            metrics.http.request("/health", method, 200, 0.002)
        with metrics.http.stream():
            page = await scrape(each, metrics)
        assert page.get("quire:http_requests_total", route="/health", method="other", status="200") == 2
        assert page.get("quire:http_request_duration_seconds_bucket", method="GET", le="0.0025") == 1
        assert page["quire:http_streams_in_flight"] == 1
        assert (await scrape(each, metrics))["quire:http_streams_in_flight"] == 0

    play(llm, body)
