"""The process of a tokenizer's trial, see `tokenizer_trial`; its arguments are the parent and the folder."""

from __future__ import annotations

import sys
from pathlib import Path

from quire.frontend.bounded_trial import begin_trial
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.text.tokenizer_files import TokenizerError
from quire.frontend.text.tokenizer_growth import check_growth
from quire.frontend.text.tokenizer_trial import CPU_SECONDS, REFUSED, memory_limit

_SAMPLE = (
    "The quick brown fox jumps over 13 lazy dogs.\r\n\tdef f(x): return {'a': [x, 1.5e-3]}  # \\0 ~`!@$%^&*|<>?/\n"
    "Größe, naïve œuvre; Привет, мир! 你好,世界。 こんにちは 안녕하세요 שלום مرحبا नमस्ते ﷺ ﬃ Å 👩‍👩‍👧 "
)


def main() -> int:
    """Try the tokenizer of the folder that the command line names after the parent; return the exit status."""
    folder = Path(sys.argv[2])
    begin_trial(memory=memory_limit(folder), cpu_seconds=CPU_SECONDS)
    try:
        check_growth(folder)
        _use(Tokenizer(folder))
    except (TokenizerError, MemoryError) as error:
        print(str(error) or "the tokenizer takes too much memory")
        return REFUSED
    return 0


def _use(tokenizer: Tokenizer) -> None:
    _ = tokenizer.fewest_tokens
    token_ids = tokenizer.encode(_SAMPLE * 8)
    tokenizer.decode(token_ids)


if __name__ == "__main__":
    sys.exit(main())
