"""Batches that run with and without a grammar, in turns."""

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
    """Return the median over the requests of their mean inter-token latency."""
    means = []
    for output in outputs:
        metrics, count = output.metrics, len(output.outputs[0].token_ids)
        assert metrics.first_token_time is not None
        assert metrics.last_token_time is not None
        means.append((metrics.last_token_time - metrics.first_token_time) / (count - 1))
    return statistics.median(means)


class GrammarMix:
    """A batch of `free` requests, and `constrained` ones that a grammar constrains in every second run."""

    def __init__(self, llm: LLM, grammar: str, free: int, constrained: int, tokens: int) -> None:
        self._llm, self._grammar, self._free, self._constrained = llm, GRAMMARS[grammar], free, constrained
        self._tokens = tokens
        self._seconds: dict[str, list[tuple[float, float]]] = {"free": [], "constrained": []}  # without, with it
        self.num_turns = 0
        self._num_begun = 0
        self._num_invalid = 0
        self.name = f"{free:2} free and {constrained:2} constrained by {grammar}"

    def turn(self, max_steal: float) -> None:
        """Run the batch both ways. The turn is invalid if the share of steal time exceeds `max_steal`."""
        order = (None, self._grammar) if self.num_turns % 2 else (self._grammar, None)
        self._num_begun += 1  # each turn has texts of its own
        steal = StealTime()
        found = {grammar is not None: self._run(grammar) for grammar in order}
        if (steal.share or 0.0) > max_steal:
            self._num_invalid += 1
            return
        self.num_turns += 1
        for name, pairs in self._seconds.items():
            if found[True][name]:
                pairs.append((seconds_a_token(found[False][name]), seconds_a_token(found[True][name])))

    def report(self) -> str:
        """Return the cost of the grammar: the median of the ratios of the turns, and the ratio of the best."""
        costs = [self._costs(name, pairs) for name, pairs in self._seconds.items() if pairs]
        turns = f"{self.num_turns} turns, {self._num_invalid} invalid for steal time"
        return f"{self.name:34} {', '.join(costs) or 'no result'}; {turns}"

    @staticmethod
    def _costs(name: str, pairs: list[tuple[float, float]]) -> str:
        median = statistics.median(constrained / free for free, constrained in pairs)
        best = min(constrained for _, constrained in pairs) / min(free for free, _ in pairs)
        return f"{name} {median - 1:+6.1%} (best {best - 1:+6.1%})"

    def _run(self, grammar: StructuredOutputsParams | None) -> dict[str, list[RequestOutput]]:
        common: dict[str, Any] = {"max_tokens": self._tokens, "ignore_eos": True}
        first = 100 * self._num_begun
        free = [SamplingParams(seed=first + row, **common) for row in range(self._free)]
        constrained = [
            SamplingParams(seed=first + row, structured_outputs=grammar, **common) for row in range(self._constrained)
        ]
        prompts = [[10 + row, 300, 301] for row in range(self._free + self._constrained)]
        outputs = self._llm.generate(prompts, free + constrained, use_tqdm=False)
        return {"free": outputs[: self._free], "constrained": outputs[self._free :]}
