"""A request to any architecture has the same bits alone, in a batch, in chunks, preempted, and from the prefix cache.

`test_same_bits.py` has more conditions, and quantization, for few of the architectures.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from checkpoints import CHECKPOINTS, ReferenceCheckpoint
from memory_pressure import under_pressure

from quire.frontend import LLM, SamplingParams
from quire.kernels.devices.instruction_sets import available_isas

if TYPE_CHECKING:
    from conftest import EngineFactory

    from quire.frontend import RequestOutput

LENGTHS = (1, 33, 100, 250, 270, 400)  # the answers cross edges of pages, and of 256 positions
FEW_PAGES = 16  # the first four outgrow them with their answers, and the last alone fills 14
VOCABULARY = 500

# Greedy and random in turn; the third and the sixth have the prompt's log probabilities, which no cached prefix has.
PARAMS = [
    SamplingParams(
        temperature=0.9 * (i % 2), top_p=0.95, seed=i, max_tokens=40, ignore_eos=True, logprobs=2,
        prompt_logprobs=1 if i % 3 == 2 else None,
    )
    for i in range(len(LENGTHS))
]  # fmt: skip
CACHED = [0, 0, 0, 160, 192, 0]  # tokens of the prompts' whole pages, once three quarters of each prompt are cached


def prompts() -> list[list[int]]:
    """Return random prompts without a common prefix."""
    rng = random.Random(3)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in LENGTHS]


def ask(llm: LLM, chosen: Sequence[int] = range(len(LENGTHS))) -> list[RequestOutput]:
    """Return the outputs of the chosen requests, sent together."""
    return llm.generate([prompts()[i] for i in chosen], [PARAMS[i] for i in chosen], use_tqdm=False)


def answers(outputs: Sequence[RequestOutput]) -> list[tuple[Any, ...]]:
    """Return tokens and all log probabilities of each output."""
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda checkpoint: checkpoint.name)
def test_a_request_has_the_same_bits_under_all_conditions(
    checkpoint: ReferenceCheckpoint, checkpoints: Path, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine has all at once that may change a bit: chunks, one thread, few pages, other instructions."""
    model = checkpoints / checkpoint.name
    large = engine(model, threads=2)
    alone = [answer for i in range(len(LENGTHS)) for answer in answers(ask(large, [i]))]
    assert len({tuple(tokens) for tokens, *_ in alone}) == len(LENGTHS)

    large.reset_prefix_cache()
    assert answers(ask(large)) == alone

    large.reset_prefix_cache()
    prefixes = [prompt[: len(prompt) * 3 // 4] for prompt in prompts()]
    large.generate(prefixes[1:], SamplingParams(max_tokens=1), use_tqdm=False)
    found = ask(large)
    assert [output.num_cached_tokens for output in found] == CACHED
    assert answers(found) == alone

    monkeypatch.setenv("QUIRE_ISA", available_isas()[-1])
    small = engine(model, threads=1, max_num_batched_tokens=48, num_pages=FEW_PAGES)
    assert under_pressure(small, lambda: answers(ask(small))) == alone
