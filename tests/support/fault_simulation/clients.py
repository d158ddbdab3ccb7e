"""Clients: the real client, its request table and its requests, in processes of their own, and what they want."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from fault_simulation.engine import BROKEN, POISON
from fault_simulation.network import Dealer, Network
from fault_simulation.server import ADDRESS
from fault_simulation.world import Process, Thread, World, sleep
from quire.frontend.client.engine_client import CoreClient, Delivery, ReconnectPolicy
from quire.frontend.client.observer import RequestOptions
from quire.frontend.client.request import EmbeddingRequest, GenerationRequest, PoolingParams
from quire.frontend.client.request_table import RequestTable
from quire.frontend.client.streams import apply_delivery
from quire.frontend.client.supervisor import Supervisor
from quire.frontend.errors import EngineConnectionError, EngineDeadError, EngineStartError
from quire.frontend.sampling import SamplingParams, engine_params
from quire.frontend.text.prompts import Prompt
from quire.frontend.text.tokenizer import Tokenizer
from quire.protocol.messages import Reload

_PLAIN, _SHARED = 7, 9  # first tokens of prompts without and with a common prefix
_MAX_PROMPT = 16
_RELOADS = 0.1  # of each client
_FIRST_UNIQUE = 20  # of the tokens that make each prompt another


class Wish:
    """A request that a user is going to make, and what becomes of it."""

    def __init__(
        self, number: int, choose: random.Random, tokenizer: Tokenizer, *, hazard: int | None, has_priorities: bool
    ) -> None:
        """`hazard`: the first token of a prompt that harms the engine."""
        self.number = number
        self.submit_at = choose.uniform(0.0, 6.0)
        self.is_poisoned = hazard == POISON
        self.is_broken = hazard == BROKEN
        self.abort_at = self.submit_at + choose.expovariate(0.7) if choose.random() < 0.15 else None
        self.is_left = self.abort_at is not None and choose.random() < 0.4  # by its consumer, who hears no more
        self.options = RequestOptions(
            priority=choose.choice((0, 0, 1, 5)) * has_priorities,
            cache_salt=choose.choice(("", "", "salt")),
            timeout=choose.choice((0.3, 2.0, 8.0)) if choose.random() < 0.12 else None,
            tenant=choose.choice(("", "", "a", "b")),
        )
        first = hazard or choose.choice((_PLAIN, _SHARED, _SHARED))
        common = list(range(40, 40 + choose.choice((3, 8, 11)))) if first == _SHARED else []
        unique = [_FIRST_UNIQUE + digit for digit in divmod(number, 10)]
        length = choose.randint(1, _MAX_PROMPT - 3 - len(common))
        self.prompt = [first, *common, *unique, *(choose.randrange(60, 200) for _ in range(length))]
        self._tokenizer = tokenizer
        self._params: SamplingParams | PoolingParams = self._draw_params(choose)
        self.submitted: float | None = None
        self.ended: float | None = None
        self.aborted: float | None = None  # when
        self.request: GenerationRequest | EmbeddingRequest | None = None

    def make(self, now: float) -> GenerationRequest | EmbeddingRequest:
        """Return the request, as new."""
        prompt, params = Prompt(self.prompt), self._params
        if isinstance(params, PoolingParams):
            return EmbeddingRequest(str(self.number), prompt, params, arrival_time=now, options=self.options)
        tokenizer = self._tokenizer if params.stop else None
        each = engine_params(params, params.seed or 0, tokenizer)
        return GenerationRequest(
            str(self.number), prompt, params, each, tokenizer, arrival_time=now, options=self.options
        )

    @property
    def is_late(self) -> bool:
        """True if the time that it was given was up when it ended."""
        if self.options.timeout is None or self.ended is None or self.submitted is None:
            return False
        return self.ended - self.submitted >= self.options.timeout - 1e-9

    @property
    def seconds_overdue(self) -> float:
        """Seconds for which it went on after it was aborted, or its time was up."""
        if self.ended is None or self.submitted is None:
            return 0.0
        due = float("inf") if self.options.timeout is None else self.submitted + self.options.timeout
        return self.ended - (due if self.aborted is None else min(due, self.aborted))

    @staticmethod
    def _draw_params(choose: random.Random) -> SamplingParams | PoolingParams:
        kind = choose.choices(
            ("plain", "stop", "stop ids", "samples", "beams", "logprobs", "prompt logprobs", "embedding"),
            (8, 3, 3, 3, 2, 2, 1, 1),
        )[0]
        params: dict[str, Any] = {
            "max_tokens": choose.choice((1, 4, 12, 24, 40)),
            "seed": choose.randrange(1 << 30),
            "temperature": choose.choice((0.0, 1.0)),
            "ignore_eos": choose.random() < 0.5,
        }
        if kind == "stop":
            params["stop"] = choose.sample(["e", "th", "an", "the", "x", "1"], 2)
        elif kind == "stop ids":
            params["stop_token_ids"] = choose.sample(range(200), 20)
        elif kind == "samples":
            params |= {"n": choose.choice((2, 3)), "max_tokens": choose.choice((3, 10))}
            if choose.random() < 0.3:
                params["best_of"] = 3
                params["n"] = 2
        elif kind == "beams":
            params |= {"n": 2, "beam_width": choose.choice((2, 3)), "max_tokens": choose.choice((3, 8))}
        elif kind == "logprobs":
            params["logprobs"] = 1
        elif kind == "prompt logprobs":
            params |= {"prompt_logprobs": 0, "logprobs": 0}
        elif kind == "embedding":
            return PoolingParams(pooling_type=choose.choice(("last", "mean")))
        return SamplingParams(**params)


class SimulatedClient:
    """A user with a client, which owns the engine or is attached to it."""

    def __init__(
        self,
        world: World,
        network: Network,
        wishes: list[Wish],
        name: str,
        *,
        eos_token_ids: list[int],
        reconnect_timeout: float,
        start_supervisor: Callable[[Process], Supervisor] | None = None,
        on_end: Callable[[Wish], None],
    ) -> None:
        """`start_supervisor`: the client owns the engine."""
        self.process = Process(world, name)
        self.wishes = wishes
        self.supervisor: Supervisor | None = None
        self.start_error: EngineStartError | None = None
        self.core: CoreClient | None = None
        self.table: RequestTable | None = None
        self.is_done = False
        self.calls: list[Future[Any]] = []
        self.num_open = len(wishes)  # that have not ended
        self._world = world
        self._network = network
        self._eos_token_ids = eos_token_ids
        self._reconnect_timeout = reconnect_timeout
        self._start_supervisor = start_supervisor
        self._on_end = on_end
        self._deliveries: deque[Delivery] = deque()
        self._is_waking = False
        self._latency = world.random.choice((1e-3, 1e-3, 0.3))  # of its event loop, at most
        self._dealer: Dealer | None = None
        self._by_request: dict[Any, Wish] = {}
        self.engine_failure: Callable[[], Exception | None] = lambda: None
        self._thread = Thread(self.process, "user", self._main)
        self._thread.start()

    @property
    def is_owner(self) -> bool:
        """True if the engine ends with this client."""
        return self._start_supervisor is not None

    @property
    def is_content(self) -> bool:
        """True if nothing is waited for."""
        return not self.process.is_alive or (self.num_open == 0 and all(call.done() for call in self.calls))

    @property
    def num_losses(self) -> int:
        """Times that it has lost its engine."""
        return 0 if self.core is None else self.core.num_losses

    def cut(self) -> None:
        """Lose the connection."""
        if self._dealer is not None:
            self._dealer.cut()

    def close(self) -> None:
        """Leave, and stop the engine if it is this client's; calls for `is_done`."""
        Thread(self.process, "close", self._close).start()

    def _close(self) -> None:
        if self.core is not None:
            self.core.close()
        if self.supervisor is not None:
            self.supervisor.stop()
        self.is_done = True

    def _main(self) -> None:
        if self._start_supervisor is not None:
            try:
                self.supervisor = supervisor = self._start_supervisor(self.process)
                supervisor.wait_ready()
            except EngineStartError as error:
                self.start_error = error
                self._world.log(f"the engine cannot be started: {error}")
                if self.supervisor is not None:
                    self.supervisor.stop()
                self._give_up()
                return
            self.engine_failure = lambda: supervisor.failure
        while self.core is None:
            try:
                self.core = CoreClient(
                    ADDRESS,
                    self._deliver,
                    reconnect=ReconnectPolicy(
                        self._reconnect_timeout, lambda: None if self.supervisor is None else self.supervisor.failure
                    ),
                    host=self.process.host,
                    connect=self._connect,
                )
            except EngineConnectionError:
                if self.engine_failure() is not None:
                    self._give_up()
                    return
                sleep(0.5)
        self._world.log(f"{self.process.name} is attached")
        self.table = RequestTable(self.core.send, self._eos_token_ids, self.process.monotonic)
        for wish in self.wishes:
            self.process.after(max(0.0, wish.submit_at - self._world.now), partial(self._submit, wish))
            if wish.abort_at is not None:
                self.process.after(max(0.0, wish.abort_at - self._world.now) + 1e-6, partial(self._abort, wish))
        for _ in range(self._world.random.choice((0, 1, 2, 5))):
            self.process.after(self._world.random.uniform(0.0, 8.0), self._call)
        if self._world.random.random() < _RELOADS:
            self.process.after(self._world.random.uniform(1.0, 8.0), self._reload)

    def _give_up(self) -> None:
        self.num_open = 0

    def _connect(self, address: str, _security: object) -> Any:
        self._dealer = Dealer(self._network, self.process, address)
        return self._dealer

    def _deliver(self, delivery: Delivery) -> None:
        self._deliveries.append(delivery)
        if not self._is_waking:
            self._is_waking = True
            self.process.after(self._latency * self._world.random.random(), self._take_deliveries)

    def _take_deliveries(self) -> None:
        assert self.table is not None
        self._is_waking = False
        while self._deliveries:
            delivery = self._deliveries.popleft()
            for request in apply_delivery(self.table, delivery):
                wish = self._by_request[request]
                if wish.ended is not None:
                    self._world.fail(f"request {wish.number} goes on after its end")
                elif request.finished:
                    self._end(wish)

    def _submit(self, wish: Wish) -> None:
        assert self.table is not None
        wish.submitted = self._world.now
        wish.request = request = wish.make(self._world.now)
        self._by_request[request] = wish
        self._world.log(f"{self.process.name} submits {wish.number}")
        try:
            self.table.submit(request)
        except EngineDeadError as error:
            request.error = error
            self._end(wish)

    def _abort(self, wish: Wish) -> None:
        assert self.table is not None
        if wish.ended is not None or wish.request is None:
            return
        self._world.log(f"{self.process.name} aborts {wish.number}")
        wish.aborted = self._world.now
        if wish.is_left:
            self.table.drop([wish.request])
            wish.ended = self._world.now
            self.num_open -= 1
        elif self.table.abort(wish.request):
            self._end(wish)

    def _call(self) -> None:
        assert self.core is not None
        with contextlib.suppress(EngineDeadError):
            self.calls.append(self.core.call(self._world.random.choice(("stats", "reset_cache", "reset_cache"))))

    def _reload(self) -> None:
        assert self.core is not None
        self._world.log(f"{self.process.name} asks for a reload")
        arguments = Reload({"max_num_seqs": 4}, self._world.random.choice((0.0, 0.5, 4.0)))
        with contextlib.suppress(EngineDeadError):
            self.calls.append(self.core.call("reload", reload=arguments))

    def _end(self, wish: Wish) -> None:
        wish.ended = self._world.now
        self.num_open -= 1
        self._world.log(f"{wish.number} ends: {wish.request.finish_reasons if wish.request else None}")
        self._on_end(wish)
