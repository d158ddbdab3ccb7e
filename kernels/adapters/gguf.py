"""Adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them.

Tensors have the names of the base's in a GGUF file, with `.lora_a` [rank, inputs] and `.lora_b` [outputs, rank] after
them; those of experts are stacked. B has the rows in the order of the base's file: where the architecture permutes
those of q and k, they are put back in the order of a model folder. The scale is alpha / rank, or 1 if alpha is 0.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from quire.kernels.adapters.adapter import Adapter, LowRank
from quire.kernels.adapters.changeable import Changeable, unchangeable
from quire.kernels.adapters.files import AdapterFile, StoredTensor
from quire.kernels.adapters.names import BaseNames
from quire.kernels.adapters.tensors import MOST_NAMED, check_finite, check_shape, most_header_bytes, most_tensors
from quire.kernels.attention_heads import Heads
from quire.kernels.errors import ModelError, quoted
from quire.kernels.gguf.architectures import ARCHITECTURES
from quire.kernels.gguf.architectures.description import Architecture
from quire.kernels.gguf.container import GgufLimits, parse_gguf_header
from quire.kernels.weights.gguf_checkpoint import PermutedTensor
from quire.kernels.weights.latent_tensors import dequantized
from quire.kernels.weights.tensor import FLOAT_DTYPES, Tensor

_LONGEST_TEXT = 100_000
_LONGEST_LIST = 10_000
_TENSOR = re.compile(r"(?P<stem>(blk\.(?P<layer>\d{1,6})\.)?(?P<part>\w+))\.weight\.lora_(?P<half>[ab])")
_EMBEDDING = "token_embd"
_CONVERTED = re.compile(r"transformer\.h\..*|.*\.(linear_attn|mamba|mixer|conv)\..*")
"""Modules whose weights the conversion transposes, reorders or takes apart, by their names in a model folder."""


@dataclass
class _Halves:
    """The two tensors of a change, by `a` and `b`, and whether the base's file has the rows permuted."""

    is_permuted: bool
    found: dict[str, StoredTensor] = field(default_factory=dict)


def read_gguf_adapter(
    path: Path, shapes: Mapping[str, tuple[int, int]], *, heads: Heads, max_rank: int,
    others: Mapping[str, tuple[int, ...]] | None = None, changeable: Changeable | None = None, model_class: str = "",
) -> Adapter:  # fmt: skip
    """Read an adapter, as `peft.read_adapter`. `heads` are those of the base's attention, the same in all layers.

    Raises ModelError. The architecture of the file must be one of those whose models have the base's `model_class`;
    where there is none, as of a class that llama.cpp converts like another one, only the tensors are compared.
    """
    limit = most_tensors({**(others or {}), **shapes})
    limits = GgufLimits(most_header_bytes(limit), _LONGEST_LIST, limit)
    with AdapterFile(path) as file:
        beginning = file.read(0, min(file.size, limits.header_bytes)).tobytes()
        metadata, entries = parse_gguf_header(path, beginning, file.size, limits)
        tensors = [
            StoredTensor(each.name, each.type.lower(), each.shape, each.start, each.num_bytes) for each in entries
        ]
        base = _Base(shapes, {**(others or {}), **shapes}, heads, max_rank, changeable, model_class)
        return _GgufReader(file, metadata, base).read(tensors)


@dataclass(frozen=True)
class _Base:
    """Facts about the base model: see `read_gguf_adapter`. `shapes` are those of all tensors."""

    linear: Mapping[str, tuple[int, int]]
    shapes: Mapping[str, tuple[int, ...]]
    heads: Heads
    max_rank: int
    changeable: Changeable | None
    model_class: str


class _GgufReader:
    def __init__(self, file: AdapterFile, metadata: Mapping[str, Any], base: _Base) -> None:
        self._file, self._path, self._metadata = file, file.path, metadata
        self._base, self._names = base, BaseNames(base.shapes)
        self._check_kind()
        self._architectures = self._possible_architectures()
        self._alpha = self._read_alpha()

    def read(self, tensors: Sequence[StoredTensor]) -> Adapter:
        """Return the adapter that has these tensors."""
        changes: dict[str, _Halves] = {}
        unknown = [tensor.name for tensor in tensors if not self._enter(changes, tensor)]
        if unknown:
            raise ModelError(
                f"{self._path} has {len(unknown)} tensors that are not of this base model, or not supported: "
                f"{', '.join(heapq.nsmallest(MOST_NAMED, unknown))}; give an adapter of this base model, or PEFT's "
                "folder"
            )
        if not changes:
            raise ModelError(f"{self._path} has no tensors; convert the adapter again")
        linear = {one: each for name, halves in changes.items() for one, each in self._of_linear(name, halves)}
        embeddings = {name: halves for name, halves in changes.items() if "*" not in name and name not in linear}
        for name, halves in linear.items():
            self._check(name, halves, self._base.linear[name])
        for name, halves in embeddings.items():
            self._check_embedding(name, halves)
        if self._base.changeable is not None:
            read = [tensor for halves in changes.values() for tensor in halves.found.values()]
            copied = sum(4 * prod(tensor.shape) for tensor in read if tensor.format.upper() not in FLOAT_DTYPES)
            transposed = sum(4 * prod(halves.found["a"].shape) for halves in embeddings.values())
            self._base.changeable.check_memory(self._file, read, copied + transposed)
        texts = (self._text(f"adapter.lora.{name}") for name in ("task_name", "prompt_prefix"))
        return Adapter(
            {name: self._layer(name, halves) for name, halves in linear.items()},
            {name: self._embedding(halves) for name, halves in embeddings.items()},
            {}, {}, *texts,
        )  # fmt: skip

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
        of_base = [key for key, each in ARCHITECTURES.items() if self._base.model_class in _classes(each)]
        if of_base and name not in of_base:
            raise self._bad(
                "general.architecture",
                f"that of the base model, {self._base.model_class}, is {' or '.join(of_base)}; convert the adapter "
                "with its own base",
            )
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
        given = "lacks" if value is None else f"has {quoted(value)} as"
        return ModelError(f"{self._path} {given} {key}; {advice}")

    # Tensors

    def _enter(self, changes: dict[str, _Halves], tensor: StoredTensor) -> bool:
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
        if (name in self._base.linear) == (key == _EMBEDDING) and "*" not in name:
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
        known = architecture.names[key]
        name = f"{known.replace('*', layer, 1) if layer else known}.weight"
        if "*" not in name:
            return self._names.find(self._path, name)
        return None if self._names.find(self._path, name.replace("*", "0")) is None else name

    def _of_linear(self, name: str, halves: _Halves) -> Iterator[tuple[str, _Halves]]:
        """Yield the changes of linear layers, of which experts are stacked. Raises ModelError for other ones."""
        for half in "ab":
            if half not in halves.found:
                raise ModelError(f"{self._path} lacks the lora_{half} of {name}; convert the adapter again")
        changeable = self._base.changeable
        if changeable is not None and name.replace("*", "0") not in changeable.layers | changeable.embeddings:
            raise unchangeable(f"{self._path} changes {name}")
        if "*" in name:
            yield from self._experts(name, halves)
        elif name in self._base.linear:
            yield name, halves

    def _experts(self, pattern: str, halves: _Halves) -> Iterator[tuple[str, _Halves]]:
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
            yield name, _Halves(halves.is_permuted, {h: _part(tensor, number) for h, tensor in halves.found.items()})

    def _check(self, name: str, halves: _Halves, shape: tuple[int, int]) -> None:
        """Raise ModelError for a change of a linear layer in another shape."""
        (outputs, inputs), rank = shape, self._rank(halves.found["a"], 0)
        self._check_shape(halves.found["b"], (outputs, rank), name)
        self._check_shape(halves.found["a"], (rank, inputs), name)
        if halves.is_permuted and outputs % (2 * self._heads_of(name)):
            raise ModelError(
                f"{self._path}: {name} has {outputs} outputs for {self._heads_of(name)} heads; give PEFT's folder"
            )

    def _check_embedding(self, name: str, halves: _Halves) -> None:
        """Raise ModelError for a change of an embedding, whose A lies in the file as [vocabulary, rank]."""
        (vocabulary, hidden), rank = self._base.shapes[name], self._rank(halves.found["a"], -1)
        self._check_shape(halves.found["a"], (vocabulary, rank), name)
        self._check_shape(halves.found["b"], (hidden, rank), name)

    def _check_shape(self, tensor: StoredTensor, shape: tuple[int, ...], name: str) -> None:
        check_shape(self._path, tensor, shape, f"{name} {list(self._base.shapes[name])} of the base model")

    def _heads_of(self, name: str) -> int:
        return self._base.heads.query if name.endswith(".q_proj.weight") else self._base.heads.kv

    def _rank(self, a: StoredTensor, axis: int) -> int:
        rank = a.shape[axis]
        if len(a.shape) != 2 or rank > self._base.max_rank:
            raise ModelError(
                f"{self._path}: tensor {a.name} has shape {list(a.shape)}; it must be a matrix, with a rank from 1 to "
                f"{self._base.max_rank}, which is max_lora_rank"
            )
        return rank

    def _layer(self, name: str, halves: _Halves) -> LowRank:
        """Read a checked change of a linear layer."""
        a, b = (self._floats(halves.found[half]) for half in "ab")
        if halves.is_permuted:
            ordered = PermutedTensor(b.name, b.format, b.shape, b.stored, self._heads_of(name))
            b = replace(b, stored=ordered.data)
        return LowRank(a, b, self._scale(a.shape[0]))

    def _embedding(self, halves: _Halves) -> LowRank:
        """Read a checked change of an embedding."""
        a, b = (self._floats(halves.found[half]) for half in "ab")
        transposed = np.ascontiguousarray(a.to_f32().T).reshape(-1).view(np.uint8)
        stored_a = Tensor(a.name, "f32", a.shape[::-1], transposed)
        return LowRank(stored_a, b, self._scale(a.shape[1]))

    def _scale(self, rank: int) -> float:
        return self._alpha / rank if self._alpha else 1.0

    def _floats(self, tensor: StoredTensor) -> Tensor:
        """Read a tensor of any type as floats."""
        floats = dequantized(self._file.tensor(tensor))
        found = Tensor(tensor.name, floats.format, tensor.shape, floats.data)
        check_finite(self._path, tensor.name, found.format, found.stored)
        return found


def _part(tensor: StoredTensor, number: int) -> StoredTensor:
    """Return the matrix of one expert."""
    size = tensor.num_bytes // tensor.shape[0]
    return StoredTensor(tensor.name, tensor.format, tensor.shape[1:], tensor.start + number * size, size)


def _classes(architecture: Architecture) -> set[str]:
    """Return the classes of `transformers` that files of an architecture may be of."""
    return {architecture.model_class, *(variant.model_class for _, variant in architecture.variants)}
