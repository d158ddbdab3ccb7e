"""Beam searches of `transformers` in float32. A program of its own: in the repository's folder, `transformers` would
take `kernels/` for the package of that name.

    python -P search_beams.py FOLDER < cases.json > answers.json

A case is `prompt`, `eos_token_id`, and keywords of `generate`; its answer the sequences after the prompt, the best
first, with their scores.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def search(model: Any, case: dict[str, Any]) -> list[tuple[list[int], float]]:
    """The sequences of one case, each up to the first token that ends it."""
    import torch

    prompt, stop = case.pop("prompt"), case.pop("eos_token_id")
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        do_sample=False,
        num_return_sequences=case["num_beams"],
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,
        return_dict_in_generate=True,
        output_scores=True,
        **case,
    )
    answers = []
    for row, score in zip(result.sequences.tolist(), result.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        end = next((index + 1 for index, token in enumerate(tokens) if token in stop), len(tokens))
        answers.append((tokens[:end], score))
    return answers


def main() -> None:
    """Answers the cases of standard input."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, local_files_only=True).eval()
    model.generation_config.eos_token_id = None  # each case has its own
    json.dump([search(model, case) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
