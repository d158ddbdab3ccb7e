"""Parameters of requests are plain values: they can be pickled, copied and compared."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest

import quire
from quire import BeamSearchParams, PoolingParams, RequestError, SamplingParams, StructuredOutputsParams, ToolError
from quire.frontend.outputs import RequestOutputKind

PARAMS: list[Any] = [
    SamplingParams(),
    SamplingParams(stop=["x"], logit_bias={3: 1.5}, output_kind="delta", structured_outputs={"regex": "a+"}),  # type: ignore[call-arg, arg-type]
    StructuredOutputsParams(json={"type": "object"}),
    PoolingParams(dimensions=8),
    BeamSearchParams(beam_width=2, max_tokens=3),
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: type(params).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_parameters_can_be_pickled(params: Any, protocol: int) -> None:
    assert type(params) is getattr(quire, type(params).__name__)
    for same in (pickle.loads(pickle.dumps(params, protocol)), copy.copy(params), copy.deepcopy(params)):
        assert type(same) is type(params)
        assert same == params


def test_another_process_can_load_pickled_parameters() -> None:
    script = "import pickle, sys; pickle.dump(pickle.load(sys.stdin.buffer), sys.stdout.buffer)"
    ended = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(PARAMS), capture_output=True, check=True)
    assert pickle.loads(ended.stdout) == PARAMS


def test_errors_that_users_see_can_be_pickled() -> None:
    for error in (ToolError("tools[1]", "is no object"), RequestError("it is too long", 2, code="x")):
        same = pickle.loads(pickle.dumps(error))
        assert (str(same), vars(same)) == (str(error), vars(error))
    assert str(ToolError("tools[1]", "is no object")) == "tools[1] is no object"


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["x"], output_kind="delta")  # type: ignore[call-arg]
    clone = params.clone()
    assert (type(clone), clone) == (SamplingParams, params)
    assert params.stop is not None
    params.stop.append("y")
    assert clone.stop == ["x"]
    assert PoolingParams(dimensions=8).clone() == PoolingParams(dimensions=8)


def test_none_stands_for_a_default() -> None:
    nothing = dict.fromkeys(
        ["n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias", "output_kind"]
    )
    assert SamplingParams.from_optional(**nothing) == SamplingParams()
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    made = SamplingParams.from_optional(logit_bias={"5": 400.0, 6: -1.0}, temperature=0.5, output_kind="final_only")
    assert made.logit_bias == {5: 100.0, 6: -1.0}
    assert made.temperature == 0.5
    assert made.output_kind == RequestOutputKind.FINAL_ONLY  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="logit_bias has 'x'; its keys are token ids"):
        SamplingParams.from_optional(logit_bias={"x": 1.0})
    with pytest.raises(TypeError, match="temperatur"):
        SamplingParams.from_optional(temperatur=1.0)
