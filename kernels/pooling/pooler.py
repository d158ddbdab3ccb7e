"""The pooler of a checkpoint: whether it embeds or classifies prompts, and how."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.kernels._native import Runner
from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph, Logits
from quire.kernels.pooling.heads import Classifier, HeadLayer, HeadPart, HeadTokens, native_head, num_labels, read_head
from quire.kernels.pooling.sentence_transformers import SentenceTransformer, read_sentence_transformer, scoring_tokens
from quire.kernels.pooling.token_ids import token_ids_of
from quire.kernels.weights.checkpoint import Checkpoint

QWEN3_RERANKER = "qwen3-reranker"
"""The template of query and document that Qwen3-Reranker was trained with."""

_MOST_LABELS = 4096
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}  # of sentence-transformers
_PROBLEMS = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "identity",
}


@dataclass(frozen=True)
class Pooler:
    """Pooling of a model's prompts. The head belongs to the classification if there are `labels`, else to embeddings.

    `embedding_size` is 0 for a model that does not embed. `activation` turns logits of labels into scores.
    `pair_template` names the text that a pair becomes, "" for the tokenizer's own pairs. `parts` describe the head of a
    classification, which adapters may change.
    """

    generates: bool
    embedding_size: int
    embedding: SentenceTransformer
    head: tuple[HeadLayer, ...] = ()
    labels: tuple[str, ...] = ()
    activation: str = "identity"
    classifier_pooling: str = "last"
    pair_template: str = ""
    parts: tuple[HeadPart, ...] = ()

    def load(self, runner: Runner) -> None:
        """Give the runner the pooling head."""
        runner.set_pooling_head(0, native_head(self.head))


@dataclass(frozen=True)
class _Labels:
    names: tuple[str, ...]
    activation: str
    classifier: Classifier
    pair_template: str = field(default="")


def choose_pooler(
    config: ModelConfig, graph: Graph, logits: Logits | None, classifier: Classifier | None, checkpoint: Checkpoint
) -> Pooler:
    """Return the pooler of a checkpoint; a sentence-transformers configuration is followed. Raises ModelError.

    `logits`: those that a decoder has in the checkpoint, whether or not its class gives them. `classifier`: the head of
    a classification model.
    """
    generates, hidden = isinstance(graph.logits, Logits), graph.embedding.hidden_size
    found = _from_tokens(config, logits, checkpoint)
    if found is None and classifier is not None:
        found = _from_config(config, classifier)
    embeds = classifier is None
    own = read_sentence_transformer(checkpoint.folder, hidden) if embeds else None
    if own is not None and own.head and found is not None:
        raise ModelError(f"{checkpoint.folder}: a classifier from tokens can't be combined with a Dense module")
    head = own.head if own is not None else ()
    embedding = own or SentenceTransformer("mean" if graph.is_encoder else "last", normalize=True)
    size = len(head[-1].weight) if head else hidden
    if found is None:
        return Pooler(generates, size, embedding, head)
    layers = read_head(found.classifier.parts, checkpoint, hidden)
    return Pooler(
        generates, size if embeds else 0, embedding, layers, found.names, found.activation,
        found.classifier.pooling_type, found.pair_template, found.classifier.parts,
    )  # fmt: skip


def _from_config(config: ModelConfig, classifier: Classifier) -> _Labels:
    """Return the labels of a classification model."""
    count, names = num_labels(config), config.options("id2label")
    if count > _MOST_LABELS:
        raise ModelError(f"config.json: id2label has {count} labels; {_MOST_LABELS} are supported")
    labels = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))
    is_reranker = config.architecture == "Qwen3ForSequenceClassification" and count == 1
    return _Labels(labels, _activation_of(config, count), classifier, QWEN3_RERANKER if is_reranker else "")


def _activation_of(config: ModelConfig, count: int) -> str:
    """Return the activation that sentence-transformers has saved, or that the kind of the problem implies."""
    saved = config.section("sentence_transformers").get("activation_fn", "")
    saved = saved or config.get("sbert_ce_default_activation_function", "")
    if saved:
        kind = saved.rsplit(".", maxsplit=1)[-1]
        if kind not in _ACTIVATIONS:
            raise ModelError(
                f"config.json: the activation of scores is {saved!r}; it must be one of {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[kind]
    problem = config.get("problem_type", "")
    if problem:
        return _PROBLEMS[config.choice("problem_type", tuple(_PROBLEMS))]
    return "sigmoid" if count == 1 else "softmax"


def _from_tokens(config: ModelConfig, logits: Logits | None, checkpoint: Checkpoint) -> _Labels | None:
    """Return the labels of a decoder that answers by one of a few tokens, as its configuration lists them."""
    tokens = config.strings("classifier_from_token")
    scoring = None if tokens else scoring_tokens(checkpoint.folder)
    if not tokens and scoring is None:
        return None
    if logits is None:
        raise ModelError(f"a classifier from tokens needs a decoder with logits; {config.architecture} has none")
    if scoring is not None:
        if not config.architecture.startswith("Qwen3For"):
            raise ModelError(
                f"{checkpoint.folder}: the module LogitScore is supported for Qwen3-Reranker, whose pairs have a known "
                f"form, and not for {config.architecture}"
            )
        return _of_tokens(logits, ("no", "yes"), scoring, QWEN3_RERANKER)
    is_qwen3 = config.get("is_original_qwen3_reranker", False)
    method = config.get("method", "from_2_way_softmax" if is_qwen3 else "no_post_processing")
    if method not in ("from_2_way_softmax", "no_post_processing"):
        raise ModelError(
            f"config.json: method is {method!r}; a classifier from tokens is made by 'from_2_way_softmax' or "
            "'no_post_processing'"
        )
    ids = token_ids_of(checkpoint.folder, tokens)
    if method == "from_2_way_softmax":
        if len(tokens) != 2:
            raise ModelError(f"config.json: classifier_from_token has {len(tokens)} tokens; {method} needs 2")
        return _of_tokens(logits, tokens, ids, QWEN3_RERANKER if is_qwen3 else "")
    part = HeadTokens(logits.linear.weight, logits.linear.outputs, ids)
    return _Labels(tokens, _activation_of(config, len(tokens)), Classifier("last", (part,)))


def _of_tokens(logits: Logits, names: tuple[str, ...], token_ids: tuple[int, ...], pair_template: str) -> _Labels:
    """Return the label of the second of two tokens, whose score is its softmax over both."""
    part = HeadTokens(logits.linear.weight, logits.linear.outputs, token_ids, difference=True)
    return _Labels((names[1],), "sigmoid", Classifier("last", (part,)), pair_template)
