"""A `top_p` of 0 takes the likeliest token, in every API; so does one that is too small to have a meaning."""

from __future__ import annotations

from typing import Any

import pytest
from http_server import Server

MESSAGES = [{"role": "user", "content": "Tell me a tale."}]
APIS: dict[str, tuple[dict[str, Any], str]] = {  # path -> body, and the place of the sampling parameters in it
    "/v1/completions": ({"prompt": "Once upon", "max_tokens": 20}, ""),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 20}, ""),
    "/v1/responses": ({"input": "Tell me a tale.", "max_output_tokens": 20}, ""),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 20}, ""),
    "/completion": ({"prompt": "Once upon", "n_predict": 20}, ""),
    "/api/generate": ({"prompt": "Once upon", "stream": False, "options": {"num_predict": 20}}, "options"),
    "/api/chat": ({"messages": MESSAGES, "stream": False, "options": {"num_predict": 20}}, "options"),
}


def text_of(path: str, answer: Any) -> str:
    """Return the text of an answer."""
    match path:
        case "/v1/completions":
            text = answer["choices"][0]["text"]
        case "/v1/chat/completions":
            text = answer["choices"][0]["message"]["content"]
        case "/v1/responses":
            text = answer["output"][0]["content"][0]["text"]
        case "/v1/messages":
            text = answer["content"][0]["text"]
        case "/completion":
            text = answer["content"]
        case "/api/generate":
            text = answer["response"]
        case _:
            text = answer["message"]["content"]
    assert text
    return str(text)


def ask(server: Server, path: str, **sampling: Any) -> str:
    body, place = APIS[path]
    given = {**body, **sampling} if not place else {**body, place: {**body[place], **sampling}}
    reply = server.request(path, given)
    assert reply.status == 200, reply.body
    return text_of(path, reply.json())


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("top_p", [0, 0.0, 1e-60])
def test_a_top_p_of_0_is_greedy(server: Server, path: str, top_p: float) -> None:
    greedy = ask(server, path, temperature=0)
    assert ask(server, path, temperature=1, top_p=top_p) == greedy
