"""Draft heads: models of a layer or a few that read hidden states of another model, and draft what it samples.

See models/eagle.py and models/mtp.py for what can be loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from quire.kernels._native import StepResult
from quire.kernels.assembly import Rows
from quire.kernels.emit.context import EmitContext
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import DraftInput, Features, Graph, HiddenStates, Logits
from quire.kernels.lowering.model import lower
from quire.kernels.models import build_graph, eagle, mtp
from quire.kernels.operands import Matrix
from quire.kernels.options import LoadOptions, choose_limits, config_of
from quire.kernels.plan import FEATURES, HIDDEN
from quire.kernels.runner import ModelRunner, assemble
from quire.kernels.step import StepInput
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.gguf_checkpoint import open_checkpoint
from quire.kernels.weights.loader import check
from quire.kernels.weights.quantization import choose_quantization


@dataclass(frozen=True)
class _Head:
    """A head's files and graph; `shared` are tensors that it has from its model."""

    folder: str
    checkpoint: Checkpoint
    graph: Graph
    shared: frozenset[str]

    @property
    def draft_input(self) -> DraftInput:
        """Operation that it begins with."""
        assert self.graph.draft_input is not None
        return self.graph.draft_input


@contextmanager
def _about(model: str) -> Iterator[None]:
    """Let errors say that they are about the head."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"speculative_config: the draft head {model}: {error}") from error


def _open(model: str | None, method: str, target: LoadOptions) -> _Head:
    """Open a head for the model that is loaded by `target`, from those files if `model` is None. Raises ModelError."""
    checkpoint = open_checkpoint(target.model)
    config = config_of(target, checkpoint)
    graph = build_graph(config)
    if isinstance(graph.logits, HiddenStates):
        raise ModelError(
            f"speculative_config: the model {target.model} samples no tokens, so there is nothing to draft"
        )
    if model is not None:
        return _open_eagle(model, method, target.model, graph, graph.logits)
    try:
        return _Head(target.model, checkpoint, *mtp.build_head(config, graph, checkpoint.has))
    except ModelError as error:
        raise ModelError(f"speculative_config: {target.model}: {error}") from error


def _open_eagle(model: str, method: str, target: str, graph: Graph, logits: Logits) -> _Head:
    """Open the files of an EAGLE head for a model with this graph."""
    with _about(model):
        checkpoint = Checkpoint(model)
        head = eagle.head_config(checkpoint.config)
        own, given = eagle.method_of(head), head.size("vocab_size")
    if own is not None and own != method:
        raise ModelError(f"speculative_config: {model} is a draft head of method {own}, and method is {method!r}")
    vocab = graph.embedding.vocab_size
    if given != vocab:
        raise ModelError(
            f"speculative_config: the draft head {model} has a vocabulary of {given} tokens, and {target} one of "
            f"{vocab}; it must be made for this model"
        )
    size, layers = graph.embedding.hidden_size, graph.num_layers
    drafted = eagle.DraftedModel(size, layers, graph.embedding.weight, logits)
    with _about(model):
        return _Head(model, checkpoint, *eagle.build_head(head, method, drafted, checkpoint.has))


def features_for(model: str | None, method: str, target: LoadOptions) -> Features:
    """Return the hidden states that a draft head needs of its model. Raises ModelError.

    `model` is its folder, None for one that the model's own files have.
    """
    return _open(model, method, target).draft_input.features


class DraftHead:
    """A loaded draft head, with sequences and KV pages of its own. Not thread-safe.

    Its sequence of a request are the tokens from some position + 1 on, beside the model's features from that position
    on. A step computes rows either from features (`run`), or from the hidden states that the step before it has left
    (`go_on`).
    """

    def __init__(
        self,
        graph: Graph,
        options: LoadOptions,
        checkpoint: Checkpoint,
        context: EmitContext,
        lent: Mapping[Matrix, int],
    ) -> None:
        """Load the head `graph`, with matrices and the dtypes of its model. Raises ModelError."""
        assert graph.draft_input is not None
        names = {part.tensor: matrix for matrix in lent for part in matrix.parts}
        chosen = choose_quantization(options.quantization, checkpoint, config_of(options, checkpoint))
        quantization = chosen.of_head(graph.attentions[0].output, names)
        limits = choose_limits(options, graph.max_positions)
        plan = lower(graph, context, limits, quantization)
        check(quantization, plan.weights)
        self._assembly = assembly = assemble(plan, options)
        for matrix, address in lent.items():
            assembly.loader.addresses[matrix] = address
        assembly.open_kv()
        self.max_model_len = limits.max_model_len
        self.max_num_batched_tokens = limits.max_num_batched_tokens
        self.sequences = assembly.native.sequences
        self.num_features = graph.draft_input.features.count
        self.lookahead = graph.draft_input.features.lookahead
        self._hidden = assembly.rows(HIDDEN, plan.hidden_size)
        self._encodes = graph.draft_input.encode is not None
        width = graph.draft_input.width * self.num_features
        self._features = assembly.rows(FEATURES, width) if self._encodes else self._hidden
        self._last_rows = np.zeros(0, np.int64)  # of the sequences in the step before

    def run(self, step: StepInput, features: Sequence[Rows]) -> StepResult:
        """Compute a step from features, f32 arrays [tokens, width] for each sequence; sample where a sequence ends."""
        first = 0
        for rows in features:
            self._features[first : first + len(rows)] = rows
            first += len(rows)
        if self._encodes:
            self._assembly.native.encode(first)
        return self._compute(step)

    def go_on(self, rows: list[int], step: StepInput) -> StepResult:
        """Compute the next token of sequences that were in the step before as its number `rows`."""
        self._hidden[: len(rows)] = self._hidden[self._last_rows[rows]]
        return self._compute(step)

    def fork(self, slot: int, source: int, num_computed: int, num_tokens: int) -> bool:
        """Give a slot without pages what another has computed; return False if there are too few pages."""
        return self._assembly.native.fork(slot, source, num_computed, num_tokens)

    def _compute(self, step: StepInput) -> StepResult:
        self._last_rows = np.cumsum(step.counts) - 1
        return self._assembly.native.step(step.slots, step.starts, step.counts)


def load_draft_head(
    model: str | None, method: str, options: LoadOptions, target: LoadOptions, runner: ModelRunner
) -> DraftHead:
    """Load a head beside its model, `runner`, which was loaded by `target`. Raises ModelError.

    `model` is its folder, None for one that the model's own files have.
    """
    head = _open(model, method, target)
    with _about(head.folder):
        if head.draft_input.features.lookahead:
            shape = 1, head.draft_input.width
            runner.set_lookahead(head.checkpoint.get(eagle.LOOKAHEAD_EMBEDDING, shape).to_f32()[0])
        own = replace(options, model=head.folder)
        return DraftHead(head.graph, own, head.checkpoint, runner.context, runner.lend(head.shared))
