"""The two halves of a compilation: from what a client gave to the text for llguidance, and from that to a matcher."""

from __future__ import annotations

from quire.engine_core.grammar.text import grammar_source
from quire.kernels._native import Matcher, Vocabulary
from quire.protocol.messages import StructuredOutputs

GrammarSource = tuple[str, str]
"""Kind and text of a grammar for `Matcher`."""


def build_matcher(vocabulary: Vocabulary, source: GrammarSource) -> Matcher:
    """Compile a source. Raises ValueError if it is wrong, or allows no text at all."""
    matcher = Matcher(vocabulary, *source)
    if (words := matcher.error) is None and not matcher.allows_any():
        words = matcher.error or "NoExtension"
    if words is not None:
        raise ValueError("it allows no text" if words.startswith("NoExtension") else words)
    return matcher


def compile_matcher(vocabulary: Vocabulary, structured: StructuredOutputs) -> Matcher:
    """Compile a grammar that is trusted. Raises ValueError as the two halves do."""
    return build_matcher(vocabulary, grammar_source(structured))
