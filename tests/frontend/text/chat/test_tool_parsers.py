from __future__ import annotations

import json
from typing import Any

import pytest
from chat_answers import FRAGMENTS, calls, json_texts, numbered_ids, pieces, read
from chat_templates import (
    APERTUS,
    COHERE,
    DEEPSEEK,
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GLM4,
    GLM45,
    GRANITE,
    HUNYUAN_A13B,
    LFM2,
    LFM25,
    LLAMA,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_LIST,
    NEMOTRON_NANO_V2,
    OLMO3,
    PHI4_MINI,
    PLAIN,
    QWEN,
    QWEN3_CODER,
    QWEN_THINKING,
    SEED_OSS,
    SMOLLM3,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.text.chat.assistant import AssistantMessage, AssistantParser, ToolCall
from quire.frontend.text.chat.events import ContentDelta, ToolCallArguments, ToolCallStart
from quire.frontend.text.chat.list_parsers import HunyuanA13BParser
from quire.frontend.text.chat.tool_parsers import TOOL_PARSERS, detect_parser

# These write names outside of JSON.
OTHERS = {
    *("apertus", "deepseek_v3", "deepseek_v31", "gemma4", "glm4", "glm45", "lfm2", "minimax_m2", "olmo3"),
    *("qwen3_coder", "seed_oss"),
}
FORMATS = sorted(TOOL_PARSERS.keys() - OTHERS)
ASSISTANT = HunyuanA13BParser.lead
MARKS = [
    *("<|tools_prefix|>", "<|tools_suffix|>", '[{"f": {', "<|tool_call_start|>", "[f(", "<|tool_call_end|>"),
    *("<|tool_call>", "call:f{", "a:", '<|"|>', "<tool_call|>", "<TOOLCALL>[", "</TOOLCALL>", "<tool_calls>["),
]
garbage = st.lists(st.sampled_from([*FRAGMENTS, *MARKS]) | st.text(max_size=4), max_size=12).map("".join)
words = st.text(st.characters(exclude_characters="<{[ \n\t\r", exclude_categories=["Z", "C"]), min_size=1)


def parser(name: str, names: set[str] | None = None) -> AssistantParser:
    return AssistantParser(TOOL_PARSERS[name](names, numbered_ids()))


def message(name: str, text: str, names: set[str] | None = None) -> AssistantMessage:
    whole, _ = read(parser(name, names), [text])
    by_char, _ = read(parser(name, names), text)
    assert by_char == whole
    return whole


def written(name: str, objects: list[str], gap: str) -> str:
    """Return the answer of a model that makes these calls."""
    if name in ("hermes", "generic"):
        return gap.join(f"<tool_call>{gap}{call}{gap}</tool_call>" for call in objects) + gap
    if name == "llama3_json":
        return gap + f"{gap};{gap}".join(objects)
    tags = {
        "granite": "<|tool_call|>",
        "phi4_mini_json": "functools",
        "cohere2": "<|START_ACTION|>",
        "mistral": "[TOOL_CALLS]",
        "nemotron_json": "<TOOLCALL>",
        "hunyuan_a13b": "<tool_calls>",
    }
    ends = {"cohere2": "<|END_ACTION|>", "nemotron_json": "</TOOLCALL>", "hunyuan_a13b": "</tool_calls>"}
    if name in tags:
        return f"{tags[name]}{gap}[{gap}" + f"{gap},{gap}".join(objects) + f"{gap}]{gap}{ends.get(name, '')}{gap}"
    return f"{gap}[{gap}" + f"{gap},{gap}".join(objects) + f"{gap}]{gap}"


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50)
@given(data=st.data(), made=st.lists(calls, min_size=1, max_size=3), gap=st.sampled_from(["", " ", "\n", " \n  "]))
def test_calls_are_parsed(name: str, data: st.DataObject, made: list[tuple[str, dict[str, Any]]], gap: str) -> None:
    texts = [data.draw(json_texts(arguments)) for _, arguments in made]
    key = "parameters" if name == "llama3_json" else "arguments"
    members = [
        (f'"name":{gap}{json.dumps(call)}', f'"{key}":{gap}{text}') for (call, _), text in zip(made, texts, strict=True)
    ]
    objects = ["{" + ", ".join(data.draw(st.permutations(pair))) + "}" for pair in members]
    answer = written(name, objects, gap)
    found, _ = read(parser(name), data.draw(pieces(answer)))
    expected = [ToolCall(f"call_{i}", call, text) for i, ((call, _), text) in enumerate(zip(made, texts, strict=True))]
    assert found == AssistantMessage(None, None, tuple(expected))
    assert [json.loads(call.arguments) for call in found.tool_calls] == [arguments for _, arguments in made]


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS.keys() - {"glm4"}))
@settings(max_examples=50)
@given(data=st.data(), text=garbage)
def test_the_result_does_not_depend_on_the_pieces(name: str, data: st.DataObject, text: str) -> None:
    whole, _ = read(parser(name), [text])
    cut, _ = read(parser(name), data.draw(pieces(text)))
    assert cut == whole
    if not whole.tool_calls and name != "generic":
        assert whole.content == text
    rest = iter(text)
    assert all(char in rest for char in whole.content or "")  # in this order


@settings(max_examples=50)
@given(data=st.data(), made=calls, gap=st.sampled_from(["", " ", "\n", " \n  "]))
def test_calls_by_line_are_parsed(data: st.DataObject, made: tuple[str, dict[str, Any]], gap: str) -> None:
    text = data.draw(json_texts(made[1]))
    found, _ = read(parser("glm4", {made[0]}), data.draw(pieces(f"{gap}{made[0]}\n{gap}{text}")))
    assert found == AssistantMessage(None, None, (ToolCall("call_0", made[0], text),))
    other, _ = read(parser("glm4", {"other name"}), data.draw(pieces(f"{gap}{made[0]}\n{gap}{text}")))
    assert other == AssistantMessage(f"{gap}{made[0]}\n{gap}{text}")


@settings(max_examples=50)
@given(data=st.data(), text=st.lists(st.sampled_from(["f", "\n", "{", "}", " ", '"', "words", ":"])).map("".join))
def test_lines_do_not_depend_on_the_pieces(data: st.DataObject, text: str) -> None:
    whole, _ = read(parser("glm4", {"f"}), [text])
    cut, _ = read(parser("glm4", {"f"}), data.draw(pieces(text)))
    assert cut == whole
    if not whole.tool_calls:
        assert whole.content == text


@settings(max_examples=50)
@given(before=words, after=words, call=calls)
def test_text_around_marked_calls_is_content(before: str, after: str, call: tuple[str, dict[str, Any]]) -> None:
    made = json.dumps({"name": call[0], "arguments": call[1]})
    found = message("hermes", f"{before}\n<tool_call>\n{made}\n</tool_call>\n\n{after}")
    assert found.content == f"{before}\n\n{after}"
    assert json.loads(found.tool_calls[0].arguments) == call[1]


def test_arguments_stream_while_they_are_written() -> None:
    reader = TOOL_PARSERS["hermes"](new_id=numbered_ids())
    assert reader.feed('Let me see.\n<tool_call>\n{"name": "look", "argu') == [ContentDelta("Let me see.")]
    assert reader.feed('ments": {"at') == [ToolCallStart(0, "call_0", "look"), ToolCallArguments(0, '{"at')]
    assert reader.feed('": "\\ud83') == [ToolCallArguments(0, '": "\\ud83')]
    assert reader.feed("d\\ude42}") == [ToolCallArguments(0, "d\\ude42}")]
    assert reader.feed('"}') == [ToolCallArguments(0, '"}')]
    assert reader.feed("}\n</tool_call>\n") == []
    assert reader.finish() == []


def test_text_streams_while_no_call_can_begin() -> None:
    reader = TOOL_PARSERS["hermes"]()
    assert reader.feed("Hello ") == [ContentDelta("Hello")]
    assert reader.feed("there") == [ContentDelta(" there")]
    assert reader.feed(" <to") == []
    assert reader.feed("y>") == [ContentDelta(" <toy>")]


def test_an_answer_in_json_streams_although_calls_are_json() -> None:
    reader = TOOL_PARSERS["llama3_json"]({"f"})
    assert reader.feed('{"city":') == [ContentDelta('{"city":')]
    reader = TOOL_PARSERS["llama3_json"]({"f"})
    assert reader.feed('{"name": "Bob", "age"') == [ContentDelta('{"name": "Bob", "age"')]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("written_as", "arguments"),
    [
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ('" "', "{}"),
        ("null", "{}"),
        ('{"a": "x\ny"}', '{"a": "x\ny"}'),
        ('{"a": [{"b": "}"}], "c": "\\\\"}', '{"a": [{"b": "}"}], "c": "\\\\"}'),
    ],
)
def test_unusual_arguments(name: str, written_as: str, arguments: str) -> None:
    found = message(name, written(name, [f'{{"type": "function", "name": "f", "arguments": {written_as}}}'], ""))
    assert [call.arguments for call in found.tool_calls] == [arguments]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "call",
    [
        "",
        "[]",
        '"name"',
        "{}",
        '{"arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "words"}',
        '{"name": "f", "arguments": 5}',
        '{"name" "f", "arguments": {}}',
        '{name: "f", "arguments": {}}',
        '{"name": "f"',
        '{"name": "f", "argum',
        "words",
    ],
)
def test_text_that_is_not_a_call_is_content(name: str, call: str) -> None:
    text = written(name, [call], " ")
    cut_off = name == "generic" and "argum </" in text.replace('"', "")  # which is no text there
    assert message(name, text) == AssistantMessage("" if cut_off else text)


def test_a_bare_call_needs_arguments_and_a_known_name() -> None:
    for text in ('{"name": "f"}', '{"name": "g", "parameters": {}}', '{"name": "f", "age": 3, "parameters": {}}'):
        assert message("llama3_json", text, {"f"}) == AssistantMessage(text)
    assert message("llama3_json", '{"name": "f", "parameters": {}}', {"f"}).tool_calls
    more = message("llama3_json", '{"name": "f", "parameters": {"a": 1}, "why": {"b": "}"}}', {"f"})
    assert more == AssistantMessage(None, None, (ToolCall("call_0", "f", '{"a": 1}'),))
    assert message("hermes", '<tool_call>{"name": "g"}</tool_call>', {"f"}).tool_calls[0] == ToolCall(
        "call_0", "g", "{}"
    )


@pytest.mark.parametrize(
    ("name", "text", "content", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', None, ['{"a": "b']),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', None, ['{"a": 1}']),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', None, ['{"a": 1}']),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": <b>}}</tool_call> x',
            "<b>}}</tool_call> x",
            ['{"a": '],
        ),
        ("hermes", '<tool_call>{"name": "f"}}</tool_call>', "}</tool_call>", ["{}"]),
        ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "f"}', None, ["{}", "{}"]),
        ("hermes", 'a <tool_call> b <tool_call>{"name": "f"}</tool_call>', "a <tool_call> b", ["{}"]),
        ("llama3_json", '{"name": "f", "parameters": {}}; words', "; words", ["{}"]),
        ("llama3_json", '{"name": "f", "parameters": {}} words', " words", ["{}"]),
        ("llama3_json", 'words <|python_tag|>{"name": "f", "parameters": {}}', "words", ["{}"]),
        ("granite", 'x <tool_call>\n[{"name": "f"}, {"name": "f"}', "x", ["{}", "{}"]),
        ("granite", "the <|tool_call|> mark", "the <|tool_call|> mark", []),
        ("granite", "the <|tool_call|>", "the <|tool_call|>", []),
        ("granite", '<|tool_call|>[{"name": "f"}] more', " more", ["{}"]),
        ("phi4_mini_json", "import functools\n", "import functools\n", []),
        ("phi4_mini_json", "functools[0] functools", "functools[0] functools", []),
        ("phi4_mini_json", '<|tool_call|>[{"name": "f"}]<|/tool_call|>', None, ["{}"]),
        (
            "cohere2",
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]',
            None,
            ['{"a": 1}'],
        ),
        ("cohere2", '<|START_ACTION|>\n[{"tool_name": "f"}]<|END_ACTION|> more', " more", ["{}"]),
        ("cohere2", '<|START_ACTION|>[{"tool_name": "f"}]<|END', None, ["{}"]),
        ("glm4", '\nf\n{"a": "}"}\n', None, ['{"a": "}"}']),
        ("glm4", 'f\n{"a": 1', None, ['{"a": 1']),
        ("glm4", "f\n{} more", " more", ["{}"]),
        ("glm4", "f", "f", []),
        ("glm4", "f\n", "f\n", []),
        ("glm4", "f: {}", "f: {}", []),
        ("glm4", "f\nis a function {}", "f\nis a function {}", []),
        ("glm4", "Call it.\nf\n{}", "Call it.\nf\n{}", []),
        ("glm4", "", "", []),
        ("nemotron_json", 'x <TOOLCALL>[{"name": "f", "arguments": "{}"}]</TOOL', "x", ["{}"]),
        ("nemotron_json", '<TOOLCALL>{"name": "f"}</TOOLCALL>', '<TOOLCALL>{"name": "f"}</TOOLCALL>', []),
        ("hunyuan_a13b", '<tool_calls>[{"name": "f", "arguments": {"a": 1}}', None, ['{"a": 1}']),
        ("hunyuan_a13b", f"{ASSISTANT}Yes. {ASSISTANT}", f"Yes. {ASSISTANT}", []),
        ("hunyuan_a13b", f"\n{ASSISTANT}", "", []),
        ("hunyuan_a13b", ASSISTANT[:2], ASSISTANT[:2], []),
        ("hunyuan_a13b", f'{ASSISTANT}\n<tool_calls>[{{"name": "f"}}]</tool_calls>', None, ["{}"]),
        ("json_call", '[{"name": "f", "arguments": {}}, {"name"', ', {"name"', ["{}"]),
        ("json_call", '[{"name": "f", "arguments": {}}] more', " more", ["{}"]),
    ],
)
def test_calls_that_break_off(name: str, text: str, content: str | None, arguments: list[str]) -> None:
    found = message(name, text)
    assert (found.content, [call.arguments for call in found.tool_calls]) == (content, arguments)


def test_ids_have_the_form_of_openais() -> None:
    found, _ = read(AssistantParser(TOOL_PARSERS["hermes"]()), ['<tool_call>{"name": "f"}</tool_call>' * 2])
    first, second = (call.id for call in found.tool_calls)
    assert first != second
    assert len(first) == len("call_") + 24
    assert first.startswith("call_")
    assert first[5:].isalnum()


def test_the_format_is_detected_from_the_template() -> None:
    sources = [QWEN, QWEN_THINKING, LLAMA, DEEPSEEK, PLAIN, GRANITE, COHERE, PHI4_MINI, GLM4, GLM45]
    expected = ["hermes", "hermes", "llama3_json", None, None, "granite", "cohere2", "phi4_mini_json", "glm4", "glm45"]
    assert [detect_parser(source) for source in sources] == expected
    assert [detect_parser(source) for source in (SEED_OSS, MINIMAX_M2)] == ["seed_oss", "minimax_m2"]
    sources = [DEEPSEEK_V3, DEEPSEEK_R1, DEEPSEEK_V31, QWEN3_CODER, MISTRAL, MISTRAL_LIST, SMOLLM3, OLMO3]
    expected = ["deepseek_v3", "deepseek_v3", "deepseek_v31", "qwen3_coder", "mistral", "mistral", "hermes", "olmo3"]
    assert [detect_parser(source) for source in sources] == expected
    sources = [LFM2, LFM25, GEMMA4, APERTUS, NEMOTRON_NANO_V2, HUNYUAN_A13B]
    expected = ["lfm2", "lfm2", "gemma4", "apertus", "nemotron_json", "hunyuan_a13b"]
    assert [detect_parser(source) for source in sources] == expected


def test_a_list_in_tags_is_not_the_format_of_hermes() -> None:
    """The template of Apriel 1.5 names the tags of Hermes in its instruction, but shows a list in others."""
    apriel = HUNYUAN_A13B + "{# Return all function calls as a list of json objects within <tool_call></tool_call> #}"
    assert detect_parser(apriel) == "hunyuan_a13b"


def test_a_template_that_names_functools_has_no_tools() -> None:
    """That of Firefunction 2 takes functions, so the tools of a request would not reach the model."""
    calls = """functools[{"name": "f", "arguments": {}}]"""
    assert detect_parser(f"{{{{ functions }}}} {calls}") is None
    assert detect_parser(f"{{{{ tools }}}} {calls}") == "phi4_mini_json"


def test_a_template_that_does_not_show_tools_to_the_model_is_not_detected() -> None:
    """Those that DeepSeek publishes write calls, but leave it to the system prompt to describe tools."""
    assert detect_parser(DEEPSEEK_V31.replace("tools", "functions")) is None
