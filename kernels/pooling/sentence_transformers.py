"""The configuration that sentence-transformers keeps beside a checkpoint: modules.json and what it names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quire.kernels.errors import ModelError
from quire.kernels.pooling.heads import HeadLayer, HeadLinear, activation_of_head
from quire.kernels.weights.checkpoint import Checkpoint

_MOST_BYTES = 1 << 20  # of one of the files
_MODES = {
    "cls": "cls", "pooling_mode_cls_token": "cls",
    "mean": "mean", "pooling_mode_mean_tokens": "mean",
    "max": "max", "pooling_mode_max_tokens": "max",
    "lasttoken": "last", "pooling_mode_lasttoken": "last",
}  # fmt: skip
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Module(msgspec.Struct):
    """An entry of modules.json."""

    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rsplit(".", maxsplit=1)[-1]


class _Texts(msgspec.Struct):
    """The fields of config_sentence_transformers.json that matter."""

    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None


class _Transformer(msgspec.Struct):
    """The fields of sentence_bert_config.json that matter."""

    max_seq_length: _Size | None = None
    do_lower_case: bool = False


class _Dense(msgspec.Struct):
    """config.json of a Dense module."""

    in_features: _Size
    out_features: _Size
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"


class _LogitScore(msgspec.Struct):
    """config.json of a LogitScore module."""

    true_token_id: _TokenId
    false_token_id: _TokenId


@dataclass(frozen=True)
class SentenceTransformer:
    """Pooling of a checkpoint's hidden states into embeddings; `max_seq_length` None is the model's own."""

    pooling_type: str
    normalize: bool = False
    head: tuple[HeadLayer, ...] = ()
    includes_prompt: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    max_seq_length: int | None = None
    lowercase: bool = False


def max_seq_length(folder: Path) -> int | None:
    """Return the most tokens of a text, if the folder has a sentence-transformers configuration that says so."""
    if not (folder / "modules.json").exists():
        return None
    own: _Transformer = _read(folder / "sentence_bert_config.json", _Transformer)
    return own.max_seq_length


def scoring_tokens(folder: Path) -> tuple[int, int] | None:
    """Return the tokens whose logits score a pair, that for no and that for yes; None if the folder names none."""
    scores = [module for module in _modules_of(folder) if module.kind == "LogitScore"]
    if not scores:
        return None
    score: _LogitScore = _read(folder / scores[0].path / "config.json", _LogitScore)
    return score.false_token_id, score.true_token_id


def read_sentence_transformer(folder: Path, hidden_size: int) -> SentenceTransformer | None:
    """Return the configuration of a folder, None if it has no modules.json, or scores pairs by the logits of tokens.

    Raises ModelError for a module or a setting that is not supported.
    """
    if not (folder / "modules.json").exists() or scoring_tokens(folder) is not None:
        return None
    modules = _modules_of(folder)[1:]
    texts: _Texts = _read(folder / "config_sentence_transformers.json", _Texts)
    own: _Transformer = _read(folder / "sentence_bert_config.json", _Transformer)
    pooling, includes_prompt = "mean", True
    layers: list[HeadLayer] = []
    normalize, size = False, hidden_size
    for module in modules:
        where = folder / module.path
        if module.kind == "Pooling":
            pooling, includes_prompt = _pooling_of(where)
        elif module.kind == "Dense" and not normalize:
            layers.append(_dense_of(where, size))
            size = len(layers[-1].weight)
        elif module.kind == "Normalize":
            normalize = True
        elif module.kind != "Dropout":
            raise ModelError(
                f"{folder / 'modules.json'}: the module {module.type} is not supported there; supported are a "
                "Transformer, a Pooling, Dense ones, and a Normalize at the end"
            )
    similarity = texts.similarity_fn_name or "cosine"
    if similarity not in SIMILARITIES:
        raise ModelError(f"{folder}: similarity_fn_name is {similarity!r}; it must be one of {', '.join(SIMILARITIES)}")
    if texts.default_prompt_name is not None and texts.default_prompt_name not in texts.prompts:
        raise ModelError(
            f"{folder}: default_prompt_name is {texts.default_prompt_name!r}, which is none of the prompts"
        )
    return SentenceTransformer(
        pooling, normalize, tuple(layers), includes_prompt, texts.prompts, texts.default_prompt_name, similarity,
        own.max_seq_length, own.do_lower_case,
    )  # fmt: skip


def _modules_of(folder: Path) -> list[_Module]:
    """Return the modules of a folder, the first of which is the model; none without modules.json."""
    modules: list[_Module] = _read(folder / "modules.json", list[_Module])
    if modules and modules[0].kind != "Transformer":
        raise ModelError(f"{folder / 'modules.json'} begins with {modules[0].type!r}; it must be a Transformer")
    for module in modules:
        if module.path == ".." or Path(module.path).name != module.path or "\0" in module.path:
            raise ModelError(f"{folder / 'modules.json'}: the path {module.path!r} is not a folder of this folder")
    return modules


def _pooling_of(folder: Path) -> tuple[str, bool]:
    """Return the type of pooling, and whether the tokens of a prompt take part in it."""
    path = folder / "config.json"
    fields: dict[str, Any] = _read(path, dict[str, Any])
    mode = fields.get("pooling_mode")
    modes = [mode] if isinstance(mode, str) else mode if isinstance(mode, list) else []
    modes = modes or [name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{path}: pooling by {' and '.join(map(str, modes)) or 'nothing'} is not supported; supported is one of "
            "cls, mean, max and lasttoken"
        )
    return _MODES[modes[0]], fields.get("include_prompt") is not False


def _dense_of(folder: Path, inputs: int) -> HeadLayer:
    dense = _read(folder / "config.json", _Dense)
    if dense.in_features != inputs:
        raise ModelError(f"{folder}: in_features is {dense.in_features}, but the module before has {inputs} outputs")
    kind = dense.activation_function.rsplit(".", maxsplit=1)[-1].lower()
    return HeadLinear("linear", dense.out_features, dense.bias, activation_of_head(kind)).read(
        Checkpoint(str(folder)), inputs
    )


def _read(path: Path, kind: Any) -> Any:
    """Return a JSON file as `kind`, or the defaults of `kind` if there is none. Raises ModelError."""
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        text = b"[]" if kind == list[_Module] else b"{}"
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    if len(text) > _MOST_BYTES:
        raise ModelError(f"{path} has more than {_MOST_BYTES} bytes, which no sentence-transformers configuration has")
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as a sentence-transformers configuration: {error}") from None
