"""Calls whose names are outside of JSON: DeepSeek's, Mistral's, those of Qwen3-Coder, OLMo 3 and Gemma 4."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_answers import calls, json_texts, numbered_ids, pieces, read, tricky, values
from chat_templates import (
    APERTUS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GLM45,
    HUNYUAN_A13B,
    LFM2,
    LFM25,
    MISTRAL,
    MISTRAL_LIST,
    NEMOTRON_NANO_V2,
    OLMO3,
    QWEN3_CODER,
    SEED_OSS,
    SMOLLM3,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.assistant import AssistantMessage, AssistantParser, ToolCall, parse_answer
from quire.frontend.text.chat.events import ContentDelta, ToolCallArguments, ToolCallStart
from quire.frontend.text.chat.template import ChatTemplate
from quire.frontend.text.chat.tool_parsers import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEP, TOOL_PARSERS
from quire.frontend.text.chat.tools import check_tools

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"},
                   "any": {"type": ["string", "null"]}, "b": {"type": "boolean"}},
}  # fmt: skip
V31 = f"{CALLS_BEGIN}{CALL_BEGIN}f{SEP}"
V3 = f"{CALLS_BEGIN}{CALL_BEGIN}function{SEP}f\n```json\n"


def parser(name: str) -> AssistantParser:
    return AssistantParser(TOOL_PARSERS[name](None, numbered_ids(), {"f": SCHEMA}))


def message(name: str, text: str) -> AssistantMessage:
    whole, _ = read(parser(name), [text])
    for end in range(len(text)):
        assert read(parser(name), [text[:end], text[end:]])[0] == whole
    assert read(parser(name), text)[0] == whole
    return whole


@pytest.mark.parametrize("name", ["apertus", "deepseek_v3", "deepseek_v31", "mistral", "with_ids"])
@settings(max_examples=50)
@given(data=st.data(), made=st.lists(calls, min_size=1, max_size=3), gap=st.sampled_from(["", " ", "\n", " \n  "]))
def test_named_calls(name: str, data: st.DataObject, made: list[tuple[str, dict[str, Any]]], gap: str) -> None:
    texts = [data.draw(json_texts(arguments)) for _, arguments in made]
    pairs = [(call, text) for (call, _), text in zip(made, texts, strict=True)]
    if name == "deepseek_v3":
        each = [f"{CALL_BEGIN}function{SEP}{call}\n```json{gap}{text}{gap}```{CALL_END}" for call, text in pairs]
    elif name == "deepseek_v31":
        each = [f"{CALL_BEGIN}{gap}{call}{gap}{SEP}{gap}{text}{gap}{CALL_END}" for call, text in pairs]
    elif name == "apertus":
        each = [f'{{{gap}"{call}"{gap}:{gap}{text}{gap}}}' for call, text in pairs]
    else:
        key = "[CALL_ID]a1b2c3d4e" if name == "with_ids" else ""
        each = [f"[TOOL_CALLS]{gap}{call}{key}[ARGS]{gap}{text}" for call, text in pairs]
    answer = (f"{gap},{gap}" if name == "apertus" else gap).join(each)
    answer = f"<|tools_prefix|>{gap}[{answer}]{gap}<|tools_suffix|>" if name == "apertus" else answer
    answer = f"{CALLS_BEGIN}{gap}{answer}{gap}{CALLS_END}" if name.startswith("deepseek") else answer
    found, _ = read(parser("mistral" if name == "with_ids" else name), data.draw(pieces(answer)))
    expected = tuple(ToolCall(f"call_{index}", *pair) for index, pair in enumerate(pairs))
    assert found == AssistantMessage(None, None, expected)


@settings(max_examples=100)
@given(data=st.data(), text=tricky | st.text(), n=st.integers(), inner=st.dictionaries(tricky, values, max_size=3))
def test_arguments_in_tags(data: st.DataObject, text: str, n: int, inner: dict[str, Any]) -> None:
    """A text may hold anything but the end of its tag; JSON may hold that too, within its strings."""
    text = text.replace("</parameter>", "")
    inner = {**inner, "<": "</parameter>"}
    answer = (
        f"Well.\n<tool_call>\n<function=f>\n<parameter=text>\n{text}\n</parameter>\n<parameter=n>\n{n}\n</parameter>\n"
        f"<parameter=o>\n{data.draw(json_texts(inner))}\n</parameter>\n</function>\n</tool_call>"
    )
    found, _ = read(parser("qwen3_coder"), data.draw(pieces(answer)))
    assert found.content == "Well."
    assert json.loads(found.tool_calls[0].arguments) == {"text": text, "n": n, "o": inner}


@settings(max_examples=100)
@given(
    data=st.data(),
    text=tricky,
    inner=st.dictionaries(tricky, values, max_size=3),
    style=st.sampled_from([repr, json.dumps]),
    name=st.sampled_from(["olmo3", "lfm2"]),
)
def test_keyword_arguments(data: st.DataObject, text: str, inner: dict[str, Any], style: Any, name: str) -> None:
    call = f"f(text={style(text)}, o={style(inner)}, b=true)"
    answers = {
        "olmo3": f"<function_calls>\n{call}\ng()\n</function_calls>",
        "lfm2": f"<|tool_call_start|>[{call}, g()]<|tool_call_end|>",
    }
    found, _ = read(parser(name), data.draw(pieces(answers[name])))
    assert [call.name for call in found.tool_calls] == ["f", "g"]
    assert json.loads(found.tool_calls[0].arguments) == {"text": text, "o": inner, "b": True}
    assert (found.content, found.tool_calls[1].arguments) == (None, "{}")


Q = '<|"|>'
keys = st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True) | tricky.map(lambda key: key.replace(Q, ""))


def gemma(value: Any, gap: str) -> str:
    """Return a value in Gemma 4's notation; a key that is no identifier is between marks."""
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, dict):
        items = [f"{key if key.isidentifier() else Q + key + Q}:{gap}{gemma(each, gap)}" for key, each in value.items()]
        return f"{{{gap}" + f",{gap}".join(items) + f"{gap}}}"
    return (
        f"[{gap}" + f",{gap}".join(gemma(each, gap) for each in value) + "]"
        if isinstance(value, list)
        else json.dumps(value)
    )


@settings(max_examples=200)
@given(
    data=st.data(),
    made=st.dictionaries(
        keys,
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | tricky,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
            max_leaves=8,
        ),
        max_size=4,
    ),
    gap=st.sampled_from(["", " ", "\n"]),
)
def test_arguments_in_the_notation_of_gemma4(data: st.DataObject, made: dict[str, Any], gap: str) -> None:
    calls = [f"<|tool_call>call:{name}{text}{gap}<tool_call|>" for name in "fg"
             for text in (gemma(made, gap), json.dumps(made))]  # fmt: skip
    found, _ = read(parser("gemma4"), data.draw(pieces("Well.\n" + gap.join(calls) + gap + "So.")))
    assert [call.name for call in found.tool_calls] == ["f", "f", "g", "g"]
    assert [json.loads(call.arguments) for call in found.tool_calls] == [made] * 4
    assert found.content == f"Well.{gap}So."


def test_a_key_of_gemma4_may_have_a_long_form_in_json() -> None:
    made = {"\x1f" * 250: 1}
    found, _ = read(parser("gemma4"), [f"<|tool_call>call:f{json.dumps(made)}<tool_call|>"])
    assert [json.loads(call.arguments) for call in found.tool_calls] == [made]


def test_a_text_of_gemma4_streams() -> None:
    reader = TOOL_PARSERS["gemma4"](None, numbered_ids())
    assert reader.feed("<|tool_call>call:f") == []
    assert reader.feed("{") == [ToolCallStart(0, "call_0", "f"), ToolCallArguments(0, "{")]
    assert reader.feed("text:") == [ToolCallArguments(0, '"text": ')]
    assert reader.feed('<|"|>a "b') == [ToolCallArguments(0, '"'), ToolCallArguments(0, 'a \\"b')]
    assert reader.feed("c\n<|") == [ToolCallArguments(0, "c\\n")]
    assert reader.feed('"|>') == [ToolCallArguments(0, '"')]
    assert reader.feed(",n:12") == [ToolCallArguments(0, ', "n": ')]
    assert reader.feed("3}<tool_call|> So") == [
        ToolCallArguments(0, "123"), ToolCallArguments(0, "}"), ContentDelta(" So")
    ]  # fmt: skip


def test_a_text_in_tags_streams() -> None:
    reader = TOOL_PARSERS["qwen3_coder"](None, numbered_ids(), {"f": SCHEMA})
    assert reader.feed("<tool_call>\n<function=f") == []
    assert reader.feed(">") == [ToolCallStart(0, "call_0", "f"), ToolCallArguments(0, "{")]
    events = reader.feed('\n<parameter=text>\na "b\n')
    assert "".join(event.delta for event in events if isinstance(event, ToolCallArguments)) == '"text": "a \\"b'
    assert reader.feed("c\n</par") == [ToolCallArguments(0, "\\nc")]
    assert reader.feed("ameter>") == [ToolCallArguments(0, '"')]
    assert reader.feed("</function>") == [ToolCallArguments(0, "}")]
    assert reader.feed("</tool_call> So") == [ContentDelta(" So")]


P = "<parameter"
A, V = "<arg_key>", "</arg_key>\n<arg_value>"


@settings(max_examples=100)
@given(data=st.data(), text=tricky | st.text(), n=st.integers(), gap=st.sampled_from(["", "\n"]))
@pytest.mark.parametrize("name", ["glm45", "seed_oss", "minimax_m2"])
def test_arguments_in_tags_of_other_families(name: str, data: st.DataObject, text: str, n: int, gap: str) -> None:
    close = "</arg_value>" if name == "glm45" else "</parameter>"
    text = text.replace(close, "").strip("\n")
    if name == "glm45":
        call = f"<tool_call>f{gap}{A}text</arg_key>{gap}<arg_value>{text}{close}{gap}{A}n</arg_key>{gap}<arg_value>{n}"
        answer = f"Well.\n{call}{close}{gap}</tool_call>{gap}<tool_call>f{gap}</tool_call>{gap}"
    elif name == "seed_oss":
        call = f"<function=f>{gap}<parameter=text>{text}{close}{gap}<parameter=n>{n}{close}{gap}</function>{gap}"
        more = f"{gap}<seed:tool_call>{gap}<function=f>{gap}</function>{gap}</seed:tool_call>"
        answer = f"Well.\n<seed:tool_call>{gap}{call}</seed:tool_call>{more}"
    else:
        values = f'<parameter name="text">{text}{close}{gap}<parameter name="n">{n}{close}{gap}'
        call = f'<invoke name="f">{gap}{values}</invoke>{gap}<invoke name="f">{gap}</invoke>{gap}'
        answer = f"Well.\n<minimax:tool_call>{gap}{call}</minimax:tool_call>"
    found, _ = read(parser(name), data.draw(pieces(answer)))
    assert found.content == "Well."
    assert [json.loads(call.arguments) for call in found.tool_calls] == [{"text": text, "n": n}, {}]


@pytest.mark.parametrize(
    ("name", "text", "content", "arguments"),
    [
        ("deepseek_v31", f'Hi.{V31}{{"a": 1}}{CALL_END}{CALLS_END} So', "Hi. So", ['{"a": 1}']),
        ("deepseek_v31", f'{V31}{{"a": 1', None, ['{"a": 1']),
        ("deepseek_v31", f"{V31}{{}}{CALL_END[:-3]}", None, ["{}"]),
        ("deepseek_v31", f"{V31}{{}} so", " so", ["{}"]),
        ("deepseek_v31", f"{V31}words", f"{V31}words", []),
        ("deepseek_v31", f"{CALLS_BEGIN}words", f"{CALLS_BEGIN}words", []),
        ("deepseek_v3", f'{V3}{{"a": "```"}}\n```{CALL_END}{CALLS_END}', None, ['{"a": "```"}']),
        ("deepseek_v3", f"{V3.replace('json', '')}{{}}\n```{CALL_END}{CALLS_END}", None, ["{}"]),
        ("deepseek_v3", f"{V3}{{}}{CALL_END}{CALLS_END}", None, ["{}"]),
        ("deepseek_v3", f"{V31}{{}}{CALL_END}{CALLS_END}", f"{V31}{{}}{CALL_END}{CALLS_END}", []),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', None, ['{"a": 1}']),
        ("mistral", "Hi.[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS] [{\"name\": \"f\"}]", "Hi.", ["{}", "{}"]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}, so]", ", so]", ["{}"]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc"}, {"name": "f"}]', None, ["{}", "{}"]),
        ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
        ("mistral", "[TOOL_CALLS] some words [ARGS]{}", "[TOOL_CALLS] some words [ARGS]{}", []),
        ("qwen3_coder", f"<function=f>\n{P}=n>\n5\n</parameter>\n</function>\n so", "\n so", ['{"n": 5}']),
        ("qwen3_coder", f"<tool_call>\n<function=f>\n{P}=n>5</parameter></tool_call>", None, ['{"n": 5}']),
        ("qwen3_coder", f"<function=f>{P}=b>True</parameter>{P}=any>null</parameter></function>", None,
         ['{"b": true, "any": null}']),
        ("qwen3_coder", f"<function=f>{P}=any>5</parameter>{P}=x>5</parameter></function>", None,
         ['{"any": "5", "x": 5}']),
        ("qwen3_coder", f"<function=f>{P}=text>\n\n a \n\n</parameter></function>", None, ['{"text": "\\n a \\n"}']),
        ("qwen3_coder", f"<function=f>{P}=o>['a', 'b'</parameter></function>", None, ['{"o": "[\'a\', \'b\'"}']),
        ("qwen3_coder", f"<function=f>\n{P}=text>\ncut o", None, ['{"text": "cut o']),
        ("qwen3_coder", "<function=f>\n</function>\n<function=f>\n</function>\n</tool_call>", None, ["{}", "{}"]),
        ("qwen3_coder", "the <function= of f>", "the <function= of f>", []),
        ("qwen3_coder", "<tool_call> {}", "<tool_call> {}", []),
        ("qwen3_coder", "<function=f> and so on", " and so on", ["{}"]),
        ("glm45", f"<tool_call>f\n{A}n{V}5</arg_value>\n</tool_call> so", " so", ['{"n": 5}']),
        ("glm45", f"<tool_call>f\n{A}text{V}cut o", None, ['{"text": "cut o']),
        ("glm45", f"<tool_call>f\n{A}n</arg_key> words", f"{A}n</arg_key> words", ["{}"]),
        ("glm45", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
        ("glm45", "<tool_call>some words", "<tool_call>some words", []),
        ("seed_oss", f"<seed:tool_call>\n<function=f>\n{P}=b>True</parameter></function></seed:tool_call>", None,
         ['{"b": true}']),
        ("minimax_m2", f'<minimax:tool_call>\n<invoke name="f">{P} name="n">5</parameter>so', "so", ['{"n": 5}']),
        ("minimax_m2", '<minimax:tool_call> {}', '<minimax:tool_call> {}', []),
        ("olmo3", "<function_calls>\nf(n=5,\n  b=False)", None, ['{"n": 5, "b": false}']),
        ("olmo3", "<function_calls>f(text='a)', o={'b': [1, (2,)]})</function_calls> so", " so",
         ['{"text": "a)", "o": {"b": [1, [2]]}}']),
        ("olmo3", "<function_calls>f(n=5", None, ["{"]),
        ("olmo3", "<function_calls>f(n=g(5))", "g(5))", ["{"]),
        ("olmo3", "<function_calls>f(n=])", "])", ["{"]),
        ("olmo3", "<function_calls>words", "<function_calls>words", []),
        ("olmo3", "<function_calls>some words(", "<function_calls>some words(", []),
        ("olmo3", "<function_calls>(n=5)", "<function_calls>(n=5)", []),
        ("olmo3", "<function_calls>f()\nwords</function_calls>", "\nwords</function_calls>", ["{}"]),
        ("olmo3", "<function_calls>f(text='two\nlines')</function_calls>", None, ['{"text": "two\\nlines"}']),
        ("olmo3", "<function_calls>f(text='one \\\nline')</function_calls>", None, ['{"text": "one line"}']),
        ("gemma4", '<|tool_call>call:f{a:"two\nlines"}<tool_call|>', None, ['{"a": "two\\nlines"}']),
        ("apertus", '<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|> so', " so", ['{"a": 1}']),
        ("apertus", '<|tools_prefix|>[{"f": {"a": 1}, {"f": {}}]', None, ['{"a": 1}', "{}"]),
        ("apertus", '<|tools_prefix|>[{"f": {"a": 1', None, ['{"a": 1']),
        ("apertus", '<|tools_prefix|>[{"f": 5}]', '<|tools_prefix|>[{"f": 5}]', []),
        ("apertus", "<|tools_prefix|>[]<|tools_suffix|>", "<|tools_prefix|>[]<|tools_suffix|>", []),
        ("lfm2", "Hi.\n<|tool_call_start|>[f(n=5)]<|tool_call_end|>So.", "Hi.So.", ['{"n": 5}']),
        ("lfm2", "<|tool_call_start|>[f(text='it\\'s', b=True, any=None), f()]", None,
         ['{"text": "it\'s", "b": true, "any": null}', "{}"]),
        ("lfm2", "<|tool_call_start|>[f(text='two\nlines', o={\n'a': 'b\nc'})]", None,
         ['{"text": "two\\nlines", "o": {"a": "b\\nc"}}']),
        ("lfm2", "<|tool_call_start|>[f(text='cut o", None, ["{"]),
        ("lfm2", "<|tool_call_start|>[f(n=g(5))]<|tool_call_end|>", "g(5))]<|tool_call_end|>", ["{"]),
        ("lfm2", "<|tool_call_start|>f(n=5)<|tool_call_end|>", "<|tool_call_start|>f(n=5)<|tool_call_end|>", []),
        ("lfm2", "<|tool_call_start|>[words]", "<|tool_call_start|>[words]", []),
        ("gemma4", f"<|tool_call>call:f{{text:{Q}cut o", None, ['{"text": "cut o']),
        ("gemma4", f"<|tool_call>call:f{{text:{Q}a{Q}", None, ['{"text": "a"']),
        ("gemma4", "<|tool_call>call:f{n:5}<tool_call|><|tool_call>call:f{}", None, ['{"n": 5}', "{}"]),
        ("gemma4", "<|tool_call>call:f{n:5,}<tool_call|>", None, ['{"n": 5}']),
        ("gemma4", "<|tool_call>call:f{any:None,b:True,text:some words}", None,
         ['{"any": null, "b": true, "text": "some words"}']),
        ("gemma4", "<|tool_call>call:f{n:5 so", None, ['{"n": ']),
        ("gemma4", "<|tool_call>call:f{n:} so", "} so", ['{"n": ']),
        ("gemma4", "<|tool_call>call:f{n:[5} so", "} so", ['{"n": [5']),
        ("gemma4", "<|tool_call>call:f{n:<tool_call|> so", " so", ['{"n": ']),
        ("gemma4", f"<|tool_call>call:f{{{Q}n{Q} so", f"{Q}n{Q} so", ["{"]),
        ("gemma4", "<|tool_call>call:f words", "<|tool_call>call:f words", []),
        ("gemma4", '<|tool_call>{"name": "f"}', '<|tool_call>{"name": "f"}', []),
        ("gemma4", "the <|tool_call>", "the <|tool_call>", []),
    ],
)  # fmt: skip
def test_calls_that_break_off(name: str, text: str, content: str | None, arguments: list[str]) -> None:
    found = message(name, text)
    assert (found.content, [call.arguments for call in found.tool_calls]) == (content, arguments)


FIRST, SECOND = f'{V3}{{"text": "a"}}\n```{CALL_END}', f"{V3.removeprefix(CALLS_BEGIN)}{{}}\n```{CALL_END}"
HERMES = '<tool_call>\n{"name": "f", "arguments": {"text": "a"}}\n</tool_call>'
TAGS = f'{P}=text>\na\n</parameter>\n{P}=o>\n{{"b": 1}}\n</parameter>\n'


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (DEEPSEEK_V3, f"{FIRST}\n{SECOND}{CALLS_END}"),
        (DEEPSEEK_V31, f'Well.{V31}{{"text": "a"}}{CALL_END}{V31.removeprefix(CALLS_BEGIN)}{{}}{CALL_END}{CALLS_END}'),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"text": "a"}[TOOL_CALLS]f[ARGS]{}'),
        (
            QWEN3_CODER,
            "Well.\n" + "\n".join(f"<tool_call>\n<function=f>\n{TAGS}</function>\n</tool_call>" for _ in "12"),
        ),
        (OLMO3, 'Well.\n<function_calls>\nf(text="a", b=true)\nf()\n</function_calls>'),
        (SMOLLM3, f"Well.\n{HERMES}\n{HERMES}"),
        (GLM45, "Well.\n" + "\n".join(f"<tool_call>f\n{A}text{V}a</arg_value>\n</tool_call>" for _ in "12")),
        (APERTUS, 'Well.<|tools_prefix|>[{"f": {"text": "a", "o": {"b": [1]}}}, {"f": {}}]<|tools_suffix|>'),
        (LFM2, "Well.\n<|tool_call_start|>[f(text='a', b=True), f()]<|tool_call_end|>"),
        (LFM25, "<|tool_call_start|>[f(text='a', b=True), f()]<|tool_call_end|>"),
        (
            NEMOTRON_NANO_V2,
            'Well.<TOOLCALL>[{"name": "f", "arguments": {"text": "a"}}, {"name": "f", "arguments": {}}]</TOOLCALL>',
        ),
        (
            HUNYUAN_A13B,
            '<tool_calls>[{"name": "f", "arguments": {"text": "a"}}, {"name": "f", "arguments": {}}]</tool_calls>',
        ),
        (
            GEMMA4,
            f"<|tool_call>call:f{{b:true,o:{{n:5,text:{Q}b{Q}}},text:{Q}a{Q}}}<tool_call|><|tool_call>call:f{{}}<tool_call|>",
        ),
        (
            SEED_OSS,
            "Well.\n"
            + "\n".join(
                f"<seed:tool_call>\n<function=f>\n{P}=text>a</parameter>\n</function>\n</seed:tool_call>" for _ in "12"
            ),
        ),
    ],
)
def test_the_next_turn_has_the_calls_as_the_model_wrote_them(source: str, answer: str) -> None:
    use = check_tools([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])
    assert use is not None
    ask: dict[str, Any] = {"role": "user", "content": "Hello"}
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    tools = None if source == MISTRAL else use.for_template()  # which it writes before the last message of the user
    prompt = template.render([ask], tools=tools)
    found = parse_answer(answer, AnswerFormat.detect(source).parser(prompt, use))
    assert len(found.tool_calls) == 2
    results = [{"role": "tool", "tool_call_id": made.id, "content": "Sunny."} for made in found.tool_calls]
    begun = prompt.removesuffix("<|channel>thought\n<channel|>")  # which Gemma 4's template omits in past turns
    assert template.render([ask, found.as_message(), *results], tools=tools).startswith(begun + answer)


def test_ids_that_mistrals_templates_take() -> None:
    use = check_tools([{"type": "function", "function": {"name": "f"}}])
    found = parse_answer('[TOOL_CALLS][{"name": "f"}, {"name": "f"}]', AnswerFormat("mistral").parser("", use))
    first, second = (made.id for made in found.tool_calls)
    assert first != second
    assert all(len(each) == 9 and each.isalnum() for each in (first, second))
    ask: dict[str, Any] = {"role": "user", "content": "Hello"}
    template = ChatTemplate(MISTRAL_LIST, {"bos_token": "<s>", "eos_token": "</s>"})
    assert f'"id": "{first}"' in template.render([ask, found.as_message()])
