"""Loading of the tokenizer files of a Hugging Face model folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers import decoders as backend_decoders

from quire.frontend.path_kind import what_is

GPT2_CLASSES = {"", "GPT2Tokenizer", "GPT2TokenizerFast"}
QWEN2_CLASSES = {"Qwen2Tokenizer", "Qwen2TokenizerFast"}
LLAMA_CLASSES = {"LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"}
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
NEEDED = "tokenizer.json, or vocab.json with merges.txt"


_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]

T = TypeVar("T")


class _AddedToken(msgspec.Struct):
    """An entry of `added_tokens_decoder`."""

    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    special: bool = False
    normalized: bool | None = None


class _TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json that building a tokenizer depends on."""

    tokenizer_class: str | None = None
    add_prefix_space: bool | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    added_tokens_decoder: dict[_TokenId, _AddedToken] = {}


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or text cannot be encoded; the message says what to do."""


class TokenizerMissingError(TokenizerError):
    """The model folder exists but has no tokenizer, so that only token ids are supported."""


def has_file(path: Path) -> bool:
    """Return True if a file of a model is there. Raises TokenizerError for a pipe and the like, which could wait for
    ever when it is opened.
    """
    if path.exists() and not path.is_file():
        raise TokenizerError(f"{path} {what_is(path)}, and the files of a model must be regular ones")
    return path.exists()


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in `folder/name`, or an empty one if there is no such file."""
    path = folder / name
    if not has_file(path):
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}; restore the file from the model's source") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def typed(folder: Path, name: str, fields: dict[str, Any], kind: type[T]) -> T:
    """Return the fields of the file `name` as `kind`. Raises TokenizerError that names one of another type."""
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise TokenizerError(f"{folder / name}: {error}; restore the file from the model's source") from error


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Raise TokenizerError for what the library raises: plain Exception for everything, or its own BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{what}: {error}") from error


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
    """Load the tokenizer of `folder`, without truncation and padding; `config` is its tokenizer_config.json."""
    if not folder.is_dir():
        raise TokenizerError(f"{folder} {what_is(folder)}; a tokenizer is a folder with {NEEDED}")
    fields = typed(folder, "tokenizer_config.json", config, _TokenizerConfig)
    if has_file(folder / "tokenizer.json"):
        backend = _load_fast(folder / "tokenizer.json")
    elif has_file(folder / "vocab.json") and has_file(folder / "merges.txt"):
        backend = _load_gpt2(folder, fields)
    else:
        raise TokenizerMissingError(_missing(folder))
    backend.no_truncation()
    backend.no_padding()
    named = special_tokens(folder, config)
    known = [text for text in dict.fromkeys(named.values()) if backend.token_to_id(text) is not None]
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    with library_errors(f"the special tokens of {folder} cannot be added"):
        backend.add_special_tokens([AddedToken(text, normalized=False) for text in known if text not in marked])
    _apply_bos_and_eos(backend, folder, fields, named)
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
    with library_errors(f"{path} cannot be loaded, restore the file from the model's source"):
        return Backend.from_file(str(path))


def _load_gpt2(folder: Path, config: _TokenizerConfig) -> Backend:
    """Build byte-level BPE from vocab.json and merges.txt like the tokenizer classes of GPT-2 and Qwen2."""
    kind = config.tokenizer_class or ""
    if kind not in GPT2_CLASSES | QWEN2_CLASSES:
        allowed = ", ".join(sorted((GPT2_CLASSES | QWEN2_CLASSES) - {""}))
        raise TokenizerError(
            f"{folder} has vocab.json and merges.txt but no tokenizer.json, and tokenizer_class={kind}; without "
            f"tokenizer.json only {allowed} are known; save the tokenizer once with transformers to get tokenizer.json"
        )
    with library_errors(f"vocab.json and merges.txt in {folder} cannot be loaded"):
        backend = Backend(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    add_space = bool(config.add_prefix_space)
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


def _add_tokens(backend: Backend, folder: Path, config: _TokenizerConfig) -> None:
    """Add the tokens of added_tokens_decoder in tokenizer_config.json or of added_tokens.json, by ascending id."""
    added = typed(folder, "added_tokens.json", read_json(folder, "added_tokens.json"), dict[str, _TokenId])
    by_id = {token_id: AddedToken(text, special=False) for text, token_id in added.items()}
    for token_id, token in config.added_tokens_decoder.items():
        by_id[token_id] = AddedToken(
            token.content, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word,
            normalized=not token.special if token.normalized is None else token.normalized, special=token.special,
        )  # fmt: skip
    for token_id, each in sorted(by_id.items()):
        with library_errors(f"{folder}: added token {each.content!r}"):
            backend.add_tokens([each])
        if backend.token_to_id(each.content) != token_id:
            raise TokenizerError(
                f"{folder}: added token {each.content!r} has id {token_id}, but the vocabulary gives it "
                f"{backend.token_to_id(each.content)}; the tokenizer files do not match each other"
            )


def _apply_bos_and_eos(backend: Backend, folder: Path, config: _TokenizerConfig, named: dict[str, str]) -> None:
    """Let add_bos_token and add_eos_token of a Llama tokenizer override tokenizer.json, as transformers does."""
    if config.tokenizer_class not in LLAMA_CLASSES or config.add_bos_token is config.add_eos_token is None:
        return
    bos, eos = named.get("bos_token"), named.get("eos_token")
    before = [bos] if config.add_bos_token is not False and bos else []
    after = [eos] if config.add_eos_token and eos else []
    ids = [(text, backend.token_to_id(text)) for text in dict.fromkeys([*before, *after])]
    if missing := [text for text, token_id in ids if token_id is None]:
        raise TokenizerError(
            f"{folder}: the token {missing[0]!r}, which add_bos_token or add_eos_token puts around every text, is not "
            "in the vocabulary; restore the tokenizer files from the model's source"
        )
    with library_errors(f"{folder}: bos_token or eos_token"):
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B:1", *after], special_tokens=ids
        )
