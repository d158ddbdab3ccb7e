"""Work of a plan's launches, against sizes that are counted independently."""

from __future__ import annotations

import numpy as np
import pytest
from bench.kernel_steps import RandomCheckpoint
from kernel_calls import context_of
from tiny_model import CONFIG

from quire.kernels.config import ModelConfig
from quire.kernels.emit.layout import Dtypes
from quire.kernels.lowering.model import lower
from quire.kernels.models import build_graph
from quire.kernels.operands import PlanLimits
from quire.kernels.weights.quantization import choose_quantization
from quire.kernels.work import Chunk, Step, Work, work_of


def works(step: Step, mode: str | None = None, **fields: object) -> dict[str, list[Work]]:
    config = ModelConfig(CONFIG | {"max_position_embeddings": 512} | fields)
    quantization = choose_quantization(mode, RandomCheckpoint(CONFIG), config)
    context = context_of("avx512", Dtypes("bf16", "bf16", "f32"))
    plan = lower(build_graph(config), context, PlanLimits(64, 512, 32), quantization)
    found: dict[str, list[Work]] = {}
    for launch in plan.launches:
        kernel = launch.kernel.name.rsplit("_", 1)[0]
        found.setdefault(kernel, []).append(work_of(plan, launch, step))
    return found


def test_a_token_reads_every_weight_once() -> None:
    found = works(Step((Chunk(0, 1),), 1))
    products = [*found["linear"], *found["linear_add"], *found["linear_gate"], *found["logits"]]
    parameters = 2 * (4 * 64 * 64 + 3 * 64 * 96) + 128 * 64  # the layers' matrices and the head
    assert sum(work.memory for work in products) == 2 * parameters
    assert sum(work.operations for work in products) == 2 * parameters
    assert found["embed"][0].memory == 2 * 64
    assert {work.unit for work in products} == {"fma"}


def test_experts_that_are_not_chosen_are_not_read() -> None:
    moe = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    one, many = (works(Step((Chunk(0, rows),), 1), None, **moe) for rows in (1, 50))
    gates, downs = 2 * 64 * 96, 96 * 64  # of an expert
    entries = one["expert_gate"][0], one["expert_down"][0]
    assert [work.memory for work in entries] == [2 * 2 * gates, 2 * 2 * downs]
    assert [work.operations for work in entries] == [2 * 2 * gates, 2 * 2 * downs]
    assert many["expert_gate"][0].memory == pytest.approx(8 * 2 * gates, rel=0.001)
    assert many["expert_gate"][0].operations == 50 * one["expert_gate"][0].operations


def test_more_rows_take_more_operations_over_the_same_weights() -> None:
    one, many = (works(Step((Chunk(0, rows),), 1)) for rows in (1, 20))
    for kernel in ("linear", "linear_add", "linear_gate"):
        for few, lots in zip(one[kernel], many[kernel], strict=True):
            assert lots.memory == few.memory
            assert lots.operations == 20 * few.operations
            assert lots.activations == 20 * few.activations
    assert one["logits"] == many["logits"]  # only the last row


@pytest.mark.parametrize("window", [0, 1, 7, 100])
def test_chunks_attend_to_the_tokens_of_the_mask(window: int) -> None:
    for start, tokens in ((0, 1), (0, 12), (30, 1), (30, 9)):
        query, key = np.arange(start, start + tokens)[:, None], np.arange(start + tokens)
        mask = (key <= query) & (key > query - window if window else True)
        chunk = Chunk(start, tokens)
        assert chunk.pairs(window) == mask.sum()
        assert chunk.context(window) == mask.any(axis=0).sum()


def test_attention_reads_the_context_of_each_sequence() -> None:
    found = works(Step((Chunk(31, 1), Chunk(95, 1)), 2))
    token_bytes, head = 2 * 64 * 2, 64
    assert [work.memory for work in found["attention"]] == [128 * token_bytes] * 2
    assert [work.operations for work in found["attention"]] == [128 * 4 * head] * 2


def test_quantized_weights_have_fewer_bytes_and_another_unit() -> None:
    step = Step((Chunk(0, 1),), 1)
    floats, quantized = works(step), works(step, "int8")
    for kernel in ("linear", "linear_add", "linear_gate", "logits"):
        for before, after in zip(floats[kernel], quantized[kernel], strict=True):
            assert before.memory / 2 < after.memory < before.memory
            assert (after.operations, after.unit) == (before.operations, "vpmaddwd")


def test_split_attention_has_the_work_of_the_whole() -> None:
    chunks = (Chunk(300, 1), Chunk(300, 1))
    whole, split = works(Step(chunks, 2)), works(Step(chunks, 2, split=1))
    for before, rest, parts in zip(whole["attention"], split["attention"], split["attention_split"], strict=True):
        assert rest.memory == parts.memory
        assert rest.memory + parts.memory == before.memory
        assert rest.operations + parts.operations == before.operations
    partials = 2 * (64 * 4 + 64)  # two blocks of one query row
    assert all(work.activations >= partials for work in split["split_reduction"])
    assert not any(work.activations + work.memory for work in whole["split_reduction"])
