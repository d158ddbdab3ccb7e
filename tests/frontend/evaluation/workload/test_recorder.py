"""A server's recording is read back as its requests."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_watch import EngineWatch, engine_pid, halted, wait_until
from http_server import Server
from hypothesis import given
from hypothesis import strategies as st
from raw_http import RawConnection, post
from workloads import lcp

from quire.frontend.client.observer import RequestOptions
from quire.frontend.client.request import GenerationRequest
from quire.frontend.client.request_table import RequestTable
from quire.frontend.evaluation.workload import recorder as recording
from quire.frontend.evaluation.workload.reading import read_trace
from quire.frontend.evaluation.workload.recorder import RECORDED_BLOCK_TOKENS, PrefixNames, TraceRecorder
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.evaluation.workload.sharing import infinite_cache_hits
from quire.frontend.sampling import SamplingParams, engine_params
from quire.frontend.text.prompts import Prompt
from quire.protocol.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason

COMPLETIONS = "/v1/completions"
COMMON = list(range(100, 170))
PROMPTS = [COMMON, [*COMMON, 7, 8, 9], [*COMMON[:64], *range(300, 340)], [5] * 33, COMMON]
SECRET = "Xylophone"


class RecordedFrontend:
    """A request table with a fake engine, and a recorder that observes it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.table = RequestTable(lambda message, session: None, [])
        self.recorder = TraceRecorder(path, **options)
        self.table.add_observer(self.recorder)
        self._num_sent = 0

    def submit(self, params: SamplingParams, num_prompt_tokens: int = 3, salt: str = "") -> str:
        """Submit a request; return its id on the wire."""
        prompt, each = Prompt([7] * num_prompt_tokens, SECRET), engine_params(params, 0, None)
        self.table.submit(
            GenerationRequest(
                "mine", prompt, params, each, None, arrival_time=0.0, options=RequestOptions(cache_salt=salt)
            )
        )
        self._num_sent += len(each)
        return str(self._num_sent - 1)

    def end(self, wire_id: str, num_tokens: int) -> None:
        output = EngineCoreOutput(wire_id, [5] * num_tokens, finish_reason=FinishReason.LENGTH)
        self.table.update(EngineCoreOutputs([output], None, 1.0))

    def rows(self) -> list[dict[str, Any]]:
        """Close the recorder; return its rows."""
        self.recorder.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def leave(server: Server, connection: RawConnection) -> None:
    """Close a connection while the engine is stopped, and wait until the server notices."""
    address = connection.address
    with halted(engine_pid(server)):
        connection.close()
        wait_until(lambda: any(f"{address} " in line and " 499 " in line for line in server.log), "it was not left")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


@pytest.fixture
def frontend(path: Path) -> Iterator[RecordedFrontend]:
    frontend = RecordedFrontend(path)
    yield frontend
    frontend.recorder.close()


def test_a_server_records_lengths_sharing_and_parameters_of_its_requests(path: Path) -> None:
    with Server.start("--record", str(path)) as server:
        with EngineWatch(server) as watch:
            left = RawConnection(server.url)
            left.send(post(COMPLETIONS, {"prompt": [9] * 40, "max_tokens": 1500, "ignore_eos": True, "stream": True}))
            watch.decode()
        usages = []
        for number, prompt in enumerate(PROMPTS):
            params = {"max_tokens": 4 + number, "temperature": 0.5, "top_p": 0.8, "stop": [SECRET], "ignore_eos": True}
            usages.append(server.request(COMPLETIONS, {"prompt": prompt, **params}).json()["usage"])
            if not number:
                leave(server, left)
        chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}
        usages.append(server.request("/v1/chat/completions", chat).json()["usage"])
        server.check_pages()
        assert server.stop() == 143
    assert f"recorded 7 requests in {path}\n" in server.log
    assert SECRET not in path.read_text()
    first, *rest = read_trace(path)
    assert first.prompt_tokens == 40
    assert 1 <= first.output_tokens < 1500
    assert [request.prompt_tokens for request in rest] == [usage["prompt_tokens"] for usage in usages]
    assert [request.output_tokens for request in rest] == [usage["completion_tokens"] for usage in usages]
    *rest, _ = rest
    assert infinite_cache_hits(rest, RECORDED_BLOCK_TOKENS) == 64 + 64 + 64
    assert rest[0].blocks == rest[-1].blocks
    assert rest[0].params == {"temperature": 0.5, "top_p": 0.8, "ignore_eos": True, "max_tokens": 4}


def test_a_recording_needs_a_new_file(path: Path) -> None:
    path.write_text("precious\n")
    with pytest.raises(FileExistsError, match="exists already, and would be overwritten; name another, or remove it"):
        TraceRecorder(path)
    assert path.read_text() == "precious\n"
    with pytest.raises(OSError, match=r"the file cannot be written \(No such file or directory\); name another"):
        TraceRecorder(path.parent / "none" / "trace")
    TraceRecorder(path.with_suffix(".new")).close()
    assert not path.with_suffix(".new").exists()


def test_rows_are_in_order_of_arrival_regardless_of_the_ends(frontend: RecordedFrontend) -> None:
    ids = [frontend.submit(SamplingParams(max_tokens=9), 10 + number) for number in range(4)]
    for number in (2, 0, 3, 1):
        frontend.end(ids[number], 5 + number)
    rows = frontend.rows()
    assert [(row["input_length"], row["output_length"]) for row in rows] == [(10, 5), (11, 6), (12, 7), (13, 8)]
    assert [row["timestamp"] for row in rows] == sorted(row["timestamp"] for row in rows)
    assert {row["finish_reason"] for row in rows} == {"length"}


def test_open_requests_are_recorded_at_the_end_with_their_tokens(frontend: RecordedFrontend) -> None:
    first = frontend.submit(SamplingParams(max_tokens=9))
    frontend.submit(SamplingParams(max_tokens=9))
    frontend.table.update(EngineCoreOutputs([EngineCoreOutput(first, [5, 5])], None, 1.0))
    rows = frontend.rows()
    assert [(row["output_length"], row["finish_reason"]) for row in rows] == [(2, "unfinished"), (1, "unfinished")]


def test_aborted_and_failed_requests_are_recorded(frontend: RecordedFrontend) -> None:
    first = frontend.submit(SamplingParams(max_tokens=9))
    frontend.submit(SamplingParams(max_tokens=9))
    frontend.table.update(EngineCoreOutputs([EngineCoreOutput(first, [5, 5])], None, 1.0))
    left, _ = frontend.table
    frontend.table.drop([left])
    frontend.table.fail(RuntimeError("gone"))
    rows = frontend.rows()
    assert [(row["output_length"], row["finish_reason"]) for row in rows] == [(2, "abort"), (1, "error")]


def test_the_lines_that_wait_for_a_long_request_are_bounded(
    frontend: RecordedFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_HELD_BYTES", 2000)
    long = frontend.submit(SamplingParams(max_tokens=900))
    frontend.table.update(EngineCoreOutputs([EngineCoreOutput(long, [5] * 3)], None, 1.0))
    for _ in range(50):
        frontend.end(frontend.submit(SamplingParams(max_tokens=9)), 4)
    wait_until(lambda: frontend.recorder.num_recorded > 0, "nothing was written")
    frontend.end(long, 100)
    rows = frontend.rows()
    assert [row["output_length"] for row in rows] == [3] + [4] * 50
    assert rows[0]["finish_reason"] == "unfinished"


def test_text_is_recorded_only_on_request(path: Path) -> None:
    params = SamplingParams(
        n=2, max_tokens=9, bad_words_token_ids=[[3]], logit_bias={4: 1.5}, structured_outputs=None, top_k=5
    )
    plain, with_text = RecordedFrontend(path), RecordedFrontend(path.with_suffix(".text"), with_text=True)
    for frontend in (plain, with_text):
        frontend.submit(params)
        frontend.recorder.close()
    (request,) = read_trace(plain.path)
    assert (request.text, request.params) == (None, {"n": 2, "max_tokens": 9, "top_k": 5})
    (request,) = read_trace(with_text.path)
    assert request.text == SECRET
    assert request.params == {
        "n": 2, "max_tokens": 9, "top_k": 5, "bad_words_token_ids": [[3]], "logit_bias": {4: 1.5}
    }  # fmt: skip
    assert SamplingParams(**request.params) == params


def test_a_full_disk_is_logged_once_and_leaves_whole_rows(
    frontend: RecordedFrontend, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frontend.end(frontend.submit(SamplingParams(max_tokens=9)), 4)
    wait_until(lambda: frontend.recorder.num_recorded == 1, "nothing was written")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))  # then a write is cut, or fails
    try:
        frontend.end(frontend.submit(SamplingParams(max_tokens=9)), 4)
        wait_until(lambda: caplog.records, "nothing was told")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for _ in range(3):
        frontend.end(frontend.submit(SamplingParams(max_tokens=9)), 4)
    assert len(frontend.rows()) == 1
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"{path}: File too large; no more is written to it, and requests go on",
        f"{path} lacks 4 lines, for the reason logged before",
    ]


@given(st.lists(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=30), min_size=1, max_size=20))
def test_names_are_equal_exactly_where_prefixes_are(prompts: list[list[int]]) -> None:
    names = PrefixNames(4)
    named = [(prompt, names.names(prompt)) for prompt in prompts]
    for prompt, mine in named:
        assert len(mine) == -(-len(prompt) // 4)
        for other, yours in named:
            ends = {*range(4, len(prompt) + 1, 4), len(prompt)} & {*range(4, len(other) + 1, 4), len(other)}
            assert lcp(mine, yours) == sum(prompt[:end] == other[:end] for end in ends)
            assert not set(mine[lcp(mine, yours) :]) & set(yours[lcp(mine, yours) :])


def test_names_count_up_and_a_salt_separates_them() -> None:
    names = PrefixNames(32)
    assert names.names([1] * 70) == [0, 1, 2]
    assert names.names([1] * 64) == [0, 1]
    assert names.names([1] * 64, "tenant") == [3, 4]


def test_remembered_blocks_are_bounded_and_the_ends_of_prompts_are_forgotten_first() -> None:
    names = PrefixNames(2, most_known=4)
    assert names.names([1] * 6) == [0, 1, 2]
    assert names.names([2] * 4) == [3, 4]
    assert names.names([1] * 6) == [0, 1, 5]


def test_a_recorded_prompt_is_replayed_with_the_same_sharing(frontend: RecordedFrontend) -> None:
    frontend.end(frontend.submit(SamplingParams(max_tokens=9), 100), 4)
    frontend.end(frontend.submit(SamplingParams(max_tokens=9), 70), 4)
    frontend.recorder.close()
    first, second = read_trace(frontend.path)
    assert isinstance(first, WorkloadRequest)
    assert lcp(first.blocks, second.blocks) == 2
    assert first.block_tokens == RECORDED_BLOCK_TOKENS
