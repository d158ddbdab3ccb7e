"""Contents of messages reach a chat template in the form that it takes: as texts, or as lists of parts."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import LLAMA, QWEN

from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.content_format import ContentFormat, detect_content_format
from quire.frontend.text.chat.template import ChatTemplate

STRING = "{% for m in messages %}[{{ m.role }}:{{ m['content'] }}]{% endfor %}"
PARTS = "{% for m in messages %}[{{ m.role }}:{% for p in m['content'] %}<{{ p['text'] }}>{% endfor %}]{% endfor %}"
GEMMA = """{%- for message in messages -%}
[{{ message['role'] }}:
{%- if message['content'] is string -%}
    {{ message['content'] | trim }}
{%- elif message['content'] is iterable -%}
    {%- for item in message['content'] -%}
        {%- if item['type'] == 'image' -%}<image>
        {%- elif item['type'] == 'text' -%}<{{ item['text'] | trim }}>{%- endif -%}
    {%- endfor -%}
{%- endif -%}]{%- endfor -%}"""
ALIAS = """{% for m in messages %}{% set c = m.content %}[{{ m.role }}:
{%- if c is not string %}{% for p in c %}<{{ p.text }}>{% endfor %}{% else %}{{ c }}{% endif %}]{% endfor %}"""
MACRO = """{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}
{%- for item in content %}<{{ item.text }}>{% endfor %}{% endif %}{% endmacro %}
{%- for m in messages %}[{{ m.role }}:{{ shown(m.content) }}]{% endfor %}"""


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


MESSAGES = [
    {"role": "system", "content": parts("x", "y")},
    {"role": "user", "content": parts("a", "b")},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": parts("d")},
]


def render(source: str, messages: Any = MESSAGES, **options: Any) -> str:
    return ChatTemplate(source).render(messages, **{"add_generation_prompt": False, **options})


@pytest.mark.parametrize(
    ("source", "form"),
    [
        (STRING, ContentFormat.STRING),
        (QWEN, ContentFormat.STRING),
        (LLAMA, ContentFormat.STRING),
        ("{% for chunk in m.content.split('x') %}{% endfor %}", ContentFormat.STRING),
        ("{% for c in m.content | list %}{% endfor %}", ContentFormat.STRING),
        ("{% for call in m.tool_calls %}{% endfor %}", ContentFormat.STRING),
        (PARTS, ContentFormat.LIST),
        (PARTS + "{% if call.arguments is string %}{% endif %}", ContentFormat.LIST),
        (GEMMA, ContentFormat.EITHER),
        (ALIAS, ContentFormat.EITHER),
        (MACRO, ContentFormat.EITHER),
    ],
)
def test_the_form_is_detected(source: str, form: ContentFormat) -> None:
    assert detect_content_format(source) is form


def test_a_template_for_texts_gets_parts_joined() -> None:
    assert render(STRING) == "[system:x\ny][user:a\nb][assistant:c][user:d]"


def test_a_template_for_parts_gets_texts_as_parts() -> None:
    assert render(PARTS) == "[system:<x><y>][user:<a><b>][assistant:<c>][user:<d>]"
    call = {"function": {"name": "f", "arguments": "{}"}}
    called = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert render(PARTS + "{# tool_calls #}", called).endswith("[assistant:]")


@pytest.mark.parametrize("source", [GEMMA, ALIAS, MACRO])
def test_a_template_for_both_gets_several_parts_as_a_list(source: str) -> None:
    assert render(source) == "[system:x\ny][user:<a><b>][assistant:c][user:d]"


def test_the_form_can_be_named() -> None:
    assert render(GEMMA, content_format="string") == "[system:x\ny][user:a\nb][assistant:c][user:d]"
    assert render(GEMMA, content_format="openai") == "[system:<x><y>][user:<a><b>][assistant:<c>][user:<d>]"
    assert "{'type': 'text', 'text': 'd'}" in render(STRING, content_format="openai")


@pytest.mark.parametrize(("source", "end"), [(STRING, "a\nb"), (PARTS, "<a><b"), (GEMMA, "<a><b"), (MACRO, "<a><b")])
def test_a_last_message_of_parts_can_be_continued(source: str, end: str) -> None:
    begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts("a", "b")}]
    assert render(source, begun, continue_final_message=True).endswith(f"[assistant:{end}")


def test_tools_are_described_in_parts_too() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    text = render(PARTS, tools=[tool], describe_tools=True)
    assert text.startswith("[system:<x\ny\n\nYou can call these functions.")
    assert '"look"' in text


def test_errors_name_the_part() -> None:
    with pytest.raises(ChatTemplateError, match=r"messages\[0\].content\[1\] is of type 'image_url'"):
        render(PARTS, [{"role": "user", "content": [*parts("a"), {"type": "image_url"}]}])
