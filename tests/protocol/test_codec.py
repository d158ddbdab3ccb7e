"""Frames: every message survives encoding, and any other frame is rejected with an error that names the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protocol.codec import MAX_FRAME_BYTES, ClientDecoder, EngineDecoder, encode
from quire.protocol.errors import FrameTooLargeError, ProtocolError
from quire.protocol.messages import (
    MAX_ABORTED,
    MAX_TOKENS,
    Abort,
    BeamSequence,
    ClientMessage,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineGoodbye,
    EngineMessage,
    ErrorMessage,
    EventType,
    FinishReason,
    Goodbye,
    Hello,
    KvAck,
    KvCancel,
    KvFetch,
    KvFetched,
    KvHello,
    KvPage,
    KvPeers,
    KvWelcome,
    Ping,
    Pong,
    PoolingParams,
    PrefixReport,
    Ready,
    Reload,
    RequestEvent,
    Role,
    SamplingParams,
    SchedulerStats,
    SequenceTrace,
    StepTrace,
    TokenLogprobs,
    UtilityCall,
    UtilityResult,
    WatchPrefixes,
)

OUTPUT = EngineCoreOutput(
    "r1",
    [5, 70000],
    [TokenLogprobs([5, 6], [-0.5, -1.5], 1), TokenLogprobs([70000], [-2.0], 9)],
    [None, TokenLogprobs([1], [-0.25], 3)],
    FinishReason.STOP,
    70000,
    None,
    [EngineCoreEvent(EventType.SCHEDULED, 1.5)],
    32,
    [BeamSequence([5], [TokenLogprobs([5, 6], [-0.5, -1.5], 1)], -0.5, FinishReason.LENGTH)],
    None,
    bytes(8),
)
CLIENT_MESSAGES: list[ClientMessage] = [
    EngineCoreRequest(
        "r1", [1, 2, 3], SamplingParams(logit_bias={7: -1.5}, bad_words_token_ids=[[1], [2, 3]]), [2], 0.25, 1
    ),
    EngineCoreRequest("r2", [1], SamplingParams(), pooling=PoolingParams(pooling_type="mean", dimensions=3)),
    EngineCoreRequest("r3", [1], SamplingParams(), tenant="team"),
    Abort(["r1", "r2"]),
    Hello(1, "test"),
    Ping(),
    UtilityCall(4, "stats"),
    UtilityCall(6, "prefix_tree", shown={-1: 3, 7: 0}),
    UtilityCall(5, "reload", reload=Reload({"max_num_seqs": 3, "model": "/m", "num_pages": None}, 0.5)),
    Goodbye("done"),
    KvHello(),
    KvFetch(3, [1, 2, 3], "salt", 1, 2, True),
    KvAck(3, 1),
    KvCancel(3),
    WatchPrefixes(["", "salt"]),
    KvPeers(["ipc:///tmp/a.sock"]),
]
ENGINE_MESSAGES: list[EngineMessage] = [
    EngineCoreOutputs([OUTPUT, EngineCoreOutput("s", finish_reason=FinishReason.ERROR, error="no")], SchedulerStats(3)),
    Ready(1, "demo", "LlamaForCausalLM", 4096, 8192, 100, 32, 256, 1234, 1.0, [2], role=Role.CLIENT),
    UtilityResult(4, {"steps": 3, "nested": [1.5, None]}),
    ErrorMessage("no", fatal=True),
    Pong(0.5),
    EngineGoodbye("stopped"),
    EngineGoodbye("moved", gives_way=True),
    StepTrace(
        1.5,
        SchedulerStats(3),
        [SequenceTrace(7, "r1", 32, 8)],
        [RequestEvent(7, "r1", EventType.FINISHED, 2.5, 40, 32, FinishReason.STOP)],
        2,
        last=True,
    ),
    KvWelcome("model"),
    KvPage(3, 2**64 - 1, b"KV"),
    KvFetched(3, "no"),
    PrefixReport([(2**64 - 1, "salt")], [5, 6], [(2**64 - 1, [7, 8], [1, 2, 3, 4])]),
]


def frame(*entries: Any) -> list[bytes]:
    return [msgspec.msgpack.encode(entries)]


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=lambda message: type(message).__name__)
def test_an_engine_decodes_what_a_client_encodes(message: ClientMessage) -> None:
    assert EngineDecoder().decode(encode(message)) == message


@pytest.mark.parametrize("message", ENGINE_MESSAGES, ids=lambda message: type(message).__name__)
def test_a_client_decodes_what_an_engine_encodes(message: EngineMessage) -> None:
    assert ClientDecoder().decode(encode(message)) == message


def test_the_data_of_a_page_are_a_frame_that_is_not_copied() -> None:
    data = bytearray(b"KV of a page")
    frames = encode(KvPage(3, 7, data))
    data[:2] = b"kv"
    assert bytes(frames[1]) == b"kv of a page"
    message = ClientDecoder().decode(frames)
    assert isinstance(message, KvPage)
    assert message.data is frames[1]


@pytest.mark.parametrize("message", [KvPage(3, 7, b"KV"), KvWelcome("model")])
def test_a_message_with_a_frame_too_many_or_too_few_is_rejected(message: KvPage | KvWelcome) -> None:
    frames = encode(message)
    for wrong in (frames[:-1], [*frames, b""]):
        with pytest.raises(ProtocolError):
            ClientDecoder().decode(wrong)


def test_every_message_type_is_tested() -> None:
    assert {type(m) for m in CLIENT_MESSAGES} == set(ClientMessage.__args__)
    assert {type(m) for m in ENGINE_MESSAGES} == set(EngineMessage.__args__)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (frame(3, "one"), "Hello.protocol_version: expected `int`, got `str`"),
        (frame(3), "Hello.protocol_version: the field is missing"),
        (frame(1, "r", [1]), "EngineCoreRequest.sampling_params: the field is missing"),
        (frame(1, 5, [1], []), "EngineCoreRequest.request_id: expected `str`, got `int`"),
        (frame(1, "r", [1, "two"], []), "EngineCoreRequest.prompt_token_ids[1]: expected `int`, got `str`"),
        (frame(1, "r", [1], [1, "x"]), "EngineCoreRequest.sampling_params.presence_penalty: expected `float`, got"),
        (frame(1, "r", [1], [1] + [0.0] * 4 + [1.0, 0, 0.0, None, "x"]), "EngineCoreRequest.sampling_params.stop: "),
        (frame(2, ["a", 1]), "Abort.request_ids[1]: expected `str`, got `int`"),
        (frame(5, 1, "", [], "", None, {1: 201}), "UtilityCall.shown[...]: expected `int` <= 200"),
        (frame(5, 1, None), "UtilityCall.method: expected `str`, got `None`"),
    ],
)
def test_the_error_names_the_field(frames: list[bytes], expected: str) -> None:
    with pytest.raises(ProtocolError) as error:
        EngineDecoder().decode(frames)
    assert str(error.value).startswith(expected)


def test_the_error_names_a_key() -> None:
    params = msgspec.msgpack.decode(encode(CLIENT_MESSAGES[0])[0])
    params[3][17] = {"seven": 1.0}
    with pytest.raises(ProtocolError, match=r"Request\.sampling_params\.logit_bias: in a key, expected `int`"):
        EngineDecoder().decode(frame(*params))


def test_unknown_sampling_fields_are_refused() -> None:
    params = msgspec.msgpack.decode(encode(CLIENT_MESSAGES[0])[0])
    params[3].append("new")
    with pytest.raises(ProtocolError, match=r"EngineCoreRequest\.sampling_params: "):
        EngineDecoder().decode(frame(*params))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Abort([""] * (MAX_ABORTED + 1)), f"Abort.request_ids: expected `array` of length <= {MAX_ABORTED}"),
        (
            EngineCoreRequest("r", [1] * (MAX_TOKENS + 1), SamplingParams()),
            f"EngineCoreRequest.prompt_token_ids: expected `array` of length <= {MAX_TOKENS}",
        ),
    ],
)
def test_lists_that_would_take_long_to_decode_are_refused(message: ClientMessage, expected: str) -> None:
    with pytest.raises(ProtocolError) as error:
        EngineDecoder().decode(encode(message))
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (
            frame(1, "r", [1], [], [2], 0.0, 0, "", 1.0, None, None, [], "", False, 7, 0, [3], "", "", "json"),
            "EngineCoreRequest: 1 unknown field follows adapter",
        ),
        (frame(2, ["r"], "junk", 1), "Abort: 2 unknown fields follow request_ids"),
        (frame(4, "junk"), "Ping: 1 unknown field, where there are none"),
        (frame(5, 1, "stats", [], "", None, {}, {}), "UtilityCall: 1 unknown field follows shown"),
        (frame(6, "bye", None), "Goodbye: 1 unknown field follows reason"),
    ],
)
def test_unknown_fields_are_refused(frames: list[bytes], expected: str) -> None:
    with pytest.raises(ProtocolError) as error:
        EngineDecoder().decode(frames)
    assert str(error.value).startswith(expected)


def test_a_hello_of_a_later_version_is_read_so_that_its_version_can_be_refused() -> None:
    assert EngineDecoder().decode(frame(3, 99, "client", "a new field")) == Hello(99, "client")


@pytest.mark.parametrize(
    "frames",
    [
        frame(99, 1),
        frame("Hello", 1),
        frame(),
        frame(12, 1),  # a message, of the other direction
        [msgspec.msgpack.encode({"type": "Hello"})],
        [b""],
        [b"\xc1"],
        [b"\x92\x02\x91\xa1\xff"],  # not UTF-8
        [b"\x92\x04" + b"\x91" * 100_000],  # deep
        [b"\x94\x01\xa1r\xdd\xff\xff\xff\xff"],  # an array that claims four billion entries
        [b"\x91\x04\x00"],  # trailing bytes
        [b"\x90\x04"],  # an empty array, and then the type of a message without fields
        [b"\xdc\x00\x00\x04"],
        [b"\xdd\x00\x00\x00\x00\x04"],
        [],
        [*frame(4), b""],
        [b"", *frame(4)],  # as a REQ socket sends
        [b"\x80\x04cos\nsystem\n"],  # a pickle
    ],
)
def test_what_is_no_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        EngineDecoder().decode(frames)


def test_the_error_for_an_unknown_type_lists_the_known() -> None:
    with pytest.raises(ProtocolError, match=r"3 Hello"):
        EngineDecoder().decode(frame(99, 1))


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_frame_is_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    whole = bytearray(encode(data.draw(st.sampled_from(CLIENT_MESSAGES)))[0])
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))]) + data.draw(st.binary(max_size=4))
    try:
        message = EngineDecoder().decode([damaged])
    except ProtocolError:
        return
    assert isinstance(message, ClientMessage)


def test_a_frame_beyond_the_limit_is_refused_unread() -> None:
    with pytest.raises(FrameTooLargeError, match=f"{MAX_FRAME_BYTES + 1} bytes, at most {MAX_FRAME_BYTES}"):
        EngineDecoder().decode([bytes(MAX_FRAME_BYTES + 1)])


def test_a_client_is_told_before_it_sends_too_much() -> None:
    with pytest.raises(FrameTooLargeError, match="EngineCoreRequest has"):
        encode(EngineCoreRequest("r", [70_000] * (MAX_FRAME_BYTES // 5 + 1), SamplingParams()))


def test_an_engine_may_send_more_than_a_client() -> None:
    outputs = EngineCoreOutputs([EngineCoreOutput("r", [70_000] * (MAX_FRAME_BYTES // 5 + 1))])
    assert ClientDecoder().decode(encode(outputs)) == outputs


@pytest.mark.parametrize("message", [UtilityResult(1, object()), Goodbye("\ud800"), Abort([2**70])])  # type: ignore[list-item]
def test_what_has_no_encoding_is_a_protocol_error(message: Any) -> None:
    with pytest.raises(ProtocolError, match=f"{type(message).__name__} cannot be encoded"):
        encode(message)
