"""`/completion` in llama.cpp's form, against the same requests to OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from engine_watch import EngineWatch
from http_server import Server, events_of
from openai import OpenAI
from raw_http import RawConnection, post

from quire.frontend.http.dialects.llama_cpp.cutoff import Cutoff
from quire.protocol.messages import EventType, FinishReason, StepTrace

PROMPT = "Once upon a time"
GREEDY: Any = {"temperature": 0, "n_predict": 12}
SCHEMA: Any = {
    "type": "object",
    "properties": {"animal": {"enum": ["fox", "crow"]}},
    "required": ["animal"],
    "additionalProperties": False,
}


def ask(server: Server, **fields: Any) -> Any:
    """Return the answer to `PROMPT`, or to another prompt among `fields`."""
    reply = server.request("/completion", {"prompt": PROMPT, **GREEDY, **fields})
    assert reply.status == 200, reply.body
    return reply.json()


def refusal(server: Server, **fields: Any) -> dict[str, Any]:
    """Return the error of a request that is invalid."""
    reply = server.request("/completion", {"prompt": PROMPT, **fields})
    assert reply.status == 400, reply.body
    return reply.error


def text(openai: OpenAI, **fields: Any) -> str:
    """Return the text that OpenAI's API gives for a prompt."""
    given = {"model": "quire-demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, **fields}
    return str(openai.completions.create(**given).choices[0].text)


def test_an_answer_has_the_text_of_openais_and_llama_cpps_fields(server: Server, openai: OpenAI) -> None:
    answer = ask(server, cache_prompt=True)
    expected = openai.completions.create(model="quire-demo", prompt=PROMPT, temperature=0, max_tokens=12)
    assert answer["content"] == expected.choices[0].text
    assert expected.usage is not None
    counts = (answer["tokens_predicted"], answer["tokens_evaluated"])
    assert counts == (12, expected.usage.prompt_tokens)
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert (answer["index"], answer["model"], answer["prompt"], answer["tokens"]) == (0, "quire-demo", PROMPT, [])
    assert (answer["has_new_line"], answer["truncated"]) == (False, False)
    settings = answer["generation_settings"]
    assert (settings["temperature"], settings["n_predict"], settings["n_ctx"]) == (0.0, 12, 2048)
    timings = answer["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == answer["tokens_evaluated"]
    assert timings["predicted_n"] == 12
    assert timings["predicted_per_second"] > 0
    assert server.request("/completions", {"prompt": PROMPT, **GREEDY}).json()["content"] == answer["content"]


def test_events_of_a_stream_add_up_to_the_answer(server: Server) -> None:
    whole = ask(server, return_tokens=True)
    reply = server.request("/completion", {"prompt": PROMPT, **GREEDY, "stream": True, "timings_per_token": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *pieces, last = events_of(reply.body)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert not any(piece["stop"] for piece in pieces)
    assert all(piece["timings"]["predicted_n"] == piece["tokens_predicted"] for piece in pieces)
    assert (last["stop"], last["content"], last["tokens"], last["tokens_predicted"]) == (True, "", [], 12)
    assert last["stop_type"] == whole["stop_type"] == "limit"
    plain = server.request("/completion", {"prompt": PROMPT, **GREEDY, "stream": True})
    assert "timings" not in events_of(plain.body)[0]


def test_a_prompt_may_be_token_ids_or_both_or_an_object(server: Server) -> None:
    begin, end = (server.request("/tokenize", {"content": part}).json()["tokens"] for part in ("Once upon", " a time"))
    whole = ask(server)
    for prompt in ([0, *begin, *end], [0, *begin, " a time"], ["Once upon", *end], {"prompt_string": PROMPT}):
        answer = ask(server, prompt=prompt)
        assert (answer["content"], answer["tokens_evaluated"]) == (whole["content"], whole["tokens_evaluated"]), prompt
    assert ask(server, prompt=[0, *begin, *end])["prompt"] == f"<|begin|>{PROMPT}"


def test_several_prompts_and_completions_are_a_list(server: Server) -> None:
    one, other = ask(server), ask(server, prompt="The fox")
    both = ask(server, prompt=[PROMPT, {"prompt_string": "The fox"}])
    assert [each["content"] for each in both] == [one["content"], other["content"]]
    assert [each["index"] for each in both] == [0, 1]
    two = ask(server, n_cmpl=2)
    assert [each["content"] for each in two] == [one["content"]] * 2
    assert [each.get("prompt") for each in two] == [PROMPT, None]
    assert [each["content"] for each in ask(server, prompt=[PROMPT])] == [one["content"]]
    body = {"prompt": [PROMPT, "The fox"], **GREEDY, "stream": True}
    events = events_of(server.request("/completion", body).body)
    for index, expected in enumerate((one, other)):
        mine = [each for each in events if each["index"] == index]
        assert "".join(each["content"] for each in mine) == expected["content"]
        assert [each["stop"] for each in mine] == [False] * (len(mine) - 1) + [True]


def test_sampling_fields_are_those_of_openais_api(server: Server, openai: OpenAI) -> None:
    given: Any = {
        "temperature": 1.3,
        "seed": 7,
        "top_p": 0.9,
        "top_k": 30,
        "min_p": 0.01,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "n_predict": 40,
    }
    answer = ask(server, **given)
    vllm = {"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.2}
    same = {name: given[name] for name in ("temperature", "seed", "top_p", "presence_penalty", "frequency_penalty")}
    assert answer["content"] == text(openai, **same, max_tokens=40, extra_body=vllm)
    for name, value in {"seed": 8, "top_k": 1, "repeat_penalty": 1.9, "n_predict": 20, "temperature": 0}.items():
        assert ask(server, **{**given, name: value})["content"] != answer["content"], name
    neutral = {**given, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    free = ask(server, **neutral)["content"]
    assert free != answer["content"]
    assert ask(server, **given, repeat_last_n=0)["content"] == free
    assert ask(server, **given, repeat_last_n=-1)["content"] == answer["content"]
    usual = server.request("/completion", {"prompt": PROMPT, **given, "repeat_last_n": 64})
    assert usual.json()["content"] == answer["content"]
    assert usual.headers["x-quire-ignored"] == "repeat_last_n (penalties apply to all tokens)"


def test_samplers_that_are_not_given_are_off(server: Server) -> None:
    given: Any = {"temperature": 0.3, "seed": 3, "top_k": 2, "repeat_penalty": 1.5, "n_predict": 40}
    only = ask(server, **given, samplers=["top_k", "dry", "xtc"])
    assert only["content"] == ask(server, temperature=1, seed=3, top_k=2, top_p=1, n_predict=40)["content"]
    settings = only["generation_settings"]
    assert (settings["temperature"], settings["repeat_penalty"], settings["top_k"]) == (1.0, 1.0, 2)
    every = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    assert ask(server, **given, samplers=every)["content"] == ask(server, **given)["content"]


def test_a_seed_is_repeated_unless_it_means_a_fresh_one(server: Server) -> None:
    given: Any = {"temperature": 1.5, "n_predict": 40}
    assert ask(server, **given, seed=3)["content"] == ask(server, **given, seed=3)["content"]
    for fresh in (-1, 4294967295):
        assert len({ask(server, **given, seed=fresh)["content"] for _ in range(4)}) > 1


def test_the_reason_of_an_end_is_given(server: Server) -> None:
    word = ask(server, n_predict=50, stop=["no such", " child"])
    assert (word["stop_type"], word["stopping_word"]) == ("word", " child")
    assert " child" not in word["content"]
    assert ask(server, n_predict=50, stop=" child")["content"] == word["content"]
    ended = ask(server, json_schema=SCHEMA, n_predict=-1)
    assert (ended["stop_type"], ended["stopping_word"]) == ("eos", "")
    full = ask(server, prompt="and " * 2000, n_predict=10**6, ignore_eos=True)
    assert (full["stop_type"], full["truncated"]) == ("limit", True)
    assert full["tokens_evaluated"] + full["tokens_predicted"] == 2048


def test_a_constraint_is_followed(server: Server) -> None:
    assert json.loads(ask(server, json_schema=SCHEMA, n_predict=-1)["content"])["animal"] in {"fox", "crow"}
    assert ask(server, grammar='root ::= "a fox" | "a crow"', n_predict=-1)["content"] in {"a fox", "a crow"}
    same = 'root ::= ("\\u00e9"{2}){2} start Start\nstart ::= [a-a&&]{1}\nStart ::= "b"{0} "\t"'
    assert ask(server, grammar=same, n_predict=-1)["content"] in {"éééé" + char + "\t" for char in "a&"}
    wrong = refusal(server, grammar='root ::= x\n\nx ::= "a" y')
    assert wrong["param"] == "grammar"
    assert """GBNF, line 3: there is no rule 'y'; the rules are root, x: x ::= "a" y""" in wrong["message"]
    assert refusal(server, json_schema={"type": "no such"})["param"] == "json_schema"
    both = refusal(server, grammar='root ::= "a"', json_schema={})
    assert "grammar and json_schema both constrain the answer" in both["message"]


def test_log_probabilities_are_those_of_openais_api(server: Server, openai: OpenAI) -> None:
    answer = ask(server, n_probs=3)
    expected = openai.completions.create(model="quire-demo", prompt=PROMPT, temperature=0, max_tokens=12, logprobs=3)
    logprobs = expected.choices[0].logprobs
    assert logprobs is not None
    found = answer["completion_probabilities"]
    assert [each["token"] for each in found] == logprobs.tokens
    assert [each["logprob"] for each in found] == logprobs.token_logprobs
    for each, top in zip(found, logprobs.top_logprobs or [], strict=True):
        assert {entry["token"]: entry["logprob"] for entry in each["top_logprobs"]} == top
        assert bytes(each["bytes"]).decode() == each["token"]
    events = events_of(server.request("/completion", {"prompt": PROMPT, **GREEDY, "n_probs": 3, "stream": True}).body)
    streamed = [each for event in events[:-1] for each in event["completion_probabilities"]]
    assert streamed == found


@pytest.mark.parametrize(
    ("text", "fields", "content"),
    [
        ("one two three four", {"stop": [" three"]}, "one two"),
        ("one two three four", {"stop": ["wo th"]}, "one t"),
        ("one two three four", {"stop": ["one"]}, ""),
        ("one two", {"stop": ["two three"]}, "one two"),
        ("a😀 b😀", {"stop": ["b"]}, "a😀 "),
        ("a\n  b\nc", {"n_indent": 2}, "a\n  b\n"),
    ],
)
def test_log_probabilities_are_of_the_tokens_that_the_content_shows(
    server: Server, text: str, fields: dict[str, Any], content: str
) -> None:
    quoted = json.dumps(text, ensure_ascii=False)
    grammar = {"grammar": f"root ::= {quoted}", "n_probs": 1, "n_predict": 40, **fields}
    answer = ask(server, **grammar)
    assert answer["content"] == content
    found = answer["completion_probabilities"]
    shown = b"".join(bytes(each["bytes"]) for each in found).decode()
    assert shown.startswith(content)
    assert sum(len(each["bytes"]) for each in found[:-1]) < len(content.encode()) or not found
    assert text.startswith(shown)
    events = events_of(server.request("/completion", {"prompt": PROMPT, **GREEDY, **grammar, "stream": True}).body)
    assert [each for event in events[:-1] for each in event["completion_probabilities"]] == found
    text_so_far = shown_so_far = ""
    for event in events[:-1]:
        text_so_far += event["content"]
        shown_so_far += b"".join(bytes(each["bytes"]) for each in event["completion_probabilities"]).decode()
        assert shown_so_far.startswith(text_so_far)


def test_biases_are_for_token_ids_and_texts(server: Server) -> None:
    plain = ask(server, return_tokens=True)
    first = plain["tokens"][0]
    banned = ask(server, logit_bias=[[first, False]], return_tokens=True)
    assert first not in banned["tokens"]
    assert ask(server, logit_bias=[[" there", False]], return_tokens=True)["tokens"] == banned["tokens"]
    assert ask(server, logit_bias={str(first): False}, return_tokens=True)["tokens"] == banned["tokens"]
    assert ask(server, logit_bias=[[first, -100.0]], return_tokens=True)["tokens"][0] != first
    likely = ask(server, logit_bias=[[" fox", 100]], n_predict=3)
    assert likely["content"] == " fox" * 3
    for bad in ([[first]], [first, 1.0], [[first, "x"]], [[first, True]], [[1.5, 1]], {"x": None}, [[first, 101]]):
        assert refusal(server, logit_bias=bad)["message"].startswith("logit_bias"), bad
    assert "names token id 1000000" in refusal(server, logit_bias=[[10**6, 1]])["message"]


def test_nothing_is_predicted_where_only_the_prompt_is_wanted(server: Server) -> None:
    for limit in ({"n_predict": 0}, {"n_predict": None, "max_tokens": 0}):
        answer = ask(server, **limit, prompt="A prompt to be cached, which has a page of its own and more. " * 8)
        assert (answer["content"], answer["tokens_predicted"], answer["stop_type"]) == ("", 0, "limit")
    assert answer["tokens_cached"] > 0


def test_only_the_fields_that_a_client_wants(server: Server) -> None:
    answer = ask(server, response_fields=["content", "timings/prompt_n", "generation_settings/n_ctx", "no/such", ""])
    assert set(answer) == {"content", "timings/prompt_n", "generation_settings/n_ctx"}
    assert answer["generation_settings/n_ctx"] == 2048


def test_fields_that_change_nothing_are_accepted(server: Server) -> None:
    plain = ask(server)["content"]
    fields = {
        "dynatemp_range": 0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ["\n"],
        "xtc_probability": 0,
        "xtc_threshold": 0.1,
        "typical_p": 1,
        "top_n_sigma": -1,
        "mirostat": 0,
        "mirostat_tau": 5,
        "mirostat_eta": 0.1,
        "min_keep": 0,
        "n_keep": 4,
        "n_discard": 0,
        "n_cache_reuse": 256,
        "n_indent": 0,
        "id_slot": 0,
        "cache_prompt": False,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 0,
        "lora": [],
        "post_sampling_probs": False,
        "return_progress": False,
        "response_fields": [],
        "logit_bias": [],
        "repeat_last_n": 64,
        "grammar": "",
        "model": "quire-demo",
        "unknown": None,
    }
    assert ask(server, **fields)["content"] == plain
    for name, value in fields.items():
        assert ask(server, **{name: value})["content"] == plain, name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mirostat": 2}, "mirostat is not supported: use temperature"),
        ({"typical_p": 0.5}, "typical_p is not supported"),
        ({"dynatemp_range": 0.5}, "dynatemp_range is not supported"),
        ({"dry_multiplier": 0.8}, "dry_multiplier is not supported"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora[0].id=0 is not the id of an adapter"),
        ({"post_sampling_probs": True}, "post_sampling_probs is not supported"),
        ({"samplers": ["infill"]}, "samplers has 'infill', which is not available"),
        ({"samplers": ["x" * 1000]}, "samplers has 'xxx"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p=2"),
        ({"repeat_penalty": 0}, "repeat_penalty=0"),
        ({"n_probs": 50}, "n_probs=50"),
        ({"n_probs": -1}, "n_probs=-1"),
        ({"n_cmpl": 0}, "n_cmpl=0"),
        ({"n_cmpl": 1025}, "n_cmpl=1025"),
        ({"n_predict": -3}, "n_predict"),
        ({"n_predict": 5, "max_tokens": 6}, "n_predict=5 and max_tokens=6 are the same limit"),
        ({"repeat_last_n": -2}, "repeat_last_n=-2 is out of range"),
        ({"stop": [""]}, "stop="),
        ({"seed": 10**30}, "seed"),
        ({"nonsense": 1}, "nonsense is not a known field"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "prompt is an empty list"),
        ({"prompt": [1, [2]]}, "prompt mixes token ids and prompts"),
        ({"prompt": [10**9]}, "outside the vocabulary"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "prompt.multimodal_data is not supported"),
        ({"prompt": "and " * 5000}, "2048"),
        ({"prompt": [1, "and " * 5000]}, "2048"),
        ({"prompt": [1, *[""] * 10_000]}, "prompt has 10001 token ids and texts, and 6144 are allowed"),
        ({"logit_bias": [["and " * 20_000, 1]]}, "logit_bias, as token ids, "),
        ({"response_fields": ["content"] * 65}, "response_fields"),
    ],
)
def test_what_is_not_supported_is_named(server: Server, fields: dict[str, Any], words: str) -> None:
    assert words in refusal(server, **fields)["message"]


def test_the_name_of_another_model_is_refused(server: Server) -> None:
    assert server.request("/completion", {"prompt": PROMPT, "model": "llama"}).status == 404


def test_lines_that_are_indented_too_little_end_an_answer() -> None:
    def cut(indent: int, *pieces: str) -> tuple[str, bool]:
        cutoff, found = Cutoff(indent, None), ""
        for piece in pieces:
            kept, ended = cutoff.feed(piece)
            found += kept
            if ended:
                return found, True
        return found, False

    assert cut(4, "x = 1\n", "    y = 2\n", "  z\n", "    w") == ("x = 1\n    y = 2\n  ", True)
    assert cut(4, "x\n    y\n\tz") == ("x\n    y\n\t", True)
    assert cut(2, "x\n", " ", " y", "z\n  w") == ("x\n  yz\n  w", False)
    assert cut(2, "x\n\n  y") == ("x\n", True)
    assert cut(0, "x\ny") == ("x\ny", False)


def test_a_line_break_after_some_time_ends_an_answer() -> None:
    now = 0.0
    cutoff = Cutoff(None, 100.0, lambda: now)
    assert cutoff.feed("a\n") == ("a\n", False)
    now = 0.2
    assert cutoff.feed("b") == ("b", False)
    assert cutoff.feed("c\nd") == ("c\nd", True)


@pytest.fixture
def watch(server: Server) -> Iterator[EngineWatch]:
    with EngineWatch(server) as watch:
        yield watch


def test_a_cut_ends_the_request(server: Server, watch: EngineWatch) -> None:
    """A first line without blanks, then an indented one, then any: cut at the third."""
    lines = 'root ::= "a\\n    b\\nc" [a-z ]{900,}'
    connection = RawConnection(server.url).send(
        post("/completion", {"prompt": PROMPT, "grammar": lines, "n_indent": 4, "n_predict": 1000})
    )
    number = watch.event(EventType.SCHEDULED).number  # the cut may come before a step that decodes

    def has_ended(step: StepTrace) -> bool:
        return any(event.number == number and event.type is EventType.FINISHED for event in step.events)

    [end] = [event for event in watch.until(has_ended)[-1].events if event.type is EventType.FINISHED]
    assert end.finish_reason is FinishReason.ABORT
    answer = connection.reply().json()
    assert (answer["content"], answer["stop_type"]) == ("a\n    b\n", "limit")
    connection.close()


def test_content_types_do_not_matter_but_for_web_pages(server: Server) -> None:
    body = json.dumps({"prompt": PROMPT, **GREEDY}).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.request("/completion", body, headers=form).status == 200
    assert server.request("/completion", body, headers={**form, "Origin": "http://example.com"}).status == 415


def test_a_time_limit_ends_a_request(server: Server) -> None:
    body = {"prompt": PROMPT, **GREEDY}
    for stream in (False, True):
        late = server.request("/completion", {**body, "stream": stream}, headers={"X-Request-Timeout": "0.000001"})
        assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
