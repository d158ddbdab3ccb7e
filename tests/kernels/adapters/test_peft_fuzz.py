"""Whatever is in an adapter's folder, it is read as finite numbers of the right shapes, or a ModelError."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from adapter_files import CONFIG, HEAD, OTHERS, PREFIX, QUERY, SHAPES, tensors, write_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kernels.adapters.peft import read_adapter
from quire.kernels.errors import ModelError

MODEL, EMBEDDING = "adapter_model.safetensors", "model.embed_tokens"
KEYS = st.sampled_from(["q_proj", ".*", "(", "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "LORA", "all", "all-linear", "q_proj", "(", ".*", r"(.*)*\d", "\n", "pissa"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
FIELDS = st.sampled_from([*CONFIG, "target_parameters", "alora_invocation_tokens", "unknown", "ensure_weight_tying"])
ENDS = ("lora_embedding_A", "lora_embedding_B", "weight", "token_adapter.trainable_tokens_delta")
NAMES = st.sampled_from([
    *tensors(), *(f"{PREFIX}{HEAD}.lora_{part}.weight" for part in "AB"),
    *(f"{PREFIX}{EMBEDDING}.{end}" for end in ENDS),
    *(f"{QUERY}.{end}" for end in ("bias", "lora_B.bias", "lora_magnitude_vector")),
    "", "weight", ".weight", ".lora_A.weight", "lora_A", "\n.lora_A.weight",
])  # fmt: skip
SIZES = st.lists(st.sampled_from([0, 1, 2, 6, 8, 10, 12]), max_size=3)
ELEMENTS = st.sampled_from([0.0, 1.0, -1e30, float("nan"), float("inf")])
DTYPES = st.sampled_from([np.float32, np.float16, np.float64, np.int8])


@given(
    st.dictionaries(FIELDS, VALUES, max_size=3),
    st.lists(st.tuples(NAMES, st.none() | st.tuples(SIZES, ELEMENTS, DTYPES)), max_size=3),
    st.binary(max_size=3),
    st.integers(0, 500),
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_folder_is_read_or_rejected(
    tmp_path: Path, fields: dict[str, Any], mutations: list[tuple[str, Any]], piece: bytes, place: int
) -> None:
    made = tensors()
    for name, array in mutations:
        made.pop(name, None)
        if array is not None:
            shape, element, dtype = array
            with np.errstate(all="ignore"):
                made[name] = np.full(shape, element, np.float64).astype(dtype)
    folder = write_adapter(tmp_path, made, **fields)
    if piece:
        raw = bytearray((folder / MODEL).read_bytes())
        raw[place : place + len(piece)] = piece
        (folder / MODEL).write_bytes(raw)
    message = ""
    try:
        adapter = read_adapter(folder, SHAPES, max_rank=8, others=OTHERS)
    except ModelError as error:
        message = str(error)
    if message:
        assert message.isprintable()
        return
    assert all(np.isfinite(layer.a).all() and np.isfinite(layer.b).all() for layer in adapter.layers.values())
    assert all(1 <= layer.rank <= 8 for layer in adapter.layers.values())
    assert adapter.num_bytes > 0
    assert len(adapter.digest) == 64
