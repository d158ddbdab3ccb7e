"""Requests between the socket's thread, which lets them in, and the step loop, which receives them."""

from __future__ import annotations

from quire.protocol.messages import EngineCoreRequest


class Inbound:
    """What has been let in and not received yet. Each thread writes its own half, so no lock is needed."""

    def __init__(self) -> None:
        self._let_in = self._let_in_tokens = self._received = self._received_tokens = 0

    def let_in(self, message: EngineCoreRequest) -> None:
        """Of the socket's thread."""
        self._let_in += 1
        self._let_in_tokens += len(message.prompt_token_ids)

    def received(self, message: EngineCoreRequest) -> None:
        """Of the step loop."""
        self._received += 1
        self._received_tokens += len(message.prompt_token_ids)

    @property
    def requests(self) -> int:
        """How many; none where there is no socket."""
        return max(0, self._let_in - self._received)

    @property
    def tokens(self) -> int:
        """Of their prompts."""
        return max(0, self._let_in_tokens - self._received_tokens)
