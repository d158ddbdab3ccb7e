"""Heads for multi-token prediction of small checkpoints, random or trained for a few seconds, and what torch computes.

A head is made of modules of transformers, which leaves out the heads themselves.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

OWN = "mtp"
"""Tensors of Qwen's heads begin with that; those of others are of the layer after the model's last one."""
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
_NAMES = {
    "fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm",
}  # fmt: skip


class MtpHead(nn.Module):
    """A head for a model, with a copy of its last layer, or of the last one with attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        decoder, hidden = model.model, model.config.hidden_size
        layer = next(layer for layer in reversed(decoder.layers) if hasattr(layer, "self_attn"))
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (copy.deepcopy(decoder.norm) for _ in range(3))
        self.layer = copy.deepcopy(layer)
        self._rotary = [decoder.rotary_emb]  # no module of its own

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output [batch, tokens, hidden_size] after the final norm."""
        both = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1)
        count = both.shape[1]
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        output = self.layer(
            self.fc(both), position_embeddings=self._rotary[0](both, positions), attention_mask=mask,
            position_ids=positions,
        )  # fmt: skip
        return self.norm(output[0] if isinstance(output, tuple) else output)


@dataclass(frozen=True)
class Drafted:
    """A model in f32, and its head."""

    model: Any
    head: MtpHead

    @classmethod
    def random(cls, target: Path) -> Drafted:
        """Give the model in a folder a random head."""
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager").eval()
        model.requires_grad_(requires_grad=False)
        torch.manual_seed(1)
        head = MtpHead(model)
        for name, parameter in head.named_parameters():
            mean = parameter.mean() if "norm" in name else 0.0
            deviation = 0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.data = (torch.randn(parameter.shape) * deviation + mean).bfloat16().float()  # as it is stored
        head.requires_grad_()
        return cls(model, head)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Return the logits of a head's output."""
        logits: torch.Tensor = self.model.lm_head(output)
        return logits

    def inputs(self, tokens: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings of all tokens but the first, and the model's output for all but the last."""
        given = torch.tensor(tokens)
        with torch.no_grad():
            return self.model.model.embed_tokens(given[:, 1:]), self.model.model(given)[0][:, :-1]

    @torch.no_grad()
    def logprobs(self, tokens: list[int], size: int, rounds: int) -> list[torch.Tensor]:
        """Return the log probabilities [vocabulary] of each round: the first `size` rows come from the model.

        The last one of each later round comes from the head's output of the round before.
        """
        embedded, hidden = self.inputs([tokens])
        hidden, found = hidden[:, :size], []
        for number in range(rounds):
            output = self.head(embedded[:, : size + number], hidden)[:, -1:]
            found.append(torch.log_softmax(self.logits(output)[0, 0], -1))
            hidden = torch.cat([hidden, output], 1)
        return found

    def train(self, texts: list[list[int]], steps: int = 70) -> None:
        """Have the head learn these texts of one length by heart, drafts from its own output among them."""
        embedded, hidden = self.inputs(texts)
        answers, next_answers = torch.tensor(texts)[:, 2:], torch.tensor(texts)[:, 3:]
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=3e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            output = self.head(embedded[:, :-1], hidden[:, :-1])
            again = self.head(embedded[:, 1:-1], output[:, :-1])
            losses = [
                functional.cross_entropy(self.logits(given).flatten(0, 1), wanted.flatten())
                for given, wanted in ((output, answers), (again, next_answers))
            ]
            sum(losses, torch.zeros(())).backward()
            optimizer.step()

    def write(self, target: Path, folder: Path, *, splits_experts: bool = True) -> Path:
        """Write the model's files, as they are in `target`, and those of the head."""
        shutil.copytree(target, folder)
        index = json.loads((target / "model.safetensors.index.json").read_text())
        dtype = next(iter(load_file(next(target.glob("*.safetensors"))).values())).dtype
        layers, state = self.model.config.num_hidden_layers, self.head.state_dict()
        tensors = {}
        for name, tensor in state.items():
            for own, part in _split(name, tensor) if splits_experts else [(name, tensor)]:
                tensors[self._name(own, layers)] = part.to(dtype).contiguous().clone()
        if not self._is_qwen:  # copies that are not read
            for name in _SHARED:
                tensors[f"model.layers.{layers}.{name}"] = torch.zeros_like(self.model.lm_head.weight, dtype=dtype)
        save_file(tensors, folder / "model-mtp.safetensors")
        index["weight_map"] |= dict.fromkeys(tensors, "model-mtp.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    @property
    def _is_qwen(self) -> bool:
        return str(self.model.config.model_type).startswith("qwen")

    def _name(self, name: str, layers: int) -> str:
        module, rest = name.split(".", 1)
        if self._is_qwen:
            return f"{OWN}.layers.0.{rest}" if module == "layer" else f"{OWN}.{name}"
        return f"model.layers.{layers}.{rest if module == 'layer' else f'{_NAMES[module]}.{rest}'}"


def _split(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return a tensor, or those of the experts that are stacked in it."""
    module, _, part = name.partition(".experts.")
    if not part:
        return [(name, tensor)]
    if part == "down_proj":
        return [(f"{module}.experts.{i}.down_proj.weight", each) for i, each in enumerate(tensor)]
    halves = [each.chunk(2) for each in tensor]
    return [
        (f"{module}.experts.{i}.{half}_proj.weight", each)
        for i, pair in enumerate(halves)
        for half, each in zip(("gate", "up"), pair, strict=True)
    ]


def as_multimodal(folder: Path, target: Path, architecture: str) -> Path:
    """Write a checkpoint as the text part of a multimodal one, whose head is beside the text part."""
    target.mkdir()
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, target / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    config = {"architectures": [architecture], "text_config": text, "tie_word_embeddings": text["tie_word_embeddings"]}
    (target / "config.json").write_text(json.dumps(config))
    return target
