"""Implementations of `Decoding`, one for each kind of request, and the choice among them.

Parallel samples are single sequences until a second request shares the prompt (`share_prompt`).
"""

from __future__ import annotations

from quire.engine_core.decoding.beam_search import BeamSearch
from quire.engine_core.decoding.pooling import Pooling
from quire.engine_core.decoding.single import SingleSequence
from quire.engine_core.request import Decoding
from quire.protocol.messages import EngineCoreRequest


def decoding_type(message: EngineCoreRequest) -> type[Decoding]:
    """Return the kind of decoding that a message asks for."""
    if message.pooling is not None:
        return Pooling
    return BeamSearch if message.sampling_params.beam_width else SingleSequence
