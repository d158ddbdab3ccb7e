"""The endpoints of Ollama's API, with the types that `/openapi.json` describes."""

from __future__ import annotations

from starlette.routing import Route

from quire.frontend.http.dialects.ollama.body import (
    GenerateBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    PullBody,
    ShowBody,
)
from quire.frontend.http.dialects.ollama.embeddings import EmbeddedText, EmbeddedTexts, EmbedEndpoints
from quire.frontend.http.dialects.ollama.errors import OllamaErrorResponse
from quire.frontend.http.dialects.ollama.models import (
    ListedModels,
    OllamaModelEndpoints,
    OllamaVersion,
    RunningModels,
    ShownModel,
    Status,
)
from quire.frontend.http.dialects.ollama.unloading import OllamaServerEndpoints
from quire.frontend.http.dialects.ollama.writer import ChatAnswer, GeneratedText
from quire.frontend.http.documentation.operation import AnswerTypes, ModelOperation, Operation
from quire.frontend.http.models.served_models import ServedModels


def ollama_routes(models: ServedModels) -> list[Route]:
    """Return the routes of Ollama's API."""
    answers = OllamaServerEndpoints(models)
    return [
        Operation(
            "/api/generate",
            answers.generate,
            AnswerTypes(GeneratedText, lines=[GeneratedText], error=OllamaErrorResponse),
            body=GenerateBody,
            generates=True,
            example={"prompt": "Tell me a tale.", "options": {"num_predict": 60}},
        ),
        Operation(
            "/api/chat",
            answers.chat,
            AnswerTypes(ChatAnswer, lines=[ChatAnswer], error=OllamaErrorResponse),
            body=OllamaChatBody,
            generates=True,
            example={"messages": [{"role": "user", "content": "Tell me a tale."}], "options": {"num_predict": 60}},
        ),
        ModelOperation(
            models,
            "/api/embed",
            EmbedEndpoints,
            EmbedEndpoints.embed,
            AnswerTypes(EmbeddedTexts, error=OllamaErrorResponse),
            body=OllamaEmbedBody,
            generates=True,
            example={"input": ["Once upon a time", "There was once a fox"]},
        ),
        ModelOperation(
            models,
            "/api/embeddings",
            EmbedEndpoints,
            EmbedEndpoints.embeddings,
            AnswerTypes(EmbeddedText, error=OllamaErrorResponse),
            body=OllamaEmbeddingsBody,
            generates=True,
            example={"prompt": "Once upon a time"},
        ),
        *_ollama_models(OllamaModelEndpoints(models)),
    ]


def _ollama_models(models: OllamaModelEndpoints) -> list[Route]:
    error = OllamaErrorResponse
    unmanaged = {"/api/copy": "POST", "/api/create": "POST", "/api/delete": "DELETE", "/api/push": "POST"}
    return [
        Operation("/api/tags", models.tags, AnswerTypes(ListedModels, error=error)),
        Operation("/api/ps", models.running, AnswerTypes(RunningModels, error=error)),
        Operation("/api/show", models.show, AnswerTypes(ShownModel, error=error), body=ShowBody, example={}),
        Operation("/api/version", models.version, AnswerTypes(OllamaVersion, error=error)),
        Operation(
            "/api/pull", models.pull, AnswerTypes(Status, lines=[Status], error=error), body=PullBody, example={}
        ),
        *(
            Route(path, models.unmanaged, methods=[method], include_in_schema=False)
            for path, method in unmanaged.items()
        ),
        Route("/api/blobs/{digest:path}", models.unmanaged, methods=["HEAD", "POST"], include_in_schema=False),
    ]
