"""The incremental detokenizer: text of a request while its tokens arrive, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from quire.frontend.text.stop_strings import StopScanner
from quire.frontend.text.token_stream import open_stream
from quire.frontend.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text that follows a prompt, in whole characters; each token costs time proportional to its own length.

    Text that may begin a stop string is held back until it is known not to. A stop string counts
    only if a token after the `min_tokens`-th completes it; the text ends before it, or after it with
    `include_stop_str_in_output`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] | None = None,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._stream = open_stream(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._scanner = StopScanner(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._finished = False
        self._text = ""
        self._not_in_text: list[str] = []
        self._not_handed_out: list[str] = []
        self._held = ""
        self.num_tokens = 0
        self.stop_reason: str | None = None

    @property
    def text(self) -> str:
        """The text so far that is certain."""
        if self._not_in_text:
            self._text += "".join(self._not_in_text)
            self._not_in_text.clear()
        return self._text

    def delta(self) -> str:
        """Return the text added since the last call."""
        new = "".join(self._not_handed_out)
        self._not_handed_out.clear()
        return new

    def update(self, new_token_ids: Sequence[int], stop_token: bool = False) -> str | None:
        """Take the next tokens; return the stop string that ends the text with them, or None.

        Tokens after a stop string are ignored. `num_tokens` counts all tokens up to the one that completes it.
        With `stop_token=True` the last token is a stop token: it is counted, but contributes no text
        (unless `include_stop_str_in_output`).
        """
        silent = len(new_token_ids) - 1 if stop_token and not self._include_stop else -1
        for index, token_id in enumerate(new_token_ids):
            if self._finished:
                break
            self.num_tokens += 1
            if index != silent:
                self._append(self._stream.push(token_id))
        return self.stop_reason

    def finish(self) -> str | None:
        """End the text: flush what was held back, with U+FFFD for an incomplete character.

        Returns the stop string that ended the text, or None.
        """
        if not self._finished:
            self._append(self._stream.finish())
            self._finished = True
            self._emit(self._held)
            self._held = ""
        return self.stop_reason

    def _append(self, piece: str) -> None:
        if self._scanner is None:
            self._emit(piece)
            return
        hit = self._scanner.scan(piece, ignore_hits=self.num_tokens <= self._min_tokens and self._min_tokens > 0)
        known = self._held + piece
        if hit is None:
            num_held = 0 if self._include_stop else self._scanner.num_held
            self._emit(known[: len(known) - num_held])
            self._held = known[len(known) - num_held :]
            return
        end = len(self._held) + hit.end
        self._emit(known[: end if self._include_stop else end - len(hit.stop)])
        self._held = ""
        self._finished = True
        self.stop_reason = hit.stop

    def _emit(self, text: str) -> None:
        if text:
            self._not_in_text.append(text)
            self._not_handed_out.append(text)
