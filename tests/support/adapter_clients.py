"""Clients whose requests name adapters."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from engine_process import DealerClient

from quire.protocol.messages import EngineCoreOutput, EngineCoreRequest, SamplingParams

LENGTH = 24

Folders = dict[str, tuple[Path, Any]]
"""By kind, the folder of an adapter and the changed model."""


def prompt(seed: int, length: int = 70) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(5, 200) for _ in range(length)]


class Client(DealerClient):
    """A client whose requests name adapters."""

    def ask(self, request_id: str, tokens: list[int], adapter: str = "", cache_salt: str = "", **fields: Any) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=LENGTH, logprobs=0, **fields)
        self.send(EngineCoreRequest(request_id, tokens, params, adapter=adapter, cache_salt=cache_salt))

    def answer(self, request_id: str) -> tuple[list[int], list[float]]:
        """Return the tokens and their log probabilities, once all are there."""
        end = self.end(request_id)
        assert end.error is None, end.error
        outputs: list[EngineCoreOutput] = self.outputs(request_id)
        tokens = [token for output in outputs for token in output.new_token_ids]
        return tokens, [entry.logprobs[0] for output in outputs for entry in output.new_logprobs or ()]

    def scored(self, request_id: str) -> tuple[list[int], list[float], list[float]]:
        """Return the tokens, their log probabilities, and those of the prompt's tokens, if they were asked for."""
        answer = self.answer(request_id)
        entries = [each for output in self.outputs(request_id) for each in output.new_prompt_logprobs or ()]
        return *answer, [each.logprobs[0] for each in entries if each is not None]

    def alone_and_mixed(self, cases: list[tuple[int, str]], **fields: Any) -> tuple[list[Any], list[Any]]:
        """Return what `scored` does of requests, each with a prompt's seed and an adapter: one after the other, and all
        at a time."""
        alone = []
        for number, (seed, adapter) in enumerate(cases):
            self.ask(f"alone {number}", prompt(seed), adapter, **fields)
            alone.append(self.scored(f"alone {number}"))
        for number, (seed, adapter) in enumerate(cases):
            self.ask(f"mixed {number}", prompt(seed), adapter, **fields)
        return alone, [self.scored(f"mixed {number}") for number in range(len(cases))]


def flags_of(*folders: Path) -> list[str]:
    return [f"--lora-modules={number}={folder}" for number, folder in enumerate(folders)]
