"""Files of the checkpoints in `checkpoints.py`: the stored references, and the checkpoints that are written from them.

`references/` has a file for each checkpoint, of what `make_references.py` has made with transformers. The weights are
numpy's, so that writing a checkpoint takes neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import CHECKPOINTS, Floats, ReferenceCheckpoint, References
from quantized_checkpoints import Raw, raw_floats, save_tensors
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

STORED = Path(__file__).parents[1] / "references"
TEXTS = ("config", "shapes", "prompts")
POOLED = ("last", "mean", "last_bfloat16", "mean_bfloat16")


def load_references(name: str) -> References:
    """Return the stored references of a checkpoint."""
    with np.load(STORED / f"{name}.npz") as file:
        return References(
            **{field: json.loads(str(file[field])) for field in TEXTS},
            greedy=file["greedy"].tolist(),
            logprobs=file["logprobs"],
            logprobs_bfloat16=file["logprobs_bfloat16"],
            pooled={field: file[field] for field in POOLED if field in file},
        )


def store_references(name: str, references: References) -> None:
    """Store the references of a checkpoint."""
    arrays: dict[str, Any] = {field: json.dumps(getattr(references, field)) for field in TEXTS}
    arrays |= {field: getattr(references, field) for field in ("logprobs", "logprobs_bfloat16")} | references.pooled
    np.savez_compressed(STORED / f"{name}.npz", greedy=np.array(references.greedy, np.uint16), **arrays)


def key_of_all() -> str:
    """Return a hash of all that the checkpoints' contents depend on."""
    names = ("checkpoint_files.py", "checkpoints.py", "quantized_checkpoints.py")
    sources = [*(Path(__file__).with_name(name) for name in names), *sorted(STORED.iterdir())]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def write_all(folder: Path) -> None:
    """Write all checkpoints; one that is there is left untouched."""
    for checkpoint in CHECKPOINTS:
        target, scratch = folder / checkpoint.name, folder / f".{checkpoint.name}.new"
        if target.exists():
            continue
        shutil.rmtree(scratch, ignore_errors=True)
        references = load_references(checkpoint.name)
        write_checkpoint(checkpoint, references.config, references.shapes, scratch)
        scratch.rename(target)


def write_checkpoint(
    checkpoint: ReferenceCheckpoint, config: dict[str, Any], shapes: dict[str, list[int]], target: Path
) -> None:
    """Write a checkpoint: config, files of at most so many bytes of tensors, tokenizer."""
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(20)
    dtype = {"float32": "F32", "bfloat16": "BF16"}[checkpoint.dtype]
    files: list[dict[str, Raw]] = [{}]
    for name, shape in shapes.items():
        tensor = raw_floats(_random(rng, name, shape, checkpoint), dtype)
        size = sum(len(other.data) for other in files[-1].values())
        if files[-1] and size + len(tensor.data) > checkpoint.max_shard_size:
            files.append({})
        files[-1][name] = tensor
    names = {f"model-{number:05}-of-{len(files):05}.safetensors": file for number, file in enumerate(files, 1)}
    for file_name, tensors in names.items():
        save_tensors(target / file_name, tensors)
    weight_map = {name: file_name for file_name, tensors in names.items() for name in tensors}
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _write_tokenizer(target, checkpoint.config["vocab_size"])


def _random(rng: np.random.Generator, name: str, shape: list[int], checkpoint: ReferenceCheckpoint) -> Floats:
    """Return random values that make every part of the model matter: norms near 1, nonzero biases, spread logits."""
    mean, deviation = 0.0, 0.2
    if "norm" in name or "ln_" in name:
        offset = checkpoint.model_type.startswith(
            ("gemma2", "gemma3", "qwen3_next", "qwen3_5")
        )  # weights are 1 + these
        offset = offset and "linear_attn" not in name
        mean = 0.0 if name.endswith("bias") or offset else 1.0
        if checkpoint.model_type in ("gemma3n_text", "gemma4_text") and name.endswith("k_norm.weight"):
            mean, deviation = 0.2, 0.05  # which do not scale the scores otherwise
    elif name.endswith(("scalar", "scale")):
        mean = 1.0
    elif name.endswith("modality_router.weight"):  # whose outputs are divided by the inputs
        deviation = 0.5 * shape[-1] ** 0.5
    elif name.endswith("e_score_correction_bias"):
        deviation = 0.1
    elif name.endswith("A_log"):
        mean, deviation = -2.0, 1.0
    elif name.endswith("sinks"):
        deviation = 2.0
    elif name.endswith("act_fn.eps"):  # large enough to matter
        mean, deviation = -0.2, 0.0
    elif "act_fn" in name:
        mean, deviation = 0.4, 0.3
    elif "embed_tokens" in name or "wte" in name or "wpe" in name or "lm_head" in name:
        deviation = checkpoint.embedding
    elif not name.endswith("bias"):
        # Stacked experts are [experts, inputs, outputs] in gpt-oss.
        transposed = name.startswith("transformer") or len(shape) == 3
        # The layers must outweigh the embedding; otherwise a greedy continuation repeats one token.
        outputs = ("o_proj", "out_proj", "output_linear", "down_proj", "attn.c_proj", ".w2.")
        gain = 3.0 if any(part in name for part in outputs) else 2.0 if "attn.c_attn" in name else 1.2
        deviation = gain * shape[-2 if transposed else -1] ** -0.5
    values: Floats = rng.standard_normal(shape, np.float32) * np.float32(deviation) + np.float32(mean)
    return values


def _write_tokenizer(target: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer with a few merges, so that the checkpoint serves text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|end|>"}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
