"""Requests between the socket's thread, which lets them in, and the step loop, which receives them."""

from __future__ import annotations

import threading
from collections import Counter

from quire.protocol.messages import EngineCoreRequest


class Inbound:
    """What has been let in and not received yet. Of the sums, each thread writes its own half; the ids need a lock."""

    def __init__(self) -> None:
        self._let_in = self._let_in_tokens = self._received = self._received_tokens = 0
        self._lock = threading.Lock()
        self._ids: Counter[tuple[bytes, str]] = Counter()  # one may come again before the first is received

    def let_in(self, client_id: bytes, message: EngineCoreRequest) -> None:
        """Of the socket's thread."""
        self._let_in += 1
        self._let_in_tokens += len(message.prompt_token_ids)
        with self._lock:
            self._ids[client_id, message.request_id] += 1

    def received(self, message: EngineCoreRequest) -> None:
        """Of the step loop, which counts it from here on."""
        self._received += 1
        self._received_tokens += len(message.prompt_token_ids)

    def forget(self, client_id: bytes, message: EngineCoreRequest) -> None:
        """Of the step loop, once it has added or refused what it received. Nothing changes where there is no socket."""
        key = client_id, message.request_id
        with self._lock:
            if self._ids[key] > 1:
                self._ids[key] -= 1
            else:
                del self._ids[key]

    def holds(self, client_id: bytes, request_id: str) -> bool:
        """Whether a request with this id has been let in, and the step loop has not done with it."""
        return (client_id, request_id) in self._ids

    @property
    def requests(self) -> int:
        """How many; none where there is no socket."""
        return max(0, self._let_in - self._received)

    @property
    def tokens(self) -> int:
        """Of their prompts."""
        return max(0, self._let_in_tokens - self._received_tokens)
