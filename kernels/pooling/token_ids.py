"""Ids of tokens by their text, as tokenizer.json or vocab.json lists them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from quire.kernels.errors import ModelError


class _VocabularyModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Added(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    model: _VocabularyModel
    added_tokens: list[_Added] = []


def token_ids_of(folder: Path, tokens: tuple[str, ...]) -> tuple[int, ...]:
    """Return the id of each token. Raises ModelError for one that the folder's tokenizer does not have."""
    vocabulary = _vocabulary(folder)
    missing = [token for token in tokens if vocabulary.get(token, -1) < 0]
    if missing:
        raise ModelError(f"{folder}: the tokenizer has no token {missing[0]!r}, which classifier_from_token names")
    return tuple(vocabulary[token] for token in tokens)


def _vocabulary(folder: Path) -> dict[str, int]:
    path = folder / "tokenizer.json"
    try:
        if not path.exists():
            path = folder / "vocab.json"
            return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
        tokenizer = msgspec.json.decode(path.read_bytes(), type=_Tokenizer)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; classifier_from_token needs the tokenizer") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as a tokenizer: {error}") from None
    vocab = tokenizer.model.vocab
    known = vocab if isinstance(vocab, dict) else {token: index for index, (token, _) in enumerate(vocab)}
    return known | {added.content: added.id for added in tokenizer.added_tokens}
