from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from small_tokenizers import byte_level
from tokenizers import AddedToken, Tokenizer

from quire.frontend.text.chat.answer_format import AnswerFormat
from quire.frontend.text.chat.assistant import AssistantMessage, parse_answer
from quire.frontend.text.chat.tool_grammar import rejected_schema
from quire.frontend.text.chat.tool_parsers import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEP, TOOL_PARSERS
from quire.frontend.text.chat.tools import ToolUse, check_tools

FORMATS = sorted(TOOL_PARSERS.keys() - {"glm4"})  # which makes one call
SPECIAL = frozenset(
    {"<tool_call>", "</tool_call>", "<think>", "</think>", "<|tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>"}
    | {CALLS_BEGIN, CALL_BEGIN, SEP, CALL_END, CALLS_END, "[TOOL_CALLS]", "[ARGS]"}
    | {"<|tools_prefix|>", "<|tools_suffix|>", "<|tool_call_start|>", "<|tool_call_end|>"}
    | {"<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"}
)
PLACE = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/hour"}, "city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
}
CITIES = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 3}}, "required": ["n"]}
SCHEMAS = {"look": PLACE, "look_up": CITIES, "stop": None}
ROME = ("look", '{"at": 7, "city": "Rome"}')
STOP = ("stop", "{}")


def tools(strict: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def grammar(
    name: str,
    choice: Any = "required",
    prompt: str = "</think>",
    strict: bool = False,
    special: bool = False,
    **options: Any,
) -> str:
    form = AnswerFormat(name, "think", special_tokens() if special else {})
    written = form.grammar(prompt, check_tools(tools(strict), choice, **options))
    assert written is not None
    return written


@functools.cache
def special_tokens() -> dict[str, int]:
    return {text: token for text, token in backend().get_vocab().items() if text in SPECIAL}


@functools.cache
def backend() -> Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in sorted(SPECIAL)])
    return made


@functools.cache
def tokenizer(special: bool = False) -> LLTokenizer:
    """Return a tokenizer of single bytes, or one that also has the tags as special tokens."""
    if not special:
        return LLTokenizer("byte")
    return LLTokenizer(backend().to_str(), eos_token=backend().token_to_id("<|end|>"))


def matcher(lark: str, special: bool = False) -> LLMatcher:
    written = LLMatcher.grammar_from_lark(lark)
    error, messages = LLMatcher.validate_grammar_with_warnings(written, tokenizer(special))
    assert not error, messages
    return LLMatcher(tokenizer(special), written)


def allows(lark: str, text: str, special: bool = False) -> bool:
    """Return True if the grammar accepts `text` as a complete answer."""
    driven = matcher(lark, special)
    tokens = tokenizer(special).tokenize_str(text, parse_special=True)
    return driven.try_consume_tokens(tokens) == len(tokens) and driven.is_accepting()


def unspaced(call: str, arguments: str, name: str) -> str:
    """Return a call in tags without line breaks around values."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in json.loads(arguments).items()
    }
    if name == "glm45":
        pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
        return f"<tool_call>{call}\n{''.join(pairs)}</tool_call>"
    if name == "seed_oss":
        tags = "".join(f"<parameter={key}>{text}</parameter>\n" for key, text in texts.items())
        return f"<seed:tool_call>\n<function={call}>\n{tags}</function>\n</seed:tool_call>"
    tags = "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in texts.items())
    return f'<invoke name="{call}">\n{tags}</invoke>'


def in_tags(call: str, arguments: str) -> str:
    values = json.loads(arguments).items()
    tags = [f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in values]  # fmt: skip
    return f"<function={call}>\n{''.join(tags)}</function>"


def keywords(arguments: str) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in json.loads(arguments).items())


def notation(arguments: str) -> str:
    """Return arguments in Gemma 4's notation, without the outer braces."""
    texts = ((key, f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value))
             for key, value in json.loads(arguments).items())  # fmt: skip
    return ",".join(f"{key}:{text}" for key, text in texts)


def written(name: str, *calls: tuple[str, str]) -> str:
    if name == "cohere2":
        made = [
            f'{{"tool_call_id": "{index}", "tool_name": "{call}", "parameters": {arguments}}}'
            for index, (call, arguments) in enumerate(calls)
        ]
        return "<|START_ACTION|>[\n    " + ",\n    ".join(made) + "\n]<|END_ACTION|>"
    if name == "deepseek_v3":
        made = [f"{CALL_BEGIN}function{SEP}{call}\n```json\n{arguments}\n```{CALL_END}" for call, arguments in calls]
        return CALLS_BEGIN + "\n".join(made) + CALLS_END
    if name == "deepseek_v31":
        return CALLS_BEGIN + "".join(f"{CALL_BEGIN}{call}{SEP}{given}{CALL_END}" for call, given in calls) + CALLS_END
    if name == "qwen3_coder":
        return "\n".join(f"<tool_call>\n{in_tags(call, given)}\n</tool_call>" for call, given in calls)
    if name in ("glm45", "seed_oss", "minimax_m2"):
        answer = "\n".join(unspaced(call, given, name) for call, given in calls)
        return f"<minimax:tool_call>\n{answer}\n</minimax:tool_call>" if name == "minimax_m2" else answer
    if name in ("olmo3", "lfm2"):
        made = [f"{call}({keywords(arguments)})" for call, arguments in calls]
        if name == "lfm2":
            return f"<|tool_call_start|>[{', '.join(made)}]<|tool_call_end|>"
        return "<function_calls>\n" + "\n".join(made) + "\n</function_calls>"
    if name == "gemma4":
        return "".join(f"<|tool_call>call:{call}{{{notation(given)}}}<tool_call|>" for call, given in calls)
    if name == "apertus":
        return "<|tools_prefix|>[" + ", ".join(f'{{"{call}": {given}}}' for call, given in calls) + "]<|tools_suffix|>"
    key = "parameters" if name == "llama3_json" else "arguments"
    objects = [f'{{"name": "{call}", "{key}": {arguments}}}' for call, arguments in calls]
    if name in ("hermes", "generic"):
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
    marks = {
        "granite": ("<|tool_call|>", ""),
        "phi4_mini_json": ("functools", ""),
        "mistral": ("[TOOL_CALLS]", ""),
        "nemotron_json": ("<TOOLCALL>", "</TOOLCALL>"),
        "hunyuan_a13b": ("<tool_calls>", "</tool_calls>"),
    }
    mark, end = marks.get(name, ("", ""))
    return "; ".join(objects) if name == "llama3_json" else f"{mark}[{', '.join(objects)}]{end}"


def sampled(driven: LLMatcher, source: random.Random, limit: int = 2000) -> str:
    """Return a random text of the grammar, sampled byte by byte."""
    tokens = list[int]()
    while not driven.is_stopped() and len(tokens) < limit:
        mask = driven.compute_logit_bias()
        token = source.choice([token for token, bias in enumerate(mask) if bias])
        driven.consume_token(token)
        tokens.append(token)
    assert driven.is_stopped()
    return bytes(token for token in tokens if token < 256).decode()


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_answer_is_calls_and_nothing_else(name: str) -> None:
    lark = grammar(name)
    for calls in ([ROME], [STOP], [ROME, STOP, ("look_up", '{"n": 3}')]):
        answer = written(name, *calls)
        assert allows(lark, answer)
        found = parse_answer(answer, AnswerFormat(name).parser("", check_tools(tools(), "required")))
        assert found.content is None
        assert [(call.name, call.arguments) for call in found.tool_calls] == calls
    wrong = [("look", '{"city": "Bonn"}'), ("look", '{"at": 1}'), ("look_up", '{"n": 4}'), ("up", "{}"), ("loo", "{}")]
    assert not any(allows(lark, written(name, call)) for call in wrong)
    assert not any(allows(lark, text) for text in ("", "[]", "words", written(name, ROME) + "\n", " " * 50))


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_function_is_called_once(name: str) -> None:
    lark = grammar(name, named("look"))
    assert allows(lark, written(name, ROME))
    assert not allows(lark, written(name, STOP))
    assert not allows(lark, written(name, ROME, ROME))


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_without_parallel_calls(name: str) -> None:
    lark = grammar(name, parallel_tool_calls=False)
    assert allows(lark, written(name, STOP))
    assert not allows(lark, written(name, ROME, STOP))


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_have_no_properties_that_the_schema_does_not_name(name: str) -> None:
    lark = grammar(name)
    assert not allows(lark, written(name, ("look_up", '{"n": 1, "x": 2}')))
    assert not allows(lark, written(name, ("stop", '{"x": 2}')))


@pytest.mark.parametrize("name", FORMATS)
def test_a_random_model_makes_calls(name: str) -> None:
    source = random.Random(name)
    use = check_tools(tools(), "required", parallel_tool_calls=False)
    for _ in range(3):
        answer = sampled(matcher(grammar(name, parallel_tool_calls=False)), source)
        found = parse_answer(answer, AnswerFormat(name).parser("", use))
        (call,) = found.tool_calls
        assert found.content is None
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name] or {"type": "object"})


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_may_think_first(name: str, special: bool) -> None:
    calls = written(name, ROME)
    either = grammar(name, prompt="assistant\n", special=special)
    assert allows(either, f"<think>\nHm {{[<\n</think>\n\n{calls}", special)
    assert allows(either, calls, special)
    assert not allows(either, f"words {calls}", special)
    thinking = grammar(name, prompt="assistant\n<think>\n", special=special)
    assert allows(thinking, f"Hm.</think>{calls}", special)
    assert not allows(thinking, "Hm.", special)
    answer = grammar(name, special=special)
    assert allows(answer, calls, special)
    assert not allows(answer, f"<think></think>{calls}", special)


@pytest.mark.parametrize("special", [False, True])
def test_an_answer_of_another_grammar_may_think_first(special: bool) -> None:
    form = AnswerFormat(None, "qwen3", special_tokens() if special else {})
    either = form.after_thinking("assistant\n", f"%json {json.dumps(CITIES)}") or ""
    assert all(allows(either, text, special) for text in ('{"n": 1}', '<think>\n{"n": 9}\n</think>\n\n{"n": 1}'))
    assert not any(allows(either, text, special) for text in ("", '{"n": 9}', 'Hm</think>{"n": 1}', "<think>{}"))
    thinking = form.after_thinking("assistant\n<think>\n", '"yes" | "no"') or ""
    assert allows(thinking, "Hm.\n</think>\n\nno", special)
    assert not allows(thinking, "no", special)
    assert form.after_thinking("assistant\n<think>\n\n</think>\n\n", '"yes"') is None
    assert AnswerFormat().after_thinking("assistant\n", '"yes"') is None


@pytest.mark.parametrize("special", [False, True])
def test_thoughts_whose_mark_is_a_token_and_a_word(special: bool) -> None:
    """As those of Gemma 4, which its mark of calls follows."""
    form = AnswerFormat("gemma4", "gemma4", special_tokens() if special else {})
    lark = form.grammar("<|turn>model\n", check_tools(tools(), "required")) or ""
    calls = written("gemma4", ROME)
    assert all(allows(lark, text, special) for text in (calls, f"<|channel>thought\nHm.\n<channel|>{calls}"))
    assert not any(allows(lark, text, special) for text in (f"Hm.<channel|>{calls}", f"<|channel>Hm.<channel|>{calls}"))
    closed = form.grammar("<|turn>model\n<|channel>thought\n<channel|>", check_tools(tools(), "required")) or ""
    assert not allows(closed, f"<|channel>thought\nHm.\n<channel|>{calls}", special)


@pytest.mark.parametrize("special", [False, True])
def test_strict_tools_under_auto_leave_content_free(special: bool) -> None:
    lark = grammar("hermes", "auto", strict=True, special=special)
    calls = written("hermes", ROME, STOP)
    assert all(allows(lark, text, special) for text in ("", "words <tool_", '{"name"', calls, f"words\n{calls}"))
    assert not allows(lark, f"words {written('hermes', ('look', '{}'))}", special)
    assert not allows(lark, "<tool_call>words", special)


@pytest.mark.parametrize("name", ["llama3_json", "json_call"])
def test_strict_tools_under_auto_without_a_mark(name: str) -> None:
    lark = grammar(name, "auto", strict=True)
    assert all(allows(lark, text) for text in ("", "words {", "\nwords", written(name, ROME)))
    assert not allows(lark, written(name, ("look", '{"city": "Bonn"}')))


@pytest.mark.parametrize(
    "name",
    [
        "granite",
        "phi4_mini_json",
        "cohere2",
        "deepseek_v3",
        "deepseek_v31",
        "mistral",
        "qwen3_coder",
        "olmo3",
        "glm45",
        "seed_oss",
        "minimax_m2",
        "apertus",
        "gemma4",
        "hunyuan_a13b",
        "lfm2",
        "nemotron_json",
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_strict_tools_under_auto_in_a_list(name: str, special: bool) -> None:
    lark = grammar(name, "auto", strict=True, special=special)
    calls = written(name, ROME, STOP)
    assert all(allows(lark, text, special) for text in ("", "words [", calls, f"words\n{calls}"))
    assert not allows(lark, f"words {written(name, ('look', '{}'))}", special)


def test_a_call_by_line() -> None:
    forced, auto = grammar("glm4"), grammar("glm4", "auto", strict=True)
    for lark in (forced, auto):
        assert allows(lark, 'look\n{"at": 7, "city": "Rome"}')
        assert allows(lark, "stop\n{}")
        assert not any(allows(lark, f"look\n{arguments}") for arguments in ("{}", '{"city": "Bonn"}'))
    assert all(allows(auto, text) for text in ("", "look", "Look at it.\n{}", "look\nup", '{"a": 1}'))
    assert not any(allows(forced, text) for text in ("", "look", "words"))
    found = parse_answer("stop\n{}", AnswerFormat("glm4").parser("", check_tools(tools(), "required")))
    assert [(call.name, call.arguments) for call in found.tool_calls] == [STOP]


def with_parameter(schema: Any, strict: bool = False) -> ToolUse:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}, "strict": strict}
    use = check_tools([{"type": "function", "function": each} for each in ({"name": "g"}, function)], "required")
    assert use is not None
    return use


def test_an_unsupported_keyword() -> None:
    lenient, strict = with_parameter({"not": {}}), with_parameter({"not": {}}, strict=True)
    assert allows(AnswerFormat().grammar("", lenient) or "", '[{"name": "f", "arguments": {"a": 1}}]')
    assert rejected_schema(lenient) is None
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(AnswerFormat().grammar("", strict) or ""))
    error = rejected_schema(strict)
    assert error is not None
    assert error.param == "tools[1].function.parameters"
    assert str(error).endswith(
        'cannot be enforced: Unimplemented keys: ["not"]; change the schema, or omit strict '
        "to ignore unsupported keywords"
    )


def test_an_invalid_schema() -> None:
    use = with_parameter({"type": "strin"})
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(AnswerFormat().grammar("", use) or ""))
    assert "parameters cannot be enforced: Invalid type: strin; change the schema" in str(rejected_schema(use))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"$ref": "#"}, '{"a": {}}', '"words"'),
        (True, '["anything"]', "no JSON"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "A"}, "null", "true"),
        ({"type": "string", "pattern": "^[a-z]+$"}, '"abc"', '"Abc"'),
        ({"const": 'é"\\\n🙂'}, '"é\\"\\\\\\n🙂"', '"é"'),
    ],
)
def test_schemas_are_enforced(schema: Any, right: str, wrong: str) -> None:
    lark = AnswerFormat().grammar("", with_parameter(schema)) or ""
    assert allows(lark, f'[{{"name": "f", "arguments": {{"a": {right}}}}}]')
    assert not allows(lark, f'[{{"name": "f", "arguments": {{"a": {wrong}}}}}]')


def test_strict_does_not_affect_an_answer_without_calls() -> None:
    use = check_tools(tools(strict=True), "auto")
    assert parse_answer("words", AnswerFormat("hermes").parser("", use)) == AssistantMessage("words")
