"""Small draft heads for a small model, random or trained for a few seconds, and what they compute in torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from train_draft_models import Teacher, lookahead_features, loss_of_rounds
from training.draft_heads import Eagle3Head, EagleHead, Head, HeadShape, unrolled
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN, LAYERS, OUTPUTS = 503, 128, 24, 96  # so deep that drafts pay
KEPT = (1, 12, 24)
CONTEXT = 300  # tokens that a head can read
SHAPE = HeadShape(HIDDEN, 192, 4, 2, 32, VOCAB, OUTPUTS)


def write_target(folder: Path) -> Path:
    """Write a small Llama in f32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=192, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape) * 0.08 + name.endswith("norm.weight")
    model.save_pretrained(folder)
    return folder


def embedding_of(target: Path, token: int, dtype: str) -> Any:
    """Return a token's embedding as a model of this dtype has it, f32 [HIDDEN]."""
    weight = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    return weight[token].to(getattr(torch, dtype)).float().numpy()


def head_config(method: str) -> dict[str, Any]:
    """Return config.json of a head."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if method != "eagle" else "EagleLlamaForCausalLM"],
        "hidden_size": HIDDEN, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "max_position_embeddings": CONTEXT, "rope_theta": 10000.0,
    }  # fmt: skip
    if method != "eagle":
        config |= {"draft_vocab_size": OUTPUTS, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(KEPT)}}
    return config | ({"contemplates": True} if method == "confu" else {})


def new_head(method: str, target: Path, *, norm_before_residual: bool = False) -> Head:
    """Return a head with random weights for the model in `target`; confu is eagle3 with a lookahead token."""
    torch.manual_seed(1)
    tokens = torch.randperm(VOCAB)[:OUTPUTS].sort().values
    unembed = AutoModelForCausalLM.from_pretrained(target).lm_head.weight.detach()
    shape = replace(SHAPE, norm_before_residual=norm_before_residual)
    if method == "eagle":
        head: Head = EagleHead(shape, unembed)
    else:
        head = Eagle3Head(shape, len(KEPT), tokens, lookahead=method == "confu")
    for name, parameter in head.named_parameters():
        parameter.data = torch.randn(parameter.shape) * 0.1 + name.endswith("norm.weight")
    return head


def method_of(head: Head) -> str:
    """Return the method that `new_head` was given."""
    return "confu" if isinstance(head, Eagle3Head) and head.contemplate is not None else head.method


def write_head(folder: Path, head: Head, config: dict[str, Any] | None = None) -> Path:
    """Write a head's files."""
    folder.mkdir(exist_ok=True, parents=True)
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or head_config(method_of(head))))
    return folder


def train(head: Head, target: Path, texts: list[list[int]], steps: int = 100) -> None:
    """Have a head learn what the model says after each token of these texts of one length."""
    if isinstance(head, Eagle3Head):
        counts = torch.bincount(torch.tensor(texts).flatten(), minlength=VOCAB)
        head.d2t.copy_(counts.argsort(descending=True)[:OUTPUTS].sort().values - torch.arange(OUTPUTS))
    teacher, tokens = Teacher.load(target), torch.tensor(texts)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    embedded, (features, *rest) = teacher.embed(tokens[:, 1:]), teacher.read(tokens, KEPT)
    for _ in range(steps):
        optimizer.zero_grad()
        given = features
        if isinstance(head, Eagle3Head) and head.contemplate is not None:
            given = torch.cat([features, lookahead_features(head.contemplate.weight, teacher, tokens, KEPT)], -1)
        loss_of_rounds(head, embedded, given, *rest).backward()
        optimizer.step()


@torch.no_grad()
def reference_logprobs(head: Head, target: Path, tokens: list[int], rounds: int) -> list[torch.Tensor]:
    """Return log probabilities [tokens - 1 - round, vocabulary] of each round of a head, as in `unrolled`."""
    teacher, given = Teacher.load(target), torch.tensor([tokens])
    features, final, _ = teacher.read(given, KEPT)
    if method_of(head) == "confu":
        features = torch.cat([features, torch.zeros_like(features)], -1)
    found = []
    for hidden in unrolled(
        head, teacher.embed(given[:, 1:]), (features if isinstance(head, Eagle3Head) else final)[:, :-1], rounds
    ):
        logits = head.logits(hidden)[0]
        if isinstance(head, Eagle3Head):
            spread = torch.full((len(logits), VOCAB), -torch.inf)
            spread[:, head.d2t + torch.arange(OUTPUTS)] = logits
            logits = spread
        found.append(torch.log_softmax(logits, -1))
    return found
