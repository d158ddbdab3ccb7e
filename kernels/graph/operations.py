"""Graph of operations: a model from token ids to logits, as plain data.

A model file builds a `Graph` from a checkpoint's config; `lowering.py` turns it into kernel launches. The graph names
tensors and states what is computed, never how: fusion, number formats and kernels are the lowering's decisions. Every
attribute is carried out for every weight format, or rejected by the lowering with a ModelError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from quire.kernels.activations import Activation
from quire.kernels.attention_heads import Heads, LatentHeads, StateHeads
from quire.kernels.rope import MAX_POSITIONS, QueryScale, Rope


@dataclass(frozen=True)
class Linear:
    """x W^T + b. The tensor `weight` is [outputs, inputs], or [inputs, outputs] if `transposed`; `bias` may be "".

    With `tensor_outputs` the tensor has that many outputs, and this layer those from number `first` on, and with
    `tensor_inputs` that many inputs, of which this layer reads those from number `first_input` on.
    """

    weight: str
    outputs: int
    bias: str = ""
    transposed: bool = False
    first: int = 0
    tensor_outputs: int = 0
    first_input: int = 0
    tensor_inputs: int = 0


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm if `center`: (x - mean) / deviation * (weight + weight_offset) + bias."""

    weight: str
    epsilon: float
    bias: str = ""
    center: bool = False
    weight_offset: float = 0.0


@dataclass(frozen=True)
class Embedding:
    """Hidden states: `scale` times a row of `weight` [vocab_size, hidden_size], plus rows of other tensors if named.

    The row of `positions` is that of the token's position, counted from row `first_position` on; that of `types` the
    token's segment, 0 or 1. `norm` follows. With `first_for_others` tokens that `weight` has no row of have its first.
    """

    weight: str
    vocab_size: int
    hidden_size: int
    scale: float = 1.0
    positions: str = ""
    num_positions: int = 0
    first_position: int = 0
    types: str = ""
    num_types: int = 0
    norm: Norm | None = None
    first_for_others: bool = False


@dataclass(frozen=True)
class PerLayerInputs:
    """Rows that each layer reads for a token beside its hidden state, `width` elements each (Gemma 3n and 4).

    For all layers, one after the other: multiplier * (embedding + norm(scale * projection(x))), where x are the hidden
    states before the first layer, and the norm is of each layer's elements.
    """

    embedding: Embedding
    projection: Linear
    scale: float
    norm: Norm
    width: int
    multiplier: float


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms of query and key heads, before the rotation; the tensors `query` and `key` are [head_dim].

    `joint`: one norm of all query heads, and one of all key heads; the tensors are then [heads * head_dim].
    `after_rotation`: they norm the heads that the rotation gives, each by itself. `values`: value heads have one
    without a weight.
    """

    query: str
    key: str
    epsilon: float
    weight_offset: float = 0.0
    joint: bool = False
    after_rotation: bool = False
    values: bool = False


@dataclass(frozen=True)
class EmbeddingInput:
    """Linear layers of a draft head that read the token embeddings, after a norm if there is one.

    Their outputs are added to those of the layers that read the hidden states: both are halves of the same tensors.
    """

    layers: tuple[Linear, ...]
    norm: Norm | None = None


@dataclass(frozen=True)
class Attention:
    """Attention over the sequence: output(softmax(scale * q k) v); causal, or over all tokens if `bidirectional`.

    The outputs of `projections`, one after the other, are queries, keys and values. With `keys_as_values` there are no
    values: they are the keys before norm and rotation. With `kv_source`, the number of an earlier attention layer,
    there are only queries, and keys and values are those of that layer. `rotary` rotates `rotary.dim` elements of each
    query and key head. `window` > 0 limits each token to the last `window` tokens, itself
    included, and a bidirectional one to as many of the next. `scale` is 1 / sqrt(head_dim) by default. `softcap` > 0
    turns a score s into softcap * tanh(s / softcap). `sinks` names a tensor [query heads] of scores that take part in
    the softmax but have no value. `embedded`: more projections, of a draft head's token embeddings. `query_scale`
    scales the rotated queries by their positions. What `output` reads is first multiplied by the sigmoid of the outputs
    of `gates`, one after the other, if there are any. `unread` are layers that checkpoints, and adapters, may have for
    keys and values beside a `kv_source`; they change nothing.
    """

    projections: tuple[Linear, ...]
    output: Linear
    heads: Heads
    rotary: Rope | None = None
    head_norms: HeadNorms | None = None
    window: int = 0
    scale: float | None = None
    softcap: float = 0.0
    sinks: str = ""
    bidirectional: bool = False
    embedded: EmbeddingInput | None = None
    query_scale: QueryScale | None = None
    gates: tuple[Linear, ...] = ()
    keys_as_values: bool = False
    kv_source: int | None = None
    unread: tuple[Linear, ...] = ()


@dataclass(frozen=True)
class LatentAttention:
    """Causal multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    `latent(x)` [rank + rope] is a token's latent c, to which `latent_norm` applies, and a key part that is rotated and
    that all heads share. `expand(c)` is for each head its key part without rotation, then its value. A query is that of
    `query` applied to x, or to query_norm(compress(x)) with a `compress`. `output` gets softmax(scale * q k) v.
    """

    query: Linear
    latent: Linear
    latent_norm: Norm
    expand: Linear
    output: Linear
    latent_heads: LatentHeads
    rotary: Rope
    scale: float
    compress: Linear | None = None
    query_norm: Norm | None = None

    @property
    def heads(self) -> Heads:
        """Heads of the attention over KV pages."""
        return self.latent_heads.attention

    @property
    def bidirectional(self) -> bool:
        """False: tokens never attend to later ones."""
        return False

    @property
    def kv_source(self) -> None:
        """None: every layer has keys and values of its own."""
        return


@dataclass(frozen=True)
class Convolution:
    """Causal convolution of each channel with its last `taps` inputs, the token's own included, then `activation`.

    The tensor `weight` is [channels, 1, taps], the oldest input first; `bias` and `activation` may be "". Inputs are
    multiplied by `scales`, (channels, scale) one after the other, if there are any.
    """

    weight: str
    channels: int
    taps: int
    bias: str = ""
    activation: str = ""
    scales: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class ShortConvolution:
    """output(c * convolution(b * x)), where the outputs of `projection` are b, c and x (LFM2)."""

    projection: Linear
    convolution: Convolution
    output: Linear


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta rule (Gated DeltaNet, arXiv 2412.06464): output(norm(o) * silu(z)), with a norm of each value head.

    The outputs of `projections`, one after the other, are queries, keys and values, which `convolution` makes q, k and
    v of, and then z. Of q and k each head gets the length 1, and q is divided by sqrt(key). The outputs of `rates` are
    for each value head a and b, in groups of `rate_group` heads: the b of all of them first, then their a. For each
    token the state S [key, value] of a value head, zero at first, becomes
    S' + k (v - k S')^T sigmoid(b), with S' = exp(-exp(decay) * softplus(a + bias)) S, and then o = q S. The tensors
    `decay` and `bias` are [value heads].
    """

    projections: tuple[Linear, ...]
    rates: tuple[Linear, ...]
    rate_group: int
    convolution: Convolution
    heads: StateHeads
    decay: str
    bias: str
    norm: Norm
    output: Linear


@dataclass(frozen=True)
class StateSpace:
    """Selective state space (Mamba 2, arXiv 2405.21060).

    The outputs of `projection` are gates z, then what `convolution` makes values v, keys k and queries q of, and then
    the time a of each value head. For each token the state S [key, value] of a value head, zero at first, becomes
    exp(-exp(decay) t) S + k (t v)^T, with t = softplus(time_scale * a + bias), at least `least` and at most `most`
    unless that is 0, and then o = q S + skip * v. The tensors `decay`, `bias` and `skip` are [value heads].

    `output` reads norm(o * silu(gate_scale * z)), or norm(o) * silu(gate_scale * z) unless `gate_first`, with a norm of
    each of `norm_groups` equal groups of columns, which may be missing.
    """

    projection: Linear
    convolution: Convolution
    heads: StateHeads
    decay: str
    bias: str
    skip: str
    output: Linear
    norm: Norm | None = None
    norm_groups: int = 1
    gate_first: bool = True
    gate_scale: float = 1.0
    time_scale: float = 1.0
    least: float = 0.0
    most: float = 0.0


@dataclass(frozen=True)
class FeedForward:
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) with a `gate`.

    A ClampedSwiglu is the activation of gate and up together; a Xielu is one without a gate. With a `cutoff` the
    outputs g of the gate become max(g - mean - cutoff * deviation, 0): only the largest of a token's gates are used.
    """

    up: Linear
    down: Linear
    activation: Activation
    gate: Linear | None = None
    cutoff: float | None = None


@dataclass(frozen=True)
class ExpertRouter:
    """Choice of `top_k` experts for each token, and their weights.

    The outputs of `linear`, one for each expert, become scores: by a softmax over all experts, or a sigmoid each. The
    experts with the largest scores are chosen, the lower number first if scores are equal; `correction` names a tensor
    [experts] that is added to the scores for the choice only. With `groups`, consecutive experts of equal number, only
    those in the `top_groups` best groups are candidates; a group's score is its largest one, or the sum of its
    largest two. The weights are the scores, divided by their sum if `normalize`, times `scale`, and times the expert's
    element of the tensor `expert_scales` [experts] if it is named; a sum of softmax scores counts as `least_sum` at
    least.

    `linear` reads what the experts read, or with a `norm` that norm of the block's input in place of the block's own;
    its outputs are multiplied by `output_scale`.

    A softmax over the chosen experts' outputs alone is the `softmax` of all with `normalize`.
    """

    linear: Linear
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    correction: str = ""
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    least_sum: float = 0.0
    expert_scales: str = ""
    norm: Norm | None = None
    output_scale: float = 1.0


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: the sum of weight * expert(x) over those that the router chooses, in the order of scores.

    Experts are feed-forward layers of equal sizes, all with a gate or none. `shared` is one that all tokens use;
    `shared_gate`, a layer of one output, scales it by sigmoid(shared_gate(x)). With `compress` and `expand` the experts
    that are chosen read compress(x), and expand is applied to their sum; router and shared one have no part in that.
    """

    router: ExpertRouter
    experts: tuple[FeedForward, ...]
    shared: FeedForward | None = None
    shared_gate: Linear | None = None
    compress: Linear | None = None
    expand: Linear | None = None


Mixer = Attention | LatentAttention | ShortConvolution | DeltaNet | StateSpace
"""Layers in which tokens meet those before them."""


@dataclass(frozen=True)
class Parallel:
    """The sum of layers that have the same input, each times its scale, 1 by default."""

    layers: tuple[Mixer | FeedForward, ...]
    scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class Branch:
    """after(block(before(x)))."""

    block: FeedForward | Experts
    before: Norm
    after: Norm


@dataclass(frozen=True)
class Branches:
    """The sum of layers that have the same input and norms of their own. A norm must follow it, and none precede."""

    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class PerLayerInput:
    """project(activation(gate(x)) * e), where e is the token's element number `layer` of `Graph.per_layer_inputs`."""

    gate: Linear
    project: Linear
    activation: str
    layer: int


@dataclass(frozen=True)
class Laurel:
    """A low-rank branch n + norm(right(left(n))) of a residual block (LAuReL, arXiv 2411.07501).

    n is the block's input after its norm; the whole sum is then multiplied by `scale`.
    """

    left: Linear
    right: Linear
    norm: Norm
    scale: float


@dataclass(frozen=True)
class Residual:
    """scalar * around(x + multiplier * after(block(before(x)))); each norm may be missing.

    `scalar` names a tensor [1], for which there must be a norm `after`, and none around; it may be "". With a `laurel`,
    for which there must be a norm `before`, and none around, it is laurel.scale * (that + laurel(before(x))).
    """

    block: Mixer | FeedForward | Experts | Parallel | Branches | PerLayerInput
    before: Norm | None
    after: Norm | None = None
    multiplier: float = 1.0
    around: Norm | None = None
    scalar: str = ""
    laurel: Laurel | None = None


@dataclass(frozen=True)
class StreamRouter:
    """tanh(scale * linear(norm(x))), one output for each stream."""

    norm: Norm
    linear: Linear
    scale: float


@dataclass(frozen=True)
class StreamPrediction:
    """Predict step of AltUp, before a layer, which then reads s_0.

    s_i becomes s_i + the sum of p_ij s_j over j, where p are the outputs of coefficients(router(s_0)), row by row.
    """

    router: StreamRouter
    coefficients: Linear


@dataclass(frozen=True)
class StreamCorrection:
    """Correct step of AltUp, after a layer has made x of s_0.

    s_i becomes s_i + (1 + c_i) (x - s_0), where c are the outputs of coefficients(router(x)). Then after(block(e)) is
    added to all but s_0, where e is s_0, times the tensor `scales` [hidden] if that is not "".
    """

    router: StreamRouter
    coefficients: Linear
    scales: str
    block: PerLayerInput
    after: Norm


@dataclass(frozen=True)
class Streams:
    """Hidden states that a token has beside those which layers read, s_0 (AltUp, arXiv 2301.13310).

    Before the first layer s_i is expand[i - 1](s_0), and after the last one the hidden states are the mean of s_0 and
    all contract[i - 1](s_i); the outputs of both are scaled to the root mean square of s_0. `layers`: the steps before
    and after each layer.
    """

    expand: tuple[Linear, ...]
    contract: tuple[Linear, ...]
    layers: tuple[tuple[StreamPrediction, StreamCorrection], ...]

    @property
    def count(self) -> int:
        """Number of streams, s_0 included."""
        return 1 + len(self.expand)


@dataclass(frozen=True)
class Logits:
    """scale * linear(norm(x)), and with `softcap` > 0 softcap * tanh(that / softcap); the norm may be missing.

    `offsets` names an i64 tensor [outputs]: output i is then the logit of token i + offsets[i], and all other tokens
    have -inf.
    """

    norm: Norm | None
    linear: Linear
    scale: float = 1.0
    softcap: float = 0.0
    offsets: str = ""


@dataclass(frozen=True)
class HiddenStates:
    """norm(x), the output of a model without logits; the norm may be missing."""

    norm: Norm | None


@dataclass(frozen=True)
class Features:
    """Hidden states of a model that its draft head reads: before layers, counted from 0, or after the final norm.

    With `lookahead` it reads as many again: those of the head's lookahead token, see `kernels/models/eagle.py`.
    """

    layers: tuple[int, ...] = ()
    final: bool = False
    lookahead: bool = False

    @property
    def count(self) -> int:
        """Number of hidden states of a token."""
        return (len(self.layers) + self.final) * (1 + self.lookahead)


@dataclass(frozen=True)
class DraftInput:
    """The hidden states that a draft head begins with, one for each token: those that belong to the token before it.

    `features` are the model's, of `width` elements each; `encode` turns all of them, one after the other, into a hidden
    state, and is missing if there is one that is taken as it is. Where the head drafts on, its own hidden states take
    their place. They become norm(h), or combine(norm(h)) with what `embedded` makes of the token embeddings; the norm
    may be missing.
    """

    features: Features
    width: int
    encode: Linear | None = None
    norm: Norm | None = None
    combine: Linear | None = None
    embedded: EmbeddingInput | None = None


@dataclass(frozen=True)
class Graph:
    """A whole model: the embedding, the residual blocks in order, and the logits, or hidden states that are pooled.

    A draft head has `draft_input`; a model with one keeps `features` for it. Blocks PerLayerInput read
    `per_layer_inputs`. With `streams` the residual blocks are those of s_0.
    """

    embedding: Embedding
    residuals: tuple[Residual, ...]
    logits: Logits | HiddenStates
    draft_input: DraftInput | None = None
    features: Features | None = None
    per_layer_inputs: PerLayerInputs | None = None
    streams: Streams | None = None

    @property
    def without_logits(self) -> Graph:
        """The same model up to its final norm."""
        return replace(self, logits=HiddenStates(self.logits.norm))

    @property
    def is_encoder(self) -> bool:
        """True if tokens attend to later ones, so that a sequence must be computed at once."""
        return any(attention.bidirectional for attention in self.attentions)

    @property
    def num_layers(self) -> int:
        """Number of layers as other models count them: each begins where tokens meet others."""
        return sum(isinstance(residual.block, Mixer | Parallel) for residual in self.residuals)

    @property
    def mixers(self) -> list[Mixer]:
        """Layers in which tokens meet others, in order."""
        blocks = [residual.block for residual in self.residuals]
        layers = [layer for block in blocks for layer in (block.layers if isinstance(block, Parallel) else (block,))]
        return [layer for layer in layers if isinstance(layer, Mixer)]

    @property
    def attentions(self) -> list[Attention | LatentAttention]:
        """Attention layers in order."""
        return [layer for layer in self.mixers if isinstance(layer, Attention | LatentAttention)]

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model supports, in tokens; scaling of rotary embeddings extends it."""
        if self.embedding.positions:
            return self.embedding.num_positions
        return min((layer.rotary.reach for layer in self.attentions if layer.rotary), default=MAX_POSITIONS)
