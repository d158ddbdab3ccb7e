"""An engine that dies when it is told to, for tests of the table of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.frontend.client.request import GenerationRequest
from quire.frontend.client.routing import FIRST_SESSION, Session
from quire.protocol.messages import (
    Abort,
    ClientMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)

LENGTH = 12


@dataclass
class MortalEngine:
    """An engine whose n-th token of a request is n. It dies when it is told to."""

    session: Session = FIRST_SESSION
    running: dict[str, tuple[EngineCoreRequest, int]] = field(default_factory=dict)
    identities: list[int] = field(default_factory=list)  # identities of all requests that were sent

    def send(self, message: ClientMessage, session: Session) -> None:
        """Take a message; one of another session is dropped, as the client does it."""
        if session != self.session:
            return
        if isinstance(message, EngineCoreRequest):
            self.running[message.request_id] = message, len(message.generated_token_ids)
            self.identities.append(message.identity)
            assert message.generated_token_ids == list(range(len(message.generated_token_ids)))
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.running.pop(request_id, None)

    def step(self) -> EngineCoreOutputs:
        """Return a token of each request."""
        outputs = []
        for request_id, (message, count) in list(self.running.items()):
            is_last = count + 1 == message.sampling_params.max_tokens
            outputs.append(
                EngineCoreOutput(request_id, [count], finish_reason=FinishReason.LENGTH if is_last else None)
            )
            self.running[request_id] = message, count + 1
            if is_last:
                del self.running[request_id]
        return EngineCoreOutputs(outputs)

    def die(self) -> None:
        """Lose everything."""
        self.running.clear()

    def return_(self) -> Session:
        """Begin the next session."""
        self.session = Session(self.session.engine, self.session.number + 1)
        return self.session


def tokens(request: GenerationRequest) -> list[list[int]]:
    return [completion.token_ids for completion in request.output().outputs]
