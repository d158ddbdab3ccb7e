"""Target `codec`: frames of clients, through decoding and validation into an engine; and frames of an engine.

An input is a byte that chooses the receiver, and for an engine its scheduling policy, and then frames: two bytes of
length (big-endian), a byte for the client that sends it and the steps that the engine takes then, and the frame. Of an
engine's frames, one with an odd byte is followed by a frame of data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from fuzzing.mutation import mutated
from paged_executor import Engine

from quire.engine_core.scheduling.policies import POLICIES
from quire.engine_core.transport.access import OWNER, objection
from quire.engine_core.utilities import UTILITIES, utility_names
from quire.protocol.codec import ClientDecoder, EngineDecoder, Frame, encode
from quire.protocol.errors import ProtocolError
from quire.protocol.messages import (
    Abort,
    BatchEntry,
    BeamSequence,
    ClientMessage,
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineGoodbye,
    EngineMessage,
    EngineSnapshot,
    ErrorMessage,
    EventType,
    FinishReason,
    Goodbye,
    Hello,
    HotPrefix,
    KvAck,
    KvCancel,
    KvFetch,
    KvFetched,
    KvHello,
    KvMessage,
    KvPage,
    KvWelcome,
    PageMap,
    Ping,
    Pong,
    PoolingParams,
    Ready,
    Reload,
    RequestEvent,
    SamplingParams,
    SchedulerStats,
    SequenceTrace,
    StepTrace,
    StructuredOutputs,
    TokenLogprobs,
    UtilityCall,
    UtilityResult,
    WaitingEntry,
)

_FROM_ENGINE = 0x80
_CLIENTS = (b"one", b"two")
_LIMITS: dict[str, Any] = {"vocab_size": 60, "max_model_len": 48, "num_pages": 24, "max_waiting_requests": 6}
_MOST_FRAMES = 12
_DATA = b"data of a page"

_Frame = tuple[int, bytes]


def _joined(first: int, frames: list[_Frame]) -> bytes:
    return bytes([first]) + b"".join(
        len(frame).to_bytes(2, "big") + bytes([control]) + frame for control, frame in frames if len(frame) < 1 << 16
    )


def _split(data: bytes) -> tuple[int, list[_Frame]]:
    frames: list[_Frame] = []
    at = 1
    while at + 3 <= len(data) and len(frames) < _MOST_FRAMES:
        end = at + 3 + int.from_bytes(data[at : at + 2], "big")
        frames.append((data[at + 2], data[at + 3 : end]))
        at = end
    return data[0] if data else 0, frames


class Codec:
    """Every frame decodes into a message that survives encoding, or raises ProtocolError.

    An engine answers each decoded request with one terminal output, whatever came before, and holds no page at the end.
    """

    words = (*UTILITIES, *(field for kind in (SamplingParams, StructuredOutputs) for field in kind.__struct_fields__))

    def __init__(self, _folder: Path) -> None:
        self._of_engine = EngineDecoder()
        self._of_client = ClientDecoder()

    def seeds(self) -> Iterator[bytes]:
        """See Target."""
        requests = [EngineCoreRequest(str(number), [1, 2, 3], params) for number, params in enumerate(_PARAMS)]
        calls = [UtilityCall(number, method, [1] * 8) for number, method in enumerate(utility_names(Engine().core))]
        fetches: list[ClientMessage] = [
            KvHello(),
            KvFetch(1, [1] * 9, "salt", 0, 2, is_expected=True),
            KvAck(1, 1),
            KvCancel(1),
        ]
        others: list[ClientMessage] = [Hello(1, "name"), Ping(), Goodbye("bye"), Abort(["0", "1", "x"]), *fetches]
        reload = UtilityCall(99, "reload", reload=Reload({"max_num_seqs": 4}, 0.5))
        messages: list[ClientMessage] = [*requests, *others, *_SERVED, *calls, reload]
        for message in messages:
            yield _joined(0, [(0, _first(message))])
        for first in range(len(POLICIES)):
            yield _joined(first, [(number % 8, _first(each)) for number, each in enumerate(messages[first::3])])
            yield _joined(first, [(number % 2, _first(each)) for number, each in enumerate(_SERVED)])
        for answer in _ANSWERS:
            yield _joined(_FROM_ENGINE, [(isinstance(answer, KvPage), _first(answer))])

    def test(self, data: bytes) -> None:
        """See Target."""
        first, frames = _split(data)
        if first & _FROM_ENGINE:
            for control, frame in frames:
                self._receive([frame, _DATA] if control % 2 else [frame])
        else:
            self._run_engine([*POLICIES][first % len(POLICIES)], frames)

    def _receive(self, frames: list[Frame]) -> None:
        try:
            message = self._of_client.decode(frames)
        except ProtocolError:
            return
        self._check_encoding(message)

    def _check_encoding(self, message: EngineMessage) -> None:
        """Check that a message survives encoding. Encoded forms are compared, since NaN differs from itself."""
        frames = encode(message)
        assert encode(self._of_client.decode(frames)) == frames

    def _run_engine(self, policy: str, frames: list[_Frame]) -> None:
        engine = Engine(scheduling_policy=policy, **_LIMITS)
        received: Counter[tuple[bytes, str]] = Counter()
        for control, frame in frames:
            client = _CLIENTS[control % 2]
            try:
                message = self._of_engine.decode([frame])
            except ProtocolError:
                continue
            assert encode(self._of_engine.decode(encode(message))) == encode(message)
            if isinstance(message, Hello | Ping):  # the server's
                continue
            objection(OWNER, message)
            if isinstance(message, EngineCoreRequest):
                received[client, message.request_id] += 1
                engine.core.reject_early(client, msgspec.structs.replace(message))
            if isinstance(message, KvMessage):
                engine.core.receive_kv(client, message)
            else:
                engine.core.receive(client, message)
            for _ in range(control // 2 % 8):
                engine.step()
            engine.now += 0.5
        engine.finish()
        engine.core.end_all()
        self._check_answers(engine, received)

    def _check_answers(self, engine: Engine, received: Counter[tuple[bytes, str]]) -> None:
        """Each request has ended exactly once, or was told that its id is in use."""
        ended: Counter[tuple[bytes, str]] = Counter()
        num_in_use = 0
        for client, messages in engine.sent.items():
            for message in messages:
                self._check_encoding(message)
                if isinstance(message, EngineCoreOutputs):
                    ended.update((client, out.request_id) for out in message.outputs if out.finish_reason is not None)
                num_in_use += isinstance(message, ErrorMessage)
        assert received.total() == ended.total() + num_in_use
        assert all(received[key] >= count > 0 for key, count in ended.items())

    def mutate(self, data: bytes, random: Random) -> bytes:
        """See Target."""
        first, frames = _split(data)
        if not frames:
            raise ValueError("no frame")
        at = random.randrange(len(frames))
        control, frame = frames[at]
        choice = random.randrange(8)
        if choice == 0:
            frames.insert(at, random.choice(frames))
        elif choice == 1 and len(frames) > 1:
            del frames[at]
        elif choice == 2:
            frames[at] = random.randrange(256), frame
        else:
            value = msgspec.msgpack.decode(frame, strict=False)
            frames[at] = control, _packed(mutated(value, random))
        return _joined(first, frames)


def _first(message: ClientMessage | EngineMessage) -> bytes:
    """Return the frame of a message, without data that follows it."""
    return bytes(encode(message)[0])


def _packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError) as error:  # an int of more than 64 bits
        raise ValueError(str(error)) from None


_PARAMS = [
    SamplingParams(),
    SamplingParams(
        temperature=0.7, top_p=0.9, top_k=4, min_p=0.1, seed=7, presence_penalty=1.0, frequency_penalty=-1.0,
        repetition_penalty=1.2, max_tokens=20, min_tokens=3, stop_token_ids=[3], logprobs=2, prompt_logprobs=1,
        logit_bias={5: 1.5}, allowed_token_ids=[1, 2, 3], bad_words_token_ids=[[1, 2], [4]], ignore_eos=True,
    ),
    SamplingParams(max_tokens=None, stop=["x"], bad_words=["y"], best_of=2, n=2),
    SamplingParams(beam_width=3, n=2, length_penalty=0.5, early_stopping="never", max_tokens=9),
    SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object"}, whitespace_pattern=" ")),
    SamplingParams(structured_outputs=StructuredOutputs(regex="a+", choice=["a"], grammar="start: A")),
    SamplingParams(early_stopping=True, structured_outputs=StructuredOutputs(json_object=True)),
]  # fmt: skip
_SERVED = [
    EngineCoreRequest(
        "a", [1] * 9, SamplingParams(max_tokens=12), [3], 0.5, 0, "salt", 60.0, None, None, [4], "tenant"
    ),
    EngineCoreRequest("b", [1] * 9, SamplingParams(max_tokens=5), [3], 0.0, 2, "salt", shares_prompt_with="a"),
    EngineCoreRequest(
        "c", [5] * 20, SamplingParams(), pooling=PoolingParams(pooling_type="mean", dimensions=2, normalize=False)
    ),
    EngineCoreRequest("d", [5] * 20, SamplingParams(), pooling=PoolingParams()),
]
_STATS = SchedulerStats(1, 2, 3, pages_total=4)
_LOGPROBS = TokenLogprobs([1, 2], [-0.5, -1.5], 1)
_ANSWERS: list[EngineMessage] = [
    EngineCoreOutputs(
        [
            EngineCoreOutput(
                "a", [1, 2], [_LOGPROBS], [None, _LOGPROBS], FinishReason.STOP, 3, "error",
                [EngineCoreEvent(EventType.QUEUED, 0.5)], 4, [BeamSequence([1], [_LOGPROBS], -1.0, FinishReason.STOP)],
                pooled=b"1234", is_whole=True,
            )
        ],
        _STATS,
        1.0,
    ),
    Ready(1, "model", "Llama", 64, 60, 24, 4, 8, 1, 1.0, [3], 64),
    UtilityResult(1, {"a": [1, None]}, "error"),
    UtilityResult(
        2,
        EngineSnapshot(
            1.0, _STATS, [BatchEntry(1, True, 2, 3, 4, 5)], 1, [WaitingEntry(1, 2, 0.5, "waiting")], 3,
            PageMap(4, [1, 2, 3, 4, 5], 1, b"\1\2"), [HotPrefix(1, 2, 3, False, [1], [2])], 4, 5,
        ),
    ),
    ErrorMessage("error", fatal=True),
    Pong(0.5),
    EngineGoodbye("bye"),
    KvWelcome("format"),
    KvPage(1, 2, _DATA),
    KvFetched(1, "error"),
    StepTrace(0.5, _STATS, [SequenceTrace(1, "a", 2, 3)], [RequestEvent(1, "a", EventType.FINISHED, 0.5)], 1, True),
]  # fmt: skip
