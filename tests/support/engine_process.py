"""A real engine process, and a client of its socket under the test's control."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import zmq
from patience import PATIENCE

from quire.protocol.address import default_address, remove_address
from quire.protocol.codec import ClientDecoder, encode
from quire.protocol.keys import NO_KEYS, Security
from quire.protocol.messages import (
    PROTOCOL_VERSION,
    ClientMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineMessage,
    Hello,
    Ping,
    Pong,
    SamplingParams,
    UtilityCall,
    UtilityResult,
)
from quire.protocol.sockets import connect_client

HEARTBEAT = PATIENCE / 10  # seconds; a client that is held up for ten of them counts as silent
PATIENT = ["--heartbeat-seconds", str(HEARTBEAT), "--shutdown-timeout", str(PATIENCE)]
PROMPT = [40, 50, 60]


def command(model: Path, *flags: str) -> list[str]:
    return [sys.executable, "-P", "-m", "quire.engine_core", "--model", str(model), "--num-pages", "256", *flags]


class EngineUnderTest:
    """An engine process on a private socket; killed at the end if it has not ended by itself."""

    def __init__(self, model: Path, *flags: str, pass_fds: Sequence[int] = (), address: str | None = None) -> None:
        self.address = address or default_address()
        self.process = subprocess.Popen(
            command(model, "--engine-address", self.address, *PATIENT, *flags),
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
        )
        assert self.process.stdout is not None
        ready, address = self.process.stdout.readline().decode().split()
        assert ready == "READY"
        assert address == self.address or self.address.endswith(":0")
        self.address = address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.process.kill()
        self.process.communicate()
        remove_address(self.address)

    def ended(self) -> int:
        """Return the exit status; nothing of its socket may be left."""
        status = self.process.wait(PATIENCE)
        assert not Path(self.address.removeprefix("ipc://")).exists()
        return status


class DealerClient:
    """A DEALER under the test's control. `messages` are all that have come but outputs and Pongs."""

    def __init__(
        self,
        address: str,
        version: int | None = PROTOCOL_VERSION,
        heartbeat: float = HEARTBEAT,
        security: Security = NO_KEYS,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = connect_client(self._context, address, security)
        self.messages: list[EngineMessage] = []
        self._outputs: dict[str, list[EngineCoreOutput]] = {}
        self._decoder = ClientDecoder()
        self._heartbeat = heartbeat
        self._next_ping = time.monotonic() + heartbeat
        if version is not None:
            self.send(Hello(version, "test"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._context.destroy(linger=0)

    def send(self, message: ClientMessage) -> None:
        self.socket.send_multipart(encode(message))

    def request(self, request_id: str, max_tokens: int | None = 8, **sampling: Any) -> None:
        """A request that has no eos token."""
        params = SamplingParams(seed=1, max_tokens=max_tokens, **sampling)
        self.send(EngineCoreRequest(request_id, PROMPT, params))

    def receive(self, seconds: float = 0.05) -> EngineMessage | None:
        """The next message, if one comes in that time; a sign of life goes out when it is due."""
        if (now := time.monotonic()) >= self._next_ping:
            self.send(Ping())
            self._next_ping = now + self._heartbeat
        if not self.socket.poll(int(seconds * 1000)):
            return None
        message = self._decoder.decode(self.socket.recv_multipart())
        if isinstance(message, EngineCoreOutputs):
            for output in message.outputs:
                self._outputs.setdefault(output.request_id, []).append(output)
        elif not isinstance(message, Pong):
            self.messages.append(message)
        return message

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.messages[-3:]
            self.receive()

    def first(self, kind: type[Any]) -> Any:
        """The first message of a kind."""
        self.until(lambda: any(isinstance(message, kind) for message in self.messages))
        return next(message for message in self.messages if isinstance(message, kind))

    def outputs(self, request_id: str) -> list[EngineCoreOutput]:
        return self._outputs.get(request_id, [])

    def end(self, request_id: str) -> EngineCoreOutput:
        """The terminal output, once it has come; it is the last, and the only one."""
        outputs = self._outputs.setdefault(request_id, [])
        self.until(lambda: bool(outputs) and outputs[-1].finish_reason is not None)
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        return outputs[-1]

    def tokens(self, request_id: str) -> list[int]:
        self.end(request_id)
        return [token for output in self.outputs(request_id) for token in output.new_token_ids]

    def call(self, method: str) -> dict[str, Any]:
        call_id = sum(isinstance(message, UtilityResult) for message in self.messages)
        self.send(UtilityCall(call_id, method))
        results: list[UtilityResult] = []

        def answered() -> bool:
            results.extend(m for m in self.messages if isinstance(m, UtilityResult) and m.call_id == call_id)
            return bool(results)

        self.until(answered)
        assert isinstance(results[0].result, dict)
        return results[0].result

    def wait_until_at_rest(self) -> dict[str, Any]:
        """The statistics, once nothing runs; every page must be free."""
        while (stats := self.call("stats"))["running"] + stats["waiting"]:
            pass  # each look is a round trip
        assert stats["pages_held"] == 0
        assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"]
        return stats
