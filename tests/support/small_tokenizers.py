"""Trains small tokenizers of each kind for the tests, in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    'Once upon a time there was a fox, and the fox said: "I\'ll eat you!" — naïve façade, œuvre, Ελληνικά, русский.',
    "日本語のテキスト 🙂🙃 👩‍👩‍👧‍👦 🇫🇷 and numbers 12345 67890\n\n\tdef f(x):\n    return x ** 2\r\n",
] * 8
SPECIAL = ["<|begin|>", "<|end|>", "<|user|>"]


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """Return byte-level BPE as GPT-2, Llama 3 and Qwen have it; `<tool>` is added but not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B:1", special_tokens=[("<|begin|>", begin)]
    )
    return tokenizer


def sentencepiece(vocab_size: int = 500) -> Tokenizer:
    """Return BPE with byte fallback as Llama 2 has it: spaces are written U+2581, one is put before every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, limit_alphabet=60, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in TEXTS], trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(state))


def word_piece() -> Tokenizer:
    """Return WordPiece, whose decoder puts spaces between tokens, so that a token alone has no bytes."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "word_piece": word_piece}


def write(folder: Path, kind: str, **config: Any) -> Path:
    """Write a model folder that has only a tokenizer; `config` goes to tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
