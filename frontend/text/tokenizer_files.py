"""Loading of the tokenizer files of a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers import decoders as backend_decoders

GPT2_CLASSES = {"", "GPT2Tokenizer", "GPT2TokenizerFast"}
QWEN2_CLASSES = {"Qwen2Tokenizer", "Qwen2TokenizerFast"}
LLAMA_CLASSES = {"LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"}
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
NEEDED = "tokenizer.json, or vocab.json with merges.txt"


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or text cannot be encoded; the message says what to do."""


class TokenizerMissingError(TokenizerError):
    """The model folder exists but has no tokenizer, so that only token ids are supported."""


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in `folder/name`, or an empty one if there is no such file."""
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}; restore the file from the model's source") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def token_content(value: object) -> str | None:
    """Return the text of a token that a config file gives as a string or an AddedToken object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens (`bos_token`, `eos_token`, ...); tokenizer_config.json overrides the map."""
    named = {**read_json(folder, "special_tokens_map.json"), **{key: config[key] for key in config if config[key]}}
    found = {name: token_content(named.get(name)) for name in SPECIAL_TOKEN_NAMES}
    return {name: text for name, text in found.items() if text is not None}


def load_backend(folder: Path, config: dict[str, Any]) -> Backend:
    """Load the tokenizer of `folder`, without truncation and padding."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise TokenizerError(f"model folder {folder} {what}; give a folder with config.json, weights and {NEEDED}")
    if (folder / "tokenizer.json").is_file():
        backend = _load_fast(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _load_gpt2(folder, config)
    else:
        raise TokenizerMissingError(_missing(folder))
    backend.no_truncation()
    backend.no_padding()
    named = special_tokens(folder, config)
    known = [text for text in dict.fromkeys(named.values()) if backend.token_to_id(text) is not None]
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in known if text not in marked])
    _apply_bos_and_eos(backend, config, named)
    return backend


def _missing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "nothing"
    advice = f"add {NEEDED} from the model's source, or pass token ids instead of text"
    if {"tokenizer.model", "tekken.json"} & set(names) or any(name.endswith(".tiktoken") for name in names):
        advice = (
            "convert it once, with transformers installed, by AutoTokenizer.from_pretrained(folder)"
            ".save_pretrained(folder), or pass token ids instead of text"
        )
    return f"model folder {folder} has no {NEEDED}; it holds {listed}; {advice}"


def _load_fast(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for everything
        raise TokenizerError(f"{path} cannot be loaded: {error}; restore the file from the model's source") from error


def _load_gpt2(folder: Path, config: dict[str, Any]) -> Backend:
    """Build byte-level BPE from vocab.json and merges.txt like the tokenizer classes of GPT-2 and Qwen2."""
    kind = str(config.get("tokenizer_class") or "")
    if kind not in GPT2_CLASSES | QWEN2_CLASSES:
        allowed = ", ".join(sorted((GPT2_CLASSES | QWEN2_CLASSES) - {""}))
        raise TokenizerError(
            f"{folder} has vocab.json and merges.txt but no tokenizer.json, and tokenizer_class={kind}; without "
            f"tokenizer.json only {allowed} are known; save the tokenizer once with transformers to get tokenizer.json"
        )
    try:
        backend = Backend(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # the library raises plain Exception for everything
        raise TokenizerError(f"vocab.json and merges.txt in {folder} cannot be loaded: {error}") from error
    add_space = bool(config.get("add_prefix_space", False))
    if kind in QWEN2_CLASSES:
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=False),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_space)
    backend.decoder = backend_decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    _add_tokens(backend, folder, config)
    return backend


def _add_tokens(backend: Backend, folder: Path, config: dict[str, Any]) -> None:
    """Add the tokens of added_tokens_decoder in tokenizer_config.json or of added_tokens.json, by ascending id."""
    by_id: dict[int, AddedToken] = {}
    for text, token_id in read_json(folder, "added_tokens.json").items():
        by_id[int(token_id)] = AddedToken(text, special=False)
    for token_id, fields in config.get("added_tokens_decoder", {}).items():
        options = {key: bool(fields.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "special")}
        normalized = bool(fields.get("normalized", not options["special"]))
        by_id[int(token_id)] = AddedToken(fields["content"], normalized=normalized, **options)
    for token_id, token in sorted(by_id.items()):
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise TokenizerError(
                f"{folder}: added token {token.content!r} has id {token_id}, but the vocabulary gives it "
                f"{backend.token_to_id(token.content)}; the tokenizer files do not match each other"
            )


def _apply_bos_and_eos(backend: Backend, config: dict[str, Any], named: dict[str, str]) -> None:
    """Let add_bos_token and add_eos_token of a Llama tokenizer override tokenizer.json, as transformers does."""
    if config.get("tokenizer_class") not in LLAMA_CLASSES:
        return
    if not any(isinstance(config.get(key), bool) for key in ("add_bos_token", "add_eos_token")):
        return
    bos, eos = named.get("bos_token"), named.get("eos_token")
    before = [bos] if config.get("add_bos_token", True) and bos else []
    after = [eos] if config.get("add_eos_token", False) and eos else []
    ids = [(text, backend.token_to_id(text)) for text in dict.fromkeys([*before, *after])]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B:1", *after], special_tokens=ids
    )
