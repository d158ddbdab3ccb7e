from __future__ import annotations

import pytest
from chat_answers import garbage, pieces, read
from chat_templates import DEEPSEEK, LLAMA, PLAIN, QWEN, QWEN_THINKING
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.text.chat.assistant import AssistantMessage, AssistantParser
from quire.frontend.text.chat.events import ContentDelta, ReasoningDelta
from quire.frontend.text.chat.reasoning import Beginning, ReasoningParser, beginning, detect_reasoning


def message(begins: Beginning, text: str) -> AssistantMessage:
    whole, _ = read(AssistantParser(None, ReasoningParser(begins)), [text])
    by_char, _ = read(AssistantParser(None, ReasoningParser(begins)), text)
    assert by_char == whole
    return whole


def squeezed(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    ("begins", "text", "reasoning", "content"),
    [
        (Beginning.EITHER, "<think>\nHm.\n\nSo.\n</think>\n\nYes.", "Hm.\n\nSo.", "Yes."),
        (Beginning.EITHER, "\n <think>Hm.</think>Yes.", "Hm.", "Yes."),
        (Beginning.EITHER, "<think>\n\n</think>\n\nYes.", None, "Yes."),
        (Beginning.EITHER, "Yes. <think>no</think>", None, "Yes. <think>no</think>"),
        (Beginning.EITHER, "\n<thinking>", None, "\n<thinking>"),
        (Beginning.EITHER, "\n <thi", None, "\n <thi"),
        (Beginning.EITHER, "<think>cut off \n", "cut off \n", ""),
        (Beginning.THINKING, "\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        (Beginning.THINKING, "<think>\nHm.</think>Yes.", "Hm.", "Yes."),
        (Beginning.THINKING, "Hm </ </think > </thin", "Hm </ </think > </thin", ""),
        (Beginning.THINKING, "</think></think>", None, "</think>"),
        (Beginning.ANSWER, "\n<think>x</think>", None, "\n<think>x</think>"),
    ],
)
def test_thoughts_and_words(begins: Beginning, text: str, reasoning: str | None, content: str) -> None:
    assert message(begins, text) == AssistantMessage(content, reasoning)


@settings(max_examples=50)
@given(data=st.data(), text=garbage, begins=st.sampled_from(Beginning))
def test_how_a_text_is_cut_changes_nothing(data: st.DataObject, text: str, begins: Beginning) -> None:
    whole, _ = read(AssistantParser(None, ReasoningParser(begins)), [text])
    cut, _ = read(AssistantParser(None, ReasoningParser(begins)), data.draw(pieces(text)))
    assert cut == whole
    said = squeezed((whole.reasoning_content or "") + (whole.content or ""))
    closed = text.replace("</think>", "", 1)
    possible = [text, closed, *(some.replace("<think>", "", 1) for some in (text, closed))]
    assert said in [squeezed(some) for some in possible]
    if begins is Beginning.ANSWER:
        assert whole.content == text


def test_thoughts_stream() -> None:
    reader = ReasoningParser(Beginning.THINKING)
    assert reader.feed("Let me") == [ReasoningDelta("Let me")]
    assert reader.feed(" think</th") == [ReasoningDelta(" think")]
    assert reader.feed("ink>\n") == []
    assert reader.feed("\nYes") == [ContentDelta("Yes")]


@pytest.mark.parametrize(
    ("parser", "prompt", "begins"),
    [
        ("qwen3", "<|im_start|>assistant\n", Beginning.EITHER),
        ("qwen3", "<|im_start|>assistant\n<think>\n", Beginning.THINKING),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", Beginning.ANSWER),
        ("think", "assistant: ", Beginning.EITHER),
        ("deepseek_r1", "<Assistant>", Beginning.THINKING),
        ("deepseek_r1", "<Assistant><think>\n\n</think>", Beginning.ANSWER),
    ],
)
def test_the_prompt_tells_how_an_answer_begins(parser: str, prompt: str, begins: Beginning) -> None:
    assert beginning(parser, prompt) is begins


def test_the_kind_of_a_model_shows_in_its_template() -> None:
    sources = [QWEN_THINKING, DEEPSEEK, QWEN, LLAMA, PLAIN, "{{ '<think>' }}{{ x.split('</think>') }}"]
    assert [detect_reasoning(source) for source in sources] == ["qwen3", "deepseek_r1", None, None, None, "think"]
    assert detect_reasoning(PLAIN, ["<think>", "</think>", "<x>"]) == "think"
