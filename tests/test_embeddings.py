"""Embeddings are the pooled hidden states of `transformers`, and have the same bits in any batch."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from checkpoint_files import load_references
from checkpoints import EMBEDDED
from memory_pressure import under_pressure

from quire.kernels.devices.instruction_sets import available_isas

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import LLM, EmbeddingRequestOutput, RequestOutput

Vector = npt.NDArray[np.floating[Any]]
PoolingType = Literal["last", "mean"]

KINDS: tuple[PoolingType, ...] = ("last", "mean")
FORMATS: list[dict[str, str]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
]
LENGTHS = (1, 2, 31, 32, 33, 64, 100, 129, 257, 700)


def embed(llm: LLM, prompts: Sequence[list[int]], pooling_type: PoolingType, **fields: Any) -> list[list[float]]:
    """Return the embedding of each prompt."""
    return [output.outputs.embedding for output in embedded(llm, prompts, pooling_type, **fields)]


def embedded(llm: LLM, prompts: Sequence[list[int]], kind: PoolingType, **fields: Any) -> list[EmbeddingRequestOutput]:
    from quire.frontend import PoolingParams

    return llm.embed(list(prompts), PoolingParams(pooling_type=kind, **fields), use_tqdm=False)


def root_mean_square(values: Vector) -> float:
    return float(np.sqrt(np.mean(values**2)))


@pytest.mark.parametrize("name", EMBEDDED)
def test_float32_equals_transformers(name: str, checkpoints: Path, engine: EngineFactory) -> None:
    references = load_references(name)
    llm = engine(checkpoints / name, dtype="float32", max_num_batched_tokens=256)
    for kind in KINDS:
        expected = references.pooled[kind]
        vectors = np.array(embed(llm, references.prompts, kind, normalize=False))
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
        units = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(np.array(embed(llm, references.prompts, kind)), units, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", EMBEDDED)
def test_bfloat16_has_no_larger_errors_than_transformers(name: str, checkpoints: Path, engine: EngineFactory) -> None:
    references = load_references(name)
    llm = engine(checkpoints / name, dtype="bfloat16")
    for kind in KINDS:
        exact, theirs = references.pooled[kind], references.pooled[kind + "_bfloat16"]
        ours = np.array(embed(llm, references.prompts, kind, normalize=False))
        assert root_mean_square(ours - exact) <= root_mean_square(theirs - exact)


@pytest.mark.parametrize(("mode", "least"), [("int8", 0.99), ("int4", 0.97)])
def test_quantized_embeddings_are_close(mode: str, least: float, demo_model: Path, engine: EngineFactory) -> None:
    """Measured by the cosine to unquantized ones; the prompts are random, which is hard for a small model."""
    floats, quantized = engine(demo_model, dtype="float32"), engine(demo_model, quantization=mode)
    for kind in KINDS:
        pairs = zip(embed(floats, PROMPTS, kind), embed(quantized, PROMPTS, kind), strict=True)
        assert min(float(np.dot(left, right)) for left, right in pairs) > least


def prompts() -> list[list[int]]:
    """Return prompts of lengths around the edges of pages and chunks; some share a prefix."""
    rng = random.Random(3)
    base = [rng.randrange(500) for _ in range(max(LENGTHS))]
    return [[rng.randrange(500), *base[1:length]] if length % 2 else base[:length] for length in LENGTHS]


PROMPTS = prompts()


class EmbeddedPrompts:
    """The demo model with one set of dtypes, and its embeddings of all prompts in one batch."""

    def __init__(self, start: EngineFactory, model: Path, formats: dict[str, str]) -> None:
        self.options: dict[str, Any] = {"model": model, **formats}
        self.llm = start(**self.options)
        self.together = self.ask(self.llm)

    def ask(self, llm: LLM, prompts: Sequence[list[int]] = PROMPTS) -> list[list[list[float]]]:
        """Return the last hidden states and the means of all prompts."""
        return [embed(llm, prompts, "last"), embed(llm, prompts, "mean", normalize=False)]


@pytest.fixture(scope="module", params=FORMATS, ids=lambda formats: "-".join(formats.values()))
def demo(request: pytest.FixtureRequest, module_engine: EngineFactory, demo_model: Path) -> EmbeddedPrompts:
    return EmbeddedPrompts(module_engine, demo_model, request.param)


def test_alone_from_the_cache_and_in_another_order(demo: EmbeddedPrompts) -> None:
    assert len({tuple(vector) for vectors in demo.together for vector in vectors}) == 2 * len(PROMPTS)
    for index in (0, 4, len(PROMPTS) - 1):
        alone = demo.ask(demo.llm, [PROMPTS[index]])
        assert alone == [vectors[index : index + 1] for vectors in demo.together]
    assert demo.ask(demo.llm, PROMPTS[::-1]) == [vectors[::-1] for vectors in demo.together]
    found = [[output.num_cached_tokens for output in embedded(demo.llm, PROMPTS, kind)] for kind in ("last", "mean")]
    assert found == [[(length - 1) // 32 * 32 for length in LENGTHS], [0 for _ in LENGTHS]]


def test_in_chunks_on_one_thread_without_the_cache(demo: EmbeddedPrompts, engine: EngineFactory) -> None:
    options = {"max_num_batched_tokens": 16, "threads": 1, "enable_prefix_caching": False}
    assert demo.ask(engine(**demo.options, **options)) == demo.together


def test_on_another_instruction_set(
    demo: EmbeddedPrompts, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ISA", available_isas()[-1])
    assert demo.ask(engine(**demo.options, threads=3, max_num_batched_tokens=100)) == demo.together


def test_after_a_preemption_within_the_prompt(demo: EmbeddedPrompts, engine: EngineFactory) -> None:
    """A request of higher priority decodes along with chunks of the prompt, until it needs the prompt's pages."""
    from quire.frontend import AsyncLLM, PoolingParams, SamplingParams

    prompt = PROMPTS[-1][:300]
    options = {"num_pages": 5, "block_size": 128, "max_num_batched_tokens": 2, "scheduling_policy": "priority"}
    llm = engine(**demo.options, **options)

    async def ask(kind: PoolingType) -> EmbeddingRequestOutput:
        params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        async with AsyncLLM(engine_address=llm.engine_address) as client:
            stream = client.generate([7], params)
            await anext(stream)
            rest = asyncio.create_task(drain(stream))
            output = await client.embed(prompt, PoolingParams(pooling_type=kind), priority=1)
            await rest
            return output

    async def drain(stream: AsyncIterator[RequestOutput]) -> None:
        async for _ in stream:
            pass

    for kind in KINDS:
        output = under_pressure(llm, functools.partial(lambda kind: asyncio.run(ask(kind)), kind))
        assert output.metrics.num_preemptions > 0
        assert output.outputs.embedding == embed(demo.llm, [prompt], kind)[0]


def test_dimensions_are_cut_before_normalization(demo: EmbeddedPrompts) -> None:
    [whole] = embed(demo.llm, PROMPTS[4:5], "mean", normalize=False)
    [cut] = embed(demo.llm, PROMPTS[4:5], "mean", normalize=False, dimensions=24)
    assert cut == whole[:24]
    [unit] = embed(demo.llm, PROMPTS[4:5], "mean", dimensions=24)
    np.testing.assert_allclose(unit, np.array(cut) / np.linalg.norm(cut), rtol=1e-6)
