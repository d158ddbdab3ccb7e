"""The process of a `schema_trial`: writes which schema it tries, and at the end the first one that is rejected."""

from __future__ import annotations

import sys

import msgspec

from quire.frontend.bounded_trial import begin_trial
from quire.frontend.text.chat.schema_trial import CPU_SECONDS, MEMORY_BYTES, Verdict
from quire.protocol.grammar.explanation import explained


def main() -> None:
    """Try the schemas, JSON texts in a list of JSON on standard input, in their order."""
    from llguidance import LLMatcher

    begin_trial(memory=MEMORY_BYTES, cpu_seconds=CPU_SECONDS)
    for index, schema in enumerate(msgspec.json.decode(sys.stdin.buffer.read(), type=list[str])):
        _write(Verdict(index, None))
        is_rejected, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_json_schema(schema))
        if is_rejected:
            _write(Verdict(index, explained(messages[0])))
            return
    _write(None)


def _write(verdict: Verdict | None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
