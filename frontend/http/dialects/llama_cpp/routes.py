"""The endpoints of the API of llama.cpp's server, with the types that `/openapi.json` describes."""

from __future__ import annotations

from starlette.routing import Route

from quire.frontend.http.dialects.llama_cpp.body import (
    ApplyTemplateBody,
    InfillBody,
    LlamaCompletionBody,
    LlamaEmbeddingBody,
)
from quire.frontend.http.dialects.llama_cpp.endpoint import LlamaEmbedding, LlamaEndpoints, RenderedConversation
from quire.frontend.http.dialects.llama_cpp.state import Adapter, ServerProperties, Slot, StateEndpoints
from quire.frontend.http.dialects.llama_cpp.writer import Completion
from quire.frontend.http.documentation.operation import AnswerTypes, Operation
from quire.frontend.http.service import ModelService


def llama_cpp_routes(service: ModelService) -> list[Route]:
    """Return the routes of llama.cpp's API."""
    texts, state = LlamaEndpoints(service), StateEndpoints(service)
    prompt = {"prompt": "Once upon a time", "n_predict": 60}
    return [
        *(
            Operation(
                path,
                texts.completion,
                AnswerTypes(Completion | list[Completion], events=[Completion]),
                body=LlamaCompletionBody,
                generates=True,
                example=prompt,
            )
            for path in ("/completion", "/completions")
        ),
        Operation(
            "/infill",
            texts.infill,
            AnswerTypes(Completion | list[Completion], events=[Completion]),
            body=InfillBody,
            generates=True,
            example={"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n", "n_predict": 60},
        ),
        *(
            Operation(
                path,
                texts.embedding,
                AnswerTypes(list[LlamaEmbedding]),
                body=LlamaEmbeddingBody,
                generates=True,
                example={"content": "Once upon a time"},
            )
            for path in ("/embedding", "/embeddings")
        ),
        Operation(
            "/apply-template",
            texts.apply_template,
            AnswerTypes(RenderedConversation),
            body=ApplyTemplateBody,
            example={"messages": [{"role": "user", "content": "Tell me a tale."}]},
        ),
        Operation("/props", state.props, AnswerTypes(ServerProperties)),
        Operation("/lora-adapters", state.adapters, AnswerTypes(list[Adapter])),
        Operation("/slots", state.slots, AnswerTypes(list[Slot], errors=[503])),
        Route("/slots/{id}", state.unsaved, methods=["POST"], include_in_schema=False),
    ]
