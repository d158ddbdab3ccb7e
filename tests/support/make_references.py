"""Make the references of `checkpoints.py` with `transformers`: greedy continuations in float32 of some prompts, and
the prompts' log probabilities and pooled hidden states in float32 and bfloat16, with eager attention.

    .venv/bin/python -P tests/support/make_references.py [NAME...]

stores them where the tests find them. The prompts are those that are stored already, if they are.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from checkpoint_files import STORED, load_references, store_references, write_checkpoint
from checkpoints import CHECKPOINTS, EMBEDDED, NEW_TOKENS, PROMPT_LENGTHS, Floats, ReferenceCheckpoint, References
from pooled_checkpoints import CLASSIFIERS, ENCODERS, VOCAB
from pooled_checkpoints import STORED as STORED_POOLED
from quantized_checkpoints import load

sys.path.pop()  # neighbouring folders must not shadow packages that transformers imports

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

# Greedy tokens are comparable only where the two likeliest tokens differ by more than float32 rounding, so a prompt
# that runs into a closer tie is replaced. The order of summation makes differences below 5e-4 here.
MIN_GAP = 2e-3

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)  # the models are too small for a second thread to help


def make(checkpoint: ReferenceCheckpoint, folder: Path) -> References:
    """Return the references of a checkpoint, which is written to `folder`."""
    config = AutoConfig.for_model(
        checkpoint.model_type, bos_token_id=0, eos_token_id=0, pad_token_id=None, **checkpoint.config
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, checkpoint.dtype))
    saved = _saved(model, folder / "saved")
    write_checkpoint(checkpoint, **saved, target=folder / "written")
    load_options = {"attn_implementation": "eager", "local_files_only": True}
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(folder / "written", dtype=dtype, **load_options).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    with torch.inference_mode():
        prompts, stored = _prompts(checkpoint, exact)
        pooled = {}
        if checkpoint.name in EMBEDDED:
            for model, ending in ((exact, ""), (rounded, "_bfloat16")):
                hidden_states = [_hidden_states(model, prompt) for prompt in prompts]
                pooled["last" + ending] = np.stack([states[-1] for states in hidden_states])
                pooled["mean" + ending] = np.stack([states.mean(0) for states in hidden_states])
        continuations = [_greedy(exact, *each) for each in zip(prompts, stored, strict=True)]
        if any(gap < MIN_GAP / 2 for _, gap in continuations):  # another host's rounding moves a gap by less
            raise RuntimeError(f"a stored prompt of {checkpoint.name} runs into a tie; delete its references")
        logprobs, rounded_logprobs = _logprobs(exact, prompts), _logprobs(rounded, prompts)
        return References(
            **saved,
            prompts=prompts,
            greedy=[tokens for tokens, _ in continuations],
            logprobs=logprobs,
            logprobs_bfloat16=rounded_logprobs,
            pooled=pooled,
        )


def make_pooled(folder: Path) -> dict[str, dict[str, Any]]:
    """Return config and shapes of all pooled checkpoints."""
    made = {}
    for checkpoint in ENCODERS + CLASSIFIERS:
        model_class = getattr(transformers, checkpoint.model_class)
        model = model_class(model_class.config_class(**checkpoint.config))
        if model.config.pad_token_id is None:
            model.config.pad_token_id = VOCAB - 1  # which no prompt has
        made[checkpoint.name] = _saved(model, folder / checkpoint.name)
    return made


def _saved(model: Any, folder: Path) -> dict[str, Any]:
    """Return config and shapes as a model saves them."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return {"config": config, "shapes": {name: list(raw.shape) for name, raw in load(folder).items()}}


def _prompts(checkpoint: ReferenceCheckpoint, model: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Return the stored prompts and their greedy tokens, or prompts without ties, and no tokens for each."""
    if (STORED / f"{checkpoint.name}.npz").exists():
        stored = load_references(checkpoint.name)
        return stored.prompts, stored.greedy
    rng = random.Random(checkpoint.name)
    return [_prompt_without_ties(model, rng, length) for length in PROMPT_LENGTHS], [[] for _ in PROMPT_LENGTHS]


def _prompt_without_ties(model: Any, rng: random.Random, length: int) -> list[int]:
    for _ in range(100):
        prompt = [rng.randrange(model.config.vocab_size) for _ in range(length)]
        if _greedy(model, prompt)[1] >= MIN_GAP:
            return prompt
    raise RuntimeError(f"no prompt of {length} tokens keeps a top-2 gap of {MIN_GAP}")


def _greedy(model: Any, prompt: list[int], stored: Sequence[int] = ()) -> tuple[list[int], float]:
    """Return greedy tokens, computed with the KV cache and confirmed by one full pass, and the smallest top-2 gap.

    Stored tokens that the pass confirms are those: each is the likeliest after the ones before.
    """
    if len(stored) == NEW_TOKENS:
        likeliest, gap = _full_pass(model, prompt, tokens := [*stored])
        if likeliest == tokens:
            return tokens, gap
    tokens, cache, ids = [], None, torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        step = model(ids, past_key_values=cache, use_cache=True)
        cache, ids = step.past_key_values, step.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    likeliest, gap = _full_pass(model, prompt, tokens)
    if gap >= MIN_GAP and likeliest != tokens:
        raise RuntimeError("transformers gives different tokens with and without its KV cache")
    return tokens, gap


def _full_pass(model: Any, prompt: list[int], tokens: list[int]) -> tuple[list[int], float]:
    """Return the likeliest token in place of each of these after a prompt, and the smallest top-2 gap."""
    logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    best = logits.topk(2)
    return best.indices[:, 0].tolist(), float((best.values[:, 0] - best.values[:, 1]).min())


def _logprobs(model: Any, prompts: list[list[int]]) -> Floats:
    values = []
    for prompt in prompts:
        logprobs = model(torch.tensor([prompt]), use_cache=False).logits[0].float().log_softmax(-1)
        values += [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]
    return np.array(values, np.float32)


def _hidden_states(model: Any, prompt: list[int]) -> Floats:
    """Return the hidden states after the final norm, [tokens, hidden_size]."""
    states: Floats = model.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].float().numpy()
    return states


def main() -> None:
    """Store the references of the checkpoints named on the command line, or of all; and what pooled ones need."""
    names = sys.argv[1:] or [checkpoint.name for checkpoint in CHECKPOINTS]
    for checkpoint in CHECKPOINTS:
        if checkpoint.name in names:
            with tempfile.TemporaryDirectory() as folder:
                store_references(checkpoint.name, make(checkpoint, Path(folder)))
            print(checkpoint.name, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        entries = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in make_pooled(Path(folder)).items())
        STORED_POOLED.write_text("{\n" + ",\n".join(entries) + "\n}\n")


if __name__ == "__main__":
    main()
