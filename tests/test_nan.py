"""A model that computes NaN for one token: requests with it fail with a clear error and do not affect others.

All weights are finite, since others are rejected at the start; a sum of squares overflows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from tiny_model import CONFIG, weights, write

if TYPE_CHECKING:
    from conftest import EngineFactory

POISON = 5


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    tensors = weights()
    tensors["model.embed_tokens.weight"][POISON] = 1e30
    config = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    return write(tmp_path / "model", tensors, config)


def test_pages_of_a_failed_request_can_be_reused(poisoned: Path, engine: EngineFactory) -> None:
    from quire.frontend import RequestError, SamplingParams

    llm = engine(poisoned, skip_tokenizer_init=True, num_pages=4)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, detokenize=False)
    before = llm.generate([[7, 8, 9]], params)[0].outputs[0].token_ids
    for _ in range(2):
        with pytest.raises(RequestError, match="NaN"):
            llm.generate([[7, POISON] * 20], params)
        assert llm.generate([[7, 8, 9]], params)[0].outputs[0].token_ids == before


@pytest.mark.parametrize("pooling_type", ["last", "mean"])
def test_an_embedding_with_a_nan_is_an_error(
    poisoned: Path, engine: EngineFactory, pooling_type: Literal["last", "mean"]
) -> None:
    from quire.frontend import PoolingParams, RequestError

    llm = engine(poisoned, skip_tokenizer_init=True, num_pages=4)
    params = PoolingParams(pooling_type=pooling_type)
    before = llm.embed([[7, 8, 9]], params)[0].outputs
    with pytest.raises(RequestError, match="prompt 1: the model's hidden state holds a NaN"):
        llm.embed([[7, 8, 9], [7, POISON] * 20], params, use_tqdm=False)
    assert llm.embed([[7, 8, 9]], params)[0].outputs == before


def test_a_prompt_position_that_fails_ends_its_request_alone(poisoned: Path, engine: EngineFactory) -> None:
    """The NaN is outside the window when the last position is computed, so only a prompt logprob fails."""
    from quire.frontend import RequestError, SamplingParams

    llm = engine(poisoned, skip_tokenizer_init=True, num_pages=40)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    with pytest.raises(RequestError, match="NaN"):
        llm.generate([[POISON, *[7, 8] * 100]], params)
    assert len(llm.generate([[7, 8, 9]], params)[0].outputs[0].token_ids) == 1
