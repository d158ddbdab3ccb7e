"""Tensors of PEFT's files, by the tensor of the base model that they change, and what they may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quire.kernels.adapted import HEAD
from quire.kernels.adapters.files import StoredTensor
from quire.kernels.adapters.peft_config import CONFIG, PeftConfig
from quire.kernels.adapters.tensors import check_form
from quire.kernels.errors import ModelError

FORMS = (
    (re.compile(r"(?P<module>.+)\.lora_A(\.default)?\.weight"), "A"),
    (re.compile(r"(?P<module>.+)\.lora_B(\.default)?\.weight"), "B"),
    (re.compile(r"(?P<module>.+)\.lora_B(\.default)?\.bias"), "bias"),
    (re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.default)?(\.weight)?"), "magnitude"),
    (re.compile(r"(?P<module>.+)\.lora_embedding_A(\.default)?"), "embedding A"),
    (re.compile(r"(?P<module>.+)\.lora_embedding_B(\.default)?"), "embedding B"),
    (re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(\.default)?"), "tokens"),
    (re.compile(r"(?P<module>.+?)(\.base_layer)?\.weight"), "replaced"),
    (re.compile(r"(?P<module>.+?)(\.base_layer)?\.bias"), "replaced bias"),
)
"""Names of tensors after the prefix, and which part of a module's change they are: the first that matches."""

OF_LINEAR, OF_EMBEDDING = ("A", "B", "bias", "magnitude"), ("embedding A", "embedding B")
WHOLE, TOKENS = ("replaced", "replaced bias"), ("tokens",)


@dataclass
class Changed:
    """The parts of the change of a base tensor. `module` is the path in the file of the module that has the tensor."""

    module: str
    parts: dict[str, StoredTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PeftChecks:
    """Checks of what a file changes: `linear` are the base's linear layers, `shapes` all of its tensors."""

    path: Path
    config: PeftConfig
    linear: Mapping[str, tuple[int, int]]
    shapes: Mapping[str, tuple[int, ...]]

    def may_have(self, name: str, part: str) -> bool:
        """Return whether a tensor of the base can have a part."""
        if part in OF_LINEAR:
            return name in self.linear or (part == "magnitude" and len(self.shapes[name]) == 2)
        if part in OF_EMBEDDING:
            return name not in self.linear and len(self.shapes[name]) == 2
        return part not in TOKENS or len(self.shapes[name]) == 2

    def check(self, name: str, change: Changed) -> None:
        """Raise ModelError unless a change has all of its parts, in the shapes of the base."""
        if not change.parts.keys().isdisjoint(OF_LINEAR) and name in self.linear:
            self._check_layer(name, change)
        if not change.parts.keys().isdisjoint({*OF_EMBEDDING, "magnitude"}) and name not in self.linear:
            self._check_embedding(name, change)
        for part in WHOLE:
            if part in change.parts:
                self._check_whole(name, change.parts[part])
        if "tokens" in change.parts:
            self._check_tokens(name, change)

    def _check_layer(self, name: str, change: Changed) -> None:
        config = self.config
        for part, is_wanted, option in (
            ("A", True, ""), ("B", True, ""), ("bias", config.lora_bias, "lora_bias"),
            ("magnitude", config.use_dora, "use_dora"),
        ):  # fmt: skip
            if (part in change.parts) != is_wanted:
                raise self._incomplete(change.module, part, is_wanted, option)
        (outputs, inputs), rank = self.linear[name], config.rank_of(change.module)
        self._check_forms(name, change, rank, {
            "A": (rank, inputs), "B": (outputs, rank), "bias": (outputs,), "magnitude": (outputs,),
        })  # fmt: skip

    def _check_embedding(self, name: str, change: Changed) -> None:
        if self.config.use_dora or "magnitude" in change.parts:
            raise ModelError(
                f"{self.config.path}: use_dora changes {change.module} too, and an embedding can't have it; merge the "
                "adapter into its model with peft's merge_and_unload(), or train it without the embedding"
            )
        for part in OF_EMBEDDING:
            if part not in change.parts:
                raise self._incomplete(change.module, part, True)
        (vocabulary, hidden), rank = self.shapes[name], self.config.rank_of(change.module)
        self._check_forms(name, change, rank, {"embedding A": (rank, vocabulary), "embedding B": (hidden, rank)})

    def _check_forms(self, name: str, change: Changed, rank: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        reason = f"rank {rank} of {CONFIG} with {name} {list(self.shapes[name])} of the base model"
        for part, shape in shapes.items():
            if part in change.parts:
                check_form(self.path, change.parts[part], shape, reason)

    def _check_whole(self, name: str, tensor: StoredTensor) -> None:
        if self.config.fan_in_fan_out and name in self.linear and name != HEAD:
            raise ModelError(
                f"{self.path} replaces {name}, but {CONFIG} has fan_in_fan_out, so that it may be transposed; train "
                "without it among modules_to_save"
            )
        check_form(self.path, tensor, self.shapes[name], f"{name} of the base model")

    def _check_tokens(self, name: str, change: Changed) -> None:
        tokens, (vocabulary, hidden) = self.config.tokens_of(change.module), self.shapes[name]
        if max(tokens) >= vocabulary:
            raise ModelError(
                f"{self.config.path}: trainable_token_indices has token {max(tokens)}, but {name} of the base model "
                f"has {vocabulary} rows; give an adapter of this base model"
            )
        reason = f"{name} of the base model with {len(tokens)} trainable_token_indices"
        check_form(self.path, change.parts["tokens"], (len(tokens), hidden), reason)

    def _incomplete(self, module: str, part: str, is_wanted: bool, option: str = "") -> ModelError:
        """Return the error for a module that lacks a part, or has one that it may not have."""
        has = "lacks" if is_wanted else "has"
        because = f" where {CONFIG} has {option} {str(is_wanted).lower()}" if option else ""
        return ModelError(f"{self.path} {has} the part {part} of {module}{because}; save the adapter again")
