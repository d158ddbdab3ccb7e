"""The tensors of a model folder as parts of the tensors of a GGUF file: slices of the mapped file, never copies.

Most are whole tensors under another name. Rows of q, k and v may be one tensor, and the experts of a layer always are,
under one name with a `*` for the number of the expert; of other stacks each matrix is a part. Of the layers for
multi-token prediction, which are the last, the first is read; the others are left out, and so are its copies of the
embedding and of the layer of the logits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.kernels.errors import ModelError
from quire.kernels.gguf.architectures import architecture_of
from quire.kernels.gguf.architectures.description import LAYER, head_size, heads, kv_heads, layer_count
from quire.kernels.gguf.container import GgufModel, GgufTensor
from quire.kernels.gguf.metadata import Metadata

_LAYER = re.compile(r"blk\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<part>[\w.]+)")
_ANY_LAYER = re.compile(r"blk\.(?P<layer>0|[1-9][0-9]{0,5})\.")
_EXPERT = re.compile(r"(?P<before>.*\.experts\.)(?P<number>0|[1-9][0-9]{0,9})(?P<after>\.\w+\.\w+)")
LATENT_PARTS = (".kv_b_proj.weight", ".k_b_proj.weight", ".v_b_proj.weight")
"""Ends of the names of layers that expand latents: the whole one, and [heads, rank, keys] and [heads, values, rank]."""

RATE_LAYERS = (".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight")
"""Ends of the names of layers whose outputs are rates of a state."""

DECAYS = ".A_log"
"""End of the names of tensors that have rates of decay in the file, and their logarithms in a model folder."""

COMBINING_LAYERS = (".eh_proj.weight", "mtp.fc.weight")
"""Ends of the names of layers whose inputs are those of a head for multi-token prediction, side by side."""

_COPIES = (".nextn.embed_tokens.weight", ".nextn.shared_head_head.weight")
"""Tensors of a head that the model has too."""

_PARAMETERS = (
    ".sinks", ".e_score_correction_bias", ".expert_bias", ".layer_scalar", ".router.scale", ".per_expert_scale",
    ".correct_output_scale", DECAYS, ".D", ".dt_bias",
)  # fmt: skip
"""Ends of names in a model folder that have no last word."""

_WITHOUT_KIND = ("ssm_a", "ssm_d", "ffn_norm")
"""Tensors whose names in the file may lack the last word."""

_VECTORS = ("norm.weight", DECAYS, ".D")
"""Ends of the names of vectors, which the file may have as matrices, of the same elements."""

_OFFSETS = ("norm.weight", ".pre_fc_norm_embedding.weight", ".pre_fc_norm_hidden.weight")
"""Ends of the names of norms to whose weights a conversion may add a number."""

_MOST_MATRICES = 64
"""Matrices of a stack other than experts."""

TAPS = (".conv1d.weight", ".conv.conv.weight")
"""Ends of the names of convolutions, [channels, 1, taps] in a model folder."""


@dataclass(frozen=True)
class Part:
    """A tensor of a model folder: its name and shape, the type of its blocks, and its bytes.

    With a `*` in the name it stands for those of all experts: `data` is [experts, bytes], and `shape` that of one.
    Within each of `heads`, if not 0, pairs of rows lie beside each other of which a folder has the second ones after
    the first ones. `offset` was added to the values.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    heads: int = 0
    offset: float = 0.0

    @property
    def module(self) -> str:
        """The name without its last word."""
        return self.name.rpartition(".")[0]

    @property
    def is_always_float(self) -> bool:
        """True if it is read as floats, whatever its type.

        It expands latents to keys or values, which are taken apart by heads, gives the rates of a state, or combines
        the inputs of a head for multi-token prediction, which are multiplied one after the other.
        """
        return self.name.endswith((*LATENT_PARTS, *RATE_LAYERS, *COMBINING_LAYERS))


def stacked_name(name: str) -> tuple[str, int] | None:
    """Return the name of the experts' tensors of which this is one, and its number; None for another tensor."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (f"{match['before']}*{match['after']}", int(match["number"]))


def parts_of(model: GgufModel) -> Iterator[Part]:
    """Yield the tensors of the model folder. Raises ModelError for one that the architecture does not have."""
    reader = _Parts(Metadata(model.metadata, model.tensors))
    for tensor in model.tensors.values():
        yield from reader.read(tensor)
    yield from reader.scalars()


class _Parts:
    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._architecture = architecture_of(metadata)

    def read(self, tensor: GgufTensor) -> Iterator[Part]:
        if tensor.name in self._architecture.used or self._is_left_out(tensor):
            return
        name = self._name(tensor)
        if ".experts." in name:
            yield from self._experts(tensor, name)
        elif "*" in name:
            yield from self._stack(tensor, name)
        elif name.endswith((".self_attn.qkv_proj.weight", ".self_attn.qkv_proj.bias")) and not self._is_fused():
            yield from self._query_key_value(tensor, name)
        else:
            yield self._part(tensor, name, tensor.shape, tensor.data)

    def _name(self, tensor: GgufTensor) -> str:
        """Return the name in a model folder; that of experts and of other stacks has a `*`."""
        stem, _, kind = tensor.name.rpartition(".")
        if kind in _WITHOUT_KIND:
            stem, kind = tensor.name, "weight"
        match = _LAYER.fullmatch(stem)
        layer = "" if match is None else match["layer"]
        key, names = stem if match is None else f"blk.*.{match['part']}", self._architecture.names
        known = names.get(key) if kind in ("weight", "bias") else names.get(f"{key}.{kind}")
        if known is None or (layer and int(layer) >= self._metadata.size("block_count")):
            raise ModelError(
                f"the GGUF file has tensor {tensor.name}, which a {self._metadata.architecture} of {self._layers} "
                f"layers with the class {self._architecture.model_class} does not have; its tensors are "
                f"{', '.join(sorted({*self._architecture.names, *self._architecture.used}))}"
            )
        if layer and int(layer) >= self._layers:
            name = known.replace(LAYER, self._architecture.head_layer.replace("*", layer))
        else:
            name = known.replace("*", layer, 1) if layer else known
        return name if name.endswith(_PARAMETERS) else f"{name}.{kind}"

    @property
    def _layers(self) -> int:
        return layer_count(self._metadata)

    def _is_left_out(self, tensor: GgufTensor) -> bool:
        """Return whether a tensor belongs to a layer for multi-token prediction, and is not read."""
        match = _ANY_LAYER.match(tensor.name)
        if match is None or not self._layers <= int(match["layer"]) < self._metadata.size("block_count"):
            return False
        is_first = int(match["layer"]) == self._layers
        return not is_first or not self._architecture.head_layer or tensor.name.endswith(_COPIES)

    def scalars(self) -> Iterator[Part]:
        """Yield the tensors of one element that are numbers in the metadata."""
        for key, (name, shape) in self._architecture.scalars.items():
            values = self._metadata.get(key)
            if not isinstance(values, list) or len(values) != self._layers:
                raise ModelError(f"the GGUF file must have a number for each of its {self._layers} layers as {key}")
            for layer, value in enumerate(values):
                if type(value) is not float:
                    raise ModelError(f"the GGUF file has {value!r} as {key} of layer {layer}; it must be a number")
                data = np.array([value], np.float32).view(np.uint8)
                yield Part(name.replace("*", str(layer), 1), "F32", shape, data)

    def _is_fused(self) -> bool:
        return "blk.*.attn_q" not in self._architecture.names

    def _part(self, tensor: GgufTensor, name: str, shape: tuple[int, ...], data: npt.NDArray[np.uint8]) -> Part:
        has_offset = name.endswith(_OFFSETS) and not name.endswith(".linear_attn.norm.weight")
        offset = self._architecture.norm_offset if has_offset else 0.0
        if name.endswith(".mlp.shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)
        if name.endswith(_VECTORS):
            shape = (math.prod(shape),)
        if name.endswith(TAPS) and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        if name.endswith(".e_score_correction_bias") and shape[:-1] == (1,):  # ERNIE's
            shape = shape[1:]
        return Part(name, tensor.type, shape, data, self._permuted_heads(name, shape), offset)

    def _permuted_heads(self, name: str, shape: tuple[int, ...]) -> int:
        if not self._architecture.permuted:
            return 0
        counts = {"q_proj": heads, "k_proj": kv_heads}
        count = counts.get(name.split(".")[-2])
        number = 0 if count is None else count(self._metadata)
        if number and shape[0] % (2 * number):
            raise ModelError(f"the GGUF file has {name} with {shape[0]} rows for {number} heads; it is damaged")
        return number

    def _query_key_value(self, tensor: GgufTensor, name: str) -> Iterator[Part]:
        """Yield the rows of q, k and v."""
        dim = head_size(self._metadata)
        query, kv = heads(self._metadata) * dim, kv_heads(self._metadata) * dim
        if tensor.shape[0] != query + 2 * kv:
            raise ModelError(
                f"the GGUF file has {tensor.name} with {tensor.shape[0]} rows; its heads have {query + 2 * kv}"
            )
        rows = tensor.data.reshape(tensor.shape[0], -1)
        for part, first, count in (("q", 0, query), ("k", query, kv), ("v", query + kv, kv)):
            shape, data = (count, *tensor.shape[1:]), rows[first : first + count].reshape(-1)
            yield self._part(tensor, name.replace("qkv_proj", f"{part}_proj"), shape, data)

    def _stack(self, tensor: GgufTensor, name: str) -> Iterator[Part]:
        """Yield the matrices of a stack."""
        if len(tensor.shape) != 3 or tensor.shape[0] > _MOST_MATRICES:
            raise ModelError(
                f"the GGUF file has {tensor.name} in the shape {list(tensor.shape)}; it must have three sizes, of "
                f"which the first, the number of its matrices, is at most {_MOST_MATRICES}"
            )
        count, *shape = tensor.shape
        for number, data in enumerate(tensor.data.reshape(count, -1)):
            yield self._part(tensor, name.replace("*", str(number)), tuple(shape), data)

    def _experts(self, tensor: GgufTensor, name: str) -> Iterator[Part]:
        """Yield the experts' tensors of one kind, or the gates and ups of fused ones."""
        count, rank = self._metadata.size("expert_count"), 2 if name.endswith(".bias") else 3
        if len(tensor.shape) != rank or tensor.shape[0] != count:
            raise ModelError(
                f"the GGUF file has {tensor.name} in the shape {list(tensor.shape)}; the first of its {rank} sizes "
                f"must be {count}, the number of experts"
            )
        _, rows, *columns = tensor.shape
        stored = tensor.data.reshape(count, -1)
        if ".gate_up_proj." not in name:
            yield Part(name, tensor.type, (rows, *columns), stored)
            return
        if rows % 2:
            raise ModelError(f"the GGUF file has {tensor.name} with {rows} rows; gates and ups must be as many")
        halves = stored.reshape(count, 2, -1)
        for number, part in enumerate(("gate", "up")):
            shape = (rows // 2, *columns)
            yield Part(name.replace("gate_up_proj", f"{part}_proj"), tensor.type, shape, halves[:, number])
