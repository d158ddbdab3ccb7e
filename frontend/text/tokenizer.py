"""The tokenizer: text to token ids and back, with the `tokenizers` library."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from quire.frontend.text.fewest_tokens import FewestTokens
from quire.frontend.text.token_bytes import ByteRule, byte_rule
from quire.frontend.text.tokenizer_files import (
    TokenizerError,
    TokenizerMissingError,
    library_errors,
    load_backend,
    read_json,
    special_tokens,
)
from quire.frontend.text.tokenizer_trial import check_tokenizer


class Encoded(NamedTuple):
    """A text, or a pair of them, as token ids; `parts` is None for special tokens, else 0 or 1, the token's text."""

    token_ids: list[int]
    type_ids: list[int]
    parts: list[int | None]


class Tokenizer:
    """The tokenizer of a Hugging Face model folder: tokenizer.json, or vocab.json with merges.txt.

    Raises TokenizerError if the folder or a file of it is missing or broken, TokenizerMissingError (a TokenizerError)
    if the folder has no tokenizer.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = read_json(self.path, "tokenizer_config.json")
        self.backend = load_backend(self.path, self.config)
        self.special_tokens = special_tokens(self.path, self.config)
        added = self.backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._rule = byte_rule(_decoder_state(self.backend.decoder))
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        generation = read_json(self.path, "generation_config.json")
        model = read_json(self.path, "config.json")
        self.eos_token_ids = self._find_eos(generation, model)
        self.bos_token_id = self._find_bos(generation, model)

    def _find_eos(self, generation: dict[str, Any], model: dict[str, Any]) -> list[int]:
        """Return the ids that end a generation: the tokenizer's eos token and the model's list."""
        eos = self.token_id(self.special_tokens.get("eos_token"))
        listed = generation.get("eos_token_id")
        if listed is None:
            listed = model.get("eos_token_id")
        ids = ([] if eos is None else [eos]) + (listed if isinstance(listed, list) else [listed])
        return list(dict.fromkeys(token_id for token_id in ids if _is_token_id(token_id)))

    def _find_bos(self, generation: dict[str, Any], model: dict[str, Any]) -> int | None:
        named = self.token_id(self.special_tokens.get("bos_token"))
        candidates = [named, generation.get("bos_token_id"), model.get("bos_token_id")]
        return next((token_id for token_id in candidates if _is_token_id(token_id)), None)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones; the model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def byte_rule(self) -> ByteRule | None:
        """The rule by which tokens become bytes, None if they have no bytes of their own."""
        return self._rule

    def token_id(self, token: str | None) -> int | None:
        """Return the id of a token as the vocabulary writes it, or None if there is no such token."""
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens in the text become their ids.

        `add_special_tokens=False` omits the tokens that the tokenizer puts around a text (such as bos); a rendered
        chat template contains them already. A text that begins with bos gets no second one, which models were not
        trained for.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text, encoded on all cores. Meanwhile other threads run: the GIL is free."""
        for text in texts:
            _check_text(text)
        with library_errors(f"{self.path}: the text cannot be encoded by this tokenizer"):
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        if not (add_special_tokens and self.lead):
            return [encoding.ids for encoding in encodings]
        doubled = self.lead * 2
        return [ids[1:] if ids[:2] == doubled else ids for ids in (encoding.ids for encoding in encodings)]

    @functools.cached_property
    def lead(self) -> list[int]:
        """The bos token, if the tokenizer puts it before every text; else nothing."""
        if self.bos_token_id is None:
            return []
        with library_errors(f"{self.path}: the empty text cannot be encoded by this tokenizer"):
            (encoding,) = self.backend.encode_batch_fast([""], add_special_tokens=True)
        return [self.bos_token_id] if encoding.ids[:1] == [self.bos_token_id] else []

    def encode_parts(self, text: str, pair: str | None = None, add_special_tokens: bool = True) -> Encoded:
        """Return the tokens of a text or a pair, with the text and the type that each belongs to."""
        _check_text(text)
        texts: str | tuple[str, str] = text
        if pair is not None:
            _check_text(pair)
            texts = text, pair
        with library_errors(f"{self.path}: the text cannot be encoded by this tokenizer"):
            (encoding,) = self.backend.encode_batch_fast([texts], add_special_tokens=add_special_tokens)
        return Encoded(encoding.ids, encoding.type_ids, encoding.sequence_ids)

    @functools.cached_property
    def fewest_tokens(self) -> FewestTokens:
        """The bound by which a text is known to be too long before it is tokenized."""
        return FewestTokens(self.backend)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD; ids beyond the vocabulary are skipped.

        Meanwhile other threads run, which `decode` of the library does not let them.
        """
        try:
            (text,) = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # see library_errors, which would take time for each increment
            raise TokenizerError(f"token ids {list(ids)[:5]} ...: {error}; ids are whole numbers from 0") from error
        if "\ufffd" in text and self._rule is not None and self._rule.byte_fallback:
            return self._decode_bytes(ids, skip_special_tokens, self._rule)
        return text

    def _decode_bytes(self, ids: Iterable[int], skip_special_tokens: bool, rule: ByteRule) -> str:
        """Decode and keep valid characters where the library drops a whole run of byte tokens for one bad byte."""
        kept = (token_id for token_id in ids if not (skip_special_tokens and token_id in self.special_token_ids))
        text = b"".join(self.token_bytes(token_id) or b"" for token_id in kept).decode(errors=rule.utf8_errors)
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, rule.strip_left) :]

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, including a leading space; None if they are not known."""
        if self._rule is None:
            return None
        found = self._bytes.get(token_id)
        if found is None:
            token = self.backend.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if token is None else self._rule.to_bytes(token)
        return found

    def token_text(self, token_id: int) -> str:
        """Return the text of one token on its own, special or not; an incomplete character is U+FFFD."""
        found = self._texts.get(token_id)
        if found is None:
            piece = self.token_bytes(token_id)
            if piece is None or self._rule is None:
                found = self.decode([token_id], skip_special_tokens=False)
            else:
                found = piece.decode(errors=self._rule.utf8_errors)
            self._texts[token_id] = found
        return found


def _is_token_id(value: object) -> TypeGuard[int]:
    """Return True for what may be a token; some configs have -1 for none."""
    return type(value) is int and value >= 0


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """Load the tokenizer of a model folder; return None if it has none, so that only token ids are supported.

    Raises TokenizerError for every other problem.
    """
    check_tokenizer(path)
    try:
        return Tokenizer(path)
    except TokenizerMissingError:
        return None


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise TokenizerError(f"a text to encode must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text has a lone surrogate {text[error.start]!r} at character {error.start}, "
            "which is not valid in UTF-8; remove it"
        ) from error


def _decoder_state(decoder: Any) -> dict[str, Any] | None:
    """Return the decoder in the form of tokenizer.json."""
    if decoder is None:
        return None
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    return state
