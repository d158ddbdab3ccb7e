"""The endpoints of the API of llama.cpp's server, with the types that `/openapi.json` describes."""

from __future__ import annotations

from starlette.routing import Route

from quire.frontend.http.dialects.llama_cpp.body import (
    ApplyTemplateBody,
    InfillBody,
    LlamaCompletionBody,
    LlamaEmbeddingBody,
    ModelNameBody,
)
from quire.frontend.http.dialects.llama_cpp.endpoint import LlamaEmbedding, LlamaEndpoints, RenderedConversation
from quire.frontend.http.dialects.llama_cpp.models import LlamaServerEndpoints, LoraAdapter, Success
from quire.frontend.http.dialects.llama_cpp.state import ServerProperties, Slot, StateEndpoints
from quire.frontend.http.dialects.llama_cpp.writer import Completion
from quire.frontend.http.documentation.operation import AnswerTypes, ModelOperation, Operation
from quire.frontend.http.models.served_models import ServedModels


def llama_cpp_routes(models: ServedModels) -> list[Route]:
    """Return the routes of llama.cpp's API."""
    server = LlamaServerEndpoints(models)
    prompt = {"prompt": "Once upon a time", "n_predict": 60}
    return [
        *(
            ModelOperation(
                models,
                path,
                LlamaEndpoints,
                LlamaEndpoints.completion,
                AnswerTypes(Completion | list[Completion], events=[Completion]),
                body=LlamaCompletionBody,
                generates=True,
                example=prompt,
            )
            for path in ("/completion", "/completions")
        ),
        ModelOperation(
            models,
            "/infill",
            LlamaEndpoints,
            LlamaEndpoints.infill,
            AnswerTypes(Completion | list[Completion], events=[Completion]),
            body=InfillBody,
            generates=True,
            example={"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n", "n_predict": 60},
        ),
        *(
            ModelOperation(
                models,
                path,
                LlamaEndpoints,
                LlamaEndpoints.embedding,
                AnswerTypes(list[LlamaEmbedding]),
                body=LlamaEmbeddingBody,
                generates=True,
                example={"content": "Once upon a time"},
            )
            for path in ("/embedding", "/embeddings")
        ),
        ModelOperation(
            models,
            "/apply-template",
            LlamaEndpoints,
            LlamaEndpoints.apply_template,
            AnswerTypes(RenderedConversation),
            body=ApplyTemplateBody,
            example={"messages": [{"role": "user", "content": "Tell me a tale."}]},
        ),
        Operation("/props", server.props, AnswerTypes(ServerProperties, errors=[404, 503])),
        Operation("/lora-adapters", server.adapters, AnswerTypes(list[LoraAdapter])),
        ModelOperation(
            models, "/slots", StateEndpoints, StateEndpoints.slots, AnswerTypes(list[Slot], errors=[404, 503])
        ),
        Route("/slots/{id}", server.unsaved, methods=["POST"], include_in_schema=False),
        Operation("/models/load", server.load, AnswerTypes(Success, errors=[403]), body=ModelNameBody),
        Operation("/models/unload", server.unload, AnswerTypes(Success, errors=[403]), body=ModelNameBody),
    ]
