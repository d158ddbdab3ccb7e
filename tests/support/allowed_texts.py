"""The texts that llguidance allows for a grammar."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

_TOKENIZER = LLTokenizer("byte")


class AllowedTexts:
    """The texts of a grammar that llguidance has built, as a container. Raises ValueError if the grammar is wrong."""

    def __init__(self, grammar: str) -> None:
        self._matcher = LLMatcher(_TOKENIZER, grammar)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error())

    def __contains__(self, text: str) -> bool:
        matcher = self._matcher.deep_copy()
        tokens = _TOKENIZER.tokenize_bytes(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def check(self, right: list[str], wrong: list[str]) -> None:
        """Fail unless all texts of `right` are allowed, and none of `wrong`."""
        assert [text for text in right if text not in self] == []
        assert [text for text in wrong if text in self] == []
