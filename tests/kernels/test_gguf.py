"""GGUF files: the container against the `gguf` package, damaged files, and the values of quantized types."""

from __future__ import annotations

import dataclasses
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_models import EMBEDDING, METADATA, gguf_tensor, model

from quire.kernels.config import ModelConfig
from quire.kernels.errors import ModelError
from quire.kernels.gguf.config import config_of, generation_config_of
from quire.kernels.gguf.container import gguf_files, read_gguf
from quire.kernels.gguf.kept_folders import evict, use
from quire.kernels.rope import Rope
from quire.kernels.weights.gguf_checkpoint import open_checkpoint
from quire.kernels.weights.quantized.gguf import Gguf


def write(path: Path) -> Path:
    """Write a small file with all kinds of values."""
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, value in METADATA.items():
        if key != "general.architecture":
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(key, value)
    writer.add_string("some.text", "Grüße")
    writer.add_array("some.texts", ["a", "", "b c"])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_bool("some.switch", True)
    writer.add_tensor("token_embd.weight", EMBEDDING, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf")


def error_of(file: Path) -> str:
    """Return the message of the ModelError that a file has, nothing if it has none."""
    try:
        config_of(read_gguf([file]))
    except ModelError as error:
        return str(error)
    return ""


def test_a_file_is_read_as_the_package_reads_it(file: Path) -> None:
    found, reader = read_gguf([file]), gguf.GGUFReader(file)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert found.metadata[name] == field.contents(), name
    assert set(found.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        own = found.tensors[tensor.name]
        assert own.type == tensor.tensor_type.name
        assert own.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert own.data.tobytes() == tensor.data.tobytes()


def test_no_cut_file_is_read(file: Path, tmp_path: Path) -> None:
    content, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"empty|does not begin with|truncated") as caught:
            read_gguf([cut])
        assert "\n" not in str(caught.value)


def test_a_damaged_header_is_an_error_or_another_model(file: Path, tmp_path: Path) -> None:
    content, damaged, random = file.read_bytes(), tmp_path / "damaged.gguf", np.random.default_rng(0)
    header = content.index(b"output_norm.weight") + 60
    for _ in range(3000):
        changed = bytearray(content)
        for place in random.integers(0, header, random.integers(1, 4)):
            changed[place] = random.choice([0, 1, 127, 128, 255, changed[place] ^ 1 << random.integers(8)])
        damaged.write_bytes(changed)
        message = error_of(damaged)
        assert "\n" not in message
        assert len(message) < 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"GGML" + data[4:], "does not begin with the letters GGUF"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "of GGUF version 1; supported are 2 and 3"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "big endian; supported"),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 60) + data[16:], "promises 1152921504606846976 tensors"),
        (lambda data: data[:16] + struct.pack("<Q", 1 << 40) + data[24:], "promises 1099511627776 metadata entries"),
        (lambda data: data.replace(b"qwen3.block_count", b"qwen3.head_counts"), "lacks qwen3.block_count"),
        (lambda data: data.replace(b"some.text\x08", b"some.text\x0f"), "some.text of type 15"),
        (lambda data: data.replace("Grüße".encode(), b"Gr\xff\xffeee"), "not UTF-8"),
        (lambda data: data.replace(b"some.text\x08", b"some\ntext\x08"), "has the name 'some.ntext' of 9 characters"),
        (lambda data: _tensor_field(data, 20, struct.pack("<I", 99)), "token_embd.weight in ggml's type 99"),
        (lambda data: _tensor_field(data, 24, struct.pack("<Q", 8)), "at offset 8"),
        (lambda data: _tensor_field(data, 24, struct.pack("<Q", 1 << 62)), "truncated: tensor token_embd.weight"),
        (lambda data: _tensor_field(data, 0, struct.pack("<I", 9)), "9 dimensions"),
        (lambda data: _tensor_field(data, 4, struct.pack("<Q", 33)), "shape"),
        (lambda data: _tensor_field(data, 12, struct.pack("<Q", 1 << 63)), "truncated: tensor token_embd.weight"),
        (lambda data: data.replace(b"qwen3", b"qwen9", 1), "general.architecture 'qwen9'; supported"),
    ],
)
def test_a_wrong_field_is_named(change: Callable[[bytes], bytes], message: str, file: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    content = file.read_bytes()
    wrong.write_bytes(change(content))
    if wrong.read_bytes() == content:
        pytest.fail("nothing was changed")
    with pytest.raises(ModelError, match=message):
        config_of(read_gguf([wrong]))


def _tensor_field(data: bytes, offset: int, value: bytes) -> bytes:
    """Change what follows the name of the embedding: dimensions, sizes, type, offset."""
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + offset
    return data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention__head_count": [4, 4]}, r"has \[4, 4\] as qwen3.attention.head_count"),
        ({"attention__head_count": 0}, "an integer above 0"),
        ({"attention__value_length": 8}, "it must be 16, as attention.key_length"),
        ({"rope__dimension_count": 8}, "the size of a head"),
        ({"expert_count": 8}, "has 8 as qwen3.expert_count; this key is not supported; supported for qwen3 are"),
        ({"attention__causal": False}, "it must be true"),
        ({"pooling_type": 9}, r"it must be 0 \(none\)"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__yarn_ext_factor": 0.5},
         "it must be 1"),
        ({"rope__scaling__type": "longrope"}, "supported are none, linear, yarn"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": float("nan")}, "a number above 0"),
        ({"context_length": True}, "an integer above 0"),
    ],
)  # fmt: skip
def test_metadata_that_no_model_has_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(model(**changes))


def test_the_config_of_a_file() -> None:
    config = config_of(model(rope__scaling__type="yarn", rope__scaling__factor=4.0))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["vocab_size"], config["head_dim"], config["num_key_value_heads"]) == (9, 16, 4)
    assert config["tie_word_embeddings"]
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert config["quantization_config"]["types"] == {"model.embed_tokens": "Q8_0"}
    assert generation_config_of(METADATA)["eos_token_id"] == [5, 7]


LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, LLAMA_CPP),
        ({"temp": float(np.float32(0.6)), "top_k": 20}, LLAMA_CPP | {"temperature": 0.6, "top_k": 20}),
        ({"temp": 0.0, "min_p": 0.0}, LLAMA_CPP | {"temperature": 0.0, "min_p": 0.0}),
        ({"top_k": -1, "top_p": 1.0}, LLAMA_CPP | {"top_k": 0, "top_p": 1.0}),
        ({"penalty_repeat": float(np.float32(1.1))}, LLAMA_CPP | {"repetition_penalty": 1.1}),
    ],
)  # fmt: skip
def test_a_file_says_how_to_sample_and_llama_cpp_says_the_rest(given: dict[str, Any], expected: dict[str, Any]) -> None:
    metadata = {**METADATA, **{f"general.sampling.{key}": value for key, value in given.items()}}
    config = generation_config_of(metadata)
    del config["eos_token_id"]
    assert config == expected


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("temp", float("nan"), "0 to"), ("temp", "hot", "0 to"), ("temp", -1.0, "0 to"), ("top_p", 1.5, "to 1"),
        ("top_p", 0.0, "to 1"), ("min_p", True, "0 to 1"), ("top_k", [1], "-inf to inf"), ("penalty_repeat", 0, "to"),
    ],
)  # fmt: skip
def test_a_bad_sampling_parameter_of_a_file_is_named(key: str, value: object, allowed: str) -> None:
    with pytest.raises(ModelError, match=rf"as general\.sampling\.{key}; it must be a number from .*{allowed}"):
        generation_config_of({**METADATA, f"general.sampling.{key}": value})


def test_llama3_frequencies_come_from_the_factors_in_the_file() -> None:
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    fields = {"rope_theta": 500000.0, "max_position_embeddings": 131072}
    expected = Rope.from_config(ModelConfig({**fields, "rope_scaling": llama3}), 128).frequencies(1)
    plain = Rope.from_config(ModelConfig(fields), 128).frequencies(1)
    given = model(context_length=131072, rope__freq_base=500000.0, attention__key_length=128)
    tensor = gguf_tensor("rope_freqs.weight", "F32", (64,), np.asarray(plain[0] / expected[0], np.float32))
    config = config_of(dataclasses.replace(given, tensors={**given.tensors, tensor.name: tensor}))
    own = Rope.from_config(ModelConfig(config), 128)
    assert own.reach == 131072
    np.testing.assert_allclose(own.frequencies(1)[0], expected[0], rtol=1e-6)


def test_other_types_are_refused_by_name() -> None:
    section = ModelConfig({"types": {"model.layers.0.mlp.up_proj": "I8"}}, "quantization_config.")
    with pytest.raises(ModelError, match=r"model.layers.0.mlp.up_proj in type I8; supported are F32, F16"):
        Gguf.from_config(section)


def test_parts_of_a_model(file: Path, tmp_path: Path) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    assert gguf_files(first) == [first, tmp_path / "m-00002-of-00002.gguf"]
    assert gguf_files(file) == [file]
    with pytest.raises(ModelError, match=r"give its first part, m-00001-of-00002.gguf"):
        gguf_files(tmp_path / "m-00002-of-00002.gguf")
    first.write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"says that it is part 0 \(from 0\) of 1"):
        read_gguf(gguf_files(first))
    with pytest.raises(ModelError, match="No such file"):
        read_gguf([tmp_path / "absent.gguf"])


def test_a_check_of_permuted_heads_copies_nothing(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    rows = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_uint32("llama.block_count", 1)
    writer.add_tensor("blk.0.attn_q.weight", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "config.json").write_text("{}")
    tensor = open_checkpoint(str(tmp_path)).get("model.layers.0.self_attn.q_proj.weight", (8, 4))
    assert not tensor.stored.flags.owndata
    np.testing.assert_array_equal(tensor.to_f32(), rows[[0, 2, 1, 3, 4, 6, 5, 7]])
    np.testing.assert_array_equal(tensor.rows(3, 3).to_f32(), rows[[3, 4, 6]])
    np.testing.assert_array_equal(tensor.row(6), rows[5])


def test_folders_used_last_are_kept_and_those_in_use(tmp_path: Path) -> None:
    for number, name in enumerate("abcdef"):
        (tmp_path / name / "model").mkdir(parents=True)
        os.utime(tmp_path / name, (number, number))
    code = (
        "import sys; from pathlib import Path; from quire.kernels.gguf.kept_folders import hold; "
        "hold(Path(sys.argv[1])); print(); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path / "a" / "model")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        assert use(tmp_path / "b" / "model")
        assert not use(tmp_path / "g" / "model")
        evict(tmp_path, 2)
        assert {folder.name for folder in tmp_path.iterdir()} == {"a", "b", "f"}
        process.communicate()
    evict(tmp_path, 2)
    assert {folder.name for folder in tmp_path.iterdir()} == {"b", "f"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (struct.pack("<IIQ", 9, 8, 1 << 28), "promises 268435456 strings; the most is 4194304"),
        (struct.pack("<IIQ", 9, 0, 1 << 30), "promises 1073741824 numbers; the most is 4194304"),
        (struct.pack("<IQ", 8, 1 << 30), "its header goes on beyond byte 67108864"),
    ],
)
def test_a_large_file_that_is_all_header_is_refused_at_once(entry: bytes, message: str, tmp_path: Path) -> None:
    large = tmp_path / "large.gguf"
    with large.open("wb") as sparse:
        sparse.write(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + entry)
        sparse.truncate(4 << 30)
    with pytest.raises(ModelError, match=message):
        read_gguf([large])
