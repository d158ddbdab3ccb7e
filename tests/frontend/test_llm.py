"""`LLM` with a real engine process and the demo model."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from patience import PATIENCE

from quire.frontend import (
    LLM,
    EngineDeadError,
    EngineStartError,
    LLMEngine,
    PoolingParams,
    PromptType,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.frontend.client.engine_client import EngineRefusal

if TYPE_CHECKING:
    from conftest import EngineFactory

PROMPTS = ["Once upon a time", "There was a king who", "The fox said to the goose", "In a forest far away"]


def greedy(**fields: Any) -> SamplingParams:
    """Return parameters for deterministic tokens."""
    return SamplingParams(**{"temperature": 0.0, "seed": 1, "max_tokens": 24, "ignore_eos": True, **fields})


@pytest.fixture(scope="module")
def llm(module_engine: EngineFactory, demo_model: Path) -> LLM:
    return module_engine(demo_model, seed=7)


def one(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    """Return the output of a single prompt."""
    [output] = llm.generate(prompt, params)
    return output


def test_all_forms_of_a_prompt_give_the_same_result(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    forms: list[Any] = [PROMPTS[0], {"prompt": PROMPTS[0]}, ids, tuple(ids), {"prompt_token_ids": ids}]
    alone = [one(llm, form, greedy()) for form in forms]
    together = llm.generate(forms, greedy())
    assert {output.outputs[0].text for output in alone + together} == {alone[0].outputs[0].text}
    assert [output.prompt for output in together] == [PROMPTS[0], PROMPTS[0], None, None, None]
    assert all(output.prompt_token_ids == ids for output in together)


def test_results_come_in_the_order_of_the_prompts_whatever_ends_first(llm: LLM) -> None:
    params = [greedy(max_tokens=count) for count in (40, 1, 20, 5)]
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40, 1, 20, 5]
    for prompt, each, output in zip(PROMPTS, params, outputs, strict=True):
        assert output.finished
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].text == one(llm, prompt, each).outputs[0].text


def test_the_text_is_that_of_the_tokens(llm: LLM) -> None:
    for output in llm.generate(PROMPTS, greedy()):
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        assert llm.get_tokenizer().decode(ids) == (output.prompt or "") + output.outputs[0].text


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], greedy()) == []


def test_a_stop_string_cuts_the_text_and_ends_the_request(llm: LLM) -> None:
    whole = one(llm, PROMPTS[0], greedy()).outputs[0]
    stop = whole.text[len(whole.text) // 2 :][:3]
    cut = one(llm, PROMPTS[0], greedy(stop=[stop])).outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    included = one(llm, PROMPTS[0], greedy(stop=[stop], include_stop_str_in_output=True)).outputs[0]
    assert included.text == cut.text + stop


def test_a_stop_string_as_plain_text_is_one_stop_string(llm: LLM) -> None:
    stop = one(llm, PROMPTS[0], greedy()).outputs[0].text[4:7]
    assert one(llm, PROMPTS[0], greedy(stop=stop)).outputs[0].stop_reason == stop


def test_min_tokens_outlast_a_stop_string(llm: LLM) -> None:
    whole = one(llm, PROMPTS[0], greedy()).outputs[0]
    output = one(llm, PROMPTS[0], greedy(stop=[whole.text[:2]], min_tokens=8)).outputs[0]
    assert len(output.token_ids) > 8


def test_a_stop_token_ends_the_request_and_has_no_text(llm: LLM) -> None:
    whole = one(llm, PROMPTS[0], greedy()).outputs[0]
    token = whole.token_ids[6]
    output = one(llm, PROMPTS[0], greedy(stop_token_ids=[token])).outputs[0]
    count = whole.token_ids.index(token) + 1
    assert output.token_ids == whole.token_ids[:count]
    assert (output.finish_reason, output.stop_reason) == ("stop", token)
    assert output.text == one(llm, PROMPTS[0], greedy(max_tokens=count)).outputs[0].text[: len(output.text)]
    assert len(output.text) < len(whole.text)


def test_best_of_returns_the_most_likely_per_token(llm: LLM) -> None:
    def sampled(**fields: Any) -> RequestOutput:
        return one(llm, PROMPTS[0], greedy(seed=5, temperature=1.0, **fields))

    each = sampled(n=6, logprobs=0, stop=["."], ignore_eos=False).outputs
    each.sort(key=lambda found: -(found.cumulative_logprob or 0.0) / len(found.token_ids))
    ranked = [found.token_ids for found in each]
    best = sampled(n=2, best_of=6, stop=["."], ignore_eos=False).outputs
    assert [found.token_ids for found in best] == ranked[:2]
    assert [(found.index, found.logprobs) for found in best] == [(0, None), (1, None)]
    [alone] = sampled(best_of=6, logprobs=1, stop=["."], ignore_eos=False).outputs
    assert alone.token_ids == ranked[0]
    assert len(alone.logprobs or []) == len(alone.token_ids)


def test_completion_i_of_n_is_that_of_the_seed_plus_i(llm: LLM) -> None:
    output = one(llm, PROMPTS[0], greedy(n=3, seed=5, temperature=1.0))
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for i, completion in enumerate(output.outputs):
        alone = one(llm, PROMPTS[0], greedy(seed=5 + i, temperature=1.0)).outputs[0]
        assert completion.token_ids == alone.token_ids
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


def test_requests_without_a_seed_take_it_from_the_llm(demo_model: Path, engine: EngineFactory) -> None:
    first, second = (engine(demo_model, seed=3) for _ in range(2))
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    texts = [[output.outputs[0].text for output in llm.generate(PROMPTS[:1] * 4, params)] for llm in (first, second)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 4


def test_logprobs_are_returned_as_requested(llm: LLM) -> None:
    output = one(llm, PROMPTS[0], greedy(logprobs=2, prompt_logprobs=1, max_tokens=5))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [next(iter(position)) for position in completion.logprobs] == completion.token_ids
    assert all(len(position) in {2, 3} for position in completion.logprobs)
    chosen = [position[token] for position, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(each.logprob for each in chosen))
    assert [each.decoded_token for each in chosen] == [llm.get_tokenizer().token_text(i) for i in completion.token_ids]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    given = [next(iter(position)) for position in output.prompt_logprobs[1:] if position is not None]
    assert given == output.prompt_token_ids[1:]


def test_logprobs_are_absent_unless_requested(llm: LLM) -> None:
    output = one(llm, PROMPTS[0], greedy())
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_the_times_of_a_request_follow_each_other(llm: LLM) -> None:
    metrics = one(llm, PROMPTS[0], greedy()).metrics
    times = [
        metrics.arrival_time,
        metrics.queued_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
    ]
    assert None not in times
    assert times == sorted(time for time in times if time is not None)
    assert metrics.finished_time == metrics.last_token_time


def test_a_chat_is_the_prompt_that_its_template_renders(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a tale about a fox"}]
    [answer] = llm.chat(messages, greedy())
    assert answer.prompt is not None
    assert messages[0]["content"] in answer.prompt
    [same] = llm.generate({"prompt_token_ids": answer.prompt_token_ids}, greedy())
    assert same.outputs[0].text == answer.outputs[0].text
    assert [each.prompt for each in llm.chat([messages, messages], greedy())] == [answer.prompt] * 2
    with pytest.raises(ValueError, match=r"chat_template_kwargs\.messages is not a variable"):
        llm.chat(messages, greedy(), chat_template_kwargs={"messages": []})
    [other] = llm.chat(messages, greedy(), chat_template="{{ messages[0].content }}!")
    assert other.prompt == "Tell me a tale about a fox!"


def test_the_tools_of_a_chat_are_those_of_its_template(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    messages = [{"role": "user", "content": "Look at Rome"}]
    template = "{% for tool in tools %}<{{ tool.function.name }}>{% endfor %}{{ messages[0].content }}[TOOL_CALLS]"
    options: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    for chat_template, tool_parser in ((template, "generic"), (template + "{# [AVAILABLE_TOOLS] #}", "mistral")):
        assert llm.answer_format_of(chat_template).tool_parser == tool_parser
        [answer] = llm.chat(messages, greedy(max_tokens=60), chat_template=chat_template, **options)
        assert answer.prompt == "<look>Look at Rome[TOOL_CALLS]"
        [message] = llm.parse(answer, chat_template=chat_template, **options)
        [call] = message.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("look", {"city": "Rome"})
    [described] = llm.chat(messages, greedy(max_tokens=60), chat_template="{{ messages[0].content }}", **options)
    assert described.prompt is not None
    assert "You can call these functions" in described.prompt


def test_a_prompt_can_be_truncated_and_go_without_special_tokens(llm: LLM) -> None:
    ids, bare = (llm.get_tokenizer().encode(PROMPTS[0], special) for special in (True, False))
    assert len(ids) > len(bare) > 2
    [plain] = llm.generate(PROMPTS[0], greedy(), add_special_tokens=False)
    assert (plain.prompt_token_ids, plain.prompt) == (bare, PROMPTS[0])
    prompts: list[PromptType] = [PROMPTS[0], [5] * 5000]
    outputs = llm.generate(prompts, greedy(max_tokens=1), truncate_prompt_tokens=2)
    assert [output.prompt_token_ids for output in outputs] == [ids[-2:], [5, 5]]
    [cut] = llm.generate([5] * 5000, greedy(max_tokens=1), truncate_prompt_tokens=-1)
    assert len(cut.prompt_token_ids) == llm._engine.engines.ready.max_model_len - 1
    context = llm._engine.engines.ready.max_model_len
    limits = [SamplingParams(max_tokens=each) for each in (40, 1, context - 1)]
    limits += [SamplingParams(max_tokens=each, stop_token_ids=[*range(2048)]) for each in (None, context, 10**6)]
    rooms = llm.generate([[5] * 5000] * 6, limits, truncate_prompt_tokens=-1)
    quarter = context // 4
    assert [context - len(each.prompt_token_ids) for each in rooms] == [40, 1, context - 1, quarter, quarter, quarter]
    assert len(rooms[0].outputs[0].token_ids) <= 40
    conversation = [{"role": "user", "content": "a fox " * 3000}]
    [talk] = llm.chat(conversation, greedy(max_tokens=9), truncate_prompt_tokens=-1)
    assert len(talk.prompt_token_ids) == context - 9
    [vector] = llm.embed(PROMPTS[0], truncate_prompt_tokens=2)
    assert vector.outputs == llm.embed([ids[-2:]])[0].outputs
    messages = [{"role": "user", "content": PROMPTS[0]}]
    [whole], [last], [with_special] = (
        llm.chat(messages, greedy(max_tokens=1), **options)
        for options in ({}, {"truncate_prompt_tokens": 3}, {"add_special_tokens": True})
    )
    assert last.prompt_token_ids == whole.prompt_token_ids[-3:]
    assert with_special.prompt_token_ids == whole.prompt_token_ids  # the template writes bos
    [rendered] = llm.generate(whole.prompt or "", greedy(max_tokens=1))
    assert rendered.prompt_token_ids == whole.prompt_token_ids
    for last_tokens in (0, -2, 1.5, "2"):
        with pytest.raises(RequestError, match=r"prompt 0: truncate_prompt_tokens=.* leaves no tokens; give 1 or more"):
            llm.generate("a", truncate_prompt_tokens=last_tokens)  # type: ignore[arg-type]


def test_an_answer_longer_than_the_context_ends_where_that_is_full(llm: LLM) -> None:
    context = llm._engine.engines.ready.max_model_len
    prompts: list[PromptType] = [[5] * (context - 10), PROMPTS[0], [5] * (context - 1)]
    params = [
        SamplingParams(max_tokens=100, ignore_eos=True, min_tokens=50),
        greedy(),
        SamplingParams(max_tokens=10**9, ignore_eos=True),
    ]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert [len(output.token_ids) for output in outputs] == [10, 24, 1]
    assert [output.finish_reason for output in outputs] == ["length"] * 3
    messages = [{"role": "user", "content": [{"type": "text", "text": "fox"}]}]
    [talk] = llm.chat(messages, greedy(max_tokens=context))
    assert talk.outputs[0].finish_reason in ("stop", "length")
    with LLMEngine(engine_address=llm.engine_address) as engine:
        engine.add_request(
            "a", {"prompt_token_ids": [5] * (context - 2)}, SamplingParams(max_tokens=3, ignore_eos=True)
        )
        while engine.has_unfinished_requests():
            [output] = engine.step()
    assert isinstance(output, RequestOutput)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (2, "length")


def test_without_detokenization_there_is_no_text(llm: LLM) -> None:
    output = one(llm, PROMPTS[0], greedy(detokenize=False)).outputs[0]
    assert (output.text, len(output.token_ids)) == ("", 24)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5}, {"temperature": 1.5, "top_k": 40, "logprobs": 1}])
def test_no_tokens_write_a_bad_word(llm: LLM, sampling: dict[str, Any]) -> None:
    """The words are parts of what is written without them: within a token, or across several."""
    bad_words: list[str] = []
    for size in (1, 3, 2, 9, 4, 5, 3, 7):
        text = one(llm, PROMPTS[0], greedy(bad_words=bad_words, max_tokens=60, **sampling)).outputs[0].text
        assert not [word for word in bad_words if word in text]
        middle = len(text) // 2
        bad_words.append(text[middle : middle + size].strip() or "the")
    assert "w" in one(llm, PROMPTS[1], greedy(bad_words=["who"], max_tokens=60)).outputs[0].text


def test_a_bad_word_that_begins_with_a_space_is_not_written_at_the_start(llm: LLM) -> None:
    text = one(llm, PROMPTS[0], greedy()).outputs[0].text
    word = text.split()[0]
    without = one(llm, PROMPTS[0], greedy(bad_words=[f" {word}"], max_tokens=60)).outputs[0].text
    assert not f" {without}".startswith(f" {word}")
    assert f" {word}" not in without


def test_bad_words_of_any_characters_are_kept_out(llm: LLM) -> None:
    words = ['"', "\\", "a\nb", "\0x", "\x7f", "é", "a/b", "😀", "$", "\\n", "|", ")", "%"]
    outputs = llm.generate([f"Write {word!r}" for word in words], greedy(bad_words=[*words, "e"], temperature=2.0))
    texts = [output.outputs[0].text for output in outputs]
    assert all(texts)
    assert not [text for text in texts if any(word in text for word in [*words, "e"])]


def test_many_and_long_bad_words_leave_other_requests_as_they_are(llm: LLM) -> None:
    many = greedy(bad_words=[f"{index}the{'ab' * (index % 3)}" for index in range(1000)])
    long = greedy(bad_words=["ab" * 4000])
    alone = [one(llm, prompt, greedy()) for prompt in PROMPTS]
    together = llm.generate([*PROMPTS, *PROMPTS[:2]], [*[greedy()] * len(PROMPTS), many, long])
    assert [output.outputs[0].token_ids for output in together[:4]] == [one.outputs[0].token_ids for one in alone]
    assert together[4].outputs[0].token_ids == alone[0].outputs[0].token_ids  # which has none of them
    assert together[5].outputs[0].token_ids == alone[1].outputs[0].token_ids


def test_bad_words_and_a_regular_expression_work_together(llm: LLM) -> None:
    answer = StructuredOutputsParams(regex="(who|what)")
    text = one(llm, PROMPTS[1], greedy(structured_outputs=answer, bad_words=["who"])).outputs[0].text
    assert text == "what"


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "prompt 2: the prompt is empty"),
    ({"prompt_token_ids": []}, {}, "prompt 2: the prompt is empty"),
    ([5, 999_999], {}, "prompt 2: token id 999999 at position 1"),
    ([5, -1], {}, "token id -1 at position 1"),
    ([5, "x"], {}, "'x' \\(str\\)"),
    (3, {}, "a prompt is a int"),
    ({"prompt": "a", "multi_modal_data": {"image": 1}}, {}, "multi_modal_data"),
    ([5] * 5000, {}, "context length"),
    ("a", {"max_tokens": 0}, "max_tokens=0"),
    ("a", {"temperature": float("nan")}, "temperature=nan"),
    ("a", {"top_p": -0.1}, "top_p=-0.1"),
    ("a", {"logit_bias": {99_999_999: 1.0}}, "logit_bias"),
    ("a", {"temperature": "hot"}, "temperature='hot'"),
]


@pytest.mark.parametrize(("prompt", "fields", "message"), BAD)
def test_invalid_input_is_rejected_with_its_field_before_anything_runs(
    llm: LLM, prompt: Any, fields: dict[str, Any], message: str
) -> None:
    step = llm.stats()["step"]
    params = [greedy(), greedy(), SamplingParams(**fields), greedy()]
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate(["a", "b", prompt, "c"], params)
    assert caught.value.index == 2
    assert llm.stats()["step"] == step


def test_unknown_sampling_fields_and_wrong_counts_are_rejected(llm: LLM) -> None:
    with pytest.raises(TypeError, match="use_beam_search"):
        SamplingParams(use_beam_search=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="3 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [greedy()] * 3)
    with pytest.raises(TypeError, match="dict"):
        llm.generate("a", {"temperature": 0.0})  # type: ignore[arg-type]


def test_embeddings_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    mean = PoolingParams(pooling_type="mean")
    prompts: list[PromptType] = [*PROMPTS, [7, 8]]
    outputs = llm.embed(prompts, [mean, *[PoolingParams()] * len(PROMPTS)], use_tqdm=False)
    assert [output.prompt for output in outputs] == [*PROMPTS, None]
    assert [output.outputs for output in outputs[:2]] == [
        llm.embed(PROMPTS[0], mean)[0].outputs,
        llm.embed(PROMPTS[1])[0].outputs,
    ]
    assert all(sum(v * v for v in output.outputs.embedding) == pytest.approx(1) for output in outputs)


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([7] * 5000, {}, "prompt 1: the prompt has 5000 tokens, and this model's maximum context length is"),
        ([], {}, "prompt 1: the prompt is empty"),
        ("a", {"dimensions": 100_000}, "prompt 1: dimensions=100000 is out of range"),
        ("a", {"dimensions": "3"}, "prompt 1: dimensions='3' can't be used"),
        ("a", {"pooling_type": "first"}, "prompt 1: pooling_type='first' is not known; it can be 'last', 'mean'"),
    ],
)
def test_an_invalid_embedding_is_named_and_nothing_runs(
    llm: LLM, prompt: Any, fields: dict[str, Any], message: str
) -> None:
    step = llm.stats()["step"]
    with pytest.raises(RequestError, match=message):
        llm.embed(["a", prompt], [PoolingParams(), PoolingParams(**fields)])
    with pytest.raises(ValueError, match="3 pooling_params for 2 prompts"):
        llm.embed(["a", "b"], [PoolingParams()] * 3)
    with pytest.raises(TypeError, match="dict"):
        llm.embed("a", {"dimensions": 3})  # type: ignore[arg-type]
    assert llm.stats()["step"] == step


def test_an_interrupted_call_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    update = llm._table.update

    def interrupt(*args: Any) -> Any:
        update(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._table, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(max_tokens=1500))
    monkeypatch.undo()
    assert not llm._table
    assert one(llm, PROMPTS[0], greedy()).finished


def test_outputs_of_dropped_requests_do_not_affect_the_next(llm: LLM) -> None:
    llm._inbox.put(EngineRefusal(EngineDeadError("the engine had forgotten this client")))
    assert one(llm, PROMPTS[0], greedy()).finished


def test_calls_from_several_threads_each_get_their_own(llm: LLM) -> None:
    expected = [output.outputs for output in llm.generate(PROMPTS, greedy())]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        outputs = list(pool.map(lambda prompt: one(llm, prompt, greedy()).outputs, PROMPTS))
    assert outputs == expected


def test_several_clients_share_an_engine(llm: LLM) -> None:
    with LLM(engine_address=llm.engine_address) as other:
        assert other.get_tokenizer().path == llm.get_tokenizer().path
        assert other.stats()["clients"] == 2
        texts = {one(each, PROMPTS[0], greedy()).outputs[0].text for each in (llm, other)}
        assert len(texts) == 1
    assert one(llm, PROMPTS[0], greedy()).finished


def test_options_of_the_engine_cannot_be_set_when_attaching(llm: LLM) -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        LLM(engine_address=llm.engine_address, max_num_seqs=3)


def test_token_ids_need_no_tokenizer(llm: LLM) -> None:
    with LLM(engine_address=llm.engine_address, skip_tokenizer_init=True) as bare:
        assert len(one(bare, [5, 6], greedy()).outputs[0].token_ids) == 24
        with pytest.raises(RequestError, match="there is no tokenizer"):
            bare.generate("a")


def test_a_model_that_cannot_be_loaded_raises_the_message_of_the_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"config\.json"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_an_engine_that_is_killed_is_reported_with_its_signal(demo_model: Path) -> None:
    with LLM(str(demo_model), num_pages=64, max_restarts=0) as llm:
        killer = threading.Timer(0.0, os.kill, (llm._engine.engines.ready.engine_pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate(PROMPTS * 64, greedy(max_tokens=1900))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            llm.generate("a", greedy())


def test_an_engine_that_is_stopped_ends_with_its_llm_without_being_killed(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.frontend.client.launcher.KILL_SECONDS", math.inf)
    with LLM(str(demo_model), num_pages=64) as llm:
        pid = llm._engine.engines.ready.engine_pid
        os.kill(pid, signal.SIGSTOP)
    assert not Path(f"/proc/{pid}").exists()


def test_an_llm_that_is_dropped_ends_its_engine(demo_model: Path) -> None:
    llm = LLM(str(demo_model), num_pages=64)
    pid, folder = llm._engine.engines.ready.engine_pid, Path(llm.engine_address.removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    del llm
    assert not Path(f"/proc/{pid}").exists()
    assert not folder.exists()


PROGRAM = """
import sys
from quire.frontend import LLM, SamplingParams
llm = LLM(sys.argv[1], num_pages=64)
print(llm._engine.engines.ready.engine_pid, llm.engine_address, flush=True)
if sys.stdin.readline() == "generate":
    while True:
        llm.generate(["a", "b"], SamplingParams(max_tokens=1000, ignore_eos=True))
"""


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_ends_takes_its_engine_with_it(demo_model: Path, number: signal.Signals | None) -> None:
    command = [sys.executable, "-c", PROGRAM, str(demo_model)]
    # Errors go to a file: the engine would hold a pipe open.
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stdin is not None
        with process.stdout as stdout:
            pid, address = stdout.readline().decode().split()
        engine = os.pidfd_open(int(pid))
        with process.stdin as stdin:
            stdin.write(b"end\n" if number is None else b"generate")
        if number is not None:
            process.send_signal(number)
        try:
            assert process.wait(PATIENCE) == (0 if number is None else -number)
        finally:
            process.kill()
        assert select.select([engine], [], [], PATIENCE)[0], "the engine has outlived its program"
        os.close(engine)
    assert not Path(address.removeprefix("ipc://")).parent.exists()
