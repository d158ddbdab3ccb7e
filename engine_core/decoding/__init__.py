"""Implementations of `Decoding`, one for each kind of request, and the choice among them."""

from __future__ import annotations

from quire.engine_core.decoding.beam_search import BeamSearch
from quire.engine_core.decoding.pooling import Pooling
from quire.engine_core.decoding.single import SingleSequence
from quire.engine_core.request import Decoding
from quire.protocol.engine_shape import EngineShape
from quire.protocol.messages import EngineCoreRequest


def decoding_for(message: EngineCoreRequest, limits: EngineShape) -> Decoding:
    """Return the decoding that a message asks for."""
    if message.pooling is not None:
        return Pooling(message.pooling, limits)
    if message.sampling_params.beam_width:
        return BeamSearch(message.sampling_params.beam_width, limits)
    return SingleSequence(limits)
