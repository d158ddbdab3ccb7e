"""The engine's IO thread on real sockets: accepted and rejected clients, slow and vanished ones."""

from __future__ import annotations

import errno
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq
from engine_watch import wait_until
from patience import PATIENCE
from zmq.utils.monitor import recv_monitor_message

from quire.engine_core.transport.clients import MAX_CALLS
from quire.engine_core.transport.server import ClientLimits, EngineCallbacks, EngineServer, Inbox
from quire.engine_core.utilities import UTILITIES
from quire.frontend.client.connection import Connection
from quire.protocol.address import default_address, ipc_path, remove_address
from quire.protocol.codec import MAX_FRAME_BYTES, ClientDecoder, encode
from quire.protocol.errors import AddressError
from quire.protocol.keys import NO_KEYS, Security, generate_keys
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    ClientMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineGoodbye,
    EngineMessage,
    ErrorMessage,
    FinishReason,
    Goodbye,
    Hello,
    KvPeers,
    Ping,
    Pong,
    PrefixReport,
    Ready,
    Role,
    SamplingParams,
    SequenceTrace,
    StepTrace,
    UtilityCall,
    UtilityResult,
    WatchPrefixes,
)
from quire.protocol.sockets import connect_client

NEVER = 3600.0  # a heartbeat that no test sees
M = TypeVar("M", bound=EngineMessage)


class RawClient:
    """A client on a socket of its own; reads are blocking with a deadline."""

    def __init__(self, address: str, security: Security = NO_KEYS, *, identity: bytes | None = None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if identity is None:
            self.socket = connect_client(self._context, address, security)
        else:
            self.socket = self._context.socket(zmq.DEALER)
            self.socket.identity = identity
            self.socket.connect(address)
        self.socket.rcvtimeo = int(PATIENCE * 1000)
        self._decoder = ClientDecoder()

    def send(self, message: ClientMessage) -> None:
        self.socket.send_multipart(encode(message))

    def receive(self) -> EngineMessage:
        return self._decoder.decode(self.socket.recv_multipart())

    def expect(self, kind: type[M]) -> M:
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def hello(self) -> Ready:
        self.send(Hello(PROTOCOL_VERSION, "test"))
        return self.expect(Ready)

    def ping(self) -> None:
        """Returns when the server has done all that came before."""
        self.send(Ping())
        self.expect(Pong)

    def close(self) -> None:
        self._context.destroy(linger=0)


class ServerHarness:
    """A server, and the clients of one test."""

    def __init__(self, address: str, heartbeat: float = NEVER, security: Security = NO_KEYS, **limits: Any) -> None:
        self.ready = Ready(PROTOCOL_VERSION, "demo", "LlamaForCausalLM", 4096, 8192, 100, 32, 256, 1, heartbeat)
        self.inbox: Inbox = queue.SimpleQueue()
        self.server = EngineServer(address, self.ready, self.inbox, ClientLimits(**limits), security)
        self.clients: list[RawClient] = []
        self.reports_sent: list[bytes] = []  # clients to whom a PrefixReport has left

    def client(self, **options: Any) -> RawClient:
        client = RawClient(self.server.address, **options)
        self.clients.append(client)
        return client

    def attach(self) -> tuple[RawClient, bytes]:
        """A client that said Hello, and its id."""
        client = self.client()
        client.hello()
        client.send(Abort(["nothing"]))
        client_id, _ = self.inbox.get(timeout=PATIENCE)
        return client, client_id

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.stop(linger=0)


MakeServer = Callable[..., ServerHarness]


@pytest.fixture
def make_engine() -> Iterator[MakeServer]:
    engines: list[ServerHarness] = []

    def make(address: str | None = None, **options: Any) -> ServerHarness:
        engine = ServerHarness(address or default_address(), **options)
        engines.append(engine)
        engine.server.start(EngineCallbacks(report_sent=engine.reports_sent.append))
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make_engine: MakeServer) -> ServerHarness:
    return make_engine()


def request(request_id: str = "r") -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [1, 2, 3], SamplingParams())


def outputs(request_id: str, *tokens: int, finish: FinishReason | None = None) -> EngineCoreOutputs:
    return EngineCoreOutputs([EngineCoreOutput(request_id, list(tokens), finish_reason=finish)])


# Greeting


def test_a_request_is_rejected_without_the_step_loop() -> None:
    engine = ServerHarness(default_address())
    rejection = EngineCoreOutputs([EngineCoreOutput("late", finish_reason=FinishReason.ERROR, error="full")])
    engine.server.start(
        EngineCallbacks(lambda _client_id, request: rejection if request.request_id == "late" else None)
    )
    client = engine.client()
    client.hello()
    for name in ("first", "late"):
        client.send(EngineCoreRequest(name, [1], SamplingParams()))
    assert client.expect(EngineCoreOutputs) == rejection
    _, first = engine.inbox.get(timeout=PATIENCE)
    assert isinstance(first, EngineCoreRequest)
    assert first.request_id == "first"
    assert engine.inbox.empty()
    engine.close()


def test_only_aborts_of_open_requests_reach_the_step_loop() -> None:
    engine = ServerHarness(default_address())
    engine.server.start(EngineCallbacks(is_open=lambda _client_id, request_id: request_id == "open"))
    client = engine.client()
    client.hello()
    for request_ids in (["a", "b"], [], ["a", "open", "b"]):
        client.send(Abort(request_ids))
    _, message = engine.inbox.get(timeout=PATIENCE)
    assert message == Abort(["open"])
    assert engine.inbox.empty()
    engine.close()


def test_a_flood_is_received_whole_and_others_get_their_outputs(engine: ServerHarness) -> None:
    """The loop is at work, so that the thread does not receive all the time."""
    flood, flooding = engine.attach()
    other, other_id = engine.attach()
    engine.server.last_step = time.monotonic()

    def send_all() -> None:
        for number in range(20_000):
            flood.send(Abort([str(number)]))

    thread = threading.Thread(target=send_all)
    thread.start()
    for number in range(100):
        engine.server.send(other_id, outputs("r", number))
        assert other.expect(EngineCoreOutputs).outputs[0].new_token_ids == [number]
    received = [engine.inbox.get(timeout=PATIENCE) for _ in range(20_000)]
    thread.join()
    assert received == [(flooding, Abort([str(number)])) for number in range(20_000)]


def test_hello_is_answered_with_ready(engine: ServerHarness) -> None:
    assert engine.client().hello() == engine.ready
    assert engine.server.counters.clients == 1


def test_hello_twice_changes_nothing(engine: ServerHarness) -> None:
    client, client_id = engine.attach()
    client.hello()
    engine.server.send(client_id, outputs("r", 1))
    assert client.receive() == outputs("r", 1)


def test_another_version_is_a_clear_fatal_error(engine: ServerHarness) -> None:
    client = engine.client()
    client.send(Hello(PROTOCOL_VERSION + 1))
    error = client.expect(ErrorMessage)
    assert error.fatal
    assert f"version {PROTOCOL_VERSION + 1}, this engine version {PROTOCOL_VERSION}" in error.message
    client.send(request())
    assert client.expect(ErrorMessage).fatal
    assert engine.inbox.empty()


@pytest.mark.parametrize("message", [request(), Ping(), Abort(["r"]), UtilityCall(1, "shutdown"), Goodbye()])
def test_an_unknown_client_is_asked_to_say_hello(engine: ServerHarness, message: ClientMessage) -> None:
    client = engine.client()
    client.send(message)
    error = client.expect(ErrorMessage)
    assert error.fatal
    assert "say Hello first" in error.message
    assert engine.inbox.empty()
    assert client.hello() == engine.ready


def test_clients_of_one_identity_are_both_rejected(engine: ServerHarness) -> None:
    victim, victim_id = engine.attach()
    first = engine.client(identity=b"twin")
    first.send(Hello(PROTOCOL_VERSION))
    error = first.expect(ErrorMessage)
    assert error.fatal
    assert "leave ZMQ_IDENTITY unset" in error.message
    second = engine.client(identity=b"twin")
    second.send(Hello(PROTOCOL_VERSION))
    thief = _raw_client(engine.server.address, victim_id)
    engine.server.send(victim_id, outputs("r", 1))
    assert victim.receive() == outputs("r", 1)
    assert engine.server.counters.clients == 1
    thief.close()


def _raw_client(address: str, identity: bytes) -> socket.socket:
    """A ZMTP 3.0 DEALER with an identity that libzmq would not let it choose, ready to receive."""
    path = ipc_path(address)
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(PATIENCE)
    raw.connect(str(path))
    raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32))
    metadata = b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    metadata += b"\x08Identity" + len(identity).to_bytes(4, "big") + identity
    body = b"\x05READY" + metadata
    raw.sendall(b"\x04" + bytes([len(body)]) + body)
    greeting = b""
    while b"READY" not in greeting:
        greeting += raw.recv(4096)
    return raw


# Messages


def test_messages_reach_the_loop_and_outputs_their_client(engine: ServerHarness) -> None:
    clients = [engine.client() for _ in range(3)]
    for number, client in enumerate(clients):
        client.hello()
        client.send(EngineCoreRequest("same", [number], SamplingParams()))
    for _ in clients:
        client_id, message = engine.inbox.get(timeout=PATIENCE)
        assert isinstance(message, EngineCoreRequest)
        engine.server.send(client_id, outputs("same", message.prompt_token_ids[0]))
    for number, client in enumerate(clients):
        assert client.receive() == outputs("same", number)


@pytest.mark.parametrize("message", [request(), Abort(["r"]), UtilityCall(1, "stats")])
def test_the_loop_receives_the_messages_that_were_sent(engine: ServerHarness, message: ClientMessage) -> None:
    client, client_id = engine.attach()
    client.send(message)
    assert engine.inbox.get(timeout=PATIENCE) == (client_id, message)


def test_goodbye_reaches_the_loop_and_ends_the_session(engine: ServerHarness) -> None:
    client, client_id = engine.attach()
    client.send(Goodbye("done"))
    assert engine.inbox.get(timeout=PATIENCE) == (client_id, Goodbye("done"))
    client.send(Ping())
    assert client.expect(ErrorMessage).fatal
    assert engine.server.counters.clients == 0


def test_outputs_arrive_in_order_from_a_busy_loop(engine: ServerHarness) -> None:
    attached = [engine.attach() for _ in range(4)]

    def loop() -> None:
        for step in range(2000):
            for _, client_id in attached:
                engine.server.send(client_id, outputs("r", step))

    thread = threading.Thread(target=loop)
    thread.start()
    for client, _ in attached:
        tokens: list[int] = []
        while len(tokens) < 2000:
            tokens += client.expect(EngineCoreOutputs).outputs[0].new_token_ids
        assert tokens == list(range(2000))
    thread.join()


# Bad input


def test_a_malformed_frame_is_counted_answered_and_dropped(engine: ServerHarness) -> None:
    client, client_id = engine.attach()
    client.socket.send(msgspec.msgpack.encode([1, "r", ["x"], []]))
    error = client.expect(ErrorMessage)
    assert error.message.startswith("EngineCoreRequest.prompt_token_ids[")
    assert not error.fatal
    client.socket.send_multipart([b"", b"junk"])
    assert "2" in client.expect(ErrorMessage).message
    for frame in (b"", b"\x90\x04"):  # nothing; an empty array, and then the type of a message without fields
        client.socket.send(frame)
        client.expect(ErrorMessage)
    assert engine.server.counters.frames_refused == 4
    client.send(request())
    assert engine.inbox.get(timeout=PATIENCE) == (client_id, request())


def test_an_oversized_frame_is_counted_answered_and_dropped(engine: ServerHarness) -> None:
    client, client_id = engine.attach()
    client.socket.send(bytes(MAX_FRAME_BYTES + 1))
    error = client.expect(ErrorMessage)
    assert f"at most {MAX_FRAME_BYTES}" in error.message
    assert engine.server.counters.frames_oversized == 1
    client.send(request())
    assert engine.inbox.get(timeout=PATIENCE) == (client_id, request())


def test_a_monstrous_frame_costs_its_sender_the_connection(engine: ServerHarness) -> None:
    other, _ = engine.attach()
    client, _ = engine.attach()
    monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.socket.send(bytes(8 * MAX_FRAME_BYTES + 1))
    assert monitor.poll(int(PATIENCE * 1000))
    other.ping()


def test_silent_connections_do_no_harm(engine: ServerHarness) -> None:
    mute = [engine.client() for _ in range(20)]
    with socket.socket(socket.AF_UNIX) as raw, socket.socket(socket.AF_UNIX) as noisy:
        raw.connect(str(ipc_path(engine.server.address)))
        noisy.connect(str(ipc_path(engine.server.address)))
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)))
        client, _ = engine.attach()
        client.ping()
    assert engine.server.counters.clients == 1
    assert len(mute) == 20


def test_a_result_that_has_no_encoding_is_reported(engine: ServerHarness) -> None:
    client, client_id = engine.attach()
    engine.server.send(client_id, UtilityResult(7, object()))
    result = client.expect(UtilityResult)
    assert result.call_id == 7
    assert "cannot be sent" in str(result.error)


def test_an_output_that_has_no_encoding_ends_the_session_aloud(engine: ServerHarness) -> None:
    client, client_id = engine.attach()
    engine.server.send(client_id, outputs("r", 2**70))
    assert client.expect(ErrorMessage).fatal
    assert engine.inbox.get(timeout=PATIENCE)[0] == client_id
    client.hello()


# Heartbeats


def test_ping_is_answered_with_the_age_of_the_last_step(engine: ServerHarness) -> None:
    client, _ = engine.attach()
    engine.server.last_step = time.monotonic() - 100
    client.send(Ping())
    assert client.expect(Pong).last_step_age > 99
    engine.server.last_step = math.inf
    client.send(Ping())
    assert client.expect(Pong).last_step_age == 0


def test_pongs_come_unasked(make_engine: MakeServer) -> None:
    client, _ = make_engine(heartbeat=0.05, silent_heartbeats=1000).attach()
    client.expect(Pong)
    client.expect(Pong)


class Clock:
    """The server's monotonic clock, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead = 0.0
        self._real = time.monotonic
        monkeypatch.setattr("quire.engine_core.transport.server.time.monotonic", lambda: self._real() + self._ahead)

    def beat(self, seconds: float, *alive: RawClient) -> None:
        """Moves by `seconds`, at least a heartbeat; those `alive` ping, and receive the Pong of the heartbeat too."""
        self._ahead += seconds
        for client in alive:
            client.ping()
        for client in alive:
            client.expect(Pong)


def _fill(engine: ServerHarness, client_id: bytes, steps: int, width: int = 20) -> None:
    for step in range(steps):
        engine.server.send(client_id, outputs("r", *range(step * width, (step + 1) * width)))


def test_clients_that_neither_send_nor_read_are_removed(
    make_engine: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(heartbeat=100.0, silent_heartbeats=10)
    clock = Clock(monkeypatch)
    alive, _ = engine.attach()
    engine.attach()  # it says nothing, but libzmq reads what comes for it
    silent, silent_id = engine.attach()
    for _ in range(300):  # one by one: merged while they wait, they could all fit into libzmq's buffers
        _fill(engine, silent_id, 1, width=2000)
        alive.ping()
    for _ in range(9):
        clock.beat(105, alive)
    assert engine.server.counters.clients_silent == 0
    while engine.inbox.empty():
        clock.beat(105, alive)
    assert engine.inbox.get(timeout=PATIENCE) == (silent_id, Goodbye("silent"))
    assert engine.server.counters.clients_silent == 1
    silent.send(request())
    while not isinstance(error := silent.receive(), ErrorMessage):
        assert isinstance(error, Pong | EngineCoreOutputs)
        silent.send(request())  # an unknown client gets an answer only once it reads
    assert error.fatal
    assert engine.inbox.empty()
    assert engine.server.counters.clients == 2


def test_time_in_which_the_engine_was_stopped_is_not_silence(
    make_engine: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(heartbeat=100.0, silent_heartbeats=10)
    clock = Clock(monkeypatch)
    alive, _ = engine.attach()
    _, silent_id = engine.attach()
    _fill(engine, silent_id, 20_000)
    clock.beat(100_000, alive)
    assert engine.server.counters.clients == 2
    assert engine.inbox.empty()
    while engine.inbox.empty():
        clock.beat(105, alive)
    assert engine.inbox.get(timeout=PATIENCE) == (silent_id, Goodbye("silent"))


# Slow and vanished clients


def test_increments_merge_while_a_slow_client_does_not_read(engine: ServerHarness) -> None:
    slow, slow_id = engine.attach()
    other, other_id = engine.attach()
    steps, width = 20_000, 20
    _fill(engine, slow_id, steps, width)
    engine.server.send(slow_id, outputs("r", finish=FinishReason.STOP))
    other.ping()
    assert engine.server.counters.outputs_merged > 0
    engine.server.send(other_id, outputs("r", 1))
    assert other.receive() == outputs("r", 1)
    received: list[EngineCoreOutput] = []
    while not received or received[-1].finish_reason is None:
        received += slow.expect(EngineCoreOutputs).outputs
    assert [token for output in received for token in output.new_token_ids] == list(range(steps * width))
    assert len(received) == steps + 1 - engine.server.counters.outputs_merged
    slow.ping()  # nothing follows the end


def test_more_clients_than_may_be_attached_are_rejected(make_engine: MakeServer) -> None:
    engine = make_engine(max_clients=2)
    first, _ = engine.attach()
    second, _ = engine.attach()
    third = engine.client()
    third.send(Hello(PROTOCOL_VERSION, "third"))
    error = third.expect(ErrorMessage)
    assert error.fatal
    assert error.message.startswith("the engine has 2 clients, which is its limit")
    assert engine.server.counters.clients_rejected == 1
    first.ping()
    second.hello()  # a second Hello is no second client
    second.send(Goodbye())
    wait_until(lambda: engine.server.counters.clients == 1, "one client is left")
    engine.attach()


def test_a_client_may_have_so_many_calls_without_an_answer(engine: ServerHarness) -> None:
    client, client_id = engine.attach()
    for call_id in range(MAX_CALLS + 1):
        client.send(UtilityCall(call_id, "stats"))
    refused = client.expect(UtilityResult)
    assert refused.call_id == MAX_CALLS
    assert f"{MAX_CALLS} utility calls" in (refused.error or "")
    engine.server.send(client_id, UtilityResult(0, {}))
    assert client.expect(UtilityResult).call_id == 0
    client.send(UtilityCall(7000, "stats"))
    client.ping()
    calls = [engine.inbox.get_nowait()[1] for _ in range(MAX_CALLS + 1)]
    assert calls[-1] == UtilityCall(7000, "stats")


def test_the_engine_learns_when_a_report_has_left(engine: ServerHarness) -> None:
    """To one that reads at once, to one that does not once it does; of other messages it does not learn."""
    (slow, slow_id), (reader, reader_id) = engine.attach(), engine.attach()
    reports = [PrefixReport(removed=[(1 << 63) + number] * 10_000) for number in range(120)]
    for report in reports:
        engine.server.send(slow_id, report)
    engine.server.send(reader_id, reports[0])
    engine.server.send(reader_id, outputs("r", 1))
    reader.expect(PrefixReport)
    reader.expect(EngineCoreOutputs)
    assert engine.reports_sent.count(reader_id) == 1
    assert engine.reports_sent.count(slow_id) < len(reports)
    assert [slow.expect(PrefixReport) for _ in reports] == reports
    slow.ping()
    assert engine.reports_sent.count(slow_id) == len(reports)


def test_outputs_of_all_slow_clients_share_one_bound(make_engine: MakeServer) -> None:
    engine = make_engine(max_waiting_bytes=36 * 50_000)
    slow, slow_id = engine.attach()
    _, slower_id = engine.attach()
    other, _ = engine.attach()
    while engine.server.counters.outputs_merged == 0:  # from now on its outputs wait
        _fill(engine, slow_id, 100)
        other.ping()
    _fill(engine, slower_id, 20_000)
    client_id, message = engine.inbox.get(timeout=PATIENCE)
    assert client_id == slower_id
    assert isinstance(message, Goodbye)
    assert engine.inbox.empty()
    assert isinstance(slow.receive(), EngineCoreOutputs)


def test_a_client_that_never_reads_is_given_up(make_engine: MakeServer) -> None:
    engine = make_engine(max_waiting_bytes=360_000)
    slow, slow_id = engine.attach()
    _fill(engine, slow_id, 20_000)
    client_id, message = engine.inbox.get(timeout=PATIENCE)
    assert client_id == slow_id
    assert isinstance(message, Goodbye)
    assert message.reason.startswith("slow: 10")
    assert engine.server.counters.clients_slow == 1
    slow.send(Ping())
    while isinstance(answer := slow.receive(), EngineCoreOutputs):  # what was on its way
        slow.send(Ping())
    assert isinstance(answer, ErrorMessage)
    assert answer.fatal


def test_traces_beyond_a_limit_are_dropped_and_counted(engine: ServerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine_core.transport.outbox._MAX_TRACE_VALUES", 100_000)
    slow, slow_id = engine.attach()
    other, _ = engine.attach()
    steps = 20_000
    sequences = [SequenceTrace(1, "r", 0, 1)] * 20
    for step in range(steps):
        engine.server.send(slow_id, StepTrace(float(step), sequences=sequences))
    engine.server.send(slow_id, StepTrace(0.0, last=True))
    other.ping()
    traces = [slow.expect(StepTrace)]
    while not traces[-1].last:
        traces.append(slow.expect(StepTrace))
    dropped = sum(trace.dropped for trace in traces)
    assert dropped == engine.server.counters.traces_dropped > 0
    assert len(traces) + dropped == steps + 1
    assert traces[-2].begin == steps - 1
    assert engine.server.counters.clients_slow == 0


def test_a_vanished_client_is_noticed_when_something_is_sent(engine: ServerHarness) -> None:
    client, client_id = engine.attach()
    other, _ = engine.attach()
    client.close()
    deadline = time.monotonic() + PATIENCE
    while engine.server.counters.clients == 2 and time.monotonic() < deadline:
        engine.server.send(client_id, outputs("r", 1))
        other.ping()
    assert engine.inbox.get(timeout=PATIENCE) == (client_id, Goodbye("gone"))
    assert engine.server.counters.clients_gone == 1


def test_a_client_that_comes_back_is_a_new_one(engine: ServerHarness) -> None:
    first, first_id = engine.attach()
    first.close()
    second, second_id = engine.attach()
    assert first_id != second_id
    engine.server.send(first_id, outputs("r", 1))
    engine.server.send(second_id, outputs("r", 2))
    assert second.receive() == outputs("r", 2)


# Start and stop


def test_stop_sends_what_waits_and_says_goodbye(engine: ServerHarness) -> None:
    client, client_id = engine.attach()
    path = ipc_path(engine.server.address)
    assert path is not None
    engine.server.send(client_id, outputs("r", 1, finish=FinishReason.ABORT))
    engine.server.stop(reason="SIGTERM")
    assert client.receive() == outputs("r", 1, finish=FinishReason.ABORT)
    assert client.receive() == EngineGoodbye("SIGTERM")
    assert not path.exists()
    engine.server.send(client_id, outputs("r", 2))
    engine.server.stop()


def test_stop_waits_for_a_slow_client_that_reads(engine: ServerHarness) -> None:
    client, client_id = engine.attach()
    _fill(engine, client_id, 20_000)
    stopper = threading.Thread(target=engine.server.stop, kwargs={"linger": PATIENCE})
    stopper.start()
    tokens = 0
    while isinstance(message := client.receive(), EngineCoreOutputs):
        tokens += sum(len(output.new_token_ids) for output in message.outputs)
    assert isinstance(message, EngineGoodbye)
    assert tokens == 400_000
    client.close()
    stopper.join()


def test_stop_loses_nothing_that_a_client_has_not_read_yet(engine: ServerHarness) -> None:
    """A client takes the end of a connection for the end of what has been sent, so that comes after it has read."""
    client = Connection(engine.server.address, NO_KEYS)
    client.post(encode(Hello(PROTOCOL_VERSION, "test")))
    client.post(encode(Abort(["nothing"])))
    messages: list[EngineMessage] = []
    while not messages:  # it returns early when it is woken
        messages = client.exchange(PATIENCE)
    assert isinstance(messages[0], Ready)
    client_id, _ = engine.inbox.get(timeout=PATIENCE)
    results = [UtilityResult(call_id, "x" * 1000) for call_id in range(200)]
    for result in results:
        engine.server.send(client_id, result)
    stopper = threading.Thread(target=engine.server.stop, kwargs={"linger": PATIENCE})
    stopper.start()
    time.sleep(0.5)
    messages.clear()
    while not (messages and isinstance(messages[-1], EngineGoodbye)):
        messages += client.exchange(PATIENCE)
    assert messages[:-1] == results
    client.close()
    stopper.join()


def test_stop_does_not_wait_for_a_client_that_never_reads(engine: ServerHarness) -> None:
    _, client_id = engine.attach()
    _fill(engine, client_id, 20_000)
    started = time.monotonic()
    engine.server.stop(linger=0.2)
    assert time.monotonic() - started < PATIENCE


def test_stop_without_start() -> None:
    address = default_address()
    ServerHarness(address).server.stop()
    remove_address(address)


def test_an_address_in_use_is_rejected_and_its_engine_unharmed(engine: ServerHarness) -> None:
    client, _ = engine.attach()
    second = ServerHarness(engine.server.address)
    with pytest.raises(AddressError, match="is in use"):
        second.server.start(EngineCallbacks())
    second.server.stop()
    client.ping()
    engine.client().hello()


def test_a_failed_thread_wakes_the_loop_and_rejects_messages(
    engine: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(engine.server._sessions, "_accept", fail)
    engine.client().send(Ping())
    assert engine.inbox.get(timeout=PATIENCE) == (b"", Goodbye("the IO thread failed"))
    assert isinstance(engine.server.failure, OSError)
    with pytest.raises(RuntimeError, match="IO thread failed"):
        engine.server.send(b"", Pong())


# tcp


def test_insecure_tcp_resolves_its_port(make_engine: MakeServer) -> None:
    engine = make_engine("tcp://127.0.0.1:0", security=Security(insecure_tcp=True))
    assert not engine.server.address.endswith(":0")
    assert engine.client(security=Security(insecure_tcp=True)).hello().engine_pid == engine.ready.engine_pid


def test_only_authorized_keys_get_in(make_engine: MakeServer, tmp_path: Path) -> None:
    keys, others = tmp_path / "keys", tmp_path / "others"
    generate_keys(keys)
    generate_keys(others)
    (others / "engine.public").write_bytes((keys / "engine.public").read_bytes())
    engine = make_engine("tcp://127.0.0.1:0", security=Security(keys))
    stranger = engine.client(security=Security(others))
    assert _handshake_event(stranger) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    without = engine.client(security=Security(insecure_tcp=True))
    assert _handshake_event(without) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert engine.client(security=Security(keys)).hello() == engine.ready


# Roles


def folder_of(keys: Path, *names: str) -> Path:
    """Return a client's folder of keys."""
    folder = keys.parent / "_".join(names)
    folder.mkdir()
    for name in (*names, "engine.public"):
        (folder / name).write_bytes((keys / name).read_bytes())
        (folder / name).chmod(0o600)
    return folder


@pytest.fixture
def plain_client(make_engine: MakeServer, tmp_path: Path) -> tuple[ServerHarness, RawClient]:
    """A client over tcp with a key that is no administrator's."""
    generate_keys(tmp_path / "keys")
    engine = make_engine("tcp://127.0.0.1:0", security=Security(tmp_path / "keys"))
    client = engine.client(security=Security(folder_of(tmp_path / "keys", "client.secret")))
    assert client.hello().role is Role.CLIENT
    return engine, client


def test_whoever_opens_the_socket_file_is_an_administrator(engine: ServerHarness) -> None:
    client = engine.client()
    assert client.hello().role is Role.ADMIN
    client.send(call := UtilityCall(1, "shutdown"))
    assert engine.inbox.get(timeout=PATIENCE)[1] == call


@pytest.mark.parametrize("method", [name for name in UTILITIES if name != "stats"])
def test_a_plain_client_may_not_touch_what_concerns_others(
    plain_client: tuple[ServerHarness, RawClient], method: str
) -> None:
    engine, client = plain_client
    client.send(UtilityCall(7, method))
    answer = client.expect(UtilityResult)
    assert answer.call_id == 7
    assert answer.error == (
        f"the utility call {method!r} needs the role admin, and this client has the role client; attach over the "
        "engine's ipc:// socket, or with the key admin.secret"
    )
    client.ping()
    assert engine.inbox.empty()


def test_a_plain_client_may_generate_abort_and_read_statistics(plain_client: tuple[ServerHarness, RawClient]) -> None:
    engine, client = plain_client
    for message in (request(), Abort(["r"]), UtilityCall(1, "stats")):
        client.send(message)
        assert type(engine.inbox.get(timeout=PATIENCE)[1]) is type(message)


@pytest.mark.parametrize(
    ("message", "what"),
    [(WatchPrefixes([""]), "a watch of cached prefixes"), (KvPeers(["tcp://10.0.0.1:1"]), "a fetch of KV pages")],
)
def test_a_plain_client_neither_learns_what_is_cached_nor_has_it_fetched(
    plain_client: tuple[ServerHarness, RawClient], message: ClientMessage, what: str
) -> None:
    engine, client = plain_client
    client.send(message)
    error = client.expect(ErrorMessage)
    assert error.message.startswith(f"{what} needs the role admin")
    assert not error.fatal
    client.ping()
    assert engine.inbox.empty()


@pytest.mark.parametrize(
    ("field", "value", "text"), [("tenant", "boss", "tenant='boss' needs"), ("priority", -1, "priority=-1, below 0, ")]
)
def test_a_plain_client_gets_no_more_than_its_share(
    plain_client: tuple[ServerHarness, RawClient], field: str, value: object, text: str
) -> None:
    engine, client = plain_client
    client.send(msgspec.structs.replace(request(), **{field: value}))
    error = client.expect(ErrorMessage)
    assert text in error.message
    assert not error.fatal
    client.ping()
    assert engine.inbox.empty()


def test_a_key_is_one_tenant_however_many_connections_it_has(
    plain_client: tuple[ServerHarness, RawClient], tmp_path: Path
) -> None:
    engine, first = plain_client
    second = engine.client(security=Security(tmp_path / "client.secret"))
    second.hello()
    tenants = []
    for client in (first, second):
        client.send(request())
        message = engine.inbox.get(timeout=PATIENCE)[1]
        assert isinstance(message, EngineCoreRequest)
        tenants.append(message.tenant)
    assert tenants[0] == tenants[1] != ""


def test_with_keys_the_socket_file_makes_no_administrator(make_engine: MakeServer, tmp_path: Path) -> None:
    generate_keys(tmp_path / "keys")
    engine = make_engine(security=Security(tmp_path / "keys"))
    client = engine.client(security=Security(folder_of(tmp_path / "keys", "client.secret")))
    assert client.hello().role is Role.CLIENT


def test_an_administrators_key_may_name_tenants(make_engine: MakeServer, tmp_path: Path) -> None:
    generate_keys(tmp_path / "keys")
    engine = make_engine("tcp://127.0.0.1:0", security=Security(tmp_path / "keys"))
    for keys in (tmp_path / "keys", folder_of(tmp_path / "keys", "admin.secret")):
        client = engine.client(security=Security(keys))
        assert client.hello().role is Role.ADMIN
        for sent in (UtilityCall(1, "reset_cache"), msgspec.structs.replace(request(), tenant="team", priority=-5)):
            client.send(sent)
            assert engine.inbox.get(timeout=PATIENCE)[1] == sent


def test_nobody_is_an_administrator_over_tcp_without_keys(make_engine: MakeServer) -> None:
    engine = make_engine("tcp://127.0.0.1:0", security=Security(insecure_tcp=True))
    client = engine.client(security=Security(insecure_tcp=True))
    assert client.hello().role is Role.CLIENT
    client.send(UtilityCall(1, "shutdown"))
    assert "needs the role admin" in (client.expect(UtilityResult).error or "")
    assert engine.inbox.empty()


def _handshake_event(client: RawClient) -> int:
    """Return how an attempt to connect ends; it is made anew, since the first may have ended unseen."""
    endpoint = client.socket.get_string(zmq.LAST_ENDPOINT)
    client.socket.disconnect(endpoint)
    ends = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_SUCCEEDED
    monitor = client.socket.get_monitor_socket(ends | zmq.EVENT_DISCONNECTED)
    client.socket.connect(endpoint)
    assert monitor.poll(int(PATIENCE * 1000))
    return recv_monitor_message(monitor)["event"]
