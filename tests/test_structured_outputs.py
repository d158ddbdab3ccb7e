"""Constrained answers through the whole stack: `LLM` and `AsyncLLM`, the socket, the engine, the demo model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from json_schemas import MAX_TOKENS, SCHEMAS
from memory_pressure import under_pressure

from quire.frontend import LLM, AsyncLLM, CompletionOutput, RequestError, SamplingParams, StructuredOutputsParams
from quire.protocol.messages import ErrorKind

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import EngineFactory

PROMPT = "Once upon a time there was"
DIALOGUE = r'([A-Z][a-z]{2,8} said: "[a-z ]{5,30}"\n){2,4}'
TALK = DIALOGUE.replace("{2,4}", "{30}")
GBNF = """
# a sum
root  ::= sum "\\n"
sum   ::= digit ("+" digit){1,4} "="  # and what it is said to be
digit ::= [0-9]{1,3}
"""
LARK = r"""
start: verb " " noun (" and " noun){0,2} "."
verb: "take" | "leave" | "open"
noun: /the [a-z]{3,8}/
"""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def params(seed: int = 0, **fields: Any) -> SamplingParams:
    """Return parameters at temperature 1; fields that `SamplingParams` lacks belong to `StructuredOutputsParams`."""
    own = {name: fields.pop(name) for name in list(fields) if name in StructuredOutputsParams.__struct_fields__}
    return SamplingParams(
        **{"max_tokens": 200, "seed": seed, **fields}, structured_outputs=StructuredOutputsParams(**own)
    )


def answer(llm: LLM, prompt: str = PROMPT, **fields: Any) -> CompletionOutput:
    return llm.generate(prompt, params(**fields), use_tqdm=False)[0].outputs[0]


def validate(text: str, schema: dict[str, Any]) -> None:
    kind = jsonschema.Draft202012Validator
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


@pytest.fixture(scope="module")
def llm(module_engine: EngineFactory, demo_model: Path) -> LLM:
    return module_engine(demo_model)


@pytest.mark.parametrize("seed", range(5))
def test_each_kind(llm: LLM, seed: int) -> None:
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"regex": DIALOGUE}, DIALOGUE),
        ({"choice": ["yes", "no", "yes and no", 'ja, "so" \\ n\u00ebe']}, r'yes|no|yes and no|ja, "so" \\ nëe'),
        ({"grammar": GBNF}, r"\d{1,3}(\+\d{1,3}){1,4}=\n"),
        ({"grammar": LARK}, r"(take|leave|open) the [a-z]{3,8}( and the [a-z]{3,8}){0,2}\."),
    ]
    asked = [params(seed, **fields) for fields, _ in kinds]
    outputs = llm.generate([PROMPT] * len(asked), asked, use_tqdm=False)
    for output, (_, pattern) in zip(outputs, kinds, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        assert re.fullmatch(pattern, output.outputs[0].text)


@pytest.mark.parametrize("blanks", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_answers_of_fifty_schemas_validate(llm: LLM, seed: int, blanks: bool) -> None:
    asked = [
        params(seed, json=schema, disable_any_whitespace=not blanks, max_tokens=MAX_TOKENS)
        for schema in SCHEMAS.values()
    ]
    outputs = llm.generate(["Here it is as JSON: "] * len(asked), asked, use_tqdm=False)
    for schema, output in zip(SCHEMAS.values(), outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        validate(output.outputs[0].text, schema)


@pytest.mark.parametrize("seed", range(3))
def test_an_object_has_no_properties_that_its_schema_does_not_name(llm: LLM, seed: int) -> None:
    tag = {"type": "object", "properties": {"k": {"const": 1}}}
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "tag": tag},
        "required": ["name"],
    }
    found = answer(llm, seed=seed, json=schema)
    assert found.finish_reason == "stop"
    assert json.loads(found.text).keys() <= {"name", "tag"}
    assert json.loads(found.text).get("tag", {}).keys() <= {"k"}


def test_one_of_the_choices_may_be_empty(llm: LLM) -> None:
    texts = {answer(llm, seed=seed, choice=["", "x"], temperature=2.0).text for seed in range(8)}
    assert texts <= {"", "x"}
    assert answer(llm, choice=["", "x"]).finish_reason == "stop"


def test_any_json_object(llm: LLM) -> None:
    asked = [params(seed, json_object=True) for seed in range(40)]  # one of eight comes to an end
    texts = [output.outputs[0] for output in llm.generate([PROMPT] * len(asked), asked, use_tqdm=False)]
    whole = [json.loads(found.text) for found in texts if found.finish_reason == "stop"]
    assert whole
    assert all(isinstance(value, dict) for value in whole)
    assert all(found.text.startswith("{") for found in texts)


def test_white_space_is_as_requested(llm: LLM) -> None:
    assert " " not in answer(llm, "x", json={"const": [1, 2]}, disable_any_whitespace=True).text
    spaced = answer(llm, "x", json={"const": [1, 2]}, whitespace_pattern=" ").text
    assert re.fullmatch(r"\[ ?1 ?, ?2 ?\]", spaced)


def test_a_schema_is_text_or_a_dict_and_the_parameters_too(llm: LLM) -> None:
    same = [
        params(json=PERSON),
        params(json=json.dumps(PERSON, indent=2)),
        SamplingParams(max_tokens=200, seed=0, structured_outputs={"json": PERSON, "json_object": None}),  # type: ignore[arg-type]
    ]
    texts = {output.outputs[0].text for output in llm.generate([PROMPT] * 3, same, use_tqdm=False)}
    assert len(texts) == 1
    validate(texts.pop(), PERSON)


def test_tokens_do_not_depend_on_other_parameters(llm: LLM) -> None:
    """Nor on the other requests of the batch, nor on `max_tokens`."""
    alone = answer(llm, json=PERSON)
    assert alone.finish_reason == "stop"
    others = [params(seed, regex=DIALOGUE) for seed in range(6)] + [SamplingParams(max_tokens=50, seed=5)] * 6
    crowd = llm.generate([PROMPT] * 14, [*others, params(json=PERSON), params(json=PERSON, logprobs=2)], use_tqdm=False)
    told = crowd[-1].outputs[0]
    assert crowd[-2].outputs[0].token_ids == told.token_ids == alone.token_ids
    assert told.logprobs is not None
    assert [next(iter(entry)) for entry in told.logprobs] == alone.token_ids
    for count in range(1, len(alone.token_ids)):
        short = answer(llm, json=PERSON, max_tokens=count)
        assert (short.token_ids, short.finish_reason) == (alone.token_ids[:count], "length")
    assert answer(llm, json=PERSON, max_tokens=len(alone.token_ids)).finish_reason == "stop"


def test_reported_logprobs_are_the_models_own(llm: LLM) -> None:
    """The model finds the constrained text unlikely."""
    free = llm.generate(PROMPT, SamplingParams(max_tokens=1, temperature=0.0, logprobs=1), use_tqdm=False)[0].outputs[0]
    constrained = answer(llm, regex="@[0-9]", logprobs=1)
    assert free.logprobs is not None
    assert constrained.logprobs is not None
    assert list(constrained.logprobs[0])[1] == free.token_ids[0]
    assert constrained.logprobs[0][constrained.token_ids[0]].rank > 1


def test_several_completions(llm: LLM) -> None:
    before = llm.stats()
    output = llm.generate(PROMPT, params(n=4, seed=9, regex=DIALOGUE), use_tqdm=False)[0]
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch(DIALOGUE, text) for text in texts)
    assert len(set(texts)) == 4
    for index, completion in enumerate(output.outputs):
        assert completion.token_ids == answer(llm, regex=DIALOGUE, seed=9 + index).token_ids
    [best] = llm.generate(PROMPT, params(n=1, best_of=4, seed=9, regex=DIALOGUE), use_tqdm=False)[0].outputs
    assert best.text in texts
    assert llm.stats()["pages_held"] == before["pages_held"] == 0


def test_the_end_of_an_answer(llm: LLM) -> None:
    """A grammar that may continue ends with an eos token, or not at all without one; one that can't ends by itself."""
    assert answer(llm, regex="a{3}", ignore_eos=True, min_tokens=20).text == "aaa"
    assert answer(llm, regex="a+", ignore_eos=True, max_tokens=9).finish_reason == "length"
    some = answer(llm, regex="(a|b)+", min_tokens=10, max_tokens=12)
    assert len(some.token_ids) >= 10
    [token_b] = llm.get_tokenizer().encode("b", add_special_tokens=False)
    found = answer(llm, regex="[ab]+", stop_token_ids=[token_b], ignore_eos=True)
    assert (found.finish_reason, found.stop_reason) == ("stop", token_b)
    assert re.fullmatch("[ab]*", found.text)
    assert found.token_ids.index(token_b) == len(found.token_ids) - 1
    assert answer(llm, regex="b", stop_token_ids=[token_b], min_tokens=5).token_ids == [token_b]


def test_a_constraint_has_priority_over_other_parameters(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello", add_special_tokens=False)
    assert answer(llm, regex="hello", allowed_token_ids=[5, 6], temperature=0.0).text == "hello"
    assert answer(llm, regex="hello", bad_words_token_ids=[[token] for token in ids]).text == "hello"
    assert answer(llm, regex="[ab]{8}", logit_bias={ids[0]: 100.0}, repetition_penalty=1.3, min_tokens=3).text


def test_streams_and_an_abort(demo_model: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(str(demo_model), num_pages=64) as llm:
            pieces = [
                output.outputs[0].text
                async for output in llm.generate(PROMPT, params(regex=TALK, max_tokens=2000), output_kind="delta")
            ]
            assert len(pieces) > 1  # what comes while the client is at something else is one
            assert re.fullmatch(TALK, "".join(pieces))
            async with contextlib.aclosing(llm.generate(PROMPT, params(regex="[a-z]+", ignore_eos=True))) as stream:
                async for _ in stream:
                    break
            while (stats := await llm.stats())["running"] + stats["waiting"]:
                pass  # each look is a round trip
            assert stats["pages_held"] == 0

    asyncio.run(run())


def test_under_memory_pressure(engine: EngineFactory, demo_model: Path) -> None:
    llm = engine(demo_model, num_pages=12)
    asked = [params(seed, json=PERSON if seed % 2 else {"type": "object"}, max_tokens=120) for seed in range(12)]
    roomy = engine(demo_model).generate([PROMPT] * 12, asked, use_tqdm=False)
    tight = under_pressure(llm, lambda: llm.generate([PROMPT] * 12, asked, use_tqdm=False))
    assert [output.outputs[0].token_ids for output in tight] == [output.outputs[0].token_ids for output in roomy]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": r"(?=a)b"}, "look-around"),
    ({"regex": r"[^\s\S]"}, "allows no text"),
    ({"grammar": "start: nothing"}, "unknown name"),
    ({"grammar": "start: start"}, "allows no text"),
    ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "too deeply nested"),
    ({"grammar": 'root ::= "a" | ('}, "GBNF, line 1: a group without its ')': root ::="),
    ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "more than 150 groups within each other"),
    ({"grammar": 'root ::= x\n\nx ::= "a" y'}, 'line 3: there is no rule \'y\'; the rules are root, x: x ::= "a" y'),
    ({"grammar": "what is this"}, "neither Lark nor GBNF"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
    ({"json": {"enum": []}}, "Unsatisfiable"),
    ({"json": {"$ref": "#/$defs/missing"}}, "does not exist"),
    ({"json": {"$ref": "https://example.com/schema.json"}}, "retriev"),
    ({"json": {"type": "strin"}}, "Invalid type"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "no value fits two of its schemas"),
    ({"json": {"type": "object", "minProperties": 2}}, "minProperties=2 can't be enforced"),
    ({"json": {"type": "string", "pattern": "x{,3}"}}, "a quantifier in Python and text in ECMA-262"),
    ({"regex": "[[:alpha:]]"}, "which ECMA-262 and Python don't know"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"not": {"type": "string"}}}, "not"),
    ({"json": {"type": "string", "format": "colour"}}, "Unknown format"),
    ({"json": {"type": "string", "pattern": "(a"}}, "unclosed group"),
    ({"json": '{"type":"array","items":' * 200 + "{}" + "}" * 200}, "recursion limit"),
    ({"json": {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(9)]} for i in range(9)]}}, "large"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), BAD)
def test_invalid_grammars_are_invalid_requests(llm: LLM, fields: dict[str, Any], words: str) -> None:
    """The second time they are rejected at once, with the same error."""
    for _ in range(2):
        with pytest.raises(RequestError, match=f"(?s)structured_outputs.*{re.escape(words)}") as caught:
            answer(llm, **fields)
        assert caught.value.kind is ErrorKind.INVALID
        assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "asks for nothing; give exactly one of"),
        ({"regex": "a", "json": {}}, "asks for json and regex"),
        ({"regex": ""}, "allows no text"),
        ({"choice": []}, "allows no text"),
        ({"choice": [""]}, "allows no text"),
        ({"choice": "yes"}, "wrong type"),
        ({"json": "{"}, "not a JSON schema"),
        ({"json": "[1]"}, "give an object"),
        ({"json": {"const": object()}}, "not a JSON schema"),
        ({"regex": b"a"}, "wrong type"),
        ({"regex": "a", "disable_any_whitespace": True}, "means nothing with regex"),
        ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "leave one out"),
        ({"grammar": "x" * 300_000}, "300000 characters"),
        ({"regex": "a", "beam_width": 2, "temperature": 0.0}, "beam search"),
    ],
)
def test_errors_that_need_no_engine_are_raised_at_once(llm: LLM, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        answer(llm, **fields)


def test_names_of_other_engines_are_rejected_with_their_name() -> None:
    with pytest.raises(TypeError, match="disable_fallback"):
        StructuredOutputsParams(regex="a", disable_fallback=True)  # type: ignore[call-arg]


def test_an_unknown_name_in_a_mapping(llm: LLM) -> None:
    with pytest.raises(ValueError, match="structured_outputs has structural_tag; its fields are json, regex"):
        llm.generate(PROMPT, SamplingParams(structured_outputs={"structural_tag": "x"}))  # type: ignore[arg-type]


def test_grammars_may_be_loaded_at_the_start_and_have_a_time_limit(engine: EngineFactory, demo_model: Path) -> None:
    llm = engine(demo_model, preload_grammars=True, grammar_timeout=1e-9)
    with pytest.raises(RequestError, match="--grammar-timeout"):
        answer(llm, regex="a")


def test_an_engine_ends_while_it_compiles(demo_model: Path) -> None:
    """The process ends normally, also if compilation takes long."""
    rules = 8_000
    grammar = "start: " + " | ".join(f"r{i}" for i in range(rules)) + "\n"
    grammar += "\n".join(f'r{i}: "{i}"' for i in range(rules))

    async def run(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPT, params(grammar=grammar))
        begun = asyncio.ensure_future(anext(stream))
        while not (await llm.stats())["waiting"] and not begun.done():
            pass  # each look is a round trip
        begun.cancel()
        with contextlib.suppress(asyncio.CancelledError, RequestError):
            await begun

    llm = AsyncLLM(str(demo_model), num_pages=64)
    supervisor = llm._engine.engines.supervisors[0]
    assert supervisor is not None
    asyncio.run(run(llm))
    llm.close()
    assert supervisor.status == 0
