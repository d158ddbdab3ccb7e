"""What the modes of quantization lose on real weights, those of `scripts/real_models.py --noisy`.

`scripts/test --full` fetches them; otherwise QUIRE_REAL_MODELS names their folder, or the tests are skipped.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from measure_quantization import Reading, compare, read, read_texts

from quire.frontend import LLM
from quire.frontend.text.tokenizer import Tokenizer

NAME = "QUIRE_REAL_MODELS"
FOLDER = Path(os.environ.get(NAME, "")).expanduser()
TOKENS = 600  # of each text
NOISY = ("SmolLM2-135M-Instruct-noisy", "gemma-3-270m-noisy")

pytestmark = pytest.mark.skipif(not os.environ.get(NAME), reason=f"{NAME} names no folder of scripts/real_models.py")


@cache
def reading(model: str, **options: Any) -> Reading:
    folder = str(FOLDER / model)
    tokenizer = Tokenizer(folder)
    prompts = [tokenizer.encode(text)[:TOKENS] for text in read_texts(FOLDER / "texts.jsonl")]
    return read(folder, {"dtype": "bfloat16", "max_model_len": TOKENS + 8, **options}, prompts)


@pytest.mark.parametrize("model", ["SmolLM2-135M-Instruct", "gemma-3-270m", *NOISY])
@pytest.mark.parametrize(
    ("options", "change", "same_top"),
    [
        ({"quantization": "int8"}, 0.5, 96.5),
        ({"quantization": "int4"}, 3.0, 88.5),
        ({"kv_cache_dtype": "int8"}, 0.1, 97.5),
    ],
)
def test_loss(model: str, options: dict[str, str], change: float, same_top: float) -> None:
    """Perplexity rises by at most `change` percent and a standard error, and most likeliest tokens stay."""
    found = compare(reading(model, **options), reading(model))
    assert found["change_percent"] <= change + found["error_percent"], found
    assert found["same_top_percent"] >= same_top, found


@pytest.mark.parametrize(("quantization", "least"), [("int8", 0.9995), ("int4", 0.994)])
def test_embeddings(quantization: str, least: float) -> None:
    texts = [line for text in read_texts(FOLDER / "texts.jsonl") for line in text.split("\n") if len(line) > 40][:300]
    embeddings = []
    for dtype, mode in (("float32", None), ("bfloat16", quantization)):
        with LLM(str(FOLDER / "all-MiniLM-L6-v2"), dtype=dtype, quantization=mode) as llm:
            embeddings.append(np.array([output.outputs.embedding for output in llm.embed(texts)]))
    cosines = (embeddings[0] * embeddings[1]).sum(axis=1)
    assert cosines.min() >= least
