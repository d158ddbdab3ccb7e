"""Write the checkpoints of `checkpoints.py`, each with the reference outputs of `transformers`.

Each checkpoint is a subfolder (config, sharded safetensors, tokenizer) with a `reference.json`: prompts, greedy
continuations in float32, and the prompts' log probabilities and pooled hidden states in float32 and bfloat16, computed
by `transformers` with eager attention on the same weights. The script runs in its own process, so the tests do not
import torch:

    python -P tests/support/build_checkpoints.py FOLDER [NAME...]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from checkpoints import CHECKPOINTS, NEW_TOKENS, PROMPT_LENGTHS, Reference, ReferenceCheckpoint, by_name

sys.path.pop()  # neighbouring folders must not shadow packages that transformers imports

# Greedy tokens are comparable only where the two likeliest tokens differ by more than float32 rounding, so a prompt
# that runs into a closer tie is replaced. The order of summation makes differences below 5e-4 here.
MIN_GAP = 2e-3


def build(folder: Path, names: list[str]) -> None:
    """Write the named checkpoints and their references; a finished checkpoint is left untouched."""
    for checkpoint in map(by_name, names):
        target = folder / checkpoint.name
        if (target / "reference.json").exists():
            continue
        scratch = folder / f".{checkpoint.name}.new"
        shutil.rmtree(scratch, ignore_errors=True)
        _write_checkpoint(checkpoint, scratch)
        references = _reference_outputs(checkpoint, scratch)
        (scratch / "reference.json").write_text(json.dumps([dataclasses.asdict(entry) for entry in references]))
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
        print(f"{checkpoint.name}: smallest top-2 gap {min(r.gap for r in references):.4f}", flush=True)


def _write_checkpoint(checkpoint: ReferenceCheckpoint, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(20)
    config = AutoConfig.for_model(
        checkpoint.model_type, bos_token_id=0, eos_token_id=0, pad_token_id=None, **checkpoint.config
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter, checkpoint)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    model.to(getattr(torch, checkpoint.dtype))
    model.save_pretrained(target, max_shard_size=checkpoint.max_shard_size)
    _write_tokenizer(target, checkpoint.config["vocab_size"])


def _fill(name: str, parameter: Any, checkpoint: ReferenceCheckpoint) -> None:
    """Fill with random values that make every part of the model matter: norms near 1, nonzero biases, spread logits."""
    if "norm" in name or "ln_" in name:
        offset = checkpoint.model_type.startswith("gemma")  # which multiplies by 1 + weight
        parameter.normal_(0.0 if name.endswith("bias") or offset else 1.0, 0.2)
    elif name.endswith("bias"):
        parameter.normal_(0.0, 0.2)
    elif name.endswith("sinks"):
        parameter.normal_(0.0, 2.0)
    elif "embed_tokens" in name or "wte" in name or "wpe" in name or "lm_head" in name:
        parameter.normal_(0.0, checkpoint.embedding)
    else:
        # Stacked experts are [experts, outputs, inputs], but [experts, inputs, outputs] in gpt-oss.
        transposed = name.startswith("transformer") or (parameter.ndim == 3 and checkpoint.model_type == "gpt_oss")
        fan_in = parameter.shape[-2 if transposed else -1]
        # The layers must outweigh the embedding; otherwise a greedy continuation repeats one token.
        gain = 3.0 if "o_proj" in name or "down_proj" in name or "attn.c_proj" in name else 1.2
        if "attn.c_attn" in name:
            gain = 2.0
        parameter.normal_(0.0, gain * fan_in**-0.5)


def _write_tokenizer(target: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer with a few merges, so that the checkpoint serves text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

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


def _reference_outputs(checkpoint: ReferenceCheckpoint, folder: Path) -> list[Reference]:
    import torch
    from transformers import AutoModelForCausalLM

    load = {"attn_implementation": "eager", "local_files_only": True}
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **load).eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **load).eval()
    rng = random.Random(checkpoint.name)
    references = []
    with torch.inference_mode():
        for length in PROMPT_LENGTHS:
            prompt, greedy, gap = _prompt_without_ties(exact, rng, length)
            logprobs = _logprobs(exact, prompt), _logprobs(rounded, prompt)
            (last, mean), (last_bfloat16, mean_bfloat16) = _pooled(exact, prompt), _pooled(rounded, prompt)
            references.append(Reference(prompt, greedy, *logprobs, last, last_bfloat16, mean, mean_bfloat16, gap))
    return references


def _prompt_without_ties(model: Any, rng: random.Random, length: int) -> tuple[list[int], list[int], float]:
    for _ in range(100):
        prompt = [rng.randrange(model.config.vocab_size) for _ in range(length)]
        greedy, gap = _greedy(model, prompt)
        if gap >= MIN_GAP:
            return prompt, greedy, gap
    raise RuntimeError(f"no prompt of {length} tokens keeps a top-2 gap of {MIN_GAP}")


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """Return greedy tokens, computed with the KV cache and confirmed by one full pass, and the smallest top-2 gap."""
    import torch

    tokens, cache, ids = [], None, torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        step = model(ids, past_key_values=cache, use_cache=True)
        cache, ids = step.past_key_values, step.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    if gap >= MIN_GAP and logits.argmax(-1).tolist() != tokens:
        raise RuntimeError("transformers gives different tokens with and without its KV cache")
    return tokens, gap


def _logprobs(model: Any, prompt: list[int]) -> list[float]:
    import torch

    logprobs = model(torch.tensor([prompt]), use_cache=False).logits[0].float().log_softmax(-1)
    return [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]


def _pooled(model: Any, prompt: list[int]) -> tuple[list[float], list[float]]:
    """Return the hidden state of the last token, and the mean of all hidden states."""
    import torch

    hidden_states = model.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].double()
    return hidden_states[-1].tolist(), hidden_states.mean(0).tolist()


def _quiet_torch() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)  # the models are too small for a second thread to help
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def main() -> None:
    """Build the checkpoints named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[checkpoint.name for checkpoint in CHECKPOINTS])
    arguments = parser.parse_args()
    _quiet_torch()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    build(arguments.folder, arguments.names)


if __name__ == "__main__":
    main()
