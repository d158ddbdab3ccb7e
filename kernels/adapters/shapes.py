"""The tensors of a base model that adapters may change, from its graph."""

from __future__ import annotations

from collections.abc import Iterator

from quire.kernels.adapted import HEAD
from quire.kernels.graph.operations import (
    Attention,
    Branches,
    DeltaNet,
    DraftInput,
    Experts,
    FeedForward,
    Graph,
    LatentAttention,
    Linear,
    Logits,
    Mixer,
    Norm,
    Parallel,
    PerLayerInput,
    ShortConvolution,
    StateSpace,
    Streams,
)

_Block = Mixer | FeedForward | Experts | Parallel | Branches | PerLayerInput
_Inputs = Iterator[tuple[Linear, int]]


def linear_shapes(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return the weights of all linear layers by name, [outputs, inputs], also those that are stored transposed.

    They are whole tensors where layers are parts of one. The head is `HEAD`, tied or not.
    """
    embedding = graph.embedding.weight
    return {
        HEAD if linear.weight == embedding else linear.weight: (
            linear.tensor_outputs or linear.outputs,
            linear.tensor_inputs or inputs,
        )
        for linear, inputs in _linears(graph)
    }


def unread_shapes(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return the weights of linear layers that adapters may change though nothing reads them, [outputs, inputs]."""
    hidden, attentions = graph.embedding.hidden_size, graph.attentions
    layers = [layer for each in attentions if isinstance(each, Attention) for layer in each.unread]
    return {layer.weight: (layer.outputs, hidden) for layer in layers}


def other_shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Return other tensors that adapters may replace: the embedding, biases, and weights of norms."""
    hidden = graph.embedding.hidden_size
    shapes: dict[str, tuple[int, ...]] = {graph.embedding.weight: (graph.embedding.vocab_size, hidden)}
    for linear, _ in _linears(graph):
        if linear.bias:
            shapes[linear.bias] = (linear.tensor_outputs or linear.outputs,)
    for norm in _norms(graph):
        shapes |= {name: (hidden,) for name in (norm.weight, norm.bias) if name}
    if (inputs := graph.per_layer_inputs) is not None:
        shapes[inputs.norm.weight] = (inputs.width,)
    for mixer in graph.mixers:
        shapes |= {name: (size,) for name, size in _norms_of_mixer(mixer)}
    return shapes


def _norms(graph: Graph) -> Iterator[Norm]:
    around = [(residual.before, residual.after, residual.around) for residual in graph.residuals]
    norms = [graph.embedding.norm, graph.logits.norm, *(norm for three in around for norm in three)]
    norms += [residual.laurel.norm for residual in graph.residuals if residual.laurel is not None]
    for residual in graph.residuals:
        norms += _norms_of_block(residual.block)
    for prediction, correction in () if graph.streams is None else graph.streams.layers:
        norms += [prediction.router.norm, correction.after]
    yield from (norm for norm in norms if norm is not None)


def _norms_of_block(block: _Block) -> list[Norm | None]:
    """Return the norms of hidden states within a block."""
    if isinstance(block, Branches):
        around = [norm for branch in block.branches for norm in (branch.before, branch.after)]
        return [*around, *(norm for branch in block.branches for norm in _norms_of_block(branch.block))]
    return [block.router.norm] if isinstance(block, Experts) else []


def _norms_of_mixer(mixer: Mixer) -> Iterator[tuple[str, int]]:
    """Yield the weights of norms within a layer, each with its number of elements."""
    if isinstance(mixer, Attention) and (norms := mixer.head_norms) is not None:
        heads = mixer.heads
        yield norms.query, heads.dim * (heads.query if norms.joint else 1)
        if mixer.kv_source is None:
            yield norms.key, heads.dim * (heads.kv if norms.joint else 1)
    elif isinstance(mixer, LatentAttention):
        yield mixer.latent_norm.weight, mixer.latent_heads.rank
        if mixer.query_norm is not None and mixer.compress is not None:
            yield mixer.query_norm.weight, mixer.compress.outputs
    elif isinstance(mixer, DeltaNet):
        yield mixer.norm.weight, mixer.heads.value
    elif isinstance(mixer, StateSpace) and mixer.norm is not None:
        yield mixer.norm.weight, mixer.heads.value_columns


def _linears(graph: Graph) -> _Inputs:
    """Yield all linear layers, each with the number of inputs that it reads."""
    hidden = graph.embedding.hidden_size
    if isinstance(graph.logits, Logits):
        yield graph.logits.linear, hidden
    if graph.per_layer_inputs is not None:
        yield graph.per_layer_inputs.projection, hidden
    if graph.draft_input is not None:
        yield from _of_draft_input(graph.draft_input, hidden)
    for residual in graph.residuals:
        yield from _of_block(residual.block, hidden)
        if (laurel := residual.laurel) is not None:
            yield laurel.left, hidden
            yield laurel.right, laurel.left.outputs
    if graph.streams is not None:
        yield from _of_streams(graph.streams, hidden)


def _of_streams(streams: Streams, hidden: int) -> _Inputs:
    yield from ((linear, hidden) for linear in (*streams.expand, *streams.contract))
    for prediction, correction in streams.layers:
        yield prediction.router.linear, hidden
        yield from ((each.coefficients, streams.count) for each in (prediction, correction))
        yield from _of_block(correction.block, hidden)


def _of_draft_input(draft: DraftInput, hidden: int) -> _Inputs:
    if draft.encode is not None:
        yield draft.encode, draft.width * draft.features.count
    if draft.combine is not None:
        yield draft.combine, hidden
    if draft.embedded is not None:
        yield from ((linear, hidden) for linear in draft.embedded.layers)


def _of_block(block: _Block, hidden: int) -> _Inputs:
    if isinstance(block, Parallel):
        for layer in block.layers:
            yield from _of_block(layer, hidden)
    elif isinstance(block, Branches):
        for branch in block.branches:
            yield from _of_block(branch.block, hidden)
    elif isinstance(block, FeedForward):
        ups = (block.up,) if block.gate is None else (block.gate, block.up)
        yield from ((linear, hidden) for linear in ups)
        yield block.down, block.up.outputs
    elif isinstance(block, Experts):
        yield from _of_experts(block, hidden)
    elif isinstance(block, PerLayerInput):
        yield block.gate, hidden
        yield block.project, block.gate.outputs
    else:
        yield from _of_mixer(block, hidden)


def _of_experts(block: Experts, hidden: int) -> _Inputs:
    yield block.router.linear, hidden
    inputs = hidden
    if block.compress is not None:
        yield block.compress, hidden
        inputs = block.compress.outputs
    for feed_forward in block.experts:
        yield from _of_block(feed_forward, inputs)
    if block.expand is not None:
        yield block.expand, inputs
    if block.shared is not None:
        yield from _of_block(block.shared, hidden)
    if block.shared_gate is not None:
        yield block.shared_gate, hidden


def _of_mixer(block: Mixer, hidden: int) -> _Inputs:
    if isinstance(block, Attention):
        embedded = () if block.embedded is None else block.embedded.layers
        yield from ((linear, hidden) for linear in (*block.projections, *embedded, *block.gates))
        yield block.output, block.heads.query * block.heads.dim
    elif isinstance(block, LatentAttention):
        compressed = hidden if block.compress is None else block.compress.outputs
        if block.compress is not None:
            yield block.compress, hidden
        yield block.query, compressed
        yield block.latent, hidden
        yield block.expand, block.latent_heads.rank
        yield block.output, block.latent_heads.query * block.latent_heads.value
    elif isinstance(block, ShortConvolution):
        yield block.projection, hidden
        yield block.output, block.convolution.channels
    elif isinstance(block, DeltaNet):
        yield from ((linear, hidden) for linear in (*block.projections, *block.rates))
        yield block.output, block.heads.value_columns
    else:
        yield block.projection, hidden
        yield block.output, block.heads.value_columns
