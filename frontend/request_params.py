"""The parameters of requests as users make them: those of the protocol, which also take vLLM's further fields.

What has been checked, and what is sent, are the protocol's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.frontend.outputs import RequestOutputKind
from quire.frontend.vllm.fields import (
    BEAM_SEARCH_FIELDS,
    POOLING_FIELDS,
    SAMPLING_FIELDS,
    STRUCTURED_FIELDS,
    with_vllm_fields,
)
from quire.protocol import messages

__all__ = ["BeamSearchParams", "PoolingParams", "SamplingParams", "StructuredOutputsParams", "output_kind_of"]

if TYPE_CHECKING:
    from quire.frontend.beam_search import BeamSearchParams
    from quire.protocol.messages import PoolingParams, SamplingParams
    from quire.protocol.messages import StructuredOutputs as StructuredOutputsParams
else:
    from quire.frontend import beam_search

    SamplingParams = with_vllm_fields(
        messages.SamplingParams, "SamplingParams", __name__, SAMPLING_FIELDS, output_kind=RequestOutputKind.CUMULATIVE
    )
    PoolingParams = with_vllm_fields(messages.PoolingParams, "PoolingParams", __name__, POOLING_FIELDS)
    StructuredOutputsParams = with_vllm_fields(
        messages.StructuredOutputs, "StructuredOutputsParams", __name__, STRUCTURED_FIELDS
    )
    BeamSearchParams = with_vllm_fields(beam_search.BeamSearchParams, "BeamSearchParams", __name__, BEAM_SEARCH_FIELDS)


def output_kind_of(params: object) -> RequestOutputKind:
    """Return what the outputs of a request with these parameters contain. Raises `ValueError` for an unknown kind."""
    return RequestOutputKind(getattr(params, "output_kind", RequestOutputKind.CUMULATIVE))
