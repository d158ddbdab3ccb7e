"""Batches that are run with and without grammars, in turns."""

from __future__ import annotations

import statistics
from typing import Any

from quire.frontend import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.frontend.evaluation.replay.interference import StealTime

_RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0},
        "description": {"type": "string", "maxLength": 20},
        "is_available": {"type": "boolean"},
    },
    "required": ["identifier", "description", "is_available"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, StructuredOutputsParams] = {
    "strings": StructuredOutputsParams(json={"type": "array", "items": {"type": "string"}, "minItems": 1000}),
    "counted": StructuredOutputsParams(
        json={"type": "array", "items": {"type": "string", "minLength": 4000}, "minItems": 1000}
    ),
    "records": StructuredOutputsParams(
        json={"type": "array", "items": _RECORD, "minItems": 1000}, disable_any_whitespace=True
    ),
    "text": StructuredOutputsParams(regex=r"([A-Z][a-z]{0,12}( [a-z]{1,12}){1,9}[.] ){1000,}"),
}


def seconds_a_token(outputs: list[RequestOutput]) -> float:
    """The median of the mean times between tokens of requests."""
    means = []
    for output in outputs:
        metrics, count = output.metrics, len(output.outputs[0].token_ids)
        assert metrics.first_token_time is not None
        assert metrics.last_token_time is not None
        means.append((metrics.last_token_time - metrics.first_token_time) / (count - 1))
    return statistics.median(means)


class Mix:
    """`free` requests, and `ruled` ones that a grammar rules in every second run."""

    def __init__(self, llm: LLM, grammar: str, free: int, ruled: int, tokens: int) -> None:
        self._llm, self._grammar, self._free, self._ruled = llm, GRAMMARS[grammar], free, ruled
        self._tokens = tokens
        self._seconds: dict[str, list[tuple[float, float]]] = {"free": [], "ruled": []}  # without and with the grammar
        self.num_turns = 0
        self._num_begun = 0
        self._num_stolen = 0
        self.name = f"{free:2} free and {ruled:2} ruled by {grammar}"

    def turn(self, most_stolen: float) -> None:
        """Runs the batch both ways. It does not count if others had a larger share of the CPU time meanwhile."""
        order = (None, self._grammar) if self.num_turns % 2 else (self._grammar, None)
        self._num_begun += 1  # each turn has texts of its own
        stolen = StealTime()
        found = {grammar is not None: self._run(grammar) for grammar in order}
        if (stolen.share or 0.0) > most_stolen:
            self._num_stolen += 1
            return
        self.num_turns += 1
        for name, pairs in self._seconds.items():
            if found[True][name]:
                pairs.append((seconds_a_token(found[False][name]), seconds_a_token(found[True][name])))

    def report(self) -> str:
        """What the grammar costs: the median of the ratios of the turns, and the ratio of the best."""
        told = [self._costs(name, pairs) for name, pairs in self._seconds.items() if pairs]
        turns = f"{self.num_turns} turns, {self._num_stolen} stolen from"
        return f"{self.name:34} {', '.join(told) or 'nothing to tell'}; {turns}"

    @staticmethod
    def _costs(name: str, pairs: list[tuple[float, float]]) -> str:
        median = statistics.median(ruled / free for free, ruled in pairs)
        best = min(ruled for _, ruled in pairs) / min(free for free, _ in pairs)
        return f"{name} {median - 1:+6.1%} (best {best - 1:+6.1%})"

    def _run(self, grammar: StructuredOutputsParams | None) -> dict[str, list[RequestOutput]]:
        common: dict[str, Any] = {"max_tokens": self._tokens, "ignore_eos": True}
        first = 100 * self._num_begun
        free = [SamplingParams(seed=first + row, **common) for row in range(self._free)]
        ruled = [SamplingParams(seed=first + row, structured_outputs=grammar, **common) for row in range(self._ruled)]
        prompts = [[10 + row, 300, 301] for row in range(self._free + self._ruled)]
        outputs = self._llm.generate(prompts, free + ruled, use_tqdm=False)
        return {"free": outputs[: self._free], "ruled": outputs[self._free :]}
