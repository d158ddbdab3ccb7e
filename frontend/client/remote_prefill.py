"""Remote prefill: another engine computes long prompts, and the engine that answers fetches their KV from it."""

from __future__ import annotations

import logging
import math

import msgspec

from quire.frontend.client.engine_client import (
    CoreClient,
    Delivery,
    EngineAway,
    EngineBack,
    EngineLeft,
    ReconnectPolicy,
)
from quire.frontend.errors import EngineConnectionError, EngineDeadError
from quire.protocol.errors import ProtocolError
from quire.protocol.keys import Security
from quire.protocol.messages import (
    Abort,
    ClientMessage,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Ready,
    Role,
    SamplingParams,
)

_SAME = ("architecture", "vocab_size", "hidden_size", "max_model_len", "block_size", "kv_cache_dtype")

logger = logging.getLogger(__name__)


class RemotePrefill:
    """The prefill engine at `address`, for prompts of at least `min_tokens` tokens.

    While it is gone, the other engine computes all prompts; it is used again when it is back. Raises
    `EngineConnectionError` if it does not answer within `timeout` seconds.
    """

    def __init__(self, address: str, min_tokens: int, *, security: Security, timeout: float) -> None:
        self._min_tokens = min_tokens
        self._open: dict[str, int] = {}  # the engines that answer requests that it computes, by ids that both know
        self._is_complaining = False
        self._client = CoreClient(
            address,
            self._note,
            security=security,
            timeout=timeout,
            reconnect=ReconnectPolicy(math.inf, outlives_engine=True),
        )

    def check(self, ready: Ready) -> None:
        """Raise `EngineConnectionError` unless the engine that answers can use the KV of this one."""
        address, own = self._client.address, self._client.ready
        if not ready.has_kv_peer:
            raise EngineConnectionError(
                f"prefill_address={address} needs an engine that fetches KV pages from there; start it with "
                f"--kv-peer {address}"
            )
        for name in _SAME:
            if getattr(own, name) != getattr(ready, name):
                raise EngineConnectionError(
                    f"the engine at prefill_address={address} has {name} {getattr(own, name)}, and the one that "
                    f"answers {getattr(ready, name)}; start both with the same model and options"
                )

    def begin(self, request: EngineCoreRequest, engine: int) -> EngineCoreRequest:
        """Have the prompt of a request computed, if it is long; return the request for the `engine` that answers."""
        if request.shares_prompt_with in self._open:
            return msgspec.structs.replace(request, remote_prefill=True)
        if (
            len(request.prompt_token_ids) < self._min_tokens
            or request.shares_prompt_with is not None
            or request.pooling is not None
            or request.sampling_params.prompt_logprobs is not None  # each token has a result of its own
        ):
            return request
        is_admin = self._client.ready.role is Role.ADMIN
        prefill = msgspec.structs.replace(
            request,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            eos_token_ids=[],
            generated_token_ids=[],
            priority=request.priority if is_admin else max(0, request.priority),
            tenant=request.tenant if is_admin else "",
        )
        try:
            self._client.send(prefill)
        except (EngineDeadError, ProtocolError):
            return request
        self._open[request.request_id] = engine
        return msgspec.structs.replace(request, remote_prefill=True)

    def end(self, request_ids: list[str]) -> None:
        """End requests whose prompt is not needed any more. Any thread."""
        ended = [each for each in request_ids if each in self._open]
        for request_id in ended:
            self._open.pop(request_id, None)
        if ended:
            self._abort(ended)

    def pass_on(self, message: ClientMessage, engine: int) -> ClientMessage:
        """Take note of a message; return that which the `engine` that answers is to get."""
        if isinstance(message, Abort):
            self.end(message.request_ids)
        return self.begin(message, engine) if isinstance(message, EngineCoreRequest) else message

    def observe(self, delivery: Delivery) -> None:
        """Take note of what engines that answer deliver: a request with a first token needs its prompt no more."""
        if not self._open:
            return
        if isinstance(delivery, EngineCoreOutputs):
            self.end([output.request_id for output in delivery.outputs if _is_past_prompt(output)])
        elif isinstance(delivery, EngineAway | EngineLeft):
            self.end([request_id for request_id, engine in list(self._open.items()) if engine == delivery.engine])
        elif isinstance(delivery, EngineDeadError):
            self.end(list(self._open))

    def close(self) -> None:
        """Leave the engine. Idempotent."""
        self._client.close()

    def _abort(self, request_ids: list[str]) -> None:
        try:
            self._client.send(Abort(request_ids))
        except EngineDeadError:  # and they with it
            return

    def _note(self, delivery: Delivery) -> None:
        """Log that the engine is gone or back. On the client's thread."""
        if isinstance(delivery, EngineBack):
            self._is_complaining = False
            logger.warning("the prefill engine is back")
        elif isinstance(delivery, EngineAway | EngineDeadError) and not self._is_complaining:
            self._is_complaining = True
            reason = delivery.reason if isinstance(delivery, EngineAway) else str(delivery)
            logger.warning("the prefill engine is gone, prompts are computed without it: %s", reason)


def _is_past_prompt(output: EngineCoreOutput) -> bool:
    return bool(output.new_token_ids) or output.finish_reason is not None
