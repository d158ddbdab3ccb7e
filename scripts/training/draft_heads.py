"""EAGLE and EAGLE-3 heads in torch, whose state dicts have the names of published checkpoints.

`unrolled` computes what the head does when it drafts on by itself, for all positions at once (the training-time test of
EAGLE-3, arXiv 2503.01840): in round r, the chain that began at position i has its own keys of rounds 1 to r, and those
of round 0 at positions up to i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a head, and of the model that it drafts for; `outputs` are the tokens that it can draft."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    outputs: int
    rope_theta: float = 10000.0
    epsilon: float = 1e-6
    norm_before_residual: bool = False  # the residual of an EAGLE-3 head is the normed hidden states


class RMSNorm(nn.Module):
    """Root mean square norm."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed rows."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._epsilon) * self.weight


Keys = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Rotary attention of chains that begin at each position."""

    def __init__(self, shape: HeadShape, inputs: int) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, earlier: list[Keys]) -> tuple[torch.Tensor, Keys]:
        """Return the output for x [batch, positions, inputs] of this round, and its keys and values."""
        shape, (batch, positions, _) = self._shape, x.shape

        def heads(linear: nn.Linear, count: int) -> torch.Tensor:
            return linear(x).view(batch, positions, count, shape.head_dim).transpose(1, 2)

        turns = torch.arange(positions) + len(earlier)
        query = self._rotated(heads(self.q_proj, shape.heads), turns)
        key = self._rotated(heads(self.k_proj, shape.kv_heads), turns)
        group = shape.heads // shape.kv_heads
        own = tuple(part.repeat_interleave(group, 1) for part in (key, heads(self.v_proj, shape.kv_heads)))
        rounds = [*earlier, (own[0], own[1])]
        (first, values), *others = rounds
        scores = query @ first.transpose(-1, -2)
        scores = scores.masked_fill(torch.ones(positions, positions, dtype=torch.bool).triu(1), -math.inf)
        chains = [(query * keys).sum(-1, keepdim=True) for keys, _ in others]
        weights = torch.softmax(torch.cat([scores, *chains], -1) / math.sqrt(shape.head_dim), -1)
        out = weights[..., :positions] @ values
        for number, (_, chained) in enumerate(others):
            out = out + weights[..., positions + number, None] * chained
        return self.o_proj(out.transpose(1, 2).reshape(batch, positions, -1)), (own[0], own[1])

    def _rotated(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        half = self._shape.head_dim // 2
        frequencies = self._shape.rope_theta ** (-torch.arange(half) / half)
        angles = turns[:, None] * frequencies
        cosine, sine = angles.cos(), angles.sin()
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)


class FeedForward(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Eagle3Layer(nn.Module):
    """The layer of an EAGLE-3 head, whose attention reads the token embeddings beside the hidden states."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self._norm_before_residual = shape.norm_before_residual
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.epsilon)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.epsilon)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.epsilon)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, earlier: list[Keys]) -> tuple[torch.Tensor, Keys]:
        """Return the hidden states after the layer, and the keys and values of this round."""
        normed = self.hidden_norm(hidden)
        attended, keys = self.self_attn(torch.cat([self.input_layernorm(embedded), normed], -1), earlier)
        hidden = (normed if self._norm_before_residual else hidden) + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), keys


class Eagle3Head(nn.Module):
    """An EAGLE-3 head; `d2t` has what to add to an output's number for its token.

    With `lookahead` it reads as many features again: those of the embedding `contemplate`, which its model has read
    in the place of a next token (ConFu, arXiv 2603.08899).
    """

    method = "eagle3"

    def __init__(self, shape: HeadShape, num_features: int, tokens: torch.Tensor, *, lookahead: bool = False) -> None:
        """`tokens` [outputs] are those that it can draft, in order."""
        super().__init__()
        self.fc = nn.Linear((1 + lookahead) * num_features * shape.hidden_size, shape.hidden_size, bias=False)
        self.contemplate = nn.Embedding(1, shape.hidden_size) if lookahead else None
        self.midlayer = Eagle3Layer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.epsilon)
        self.lm_head = nn.Linear(shape.hidden_size, shape.outputs, bias=False)
        self.register_buffer("d2t", tokens - torch.arange(shape.outputs))
        allowed = torch.zeros(shape.vocab_size, dtype=torch.bool)
        allowed[tokens] = True
        self.register_buffer("t2d", allowed)

    def begin(self, features: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that stand for features [batch, positions, num_features * hidden_size]."""
        hidden: torch.Tensor = self.fc(features)
        return hidden

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, earlier: list[Keys]) -> tuple[torch.Tensor, Keys]:
        """Return the hidden states of a round, and its keys and values."""
        states: tuple[torch.Tensor, Keys] = self.midlayer(embedded, hidden, earlier)
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, positions, outputs]."""
        out: torch.Tensor = self.lm_head(self.norm(hidden))
        return out


class EagleLayer(nn.Module):
    """The layer of an EAGLE head: that of a Llama, without a norm before the attention."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden_size)
        self.mlp = FeedForward(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.epsilon)


class EagleHead(nn.Module):
    """An EAGLE head, which predicts the hidden state after the final norm; the logits are its model's."""

    method = "eagle"

    def __init__(self, shape: HeadShape, unembed: torch.Tensor) -> None:
        """`unembed` [vocab_size, hidden_size] is the layer of the model's logits."""
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=True)
        self.layers = nn.ModuleList([EagleLayer(shape)])
        self._unembed = (unembed,)

    def begin(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features, which are hidden states."""
        return features

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, earlier: list[Keys]) -> tuple[torch.Tensor, Keys]:
        """Return the hidden states of a round, and its keys and values."""
        hidden, layer = self.fc(torch.cat([embedded, hidden], -1)), self.layers[0]
        attended, keys = layer.self_attn(hidden, earlier)
        hidden = hidden + attended
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden)), keys

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, positions, vocab_size]."""
        return hidden @ self._unembed[0].T


Head = Eagle3Head | EagleHead


def unrolled(head: Head, embedded: torch.Tensor, features: torch.Tensor, rounds: int) -> list[torch.Tensor]:
    """Return the hidden states of each round, [batch, positions - round, hidden_size].

    `features` [batch, positions, width] are those before the tokens whose embeddings are `embedded` [batch, positions,
    hidden_size]. In round r the chain of position i reads the embedding of position i + r.
    """
    hidden, keys, found = head.begin(features), list[Keys](), list[torch.Tensor]()
    for number in range(rounds):
        count = embedded.shape[1] - number
        cut = [(key[:, :, :count], value[:, :, :count]) for key, value in keys]
        hidden, new = head(embedded[:, number:], hidden[:, :count], cut)
        keys = [*cut, new]
        found.append(hidden)
    return found
