"""`LLMEngine`: requests that are added one by one, and outputs that are fetched step by step, as with vLLM's."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Iterable
from typing import Any, Self

from quire.frontend.adapters import resolved
from quire.frontend.client.engine import ConnectedEngine
from quire.frontend.client.observer import RequestOptions
from quire.frontend.client.request import EmbeddingRequest, GenerationRequest
from quire.frontend.client.request_table import RequestTable
from quire.frontend.client.streams import DeliveryInbox, apply_delivery
from quire.frontend.engine_args import EngineArgs, MadeFromEngineArgs, takes_engine_args
from quire.frontend.errors import RequestError
from quire.frontend.lora_request import LoRARequest
from quire.frontend.outputs import PoolingRequestOutput, RequestOutput, RequestOutputKind
from quire.frontend.request_params import output_kind_of
from quire.frontend.sampling import fitted
from quire.frontend.text.prompts import PromptType
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.vllm.fields import takes_vllm_arguments
from quire.protocol.messages import PoolingParams, SamplingParams

Request = GenerationRequest | EmbeddingRequest


class LLMEngine(MadeFromEngineArgs):
    """An engine whose outputs are fetched by `step`; its arguments are those of `LLM`.

    The engine computes in a process of its own, whether or not `step` is called. Not thread-safe.
    """

    @takes_engine_args(EngineArgs)
    def __init__(self, model: str | None = None, **options: Any) -> None:
        self._inbox = DeliveryInbox()
        self._engine = ConnectedEngine(EngineArgs.from_options(model, options), self._inbox.put)
        self._finalizer = weakref.finalize(self, self._engine.close)
        self._table = RequestTable(self._engine.send, self._engine.eos_token_ids, routing=self._engine.routing)
        self._kinds: dict[Request, RequestOutputKind] = {}  # of the requests whose last output has not been fetched
        self._by_id: dict[str, Request] = {}
        self._grown: dict[Request, None] = {}  # since the last step

    @takes_vllm_arguments
    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> str:
        """Add a request, whose outputs `step` will return, and return its id.

        `params.output_kind` says what the outputs contain; `arrival_time` is a `time.time()`, None for now; the others
        are those of `AsyncLLM.generate`. Raises `RequestError` (a `ValueError`) for an id in use and invalid input.
        """
        if request_id in self._by_id:
            raise RequestError(f"request_id={request_id!r} is in use by a request that has not ended")
        while not self._inbox.empty():
            self._take()
        arrived = time.monotonic() - (0.0 if arrival_time is None else max(0.0, time.time() - arrival_time))
        options = RequestOptions(priority, cache_salt, timeout, lora_request=resolved(lora_request))
        kind = RequestOutputKind.FINAL_ONLY
        if isinstance(params, PoolingParams):
            pooling = self._engine.pooling(params)
            made = self._engine.pooled_texts.prompt(prompt, prompt_name=None if pooling.task == "embed" else "")
            request: Request = self._engine.embedding(request_id, made, pooling, options, arrived)
        else:
            kind = output_kind_of(params)
            checked = self._engine.params(params)
            made = self._engine.prompt(prompt)
            fitting = fitted(checked, len(made.token_ids), self._engine.engines.ready.max_model_len)
            request = self._engine.request(request_id, made, fitting, options, arrived)
        self._table.submit(request)
        self._kinds[request] = kind
        self._by_id[request_id] = request
        return request_id

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Wait until requests have grown, and return their outputs; none if there are no requests.

        If a request has failed, raises its error, a `RequestError` that names it; the outputs of the others come with
        the next step. Raises `EngineDeadError`.
        """
        while self._kinds and not self._grown:
            self._take()
        while not self._inbox.empty():
            self._take()
        failed = next((request for request in self._grown if request.error is not None), None)
        if failed is not None:
            self._forget(failed)
            raise _named(failed)
        outputs = [output for request in list(self._grown) if (output := self._output(request)) is not None]
        self._grown.clear()
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return True if outputs are still to come."""
        return bool(self._kinds)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests of which outputs are still to come."""
        return len(self._kinds)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests, which have no further output. Ids of requests that have ended are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            if (request := self._by_id.get(request_id)) is not None:
                self._table.drop([request])
                self._forget(request)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises `ValueError` if there is none."""
        return self._engine.require_tokenizer()

    def close(self) -> None:
        """Disconnect, and stop the engine if it was started here. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _take(self) -> None:
        for grown in apply_delivery(self._table, self._inbox.get()):
            if (request := self._by_id.get(grown.request_id)) is grown:
                self._grown[request] = None

    def _output(self, request: Request) -> RequestOutput | PoolingRequestOutput | None:
        kind = self._kinds[request]
        if request.finished:
            self._forget(request)
        elif kind is RequestOutputKind.FINAL_ONLY:
            return None
        if isinstance(request, EmbeddingRequest):
            return request.vector()
        return request.output(kind is RequestOutputKind.DELTA) if request.has_news else None

    def _forget(self, request: Request) -> None:
        del self._kinds[request], self._by_id[request.request_id]
        self._grown.pop(request, None)


def _named(request: Request) -> Exception:
    """Return the error that ended a request, a copy with its id."""
    error = request.error
    assert error is not None
    if isinstance(error, RequestError):
        return type(error)(f"request {request.request_id!r}: {error}", kind=error.kind, code=error.code)
    return copy.copy(error)
