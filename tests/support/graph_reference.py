"""Graphs of operations in numpy with float64, and a tiny graph with random tensors to run them on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.activations import Activation, ClampedSwiglu, ScaledActivation, Xielu
from quire.kernels.attention_heads import Heads, LatentHeads, StateHeads
from quire.kernels.graph.operations import (
    Attention,
    Branch,
    Branches,
    Convolution,
    DeltaNet,
    Embedding,
    ExpertRouter,
    Experts,
    FeedForward,
    Graph,
    HeadNorms,
    LatentAttention,
    Linear,
    Logits,
    Mixer,
    Norm,
    Parallel,
    PerLayerInput,
    PerLayerInputs,
    Residual,
    ShortConvolution,
    StateSpace,
    StreamCorrection,
    StreamPrediction,
    StreamRouter,
    Streams,
)
from quire.kernels.rope import Rope
from quire.kernels.weights.checkpoint import Checkpoint, Tensor

F64 = npt.NDArray[np.float64]
Tensors = dict[str, npt.NDArray[np.float32]]
Layer = Mixer | FeedForward | Experts | Branches | PerLayerInput

HIDDEN, VOCAB, INNER, POSITIONS = 64, 112, 96, 1024
STATE_HEADS = StateHeads(keys=2, values=4, key=32, value=16)


class MemoryCheckpoint(Checkpoint):
    """A checkpoint whose tensors are arrays of f32."""

    def __init__(self, tensors: Tensors) -> None:
        self.config: dict[str, Any] = {}
        self._arrays = tensors

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor `name`."""
        array = self._arrays[name]
        assert array.shape == shape
        return Tensor(name, "f32", shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def drop_pages(self) -> None:
        """Do nothing, since no file is mapped."""


def rotary(dim: int = 32, theta: float = 10000.0, *, interleaved: bool = False, span: int = 0) -> Rope:
    """Return rotary embeddings without scaling."""
    return Rope(dim, theta, "default", {}, POSITIONS, interleaved=interleaved, span=span)


def attention(layer: int, query: int = 4, kv: int = 2, dim: int = 32, **attributes: Any) -> Attention:
    """Return an attention layer."""
    heads = Heads(query, kv, dim)
    sizes = {"q": query * dim, "k": kv * dim, "v": kv * dim}
    names = "q" if "kv_source" in attributes else "qk" if "keys_as_values" in attributes else "qkv"
    projections = tuple(Linear(f"{layer}.{name}", sizes[name]) for name in names)
    attributes = {"rotary": rotary(), **attributes}
    return Attention(projections, Linear(f"{layer}.o", HIDDEN), heads, **attributes)


def latent_attention(
    layer: int, query: int = 4, *, compressed: int = 0, rope: Rope | None = None, scale: float = 0.125
) -> LatentAttention:
    """Return latent attention whose heads have parts of four different sizes; `compressed` is the rank of queries."""
    heads = LatentHeads(query, nope=96, rope=32, value=64, rank=128)
    return LatentAttention(
        Linear(f"{layer}.latent_q_{compressed}", query * 128), Linear(f"{layer}.latent_kv", 160),
        Norm(f"{layer}.latent_norm", 1e-5), Linear(f"{layer}.latent_expand", query * 160),
        Linear(f"{layer}.latent_o", HIDDEN), heads, rope or rotary(), scale,
        Linear(f"{layer}.latent_compress", compressed) if compressed else None,
        Norm(f"{layer}.latent_q_norm", 1e-4, weight_offset=1.0) if compressed else None,
    )  # fmt: skip


def key_of(heads: StateHeads, value_head: int) -> int:
    """Return the key head of a value head."""
    return value_head % heads.keys if heads.interleaved else value_head // heads.group


def short_convolution(layer: int, taps: int = 3, **attributes: Any) -> ShortConvolution:
    """Return a short convolution."""
    convolution = Convolution(f"{layer}.short_taps_{taps}", HIDDEN, taps, **attributes)
    return ShortConvolution(Linear(f"{layer}.short_in", 3 * HIDDEN), convolution, Linear(f"{layer}.short_o", HIDDEN))


def delta_net(layer: int, heads: StateHeads = STATE_HEADS, *, group: int = 0) -> DeltaNet:
    """Return a gated delta rule; with a `group` its rates come from one tensor."""
    sizes = f"{heads.values}_{heads.key}"
    rates = tuple(Linear(f"{layer}.delta_{rate}_{sizes}", heads.values) for rate in "ba")
    if group:
        rates = (Linear(f"{layer}.delta_rates_{sizes}", 2 * heads.values),)
    projections = Linear(f"{layer}.delta_qkv", heads.channels), Linear(f"{layer}.delta_z", heads.value_columns)
    return DeltaNet(
        projections, rates, group,
        Convolution(f"{layer}.delta_taps_{sizes}", heads.channels, 4, activation="silu"), heads,
        f"{layer}.delta_decay_{sizes}", f"{layer}.delta_bias_{sizes}", Norm(f"{layer}.delta_norm_{sizes}", 1e-5),
        Linear(f"{layer}.delta_o", HIDDEN),
    )  # fmt: skip


def state_space(layer: int, heads: StateHeads = STATE_HEADS, *, norm: bool = True, **attributes: Any) -> StateSpace:
    """Return a selective state space."""
    columns = heads.value_columns
    layer_of_model = StateSpace(
        Linear(f"{layer}.space_in", columns + heads.channels + heads.values),
        Convolution(f"{layer}.space_taps", heads.channels, 4, f"{layer}.space_taps_b", "silu"), heads,
        f"{layer}.space_decay", f"{layer}.space_bias", f"{layer}.space_skip", Linear(f"{layer}.space_o", HIDDEN),
        Norm(f"{layer}.space_norm", 1e-5) if norm else None,
    )  # fmt: skip
    return dataclasses.replace(layer_of_model, **attributes)


def feed_forward(layer: int) -> FeedForward:
    """Return a gated feed-forward layer."""
    return FeedForward(
        Linear(f"{layer}.up", INNER), Linear(f"{layer}.down", HIDDEN), "silu", Linear(f"{layer}.gate", INNER)
    )


def experts(
    layer: int, count: int = 6, inner: int = 48, *, bias: bool = False, shared: str = "",
    activation: Activation = "silu", gated: bool = True, latent: int = 0, **router: Any,
) -> Experts:  # fmt: skip
    """Return a mixture of experts; `shared` is "plain" or "gated" with a shared expert.

    With a `latent`, experts read as many outputs of another layer.
    """

    def linear(name: str, outputs: int, biased: bool = bias) -> Linear:
        return Linear(f"{layer}.{name}", outputs, f"{layer}.{name}_b" if biased else "")

    def expert(name: str, inner: int, outputs: int = HIDDEN) -> FeedForward:
        up, gate, down = (linear(f"{name}.{part}", inner) for part in ("up", "gate", "down"))
        return FeedForward(up, dataclasses.replace(down, outputs=outputs), activation, gate if gated else None)

    fields = {"top_k": 2, **router}
    return Experts(
        ExpertRouter(linear("router", count), **fields),
        tuple(expert(f"expert_{number}", inner, latent or HIDDEN) for number in range(count)),
        expert("shared", INNER) if shared else None,
        linear("shared_gate", 1, biased=False) if shared == "gated" else None,
        linear("compress", latent) if latent else None, linear("expand", HIDDEN) if latent else None,
    )  # fmt: skip


def branches(layer: int, *blocks: FeedForward | Experts) -> Branches:
    """Return layers side by side, each with norms of its own."""

    def norm(number: int, name: str) -> Norm:
        return Norm(f"{layer}.norm_{name}_{number}", 1e-5)

    return Branches(
        tuple(Branch(block, norm(number, "before"), norm(number, "after")) for number, block in enumerate(blocks))
    )


def with_per_layer_inputs(model: Graph, width: int = 32) -> Graph:
    """Return a graph with a block after each layer that reads per-layer inputs, and multiplies by a scalar."""
    residuals: list[Residual] = []
    for layer, start in enumerate(range(0, len(model.residuals), 2)):
        gate, project = Linear(f"{layer}.input_gate", width), Linear(f"{layer}.input_project", HIDDEN)
        block, after = PerLayerInput(gate, project, "silu", layer), Norm(f"{layer}.input_norm", 1e-5)
        residuals += [*model.residuals[start : start + 2], Residual(block, None, after, scalar=f"{layer}.scalar")]
    columns = len(model.residuals) // 2 * width
    inputs = PerLayerInputs(
        Embedding("input_table", VOCAB, columns, 2.0), Linear("input_projection", columns), 0.3,
        Norm("input_projection_norm", 1e-5), width, 0.7,
    )  # fmt: skip
    return dataclasses.replace(model, residuals=tuple(residuals), per_layer_inputs=inputs)


def with_streams(model: Graph, count: int = 3, *, scaled: bool = True, width: int = 32) -> Graph:
    """Return a graph whose tokens have so many streams, with per-layer inputs for all but the first."""
    model = with_per_layer_inputs(model, width)
    blocks = [residual for residual in model.residuals if isinstance(residual.block, PerLayerInput)]
    layers = []
    for number, residual in enumerate(blocks):
        linear = Linear(f"{number}.stream_router_{count}", count)
        router = StreamRouter(Norm(f"{number}.stream_norm", 1e-5), linear, 0.4)
        assert isinstance(residual.block, PerLayerInput)
        assert residual.after is not None
        scales = f"{number}.stream_scales" if scaled else ""
        coefficients = Linear(f"{number}.predict", count * count), Linear(f"{number}.correct", count)
        correction = StreamCorrection(router, coefficients[1], scales, residual.block, residual.after)
        layers.append((StreamPrediction(router, coefficients[0]), correction))
    expand, contract = (
        tuple(Linear(f"{name}_{number}", HIDDEN) for number in range(count - 1)) for name in ("expand", "contract")
    )
    residuals = tuple(residual for residual in model.residuals if residual not in blocks)
    return dataclasses.replace(model, residuals=residuals, streams=Streams(expand, contract, tuple(layers)))


def with_experts(model: Graph, *blocks: Experts) -> Graph:
    """Return a graph with these blocks instead of its feed-forward layers."""
    remaining = iter(blocks)
    residuals = [
        dataclasses.replace(residual, block=next(remaining)) if isinstance(residual.block, FeedForward) else residual
        for residual in model.residuals
    ]
    return dataclasses.replace(model, residuals=tuple(residuals))


def graph(
    *attentions: Mixer, embedding: dict[str, Any] | None = None,
    residual: dict[str, Any] | None = None, logits: dict[str, Any] | None = None, offset: float = 0.0,
) -> Graph:  # fmt: skip
    """Return a graph of two layers, with the given attentions and attributes."""
    residuals = []
    for layer in range(2):
        for name, block in (("a", attentions[layer] if attentions else attention(layer)), ("f", feed_forward(layer))):
            norm = Norm(f"{layer}.norm_{name}", 1e-5, weight_offset=offset)
            fields = {"before": norm, **(residual or {})}
            if fields.get("after") == "norm":
                fields["after"] = Norm(f"{layer}.after_{name}", 1e-5, weight_offset=offset)
            residuals.append(Residual(block, **fields))
    head = Logits(Norm("norm", 1e-5, weight_offset=offset), Linear("head", VOCAB), **(logits or {}))
    return Graph(Embedding("embed", VOCAB, HIDDEN, **(embedding or {})), tuple(residuals), head)


def layers_of(residual: Residual) -> tuple[Layer, ...]:
    """Return the layers of a residual block, which have the same input."""
    block = residual.block
    return block.layers if isinstance(block, Parallel) else (block,)


def random_tensors(model: Graph) -> Tensors:
    """Return random tensors for all names in the graph, of a size at which every operation matters."""
    random = _RandomTensors()
    random.add("embed", VOCAB, HIDDEN)
    random.add(model.embedding.positions, POSITIONS, HIDDEN)
    if (inputs := model.per_layer_inputs) is not None:
        random.add(inputs.embedding.weight, inputs.embedding.vocab_size, inputs.embedding.hidden_size)
        random.add_linear(inputs.projection, HIDDEN)
        random.add_norm(inputs.norm, inputs.width)
    for residual in model.residuals:
        random.add_norm(residual.before)
        random.add_norm(residual.after)
        random.add(residual.scalar, 1, scale=0.3, mean=1.0)
        for layer in layers_of(residual):
            random.add_layer(layer)
        if (laurel := residual.laurel) is not None:
            random.add_linear(laurel.left, HIDDEN)
            random.add_linear(laurel.right, laurel.left.outputs)
            random.add_norm(laurel.norm)
    if model.streams is not None:
        random.add_streams(model.streams)
    assert isinstance(model.logits, Logits)
    random.add_norm(model.logits.norm)
    random.add_linear(model.logits.linear, HIDDEN)
    return random.tensors


class _RandomTensors:
    def __init__(self) -> None:
        self.tensors: Tensors = {}

    def add(self, name: str, *shape: int, scale: float = 1.0, mean: float = 0.0) -> None:
        if name:
            rng = np.random.default_rng(list(name.encode()))
            self.tensors[name] = (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    def add_linear(self, linear: Linear, inputs: int) -> None:
        shape = inputs, linear.tensor_outputs or linear.outputs
        self.add(linear.weight, *(shape[:: 1 if linear.transposed else -1]), scale=1.2 * inputs**-0.5)
        self.add(linear.bias, linear.outputs)

    def add_norm(self, norm: Norm | None, width: int = HIDDEN) -> None:
        if norm is not None:
            self.add(norm.weight, width, scale=0.2, mean=1.0 - norm.weight_offset)
            self.add(norm.bias, width, scale=0.2)

    def add_layer(self, layer: Layer) -> None:
        if isinstance(layer, Experts):
            self.add_experts(layer)
            return
        if isinstance(layer, LatentAttention):
            self.add_latent_attention(layer)
            return
        if isinstance(layer, Branches):
            for branch in layer.branches:
                self.add_norm(branch.before)
                self.add_layer(branch.block)
                self.add_norm(branch.after)
            return
        if isinstance(layer, PerLayerInput):
            self.add_linear(layer.gate, HIDDEN)
            self.add_linear(layer.project, layer.gate.outputs)
            return
        if isinstance(layer, ShortConvolution | DeltaNet | StateSpace):
            self.add_state(layer)
            return
        read = HIDDEN
        if isinstance(layer, Attention):
            inputs, last, width = layer.projections, layer.output, layer.heads.query * layer.heads.dim
            inputs = (*inputs, *layer.gates)
            self.add(layer.sinks, layer.heads.query, scale=2.0)
            self.add_head_norms(layer.head_norms, layer.heads)
        else:
            inputs, last, width = (layer.up, *([layer.gate] if layer.gate else [])), layer.down, layer.up.outputs
            read = last.outputs
            if isinstance(layer.activation, Xielu):
                self.add_xielu(layer.activation)
        for linear in inputs:
            self.add_linear(linear, read)
        self.add_linear(last, width)

    def add_streams(self, streams: Streams) -> None:
        count = streams.count
        for linear in (*streams.expand, *streams.contract):
            self.add_linear(linear, HIDDEN)
        for prediction, correction in streams.layers:
            self.add_norm(prediction.router.norm)
            self.add_linear(prediction.router.linear, HIDDEN)
            for coefficients in (prediction.coefficients, correction.coefficients):
                self.add_linear(coefficients, count)
            self.add(correction.scales, HIDDEN, scale=0.3, mean=1.0)
            self.add_layer(correction.block)
            self.add_norm(correction.after)

    def add_experts(self, layer: Experts) -> None:
        self.add_linear(layer.router.linear, HIDDEN)
        self.add(layer.router.correction, len(layer.experts), scale=0.3)
        self.add(layer.router.expert_scales, len(layer.experts), scale=0.3, mean=1.0)
        self.add_norm(layer.router.norm)
        for linear, inputs in ((layer.compress, HIDDEN), (layer.expand, layer.experts[0].down.outputs)):
            if linear is not None:
                self.add_linear(linear, inputs)
        for expert in (*layer.experts, *([layer.shared] if layer.shared else [])):
            self.add_layer(expert)
        if layer.shared_gate is not None:
            self.add_linear(layer.shared_gate, HIDDEN)

    def add_state(self, layer: ShortConvolution | DeltaNet | StateSpace) -> None:
        convolution, width = layer.convolution, HIDDEN
        self.add(convolution.weight, convolution.channels, 1, convolution.taps)
        self.add(convolution.bias, convolution.channels, scale=0.3)
        if not isinstance(layer, ShortConvolution):
            width = layer.heads.value_columns
            self.add(layer.decay, layer.heads.values, mean=-1.0)
            self.add(layer.bias, layer.heads.values, scale=0.5)
            self.add_norm(layer.norm, layer.heads.value if isinstance(layer, DeltaNet) else width)
        if isinstance(layer, StateSpace):
            self.add(layer.skip, layer.heads.values)
        inputs = (*layer.projections, *layer.rates) if isinstance(layer, DeltaNet) else (layer.projection,)
        for linear in inputs:
            self.add_linear(linear, HIDDEN)
        self.add_linear(layer.output, width)

    def add_xielu(self, form: Xielu) -> None:
        self.add(form.alpha_p, 1)
        self.add(form.alpha_n, 1)
        self.add(form.beta, mean=0.5, scale=0.1)
        self.add(form.epsilon, mean=-0.3, scale=0.1)

    def add_latent_attention(self, layer: LatentAttention) -> None:
        heads, width = layer.latent_heads, HIDDEN
        if layer.compress is not None:
            self.add_linear(layer.compress, HIDDEN)
            width = layer.compress.outputs
            self.add_norm(layer.query_norm, width)
        self.add_linear(layer.query, width)
        self.add_linear(layer.latent, HIDDEN)
        self.add_norm(layer.latent_norm, heads.rank)
        self.add_linear(layer.expand, heads.rank)
        self.add_linear(layer.output, heads.query * heads.value)

    def add_head_norms(self, norms: HeadNorms | None, heads: Heads) -> None:
        if norms is not None:
            for name, number in ((norms.query, heads.query), (norms.key, heads.kv)):
                size = heads.dim * (number if norms.joint else 1)
                self.add(name, size, scale=0.3, mean=1.0 - norms.weight_offset)


@dataclasses.dataclass(frozen=True)
class GraphReference:
    """Interpreter of a graph: float64 throughout, the whole sequence at once."""

    graph: Graph
    tensors: Tensors
    kv: list[tuple[F64, F64]] = dataclasses.field(default_factory=list)  # of the attention layers so far

    def log_probabilities(self, tokens: list[int]) -> F64:
        """Return the log probability of every token but the first."""
        embedding, logits = self.graph.embedding, self.graph.logits
        assert isinstance(logits, Logits)
        x = embedding.scale * self._get(embedding.weight)[tokens]
        if embedding.positions:
            x = x + self._get(embedding.positions)[: len(tokens)]
        inputs = self._per_layer_inputs(tokens, x)
        self.kv.clear()
        if (streams := self.graph.streams) is not None:
            x = self._with_streams(streams, x, inputs)
        else:
            for residual in self.graph.residuals:
                x = self._residual(residual, x, inputs)
        x = x if logits.norm is None else self._norm(logits.norm, x)
        scores = _capped(logits.scale * self._linear(logits.linear, x), logits.softcap)
        normalizers = np.log(np.exp(scores).sum(-1))
        result: F64 = scores[np.arange(len(tokens) - 1), tokens[1:]] - normalizers[:-1]
        return result

    def _residual(self, residual: Residual, x: F64, inputs: F64) -> F64:
        block, laurel = residual.block, residual.laurel
        if isinstance(block, PerLayerInput):
            y = self._per_layer_input(block, x, inputs)
        else:
            layers = layers_of(residual)
            scales = (isinstance(block, Parallel) and block.scales) or (1.0,) * len(layers)
            pairs = zip(layers, scales, strict=True)
            y = np.sum([scale * self._normed(residual.before, layer, x) for layer, scale in pairs], axis=0)
        before = x
        x = x + residual.multiplier * (y if residual.after is None else self._norm(residual.after, y))
        x = x * self._get(residual.scalar) if residual.scalar else x
        if laurel is not None:
            assert residual.before is not None
            normed = self._norm(residual.before, before)
            short = self._linear(laurel.right, self._linear(laurel.left, normed))
            x = laurel.scale * (x + normed + self._norm(laurel.norm, short))
        return x

    def _per_layer_input(self, block: PerLayerInput, x: F64, inputs: F64) -> F64:
        return self._linear(block.project, _silu(self._linear(block.gate, x)) * inputs[:, block.layer])

    def _with_streams(self, streams: Streams, x: F64, inputs: F64) -> F64:
        """Return the hidden states after the last layer; each has two residual blocks."""

        def rescaled(values: F64, other: F64) -> F64:
            wanted, own = ((each**2).mean(-1, keepdims=True) for each in (other, values))
            result: F64 = values * np.sqrt(wanted / own)
            return result

        def routed(router: StreamRouter, values: F64) -> F64:
            result: F64 = np.tanh(router.scale * self._linear(router.linear, self._norm(router.norm, values)))
            return result

        stack = np.stack([x, *(rescaled(self._linear(linear, x), x) for linear in streams.expand)])
        for number, (prediction, correction) in enumerate(streams.layers):
            factors = self._linear(prediction.coefficients, routed(prediction.router, stack[0]))
            factors = factors.reshape(len(x), streams.count, streams.count)
            stack = stack + np.einsum("tij,jth->ith", factors, stack)
            y = stack[0]
            for residual in self.graph.residuals[2 * number : 2 * number + 2]:
                y = self._residual(residual, y, inputs)
            corrections = 1 + self._linear(correction.coefficients, routed(correction.router, y))
            stack = stack + corrections.T[:, :, None] * (y - stack[0])
            first = stack[0] * self._get(correction.scales) if correction.scales else stack[0]
            stack[1:] += self._norm(correction.after, self._per_layer_input(correction.block, first, inputs))
        pairs = zip(streams.contract, stack[1:], strict=True)
        joined = [stack[0], *(rescaled(self._linear(linear, stream), stack[0]) for linear, stream in pairs)]
        result: F64 = np.mean(joined, axis=0)
        return result

    def _per_layer_inputs(self, tokens: list[int], x: F64) -> F64:
        """Return the per-layer inputs, [tokens, layers, width]."""
        inputs = self.graph.per_layer_inputs
        if inputs is None:
            return np.empty((len(tokens), 0, 0))
        shape = len(tokens), -1, inputs.width
        projected = self._norm(inputs.norm, (inputs.scale * self._linear(inputs.projection, x)).reshape(shape))
        known = [token if token < inputs.embedding.vocab_size else 0 for token in tokens]
        rows = inputs.embedding.scale * self._get(inputs.embedding.weight)[known]
        result: F64 = inputs.multiplier * (rows.reshape(shape) + projected)
        return result

    def _normed(self, norm: Norm | None, layer: Layer, x: F64) -> F64:
        """Return a layer's output for norm(x)."""
        if isinstance(layer, Branches):
            outputs = [self._norm(each.after, self._normed(each.before, each.block, x)) for each in layer.branches]
            total: F64 = np.sum(outputs, axis=0)
            return total
        normed = x if norm is None else self._norm(norm, x)
        return self._experts(layer, normed, x) if isinstance(layer, Experts) else self._layer(layer, normed)

    def _get(self, name: str) -> F64:
        return self.tensors[name].astype(np.float64)

    def _linear(self, linear: Linear, x: F64) -> F64:
        weight = self._get(linear.weight)
        if linear.tensor_outputs:
            weight = weight[linear.first : linear.first + linear.outputs]
        y = x @ (weight if linear.transposed else weight.T)
        return y + self._get(linear.bias) if linear.bias else y

    def _norm(self, norm: Norm, x: F64) -> F64:
        x = x - x.mean(-1, keepdims=True) if norm.center else x
        y: F64 = (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.epsilon) * (self._get(norm.weight) + norm.weight_offset)
        )
        return y + self._get(norm.bias) if norm.bias else y

    def _layer(self, layer: Layer, x: F64) -> F64:
        if isinstance(layer, LatentAttention):
            return self._latent_attention(layer, x)
        if isinstance(layer, ShortConvolution):
            before, after, inner = np.split(self._linear(layer.projection, x), 3, axis=1)
            return self._linear(layer.output, after * self._convolution(layer.convolution, before * inner))
        if isinstance(layer, DeltaNet):
            return self._delta_net(layer, x)
        if isinstance(layer, StateSpace):
            return self._state_space(layer, x)
        if isinstance(layer, Attention):
            return self._attention(layer, x)
        assert isinstance(layer, FeedForward)
        return self._feed(layer, x)

    def _convolution(self, block: Convolution, x: F64) -> F64:
        weight = self._get(block.weight)[:, 0]
        if block.scales:
            x = x * np.concatenate([np.full(count, scale) for count, scale in block.scales])
        padded = np.concatenate([np.zeros((block.taps - 1, block.channels)), x])
        y: F64 = np.sum([padded[tap : tap + len(x)] * weight[:, tap] for tap in range(block.taps)], axis=0)
        y = y + self._get(block.bias) if block.bias else y
        return _silu(y) if block.activation else y

    def _delta_net(self, block: DeltaNet, x: F64) -> F64:
        heads, n = block.heads, len(x)
        rows = np.concatenate([self._linear(linear, x) for linear in block.projections], axis=1)
        mixed, gates = rows[:, : heads.channels], rows[:, heads.channels :]
        q, k, v = np.split(
            self._convolution(block.convolution, mixed), [heads.key_columns, 2 * heads.key_columns], axis=1
        )
        q, k = (values.reshape(n, heads.keys, heads.key) for values in (q, k))
        q, k = (values / np.sqrt((values**2).sum(-1, keepdims=True) + 1e-6) for values in (q, k))
        rates = np.concatenate([self._linear(linear, x) for linear in block.rates], axis=1)
        pairs = rates.reshape(n, -1, 2, block.rate_group or heads.values).transpose(2, 0, 1, 3).reshape(2, n, -1)
        decay = np.exp(-np.exp(self._get(block.decay)) * np.log1p(np.exp(pairs[1] + self._get(block.bias))))
        out, v = np.zeros((n, heads.values, heads.value)), v.reshape(n, heads.values, heads.value)
        for head in range(heads.values):
            state, key = np.zeros((heads.key, heads.value)), key_of(heads, head)
            for t in range(n):
                state = state * decay[t, head]
                delta = (v[t, head] - k[t, key] @ state) / (1 + np.exp(-pairs[0, t, head]))
                state = state + np.outer(k[t, key], delta)
                out[t, head] = q[t, key] @ state / np.sqrt(heads.key)
        normed = self._norm(block.norm, out).reshape(n, -1)
        return self._linear(block.output, normed * _silu(gates))

    def _state_space(self, block: StateSpace, x: F64) -> F64:
        heads, n = block.heads, len(x)
        rows = self._linear(block.projection, x)
        gates, mixed, times = np.split(rows, [heads.value_columns, heads.value_columns + heads.channels], axis=1)
        first = heads.value_columns
        v, k, q = np.split(self._convolution(block.convolution, mixed), [first, first + heads.key_columns], axis=1)
        q, k = (values.reshape(n, heads.keys, heads.key) for values in (q, k))
        v = v.reshape(n, heads.values, heads.value)
        t = np.clip(np.log1p(np.exp(block.time_scale * times + self._get(block.bias))), block.least, block.most or None)
        decay, skip = np.exp(-np.exp(self._get(block.decay)) * t), self._get(block.skip)
        out = np.zeros_like(v)
        for head in range(heads.values):
            state, key = np.zeros((heads.key, heads.value)), key_of(heads, head)
            for i in range(n):
                state = state * decay[i, head] + np.outer(k[i, key], t[i, head] * v[i, head])
                out[i, head] = q[i, key] @ state + skip[head] * v[i, head]
        gate, y = _silu(block.gate_scale * gates), out.reshape(n, -1)
        y = y * gate if block.gate_first else y
        if block.norm is not None:
            groups = y.reshape(n, block.norm_groups, -1)
            y = (groups / np.sqrt((groups**2).mean(-1, keepdims=True) + block.norm.epsilon)).reshape(n, -1)
            y = y * self._get(block.norm.weight)
        return self._linear(block.output, y if block.gate_first else y * gate)

    def _experts(self, block: Experts, x: F64, block_input: F64) -> F64:
        router = block.router
        routed = x if router.norm is None else self._norm(router.norm, block_input)
        read = x if block.compress is None else self._linear(block.compress, x)
        sums = np.zeros_like(read)
        for token, logits in enumerate(router.output_scale * self._linear(router.linear, routed)):
            for number, weight in self._routed(block.router, logits):
                sums[token] += weight * self._feed(block.experts[number], read[token : token + 1])[0]
        y = sums if block.expand is None else self._linear(block.expand, sums)
        if block.shared is not None:
            shared = self._feed(block.shared, x)
            gate = 1.0 if block.shared_gate is None else 1 / (1 + np.exp(-self._linear(block.shared_gate, x)))
            y = y + gate * shared
        return y

    def _routed(self, router: ExpertRouter, logits: F64) -> list[tuple[int, float]]:
        """Return the chosen experts of a token, the best first, and their weights."""
        if router.scoring == "softmax":
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        else:
            scores = 1 / (1 + np.exp(-logits))
        choice = scores + self._get(router.correction) if router.correction else scores
        grouped = choice.reshape(router.groups, -1)
        largest = -np.sort(-grouped, axis=1)
        ranking = largest[:, 0] if router.group_score == "max" else largest[:, :2].sum(1)
        allowed = np.isin(np.arange(router.groups), np.argsort(-ranking, kind="stable")[: router.top_groups])
        choice = np.where(np.repeat(allowed, grouped.shape[1]), choice, -np.inf)
        chosen = np.argsort(-choice, kind="stable")[: router.top_k]
        total = max(scores[chosen].sum(), router.least_sum) if router.normalize else 1.0
        weights = scores[chosen] / total * router.scale
        weights = weights * self._get(router.expert_scales)[chosen] if router.expert_scales else weights
        return list(zip(chosen.tolist(), weights.tolist(), strict=True))

    def _feed(self, block: FeedForward, x: F64) -> F64:
        if isinstance(block.activation, ClampedSwiglu):
            assert block.gate is not None
            limit, gain = block.activation.limit, block.activation.gain
            gate = np.minimum(self._linear(block.gate, x), limit)
            up = np.clip(self._linear(block.up, x), -limit, limit)
            return self._linear(block.down, gate / (1 + np.exp(-gain * gate)) * (up + 1))
        if isinstance(block.activation, Xielu):
            return self._linear(block.down, self._xielu(block.activation, self._linear(block.up, x)))
        inner = self._linear(block.up if block.gate is None else block.gate, x)
        if block.cutoff is not None:
            least = inner.mean(-1, keepdims=True) + block.cutoff * inner.std(-1, keepdims=True)
            inner = np.maximum(inner - least, 0)
        form = block.activation
        name, scale = (form.name, form.scale) if isinstance(form, ScaledActivation) else (form, 1.0)
        inner = _silu(scale * inner) if name == "silu" else np.maximum(scale * inner, 0) ** 2
        return self._linear(block.down, inner if block.gate is None else inner * self._linear(block.up, x))

    def _xielu(self, form: Xielu, x: F64) -> F64:
        alphas = (self._get(name).item() for name in (form.alpha_p, form.alpha_n))
        p, n = (np.log1p(np.exp(alpha)) for alpha in alphas)
        beta, epsilon = (self._get(name).item() for name in (form.beta, form.epsilon))
        below: F64 = (beta + n) * (np.expm1(np.minimum(x, epsilon)) - x)
        return np.where(x > 0, p * x**2, below) + beta * x

    def _attention(self, block: Attention, x: F64) -> F64:
        heads, n = block.heads, len(x)
        qkv = np.concatenate([self._linear(linear, x) for linear in block.projections], axis=1)
        q, k, v = np.split(qkv.reshape(n, -1, heads.dim).transpose(1, 0, 2), [heads.query, heads.query + heads.kv])
        v = k if block.keys_as_values else v
        norms = block.head_norms
        if norms is not None and not norms.after_rotation:
            q = self._head_norm(norms, norms.query, q)
            if block.kv_source is None:
                k = self._head_norm(norms, norms.key, k)
            v = v / np.sqrt((v**2).mean(2, keepdims=True) + norms.epsilon) if norms.values else v
        if block.rotary is not None:
            q, k = _rotated(q, block.rotary), _rotated(k, block.rotary)
        if norms is not None and norms.after_rotation:
            q, k = self._head_norm(norms, norms.query, q), self._head_norm(norms, norms.key, k)
        if block.query_scale is not None:
            steps = np.arange(n) // block.query_scale.length
            q = q * (1 + block.query_scale.beta * np.log(1 + steps))[:, None]
        self.kv.append((k, v) if block.kv_source is None else self.kv[block.kv_source])
        k, v = self.kv[-1]
        k, v = (np.repeat(values, heads.group, axis=0) for values in (k, v))
        scores = _capped((block.scale or heads.dim**-0.5) * q @ k.transpose(0, 2, 1), block.softcap)
        ages = np.arange(n)[:, None] - np.arange(n)
        scores = np.where((ages >= 0) & (ages < (block.window or n)), scores, -np.inf)
        weights = np.exp(scores)
        total = weights.sum(-1, keepdims=True)
        if block.sinks:
            total = total + np.exp(self._get(block.sinks))[:, None, None]
        y = (weights / total @ v).transpose(1, 0, 2).reshape(n, -1)
        if block.gates:
            gates = np.concatenate([self._linear(linear, x) for linear in block.gates], axis=1)
            y = y / (1 + np.exp(-gates))
        return self._linear(block.output, y)

    def _latent_attention(self, block: LatentAttention, x: F64) -> F64:
        """Compute keys and values of all heads from the latents, as the definition does."""
        heads, n = block.latent_heads, len(x)
        queries = x
        if block.compress is not None:
            assert block.query_norm is not None
            queries = self._norm(block.query_norm, self._linear(block.compress, x))
        q = self._linear(block.query, queries).reshape(n, heads.query, -1).transpose(1, 0, 2)
        latent, shared = np.split(self._linear(block.latent, x), [heads.rank], axis=1)
        expanded = self._linear(block.expand, self._norm(block.latent_norm, latent))
        k, v = np.split(expanded.reshape(n, heads.query, -1).transpose(1, 0, 2), [heads.nope], axis=2)
        scores = q[..., : heads.nope] @ k.transpose(0, 2, 1)
        scores = scores + _rotated(q[..., heads.nope :], block.rotary) @ _rotated(shared[None], block.rotary)[0].T
        weights = np.exp(np.where(np.tri(n, dtype=bool), block.scale * scores, -np.inf))
        weights = weights / weights.sum(-1, keepdims=True)
        return self._linear(block.output, (weights @ v).transpose(1, 0, 2).reshape(n, -1))

    def _head_norm(self, norms: HeadNorms, name: str, x: F64) -> F64:
        """Norm heads x [heads, tokens, dim]."""
        weight = self._get(name) + norms.weight_offset
        if norms.joint:
            weight = weight.reshape(len(x), 1, -1)
        square = (x**2).mean((0, 2) if norms.joint else 2, keepdims=True)
        y: F64 = x / np.sqrt(square + norms.epsilon) * weight
        return y


def _silu(x: F64) -> F64:
    y: F64 = x / (1 + np.exp(-x))
    return y


def _capped(x: F64, cap: float) -> F64:
    return cap * np.tanh(x / cap) if cap else x


def _rotated(x: F64, rope: Rope) -> F64:
    span = rope.span or rope.dim
    half = span // 2
    frequencies = np.where(np.arange(half) < rope.dim // 2, rope.theta ** -(np.arange(half) / half), 0)
    angles = np.arange(x.shape[1])[:, None] * frequencies
    rotated, rest = x[..., :span], x[..., span:]
    turned = [rotated[..., 0::2], rotated[..., 1::2]] if rope.interleaved else np.split(rotated, 2, axis=-1)
    y = (turned[0] + 1j * turned[1]) * np.exp(1j * angles)
    pairs = [y.real, y.imag]
    rotated = np.stack(pairs, axis=-1).reshape(rotated.shape) if rope.interleaved else np.concatenate(pairs, axis=-1)
    return np.concatenate([rotated, rest], axis=-1)
