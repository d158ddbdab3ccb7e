"""Files of unknown authors take neither the engine's memory nor its interpreter for long."""

from __future__ import annotations

import json
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import CONFIG, DOWN, HEAD, OTHERS, PREFIX, QUERY, SHAPES, Arrays, tensors, write_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from quire.kernels.adapters import safetensors_header
from quire.kernels.adapters.changeable import Changeable
from quire.kernels.adapters.files import AdapterFile
from quire.kernels.adapters.json_config import read_config
from quire.kernels.adapters.peft import read_adapter
from quire.kernels.adapters.peft_config import read_peft_config
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.weights import json_files
from quire.kernels.weights.checkpoint import Checkpoint

MODEL, EMBEDDING = "adapter_model.safetensors", "model.embed_tokens"
Entry = tuple[str, list[int]]


class Bytes:
    """Counts what is read of an adapter's file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read, self.largest = 0, 0
        original = AdapterFile.read

        def read(file: AdapterFile, start: int, count: int) -> Any:
            self.read, self.largest = self.read + count, max(self.largest, count)
            return original(file, start, count)

        monkeypatch.setattr(AdapterFile, "read", read)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Bytes:
    return Bytes(monkeypatch)


def write_sparse(folder: Path, entries: dict[str, Entry], **changes: Any) -> Path:
    """Write an adapter whose file has tensors of zeros, which take no room on the disk."""
    write_adapter(folder, **changes)
    size, header = 0, {}
    for name, (dtype, shape) in entries.items():
        end = size + int(np.prod(shape)) * int(dtype[1:]) // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    with (folder / MODEL).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    return folder


LARGE, HUGE = f"{PREFIX}{QUERY}", 1 << 38
GOOD: dict[str, Entry] = {f"{LARGE}.lora_A.weight": ("F32", [2, 8]), f"{LARGE}.lora_B.weight": ("F32", [6, 2])}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({**GOOD, f"{PREFIX}{DOWN}.lora_A.weight": ("F32", [HUGE, 12])}, "lacks the part B"),
        (
            GOOD | {f"{LARGE}.lora_A.weight": ("F32", [HUGE, 8])},
            "lora_A.weight has shape [274877906944, 8], but rank 2",
        ),
        ({**GOOD, "x": ("F32", [HUGE])}, "1 tensors that are not of this base model, or not supported: x;"),
        ({**GOOD, "x": ("F64", [HUGE])}, "tensor x is of type F64; adapters are f32"),
        ({**GOOD, f"{PREFIX}{HEAD}.weight": ("F32", [HUGE, 8])}, "but lm_head.weight of the base model asks for"),
    ],
)
def test_data_is_read_only_once_all_shapes_are_right(
    entries: dict[str, Entry], message: str, counted: Bytes, tmp_path: Path
) -> None:
    folder = write_sparse(tmp_path, entries)
    with pytest.raises(ModelError) as error:
        read_adapter(folder, SHAPES, max_rank=8, others=OTHERS)
    assert message in str(error.value)
    assert counted.read < 2000


def base_arrays(rows: int = 10) -> Arrays:
    rng = np.random.default_rng(8)
    return {
        f"{EMBEDDING}.weight": rng.standard_normal((rows, 8), np.float32),
        f"{HEAD}.weight": rng.standard_normal((10, 8), np.float32),
        f"{QUERY}.bias": rng.standard_normal(6, np.float32),
        f"{QUERY}.weight": rng.standard_normal((6, 8), np.float32),
    }


def changeable(folder: Path, arrays: Arrays) -> Changeable:
    """Return what may be changed of a base model with these tensors."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(arrays, folder / "model.safetensors")
    return Changeable(frozenset({f"{QUERY}.weight", f"{DOWN}.weight"}), Checkpoint(str(folder)))


def test_whole_tensors_are_compared_with_those_of_the_base_and_left_out(counted: Bytes, tmp_path: Path) -> None:
    rows = 100_000
    base, shapes = base_arrays(rows), {f"{EMBEDDING}.weight": (rows, 8)}
    whole = {f"{PREFIX}{name}": array for name, array in base.items()}
    limits = changeable(tmp_path / "base", base)
    folder = write_adapter(tmp_path / "adapter", tensors() | whole)
    adapter = read_adapter(folder, SHAPES, max_rank=8, others=OTHERS | shapes, changeable=limits)
    plain = read_adapter(write_adapter(tmp_path / "plain"), SHAPES, max_rank=8, others=OTHERS)
    assert not adapter.replaced
    assert adapter.digest == plain.digest
    assert counted.largest == 1 << 20
    counted.read = 0
    whole[f"{PREFIX}{EMBEDDING}.weight"][0, 0] += 1
    write_adapter(folder, tensors() | whole)
    with pytest.raises(ModelError, match=f"modules_to_save replaces {EMBEDDING}.weight of the base model by {PREFIX}"):
        read_adapter(folder, SHAPES, max_rank=8, others=OTHERS | shapes, changeable=limits)
    assert counted.read < 1_100_000


def test_whole_tensors_are_compared_by_their_values(tmp_path: Path) -> None:
    """Whatever dtype they have, and a tied head with the embedding."""
    base = base_arrays() | {f"{EMBEDDING}.weight": base_arrays()[f"{EMBEDDING}.weight"].astype(np.float16)}
    base[f"{HEAD}.weight"] = np.zeros((10, 8), np.float32)
    own = base[f"{EMBEDDING}.weight"].astype(np.float32)
    limits = replace(changeable(tmp_path / "base", base), tied=f"{EMBEDDING}.weight")
    given_ = tensors() | {f"{PREFIX}{EMBEDDING}.weight": own, f"{PREFIX}{HEAD}.weight": own.copy()}
    folder = write_adapter(tmp_path / "adapter", given_)
    assert not read_adapter(folder, SHAPES, max_rank=8, others=OTHERS, changeable=limits).replaced
    own[-1, -1] = np.nextafter(own[-1, -1], np.float32(9))
    write_adapter(folder, given_)
    with pytest.raises(ModelError, match=f"modules_to_save replaces {EMBEDDING}.weight of the base model"):
        read_adapter(folder, SHAPES, max_rank=8, others=OTHERS, changeable=limits)


@pytest.mark.parametrize("free", [1183, 1184])
def test_whole_tensors_are_read_if_there_is_memory_for_them(free: int, counted: Bytes, tmp_path: Path) -> None:
    """As they are in the file, and once they are packed, beside low rank; those of the base take none."""
    base = base_arrays()
    rows = frozenset({f"{EMBEDDING}.weight", f"{HEAD}.weight"})
    limits = replace(changeable(tmp_path / "base", base), rows=rows, free_bytes=lambda: free)
    whole = {
        f"{PREFIX}{EMBEDDING}.weight": base[f"{EMBEDDING}.weight"],
        f"{PREFIX}{HEAD}.weight": np.ones((10, 8), np.float32),
    }
    folder = write_adapter(tmp_path / "adapter", tensors() | whole)
    if free == 1184:
        adapter = read_adapter(folder, SHAPES, max_rank=8, others=OTHERS, changeable=limits)
        assert adapter.replaced.keys() == {f"{HEAD}.weight"}
        return
    with pytest.raises(
        MemoryShortageError, match="its tensors take 1184 bytes of memory to read and pack, and 1183 are"
    ):
        read_adapter(folder, SHAPES, max_rank=8, others=OTHERS, changeable=limits)


VOCABULARY, WIDTH = 1 << 22, 1 << 13
TABLE = f"{PREFIX}{EMBEDDING}"
HUGE_TENSORS: dict[str, tuple[dict[str, Entry], dict[str, Any], int]] = {
    "low rank": (
        {f"{LARGE}.lora_A.weight": ("F32", [8, WIDTH]), f"{LARGE}.lora_B.weight": ("F32", [VOCABULARY, 8])},
        {"r": 8},
        8 * (8 * WIDTH + 8 * VOCABULARY),
    ),
    "embedding": (
        {
            f"{TABLE}.lora_embedding_A": ("F16", [8, VOCABULARY]),
            f"{TABLE}.lora_embedding_B": ("F16", [WIDTH, 8]),
        },
        {"r": 8},
        6 * (8 * WIDTH + 8 * VOCABULARY),
    ),
    "tokens": (
        {f"{TABLE}.token_adapter.trainable_tokens_delta": ("F32", [100_000, WIDTH])},
        {"trainable_token_indices": list(range(100_000))},
        8 * 100_000 * WIDTH,
    ),
}


@pytest.mark.parametrize(("entries", "fields", "needed"), HUGE_TENSORS.values(), ids=HUGE_TENSORS.keys())
def test_no_tensor_is_read_without_memory_for_all(
    entries: dict[str, Entry], fields: dict[str, Any], needed: int, counted: Bytes, tmp_path: Path
) -> None:
    """A file of zeros takes no room on the disk, however large it is."""
    table = f"{EMBEDDING}.weight"
    layers, rows = frozenset({f"{QUERY}.weight"}), frozenset({table})
    limits = replace(
        changeable(tmp_path / "base", base_arrays()),
        layers=layers, embeddings=rows, rows=rows, free_bytes=lambda: needed - 1,
    )  # fmt: skip
    folder = write_sparse(tmp_path / "adapter", entries, **fields)
    shapes, others = {f"{QUERY}.weight": (VOCABULARY, WIDTH)}, {table: (VOCABULARY, WIDTH)}
    with pytest.raises(
        MemoryShortageError, match=f"take {needed} bytes of memory to read and pack, and {needed - 1} are"
    ):
        read_adapter(folder, shapes, max_rank=8, others=others, changeable=limits)
    assert counted.read < 2000


OF_EMBEDDING = {
    f"{PREFIX}{EMBEDDING}.lora_embedding_A": np.ones((2, 10), np.float32),
    f"{PREFIX}{EMBEDDING}.lora_embedding_B": np.ones((8, 2), np.float32),
}
OF_HEAD = {
    f"{PREFIX}{HEAD}.lora_A.weight": np.ones((2, 8), np.float32),
    f"{PREFIX}{HEAD}.lora_B.weight": np.ones((10, 2), np.float32),
}
ROWS = {f"{PREFIX}{EMBEDDING}.token_adapter.trainable_tokens_delta": np.ones((2, 8), np.float32)}


@pytest.mark.parametrize(
    ("more", "fields", "message"),
    [
        ({f"{PREFIX}{QUERY}.bias": np.ones(6, np.float32)}, {"bias": "all"}, f"bias replaces {QUERY}.bias"),
        ({f"{PREFIX}{HEAD}.weight": np.ones((10, 8), np.float32)}, {}, f"modules_to_save replaces {HEAD}.weight"),
        (
            {f"{PREFIX}{HEAD}.weight": base_arrays()[f"{HEAD}.weight"].astype(np.float16)},
            {},
            "modules_to_save replaces",
        ),
        ({f"{PREFIX}model.norm.weight": np.ones(8, np.float32)}, {}, "modules_to_save replaces model.norm.weight"),
        (OF_EMBEDDING, {}, f"target_modules changes {EMBEDDING}.weight"),
        (OF_HEAD, {}, f"target_modules changes {HEAD}.weight"),
        (ROWS, {"trainable_token_indices": [1, 2]}, f"trainable_token_indices changes rows of {EMBEDDING}.weight"),
    ],
)
def test_errors_name_the_field_that_asks_for_what_can_not_be_changed(
    more: Arrays, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    limits = changeable(tmp_path / "base", base_arrays())
    folder = write_adapter(tmp_path / "adapter", tensors() | more, **fields)
    with pytest.raises(ModelError) as error:
        read_adapter(folder, SHAPES, max_rank=8, others=OTHERS, changeable=limits)
    assert str(error.value).startswith(f"{folder / 'adapter_config.json'}: {message}")
    assert "merge the adapter into its model" in str(error.value)


def test_long_headers_are_decoded_in_short_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lengths, original = [], json_files.decoded

    def decoded(text: bytes, kind: Any, problem: str) -> Any:
        lengths.append(len(text))
        return original(text, kind, problem)

    monkeypatch.setattr(safetensors_header, "decoded", decoded)
    modules = [f"model.layers.{number}.self_attn.q_proj" for number in range(1000)]
    halves = {"A": np.ones((2, 8), np.float32), "B": np.ones((6, 2), np.float32)}
    given_ = {f"{PREFIX}{module}.lora_{half}.weight": array for module in modules for half, array in halves.items()}
    folder = write_adapter(tmp_path)
    save_file(given_, folder / MODEL, metadata={"format": "pt", "config": json.dumps([{"a": {}}, {"b": {}}] * 1000)})
    adapter = read_adapter(folder, {f"{module}.weight": (6, 8) for module in modules}, max_rank=8)
    assert adapter.layers.keys() == {f"{module}.weight" for module in modules}
    assert len(lengths) > 3
    assert max(lengths) <= (1 << 16) + 2


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text() | FLOATS
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(VALUES, st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_configs_are_read_as_json(tmp_path: Path, value: Any, escapes: bool) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"x": value}, ensure_ascii=escapes), encoding="utf-8", errors="surrogatepass")
    assert read_config(path, 1 << 20) == {"x": value}


@given(st.text(alphabet='{}[]",:\\eE+-.0123456789 \nanturfls', max_size=20))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_configs_that_are_no_json_are_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"x": ' + text + "}")
    try:
        expected = json.loads(path.read_bytes())
        json.dumps(expected, allow_nan=False)
    except ValueError:
        with pytest.raises(ModelError, match="can't be read as a JSON object"):
            read_config(path, 1 << 20)
        return
    assert read_config(path, 1 << 20) == expected


def test_the_most_tokens_fit_into_a_config(tmp_path: Path) -> None:
    """Each on a line of its own, as PEFT writes them."""
    tokens = list(range(900_000, 1_000_000))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(CONFIG | {"trainable_token_indices": {EMBEDDING: tokens}}, indent=2))
    config = read_peft_config(tmp_path, 8)
    assert config.tokens_of(EMBEDDING) == tuple(tokens)


def test_other_threads_go_on_while_a_config_is_decoded(tmp_path: Path) -> None:
    """A decoder in C would let this thread count to 1 or 2."""
    path = tmp_path / "config.json"
    path.write_text('{"x": [' + "1e308," * 150_000 + "1]}")
    decoding = threading.Thread(target=read_config, args=(path, 1 << 20))
    decoding.start()
    count = 0
    while decoding.is_alive():
        time.sleep(0)
        count += 1
    assert count > 10
