"""The tokens and log probabilities of a request have the same bits in any batch and under all conditions.

Every comparison is `==` on floats: one engine answers 32 requests at once, and everything else must repeat it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from memory_pressure import under_pressure
from quantized_checkpoints import by_name, write_quantized

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import LLM, SamplingParams

REQUESTS = 32
ALONE = (0, 1, 2, 3, 13, 31)  # every kind of parameters, and the longest prompt
TOKENS = 24
MANY_TOKENS = 90  # in a pool of FEW_PAGES they outgrow what a request was admitted with
FEW_PAGES = 20
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 100, 128, 257)

# Answer of a request: tokens, text, and all log probabilities.
Answer = tuple[Any, ...]


def instruction_sets() -> list[str]:
    """Return the instruction sets of this host, by the names of QUIRE_ISA."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), set())
    avx512 = {"avx512f", "avx512bw", "avx512vl"}
    needs = {
        "amx": {"amx_tile", "amx_bf16", "amx_int8"},
        "avx512-bf16": avx512 | {"avx512_vnni", "avx512_bf16"},
        "avx512-vnni": avx512 | {"avx512_vnni"},
        "avx512": avx512,
        "avx2-vnni": {"avx2", "fma", "avx_vnni"},
        "avx2": {"avx2", "fma"},
        "neon-dotprod": {"asimd", "asimddp"},
        "neon": {"asimd"},
    }
    return [name for name, flag in needs.items() if flag <= flags]


def prompts(vocab_size: int) -> list[list[int]]:
    """Return prompts of many lengths, around the edges of pages and chunks."""
    rng = random.Random(5)
    lengths = [*LENGTHS, *(rng.randrange(1, 120) for _ in range(REQUESTS - len(LENGTHS) - 1)), 400]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def params(max_tokens: int) -> list[SamplingParams]:
    """Return parameters, greedy and random in turn, with and without penalties and filters."""
    from quire.frontend import SamplingParams

    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "prompt_logprobs": 0},
        {
            "temperature": 1.2,
            "min_p": 0.02,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.2,
        },
    ]
    shared: dict[str, Any] = {"logprobs": 5, "max_tokens": max_tokens, "ignore_eos": True}
    return [SamplingParams(seed=100 + i, **shared, **kinds[i % len(kinds)]) for i in range(REQUESTS)]


def ask(llm: LLM, vocab_size: int, chosen: Sequence[int], max_tokens: int) -> list[Answer]:
    """Return the answers to the chosen requests, sent together after emptying the prefix cache."""
    llm.reset_prefix_cache()
    each = params(max_tokens)
    tokens = prompts(vocab_size)
    outputs = llm.generate([tokens[i] for i in chosen], [each[i] for i in chosen], use_tqdm=False)
    return [
        (output.outputs[0].token_ids, output.outputs[0].text, output.outputs[0].logprobs, output.prompt_logprobs)
        for output in outputs
    ]


class Subject:
    """A model with one set of dtypes, and its answers to all requests in one batch."""

    def __init__(self, start: EngineFactory, model: Path, **formats: str) -> None:
        self.options: dict[str, Any] = {"model": model, "num_pages": 256, **formats}
        self.llm = start(**self.options, max_num_batched_tokens=8192)
        self.vocab_size: int = min(500, self.llm.get_tokenizer().vocab_size)
        self.together = self.ask(self.llm)

    def ask(self, llm: LLM, chosen: Sequence[int] = range(REQUESTS), max_tokens: int = TOKENS) -> list[Answer]:
        """Return the answers of this or another engine of the same model, to all requests or the chosen ones."""
        return ask(llm, self.vocab_size, chosen, max_tokens)

    def check_after_preemption(self, llm: LLM) -> None:
        """Check that an engine with FEW_PAGES, which must preempt requests, gives the answers of the large one."""
        some = range(8, REQUESTS, 2)
        answers = under_pressure(llm, lambda: self.ask(llm, some, MANY_TOKENS))
        assert answers == self.ask(self.llm, some, MANY_TOKENS)


THOROUGH: list[tuple[str, dict[str, str]]] = [
    ("demo", {"dtype": "float32"}),
    ("demo", {"dtype": "bfloat16"}),
    ("demo", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    ("demo", {"quantization": "int4"}),
    ("qwen3.5-grouped", {"dtype": "bfloat16"}),
    ("lfm2-tied", {"quantization": "int8"}),
]


@pytest.fixture(scope="module", params=THOROUGH, ids=lambda param: "-".join((param[0], *param[1].values())))
def subject(
    request: pytest.FixtureRequest, module_engine: EngineFactory, demo_model: Path, checkpoints: Path
) -> Subject:
    """The demo model, and models with state."""
    name, formats = request.param
    return Subject(module_engine, demo_model if name == "demo" else checkpoints / name, **formats)


CONDITIONS = [  # no two of threads, chunks and pages are together twice
    ("amx", 3, 16, 64),
    ("avx512-bf16", 3, 8192, 128),
    ("avx512-vnni", 2, 100, 32),
    ("avx512", 1, 16, 32),
    ("avx2-vnni", 1, 100, 64),
    ("avx2", 2, 8192, 64),
]
ODD: list[tuple[str, dict[str, str]]] = [
    ("gpt2-untied", {"dtype": "bfloat16", "quantization": "int4"}),
    ("mistral-window77", {"dtype": "float32", "kv_cache_dtype": "int8"}),
    ("qwen2-moe-shared-window", {"quantization": "int8"}),
    ("gpt-oss-window100", {"quantization": "int4"}),
    ("qwen3-next-experts", {"quantization": "int4"}),
    ("gemma4-shared-window100", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    ("gemma4-experts", {"quantization": "int4"}),
    ("gemma3n-window100", {"quantization": "int8"}),
]


@pytest.fixture(scope="module", params=ODD, ids=lambda odd: odd[0])
def checkpoint(request: pytest.FixtureRequest, module_engine: EngineFactory, checkpoints: Path) -> Subject:
    """Models with sliding windows, biases, norms, or latent attention and experts, which the demo model lacks."""
    name, formats = request.param
    return Subject(module_engine, checkpoints / name, **formats)


@pytest.fixture(scope="module", params=["gptq-4-asymmetric-reordered", "pack-8"])
def integers(
    request: pytest.FixtureRequest,
    module_engine: EngineFactory,
    demo_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Subject:
    """The demo model as quantized checkpoints, with zero points and permuted inputs, or with groups of int8."""
    folder = tmp_path_factory.mktemp("integers") / request.param
    write_quantized(demo_model, folder, by_name(request.param))
    return Subject(module_engine, folder)


def test_the_answers_differ_from_each_other(subject: Subject) -> None:
    """Otherwise the comparisons below would compare nothing."""
    assert len({tuple(answer[0]) for answer in subject.together}) > REQUESTS // 2


@pytest.mark.parametrize("index", ALONE)
def test_alone_and_in_a_batch_of_32(subject: Subject, index: int) -> None:
    assert subject.ask(subject.llm, [index]) == [subject.together[index]]


def test_in_another_order(subject: Subject) -> None:
    assert subject.ask(subject.llm, range(REQUESTS - 1, -1, -1)) == subject.together[::-1]


@pytest.mark.parametrize(("isa", "threads", "budget", "block_size"), CONDITIONS)
def test_on_any_instruction_set_and_threads_in_chunks_and_pages(
    subject: Subject, engine: EngineFactory, isa: str, threads: int, budget: int, block_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The other conditions count on the best instruction set too, where the host lacks one."""
    missing = isa not in instruction_sets()
    if not missing:
        monkeypatch.setenv("QUIRE_ISA", isa)
    llm = engine(**subject.options, threads=threads, max_num_batched_tokens=budget, block_size=block_size)
    assert subject.ask(llm) == subject.together
    if missing:
        pytest.skip(f"this host has no {isa}")


def test_after_preemption(subject: Subject, engine: EngineFactory) -> None:
    subject.check_after_preemption(engine(**{**subject.options, "num_pages": FEW_PAGES}))


def test_prompt_logprobs_after_a_preemption_within_the_prompt(subject: Subject, engine: EngineFactory) -> None:
    """The first request decodes concurrently with chunks of the second's prompt, until it needs the second's pages.

    The second may come up to 127 steps late, while the first has one page.
    """
    from quire.frontend import SamplingParams

    prompts = [[7], [(index * 37) % subject.vocab_size for index in range(300)]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=1),
    ]
    llm = engine(**{**subject.options, "num_pages": 5}, block_size=128, max_num_batched_tokens=2)
    alone = subject.llm.generate([prompts[1]], params[1])[0]
    beside = under_pressure(llm, lambda: llm.generate(prompts, params, use_tqdm=False)[1])
    assert beside.outputs == alone.outputs
    assert beside.prompt_logprobs == alone.prompt_logprobs
    assert len(beside.prompt_logprobs or []) == 300


def test_from_the_prefix_cache(subject: Subject, engine: EngineFactory) -> None:
    """Prompts with shared prefixes, some of them twice, in a pool that is too small to keep them all."""
    from quire.frontend import SamplingParams

    base = [(index * 37) % subject.vocab_size for index in range(200)]
    prompts = [[*base[: 20 * (index % 10)], index, *base[:30]] for index in range(40)]
    params = [SamplingParams(seed=index, max_tokens=40, logprobs=3, ignore_eos=True) for index in range(40)]
    plain = engine(**subject.options, enable_prefix_caching=False).generate(prompts, params, use_tqdm=False)
    small = engine(**{**subject.options, "num_pages": 2 * FEW_PAGES}, max_num_seqs=5)
    for _ in range(2):
        found = small.generate(prompts, params, use_tqdm=False)
        assert [output.outputs for output in found] == [output.outputs for output in plain]
    assert all(output.num_cached_tokens == 0 for output in plain)
    assert sum((output.num_cached_tokens or 0) > 0 for output in found) > 10
    assert small.stats()["evictions"] > 0


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_samples_of_one_prompt(subject: Subject, engine: EngineFactory, cache: bool) -> None:
    """Eight samples that fork from each other, three at a time, and with too few pages, equal eight requests."""
    from quire.frontend import SamplingParams

    def answers(llm: LLM, length: int, n: int, seeds: list[int]) -> list[Answer]:
        params = [SamplingParams(n=n, seed=seed, max_tokens=40, logprobs=3, ignore_eos=True) for seed in seeds]
        prompt = [(index * 37) % subject.vocab_size for index in range(length)]
        requests = llm.generate([prompt] * len(seeds), params, use_tqdm=False)
        return [(output.token_ids, output.text, output.logprobs) for each in requests for output in each.outputs]

    few = engine(**{**subject.options, "num_pages": 20}, enable_prefix_caching=cache)
    three = engine(**subject.options, enable_prefix_caching=cache, max_num_seqs=3)
    for length in (1, 31, 32, 33, 50, 129):
        single = answers(subject.llm, length, 1, [*range(70, 78)])
        assert answers(few, length, 8, [70]) == answers(three, length, 8, [70]) == single


def test_other_architectures_too(checkpoint: Subject, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """All conditions together: small chunks, few pages, one thread, the smallest instruction set."""
    assert checkpoint.ask(checkpoint.llm, [31]) == [checkpoint.together[31]]
    monkeypatch.setenv("QUIRE_ISA", instruction_sets()[-1])
    options = {**checkpoint.options, "num_pages": FEW_PAGES, "max_num_batched_tokens": 100, "threads": 1}
    llm = engine(**options)
    assert checkpoint.ask(llm) == checkpoint.together
    checkpoint.check_after_preemption(llm)


def test_quantized_checkpoints(integers: Subject, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert integers.ask(integers.llm, [3, 31]) == [integers.together[i] for i in (3, 31)]
    assert integers.ask(engine(**integers.options, max_num_batched_tokens=16, threads=1)) == integers.together
    monkeypatch.setenv("QUIRE_ISA", instruction_sets()[-1])
    assert integers.ask(engine(**integers.options, max_num_batched_tokens=100)) == integers.together
