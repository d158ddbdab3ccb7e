"""Requests under which engines die: they are found by their deaths, tried alone, and nobody else ends or waits."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_executor import Engine, PagedStepResult, expected_tokens

from quire.engine_core.crash_journal import CrashJournal
from quire.kernels.errors import ModelError
from quire.kernels.step import StepInput
from quire.protocol.messages import EngineCoreRequest, ErrorKind, FinishReason, PoolingParams, SamplingParams
from quire.protocol.supervision import note_death

POISON = 666  # a prompt that begins with it kills the engine once it has DEADLY tokens
DEADLY = 12
LENGTH = 16
CLIENTS = [b"one", b"two", b"three"]


class DiedError(BaseException):
    """The end of a process, which nothing in it survives."""


class CrashError(DiedError):
    """The end of a process by what it does itself."""


class Lives:
    """Engines with one journal, and clients that send each the requests that have not ended."""

    def __init__(self, **limits: Any) -> None:
        self.fd = os.memfd_create("journal")
        self.limits = limits
        self.num_deaths = 0
        self.num_unexplained = 0  # of these, those that no request has caused as far as is known
        self.error_kinds: dict[str, ErrorKind] = {}  # those expected, other than FAILED
        self.steps: list[list[str]] = []  # the requests of each step, of all lives
        self.errors: dict[str, str] = {}
        self._messages: dict[str, tuple[bytes, EngineCoreRequest]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._begin()

    def close(self) -> None:
        os.close(self.fd)

    def add(self, name: str, prompt: list[int], client_id: bytes = b"client", **fields: Any) -> None:
        params = fields.pop("sampling_params", SamplingParams(seed=0, max_tokens=LENGTH))
        self.error_kinds[name] = fields.pop("error_kind", ErrorKind.FAILED)
        message = EngineCoreRequest(name, prompt, params, identity=1 + len(self._tokens), **fields)
        self._messages[name], self._tokens[name] = (client_id, message), []
        self.engine.core.receive(client_id, message)

    def tokens(self, name: str) -> list[int]:
        return self._tokens[name]

    @property
    def open(self) -> list[str]:
        return list(self._messages)

    def step(self) -> None:
        num_steps = len(self.engine.executor.steps)
        try:
            self.engine.step()
        except DiedError as death:
            self.die(is_crash=isinstance(death, CrashError))
            return
        self.steps += [list(step) for step in self.engine.executor.steps[num_steps:]]
        self._take()

    def die(self, *, is_crash: bool = False) -> None:
        """End the engine where it is; the next one is there at once."""
        self.num_deaths += 1
        self.num_unexplained += not note_death(self.fd, is_crash=is_crash)
        self._take()
        now = self.engine.now
        self._begin()
        self.engine.now = now
        for name, (client_id, message) in self._messages.items():
            again = EngineCoreRequest(
                name, message.prompt_token_ids, message.sampling_params, identity=message.identity,
                pooling=message.pooling, generated_token_ids=self._tokens[name], tenant=message.tenant,
            )  # fmt: skip
            self.engine.core.receive(client_id, again)

    def die_in_step(self) -> None:
        """End it in its next step."""
        engine = self.engine
        engine.executor.fail_step = DiedError()  # type: ignore[assignment]
        while self.open and engine.executor.fail_step is not None:  # a step may have nothing to compute
            self.step()

    def finish(self) -> None:
        for _ in range(3000):
            if not self._messages:
                assert self.engine.executor.sequences.held_pages == 0
                return
            self.step()
        pytest.fail(f"{self.open} wait for ever")

    def _begin(self) -> None:
        journal = CrashJournal(self.fd)
        self.num_unexplained -= journal.num_explained_deaths
        self.engine = Engine(is_supervised=True, journal=journal, **self.limits)
        compute = self.engine.executor.submit

        def submit(step: StepInput) -> PagedStepResult:
            for slot, start, count in zip(step.slots, step.starts, step.counts, strict=True):
                if self.engine.executor.sequences.tokens(slot)[0] == POISON and start + count >= DEADLY:
                    raise CrashError
            return compute(step)

        self.engine.executor.submit = submit  # type: ignore[method-assign]

    def _take(self) -> None:
        """Take the outputs that the engine has sent."""
        self.engine.core.flush()
        for name, (client_id, _) in list(self._messages.items()):
            for output in self.engine.outputs(name, client_id):
                self._tokens[name] += output.new_token_ids
                if output.finish_reason is not None:
                    if output.error is not None:
                        assert output.error_kind is self.error_kinds[name]
                        self.errors[name] = output.error
                    del self._messages[name]
        self.engine.sent.clear()


@pytest.fixture
def lives() -> Iterator[Lives]:
    lives = Lives()
    yield lives
    lives.close()


@given(
    poisoned=st.lists(st.booleans(), min_size=1, max_size=10),
    late=st.integers(0, 9),
    limits=st.fixed_dictionaries({"max_num_seqs": st.sampled_from([2, 8]), "num_pages": st.sampled_from([20, 100])}),
)
def test_requests_that_kill_the_engine_end_alone(poisoned: list[bool], late: int, limits: dict[str, int]) -> None:
    lives = Lives(**limits)
    for number, is_poisoned in enumerate(poisoned):
        if number == late:
            for _ in range(10):
                lives.step()
        prompt = [POISON if is_poisoned else 5, 7, number]
        lives.add(str(number), prompt, CLIENTS[number % len(CLIENTS)])
    lives.finish()
    for number, is_poisoned in enumerate(poisoned):
        if is_poisoned:
            assert "the engine has died whenever it worked on this request" in lives.errors[str(number)]
        else:
            assert lives.tokens(str(number)) == expected_tokens([5, 7, number], 0, 1000, LENGTH)
    assert len(lives.errors) == sum(poisoned)
    assert lives.num_deaths <= 3 * sum(poisoned)
    lives.close()


@given(
    count=st.integers(1, 8),
    kills=st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.booleans()), max_size=6),
)
def test_an_engine_that_is_killed_from_outside_costs_nobody_anything(
    count: int, kills: list[tuple[int, bool, bool]]
) -> None:
    """Even if the next one is killed at the same place."""
    lives = Lives()
    params = SamplingParams(seed=0, max_tokens=120)
    for number in range(count):
        lives.add(str(number), [5, 7, number], sampling_params=params)
    for num_steps, in_step, again in kills:
        for _ in range(16 * count + num_steps):  # all get past the place of the deaths before
            lives.step()
        lives.die_in_step() if in_step else lives.die()
        if again:
            lives.die_in_step()
    lives.finish()
    assert lives.errors == {}
    assert all(lives.tokens(str(number)) == expected_tokens([5, 7, number], 0, 1000, 120) for number in range(count))
    lives.close()


def test_a_death_between_steps_is_nobodys(lives: Lives) -> None:
    lives.add("a", [5, 6, 7])
    for _ in range(5):
        lives.step()
        lives.die()
    assert CrashJournal(lives.fd).records == {}
    lives.finish()


def test_only_those_in_the_step_are_suspected(lives: Lives) -> None:
    for number in range(12):  # of which 8 run
        lives.add(str(number), [5, 6, number])
    for _ in range(2):
        lives.step()
        lives.die_in_step()
    assert {identity for identity, each in CrashJournal(lives.fd).records.items() if each.is_suspect} == set(
        range(1, 9)
    )
    lives.finish()
    assert CrashJournal(lives.fd).records == {}


OTHERS: dict[str, dict[str, Any]] = {
    "beams": {"sampling_params": SamplingParams(beam_width=3, n=1, max_tokens=40, temperature=0.0)},
    "embedding": {"sampling_params": SamplingParams(), "pooling": PoolingParams()},
    "long prompt": {"sampling_params": SamplingParams(seed=0, max_tokens=20)},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_nobody_waits_for_more_than_a_step_of_a_trial(lives: Lives, kind: str) -> None:
    lives.add("tried", [5 + index % 50 for index in range(200)], b"one", **OTHERS[kind])
    for _ in range(2):
        lives.step()
        lives.die_in_step()
    lives.add("other", [9, 8, 7], b"two", sampling_params=SamplingParams(seed=0, max_tokens=60))
    first = len(lives.steps)
    while "other" in lives.open and "tried" in lives.open:
        lives.step()
    steps = lives.steps[first:]
    assert steps.count(["tried"]) >= 3
    assert all(["other"] in pair for pair in itertools.pairwise(steps[: 2 * steps.count(["tried"])]))
    lives.finish()
    assert lives.errors == {}


def test_two_suspects_are_never_in_one_step_and_join_the_others_when_they_have_grown(lives: Lives) -> None:
    for number in range(2):
        lives.add(str(number), [5, 6, number])
    for _ in range(2):
        lives.step()
        lives.die_in_step()
    first = len(lives.steps)
    lives.finish()
    steps = lives.steps[first:]
    assert ["0"] in steps
    joined = steps.index(["0", "1"])
    assert all(len(step) == 1 for step in steps[:joined])
    assert ["0", "1"] in steps[joined + 1 :]


def test_a_request_that_is_aborted_during_its_trial_gives_all_back(lives: Lives) -> None:
    lives.add("a", [5, 6, 7])
    for _ in range(2):
        lives.step()
        lives.die_in_step()
    [request] = lives.engine.core._requests.of_client(b"client")
    lives.step()
    lives.engine.core._requests.finish(request, FinishReason.ABORT)
    lives.finish()
    assert CrashJournal(lives.fd).records == {}


def test_without_an_identity_there_is_no_trial(lives: Lives) -> None:
    for _ in range(5):
        lives.engine.core.receive(b"client", EngineCoreRequest("a", [1, 2], SamplingParams(seed=0, max_tokens=8)))
        lives.step()
        lives.die_in_step()
    assert CrashJournal(lives.fd).records == {}


def test_a_journal_that_cannot_be_used_is_rejected(lives: Lives) -> None:
    read = os.open(f"/proc/self/fd/{lives.fd}", os.O_RDONLY)
    with pytest.raises(ModelError, match=rf"crash_journal_fd={read}: .*; give a memfd that the engine inherits"):
        CrashJournal(read)
    os.close(read)


def test_a_tenant_whose_requests_kill_again_and_again_is_held_back(lives: Lives) -> None:
    """Its open requests and those of others go on, and so does it, some minutes after the first."""
    lives.add("own", [5, 6, 7], tenant="bad", sampling_params=SamplingParams(seed=0, max_tokens=60))
    lives.add("other", [5, 6, 8], tenant="good")
    for number in range(3):
        lives.add(str(number), [POISON, *range(20, 20 + DEADLY), number], tenant="bad")
        while str(number) in lives.open:
            lives.step()
    assert lives.num_deaths == 6
    assert "own" in lives.open
    lives.add("held back", [5, 6, 9], tenant="bad", error_kind=ErrorKind.OVERLOADED)
    lives.add("free", [5, 6, 9], tenant="good")
    lives.add("nameless", [5, 6, 9])
    lives.finish()
    assert "3 requests with this API key, or of this client, have killed the engine" in lives.errors["held back"]
    assert set(lives.errors) == {"0", "1", "2", "held back"}
    lives.engine.now += 601.0
    lives.add("later", [5, 6, 9], tenant="bad")
    lives.finish()
    assert "later" not in lives.errors


@pytest.mark.parametrize(("has_tokens", "num_deaths"), [(False, 2), (True, 3)])
def test_a_culprit_among_others_is_found_by_few_crashes_which_it_explains(
    lives: Lives, num_deaths: int, *, has_tokens: bool
) -> None:
    for number in range(6):
        lives.add(str(number), [5, 6, number])
    lives.add("guilty", [POISON, 7] if has_tokens else [POISON, *range(20, 20 + DEADLY)])
    lives.finish()
    assert set(lives.errors) == {"guilty"}
    assert lives.num_deaths == num_deaths
    assert lives.num_unexplained == 0


def test_kills_from_outside_convict_later_than_crashes(lives: Lives) -> None:
    lives.add("a", [5, 6, 7])
    for _ in range(2):
        lives.die_in_step()
    lives.finish()
    assert lives.errors == {}
