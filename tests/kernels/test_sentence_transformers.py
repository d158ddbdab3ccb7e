"""The configuration of sentence-transformers: what is read of it, and what is rejected by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.kernels.errors import ModelError
from quire.kernels.pooling.sentence_transformers import max_seq_length, read_sentence_transformer, scoring_tokens

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules."
POOLING = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


def write(folder: Path, *modules: str, **files: Any) -> Path:
    """Write modules.json with modules of these types in order, and files, whose names have __ for a slash."""
    entries = [
        {"idx": index, "name": str(index), "type": kind, "path": "" if index == 0 else f"{index}_{kind.split('.')[-1]}"}
        for index, kind in enumerate(modules)
    ]
    for name, content in {"modules": entries, **files}.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_folder_without_modules_has_none(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 5}')
    assert read_sentence_transformer(tmp_path, 16) is None
    assert max_seq_length(tmp_path) is None
    assert scoring_tokens(tmp_path) is None


@pytest.mark.parametrize("package", [OLD, NEW])
def test_pooling_normalization_prompts_and_length(tmp_path: Path, package: str) -> None:
    folder = write(
        tmp_path, *(package + kind for kind in ("Transformer", "Pooling", "Normalize")),
        **{"1_Pooling__config": POOLING},
        config_sentence_transformers={
            "__version__": {}, "prompts": {"query": "Query: ", "passage": ""}, "default_prompt_name": "passage",
            "similarity_fn_name": "dot",
        },
        sentence_bert_config={"max_seq_length": 128, "do_lower_case": True},
    )  # fmt: skip
    found = read_sentence_transformer(folder, 16)
    assert found is not None
    assert (found.pooling_type, found.normalize, found.head, found.includes_prompt) == ("cls", True, (), True)
    assert (found.prompts, found.default_prompt_name) == ({"query": "Query: ", "passage": ""}, "passage")
    assert (found.similarity, found.lowercase) == ("dot", True)
    assert max_seq_length(folder) == 128


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode": "lasttoken", "include_prompt": False}, ("last", False)),
        ({"pooling_mode": ["max"]}, ("max", True)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean", True)),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, ("last", True)),
    ],
)
def test_types_of_pooling(tmp_path: Path, config: dict[str, Any], expected: tuple[str, bool]) -> None:
    found = read_sentence_transformer(
        write(tmp_path, OLD + "Transformer", OLD + "Pooling", **{"1_Pooling__config": config}), 16
    )
    assert found is not None
    assert (found.pooling_type, found.includes_prompt, found.normalize) == (*expected, False)


def test_the_tokens_of_a_reranker(tmp_path: Path) -> None:
    folder = write(
        tmp_path, NEW + "Transformer", "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
        **{"1_LogitScore__config": {"true_token_id": 9693, "false_token_id": 2152}},
    )  # fmt: skip
    assert scoring_tokens(folder) == (2152, 9693)
    assert read_sentence_transformer(folder, 16) is None


@pytest.mark.parametrize("path", ["../other", "/etc", "a/b", "..", "a\0b"])
def test_modules_lie_in_the_folder(tmp_path: Path, path: str) -> None:
    entries = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": path}]
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(ModelError, match="is not a folder of this folder"):
        read_sentence_transformer(tmp_path, 16)


@pytest.mark.parametrize(
    ("modules", "files", "words"),
    [
        (["Pooling"], {}, "begins with 'sentence_transformers.models.Pooling'; it must be a Transformer"),
        (["Transformer", "WordWeights"], {}, "WordWeights is not supported there"),
        (["Transformer", "Normalize", "Dense"], {}, "Dense is not supported there"),
        (
            ["Transformer", "Pooling"],
            {"1_Pooling__config": {"pooling_mode_mean_sqrt_len_tokens": True}},
            "pooling by pooling_mode_mean_sqrt_len_tokens is not supported",
        ),
        (
            ["Transformer", "Pooling"],
            {"1_Pooling__config": {**POOLING, "pooling_mode_max_tokens": True}},
            "pooling by pooling_mode_cls_token and pooling_mode_max_tokens is not supported",
        ),
        (["Transformer"], {"config_sentence_transformers": {"similarity_fn_name": "x"}}, "similarity_fn_name is 'x'"),
        (["Transformer"], {"config_sentence_transformers": {"default_prompt_name": "q"}}, "default_prompt_name is 'q'"),
        (["Transformer"], {"config_sentence_transformers": {"prompts": 3}}, "can't be read as a sentence-transformers"),
        (["Transformer"], {"sentence_bert_config": {"max_seq_length": -5}}, "Expected `int` >= 1"),
        (["Transformer"], {"sentence_bert_config": "{"}, "can't be read as a sentence-transformers"),
        (
            ["Transformer", "Dense"],
            {"1_Dense__config": {"in_features": 8, "out_features": 4}},
            "in_features is 8, but the module before has 16 outputs",
        ),
        (
            ["Transformer", "Dense"],
            {"1_Dense__config": {"in_features": 16, "out_features": 4, "activation_function": "torch.nn.Mish"}},
            "activation 'mish' of a pooling head is not supported",
        ),
        (["Transformer", "Dense"], {"1_Dense__config": {"in_features": 16, "out_features": 4}}, "model.safetensors"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, modules: list[str], files: dict[str, Any], words: str) -> None:
    folder = write(tmp_path, *(OLD + kind for kind in modules), **files)
    with pytest.raises(ModelError) as error:
        read_sentence_transformer(folder, 16)
    assert words in str(error.value)
