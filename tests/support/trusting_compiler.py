"""A compiler of grammars that compiles them in the process of the test."""

from __future__ import annotations

from quire.engine_core.grammar.compile_protocol import Trial
from quire.engine_core.grammar.grammar import Compilation
from quire.engine_core.grammar.matching import build_matcher
from quire.engine_core.grammar.text import grammar_source
from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.kernels.runner import Matcher


class TrustingCompiler:
    """Compiles what cannot crash; see `MatcherCompiler`."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer

    def start(self) -> None:
        """There is nothing to prepare."""

    def try_out(self, compilation: Compilation) -> Trial:
        return Trial(grammar_source(compilation.structured))

    def build(self, trial: Trial) -> Matcher:
        return build_matcher(self._tokenizer.get(), trial.source)

    def stop(self) -> None:
        """There is nothing to end."""
