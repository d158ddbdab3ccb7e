"""Tools on the demo model, whose chat template shows none, in every API that has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from anthropic import Anthropic
from http_server import Server
from ollama import Client
from openai import BadRequestError, OpenAI

from quire.frontend.text.chat.generic_tools import HEADING

CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "look", "description": "Looks at a city.", "parameters": CITY}
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
SEVEN: Any = {"const": 7}
"""The only content that is allowed: the demo model likes a call better."""

Answer = tuple[str, list[tuple[str, Any]]]  # text, and calls as names and arguments
Api = Callable[..., Answer]


class Apis:
    """Asks about the weather in each API, and returns the answer's text and calls."""

    def __init__(self, server: Server, stack: ExitStack) -> None:
        self._openai = stack.enter_context(OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0))
        self._anthropic = stack.enter_context(Anthropic(base_url=server.url, api_key="none", max_retries=0))
        self._ollama = Client(host=server.url)

    def chat(self, choice: Any, form: Any, stream: bool) -> Answer:
        named = {"type": "function", "function": {"name": "look"}} if choice == "look" else choice
        body: Any = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": named, "messages": ASK}
        if form is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": form}}
        body |= {"model": "quire-demo", "temperature": 0, "max_tokens": 60}
        if not stream:
            message = self._openai.chat.completions.create(**body).choices[0].message
            calls = [call for call in message.tool_calls or [] if call.type == "function"]
            return message.content or "", [(call.function.name, call.function.arguments) for call in calls]
        text, found = "", list[list[str]]()
        for chunk in self._openai.chat.completions.create(**body, stream=True):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            for call in delta.tool_calls or []:
                assert call.function is not None
                if call.id:
                    found.append([call.function.name or "", ""])
                found[call.index][1] += call.function.arguments or ""
        return text, [(name, arguments) for name, arguments in found]

    def responses(self, choice: Any, form: Any, stream: bool) -> Answer:
        named = {"type": "function", "name": "look"} if choice == "look" else choice
        body: Any = {"tools": [{"type": "function", "strict": False, **FUNCTION}], "tool_choice": named, "input": ASK}
        if form is not None:
            body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": form}}
        body |= {"model": "quire-demo", "temperature": 0, "max_output_tokens": 60}
        if stream:
            *_, last = self._openai.responses.create(**body, stream=True)
            answer = last.response
        else:
            answer = self._openai.responses.create(**body)
        calls = [(item.name, item.arguments) for item in answer.output if item.type == "function_call"]
        return answer.output_text, calls

    def messages(self, choice: Any, form: Any, stream: bool) -> Answer:
        named = {"look": {"type": "tool", "name": "look"}, "required": {"type": "any"}}.get(choice, {"type": choice})
        tool = {"name": "look", "description": FUNCTION["description"], "input_schema": CITY}
        body: Any = {"tools": [tool], "tool_choice": named, "messages": ASK, "model": "quire-demo", "max_tokens": 60}
        body["extra_body"] = {"temperature": 0}
        if form is not None:
            body["extra_body"]["output_config"] = {"format": {"type": "json_schema", "schema": form}}
        if stream:
            with self._anthropic.messages.stream(**body) as events:
                answer = events.get_final_message()
        else:
            answer = self._anthropic.messages.create(**body)
        text = "".join(block.text for block in answer.content if block.type == "text")
        return text, [(block.name, block.input) for block in answer.content if block.type == "tool_use"]

    def ollama(self, choice: Any, form: Any, stream: bool) -> Answer:
        if choice != "auto":
            pytest.skip("Ollama's API has no tool_choice")
        body: Any = {"model": "quire-demo", "messages": ASK, "options": {"temperature": 0, "num_predict": 60}}
        body |= {"tools": [{"type": "function", "function": FUNCTION}], "format": form}
        parts = list(self._ollama.chat(**body, stream=True)) if stream else [self._ollama.chat(**body)]
        calls = [call.function for part in parts for call in part.message.tool_calls or []]
        return "".join(part.message.content or "" for part in parts), [
            (call.name, dict(call.arguments)) for call in calls
        ]


@pytest.fixture(scope="module")
def apis(server: Server) -> Iterator[Apis]:
    with ExitStack() as stack:
        yield Apis(server, stack)


@pytest.fixture(params=["chat", "responses", "messages", "ollama"])
def api(apis: Apis, request: pytest.FixtureRequest) -> Api:
    asked: Api = getattr(apis, request.param)
    return asked


def is_look(name: str, arguments: Any) -> bool:
    cities = ("Rome", "Oslo")
    return name == "look" and arguments in [
        *({"city": city} for city in cities),
        *(f'{{"city": "{c}"}}' for c in cities),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_may_answer_in_words(api: Api, stream: bool) -> None:
    text, calls = api("auto", None, stream)
    assert (text.strip() != "", calls) == (True, [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", "look"])
def test_the_model_may_call(api: Api, choice: str, stream: bool) -> None:
    text, calls = api(choice, SEVEN, stream)
    assert text == ""
    assert calls
    assert all(is_look(*call) for call in calls)


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_may_be_kept_from_calling(api: Api, stream: bool) -> None:
    assert api("none", SEVEN, stream) == ("7", [])


def test_tools_are_in_the_prompt_and_so_are_calls_and_results(server: Server) -> None:
    tool = {"type": "function", "function": FUNCTION}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"city": "Rome"}'}}
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Rain"},
    ]

    def prompt(messages: Any, **more: Any) -> str:
        tokens = server.request("/tokenize", {"messages": messages, **more}).json()["tokens"]
        return str(server.request("/detokenize", {"tokens": tokens}).json()["prompt"])

    plain, told = prompt(ASK), prompt(ASK, tools=[tool])
    assert "Looks at a city." in told
    assert "<tool_call>" in told
    assert told.endswith(plain.removeprefix("<|bos|>")[-40:])
    later = prompt(turns, tools=[tool])
    assert later.startswith(told)
    assert '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>' in later
    assert "Result of look: Rain" in later


def test_without_a_parser_tools_can_only_be_forced() -> None:
    tool: Any = {"type": "function", "function": FUNCTION}
    with (
        Server.start("--tool-call-parser", "none") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        body: Any = {"model": "quire-demo", "messages": ASK, "tools": [tool], "max_tokens": 60}
        body["parallel_tool_calls"] = False
        for stream in (False, True):
            with pytest.raises(BadRequestError, match="--tool-call-parser of the server") as caught:
                client.chat.completions.create(**body, stream=stream)
            assert caught.value.param == "tool_choice"
        asked = {"messages": ASK, "tools": [{"name": "look", "input_schema": CITY}], "max_tokens": 60}
        refused = server.request("/v1/messages", asked)
        assert refused.status == 400
        assert "set it to 'any', to 'tool' or to 'none'" in refused.json()["error"]["message"]
        [call] = client.chat.completions.create(**body, tool_choice="required").choices[0].message.tool_calls or []
        assert call.type == "function"
        assert is_look(call.function.name, call.function.arguments)


def test_a_template_of_the_request_describes_the_tools_itself() -> None:
    """Its block of tools is written, and where it shows a format of calls that is known, that format is read."""
    start, end = "[{{ messages[0].content }}]", "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    hermes = '{# <tool_call> {"name": x, "arguments": y} #}'
    with Server.start("--trust-request-chat-template") as server:

        def prompt(template: str) -> str:
            body = {"messages": ASK, "chat_template": template, "tools": [{"type": "function", "function": FUNCTION}]}
            tokens = server.request("/tokenize", body).json()["tokens"]
            return str(server.request("/detokenize", {"tokens": tokens}).json()["prompt"])

        text = ASK[0]["content"]
        for template in (start + end, start + end + hermes):
            assert prompt(template) == f"[{text}]<look>"
            body = {"messages": ASK, "chat_template": template, "temperature": 0, "max_tokens": 60}
            body |= {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
            body |= {"parallel_tool_calls": False}
            [choice] = server.request("/v1/chat/completions", body).json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["tool_calls"][0]["function"]["name"] == "look"
        assert HEADING in prompt(start)
