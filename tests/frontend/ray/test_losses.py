"""Streams under Ray Serve go on where they were when engines, replicas and nodes die, and when replicas come and go."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from patience import PATIENCE

from quire.frontend import LLM, SamplingParams

pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")
import openai
from ray_cluster import RayCluster, kill, wait_for

NUM_STREAMS, TOKENS, BEGUN = 50, 300, 20
NUM_PROMPTS, PAGE = 8, 32
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0}
GREEDY = {**SAMPLED, "temperature": 0.0}


class Answer(NamedTuple):
    """What a stream has said: its tokens, its text, and each reason for its end that it has given."""

    tokens: list[int]
    text: str
    ends: list[str]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A cluster of a head and three nodes, with two replicas."""
    made = RayCluster(num_nodes=3, port=_free_port())
    try:
        made.deploy(tmp_path_factory.mktemp("serve"), {"num_replicas": 2})
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def pages_are_accounted_for(cluster: RayCluster) -> Iterator[None]:
    """After each test no KV page is held anywhere."""
    yield
    cluster.check_pages()


def _prompt(index: int) -> str:
    return f"Once upon a time there were {index + 2} foxes"


def _sampling(index: int) -> dict[str, Any]:
    """Return how a stream samples: every second one by its seed, the others the likeliest token."""
    return {"seed": index, "ignore_eos": True, **(SAMPLED if index % 2 else GREEDY)}


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """The answers of one engine that nobody disturbs."""
    params = [SamplingParams(max_tokens=TOKENS, **_sampling(index)) for index in range(NUM_STREAMS)]
    with LLM(num_pages=512) as llm:
        outputs = llm.generate([_prompt(index) for index in range(NUM_STREAMS)], params)
    found = [output.outputs[0] for output in outputs]
    return [Answer(each.token_ids, each.text, ["length"]) for each in found]


class Streams:
    """Answers that stream to as many threads, by OpenAI's client."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._lengths = [0] * NUM_STREAMS
        self._answers = [self._pool.submit(self._read, index) for index in range(NUM_STREAMS)]

    def _read(self, index: int) -> Answer:
        stream = self._client.completions.create(
            model="quire-demo",
            prompt=_prompt(index),
            max_tokens=TOKENS,
            stream=True,
            extra_body={"return_token_ids": True, **_sampling(index)},
        )
        tokens: list[int] = []
        ends: list[str] = []
        text = ""
        for chunk in stream:
            (choice,) = chunk.choices
            tokens += (choice.model_extra or {}).get("token_ids") or []
            text += choice.text
            if choice.finish_reason:
                ends.append(choice.finish_reason)
            self._lengths[index] = len(tokens)
        return Answer(tokens, text, ends)

    @property
    def num_open(self) -> int:
        """The number of answers that have not ended."""
        return sum(not answer.done() for answer in self._answers)

    def wait_begun(self) -> None:
        """Wait until each is in the midst of its answer."""
        wait_for(
            lambda: all(self._lengths[index] >= BEGUN or self._answers[index].done() for index in range(NUM_STREAMS))
        )

    def answers(self) -> list[Answer]:
        """Return the answers, once they are complete."""
        with self._pool:
            return [answer.result(PATIENCE) for answer in self._answers]


def _hit(hit: str, cluster: RayCluster) -> None:
    replica = cluster.replicas()[0]
    match hit:
        case "engine":
            kill(cluster.engine_pids()[0])
        case "replica":
            kill(replica["Pid"])
        case "node":
            cluster.kill_node(replica)
            cluster.add_node()


@pytest.mark.parametrize("hit", ["nothing", "engine", "replica", "node"])
def test_streams_go_on_with_the_same_tokens(cluster: RayCluster, expected: list[Answer], hit: str) -> None:
    cluster.wait_replicas(2)
    streams = Streams(cluster.url)
    streams.wait_begun()
    assert streams.num_open > NUM_STREAMS // 2
    _hit(hit, cluster)
    assert streams.answers() == expected


def test_a_conversation_stays_where_its_prefix_is_cached(cluster: RayCluster) -> None:
    cluster.wait_replicas(2)
    prompt, count = "There was a king who had twelve daughters, each fairer than the one before. " * 8, 6
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    before = cluster.metrics()["quire:engine_prefix_cache_hits_total"]
    usages = [
        client.completions.create(model="quire-demo", prompt=prompt, max_tokens=2).usage.prompt_tokens  # type: ignore[union-attr]
        for _ in range(count)
    ]
    hits = cluster.metrics()["quire:engine_prefix_cache_hits_total"] - before
    assert hits >= (count - 1) * (usages[0] - 32)  # all but the first found all full pages


def test_an_ingress_that_is_new_finds_prefixes_where_they_are_cached(cluster: RayCluster) -> None:
    cluster.wait_replicas(2)
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def answer(index: int) -> int:
        prompt = f"{index} kings had {index} daughters, each fairer than the one before. " * 8
        usage = client.completions.create(model="quire-demo", prompt=prompt, max_tokens=2).usage
        assert usage is not None
        return usage.prompt_tokens

    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        lengths = list(pool.map(answer, range(NUM_PROMPTS)))
    cluster.wait_told()
    cluster.renew_ingress()
    before = cluster.metrics()["quire:engine_prefix_cache_hits_total"]
    assert list(map(answer, range(NUM_PROMPTS))) == lengths
    hits = cluster.metrics()["quire:engine_prefix_cache_hits_total"] - before
    assert hits >= sum(length // PAGE * PAGE - PAGE for length in lengths)


def _scaled_by_tokens(target_tokens: int) -> dict[str, Any]:
    """Return options by which there are 1 to 3 replicas, one for so many tokens, and soon."""
    delays = {"look_back_period_s": 11.0, "upscale_delay_s": 0.5, "downscale_delay_s": 1.0}
    kwargs = {"target_tokens": target_tokens}
    policy = {"policy_function": "quire.frontend.ray.scaling:TokenPolicy", "policy_kwargs": kwargs}
    return {"autoscaling_config": {"min_replicas": 1, "max_replicas": 3, "policy": policy, **delays}}


def test_replicas_come_and_go_under_streams_and_nothing_is_lost(
    cluster: RayCluster, expected: list[Answer], tmp_path: Path
) -> None:
    over = threading.Event()
    rounds: list[list[Answer]] = []

    def load() -> None:
        while not over.is_set():
            rounds.append(Streams(cluster.url).answers())

    cluster.deploy(tmp_path, _scaled_by_tokens(500))
    cluster.wait_replicas(1)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        try:
            cluster.wait_replicas(3)
            cluster.deploy(tmp_path, _scaled_by_tokens(10**9))
            cluster.wait_replicas(1)
        finally:
            over.set()
        loading.result(PATIENCE)
    assert rounds
    assert all(answers == expected for answers in rounds)
