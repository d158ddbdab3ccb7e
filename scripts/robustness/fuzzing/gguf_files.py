"""Target `gguf`: the reader of GGUF files, and what is made of their metadata.

An input is a byte, 0 for a whole model and 1 for the second of two parts, and then that file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fuzzing.mutation import mutated
from fuzzing.target import check_message, replace

from quire.kernels.errors import ModelError
from quire.kernels.gguf.architectures import ARCHITECTURES, architecture_of
from quire.kernels.gguf.architectures.description import Architecture
from quire.kernels.gguf.config import config_of, generation_config_of, pooling_files_of
from quire.kernels.gguf.container import TYPES, GgufModel, GgufTensor, read_gguf
from quire.kernels.gguf.metadata import Metadata
from quire.kernels.gguf.parts import parts_of
from quire.kernels.gguf.tokenizer import tokenizer_files

_MAGIC = b"GGUF\x03\0\0\0"
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NUMBERS = (
    0,
    1,
    2,
    31,
    32,
    33,
    255,
    1 << 20,
    (1 << 31) - 1,
    1 << 32,
    (1 << 53) + 1,
    1 << 60,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
_TEXTS = (b"", b"\n", b"\xff", b"a" * 300, b"general.alignment", b"token_embd.weight")

_Value = tuple[int, Any]
_Tensor = tuple[bytes, list[int], int, int]


class _File:
    """A file as entries that can be changed one by one: metadata, tensors, and the bytes after the header."""

    def __init__(self, metadata: list[tuple[bytes, _Value]], tensors: list[_Tensor], data: bytes) -> None:
        self.metadata, self.tensors, self.data = metadata, tensors, data
        self.counts: list[int | None] = [None, None]  # what the header states instead of the true ones

    def content(self) -> bytes:
        counts = (len(self.tensors), len(self.metadata))
        stated = [count if given is None else given for given, count in zip(self.counts, counts, strict=True)]
        header = _MAGIC + struct.pack("<QQ", *stated)
        header += b"".join(_text(key) + _value(value) for key, value in self.metadata)
        for name, sizes, kind, offset in self.tensors:
            shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
            header += _text(name) + shape + struct.pack("<IQ", kind, offset)
        return header + bytes(-len(header) % 32) + self.data


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(value: _Value) -> bytes:
    kind, content = value
    return struct.pack("<I", kind) + _content(kind, content)


def _content(kind: int, content: Any) -> bytes:
    if kind == _STRING:
        return _text(content)
    if kind == _ARRAY:
        inner, count, values = content
        return struct.pack("<IQ", inner, count) + b"".join(_content(inner, value) for value in values)
    return struct.pack(f"<{_FORMS[kind]}", content) if kind in _FORMS else bytes(4)


def _texts(*texts: bytes) -> _Value:
    return _ARRAY, (_STRING, len(texts), list(texts))


def _numbers(kind: int, *numbers: float) -> _Value:
    return _ARRAY, (kind, len(numbers), list(numbers))


_SIZES = {
    "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
    "attention.head_count": 2, "attention.head_count_kv": 1, "attention.sliding_window": 16,
    "attention.sliding_window_pattern": 2, "rope.dimension_count": 16, "expert_count": 2, "expert_used_count": 1,
    "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32, "pooling_type": 1,
    "attention.q_lora_rank": 32, "attention.kv_lora_rank": 32, "attention.key_length_mla": 32,
    "attention.value_length_mla": 16, "leading_dense_block_count": 1, "expert_shared_count": 1,
}  # fmt: skip
_FLOATS = {
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 10000.0,
    "rope.freq_base_swa": 10000.0, "attention.scale": 0.5, "embedding_scale": 2.0, "residual_scale": 0.5,
    "logit_scale": 0.5, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "rope.scaling.attn_factor": 1.5,
}  # fmt: skip
_OF_EXPERTS = {name for name in _SIZES if name.startswith("expert_")}


def _model(arch: str, tokenizer: list[tuple[bytes, _Value]], type_: int, with_experts: bool = True) -> _File:
    """Return a model with the keys and tensors of an architecture, those of experts among them if it has both."""
    read = _keys_of(arch, with_experts)
    own: dict[str, _Value] = {name: (4, value) for name, value in _SIZES.items() if name in read}
    own |= {name: (6, value) for name, value in _FLOATS.items() if name in read}
    name = arch.encode()
    metadata: list[tuple[bytes, _Value]] = [(b"general.architecture", (_STRING, name))]
    metadata += [(name + b"." + key.encode(), value) for key, value in own.items()]
    if ARCHITECTURES[arch].is_encoder:
        metadata.append((name + b".attention.causal", (7, False)))
    metadata.append((b"general.alignment", (4, 32)))
    tensors: list[_Tensor] = []
    data = b""
    for stem in _variant(arch, with_experts).names:
        sizes = _sizes_of(stem)
        kind = type_ if len(sizes) > 1 else 0
        _, block, block_bytes = TYPES[kind]
        tensors.append((stem.replace("*", "0").encode() + b".weight", sizes, kind, len(data)))
        data += bytes(int(np.prod(sizes)) // block * block_bytes)
        data += bytes(-len(data) % 32)
    return _File([*metadata, *tokenizer], tensors, data)


def _variant(arch: str, with_experts: bool) -> Architecture:
    own = {"general.architecture": arch, f"{arch}.expert_count": 2 if with_experts else 0}
    return architecture_of(Metadata(own, {}))


def _keys_of(arch: str, with_experts: bool) -> set[str]:
    """Return the keys that the description of an architecture reads."""
    read = {"pooling_type"}

    class Noting(Metadata):
        def own(self, name: str) -> Any:
            nonlocal read
            read = read | {name}
            return {**_SIZES, **_FLOATS}.get(name)

    tensors = {f"{stem.replace('*', '0')}.weight": _TENSOR for stem in _variant(arch, with_experts).names}
    noting = Noting({"general.architecture": arch}, tensors)
    for field in _variant(arch, with_experts).fields.values():
        before = set(read)
        try:
            field(noting)
        except ModelError:  # a key that must not be there
            read = before
    return read if any(stem.endswith("_exps") for stem in _variant(arch, with_experts).names) else read - _OF_EXPERTS


_TENSOR = GgufTensor("", "F32", (4, 32), np.zeros(512, np.uint8))


def _sizes_of(stem: str) -> list[int]:
    """Return the sizes of a tensor, innermost first."""
    if stem in ("token_embd", "output", "position_embd", "token_types"):
        return [32, 4]
    if "norm" in stem or "sinks" in stem:
        return [32]
    if stem.endswith("exp_probs_b"):
        return [2]
    return (
        [32, 32, 2]
        if stem.endswith(("_exps", "attn_k_b", "attn_v_b"))
        else [32, 64 if stem.endswith("attn_qkv") else 32]
    )


def _files() -> dict[str, _File]:
    bpe = [
        (b"tokenizer.ggml.model", (_STRING, b"gpt2")), (b"tokenizer.ggml.pre", (_STRING, b"gpt-2")),
        (b"tokenizer.ggml.tokens", _texts(b"a", b"b", b"ab", b"<s>")), (b"tokenizer.ggml.merges", _texts(b"a b")),
        (b"tokenizer.ggml.token_type", _numbers(5, 1, 1, 1, 3)), (b"tokenizer.ggml.bos_token_id", (4, 3)),
        (b"tokenizer.ggml.add_bos_token", (7, True)), (b"tokenizer.chat_template", (_STRING, b"{{ messages }}")),
    ]  # fmt: skip
    pieces = [
        (b"tokenizer.ggml.model", (_STRING, b"llama")), (b"tokenizer.ggml.scores", _numbers(6, 0, 0, -1, -2)),
        (b"tokenizer.ggml.tokens", _texts(b"<unk>", b"a", b"b", b"ab")),
        (b"tokenizer.ggml.token_type", _numbers(5, 2, 1, 1, 1)), (b"tokenizer.ggml.bos_token_id", (4, 1)),
        (b"tokenizer.ggml.eos_token_id", (4, 2)), (b"llama.rope.scaling.type", (_STRING, b"linear")),
        (b"llama.rope.scaling.factor", (6, 2.0)),
    ]  # fmt: skip
    files = {arch: _model(arch, bpe, 8) for arch in ARCHITECTURES}
    return files | {"pieces": _model("llama", pieces, 2, with_experts=False), "bf16": _model("qwen2", bpe, 30)}


class GgufFiles:
    """Every file is a model with the bytes of its tensors' shapes, or has one bounded line of ModelError."""

    words = tuple(key.decode() for file in _files().values() for key, _ in file.metadata)

    def __init__(self, folder: Path) -> None:
        self._whole = folder / "model.gguf"
        self._parts = [folder / f"part-0000{number}-of-00002.gguf" for number in (1, 2)]
        self._parts[0].write_bytes(self._part(0).content())

    @staticmethod
    def _part(number: int) -> _File:
        file = _files()["qwen3"]
        file.metadata += [(b"split.no", (2, number)), (b"split.count", (2, 2))]
        if number:
            file.tensors = [(b"other." + name, *rest) for name, *rest in file.tensors]  # type: ignore[misc]
        return file

    def seeds(self) -> Iterator[bytes]:
        """See Target."""
        for file in _files().values():
            yield b"\0" + file.content()
        yield b"\1" + self._part(1).content()

    def test(self, data: bytes) -> None:
        """See Target."""
        is_part = data[:1] == b"\1"
        file = self._parts[1] if is_part else self._whole
        replace(file, data[1:])
        try:
            model = read_gguf(self._parts if is_part else [file])
            self._check(model)
            config_of(model)
            self._check_parts(model)
            generation_config_of(model.metadata)
            pooling_files_of(model)
            tokenizer_files(model.metadata)
        except ValueError as error:
            if type(error) not in (ValueError, ModelError):
                raise
            check_message(str(error))

    @staticmethod
    def _check(model: GgufModel) -> None:
        for tensor in model.tensors.values():
            _, block, block_bytes = TYPES[next(number for number, kind in TYPES.items() if kind[0] == tensor.type)]
            elements = int(np.prod([int(size) for size in tensor.shape], dtype=object))
            assert len(tensor.data) * block == elements * block_bytes
            assert tensor.shape[-1] % block == 0

    @staticmethod
    def _check_parts(model: GgufModel) -> None:
        """Check that the parts of tensors are views of the file, and no more of them than a layer can have."""
        parts = list(parts_of(model))
        assert len(parts) <= 3 * len(model.tensors)
        for part in parts:
            assert not part.data.flags.owndata
            _, block, block_bytes = next(kind for kind in TYPES.values() if kind[0] == part.type)
            elements = int(np.prod([int(size) for size in part.shape], dtype=object))
            assert part.data[0 if part.data.ndim > 1 else slice(None)].size * block == elements * block_bytes

    def mutate(self, data: bytes, random: Random) -> bytes:
        """See Target. The file is one of the seeds with some values changed, whatever `data` has."""
        number = data[:1] or b"\0"
        file = self._part(1) if number == b"\1" else random.choice(list(_files().values()))
        for _ in range(random.choice((1, 1, 2, 4))):
            with suppress(struct.error, TypeError, OverflowError):
                changed = _changed(file, random)
                changed.content()
                file = changed
        content = file.content()
        return number + (content[: random.randrange(len(content))] if random.randrange(20) == 0 else content)


def _changed(file: _File, random: Random) -> _File:
    changed = _File(list(file.metadata), [(n, list(s), k, o) for n, s, k, o in file.tensors], file.data)
    changed.counts = list(file.counts)
    choice = random.randrange(8)
    if choice == 0:
        changed.counts[random.randrange(2)] = random.choice(_NUMBERS)
    elif choice == 1:
        changed.data = changed.data[: random.randrange(len(changed.data) + 1)]
    elif choice < 5:
        _change_tensor(changed.tensors, random)
    else:
        _change_metadata(changed.metadata, random)
    return changed


def _change_tensor(tensors: list[_Tensor], random: Random) -> None:
    index = random.randrange(len(tensors))
    name, sizes, kind, offset = tensors[index]
    match random.randrange(6):
        case 0:
            name = random.choice((*_TEXTS, name + name, tensors[0][0]))
        case 1:
            sizes[random.randrange(len(sizes))] = random.choice(_NUMBERS)
        case 2:
            sizes = random.choice((sizes[::-1], sizes + sizes, [], [*sizes, 1], sizes[1:]))
        case 3:
            kind = random.choice((*TYPES, 4, 99, (1 << 32) - 1))
        case 4:
            offset = random.choice((*_NUMBERS, offset + 32, offset + 1, tensors[0][3]))
        case _:
            tensors.append(tensors[index])
    tensors[index] = name, sizes, kind, offset


def _change_metadata(metadata: list[tuple[bytes, _Value]], random: Random) -> None:
    index = random.randrange(len(metadata))
    key, (kind, value) = metadata[index]
    match random.randrange(6):
        case 0:
            key = random.choice((*_TEXTS, key + b"x", metadata[0][0]))
        case 1:
            kind, value = random.choice(metadata)[1]
        case 2:
            metadata.pop(index)
            return
        case 3 if kind == _ARRAY:
            value = (value[0], random.choice(_NUMBERS), value[2])
        case 3:
            kind = random.randrange(14)
        case _:
            value = _varied(kind, value, random)
    metadata[index] = key, (kind, value)


def _varied(kind: int, value: Any, random: Random) -> Any:
    if kind == _ARRAY:
        inner, _, values = value
        values = list(values)
        if values and random.randrange(2):
            at = random.randrange(len(values))
            values[at] = _varied(inner, values[at], random)
        else:
            values = random.choice((values[1:], values + values, values[::-1], []))
        return inner, len(values), values
    if kind == _STRING:
        return random.choice((*_TEXTS, value + value, value[1:]))
    number = mutated([value], random)
    return number[0] if isinstance(number, list) and number and isinstance(number[0], int | float) else value
