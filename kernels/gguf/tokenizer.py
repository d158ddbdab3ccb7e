"""The tokenizer in the metadata of a GGUF file, as the tokenizer.json and tokenizer_config.json of a model folder.

`tokenizer.ggml.model` says which kind it is: `gpt2`, byte-level BPE with a pre-tokenizer (`pre_tokenizers.py`), or
`llama`, SentencePiece's BPE with byte fallback, which `gemma4` has by its merges and without a space before a text, or
that of an encoder (`encoder_tokenizers.py`). The format loses which
white space added tokens take, and whatever a tokenizer puts around a text besides bos and eos, such as GLM-4's
`[gMASK]<sop>`, which its chat template has too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.kernels.gguf.bpe import byte_level_bpe, sentencepiece
from quire.kernels.gguf.encoder_tokenizers import adds_separator, unigram, word_pieces
from quire.kernels.gguf.pre_tokenizers import pre_tokenizer
from quire.kernels.gguf.vocabulary import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Component,
    Vocabulary,
    value,
)

SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format spells it so
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
"""Named tokens of tokenizer_config.json, and their keys in the metadata."""

_KINDS = {
    "gpt2": "byte-level BPE", "llama": "SentencePiece BPE", "bert": "WordPiece", "t5": "SentencePiece unigram",
    "gemma4": "SentencePiece BPE by merges",
}  # fmt: skip
_DEFAULT_IDS = {"llama": {"unk_token": 0, "bos_token": 1, "eos_token": 2}}
_ENCODERS = ("bert", "nomic-bert")
_NO_TOKEN = 2**32 - 1
_PHI3_KEEPS_SPACE = {"<unk>", "<s>", "<|endoftext|>"}


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, Component]:
    """Return the contents of tokenizer.json and tokenizer_config.json, by file name.

    `metadata` maps the keys of the file to str, int, float, bool or lists of them. Raises ValueError, in one line, for
    a kind of tokenizer that is not supported, and for keys that are missing or contradict each other.
    """
    kind = value(metadata, "tokenizer.ggml.model", str)
    if kind not in _KINDS:
        known = ", ".join(f"{name} ({what})" for name, what in _KINDS.items())
        raise ValueError(f"tokenizer.ggml.model is {kind[:40]!r}; supported are {known}")
    vocabulary = Vocabulary.read(metadata, kind)
    special = _special_tokens(metadata, vocabulary, _DEFAULT_IDS.get(kind, {}))
    components, adds_bos, adds_eos = _components(kind, metadata, vocabulary, special)
    ends = {
        "add_bos_token": _adds(metadata, "bos", special, adds_bos),
        "add_eos_token": _adds(metadata, "eos", special, adds_eos),
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, _takes_space(metadata, kind)),
        "post_processor": _post_processor(metadata, vocabulary, special, **ends),
        **components,
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
        **ends,
        **_chat_template(metadata),
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _components(
    kind: str, metadata: Mapping[str, Any], vocabulary: Vocabulary, special: dict[str, str]
) -> tuple[Component, bool, bool]:
    """Return the components of a kind of tokenizer, and whether bos and eos are added where the file does not say."""
    unk_token = special.get("unk_token")
    if kind in ("llama", "gemma4"):
        return sentencepiece(metadata, vocabulary, unk_token, prefix=kind == "llama"), True, False
    if kind == "bert":
        for name, other, text in (("bos_token", "cls_token", "[CLS]"), ("eos_token", "sep_token", "[SEP]")):
            token = special.get(name, special.get(other, text))
            if token in vocabulary.ids:
                special[name] = token
        return word_pieces(metadata, vocabulary, unk_token), True, True
    if kind == "t5":
        return unigram(metadata, vocabulary, unk_token), False, True
    words = pre_tokenizer(value(metadata, "tokenizer.ggml.pre", str))
    return byte_level_bpe(metadata, vocabulary, words), words.adds_bos, words.adds_eos


def _added_tokens(vocabulary: Vocabulary, takes_space: bool) -> list[Component]:
    """Return the tokens that are found in a text before it is split into words."""
    return [
        {
            "id": id_, "content": token, "single_word": False, "lstrip": False,
            "rstrip": takes_space and token not in _PHI3_KEEPS_SPACE,
            "normalized": False, "special": vocabulary.types[id_] != USER_DEFINED,
        }
        for token, id_ in vocabulary.ids.items()
        if vocabulary.types[id_] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip


def _takes_space(metadata: Mapping[str, Any], kind: str) -> bool:
    """Return True if added tokens take the white space after them, as those of Phi-3 and Phi-3.5 do."""
    return kind == "llama" and metadata.get("general.architecture") == "phi3"


def _special_tokens(metadata: Mapping[str, Any], vocabulary: Vocabulary, defaults: Mapping[str, int]) -> dict[str, str]:
    """Return the named tokens of tokenizer_config.json."""
    found = {}
    for name, key in SPECIAL_TOKENS.items():
        id_ = value(metadata, f"tokenizer.ggml.{key}", int, defaults.get(name, _NO_TOKEN))
        if id_ in (-1, _NO_TOKEN):
            continue
        if not 0 <= id_ < len(vocabulary.tokens):
            raise ValueError(f"tokenizer.ggml.{key} is {id_}, but there are {len(vocabulary.tokens)} tokens")
        found[name] = vocabulary.tokens[id_]
    return found


def _adds(metadata: Mapping[str, Any], name: str, special: Mapping[str, str], default: bool) -> bool:
    """Return True if the token `name` (bos or eos) is put around every text."""
    known = f"{name}_token" in special
    adds = value(metadata, f"tokenizer.ggml.add_{name}_token", bool, default and known)
    if adds and not known:
        raise ValueError(f"tokenizer.ggml.add_{name}_token is true, but tokenizer.ggml.{name}_token_id names no token")
    return adds


def _post_processor(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, special: Mapping[str, str], add_bos_token: bool,
    add_eos_token: bool,
) -> Component | None:  # fmt: skip
    """Return the component that puts bos before and eos after a text, None if it puts neither.

    In pairs, encoders have bos only before the first text; between the texts may be a separator besides eos.
    """
    before = [special["bos_token"]] if add_bos_token else []
    after = [special["eos_token"]] if add_eos_token else []
    if not before and not after:
        return None
    first = second = before
    type_id = 1
    if metadata.get("general.architecture") in _ENCODERS:
        separator = special.get("sep_token", *after) if after else ""
        second = [separator] if separator and adds_separator(metadata) else []
        type_id = int(value(metadata, "tokenizer.ggml.token_type_count", int, 2) > 1)

    def around(sequence: str, start: list[str], start_type: int, type_id: int) -> list[Component]:
        kinds: list[tuple[str, str, int]] = [("SpecialToken", token, start_type) for token in start]
        kinds += [("Sequence", sequence, type_id), *(("SpecialToken", token, type_id) for token in after)]
        return [{kind: {"id": name, "type_id": number}} for kind, name, number in kinds]

    used = {*before, *after, *second}
    tokens = {token: {"id": token, "ids": [vocabulary.ids[token]], "tokens": [token]} for token in used}
    single = around("A", first, 0, 0)
    return {
        "type": "TemplateProcessing", "single": single, "pair": single + around("B", second, type_id, type_id),
        "special_tokens": tokens,
    }  # fmt: skip


def _chat_template(metadata: Mapping[str, Any]) -> Component:
    """Return the field `chat_template` of tokenizer_config.json, if there is a template: a text, or all by name."""
    key = "tokenizer.chat_template"
    named = [(name.removeprefix(f"{key}."), name) for name in sorted(metadata) if name.startswith(f"{key}.")]
    main = [("default", key)] if key in metadata else []
    found = [{"name": name, "template": value(metadata, each, str)} for name, each in main + named]
    if not found:
        return {}
    return {"chat_template": found if named else found[0]["template"]}
