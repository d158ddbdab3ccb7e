"""The places of tokens in the text that they are decoded to."""

from __future__ import annotations

from collections.abc import Sequence

from quire.frontend.text.detokenizer import open_stream
from quire.frontend.text.tokenizer import Tokenizer


class TextOffsets:
    """The place of each token in a text that tokens are decoded to one after the other, in characters.

    Tokens that make a character together have its place. `begin`: that of the first token, which follows the tokens
    `before`. The text has no special tokens with `skip_special_tokens`, and no text at all without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        before: Sequence[int] = (),
        begin: int = 0,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._next = begin
        self._stream = None if tokenizer is None else open_stream(
            tokenizer,
            before,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )  # fmt: skip

    def place(self, token_id: int) -> int:
        """Return the place of the next token."""
        place = self._next
        if self._stream is not None:
            self._next += len(self._stream.push(token_id))
        return place


class PromptOffsets(TextOffsets):
    """The place of each token in a prompt: in the text as it was given, or else as all tokens are decoded to it.

    Special tokens that the tokenizer has put around a text are not in it.
    """

    def __init__(self, tokenizer: Tokenizer | None, text: str | None) -> None:
        super().__init__(tokenizer, skip_special_tokens=False)
        self._tokenizer = tokenizer
        self._text = text

    def place(self, token_id: int) -> int:
        """Return the place of the next token."""
        return self._next if self._is_hidden(token_id) else super().place(token_id)

    def _is_hidden(self, token_id: int) -> bool:
        if self._text is None or self._tokenizer is None or token_id not in self._tokenizer.special_token_ids:
            return False
        return not self._text.startswith(self._tokenizer.token_text(token_id), self._next)
