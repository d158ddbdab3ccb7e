from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from reference_libraries import import_reference

from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.template import ChatTemplate
from quire.frontend.text.chat.template_files import find_template
from quire.frontend.text.tokenizer_files import TokenizerError

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
# The shape of Llama 3's and Qwen3's templates: namespaces, tojson, slices, macros, break, strftime, reverse iteration.
ELABORATE = """\
{{- bos_token }}
{%- macro tools_block(tools) %}
# Tools
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}
{%- endmacro %}
{%- set ns = namespace(last=none, count=0) %}
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content | trim, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and message.content is string %}
        {%- set ns.last = (messages | length - 1) - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{{- '[' ~ ns.last ~ '|' ~ strftime_now('%Y') | length ~ '|' ~ system ~ ']' }}
{%- if tools %}{{ tools_block(tools) }}{% endif %}
{%- for message in rest %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- set ns.count = ns.count + 1 %}
    {% generation %}{{ ns.count }}{{ message.role | upper }}: {{ content | replace('a', 'A') }}{% endgeneration %}
{%- endfor %}
"""
HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: Any = HELLO, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


@pytest.mark.parametrize("listed", [[False], [{"name": "a"}], [{"name": {}, "template": "b"}], 5])
def test_templates_of_wrong_types_are_rejected_with_the_field(tmp_path: Path, listed: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: .*chat_template"):
        find_template(tmp_path)


def test_a_template_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xca")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.jinja cannot be read"):
        find_template(tmp_path)


def test_a_conversation_becomes_a_prompt() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    assert render(CHATML, messages) == expected + "<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False) == expected


def test_features_used_by_well_known_templates() -> None:
    messages = [
        {"role": "system", "content": " Sys "},
        {"role": "user", "content": "cat"},
        {"role": "assistant", "content": "<think>hm</think>\n\ndada"},
    ]
    tools = [{"name": "é<b>", "n": 1}]
    assert render(ELABORATE, messages) == "<s>[1|4|Sys]1USER: cAt2ASSISTANT: dAdA"
    tool = json.dumps(tools[0], ensure_ascii=False, indent=4)
    assert render(ELABORATE, messages, tools=tools) == f"<s>[1|4|Sys]# Tools\n{tool}\n1USER: cAt2ASSISTANT: dAdA"


@pytest.mark.parametrize("source", [CHATML, ELABORATE])
def test_it_renders_as_transformers_does(source: str) -> None:
    chat_template_utils = import_reference("transformers.utils.chat_template_utils")
    messages = [*HELLO, {"role": "assistant", "content": "Hi <you> & 日本\n"}, {"role": "user", "content": "a  b"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "é"}}]
    (expected,), _ = chat_template_utils.render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert render(source, messages, tools=tools) == expected


def test_the_final_message_can_be_continued() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Once upon "}]
    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon ")
    with pytest.raises(ChatTemplateError, match="add_generation_prompt=False"):
        render(CHATML, messages, continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="does not write the last message unchanged"):
        render("nothing", messages, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("text", ["\n", " ", " \n\t"])
def test_white_space_can_be_continued(text: str) -> None:
    def continued(source: str) -> str:
        messages = [*HELLO, {"role": "assistant", "content": text}]
        return render(source, messages, add_generation_prompt=False, continue_final_message=True)

    assert continued(CHATML) == f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{text}"
    assert continued(CHATML.replace("['content']", "['content'] | trim")).endswith("<|im_start|>assistant\n")
    with pytest.raises(ChatTemplateError, match="does not write the last message unchanged"):
        continued("nothing")


def test_an_empty_last_answer_is_one_that_has_not_begun() -> None:
    def continued(*messages: dict[str, Any]) -> str:
        source = CHATML + "{# tool_calls #}"
        return render(source, list(messages), add_generation_prompt=False, continue_final_message=True)

    for empty in ({"content": ""}, {"content": None}):
        assert continued(*HELLO, {"role": "assistant", **empty}) == render(CHATML, HELLO)
    assert continued({"role": "assistant", "content": ""}) == "<|im_start|>assistant\n"
    assert continued({"role": "user", "content": ""}) == "<|im_start|>user\n"
    for more in ({"reasoning_content": "Hm"}, {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}):
        with pytest.raises(ChatTemplateError, match="thoughts or tool calls and no text"):
            continued(*HELLO, {"role": "assistant", "content": "", **more})


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in render(CHATML, [{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ("Hello", "messages is a str; give a list"),
        ({"role": "user", "content": "x"}, "messages is a dict"),
        ([], "messages is empty"),
        (["Hello"], r"messages\[0\] is a str"),
        ([{"content": "x"}], r"messages\[0\] has role=None"),
        ([*HELLO, {"role": 5, "content": "x"}], r"messages\[1\] has role=5"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is null"),
        ([{"role": "user", "content": "x", "images": ["x"]}], r"messages\[0\].images is not supported"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\] is of type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is of type 'str'"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], r"content\[0\].text is a int"),
    ],
)
def test_errors_name_the_malformed_message(messages: Any, what: str) -> None:
    with pytest.raises(ChatTemplateError, match=what):
        render(CHATML, messages)


def test_the_error_of_a_template_is_reported() -> None:
    with pytest.raises(ChatTemplateError, match="rejects the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="rejects the messages: 'nothing' is undefined"):
        render("{{ nothing.at.all }}")
    with pytest.raises(ChatTemplateError, match="fails with these messages: TypeError"):
        render("{{ messages + 5 }}")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{% if %}", "error in line 1"),
        ("\n{{ x | nofilter }}", "line 2.*nofilter"),
    ],
)
def test_a_broken_template_is_rejected_when_it_is_loaded(source: str, what: str) -> None:
    with pytest.raises(ChatTemplateError, match=what):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ (raise_exception | attr('__globals__')).keys() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ cycler['__init__']['__globals__'] }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
    ],
)
def test_a_hostile_template_cannot_escape(source: str) -> None:
    with contextlib.suppress(ChatTemplateError):
        assert not render(source).strip()


@pytest.mark.parametrize(
    "source", ["{% for i in range(10 ** 9) %}x{% endfor %}", "{{ strftime_now('%c' * 9999) }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_fails_is_an_error_of_the_conversation(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        render(source)


def test_a_long_conversation_passes() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 400} for i in range(1000)]
    text = render(ELABORATE, messages)
    assert text.count("USER") == 500
    one = [{"role": "user", "content": "abc " * 2_000_000}]
    assert len(render(CHATML, one)) > 8_000_000


def test_a_template_may_call_its_tools_xml_tools() -> None:
    template = ChatTemplate("{% if xml_tools %}{{ xml_tools | tojson }}{% endif %}{{ messages[0].content }}")
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages, tools=[{"name": "f"}]) == '[{"name": "f"}]x'
    assert template.render(messages) == "x"
    assert template.render(messages, tools=[{"name": "f"}], xml_tools=None) == "x"


@pytest.mark.parametrize(
    "content", ["message.content.split('</think>')[-1]", "'' if '</think>' in message.content else 1"]
)
def test_calls_without_content_have_an_empty_one_where_the_template_needs_it(content: str) -> None:
    """As the first templates of Qwen3 and QwQ do."""
    source = "{% for message in messages %}{{ " + content + " }}{{ message.tool_calls is defined }}{% endfor %}"
    made = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    calling = [*HELLO, {"role": "assistant", "content": None, "tool_calls": made}]
    assert render(source, calling).endswith("True")
    assert render("{{ messages[1].content is none and messages[1].tool_calls }}", calling).startswith("[{")
    with pytest.raises(ChatTemplateError, match="has no attribute"):
        render("{{ messages[0].none.of.these }}{{ messages[0].tool_calls }}", calling)
