"""Judgement of how a request ended: as if undisturbed, or for a reason that a fault explains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fault_simulation.clients import Wish
from fault_simulation.undisturbed import undisturbed
from quire.frontend.client.request import EmbeddingRequest, GenerationRequest
from quire.frontend.errors import EngineDeadError, RequestError, RequestTimeoutError
from quire.protocol.messages import ErrorKind

if TYPE_CHECKING:
    from fault_simulation.simulation import System

_DOUBTFUL_DEATHS = 3  # of the engine, after which a request may be taken for their cause
_PROMPT_SECONDS = 1.5  # in which a request ends that is aborted, or whose time is up


class Judge:
    """Judges requests at their end."""

    def __init__(self, system: System, eos_token_ids: list[int]) -> None:
        self._system = system
        self._eos_token_ids = eos_token_ids

    def judge(self, wish: Wish) -> None:
        """Note how a request has ended, and what is wrong with that."""
        request, system = wish.request, self._system
        assert request is not None
        system.ends[request.finish_reasons[0] if request.error is None else type(request.error).__name__] += 1
        if text := self._fault(wish, request):
            system.world.fail(f"request {wish.number}: {text}")

    def _fault(self, wish: Wish, request: GenerationRequest | EmbeddingRequest) -> str | None:
        if self._system.faults.are_brief and wish.seconds_overdue > _PROMPT_SECONDS:
            return f"it ended {wish.seconds_overdue:.1f} s late"
        if request.error is not None:
            return None if self._may_fail(wish, request.error) else f"failed: {request.error}"
        if "abort" in request.finish_reasons and wish.aborted is None:
            return "was lost, and its client takes what it has for the whole"
        if wish.is_poisoned and wish.aborted is None and "timeout" not in request.finish_reasons:
            return "is poisoned, and has ended well"
        return difference(wish, undisturbed(wish, self._system.limits, self._eos_token_ids))

    def _may_fail(self, wish: Wish, error: Exception) -> bool:
        """Return True if an error is what a request has deserved."""
        system = self._system
        if isinstance(error, EngineDeadError):
            return system.dies_often or system.clients[0].start_error is not None
        if isinstance(error, RequestTimeoutError):
            return wish.is_late
        if not isinstance(error, RequestError):
            return False
        if "has died whenever" in str(error):
            if not wish.is_poisoned:
                beside = system.faults.injected["poisoned request kills the engine"] > 0
                cause = "beside a poisoned request" if beside else "as the engine was killed from outside"
                system.ends[f"convicted, though innocent, {cause}"] += 1
            return wish.is_poisoned or system.num_deaths >= _DOUBTFUL_DEATHS
        if "failed to compute this step" in str(error) and error.kind is ErrorKind.FAILED:
            return wish.is_broken or tuple(wish.prompt) in system.faults.culprits
        if error.kind is ErrorKind.SHUTTING_DOWN:
            return system.clients[0].start_error is not None
        return isinstance(wish.request, EmbeddingRequest) and wish.aborted is not None


def difference(wish: Wish, expected: GenerationRequest | EmbeddingRequest) -> str | None:
    """Return how what a request has yielded differs from the undisturbed run, of which it may lack the end if it was
    aborted or late; None if it does not.
    """
    request = wish.request
    assert request is not None
    if isinstance(request, EmbeddingRequest) or isinstance(expected, EmbeddingRequest):
        assert isinstance(request, EmbeddingRequest)
        assert isinstance(expected, EmbeddingRequest)
        if request.error is not None:
            return f"no embedding: {request.error}"
        return None if request.output().outputs == expected.output().outputs else "another embedding"
    allowed = {"abort": wish.aborted is not None, "timeout": wish.is_late}
    for index, (own, other) in enumerate(zip(request._completions, expected._completions, strict=True)):
        if allowed.get(own.finish_reason or "", False):
            if own.token_ids != other.token_ids[: len(own.token_ids)]:
                return f"completion {index} begins with {own.token_ids} instead of {other.token_ids}"
            continue
        got, wanted = own.output(delta=False), other.output(delta=False)
        if got != wanted:
            return f"completion {index} is {got} instead of {wanted}"
    prompts = request.output().prompt_logprobs, expected.output().prompt_logprobs
    if not {"abort", "timeout"} & set(request.finish_reasons) and prompts[0] != prompts[1]:
        return f"prompt logprobs are {prompts[0]} instead of {prompts[1]}"
    return None
