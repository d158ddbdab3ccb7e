"""Random-weight checkpoints of encoders and classification models, and what `transformers` computes with them.

They are written without it, from the configs and shapes that `make_references.py` has stored.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from reference_libraries import import_reference
from safetensors.numpy import save_file

Floats = npt.NDArray[np.float64]

STORED = Path(__file__).parents[1] / "references" / "pooled.json"
LENGTHS = (1, 2, 5, 31, 64, 65, 129, 256, 257, 500)
VOCAB = 603
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


@dataclass(frozen=True)
class PooledCheckpoint:
    """One checkpoint: its class in `transformers`, its config, and whether its pairs have two token types."""

    name: str
    model_class: str
    config: dict[str, Any] = field(default_factory=dict)
    has_types: bool = False


def _encoder(**more: Any) -> dict[str, Any]:
    return {"vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
            "num_attention_heads": 6, "max_position_embeddings": 512, "pad_token_id": 0, **more}  # fmt: skip


_ROBERTA = {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}
_MODERN = {
    "local_attention": 40, "global_attn_every_n_layers": 2, "num_hidden_layers": 4, "hidden_size": 128,
    "num_attention_heads": 4, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3,
}  # fmt: skip
_DECODER = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip

_GEMMA = {
    "head_dim": 32, "num_key_value_heads": 2, "num_attention_heads": 4, "use_bidirectional_attention": True,
    "sliding_window": 50, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 32,
}  # fmt: skip

ENCODERS = (
    PooledCheckpoint("bert", "BertModel", _encoder(), has_types=True),
    PooledCheckpoint("bert-one-head", "BertModel", _encoder(hidden_size=80, num_attention_heads=1, hidden_act="relu")),
    PooledCheckpoint("xlm-roberta", "XLMRobertaModel", _encoder(**_ROBERTA)),
    PooledCheckpoint("roberta", "RobertaModel", _encoder(**_ROBERTA, hidden_act="gelu_new")),
    PooledCheckpoint("gte", "GteModel", _encoder(pad_token_id=1)),
    PooledCheckpoint("gte-without-types", "GteModel", _encoder(type_vocab_size=0, num_attention_heads=3)),
    PooledCheckpoint("nomic-bert", "NomicBertModel", _encoder(), has_types=True),
    PooledCheckpoint("modernbert", "ModernBertModel", _encoder(**_MODERN)),
    PooledCheckpoint("embedding-gemma", "Gemma3TextModel", _encoder(**_GEMMA)),
    PooledCheckpoint("modernbert-biases", "ModernBertModel", _encoder(**_MODERN, norm_bias=True, attention_bias=True)),
)
CLASSIFIERS = (
    PooledCheckpoint("bert-pair", "BertForSequenceClassification", _encoder(num_labels=1), has_types=True),
    PooledCheckpoint("bert-labels", "BertForSequenceClassification", _encoder(num_labels=5), has_types=True),
    PooledCheckpoint("xlm-roberta-pair", "XLMRobertaForSequenceClassification", _encoder(**_ROBERTA, num_labels=1)),
    PooledCheckpoint("roberta-labels", "RobertaForSequenceClassification", _encoder(**_ROBERTA, num_labels=3)),
    PooledCheckpoint("gte-pair", "GteForSequenceClassification", _encoder(num_labels=1)),
    PooledCheckpoint("modernbert-pair", "ModernBertForSequenceClassification", _encoder(**_MODERN, num_labels=1)),
    PooledCheckpoint(
        "modernbert-mean", "ModernBertForSequenceClassification",
        _encoder(**_MODERN, num_labels=4, classifier_pooling="mean", norm_bias=True, classifier_bias=True),
    ),
    PooledCheckpoint("llama-labels", "LlamaForSequenceClassification", {**_DECODER, "num_labels": 3}),
    PooledCheckpoint("qwen2-reward", "Qwen2ForSequenceClassification", {**_DECODER, "num_labels": 1}),
)  # fmt: skip

RERANKER_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n'
    "<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""Instruction, query and document as the model card of Qwen3-Reranker joins them."""


def make_reranker(folder: Path) -> Any:
    """Write a random Qwen3ForCausalLM whose tokenizer has the tokens of Qwen3-Reranker; return the model."""
    from small_tokenizers import byte_level
    from tokenizers import AddedToken

    torch, transformers = import_reference("torch"), import_reference("transformers")
    torch.manual_seed(3)
    config = {**_DECODER, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer = byte_level()
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no"]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return model


def next_logits(model: Any, prompt: list[int]) -> Floats:
    """Return the logits of the token after a prompt."""
    import torch

    with torch.inference_mode():
        values: Floats = model(torch.tensor([prompt])).logits[0, -1].double().numpy()
    return values


def make(checkpoint: PooledCheckpoint, folder: Path) -> Path:
    """Write the checkpoint with a small tokenizer; return its folder."""
    stored = json.loads(STORED.read_text())[checkpoint.name]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stored["config"]))
    rng = np.random.default_rng(sum(map(ord, checkpoint.name)))
    tensors = {name: _random(rng, name, shape, checkpoint) for name, shape in stored["shapes"].items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder, pads_at=1 if "Roberta" in checkpoint.model_class else 0)
    return folder


def _random(
    rng: np.random.Generator, name: str, shape: list[int], checkpoint: PooledCheckpoint
) -> npt.NDArray[np.float32]:
    mean, deviation = 0.0, 0.2
    if len(shape) == 1 and name.endswith("weight"):  # of a norm
        mean = 0.0 if "Gemma" in checkpoint.model_class else 1.0  # Gemma adds 1
    elif len(shape) > 1:
        deviation = 0.3 if "embed" in name else 1.5 * shape[1] ** -0.5
    return rng.normal(mean, deviation, shape).astype(np.float32)


def load_model(checkpoint: PooledCheckpoint, folder: Path) -> Any:
    """Return the model that `transformers` reads from the folder."""
    model_class = getattr(import_reference("transformers"), checkpoint.model_class)
    return model_class.from_pretrained(folder, local_files_only=True).eval()


def write_tokenizer(folder: Path, pads_at: int = 0) -> None:
    """Write a WordPiece tokenizer with BERT's special tokens, and the truncation and padding that such files have."""
    from small_tokenizers import TEXTS
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    special = SPECIAL if pads_at == 0 else [SPECIAL[1], SPECIAL[0], *SPECIAL[2:]]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB - 100, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    second = "1" if pads_at == 0 else "0"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=f"[CLS] $A [SEP] $B:{second} [SEP]:{second}", special_tokens=ids
    )
    tokenizer.enable_truncation(32)
    tokenizer.enable_padding(length=32, pad_id=pads_at, pad_token="[PAD]")
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))


def prompts() -> list[list[int]]:
    """Return prompts of all lengths, without the tokens that count as padding."""
    rng = random.Random(5)
    return [[rng.randrange(4, VOCAB - 1) for _ in range(length)] for length in LENGTHS]


def hidden_states(model: Any, prompt: list[int]) -> Floats:
    """Return the final hidden states of a prompt, [tokens, hidden_size]."""
    import torch

    with torch.inference_mode():
        states: Floats = model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
    return states


def logits(model: Any, prompt: list[int], segment: int = 0) -> Floats:
    """Return the logits of the labels; the second text of a pair begins at `segment`, if that is not 0."""
    import torch

    types = {}
    if segment:
        types = {"token_type_ids": torch.tensor([[int(i >= segment) for i in range(len(prompt))]])}
    with torch.inference_mode():
        values: Floats = model(torch.tensor([prompt]), **types).logits[0].double().numpy()
    return values
