"""Parts of contents reach the model whichever form its chat template takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from demo_copies import model_with_template
from http_server import Server

from quire.frontend import LLM, RequestError

PARTS = "{% for m in messages %}{% for p in m['content'] %}<{{ p['text'] }}>{% endfor %}{% endfor %}"
MESSAGES: Any = [
    {"role": "user", "content": [{"type": "text", "text": "Once upon"}, {"type": "text", "text": "a time"}]},
    {"role": "assistant", "content": "there was"},
]
OTHER_APIS: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/messages", "messages", {"max_tokens": 1}),
    ("/v1/messages/count_tokens", "messages", {}),
    ("/v1/responses", "input", {"max_output_tokens": 1}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose template reads lists of parts only."""
    return model_with_template(tmp_path_factory.mktemp("parts") / "model", PARTS)


def prompt_of(server: Server, **fields: Any) -> str:
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True, **fields}
    token_ids = server.request("/v1/chat/completions", body).json()["prompt_token_ids"]
    return str(server.request("/detokenize", {"tokens": token_ids}).json()["prompt"])


def num_prompt_tokens(server: Server, path: str, body: dict[str, Any]) -> int:
    answer = server.request(path, body).json()
    return int(answer.get("usage", answer)["input_tokens"])


def num_tokens(server: Server, text: str) -> int:
    return int(server.request("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["count"])


def test_a_template_for_parts_loses_no_text(model: Path) -> None:
    with Server.start(str(model)) as server:
        expected = "<Once upon><a time><there was>"
        for form in (None, "auto", "openai"):
            assert prompt_of(server, chat_template_content_format=form) == expected
        assert "Once" not in prompt_of(server, chat_template_content_format="string")
        assert server.request("/apply-template", {"messages": MESSAGES[:1]}).json()["prompt"] == "<Once upon><a time>"
        for path, field, others in OTHER_APIS:
            kind = "input_text" if field == "input" else "text"
            parts = [{"type": kind, "text": part["text"]} for part in MESSAGES[0]["content"]]
            body = {field: [{"role": "user", "content": parts}], **others}
            assert num_prompt_tokens(server, path, body) == num_tokens(server, "<Once upon><a time>"), path
        wrong = server.request("/v1/chat/completions", {"messages": MESSAGES, "chat_template_content_format": "list"})
        assert wrong.error["param"] == "chat_template_content_format"
        assert "it can be auto, string, openai" in wrong.error["message"]
        variable = {"messages": MESSAGES, "chat_template_kwargs": {"content_format": "string"}}
        assert server.request("/v1/chat/completions", variable).status == 400


@pytest.mark.parametrize(
    ("form", "expected"),
    [("string", "<>" * len("Once upon\na time" + "there was")), ("openai", "<Once upon><a time><there was>")],
)
def test_the_server_takes_the_format_for_all_requests(model: Path, form: str, expected: str) -> None:
    """A loop over a text goes over its characters, which have no text."""
    with Server.start(str(model), "--chat-template-content-format", form) as server:
        assert prompt_of(server) == expected
        assert prompt_of(server, chat_template_content_format="auto") == "<Once upon><a time><there was>"


def test_the_library_takes_the_format_too(model: Path) -> None:
    with LLM(str(model)) as llm:
        assert llm.chat(MESSAGES, chat_template_content_format="auto")[0].prompt == "<Once upon><a time><there was>"
        with pytest.raises(RequestError, match="it can be auto, string, openai"):
            llm.chat(MESSAGES, chat_template_content_format="list")  # type: ignore[arg-type]
