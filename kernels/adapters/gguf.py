"""Adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

Tensors have the names of the base's in a GGUF file, with `.lora_a` [rank, inputs] and `.lora_b` [outputs, rank] after
them; those of experts are stacked. B has the rows in the order of the base's file: where the architecture permutes
those of q and k, they are put back in the order of a model folder. The scale is alpha / rank, or 1 if alpha is 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.kernels.adapters.adapter import Adapter, LowRank
from quire.kernels.adapters.names import BaseNames
from quire.kernels.adapters.tensors import MOST_NAMED, MOST_TENSORS, check_finite, check_shape, read_file
from quire.kernels.attention_heads import Heads
from quire.kernels.errors import ModelError
from quire.kernels.gguf.architectures import ARCHITECTURES
from quire.kernels.gguf.architectures.description import Architecture
from quire.kernels.gguf.container import GgufTensor, parse_gguf
from quire.kernels.weights.gguf_checkpoint import PermutedTensor
from quire.kernels.weights.latent_tensors import dequantized
from quire.kernels.weights.tensor import Tensor

_LONGEST_TEXT = 100_000
_TENSOR = re.compile(r"(?P<stem>(blk\.(?P<layer>\d{1,6})\.)?(?P<part>\w+))\.weight\.lora_(?P<half>[ab])")
_EMBEDDING = "token_embd"
_CONVERTED = re.compile(r"transformer\.h\..*|.*\.(linear_attn|mamba|mixer|conv)\..*")
"""Modules whose weights the conversion transposes, reorders or takes apart, by their names in a model folder."""


@dataclass
class _Halves:
    """The two tensors of a change, by `a` and `b`, and whether the base's file has the rows permuted."""

    is_permuted: bool
    found: dict[str, GgufTensor] = field(default_factory=dict)


def read_gguf_adapter(
    path: Path, shapes: Mapping[str, tuple[int, int]], *, heads: Heads, max_rank: int,
    others: Mapping[str, tuple[int, ...]] | None = None,
) -> Adapter:  # fmt: skip
    """Read an adapter, as `peft.read_adapter`. `heads` are those of the base's attention, the same in all layers.

    Raises ModelError. The architecture of the file is not compared with the base's, only the tensors are.
    """
    model = parse_gguf(path, read_file(path, {**(others or {}), **shapes}, max_rank))
    if len(model.tensors) > MOST_TENSORS:
        raise ModelError(f"{path} has {len(model.tensors)} tensors; {MOST_TENSORS} are allowed")
    return _GgufReader(path, model.metadata, shapes, others or {}, heads, max_rank).read(model.tensors)


class _GgufReader:
    def __init__(
        self, path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]],
        others: Mapping[str, tuple[int, ...]], heads: Heads, max_rank: int,
    ) -> None:  # fmt: skip
        self._path, self._metadata, self._linear = path, metadata, shapes
        self._shapes: dict[str, tuple[int, ...]] = {**others, **shapes}
        self._names, self._heads, self._max_rank = BaseNames(self._shapes), heads, max_rank
        self._check_kind()
        self._architectures = self._possible_architectures()
        self._alpha = self._read_alpha()

    def read(self, tensors: Mapping[str, GgufTensor]) -> Adapter:
        """Return the adapter that has these tensors."""
        changes: dict[str, _Halves] = {}
        unknown = [name for name, tensor in tensors.items() if not self._enter(changes, tensor)]
        if unknown:
            raise ModelError(
                f"{self._path} has {len(unknown)} tensors that are not of this base model, or not supported: "
                f"{', '.join(sorted(unknown)[:MOST_NAMED])}; give an adapter of this base model, or PEFT's folder"
            )
        if not changes:
            raise ModelError(f"{self._path} has no tensors; convert the adapter again")
        layers: dict[str, LowRank] = {}
        embeddings: dict[str, LowRank] = {}
        for name, halves in changes.items():
            for half in "ab":
                if half not in halves.found:
                    raise ModelError(f"{self._path} lacks the lora_{half} of {name}; convert the adapter again")
            if "*" in name:
                layers.update(self._experts(name, halves))
            elif name in self._linear:
                layers[name] = self._change(name, halves, self._linear[name])
            else:
                embeddings[name] = self._embedding(name, halves)
        texts = (self._text(f"adapter.lora.{name}") for name in ("task_name", "prompt_prefix"))
        return Adapter(layers, embeddings, {}, {}, *texts)

    # Metadata

    def _check_kind(self) -> None:
        for key, kind in (("general.type", "adapter"), ("adapter.type", "lora")):
            if self._metadata.get(key) != kind:
                raise self._bad(key, f"it must be {kind!r}: give a file that convert_lora_to_gguf.py has written")
        if self._metadata.get("adapter.alora.invocation_tokens"):
            raise self._bad("adapter.alora.invocation_tokens", "adapters that begin at some tokens are not supported")

    def _possible_architectures(self) -> tuple[Architecture, ...]:
        """Return the architecture and its variants: an adapter does not say which of them its base is."""
        name = self._metadata.get("general.architecture")
        found = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if found is None:
            raise self._bad("general.architecture", f"supported are {', '.join(ARCHITECTURES)}; give PEFT's folder")
        return (found, *(variant for _, variant in found.variants))

    def _read_alpha(self) -> float:
        alpha = self._metadata.get("adapter.lora.alpha", 0.0)
        if type(alpha) is not float or not np.isfinite(np.float32(alpha)):
            raise self._bad("adapter.lora.alpha", "it must be a finite number of f32")
        return alpha

    def _text(self, key: str) -> str:
        text = self._metadata.get(key, "")
        if not isinstance(text, str) or len(text) > _LONGEST_TEXT:
            raise self._bad(key, f"it must be a text of at most {_LONGEST_TEXT} characters")
        return text

    def _bad(self, key: str, advice: str) -> ModelError:
        value = self._metadata.get(key)
        given = "lacks" if value is None else f"has {repr(value)[:80]} as"
        return ModelError(f"{self._path} {given} {key}; {advice}")

    # Tensors

    def _enter(self, changes: dict[str, _Halves], tensor: GgufTensor) -> bool:
        """Enter a tensor of the file; return False for one that has no meaning."""
        match = _TENSOR.fullmatch(tensor.name)
        if match is None:
            return False
        key = match["part"] if match["layer"] is None else f"blk.*.{match['part']}"
        candidates = {
            (name, architecture.permuted and name.endswith((".q_proj.weight", ".k_proj.weight")))
            for architecture in self._architectures
            if (name := self._base_name(architecture, key, match["layer"] or "")) is not None
        }
        if len(candidates) != 1:
            return False
        [(name, is_permuted)] = candidates
        if _CONVERTED.fullmatch(name):
            raise ModelError(
                f"{self._path} has {tensor.name}, of a layer that is another one in GGUF files; give PEFT's folder"
            )
        if (name in self._linear) == (key == _EMBEDDING) and "*" not in name:
            return False
        halves = changes.setdefault(name, _Halves(is_permuted))
        if match["half"] in halves.found:
            raise ModelError(f"{self._path} changes {name} of the base model twice; convert the adapter again")
        halves.found[match["half"]] = tensor
        return True

    def _base_name(self, architecture: Architecture, key: str, layer: str) -> str | None:
        """Return the base's name, with a `*` for the number of an expert; None if the base has no such tensor."""
        if key not in architecture.names:
            return None
        name = f"{architecture.names[key].replace('*', layer, 1)}.weight"
        if "*" not in name:
            return self._names.find(self._path, name)
        return None if self._names.find(self._path, name.replace("*", "0")) is None else name

    def _change(self, name: str, halves: _Halves, shape: tuple[int, ...]) -> LowRank:
        a, b = halves.found["a"], halves.found["b"]
        (outputs, inputs), rank = shape, self._rank(a, 0)
        given = self._floats(b, (outputs, rank), name)
        if halves.is_permuted:
            heads = self._heads.query if name.endswith(".q_proj.weight") else self._heads.kv
            if outputs % (2 * heads):
                raise ModelError(f"{self._path}: {name} has {outputs} outputs for {heads} heads; give PEFT's folder")
            ordered = PermutedTensor(given.name, given.format, given.shape, given.stored, heads)
            given = replace(given, stored=ordered.data)
        return LowRank(self._floats(a, (rank, inputs), name), given, self._scale(rank))

    def _embedding(self, name: str, halves: _Halves) -> LowRank:
        """Return the change of an embedding, whose A lies in the file as [vocabulary, rank]."""
        a, b = halves.found["a"], halves.found["b"]
        (vocabulary, hidden), rank = self._shapes[name], self._rank(a, -1)
        given = self._floats(a, (vocabulary, rank), name)
        transposed = np.ascontiguousarray(given.to_f32().T).reshape(-1).view(np.uint8)
        stored_a = Tensor(given.name, "f32", (rank, vocabulary), transposed)
        return LowRank(stored_a, self._floats(b, (hidden, rank), name), self._scale(rank))

    def _experts(self, pattern: str, halves: _Halves) -> Iterator[tuple[str, LowRank]]:
        """Yield the changes of all experts of a layer."""
        names: list[str] = []
        while (name := self._names.find(self._path, pattern.replace("*", str(len(names))))) is not None:
            names.append(name)
        for tensor in halves.found.values():
            if len(tensor.shape) != 3 or tensor.shape[0] != len(names):
                raise ModelError(
                    f"{self._path}: tensor {tensor.name} has shape {list(tensor.shape)}; the first of its 3 sizes must "
                    f"be {len(names)}, the experts of the base model"
                )
        for number, name in enumerate(names):
            one = {half: _part(tensor, number) for half, tensor in halves.found.items()}
            yield name, self._change(name, _Halves(halves.is_permuted, one), self._linear[name])

    def _rank(self, a: GgufTensor, axis: int) -> int:
        rank = a.shape[axis]
        if len(a.shape) != 2 or rank > self._max_rank:
            raise ModelError(
                f"{self._path}: tensor {a.name} has shape {list(a.shape)}; it must be a matrix, with a rank from 1 to "
                f"{self._max_rank}; allow higher ones, or train with a lower one"
            )
        return rank

    def _scale(self, rank: int) -> float:
        return self._alpha / rank if self._alpha else 1.0

    def _floats(self, tensor: GgufTensor, shape: tuple[int, ...], name: str) -> Tensor:
        """Return a tensor of any type as floats."""
        given = Tensor(tensor.name, tensor.type.lower(), tensor.shape, tensor.data)
        check_shape(self._path, given, shape, f"{name} {list(self._shapes[name])} of the base model")
        floats = dequantized(given)
        found = Tensor(tensor.name, floats.format, shape, floats.data)
        check_finite(self._path, tensor.name, found.format, found.stored)
        return found


def _part(tensor: GgufTensor, number: int) -> GgufTensor:
    """Return the matrix of one expert."""
    data = tensor.data.reshape(tensor.shape[0], -1)[number]
    return GgufTensor(tensor.name, tensor.type, tensor.shape[1:], data)
