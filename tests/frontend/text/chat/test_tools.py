from __future__ import annotations

from typing import Any

import pytest

from quire.frontend.text.chat.tools import Tool, ToolChoice, ToolError, ToolUse, check_tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def function(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: Any, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def use(*given: Any, **options: Any) -> ToolUse:
    checked = check_tools(*given, **options)
    assert checked is not None
    return checked


def test_tools_are_parsed() -> None:
    given = [function(description="Finds.", parameters=SCHEMA, strict=True), function("g", parameters={}, strict=None)]
    checked = use(given)
    assert checked == ToolUse((Tool("f", "Finds.", SCHEMA, True), Tool("g")), ToolChoice("auto"), True)
    assert checked.for_template() == [function(description="Finds.", parameters=SCHEMA), function("g")]


@pytest.mark.parametrize(
    ("choice", "expected", "names", "forced", "parallel"),
    [
        (None, "auto", ["f", "g"], False, True),
        ("auto", "auto", ["f", "g"], False, True),
        ("none", "none", [], False, True),
        ("required", "required", ["f", "g"], True, True),
        (named("g"), "required", ["g"], True, False),
        (allowed("auto", "g"), "auto", ["g"], False, True),
        (allowed("required", "g", "f", "g"), "required", ["f", "g"], True, True),
    ],
)
def test_choices(choice: Any, expected: str, names: list[str], forced: bool, parallel: bool) -> None:
    checked = use([function(), function("g")], choice)
    assert checked.choice.mode == expected
    assert [tool.name for tool in checked.callable_tools] == names
    assert (checked.forced, checked.parallel) == (forced, parallel)
    assert len(checked.for_template()) == 2


def test_null_fields_are_ignored() -> None:
    given = {
        **function(parameters={"properties": {}}, examples=None),
        "cache_control": {"type": "ephemeral"},
        "x": None,
    }
    assert use([given]).tools == (Tool("f", None, {"type": "object", "properties": {}}),)


def test_calls_one_at_a_time() -> None:
    assert not use([function()], "required", parallel_tool_calls=False).parallel
    assert use([function()], "required", parallel_tool_calls=True).parallel


@pytest.mark.parametrize("tools", [None, []])
def test_no_tools(tools: Any) -> None:
    for choice in (None, "none", "auto"):
        assert check_tools(tools, choice) is None
    with pytest.raises(ToolError, match="tool_choice is 'required', but there are no tools"):
        check_tools(tools, "required")


@pytest.mark.parametrize(
    ("tools", "choice", "param", "problem"),
    [
        ({}, None, "tools", "is a dict; give a list of"),
        ("f", None, "tools", "is a str"),
        (["f"], None, "tools[0]", "is a str; give {"),
        ([{"type": "custom"}], None, "tools[0].type", "is 'custom'; only 'function' is known"),
        ([{"function": {"name": "f"}}], None, "tools[0].type", "is None"),
        ([{"type": "function"}], None, "tools[0].function", "is missing; give"),
        ([{"type": "function", "function": "f"}], None, "tools[0].function", "is a str"),
        (
            [{**function(), "strict": True}],
            None,
            "tools[0]",
            "has the unknown key 'strict'; known are cache_control, function",
        ),
        ([function(), function("")], None, "tools[1].function.name", "is ''; give 1 to 64 letters"),
        ([function("a b")], None, "tools[0].function.name", "is 'a b'; give"),
        ([function("f\n")], None, "tools[0].function.name", "is 'f\\n'; give"),
        ([function("f" * 65)], None, "tools[0].function.name", "give 1 to 64"),
        ([function("f" * 10**6)], None, "tools[0].function.name", "..."),
        ([function(5)], None, "tools[0].function.name", "is 5"),
        ([{"type": "function", "function": {}}], None, "tools[0].function.name", "is missing"),
        ([function(), function()], None, "tools[1].function.name", "is 'f' a second time"),
        ([function(description=5)], None, "tools[0].function.description", "is a int; give a string"),
        ([function(strict="yes")], None, "tools[0].function.strict", "is 'yes'; give true or false"),
        ([function(schema={})], None, "tools[0].function", "has the unknown key 'schema'; known are description"),
        ([function(parameters="x")], None, "tools[0].function.parameters", "is a str; give a JSON schema"),
        ([function(parameters={"type": "array"})], None, "tools[0].function.parameters", "has type='array'"),
        ([function(parameters={"required": []})], None, "tools[0].function.parameters", "has no type"),
        (
            [function(parameters={"type": "object", "properties": []})],
            None,
            "tools[0].function.parameters.properties",
            "is a list",
        ),
        ([function()], "any", "tool_choice", 'is \'any\'; give "none", "auto", "required" or {'),
        ([function()], 5, "tool_choice", "is 5"),
        ([function()], named("g"), "tool_choice.function.name", "is 'g', which is not one of the tools: f"),
        ([function()], {"type": "function"}, "tool_choice", "is {'type': 'function'}; give"),
        ([function()], {"type": "custom"}, "tool_choice", "is {'type': 'custom'}"),
        ([function()], allowed("always", "f"), "tool_choice.allowed_tools.mode", "is 'always'"),
        ([function()], allowed("auto"), "tool_choice.allowed_tools", "with at least one tool"),
        ([function()], allowed("auto", "g"), "tool_choice.allowed_tools.tools[0].function.name", "is 'g', which"),
    ],
)
def test_errors_name_the_field_and_the_problem(tools: Any, choice: Any, param: str, problem: str) -> None:
    with pytest.raises(ToolError) as caught:
        check_tools(tools, choice)
    assert caught.value.param == param
    assert str(caught.value).startswith(param + " ")
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 400


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range((levels - 1) // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_the_depth_of_a_schema_is_limited() -> None:
    assert use([function(parameters=nested(63))]).tools
    for levels in (65, 1501):
        with pytest.raises(ToolError, match=r"parameters is nested more than 64 levels deep; use \$defs"):
            check_tools([function(parameters=nested(levels))])


def test_parallel_tool_calls_is_a_bool() -> None:
    with pytest.raises(ToolError, match="parallel_tool_calls is 'no'; give true or false"):
        check_tools([function()], None, "no")  # type: ignore[arg-type]
