"""Encoders and rerankers under other names: of classes, of tensors, and converted to classification models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pooled_checkpoints import CLASSIFIERS, ENCODERS, PooledCheckpoint, make, make_reranker
from reference_libraries import import_reference
from safetensors.numpy import load_file, save_file
from test_pooled_models import embed, rewrite_config

from quire.kernels.errors import ModelError
from quire.kernels.options import LoadOptions
from quire.kernels.runner import describe

if TYPE_CHECKING:
    from conftest import EngineFactory

FLASH_NAMES = (
    ("embeddings.LayerNorm", "emb_ln"), ("encoder.layer.", "encoder.layers."), ("attention.output.LayerNorm", "norm1"),
    ("attention.output.dense", "mixer.out_proj"), ("output.LayerNorm", "norm2"), ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
)  # fmt: skip
"""Names of XLM-RoBERTa, and those of the implementation of jina-reranker-v2."""


def write(name: str, folder: Path) -> PooledCheckpoint:
    """Write the checkpoint of this name, and return it."""
    checkpoint = next(checkpoint for checkpoint in ENCODERS + CLASSIFIERS if checkpoint.name == name)
    make(checkpoint, folder)
    return checkpoint


def test_jina_reranker_is_an_xlm_roberta_with_other_names(tmp_path: Path, engine: EngineFactory) -> None:
    write("xlm-roberta-pair", tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "jina")
    tensors = {}
    for name, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        for old, new in FLASH_NAMES:
            name = name.replace(old, new)
        tensors[name] = tensor
    for key in [name for name in tensors if ".query." in name]:
        parts = [tensors.pop(key.replace("query", part)) for part in ("query", "key", "value")]
        tensors[key.replace("attention.self.query", "mixer.Wqkv")] = np.concatenate(parts)
    save_file(tensors, tmp_path / "jina" / "model.safetensors")
    rewrite_config(tmp_path / "jina", use_flash_attn=True, position_embedding_type="absolute")
    plain, jina = (engine(tmp_path / name, dtype="float32") for name in ("plain", "jina"))
    documents = ["Once upon a time", "the fox said"]
    expected = [output.outputs.score for output in plain.score("fox", documents, use_tqdm=False)]
    assert [output.outputs.score for output in jina.score("fox", documents, use_tqdm=False)] == expected


def test_a_converted_qwen3_reranker_scores_as_the_original(tmp_path: Path, engine: EngineFactory) -> None:
    """The layer `score` of converted checkpoints is the difference of the rows of "yes" and "no" of the head."""
    save_file = import_reference("safetensors.torch").save_file
    model = make_reranker(tmp_path / "original")
    shutil.copytree(tmp_path / "original", tmp_path / "converted")
    overrides = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    original = engine(tmp_path / "original", dtype="float32", hf_overrides=overrides)
    no, yes = original.get_tokenizer().backend.encode("noyes", add_special_tokens=False).ids
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    head = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "score.weight": head[[yes]] - head[[no]]}, tmp_path / "converted" / "model.safetensors")
    rewrite_config(tmp_path / "converted", architectures=["Qwen3ForSequenceClassification"], num_labels=1)
    converted = engine(tmp_path / "converted", dtype="float32")
    documents = ["Once upon a time", "the fox said", "fox " * 40]
    first, second = (
        [output.outputs.score for output in llm.score("fox", documents, instruction="Find foxes.", use_tqdm=False)]
        for llm in (original, converted)
    )
    np.testing.assert_allclose(second, first, rtol=0, atol=1e-5)
    assert max(first) - min(first) > 1e-3


@pytest.mark.parametrize("name", ["roberta", "modernbert"])
def test_an_encoder_that_predicts_masked_tokens_embeds(name: str, tmp_path: Path, engine: EngineFactory) -> None:
    checkpoint = write(name, tmp_path)
    expected = embed(engine(tmp_path, dtype="float32"), "mean")
    rewrite_config(tmp_path, architectures=[checkpoint.model_class.replace("Model", "ForMaskedLM")])
    assert embed(engine(tmp_path, dtype="float32"), "mean") == expected


def test_models_that_are_not_supported_say_why(tmp_path: Path) -> None:
    write("xlm-roberta", tmp_path)
    for fields, words in (
        (
            {"architectures": ["JinaBertForMaskedLM"]},
            "'JinaBertForMaskedLM' is not supported: its attention adds ALiBi",
        ),
        ({"architectures": ["JinaBertForSequenceClassification"]}, "adds ALiBi"),
        ({"architectures": ["XLMRobertaModel"], "lora_adaptations": ["retrieval.query"]}, "lora_adaptations is"),
    ):
        rewrite_config(tmp_path, **fields)
        with pytest.raises(ModelError, match=words):
            describe(LoadOptions(str(tmp_path)))
