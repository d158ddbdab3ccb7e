"""Outputs of a model besides text: embeddings, and scores of labels."""

from __future__ import annotations

import msgspec

QWEN3_RERANKER = "qwen3-reranker"
"""The pair template that Qwen3-Reranker was trained with."""


class PoolingInfo(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The tasks of a model, and how its prompts are pooled if a request does not say.

    `labels` are empty if it does not classify; `activation` turns their logits into scores. `prompts` are put before
    texts by name, `default_prompt_name` unless a request names another; their tokens are pooled too if
    `includes_prompt`. `similarity` of two embeddings is cosine, dot, euclidean or manhattan. An encoder computes whole
    prompts, of up to `num_token_types` segments. `pair_template` names the text that a pair becomes, "" for the
    tokenizer's own pairs.
    """

    generates: bool = True
    embeds: bool = True
    pooling_type: str = "last"
    normalize: bool = True
    labels: tuple[str, ...] = ()
    activation: str = "identity"
    classifier_pooling: str = "last"
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    includes_prompt: bool = True
    similarity: str = "cosine"
    lowercase: bool = False
    pair_template: str = ""
    is_encoder: bool = False
    num_token_types: int = 1

    @property
    def tasks(self) -> str:
        """The tasks in words, for errors."""
        count = len(self.labels)
        named = {
            "generates text": self.generates,
            "embeds": self.embeds,
            "scores by one label": count == 1,
            f"classifies by {count} labels": count > 1,
        }
        return " and ".join(name for name, can in named.items() if can)
