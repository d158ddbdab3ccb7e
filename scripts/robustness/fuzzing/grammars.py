"""Target `grammars`: grammars of all dialects by structure, as `grammar_shapes` makes them.

An input is a dialect, a shape, a number of definitions and a seed, as JSON. Whatever it is, the compiler answers with a
matcher that can be followed, or with an error, and this process lives.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.target import LONGEST_MESSAGE
from grammar_shapes import DIALECTS, SHAPES, shaped

from quire.engine_core.grammar.compiler import GrammarCompiler
from quire.engine_core.grammar.grammar import Compilation
from quire.engine_core.grammar.text import grammar_text
from quire.engine_core.grammar.tokenizer import GrammarTokenizer
from quire.engine_core.validation import MAX_GRAMMAR
from quire.frontend.engine_args import DEMO_MODEL
from quire.kernels.runner import Constraint, Matcher

_SECONDS = 1.0  # of CPU time
_MAX_SIZE = 1 << 15  # definitions
_FOLLOWED = 12  # tokens


class GrammarShapes:
    """No grammar ends the process that wants it compiled, or takes longer than is allowed."""

    words = (*DIALECTS, *SHAPES)

    def __init__(self, _folder: Path) -> None:
        tokenizer = GrammarTokenizer(DEMO_MODEL)
        self._vocab_size = tokenizer.get().num_tokens
        self._compiler = GrammarCompiler(tokenizer, seconds=_SECONDS)
        weakref.finalize(self, self._compiler.stop)

    def seeds(self) -> Iterator[bytes]:
        """See Target."""
        for dialect in DIALECTS:
            for size in (3, 3000):
                yield _encode(dialect, "chain", size, 0)
        for shape in SHAPES:
            yield _encode("lark choice", shape, 300, 1)
            yield _encode("properties", shape, 100, 1)

    def test(self, data: bytes) -> None:
        """See Target."""
        try:
            structured = shaped(*_decode(data))
        except ValueError:
            return
        if len(grammar_text(structured)) > MAX_GRAMMAR:
            return
        try:
            matcher = self._compiler.build(self._compiler.try_out(Compilation(structured)))
        except ValueError as error:
            if not 0 < len(str(error)) <= LONGEST_MESSAGE:
                raise AssertionError("the error has no bounds") from error
        else:
            self._follow(matcher)

    def _follow(self, matcher: Matcher) -> None:
        """Follow it on this thread, whose stack is as large as those of the engine's that do so."""
        random, constraint = Random(1), Constraint(matcher, self._vocab_size, [])
        for _ in range(_FOLLOWED):
            if constraint.has_ended:
                return
            try:
                mask = constraint.mask
            except RuntimeError:  # no token leads on from here, which ends a request with an error
                if constraint.error is None:
                    raise
                return
            constraint.follow(random.choice(mask.token_ids))

    def mutate(self, data: bytes, random: Random) -> bytes:
        """See Target."""
        dialect, shape, size, seed = _decode(data)
        match random.randrange(4):
            case 0:
                dialect = random.choice(DIALECTS)
            case 1:
                shape = random.choice(list(SHAPES))
            case 2:
                size = int(_MAX_SIZE ** random.random())
            case _:
                seed = random.randrange(1 << 16)
        return _encode(dialect, shape, size, seed)


def _encode(dialect: str, shape: str, size: int, seed: int) -> bytes:
    return json.dumps([dialect, shape, size, seed]).encode()


def _decode(data: bytes) -> tuple[str, str, int, int]:
    """Return what an input says. Raises ValueError if it says nothing."""
    value: Any = json.loads(data)
    match value:
        case [str(dialect), str(shape), int(size), int(seed)] if dialect in DIALECTS and shape in SHAPES:
            return dialect, shape, min(max(size, 1), _MAX_SIZE), seed
    raise ValueError("not a grammar's shape")
