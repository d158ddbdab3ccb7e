"""A draft model follows its target, also where that stands still."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine_core.decoding.single import SingleSequence
from quire.engine_core.request import Request
from quire.engine_core.speculation.draft_model import DraftModel
from quire.kernels.options import LoadOptions
from quire.kernels.runner import load_model
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreRequest, SamplingParams


@pytest.mark.parametrize("name", ["llama-tied-llama3", "qwen3.5-tied"])
@pytest.mark.parametrize("most", [1, 4])
def test_what_was_drafted_is_drafted_again_if_the_target_has_sampled_nothing(
    name: str, most: int, checkpoints: Path
) -> None:
    """As where a grammar's mask comes late. The state of a draft model goes back then."""
    options = LoadOptions(str(checkpoints / name), num_pages=64, threads=1)
    target, draft = load_model(options), load_model(options)
    model = DraftModel(
        draft, target.sequences, max_model_len=draft.max_model_len, max_num_batched_tokens=draft.max_num_batched_tokens
    )
    limits = EngineShape(target.vocab_size, 1000, 8, 64, block_size=target.block_size, num_pages=64)
    message = EngineCoreRequest("a", [*range(5, 75)], SamplingParams(temperature=0.0))
    request = Request.from_message(
        b"client", message, decoding := SingleSequence(message, limits), seed=0, now=0.0, limits=limits,
        sequences=target.sequences,
    )  # fmt: skip
    request.slot = decoding.open(request)
    target.sequences.start(request.slot, request.num_tokens)
    target.sequences.append(request.slot, 9)
    request.num_tokens += 1
    drafts = []
    for _ in range(3):
        catching_up = range(100)  # computes some tokens a step
        assert any(model.propose([request], [most], 0.0) == [most] for _ in catching_up)
        drafts.append(target.sequences.tail(request.slot, request.num_tokens))
        target.sequences.truncate(request.slot, request.num_tokens, recompute_last=False)
    assert drafts[0] == drafts[1] == drafts[2]
    assert len(drafts[0]) == most
    model.end(request)
    assert draft.sequences.held_pages == 0
