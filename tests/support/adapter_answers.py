"""Random adapters of checkpoints, made by PEFT, and what the changed models answer in torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapter_clients import LENGTH, Client, Folders, prompt


def make_adapter(model: Path, folder: Path, **fields: Any) -> Any:
    """Write a random adapter of a model; return both in torch."""
    torch.manual_seed(len(fields))
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied layers
        made = peft.get_peft_model(base, peft.LoraConfig(**fields)).eval()
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + torch.randn(parameter.shape) * 0.05
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.save_pretrained(folder)
    return made


def make_adapters(model: Path, root: Path, kinds: Mapping[str, Mapping[str, Any]]) -> Folders:
    """Write a random adapter of each kind; return its folder, and the changed model."""
    return {kind: (root / kind, make_adapter(model, root / kind, **fields)) for kind, fields in kinds.items()}


def check_answers(client: Client, folders: Folders) -> None:
    """Compare the answers of all adapters, which are computed together, with those of the changed models."""
    for kind, (folder, _) in folders.items():
        client.ask(kind, prompt(1), str(folder))
    client.ask("base", prompt(1))
    base = client.answer("base")
    for kind, (_, made) in folders.items():
        tokens, logprobs = client.answer(kind)
        expected = best(made, prompt(1), tokens)
        assert tokens == expected[0], kind
        assert logprobs == pytest.approx(expected[1], abs=1e-3), kind
        assert (tokens, logprobs) != base


def greedy(model: Any, tokens: Sequence[int]) -> tuple[list[int], list[float]]:
    """Return the tokens that follow, and their log probabilities."""
    found, logprobs, sequence = [], [], torch.tensor([[*tokens]])
    with torch.no_grad():
        for _ in range(LENGTH):
            scores = torch.log_softmax(model(sequence).logits[0, -1], -1)
            found.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
            sequence = torch.cat([sequence, scores.argmax().reshape(1, 1)], 1)
    return found, logprobs


def best(model: Any, tokens: Sequence[int], answer: Sequence[int]) -> tuple[list[int], list[float]]:
    """Return the likeliest token at each place of an answer, and its log probability."""
    with torch.no_grad():
        logits = model(torch.tensor([[*tokens, *answer]])).logits[0, len(tokens) - 1 : -1]
    found = torch.log_softmax(logits, -1).max(-1)
    return found.indices.tolist(), found.values.tolist()


def scores(model: Any, tokens: Sequence[int]) -> list[float]:
    """Return the log probabilities of all tokens but the first."""
    with torch.no_grad():
        found = torch.log_softmax(model(torch.tensor([[*tokens]])).logits[0, :-1], -1)
    return [float(row[token]) for row, token in zip(found, tokens[1:], strict=True)]
