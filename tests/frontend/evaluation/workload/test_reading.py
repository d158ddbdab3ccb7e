"""Traces of all formats are read row by row, and bad rows are named or skipped."""

from __future__ import annotations

import gzip
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.evaluation.workload import lines
from quire.frontend.evaluation.workload.lines import TraceError
from quire.frontend.evaluation.workload.reading import MOST_REASONS, read_trace
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.evaluation.workload.sharing import infinite_cache_hits, shared_blocks

TRACES = Path(os.environ.get("QUIRE_TRACES", Path(__file__).parents[4] / "../shared/traces"))
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
FIRST = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}


def row(**changes: Any) -> str:
    """Return a Mooncake row; None removes a field."""
    fields = {name: value for name, value in (FIRST | changes).items() if value is not None}
    return msgspec.json.encode(fields).decode() + "\n"


def read(path: Path, text: str | bytes, **options: Any) -> list[WorkloadRequest]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return list(read_trace(path, **options))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_mooncake_rows_with_the_fields_of_other_tools(path: Path) -> None:
    params, messages = {"temperature": 0.5}, [{"role": "user", "content": "Hi"}]
    text = row(timestamp=1000) + row(timestamp=1500.5, input_length=33, hash_ids=[7, 8], block_tokens=32, params=params)
    text += row(timestamp=None, session_id="a", delay=250, hash_ids=None, messages=messages)
    text += row(timestamp=2000, session_id=3, text_input="Hi")
    first, second, third, fourth = read(path, text)
    assert first == WorkloadRequest(0.0, 600, 5, (0, 1))
    assert second == WorkloadRequest(0.5005, 33, 5, (7, 8), 32, params=params)
    assert (third.arrival, third.session, third.delay, third.messages) == (0.5005, "a", 0.25, messages)
    assert len(third.blocks) == 2
    assert not set(third.blocks) & {0, 1, 7, 8}
    assert (fourth.arrival, fourth.session, fourth.text) == (1.0, "3", "Hi")


def test_a_row_without_names_cannot_ask_for_millions_of_blocks(path: Path) -> None:
    (request,) = read(path, row(input_length=1 << 24, hash_ids=None, block_tokens=1))
    assert len(request.blocks) == 1 << 15


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("zone", ["", "+00:00"])
def test_azure_rows_share_nothing(path: Path, end: str, zone: str) -> None:
    text = f"{AZURE}2023-11-16 18:15:46.6805900{zone},600,44\n2023-11-16 18:15:50.6805900{zone},3,1\n\n"
    first, second = read(path, text.replace("\n", end))
    assert first == WorkloadRequest(0.0, 600, 44, (0, 1))
    assert second.arrival == pytest.approx(4.0)
    assert second.blocks == (2,)


def test_burstgpt_rows_with_and_without_sessions(path: Path) -> None:
    rows = "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,230.0,1317,API log\n"
    assert [(each.arrival, each.prompt_tokens, each.output_tokens) for each in read(path, BURST + rows)] == [
        (0.0, 472, 18),
        (40.5, 1087, 230),
    ]
    text = (
        "\ufeffTimestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        '5,s-1,1.5,ChatGPT,472,18,490,"log, of a chat"\n45,,2.5,GPT-4,1087,230,1317,API log\n'
    )
    assert [each.session for each in read(path, text)] == ["s-1", None]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{nonsense\n", ":2: JSON is malformed"),
        ("[]\n", ":2: Expected `object`, got `array`"),
        ("[" * 100_000 + "\n", ":2: "),
        ('{"timestamp": 0}\n', ":2: Object missing required field `input_length`"),
        (row(timestamp=None), ":2: there is no timestamp"),
        (row(timestamp=None, delay=3), ":2: there is no timestamp"),
        (row(timestamp=-1), ":2: timestamp is -1.0; it must be a finite number"),
        (row().replace(":0,", ":1e999,"), ":2: "),
        (row().replace(":0,", ":NaN,"), ":2: JSON is malformed"),
        (row(timestamp=1e15), "s after the first row's"),
        (row(delay=-1), ":2: delay is -1.0"),
        (row(input_length=0), ":2: input_length is 0; it must be a whole number from 1 to"),
        (row(input_length=-5), ":2: input_length is -5"),
        (row(output_length=0), ":2: output_length is 0"),
        (row(output_length=2**31 + 1), ":2: output_length is 2147483649"),
        (row(output_length="5"), ":2: Expected `int`, got `str` - at `$.output_length`"),
        (row(input_length=1600), ":2: 2 hash_ids for input_length 1600; there must be one for each 512 tokens, 4"),
        (row(hash_ids=[0, 1, 2]), ":2: 3 hash_ids for input_length 600"),
        (row(hash_ids=[0, -1]), ":2: Expected `int` >= 0"),
        (row(block_tokens=0), ":2: block_tokens is 0"),
        (row(params={"temprature": 1}), ":2: params has ['temprature']"),
        (row(text_input="é").encode("latin-1"), ":2: "),
    ],
)
def test_a_bad_mooncake_row_is_named_or_skipped(path: Path, text: str | bytes, expected: str) -> None:
    bad = text if isinstance(text, bytes) else text.encode()
    whole = row().encode() + bad + row(timestamp=7).encode()
    with pytest.raises(TraceError) as error:
        read(path, whole)
    assert expected in str(error.value)
    assert str(error.value).startswith(f"{path}:2: ")
    assert "--skip-bad" in str(error.value)
    trace = read_trace(path, skip_bad=True)
    assert [request.arrival for request in trace] == [0.0, 0.007]
    assert trace.num_skipped == 1
    assert expected in trace.reasons[0]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ("yesterday,3,4", "TIMESTAMP is 'yesterday'; it must be a date and time"),
        (",3,4", "TIMESTAMP is ''"),
        ("nan,3,4", "TIMESTAMP is 'nan'"),
        ("2023-11-16 18:15:45,3,4", "its time is 1 s before that of the row above"),
        ("2053-11-16 18:15:45,3,4", "s after the first row's"),
        ("2023-11-16 18:15:46,3", "there are 2 columns; the header has 3"),
        ("2023-11-16 18:15:46,3,4,5", "there are 4 columns; the header has 3"),
        ("2023-11-16 18:15:46,-3,4", "ContextTokens is -3; it must be a whole number from 1"),
        ("2023-11-16 18:15:46,3,0", "GeneratedTokens is 0; it must be a whole number from 1"),
        ("2023-11-16 18:15:46,3.5,4", "ContextTokens is '3.5'; it must be a whole number"),
        ("2023-11-16 18:15:46,nan,4", "ContextTokens is 'nan'; it must be a whole number"),
        ("2023-11-16 18:15:46,inf,4", "ContextTokens is 'inf'; it must be a whole number"),
        ("2023-11-16 18:15:46,3,9999999999", "GeneratedTokens is 9999999999"),
        ("2023-11-16 18:15:46,3," + "9" * 9999, "GeneratedTokens is "),
        ("\0\0,3,4", "TIMESTAMP is '\\x00\\x00'"),
        ('2023-11-16 18:15:46,"3,4', "there are 2 columns"),
        ('2023-11-16 18:15:46,"3"\r,4', "is no row of a table"),
    ],
)
def test_a_bad_azure_row_is_named_or_skipped(path: Path, cells: str, expected: str) -> None:
    good = "2023-11-16 18:15:46,3,4\n"
    whole = f"{AZURE}{good}{cells}\n{good}"
    with pytest.raises(TraceError) as error:
        read(path, whole)
    assert str(error.value).startswith(f"{path}:3: ")
    assert expected in str(error.value)
    assert len(str(error.value)) < 500
    trace = read_trace(path, skip_bad=True)
    assert len(list(trace)) == 2
    assert trace.num_skipped == 1


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ("5,GPT-4,9,0,9,API log", "Response tokens is 0, a request that failed when it was recorded"),
        ("inf,GPT-4,9,1,9,API log", "Timestamp is inf; it must be a finite number"),
        ("-1,GPT-4,9,1,9,API log", "Timestamp is -1.0; it must be a finite number"),
        ("now,GPT-4,9,1,9,API log", "Timestamp is 'now'; it must be a number"),
        ("5,GPT-4,,1,9,API log", "Request tokens is ''; it must be a whole number"),
    ],
)
def test_a_bad_burstgpt_row_is_named(path: Path, cells: str, expected: str) -> None:
    with pytest.raises(TraceError) as error:
        read(path, f"{BURST}{cells}\n")
    assert str(error.value).startswith(f"{path}:2: {expected}")


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", " is empty; give a trace with at least one request"),
        (b"\n\n", " is empty; give a trace with at least one request"),
        (AZURE.encode(), " has no requests; give a trace with at least one"),
        (b"TIMESTAMP,In,Out\n2023-11-16 18:15:46,3,4\n", ":1: there is no column ContextTokens, GeneratedTokens among"),
        (b"Timestamp,Request tokens\n5,3\n", ":1: there is no column Response tokens among"),
        (b"a,b,c\n1,2,3\n", ":1: the first line is b'a,b,c', of no known format; it must be JSON lines with"),
        (b"\xff\xfe{\0}\0\n\0", ":1: the first line is "),
        (gzip.compress(b"{}", mtime=0), ":1: the file is compressed with gzip; decompress it first"),
    ],
)
def test_a_file_that_is_no_trace_is_rejected_at_once(path: Path, text: bytes, expected: str, skip_bad: bool) -> None:
    path.write_bytes(text)
    with pytest.raises(TraceError) as error:
        list(read_trace(path, skip_bad=skip_bad))
    assert str(error.value).startswith(f"{path}{expected}")


def test_a_folder_and_a_missing_file_are_rejected_at_once(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.jsonl")


def test_a_trace_of_only_bad_rows_is_an_error_with_the_first_reason(path: Path) -> None:
    with pytest.raises(TraceError, match=r"all of its 2 rows are bad; the first: .*:1: input_length is 0"):
        read(path, row(input_length=0) + "{\n", skip_bad=True)


def test_skipped_rows_are_counted_and_the_first_reasons_kept(path: Path) -> None:
    path.write_text(row() + (row(input_length=0) + row(timestamp=1)) * 20)
    trace = read_trace(path, skip_bad=True)
    for _ in range(2):  # the second time from the beginning
        assert len(list(trace)) == 21
        assert trace.num_skipped == 20
        assert len(trace.reasons) == MOST_REASONS


def test_a_line_without_an_end_is_not_read_into_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_LINE_BYTES", 1000)
    path.write_text(row() + "x" * 3_000_000 + "\n" + row(timestamp=3))
    with pytest.raises(TraceError, match=":2: the line is longer than"):
        list(read_trace(path))
    trace = read_trace(path, skip_bad=True)
    assert len(list(trace)) == 2
    assert trace.num_skipped == 1
    path.write_text("x" * 3_000_000)
    with pytest.raises(TraceError, match=":1: the line is longer than"):
        read_trace(path, skip_bad=True)


def test_a_window_of_the_trace_begins_at_0_and_ends_the_reading(path: Path) -> None:
    text = "".join(row(timestamp=1000 * second) for second in range(2, 12)) + "{broken\n"
    assert [each.arrival for each in read(path, text, start=3, duration=2)] == [0.0, 1.0]
    assert [each.arrival for each in read(path, text, start=2.5, max_requests=3)] == [0.5, 1.5, 2.5]
    assert len(read(path, text, max_requests=10)) == 10
    with pytest.raises(TraceError, match=r"has no requests from 9.5 s to 9.6 s; the last row that was read is at 9 s"):
        read(path, text, start=9.5, duration=0.1, skip_bad=True)


def test_a_file_of_10_gb_is_read_only_as_far_as_needed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(row() + row(timestamp=5))
    with path.open("r+b") as file:
        file.truncate(10_000_000_000)  # a sparse file: a line of zeros
    assert len(list(read_trace(path, max_requests=2))) == 2
    monkeypatch.setattr(lines, "MOST_LINE_BYTES", 1000)
    with pytest.raises(TraceError, match=":3: the line is longer than"):
        list(read_trace(path))


def test_a_pipe_is_read_once(path: Path) -> None:
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text(row() * 3))
    writer.start()
    assert len(list(read_trace(path))) == 3
    writer.join()


def test_the_format_can_be_given(path: Path) -> None:
    trace = "garbage\n" + row()
    with pytest.raises(TraceError, match="of no known format"):
        read(path, trace, skip_bad=True)
    assert len(read(path, trace, skip_bad=True, format="mooncake")) == 1
    with pytest.raises(TraceError, match=":1: there is no column TIMESTAMP"):
        read(path, trace, format="azure")
    assert read_trace(path, format="mooncake").format == "mooncake"


@pytest.mark.parametrize(
    "options",
    [{"format": "csv"}, {"start": -1}, {"start": float("nan")}, {"duration": 0}, {"duration": float("nan")},
     {"max_requests": 0}],
)  # fmt: skip
def test_an_option_out_of_range_is_named(path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        read_trace(path, **options)


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"there are no traces at {TRACES}; QUIRE_TRACES names their folder")
def test_the_real_traces_agree_with_their_papers() -> None:
    mooncake = list(read_trace(TRACES / "mooncake_conversation.jsonl"))
    assert len(mooncake) == 12_031
    assert sum(each.prompt_tokens for each in mooncake) / len(mooncake) == pytest.approx(12_035, abs=1)
    assert shared_blocks(mooncake) == pytest.approx(0.3664, abs=1e-4)
    assert infinite_cache_hits(mooncake, 32) == 54_096_416
    azure = list(read_trace(TRACES / "azure_llm_2023_conv.csv"))
    assert len(azure) == 19_366
    assert 3400 < azure[-1].arrival < 3600
    assert infinite_cache_hits(azure, 32) == 0


@given(st.binary(max_size=60), st.integers(0, 200), st.sampled_from([AZURE, BURST, ""]), st.booleans())
def test_arbitrary_bytes_raise_only_trace_errors(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int, header: str, skip_bad: bool
) -> None:
    good = {AZURE: "2023-11-16 18:15:46,3,4\n", BURST: "5,GPT-4,9,1,10,API log\n", "": row(params={"logit_bias": {}})}
    whole = (header + good[header] * 2).encode()
    path = tmp_path_factory.getbasetemp() / "noise"
    path.write_bytes(whole[:place] + noise + whole[place:])
    with suppress(TraceError):
        assert list(read_trace(path, skip_bad=skip_bad))
