"""Streams under Ray Serve go on where they were when engines, replicas and nodes die, and when replicas come and go."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import PATIENCE

from quire.frontend import LLM, SamplingParams

pytest.importorskip("ray.serve", reason="ray is not installed; pip install 'quire-engine[ray]'")
import openai
from ray_cluster import RayCluster, kill, wait_for

NUM_STREAMS, TOKENS, BEGUN = 12, 400, 20
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.0, "repetition_penalty": 1.0}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A cluster of a head and three nodes, with two replicas."""
    made = RayCluster(num_nodes=3, port=_free_port())
    try:
        made.deploy(tmp_path_factory.mktemp("serve"), 2)
        yield made
    finally:
        made.close()


def _prompt(index: int) -> str:
    return f"Once upon a time there were {index + 2} foxes"


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The answers of one engine that nobody disturbs."""
    params = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=index, **SAMPLING) for index in range(NUM_STREAMS)
    ]
    with LLM(num_pages=512) as llm:
        outputs = llm.generate([_prompt(index) for index in range(NUM_STREAMS)], params)
    return [output.outputs[0].text for output in outputs]


class Streams:
    """Answers that stream to as many threads, by OpenAI's client."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        self._pool = ThreadPoolExecutor(NUM_STREAMS)
        self._lengths = [0] * NUM_STREAMS
        self._answers = [self._pool.submit(self._read, index) for index in range(NUM_STREAMS)]

    def _read(self, index: int) -> str:
        stream = self._client.completions.create(
            model="quire-demo",
            prompt=_prompt(index),
            max_tokens=TOKENS,
            seed=index,
            stream=True,
            extra_body={"ignore_eos": True, **SAMPLING},
        )
        text = ""
        for chunk in stream:
            text += chunk.choices[0].text
            self._lengths[index] += 1
        return text

    def wait_begun(self) -> None:
        """Wait until each is in the midst of its answer."""
        wait_for(
            lambda: all(self._lengths[index] >= BEGUN or self._answers[index].done() for index in range(NUM_STREAMS))
        )

    def answers(self) -> list[str]:
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
def test_streams_go_on_with_the_same_tokens(cluster: RayCluster, expected: list[str], hit: str) -> None:
    wait_for(lambda: len(cluster.engine_pids()) == 2)
    streams = Streams(cluster.url)
    streams.wait_begun()
    _hit(hit, cluster)
    assert streams.answers() == expected


def test_nothing_is_lost_while_replicas_come_and_go(cluster: RayCluster, expected: list[str], tmp_path: Path) -> None:
    wait_for(lambda: len(cluster.engine_pids()) == 2)
    over = threading.Event()
    rounds: list[list[str]] = []

    def load() -> None:
        while not over.is_set():
            rounds.append(Streams(cluster.url).answers())

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        try:
            for count in (1, 3, 1):
                cluster.deploy(tmp_path, count)
        finally:
            over.set()
        loading.result(PATIENCE)
    assert rounds
    assert all(answers == expected for answers in rounds)
