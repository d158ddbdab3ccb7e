from __future__ import annotations

from typing import Any

import pytest
from chat_answers import garbage, pieces, read
from chat_templates import (
    COHERE,
    DEEPSEEK,
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    ERNIE45_THINKING,
    GEMMA4,
    GRANITE,
    HUNYUAN_A13B,
    LLAMA,
    MINIMAX_M2_PUBLISHED,
    MISTRAL,
    NEMOTRON_NANO_V2,
    PLAIN,
    QWEN,
    QWEN_THINKING,
    SMOLLM3,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.http.shared_fields import effort_kwargs, thinking_kwargs
from quire.frontend.text.chat.assistant import AssistantMessage, AssistantParser
from quire.frontend.text.chat.events import ContentDelta, ReasoningDelta
from quire.frontend.text.chat.reasoning import (
    REASONING_PARSERS,
    AnswerStart,
    ReasoningParser,
    answer_start,
    detect_reasoning,
)
from quire.frontend.text.chat.template import ChatTemplate


def message(start: AnswerStart, text: str) -> AssistantMessage:
    whole, _ = read(AssistantParser(None, ReasoningParser(start)), [text])
    by_char, _ = read(AssistantParser(None, ReasoningParser(start)), text)
    assert by_char == whole
    return whole


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        (AnswerStart.EITHER, "<think>\nHm.\n\nSo.\n</think>\n\nYes.", "Hm.\n\nSo.", "Yes."),
        (AnswerStart.EITHER, "\n <think>Hm.</think>Yes.", "Hm.", "Yes."),
        (AnswerStart.EITHER, "<think>\n\n</think>\n\nYes.", None, "Yes."),
        (AnswerStart.EITHER, "Yes. <think>no</think>", None, "Yes. <think>no</think>"),
        (AnswerStart.EITHER, "\n<thinking>", None, "\n<thinking>"),
        (AnswerStart.EITHER, "\n <thi", None, "\n <thi"),
        (AnswerStart.EITHER, "<think>cut off \n", "cut off \n", ""),
        (AnswerStart.THINKING, "\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        (AnswerStart.THINKING, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        (AnswerStart.THINKING, "Hm </ </think > </thin", "Hm </ </think > </thin", ""),
        (AnswerStart.THINKING, "</think></think>", None, "</think>"),
        (AnswerStart.ANSWER, "\n<think>x</think>", None, "\n<think>x</think>"),
    ],
)
def test_thoughts_and_content(start: AnswerStart, text: str, reasoning: str | None, content: str) -> None:
    assert message(start, text) == AssistantMessage(content, reasoning)


@settings(max_examples=50)
@given(data=st.data(), text=garbage, start=st.sampled_from(AnswerStart))
def test_the_result_does_not_depend_on_the_pieces(data: st.DataObject, text: str, start: AnswerStart) -> None:
    whole, _ = read(AssistantParser(None, ReasoningParser(start)), [text])
    cut, _ = read(AssistantParser(None, ReasoningParser(start)), data.draw(pieces(text)))
    assert cut == whole
    said = squeezed((whole.reasoning_content or "") + (whole.content or ""))
    closed = text.replace("</think>", "", 1)
    possible = [text, closed, *(some.replace("<think>", "", 1) for some in (text, closed))]
    assert said in [squeezed(some) for some in possible]
    if start is AnswerStart.ANSWER:
        assert whole.content == text


def test_thoughts_stream() -> None:
    reader = ReasoningParser(AnswerStart.THINKING)
    assert reader.feed("Let me") == [ReasoningDelta("Let me")]
    assert reader.feed(" think</th") == [ReasoningDelta(" think")]
    assert reader.feed("ink>\n") == []
    assert reader.feed("\nYes") == [ContentDelta("Yes")]


@pytest.mark.parametrize(
    ("parser", "prompt", "start"),
    [
        ("qwen3", "<|im_start|>assistant\n", AnswerStart.EITHER),
        ("qwen3", "<|im_start|>assistant\n<think>\n", AnswerStart.THINKING),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", AnswerStart.ANSWER),
        ("think", "assistant: ", AnswerStart.EITHER),
        ("deepseek_r1", "<Assistant>", AnswerStart.THINKING),
        ("deepseek_r1", "<Assistant><think>\n\n</think>", AnswerStart.ANSWER),
    ],
)
def test_the_prompt_determines_the_start_of_the_answer(parser: str, prompt: str, start: AnswerStart) -> None:
    assert answer_start(parser, prompt) is start


def test_the_parser_is_detected_from_the_template() -> None:
    sources = [QWEN_THINKING, DEEPSEEK, QWEN, LLAMA, PLAIN, "{{ '<think>' }}{{ x.split('</think>') }}"]
    assert [detect_reasoning(source) for source in sources] == ["qwen3", "deepseek_r1", None, None, None, "think"]
    assert detect_reasoning(PLAIN, ["<think>", "</think>", "<x>"]) == "think"


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("cohere2", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Hm.", "Yes."),
        ("cohere2", "<|START_RESPONSE|>Yes. <|END_RESP", None, "Yes. <|END_RESP"),
        ("cohere2", "Yes.<|END_RESPONSE|>", None, "Yes."),
        ("cohere2", "<|START_THINKING|>Hm. <|END_", "Hm. <|END_", ""),
        ("granite", "Here is my thought process: Hm.\n\nHere is my response:\n\nYes.", " Hm.", "Yes."),
        ("granite", "Here is my answer.", None, "Here is my answer."),
        ("seed_oss", "<seed:think>Hm.\n</seed:think>\nYes.", "Hm.", "Yes."),
        ("apertus", "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", "Hm.", "Yes."),
        ("apertus", "<|inner_prefix|>Hm.\n<|tools_prefix|>[", "Hm.", "<|tools_prefix|>["),
        ("apertus", "<|inner_prefix|>Hm <|tools_", "Hm <|tools_", ""),
        ("ernie45", "<think>\nHm.\n</think>\n\n<response>\nYes.\n\nNo.\n</response>\n", "Hm.", "Yes.\n\nNo."),
        ("ernie45", "<response>\nYes.\n</resp", None, "Yes.\n</resp"),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
        ("gemma4", "<|channel>thought\n<channel|>Yes.", None, "Yes."),
        ("gemma4", "<|channel>though", None, "<|channel>though"),
        ("gemma4", "<|channel>thought\nHm <chan", "Hm <chan", ""),
        ("hunyuan", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm.", "Yes."),
        ("hunyuan", "<think>\n\n</think>\n<answer>\nYes \n", None, "Yes \n"),
    ],
)
def test_other_marks(name: str, text: str, reasoning: str | None, content: str) -> None:
    found = []
    for texts in ([text], text):
        parser = ReasoningParser(AnswerStart.EITHER, REASONING_PARSERS[name])
        found.append(read(AssistantParser(None, parser), texts)[0])
    assert found == [AssistantMessage(content, reasoning)] * 2


@settings(max_examples=50)
@given(data=st.data(), start=st.sampled_from(AnswerStart), words=st.lists(st.sampled_from([
    "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|", "<|END_", "words", "\n",
]), max_size=10))  # fmt: skip
def test_other_marks_in_any_pieces(data: st.DataObject, start: AnswerStart, words: list[str]) -> None:
    text, form = "".join(words), REASONING_PARSERS["cohere2"]
    whole, _ = read(AssistantParser(None, ReasoningParser(start, form)), [text])
    cut, _ = read(AssistantParser(None, ReasoningParser(start, form)), data.draw(pieces(text)))
    assert cut == whole
    assert not any(mark in (whole.content or "") for mark in form.response)


def test_other_marks_are_detected_and_found_in_the_prompt() -> None:
    assert [detect_reasoning(source) for source in (COHERE, GRANITE)] == ["cohere2", "granite"]
    marks = ("<seed:think>", "<|inner_prefix|>", "</think> <response>", "</think> <answer> enable_thinking")
    assert [detect_reasoning(source) for source in marks] == ["seed_oss", "apertus", "ernie45", "hunyuan"]
    assert answer_start("cohere2", "<|CHATBOT_TOKEN|>") is AnswerStart.EITHER
    assert answer_start("cohere2", "<|CHATBOT_TOKEN|><|START_THINKING|>") is AnswerStart.THINKING
    assert answer_start("cohere2", "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|>") is AnswerStart.ANSWER


@pytest.mark.parametrize(
    ("source", "parser", "variables", "start"),
    [
        (DEEPSEEK_V3, None, {}, None),
        (DEEPSEEK_R1, "deepseek_r1", {}, AnswerStart.THINKING),
        (DEEPSEEK_V31, "deepseek_v3", {}, AnswerStart.ANSWER),
        (DEEPSEEK_V31, "deepseek_v3", thinking_kwargs(True), AnswerStart.THINKING),
        (DEEPSEEK_V31, "deepseek_v3", thinking_kwargs(False), AnswerStart.ANSWER),
        (SMOLLM3, "qwen3", {}, AnswerStart.EITHER),
        (SMOLLM3, "qwen3", effort_kwargs("none", "reasoning_effort"), AnswerStart.ANSWER),
        (SMOLLM3, "qwen3", effort_kwargs("low", "reasoning_effort"), AnswerStart.EITHER),
        (MISTRAL + "{# [THINK] #}", "mistral", {}, AnswerStart.EITHER),
        (PLAIN + "<think>", "think", {}, AnswerStart.THINKING),
        (GEMMA4, "gemma4", {}, AnswerStart.ANSWER),
        (GEMMA4, "gemma4", thinking_kwargs(False), AnswerStart.ANSWER),
        (GEMMA4, "gemma4", thinking_kwargs(True), AnswerStart.EITHER),
        (MINIMAX_M2_PUBLISHED, "think", {}, AnswerStart.THINKING),
        (ERNIE45_THINKING, "ernie45", {}, AnswerStart.THINKING),
        (HUNYUAN_A13B, "hunyuan", {}, AnswerStart.EITHER),
        (HUNYUAN_A13B, "hunyuan", thinking_kwargs(False), AnswerStart.ANSWER),
        (NEMOTRON_NANO_V2, "qwen3", thinking_kwargs(False), AnswerStart.ANSWER),
    ],
)
def test_a_template_and_its_variables_determine_the_start(
    source: str, parser: str | None, variables: dict[str, Any], start: AnswerStart | None
) -> None:
    assert detect_reasoning(source) == parser
    prompt = ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "Hello"}], **variables)
    assert parser is None or answer_start(parser, prompt) is start


def test_a_template_of_deepseek_goes_on_after_a_result_without_thoughts() -> None:
    """Its answer follows the result, with no mark of thoughts in between."""
    assert answer_start("deepseek_v3", "<tool_output_end>") is AnswerStart.EITHER
