"""Requests, forks, aborts, steps, failures and departures in any order, with few pages: accounts stay exact."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from filled_tier import FilledTier
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from paged_executor import Engine, expected_tokens, expected_vector

from quire.engine_core.scheduling.policies import POLICIES
from quire.protocol.messages import (
    Abort,
    BeamSequence,
    EngineCoreOutput,
    ErrorMessage,
    FinishReason,
    Goodbye,
    UtilityCall,
)

CLIENTS = st.sampled_from([b"one", b"two", b"three"])
NAMES = st.sampled_from(["a", "b", "c", "d"])
STOP_TOKEN = 3
VOCAB_SIZE = 60


@dataclass
class Sent:
    """One request as its client sees it; the outputs of an id belong to the requests that used it, in turn."""

    prompt: list[int]
    seed: int
    max_tokens: int | None
    tokens: list[int]
    end: EngineCoreOutput | None = None
    beam_width: int = 0
    pooling_type: str = ""


def search_options(beam_width: int, max_tokens: int) -> dict[str, Any]:
    return {"beam_width": beam_width, "n": beam_width, "max_tokens": max_tokens, "stop_token_ids": [STOP_TOKEN]}


@functools.cache
def beams_alone(length: int, max_tokens: int, beam_width: int) -> list[BeamSequence]:
    """Return the result of a search in an engine of its own."""
    engine = Engine(vocab_size=VOCAB_SIZE)
    engine.add("alone", [2] * length, **search_options(beam_width, max_tokens))
    engine.finish()
    return engine.end("alone").beams or []


class EngineStates(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(2, 20),
        block_size=st.sampled_from([2, 4]),
        max_num_seqs=st.integers(2, 8),
        max_num_batched_tokens=st.integers(1, 20),
        enable_prefix_caching=st.booleans(),
        scheduling_policy=st.sampled_from(list(POLICIES)),
        max_waiting_requests=st.sampled_from([2, 100]),
        cautious=st.booleans(),
    )
    def start(self, cautious: bool, **limits: Any) -> None:
        self.engine = self.make_engine(**limits)
        if not cautious:
            self.engine.expect_no_output()
        self.requests: dict[tuple[bytes, str], list[Sent]] = {}
        self.read: dict[tuple[bytes, str], int] = {}
        self.num_duplicates = 0

    def make_engine(self, **limits: Any) -> Engine:
        return Engine(vocab_size=VOCAB_SIZE, max_model_len=60, **limits)

    def _send(
        self,
        client: bytes,
        name: str,
        prompt: list[int],
        seed: int,
        max_tokens: int | None,
        **options: Any,
    ) -> None:
        sent = self.requests.setdefault((client, name), [])
        if sent and sent[-1].end is None:
            self.num_duplicates += 1
        else:
            sent.append(Sent(prompt, seed, max_tokens, []))
        own = {"seed": seed, "max_tokens": max_tokens, "stop_token_ids": [STOP_TOKEN]}
        self.engine.add(name, prompt, client, **own, **options)

    @rule(
        client=CLIENTS,
        name=NAMES,
        prompt=st.lists(st.integers(0, VOCAB_SIZE), max_size=25),
        seed=st.integers(0, 5),
        max_tokens=st.none() | st.integers(0, 50),
    )
    def add(self, client: bytes, name: str, prompt: list[int], seed: int, max_tokens: int | None) -> None:
        """Sometimes add one that must be rejected: an empty prompt, a token out of range, max_tokens=0, too long."""
        self._send(client, name, prompt, seed, max_tokens)

    @rule(client=CLIENTS, name=NAMES, length=st.integers(1, 8), seed=st.integers(0, 5), max_tokens=st.integers(20, 40))
    def add_small(self, client: bytes, name: str, length: int, seed: int, max_tokens: int) -> None:
        self._send(client, name, [1] * length, seed, max_tokens)

    @rule(
        client=CLIENTS,
        name=NAMES,
        length=st.integers(1, 16),
        timeout=st.none() | st.floats(0.1, 3),
        cache_salt=st.sampled_from(["", "tenant"]),
        urgency=st.integers(-2, 2),
    )
    def add_served(
        self, client: bytes, name: str, length: int, timeout: float | None, cache_salt: str, urgency: int
    ) -> None:
        """Add one with a time limit, a salt, and a priority where the policy has them."""
        priority = urgency if self.engine.limits.scheduling_policy == "priority" else 0
        options = {"timeout": timeout, "cache_salt": cache_salt, "priority": priority}
        self._send(client, name, [1] * length, 0, 20, **options)

    @rule(seconds=st.floats(0.01, 1))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds

    @rule()
    def reset(self) -> None:
        self.engine.core.receive(b"watcher", UtilityCall(1, "reset_cache"))

    @rule(length=st.integers(1, 20), method=st.sampled_from(["pin_prefix", "unpin_prefix"]))
    def pin(self, length: int, method: str) -> None:
        self.engine.core.receive(b"watcher", UtilityCall(1, method, [1] * length))

    @rule(client=CLIENTS, length=st.integers(1, 20), seed=st.integers(0, 5), max_tokens=st.integers(1, 20))
    def add_samples(self, client: bytes, length: int, seed: int, max_tokens: int) -> None:
        first = self.requests.get((client, "a"))
        prompt = first[-1].prompt if first and first[-1].end is None else [1] * length
        for name in "abcd":
            self._send(
                client, name, prompt, seed + ord(name), max_tokens, shares_prompt_with=None if name == "a" else "a"
            )

    @rule(
        client=CLIENTS,
        name=NAMES,
        length=st.integers(1, 10),
        max_tokens=st.integers(1, 12),
        beam_width=st.integers(1, 3),
    )
    def add_search(self, client: bytes, name: str, length: int, max_tokens: int, beam_width: int) -> None:
        prompt = [2] * length
        sent = self.requests.setdefault((client, name), [])
        if sent and sent[-1].end is None:
            self.num_duplicates += 1
        else:
            sent.append(Sent(prompt, 0, max_tokens, [], beam_width=beam_width))
        self.engine.add(name, prompt, client, **search_options(beam_width, max_tokens))

    @rule(
        client=CLIENTS,
        name=NAMES,
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=62),
        pooling_type=st.sampled_from(["last", "mean"]),
    )
    def add_embedding(self, client: bytes, name: str, prompt: list[int], pooling_type: Literal["last", "mean"]) -> None:
        sent = self.requests.setdefault((client, name), [])
        if sent and sent[-1].end is None:
            self.num_duplicates += 1
        else:
            sent.append(Sent(prompt, 0, None, [], pooling_type=pooling_type))
        self.engine.embed(name, prompt, client, pooling_type)

    @rule(client=CLIENTS, names=st.lists(NAMES, max_size=3))
    def abort(self, client: bytes, names: list[str]) -> None:
        self.engine.core.receive(client, Abort(names))

    @rule(client=CLIENTS)
    def disconnect(self, client: bytes) -> None:
        self.engine.core.receive(client, Goodbye())

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            computed = self.engine.step()
            assert bool(computed) or not self.engine.core.has_requests

    @rule(name=NAMES, with_token=st.booleans())
    def fail_sequence(self, name: str, with_token: bool) -> None:
        self.engine.executor.fail_sequence, self.engine.executor.fail_with_token = name, with_token
        self.engine.step()
        self.engine.executor.fail_sequence = None

    @rule()
    def fail_step(self) -> None:
        self.engine.executor.fail_step = RuntimeError("out of luck")
        self.engine.step()
        self.engine.executor.fail_step = None

    @invariant()
    def outputs_are_those_of_the_requests(self) -> None:
        self.engine.core.flush()
        self.engine.check_accounts()
        for key, sent in self.requests.items():
            outputs = self.engine.outputs(key[1], key[0])
            for output in outputs[self.read.get(key, 0) :]:
                request = sent[-1]
                assert request.end is None
                request.tokens.extend(output.new_token_ids)
                if output.finish_reason is not None:
                    request.end = output
            self.read[key] = len(outputs)
        live = sum(request.end is None for sent in self.requests.values() for request in sent)
        scheduler = self.engine.core.scheduler
        assert live == len(scheduler.running) + len(scheduler.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.finish()
        event(f"forked: {self.engine.executor.num_forks > 0}")
        answers = [request.end for sent in self.requests.values() for request in sent]
        event(f"searched: {any(end is not None and end.beams is not None for end in answers)}")
        event(f"preempted: {self.engine.core.stats.preemptions > 0}")
        self.outputs_are_those_of_the_requests()
        for sent in self.requests.values():
            for request in sent:
                self._check_answer(request)
        errors = [m for messages in self.engine.sent.values() for m in messages if isinstance(m, ErrorMessage)]
        assert len(errors) == self.num_duplicates

    def _check_answer(self, request: Sent) -> None:
        assert request.end is not None
        if request.end.pooled is not None:
            assert request.end.pooled == expected_vector(request.prompt, request.pooling_type)
            assert request.end.finish_reason is FinishReason.STOP
            assert not request.tokens
            return
        if request.end.beams is not None:
            assert request.end.beams == beams_alone(len(request.prompt), request.max_tokens or 0, request.beam_width)
            return
        expected = expected_tokens(request.prompt, request.seed, VOCAB_SIZE, len(request.tokens))
        assert request.tokens == expected
        assert STOP_TOKEN not in expected[:-1]
        reason = request.end.finish_reason
        assert not (request.beam_width or request.pooling_type) or reason in (FinishReason.ERROR, FinishReason.ABORT)
        assert (reason in (FinishReason.ERROR, FinishReason.TIMEOUT)) == (request.end.error is not None)
        assert reason is not FinishReason.STOP or expected[-1] == request.end.stop_reason == STOP_TOKEN
        if reason is FinishReason.LENGTH:
            most = 60 - len(request.prompt) if request.max_tokens is None else request.max_tokens
            assert len(request.tokens) == most


class TieredStates(EngineStates):
    """With a tier, from which fewer pages may come than it has."""

    tier: FilledTier

    def make_engine(self, **limits: Any) -> Engine:
        engine = Engine(vocab_size=VOCAB_SIZE, max_model_len=60, make_tier=FilledTier, **limits)
        (tier,) = engine.core.tiers
        assert isinstance(tier, FilledTier)
        self.tier = tier
        return engine

    @rule(salt=st.sampled_from(["", "tenant"]))
    def put(self, salt: str) -> None:
        for request in [*self.engine.core.scheduler.running, *self.engine.core.scheduler.waiting]:
            for slot in request.slots:
                self.tier.put(self.engine.executor.sequences.tokens(slot), salt)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(count=st.integers(0, 20))
    def complete(self, count: int) -> None:
        if self.tier.fetches:
            self.tier.complete(count)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        scheduler = self.engine.core.scheduler
        while self.engine.core.has_requests or scheduler.fetches.is_open:
            while self.tier.fetches:
                self.tier.complete()
            self.engine.step()
        event(f"fetched: {scheduler.fetches.num_tokens > 0}")
        super().teardown()


TieredStates.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestTieredStates = TieredStates.TestCase

EngineStates.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestEngineStates = EngineStates.TestCase
