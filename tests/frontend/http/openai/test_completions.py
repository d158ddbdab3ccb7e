"""`/v1/completions` and `/v1/chat/completions` through OpenAI's client."""

from __future__ import annotations

from typing import Any

import pytest
from http_server import Server, events_of
from openai import BadRequestError, NotFoundError, OpenAI

from quire.frontend import LLM, SamplingParams

PROMPT = "Once upon a time"
GREEDY: Any = {"model": "quire-demo", "temperature": 0, "max_tokens": 12}
TALE: Any = [{"role": "user", "content": "Tell me a tale"}]


@pytest.fixture(scope="module")
def llm(server: Server) -> Any:
    with LLM(engine_address=server.engine_address, tokenizer=None) as llm:
        yield llm


def test_a_completion_has_the_tokens_of_the_python_api(openai: OpenAI, llm: LLM) -> None:
    done = openai.completions.create(prompt=PROMPT, **GREEDY)
    [expected] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    assert done.choices[0].text == expected.outputs[0].text
    assert done.choices[0].finish_reason == "length"
    assert done.object == "text_completion"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(expected.prompt_token_ids), 12)
    assert done.usage.total_tokens == done.usage.prompt_tokens + 12


def test_a_prompt_may_be_token_ids_or_a_batch(openai: OpenAI, llm: LLM) -> None:
    tokens = llm.get_tokenizer().encode(PROMPT)
    [text] = openai.completions.create(prompt=PROMPT, **GREEDY).choices
    [ids] = openai.completions.create(prompt=tokens, **GREEDY).choices
    batch = openai.completions.create(prompt=[tokens, tokens[:2]], **GREEDY).choices
    texts = openai.completions.create(prompt=[PROMPT, "The fox"], n=2, **GREEDY).choices
    assert text.text == ids.text == batch[0].text == texts[0].text == texts[1].text
    assert [choice.index for choice in texts] == [0, 1, 2, 3]
    assert batch[1].text != batch[0].text


def test_a_stream_adds_up_to_the_whole(openai: OpenAI) -> None:
    arguments: Any = {**GREEDY, "prompt": [PROMPT, "The fox"], "n": 2, "logprobs": 1}
    whole = openai.completions.create(**arguments)
    texts, ends, offsets = [""] * 4, [0] * 4, [list[int]() for _ in range(4)]
    usage = None
    for chunk in openai.completions.create(stream=True, stream_options={"include_usage": True}, **arguments):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason is not None
            assert choice.logprobs is not None
            offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [1] * 4
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices if choice.logprobs]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 48


def test_the_sampled_token_is_among_the_top_logprobs(openai: OpenAI) -> None:
    wild = {**GREEDY, "temperature": 3.0, "seed": 1}
    [choice] = openai.completions.create(prompt=PROMPT, logprobs=1, **wild).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.top_logprobs is not None
    pairs = list(zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True))
    assert all(token in top for token, top in pairs)
    assert {len(top) for _, top in pairs} <= {1, 2}
    assert any(next(iter(top)) != token for token, top in pairs), "the sampled token follows the likeliest ones"


def test_echo_returns_the_prompt_and_its_logprobs(openai: OpenAI) -> None:
    [plain] = openai.completions.create(prompt=PROMPT, **GREEDY).choices
    [echo] = openai.completions.create(prompt=PROMPT, echo=True, logprobs=2, **GREEDY).choices
    assert echo.text == PROMPT + plain.text
    assert echo.logprobs is not None
    values, tops = echo.logprobs.token_logprobs, echo.logprobs.top_logprobs
    assert values is not None
    assert tops is not None
    assert values[0] is None
    assert all(value is not None and value <= 0 for value in values[1:])
    assert tops[0] is None
    assert all(2 <= len(top) <= 3 for top in tops[1:])
    alone = openai.completions.create(prompt=PROMPT, echo=True, logprobs=2, **{**GREEDY, "max_tokens": 0})
    assert alone.choices[0].text == PROMPT
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.token_logprobs == values[: len(values) - 12]
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_are_places_in_the_text(server: Server, as_ids: bool) -> None:
    body = {"prompt": "a😀b", "max_tokens": 20, "logprobs": 0, "return_tokens_as_token_ids": as_ids}
    answer = {**body, "structured_outputs": {"choice": ["c😀d"]}}
    [choice] = server.request("/v1/completions", answer).json()["choices"]
    assert choice["text"] == "c😀d"
    offsets = choice["logprobs"]["text_offset"]
    assert (offsets[0], set(offsets[1:-1]), offsets[-1]) == (0, {1}, 2)
    [echo] = server.request("/v1/completions", {**answer, "echo": True}).json()["choices"]
    assert echo["text"] == "a😀bc😀d"
    assert echo["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2, *(3 + offset for offset in offsets)]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_stream_begins_with_the_echo(openai: OpenAI, max_tokens: int) -> None:
    prompts = [PROMPT, "The fox"]
    arguments: Any = {**GREEDY, "max_tokens": max_tokens, "prompt": prompts, "n": 2, "logprobs": 1, "echo": True}
    whole = openai.completions.create(**arguments)
    firsts: dict[int, str] = {}
    texts, reasons = [""] * 4, [list[str]() for _ in range(4)]
    logprobs: list[Any] = [([], [], [], []) for _ in range(4)]
    usage = None
    for chunk in openai.completions.create(stream=True, stream_options={"include_usage": True}, **arguments):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            firsts.setdefault(choice.index, choice.text)
            texts[choice.index] += choice.text
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
            if choice.logprobs is not None:
                for parts, more in zip(logprobs[choice.index], fields_of(choice.logprobs), strict=True):
                    parts += more
    assert firsts == {0: prompts[0], 1: prompts[0], 2: prompts[1], 3: prompts[1]}
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [[choice.finish_reason] for choice in whole.choices]
    assert logprobs == [fields_of(choice.logprobs) for choice in whole.choices]
    assert usage == whole.usage


def fields_of(logprobs: Any) -> tuple[Any, ...]:
    return (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)


def test_an_echo_waits_for_the_logprobs_of_the_prompt() -> None:
    """Only the first of two samples computes them, and here the second runs before it, from the cache."""
    prompt = " ".join([PROMPT] * 100)
    with Server.start("--scheduling-policy", "sjf", "--max-num-seqs", "1") as server:
        body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        assert server.request("/v1/completions", body).status == 200
        body |= {"n": 2, "logprobs": 1, "echo": True}
        whole = server.request("/v1/completions", body).json()["choices"]
        events = events_of(server.request("/v1/completions", {**body, "stream": True}).body)
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    for index in (0, 1):
        parts = [choice["logprobs"]["token_logprobs"] for choice in choices if choice["index"] == index]
        assert [each for part in parts for each in part] == whole[index]["logprobs"]["token_logprobs"]


def test_best_of_and_beam_search_return_n_answers(openai: OpenAI) -> None:
    best = openai.completions.create(prompt=PROMPT, model="quire-demo", max_tokens=5, best_of=4, n=2, seed=3)
    assert [choice.index for choice in best.choices] == [0, 1]
    beams = openai.completions.create(
        prompt=PROMPT, model="quire-demo", max_tokens=5, n=3, extra_body={"use_beam_search": True}
    )
    assert len({choice.text for choice in beams.choices}) == 3


def test_vllm_fields_work(server: Server) -> None:
    tokens = server.request("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    body = {"prompt": PROMPT, "max_tokens": 3, "return_token_ids": True, "prompt_logprobs": 1, "ignore_eos": True}
    [choice] = server.request("/v1/completions", body).json()["choices"]
    assert choice["prompt_token_ids"] == tokens
    assert len(choice["token_ids"]) == 3
    assert choice["prompt_logprobs"][0] is None
    assert str(tokens[1]) in choice["prompt_logprobs"][1]
    long = {"max_tokens": 7, "truncate_prompt_tokens": -1}
    for path, given in (
        ("/v1/completions", {"prompt": "a fox " * 3000}),
        ("/v1/completions", {"prompt": ["a fox " * 3000, "a hen " * 3000]}),
        ("/v1/completions", {"prompt": [[5] * 3000, [6] * 3000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a fox " * 3000}]}),
    ):
        usage = server.request(path, {**given, **long, "ignore_eos": True}).json()["usage"]
        count = len(given["prompt"]) if isinstance(given.get("prompt"), list) else 1
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == ((2048 - 7) * count, 7 * count), path
    cut = server.request("/v1/completions", {**body, "truncate_prompt_tokens": 2}).json()["choices"][0]
    assert cut["prompt_token_ids"] == tokens[-2:]
    bare = server.request("/v1/completions", {**body, "add_special_tokens": False}).json()["choices"][0]
    assert bare["prompt_token_ids"] == tokens[1:]
    asked = {"prompt": PROMPT, "max_tokens": 3, "return_token_ids": True, "echo": True, "stream": True}
    first, *others, _ = events_of(server.request("/v1/completions", asked).body)
    assert (first["choices"][0]["prompt_token_ids"], first["choices"][0]["token_ids"]) == (tokens, [])
    assert not [each for each in others if "prompt_token_ids" in each["choices"][0]]
    stopped = {
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 50,
        "stop": ["child"],
        "include_stop_str_in_output": True,
    }
    [choice] = server.request("/v1/completions", stopped).json()["choices"]
    assert choice["text"].endswith("child")
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "child")
    body = {"prompt": PROMPT, "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True}
    [choice] = server.request("/v1/completions", body).json()["choices"]
    assert all(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])


def test_a_chat_stream_adds_up_to_the_whole(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(messages=TALE, logprobs=True, top_logprobs=3, **GREEDY)
    [choice] = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 12
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
    assert bytes(b for entry in choice.logprobs.content for b in entry.bytes or []).decode() == choice.message.content
    text, roles, ends, usages = "", [], [], []
    stream = openai.chat.completions.create(
        messages=TALE, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    for chunk in stream:
        usages.append(chunk.usage)
        for part in chunk.choices:
            text += part.delta.content or ""
            roles.append(part.delta.role)
            ends.append(part.finish_reason)
    assert text == choice.message.content
    assert (roles[0], set(roles[1:])) == ("assistant", {None})
    assert ends[-1] == "length"
    assert set(ends[:-1]) == {None}
    assert set(usages[:-1]) == {None}
    assert usages[-1] == whole.usage


def test_a_predicted_answer_is_the_same_and_counted(openai: OpenAI) -> None:
    arguments: Any = {"model": "quire-demo", "temperature": 0, "max_tokens": 100, "messages": TALE}
    plain = openai.chat.completions.create(**arguments)
    text = plain.choices[0].message.content or ""
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    arguments["stream_options"] = {"include_usage": True}
    parts: Any = [{"type": "text", "text": text[:50]}, {"type": "text", "text": text[50:]}]
    for content in (text, parts):
        for _ in range(20):  # in a busy moment drafts may seem not to pay
            *chunks, last = openai.chat.completions.create(
                stream=True, prediction={"type": "content", "content": content}, **arguments
            )
            assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
            assert last.usage is not None
            details = last.usage.completion_tokens_details
            assert details is not None
            if details.accepted_prediction_tokens:
                break
        assert 0 < (details.accepted_prediction_tokens or 0) < last.usage.completion_tokens
        assert details.rejected_prediction_tokens is not None
    with pytest.raises(BadRequestError, match="prediction"):
        openai.chat.completions.create(prediction={"type": "guess"}, **arguments)  # type: ignore[call-overload]


def test_a_repeated_prompt_is_found_in_the_cache(openai: OpenAI) -> None:
    long: Any = [{"role": "user", "content": PROMPT * 30}]
    first = openai.chat.completions.create(messages=long, **GREEDY).usage
    again = openai.chat.completions.create(messages=long, **GREEDY).usage
    assert first is not None
    assert again is not None
    assert again.prompt_tokens_details is not None
    assert again.prompt_tokens_details.cached_tokens == (first.prompt_tokens - 1) // 32 * 32
    salted = openai.chat.completions.create(messages=long, extra_body={"cache_salt": "mine"}, **GREEDY).usage
    assert salted is not None
    assert salted.prompt_tokens_details is not None
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_roles_parts_and_limits_of_openai(openai: OpenAI) -> None:
    parts: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a tale"}]},
    ]
    done = openai.chat.completions.create(model="quire-demo", messages=parts, max_completion_tokens=5)
    assert done.usage is not None
    assert done.usage.completion_tokens == 5
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(BadRequestError, match="image_url"):
        openai.chat.completions.create(messages=picture, **GREEDY)


def test_errors_are_the_clients_own_exceptions(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError) as unknown:
        openai.chat.completions.create(model="gpt-5", messages=TALE)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    with pytest.raises(BadRequestError) as refused:
        openai.completions.create(prompt="x", suffix="y", **GREEDY)
    assert refused.value.param == "suffix"
    assert "fill-in-the-middle" in str(refused.value)
    with pytest.raises(BadRequestError, match="max_tokens=99999 with a prompt of"):
        openai.chat.completions.create(messages=TALE, **{**GREEDY, "max_tokens": 99999})
    with pytest.raises(BadRequestError, match="temperature"):
        openai.chat.completions.create(messages=TALE, stream=True, **{**GREEDY, "temperature": -1})


def test_an_unsupported_field_may_have_its_neutral_value(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for value, status in ((None, 200), (False, 200), (0, 400), (True, 400)):
        assert server.request("/v1/completions", {**body, "store": value}).status == status


def test_models_are_listed_and_found(openai: OpenAI) -> None:
    [model] = openai.models.list().data
    assert model.id == "quire-demo"
    assert openai.models.retrieve("quire-demo").id == "quire-demo"
    with pytest.raises(NotFoundError):
        openai.models.retrieve("other")


def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    reply = server.request("/tokenize", {"prompt": PROMPT, "return_token_strs": True, "add_special_tokens": False})
    answer = reply.json()
    assert "".join(answer["token_strs"]) == PROMPT
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 2048
    assert server.request("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"] == PROMPT
    chat = server.request("/tokenize", {"messages": TALE}).json()["tokens"]
    assert server.request("/detokenize", {"tokens": chat}).json()["prompt"].endswith("<|assistant|>")
    assert server.request("/detokenize", {"tokens": [99999]}).status == 400


def test_a_stream_ends_with_done_and_nothing_after(server: Server) -> None:
    events = events_of(server.request("/v1/completions", {"prompt": "x", "max_tokens": 2, "stream": True}).body)
    assert events[-1] == "[DONE]"
    assert "usage" not in events[0]


def test_a_chat_that_adds_special_tokens_gets_no_second_bos(server: Server) -> None:
    body = {"messages": TALE, "max_tokens": 1, "return_token_ids": True}
    plain, added = (
        server.request("/v1/chat/completions", {**body, **more}).json()["prompt_token_ids"]
        for more in ({}, {"add_special_tokens": True})
    )
    tokens = server.request("/tokenize", {"messages": TALE, "add_special_tokens": True}).json()["tokens"]
    assert added == tokens == plain
