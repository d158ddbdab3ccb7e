from __future__ import annotations

from typing import Any

import pytest
from chat_templates import APERTUS, DEEPSEEK, LFM2, LLAMA, PHI4_MINI_PUBLISHED, PLAIN, QWEN, SMOLLM3

from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.message_keys import ignored_keys
from quire.frontend.text.chat.messages import check_messages
from quire.frontend.text.chat.template import ChatTemplate

HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}


def call(arguments: Any = '{"city": "Rome", "n": [1, "é"]}', **fields: Any) -> dict[str, Any]:
    return {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": arguments}, **fields}


def calling(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "Sunny."}


def render(source: str, *messages: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(list(messages))


def test_calls_and_results_are_rendered_by_the_template() -> None:
    arguments = '{"city": "Rome", "n": [1, "é"]}'
    assert f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>' in render(
        QWEN, HELLO, calling(call())
    )
    assert f'{{"name": "look", "parameters": {arguments}}}<|eot_id|>' in render(LLAMA, HELLO, calling(call()))
    assert f"<call>look\n{arguments}\n</call>" in render(DEEPSEEK, HELLO, calling(call()))
    assert "<tool_response>\nSunny.\n</tool_response>" in render(QWEN, HELLO, calling(call()), RESULT)
    assert 'ipython<|end_header_id|>\n\n"Sunny."<|eot_id|>' in render(LLAMA, HELLO, calling(call()), RESULT)


def test_arguments_are_serialized_once_by_a_template_that_also_joins_those_of_its_own_form() -> None:
    assert '<|tools_prefix|>[{"look": {"city": "Rome"}}]' in render(APERTUS, HELLO, calling(call('{"city": "Rome"}')))


@pytest.mark.parametrize("source", [QWEN, LLAMA])
@pytest.mark.parametrize("given", ["", "{}", {}])
def test_a_call_without_arguments(source: str, given: Any) -> None:
    assert '": {}}' in render(source, HELLO, calling(call(given)))


def test_an_answer_can_be_sent_back_unchanged() -> None:
    nothing = dict.fromkeys(["refusal", "audio", "name", "function_call", "tool_calls", "reasoning_content"])
    answer: dict[str, Any] = {"role": "assistant", "content": "Hi", "annotations": [], **nothing}
    assert check_messages([HELLO, answer]) == [HELLO, {"role": "assistant", "content": "Hi"}]
    assert check_messages([{**answer, "tool_calls": []}]) == [{"role": "assistant", "content": "Hi"}]
    assert "Hi<|eot_id|>" in render(LLAMA, HELLO, {**answer, "tool_calls": []})
    assert check_messages([{**answer, "reasoning_content": "Hm"}])[0]["reasoning_content"] == "Hm"


def test_a_refusal_is_content() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert [check_messages([message])[0]["content"] for message in (refused, parts)] == ["No.", "No."]


def test_the_developer_becomes_the_system_role_if_the_template_has_no_developer() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, HELLO]
    assert "<|im_start|>system\nBe brief." in render(QWEN, *messages)
    knowing = "{% for m in messages %}{% if m.role == 'developer' %}D:{% endif %}{{ m.role }}{% endfor %}"
    assert render(knowing, *messages) == "D:developeruser"
    assert messages[0]["role"] == "developer"


def test_the_given_messages_are_not_changed() -> None:
    given = calling(call())
    check_messages([given])
    assert given == calling(call())


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "assistant"}, "messages[0].content is missing"),
        ({**HELLO, "content": None}, "messages[0].content is null"),
        ({**HELLO, "images": ["aGk="]}, "messages[0].images is not supported: only text is supported"),
        ({**HELLO, "prefix": True}, "messages[0].prefix is not supported: set continue_final_message=true"),
        ({"role": "assistant", "content": "", "reasoning": 5}, "messages[0].reasoning_content is a int"),
        (calling("f"), "messages[0].tool_calls[0] is not a function call"),
        (calling(call(), call(type="custom")), "messages[0].tool_calls[1] is not a function call; give {"),
        (calling({"function": {"arguments": "{}"}}), "messages[0].tool_calls[0].function.name is None"),
        (calling(call('{"a": ')), "messages[0].tool_calls[0].function.arguments is not JSON: "),
        (calling(call("[" * 100_000)), "messages[0].tool_calls[0].function.arguments is not JSON: "),
        (calling(call("[1]")), "messages[0].tool_calls[0].function.arguments holds a list; give a string"),
        (calling(call(5)), "messages[0].tool_calls[0].function.arguments is a int; give a string"),
        ({**calling(), "tool_calls": {"id": 1}}, "messages[0].tool_calls is a dict; give a list"),
        ({**HELLO, "tool_calls": [call()]}, "messages[0] has tool_calls with role='user'"),
        ({**HELLO, "name": 5}, "messages[0].name is a int"),
        ({**RESULT, "tool_call_id": 5}, "messages[0].tool_call_id is a int"),
        ({**RESULT, "role": "function"}, "messages[0] has role='function' of OpenAI's legacy API; give role='tool'"),
        ({**HELLO, "function_call": {"name": "f"}}, "messages[0].function_call belongs to OpenAI's legacy API"),
        ({**HELLO, "audio": {"id": "a"}}, "messages[0].audio is given, but only text is supported"),
        (
            {**HELLO, "content": [{"type": "image_url"}]},
            "content[0] is of type 'image_url', but this server does not support",
        ),
        (
            {**HELLO, "content": [{"type": "input_audio"}]},
            "of type 'input_audio', but this server does not support audio",
        ),
        ({**HELLO, "content": [{"type": "file"}]}, "of type 'file', but this server does not support files"),
        ({**HELLO, "content": [{"type": []}]}, "content[0] is of type []"),
        ({**HELLO, "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal is null"),
    ],
)
def test_errors_name_the_message_and_the_problem(message: Any, what: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        check_messages([message])
    assert what in str(caught.value)


@pytest.mark.parametrize("source", [QWEN, DEEPSEEK])
def test_invalid_arguments_are_rejected_with_every_template(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="arguments is not JSON"):
        render(source, HELLO, calling(call('{"a"')))


def test_a_template_can_reject_messages() -> None:
    with pytest.raises(ChatTemplateError, match="rejects the messages: only one tool call at once"):
        render(LLAMA, HELLO, calling(call(), call()))


def test_keys_of_other_servers_are_dropped_and_listed() -> None:
    foreign = {"reasoning_details": [{"text": "Hm"}], "thinking": "Hm", "images": [], "prefix": False, "id": None}
    assert check_messages([{**HELLO, **foreign}, HELLO]) == [HELLO, HELLO]
    assert ignored_keys([{**HELLO, **foreign}, HELLO]) == ["images", "prefix", "reasoning_details", "thinking"]


def test_results_have_the_order_of_their_calls() -> None:
    first, second = ({**call(), "id": name} for name in ("a", "b"))
    results = [{**RESULT, "tool_call_id": name} for name in ("b", "x", "a")]
    given = [HELLO, calling(first, second), *results, HELLO, results[0]]
    ids = [message.get("tool_call_id") for message in check_messages(given)]
    assert ids == [None, None, "a", "b", "x", None, "b"]
    without = [{"role": "tool", "content": text} for text in ("1", "2")]
    assert [message["content"] for message in check_messages([calling(first, second), *without])[1:]] == ["1", "2"]


def test_an_empty_answer() -> None:
    nothing = {"role": "assistant", "content": None}
    for message in (nothing, calling(), {**nothing, "provider_specific_fields": None, "thinking_blocks": None}):
        assert check_messages([message]) == [{"role": "assistant", "content": ""}]
    for key in ("reasoning_content", "reasoning"):
        assert check_messages([{**nothing, key: "Hm"}])[0] == {**nothing, "reasoning_content": "Hm", "content": ""}


def test_calls_and_results_are_text_if_the_template_has_no_tools() -> None:
    other = {**RESULT, "tool_call_id": "unknown", "content": "Mild."}
    text = '[{"name": "look", "arguments": {"city": "Rome", "n": [1, "é"]}}]'
    assert render(PLAIN, HELLO, calling(call()), RESULT, other, HELLO) == (
        f"user: Hello\nassistant: {text}\nuser: Result of look: Sunny.\nResult of the call: Mild.\n\nHello\nassistant: "
    )
    assert f"assistant: I look.\n{text}\n" in render(PLAIN, HELLO, calling(call(), content="I look."))


def test_calls_are_written_as_the_model_would_if_the_template_drops_them() -> None:
    said = calling(call("{}"), call("{}"), content="Well.")
    written = '{"name": "look", "arguments": {}}'
    hermes = f"<tool_call>\n{written}\n</tool_call>"
    assert f"Well.\n{hermes}\n{hermes}<|im_end|>" in render(SMOLLM3, HELLO, said, RESULT)
    assert "<|im_start|>user\nSunny.<|im_end|>" in render(SMOLLM3, HELLO, said, RESULT)
    phi = render(PHI4_MINI_PUBLISHED, HELLO, calling(call("{}")), RESULT)
    lfm2 = render(LFM2, HELLO, calling(call('{"city": "Rome", "now": true}'), call("{}")), RESULT)
    assert "assistant\n<|tool_call_start|>[look(city='Rome', now=True), look()]<|tool_call_end|><|im_end|>" in lfm2
    assert phi == f"<|user|>Hello<|end|><|assistant|>functools[{written}]<|end|><|tool|>Sunny.<|end|><|assistant|>"


def test_tools_are_where_the_template_looks_for_them() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    shown = '<|tool|>[{"name": "look", "parameters": {"type": "object"}}]<|/tool|><|end|><|user|>Hello'
    template = ChatTemplate(PHI4_MINI_PUBLISHED)
    assert template.render([HELLO], tools=tools).startswith(f"<|system|>{shown}")
    brief = {"role": "system", "content": "Be brief."}
    assert template.render([brief, HELLO], tools=tools).startswith(f"<|system|>Be brief.{shown}")
    assert template.render([brief, HELLO]).startswith("<|system|>Be brief.<|end|>")
    assert brief == {"role": "system", "content": "Be brief."}
