"""Adapters of requests in Python: any mix of them, in one batch, by streams, and after the engine has died."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import EngineFactory
from demo_adapters import write_demo_adapter
from engine_signals import hit_soon

from quire.frontend import LLM, AsyncLLM, LLMEngine, LoRARequest, RequestError, SamplingParams
from quire.frontend.beam_search import BeamSearchParams

PROMPT = "Once upon a time there was a fox"
PARAMS = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(name, number, str(write_demo_adapter(folder / name, number)))
        for number, name in enumerate(("tales", "songs"), 1)
    ]


@pytest.fixture(scope="module")
def llm(module_engine: EngineFactory, demo_model: Path) -> LLM:
    return module_engine(demo_model, enable_lora=True, max_loras=2)


def tokens(llm: LLM, prompts: Any, adapter: Any, **options: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, PARAMS, lora_request=adapter, use_tqdm=False, **options)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_mix_of_adapters_equals_each_alone(llm: LLM, adapters: list[LoRARequest]) -> None:
    given = [adapters[0], None, adapters[1], None, adapters[0]]
    alone = [tokens(llm, PROMPT, adapter)[0] for adapter in given]
    assert tokens(llm, [PROMPT] * len(given), given) == alone
    assert alone[0] == alone[4]
    assert alone[1] == alone[3]
    assert len({tuple(each) for each in alone}) == 3


def test_one_adapter_is_for_all_prompts(llm: LLM, adapters: list[LoRARequest]) -> None:
    prompts = [PROMPT, "The king had a daughter"]
    assert tokens(llm, prompts, adapters[0]) == [tokens(llm, prompt, adapters[0])[0] for prompt in prompts]


def test_a_name_does_not_change_an_answer(llm: LLM, adapters: list[LoRARequest]) -> None:
    other = LoRARequest("other", 77, adapters[0].lora_path)
    assert tokens(llm, PROMPT, other) == tokens(llm, PROMPT, adapters[0])


def test_every_method_takes_adapters(llm: LLM, adapters: list[LoRARequest]) -> None:
    def differ(call: Any) -> bool:
        return bool(call(None) != call(adapters[0]))

    messages = [{"role": "user", "content": "Tell me a tale."}]
    assert differ(lambda each: llm.chat(messages, PARAMS, False, each)[0].outputs[0].token_ids)
    assert differ(lambda each: llm.embed(PROMPT, lora_request=each)[0].outputs.embedding)
    assert differ(lambda each: llm.encode(PROMPT, pooling_task="embed", lora_request=each)[0].outputs.data)
    assert differ(lambda each: llm.score(PROMPT, "A fox", lora_request=each)[0].outputs.score)
    beams = BeamSearchParams(beam_width=2, max_tokens=8)
    assert differ(lambda each: llm.beam_search(PROMPT, beams, lora_request=each)[0].sequences[0].tokens)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ([None, None], "there are 2 lora_request for 1 prompts"),
        ("tales", "there are 5 lora_request for 1 prompts"),
        (["tales"], "lora_request is a str; give a LoRARequest, or None"),
        (LoRARequest("a", 1, "/adapters/none"), "/adapters/none has no adapter_config.json|no such|does not exist"),
    ],
)
def test_what_is_no_adapter_is_rejected(llm: LLM, adapter: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(PROMPT, PARAMS, lora_request=adapter)


def test_a_request_fails_where_its_adapter_may_not_be_named(
    engine: EngineFactory, demo_model: Path, adapters: list[LoRARequest]
) -> None:
    without = engine(demo_model)
    with pytest.raises(RequestError, match="the engine was started without adapters; start it with enable_lora=True"):
        tokens(without, PROMPT, adapters[0])
    one = engine(demo_model, lora_modules=f"tales={adapters[0].lora_path}")
    assert without.list_loras() == {}
    assert tokens(one, PROMPT, adapters[0]) != tokens(one, PROMPT, None)
    with pytest.raises(RequestError, match="none of the engine's lora_modules"):
        tokens(one, PROMPT, adapters[1])
    assert one.list_loras() == {"tales": adapters[0].lora_path}
    tokens(one, PROMPT, LoRARequest("same", 5, adapters[0].lora_path))
    assert one.list_loras() == dict.fromkeys(("tales", "same"), adapters[0].lora_path)


@pytest.mark.parametrize("count", [1, 2])
def test_the_answer_goes_on_with_its_adapter_when_the_engine_is_killed(
    engine: EngineFactory, demo_model: Path, adapters: list[LoRARequest], count: int
) -> None:
    """Of one engine that is started again, and of two."""
    llm = engine(demo_model, enable_lora=True, data_parallel_size=count)
    given = [*adapters, None, adapters[0]]
    expected = tokens(llm, [PROMPT] * 4, given)
    hit_soon(llm, signal.SIGKILL)
    assert tokens(llm, [PROMPT] * 4, given) == expected


def test_streams_and_steps_take_adapters(llm: LLM, adapters: list[LoRARequest]) -> None:
    expected = tokens(llm, PROMPT, adapters[0])[0]

    async def stream() -> list[int]:
        async with AsyncLLM(engine_address=llm.engine_address) as attached:
            found: list[int] = []
            async for output in attached.generate(PROMPT, PARAMS, lora_request=adapters[0], output_kind="delta"):
                found += output.outputs[0].token_ids
            return found

    assert asyncio.run(stream()) == expected
    steps = LLMEngine(engine_address=llm.engine_address)
    steps.add_request("1", PROMPT, PARAMS, None, adapters[0])
    outputs = []
    while steps.has_unfinished_requests():
        outputs += steps.step()
    assert outputs[-1].outputs[0].token_ids == expected  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", 1, "/a"), "'' is no name of an adapter"),
        (("a/../b", 1, "/a"), "is no name of an adapter"),
        (("a\n", 1, "/a"), "is no name of an adapter"),
        (("a,b", 1, "/a"), "is no name of an adapter; give .* without commas"),
        (("a" * 257, 1, "/a"), "give 1 to 256 printable characters"),
        (("a", 0, "/a"), "lora_int_id=0 is no id"),
        (("a", 1, ""), "lora_path is empty"),
        (("a", 1, "/" + "a" * 4096), "lora_path has 4097 characters"),
    ],
)
def test_a_lora_request_names_the_field_at_fault(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoRARequest(*fields)


def test_it_has_vllms_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.lora.request import LoRARequest as Imported

    assert Imported is LoRARequest
    monkeypatch.chdir(tmp_path)
    made = LoRARequest(lora_name="tales", lora_int_id=3, lora_path="tales")
    assert (made.name, made.adapter_id, made.path) == ("tales", 3, str(tmp_path / "tales"))
