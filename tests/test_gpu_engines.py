"""Engines with a GPU, which is emulated: answers are those of the CPU, and streams move from one to the other."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import emulated_gpu
import numpy as np
import pooled_checkpoints
import pytest
import tiny_model
from adapter_files import write_adapter
from engine_pairs import ask, pair
from engine_process import DealerClient, EngineUnderTest
from memory_pressure import under_pressure
from patience import PATIENCE
from reference_libraries import import_reference
from test_mxfp4_models import write as write_mxfp4

from quire.frontend import (
    LLM,
    AsyncLLM,
    EngineStartError,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.frontend.lora_request import LoRARequest
from quire.frontend.text.prompts import PromptType
from quire.protocol.messages import EventType, Ready

OPTIONS: dict[str, Any] = {"num_pages": 64, "threads": 1, "skip_tokenizer_init": True, "start_timeout": PATIENCE}
TOKENS = [[5 + 7 * (3 * number + place) % 120 for place in range(4 + 13 * number)] for number in range(6)]
PROMPTS: list[PromptType] = [*TOKENS]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=3, prompt_logprobs=1),
    SamplingParams(temperature=0.9, top_p=0.8, seed=7, max_tokens=12, ignore_eos=True, logprobs=3),
    SamplingParams(
        temperature=1.1, min_p=0.02, repetition_penalty=1.2, seed=8, max_tokens=14, ignore_eos=True, logprobs=0
    ),
]
TALE = SamplingParams(max_tokens=180, ignore_eos=True, temperature=0.9, seed=3, logprobs=1)


@pytest.fixture(scope="module", autouse=True)
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the engines a GPU."""
    with emulated_gpu.for_processes(tmp_path_factory.mktemp("gpu")):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, of which a GPU that is emulated makes short work."""
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny", tiny_model.weights())


def answers(llm: LLM) -> list[Any]:
    params = [PARAMS[number % len(PARAMS)] for number in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs) for each in outputs]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[object]:
    """The answers of a CPU."""
    return cpu_answers(model)


@pytest.fixture(scope="module")
def tales(model: Path) -> dict[int, object]:
    """The answers of a CPU to `Streams`."""
    with LLM(str(model), **OPTIONS) as llm:
        return {number: each.outputs for number, each in enumerate(llm.generate(PROMPTS, TALE, use_tqdm=False))}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=str,
)
def test_answers_are_those_of_the_cpu(model: Path, expected: list[object], options: dict[str, Any]) -> None:
    with LLM(str(model), device="cuda", **{**OPTIONS, **options}) as llm:
        assert answers(llm) == expected
        assert llm.stats()["totals"]["cached_tokens"] == 0
        assert answers(llm) == expected
        assert llm.stats()["totals"]["cached_tokens"] > 0


def test_drafts_from_earlier_answers_change_nothing(model: Path, expected: list[object]) -> None:
    speculation = json.dumps({"method": "suffix", "num_speculative_tokens": 3, "adaptive": False})
    with LLM(str(model), device="cuda", speculative_config=speculation, **OPTIONS) as llm:
        assert [answers(llm), answers(llm)] == [expected, expected]
        assert llm.stats()["totals"]["speculation"]["accepted_tokens"] > 0


def check_drafts(target: Path, expected: list[object], **drafting: str) -> dict[str, Any]:
    """Compare the answers of a GPU; return the counts of its drafts."""
    speculation = json.dumps({"num_speculative_tokens": 2, "adaptive": False, **drafting})
    with LLM(str(target), device="cuda", speculative_config=speculation, **OPTIONS) as llm:
        assert answers(llm) == expected
        counts: dict[str, Any] = llm.stats()["totals"]["speculation"]
    assert counts["draft_tokens"] > 0
    return counts


def cpu_answers(model: Path) -> list[Any]:
    with LLM(str(model), **OPTIONS) as llm:
        return answers(llm)


def test_drafts_of_a_model_change_nothing(model: Path, expected: list[object]) -> None:
    check_drafts(model, expected, method="draft_model", model=str(model))


@pytest.mark.parametrize("method", ["eagle3", "eagle"])
def test_drafts_of_a_head_change_nothing(method: str, tmp_path: Path) -> None:
    draft_heads = import_reference("draft_heads")
    target = draft_heads.write_target(tmp_path / "target")
    head = draft_heads.write_head(tmp_path / "head", draft_heads.new_head(method, target))
    check_drafts(target, cpu_answers(target), method=method, model=str(head))


@pytest.mark.parametrize("name", ["qwen3.5-tied", "glm4-moe-groups"])
def test_drafts_of_a_models_own_head_change_nothing(name: str, checkpoints: Path, tmp_path: Path) -> None:
    """The head has learned one of the answers by heart, so some drafts are accepted and others are not."""
    drafted = import_reference("mtp_heads").Drafted.random(checkpoints / name)
    expected = cpu_answers(checkpoints / name)
    drafted.train([[*TOKENS[3], *expected[3][0]]])
    counts = check_drafts(drafted.write(checkpoints / name, tmp_path / name), expected, method="mtp")
    assert 0 < counts["accepted_tokens"] < counts["draft_tokens"]


def test_a_preempted_request_has_the_same_answer(model: Path) -> None:
    params = [SamplingParams(seed=n, max_tokens=80, ignore_eos=True, logprobs=2) for n in range(4)]

    def ask(llm: LLM) -> list[object]:
        return [each.outputs for each in llm.generate(PROMPTS[:4], params, use_tqdm=False)]

    with LLM(str(model), **OPTIONS) as cpu, LLM(str(model), device="cuda", **OPTIONS | {"num_pages": 9}) as gpu:
        assert under_pressure(gpu, lambda: ask(gpu)) == ask(cpu)


def test_constrained_answers_are_those_of_the_cpu(demo_model: Path) -> None:
    sampling: list[dict[str, Any]] = [
        {"temperature": 1.0, "logprobs": 2},
        {"temperature": 0.0},
        {"top_p": 0.9, "top_k": 40, "repetition_penalty": 1.3, "logprobs": 0},
        {"min_p": 0.05, "logit_bias": {7: 3.0, 11: -4.0}, "min_tokens": 3},
    ]
    constraint = StructuredOutputsParams(regex="(yes|no), [a-z]{3,8} [0-9]{2}")
    params = [SamplingParams(max_tokens=12, seed=2, structured_outputs=constraint, **each) for each in sampling]
    params += [SamplingParams(max_tokens=12, seed=2, **each) for each in sampling]
    found, num_drafts = [], 0
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}
    for options in ({"device": "cpu"}, {"device": "cuda"}, {"device": "cuda", **drafts}):
        with LLM(str(demo_model), num_pages=32, threads=1, start_timeout=PATIENCE, **options) as llm:
            outputs = llm.generate(["Is it? yes, it is 1"] * len(params), params, use_tqdm=False)
            found.append([each.outputs for each in outputs])
            num_drafts = llm.stats()["totals"]["speculation"]["draft_tokens"]
    assert found[0] == found[1] == found[2]
    assert num_drafts > 0


def test_adapters_lie_on_the_gpu(model: Path, tmp_path: Path) -> None:
    """Of three adapters two are in memory at a time, so that one gets the memory of another."""
    adapters = []
    for number in range(3):
        rng, module = np.random.default_rng(number), "base_model.model.model.layers.0.self_attn.q_proj"
        parts = {"A": rng.standard_normal((4, 64), np.float32), "B": rng.standard_normal((64, 4), np.float32)}
        tensors = {f"{module}.lora_{part}.weight": values for part, values in parts.items()}
        adapters.append(write_adapter(tmp_path / str(number), tensors, r=4))
    modules = tuple(f"a{number}={folder}" for number, folder in enumerate(adapters))
    requests = [None, *(LoRARequest(f"a{number}", number + 1, str(folder)) for number, folder in enumerate(adapters))]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(model), device=device, lora_modules=modules, max_loras=2, **OPTIONS) as llm:
            answered = llm.generate([PROMPTS[1]] * 8, params, use_tqdm=False, lora_request=requests * 2)
            found.append([each.outputs for each in answered])
    assert found[0] == found[1]
    assert len({tuple(outputs[0].token_ids) for outputs in found[0]}) == 4


def test_a_model_with_state_has_the_same_answers(checkpoints: Path, tmp_path: Path) -> None:
    """Records of state lie on the GPU: samples fork them, the prefix cache has snapshots, and the disk keeps them."""
    params = SamplingParams(n=2, seed=5, max_tokens=6, ignore_eos=True, logprobs=2)
    prompt: PromptType = [3 + 5 * place % 300 for place in range(100)]
    found = []
    for device in ("cpu", "cuda", "cuda"):
        with LLM(str(checkpoints / "lfm2-tied"), device=device, kv_disk=str(tmp_path), **OPTIONS) as llm:
            found += [llm.generate([prompt], params, use_tqdm=False)[0].outputs for _ in range(2)]
            assert llm.stats()["totals"]["cached_tokens"] > 0
            assert (device == "cpu") == (llm.stats()["kv_disk_pages_read"] == 0)
    assert found == found[:1] * 6


@pytest.mark.parametrize(
    "checkpoint",
    [each for each in pooled_checkpoints.ENCODERS if each.name in ("bert", "modernbert", "embedding-gemma")],
    ids=lambda checkpoint: checkpoint.name,
)
def test_an_encoder_has_the_vectors_of_the_cpu(checkpoint: pooled_checkpoints.PooledCheckpoint, tmp_path: Path) -> None:
    """Tokens attend to later ones too: to all, and within windows on both sides, over blocks of 256 tokens."""
    model = pooled_checkpoints.make(checkpoint, tmp_path / "model")
    prompts = [prompt for prompt in pooled_checkpoints.prompts() if len(prompt) in (5, 64, 257)]
    params = [PoolingParams(pooling_type=kind, normalize=False) for kind in ("mean", "last", "cls")]
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(model), device=device, dtype="bfloat16", **OPTIONS) as llm:
            outputs = llm.embed(prompts, pooling_params=params, use_tqdm=False)
            found.append([output.outputs.embedding for output in outputs])
    assert found[0] == found[1]
    assert len({tuple(vector) for vector in found[0]}) == len(prompts)


def test_experts_in_mxfp4_give_the_answers_of_the_cpu(tmp_path: Path) -> None:
    model, _ = write_mxfp4(tmp_path)
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(model), device=device, **OPTIONS) as llm:
            found.append(answers(llm))
    assert found[0] == found[1]


def test_a_long_stream_has_the_answer_of_the_cpu(checkpoints: Path) -> None:
    """Chunks and single tokens attend over several blocks of KV, of which a window leaves the last ones."""
    prompts: list[PromptType] = [[7 + 11 * place % 100 for place in range(length)] for length in (250, 530)]
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=10, ignore_eos=True, logprobs=2)
    found = []
    for device in ("cpu", "cuda"):
        given = OPTIONS | {"kv_cache_dtype": "int8", "max_num_batched_tokens": 96}
        with LLM(str(checkpoints / "mistral-window77"), device=device, **given) as llm:
            found.append([each.outputs for each in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


@asynccontextmanager
async def engine(model: Path, **options: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(model), **{**OPTIONS, **options}) as llm, asyncio.timeout(PATIENCE):
        yield llm


class Streams:
    """Streams of all prompts at a time, one after the other until they are told to end: the engine is never idle.

    They have begun once one in the engine of that number has some tokens.
    """

    def __init__(self, llm: AsyncLLM, engine: int = 0) -> None:
        self.begun = asyncio.Event()
        self._llm, self._engine, self._ends = llm, engine, False
        self._outputs: list[tuple[int, RequestOutput]] = []
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(len(PROMPTS))]

    async def _run(self, number: int) -> None:
        while not self._ends:
            async for output in self._llm.generate(PROMPTS[number], TALE):
                last = output
                if output.metrics.engine == self._engine and len(output.outputs[0].token_ids) > 3:
                    self.begun.set()
            self._outputs.append((number, last))

    async def end(self, undisturbed: dict[int, object]) -> int:
        """Compare the answers; return how many went on in another engine than they had begun in."""
        self._ends = True
        await asyncio.gather(*self._tasks)
        for number, output in self._outputs:
            assert undisturbed.setdefault(number, output.outputs) == output.outputs
        return sum(map(_has_moved, self._outputs))


def _has_moved(numbered: tuple[int, RequestOutput]) -> bool:
    metrics = numbered[1].metrics
    queued = [event.timestamp for event in metrics.events if event.type is EventType.QUEUED]
    return metrics.first_token_time is not None and metrics.first_token_time < queued[-1]


def test_streams_move_to_a_gpu_and_back_in_the_middle(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as llm:
            undisturbed: dict[int, object] = {}
            assert await Streams(llm).end(undisturbed) == 0
            moved = {"cuda:0": 0, "cpu": 0}
            while not all(moved.values()):  # all may be between two answers when they are to move
                for device in moved:
                    streams = Streams(llm)
                    await streams.begun.wait()
                    await llm.reload(device=device)
                    moved[device] += await streams.end(undisturbed)
                    assert llm.engine_info.device == device
                    assert llm.engine_info.device_product == ("Emulated GPU" if device == "cuda:0" else "")
            assert llm.num_engine_losses == 0

    asyncio.run(main())


@pytest.mark.parametrize("end", ["killed", "without its GPU"])
def test_streams_go_on_when_an_engine_with_a_gpu_ends(
    model: Path, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = tmp_path / "failure"
    monkeypatch.setenv("QUIRE_EMULATED_FAILURE", str(failure))

    async def main() -> None:
        async with engine(model, device="cuda") as llm:
            undisturbed: dict[int, object] = {}
            assert await Streams(llm).end(undisturbed) == 0
            streams = Streams(llm)
            await streams.begun.wait()
            if end == "killed":
                os.kill(llm.engine_info.engine_pid, signal.SIGKILL)
            else:
                failure.touch()
            while llm.num_engine_losses == 0:  # noqa: ASYNC110 - another thread counts
                await asyncio.sleep(0.001)
            assert await streams.end(undisturbed) > 0
            assert llm.num_engine_losses == 1

    asyncio.run(main())


def test_an_engine_set_with_one_of_each(model: Path, expected: list[object]) -> None:
    with EngineUnderTest(model) as cpu, EngineUnderTest(model, "--device", "cuda") as gpu:
        given = {name: OPTIONS[name] for name in ("skip_tokenizer_init", "start_timeout")}
        with LLM(engine=(cpu.address, gpu.address), router="round-robin", **given) as llm:
            assert answers(llm) == expected
        for each in (cpu, gpu):
            with DealerClient(each.address) as client:
                assert client.call("stats")["totals"]["decode_tokens"] > 0


@pytest.mark.parametrize("victim", ["cpu", "cuda"])
def test_streams_of_a_killed_engine_go_on_on_the_other_device(
    model: Path, tales: dict[int, object], victim: str
) -> None:
    async def main(engines: list[EngineUnderTest]) -> None:
        given = {name: OPTIONS[name] for name in ("skip_tokenizer_init", "start_timeout")}
        addresses = tuple(each.address for each in engines)
        async with AsyncLLM(engine=addresses, router="round-robin", **given) as llm, asyncio.timeout(PATIENCE):
            devices = [each.ready.device.partition(":")[0] for each in llm.engines()]
            assert devices == ["cpu", "cuda"]
            number = devices.index(victim)
            streams = Streams(llm, number)
            await streams.begun.wait()
            os.kill(engines.pop(number).process.pid, signal.SIGKILL)
            while llm.num_engine_losses == 0:  # noqa: ASYNC110 - another thread counts
                await asyncio.sleep(0.001)
            assert await streams.end(dict(tales)) > 0
            assert llm.num_engine_losses == 1

    flags = ("--threads", "1")
    with EngineUnderTest(model, *flags) as cpu, EngineUnderTest(model, "--device", "cuda", *flags) as gpu:
        left = [cpu, gpu]
        asyncio.run(main(left))
        with DealerClient(left[0].address) as client:
            assert client.wait_until_at_rest()["totals"]["decode_tokens"] > 0


def test_several_engines_of_one_server(model: Path, expected: list[object]) -> None:
    """Each has weights of its own, whatever memory the server has for those of all."""
    with LLM(str(model), device="cuda", data_parallel_size=2, router="round-robin", **OPTIONS) as llm:
        assert answers(llm) == expected


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_pages_go_from_one_to_the_other(model: Path, devices: tuple[str, str]) -> None:
    """What one has computed, the other fetches: KV has the same bits, and the same keys."""
    prompt = [3 + 5 * place % 120 for place in range(130)]
    with pair(model, "--device", devices[0], decode_flags=("--device", devices[1])) as engines:
        engines.connect()
        engines.ask_both(prompt)
        found = engines.d.tokens("r")
        assert engines.num_fetched == len(prompt) // 32
        engines.p.end("r")
    with EngineUnderTest(model) as alone, DealerClient(alone.address) as client:
        ask(client, "r", prompt)
        assert client.tokens("r") == found


@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_pages_on_disk_are_those_of_either(model: Path, tmp_path: Path, devices: tuple[str, str]) -> None:
    prompt = [9 + 5 * place % 120 for place in range(130)]
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0, logprobs=2)
    found = []
    for device in devices:
        with LLM(str(model), device=device, kv_disk=str(tmp_path), kv_disk_bytes="64MiB", **OPTIONS) as llm:
            found.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs)
            stats = llm.stats()
    assert found[0] == found[1]
    assert stats["kv_disk_pages_read"] == len(prompt) // 32


def run_engine(model: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "quire.engine_core", "--model", str(model), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=os.environ | environment
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "cuda:3"], "device cuda:3 can't be used: there is no GPU number 3: this machine has 1"),
        (["--device", "cuda", "--memory-limit", "300MiB"], "that are needed beside the device's memory"),
        (["--device", "cuda", "--kv-cache-memory-bytes", "9GiB"], "are free on device cuda:0 next to the weights"),
        (
            ["--device", "cuda", "--gpu-memory-utilization", "0.75"],
            f"{6 << 30} bytes for this engine, but {4 << 30} are free on device cuda:0; free some, or lower it to 0.5",
        ),
        (["--device", "cuda", "--gpu-memory-utilization", "1e-5"], "for this engine, and weights and buffers take"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_gpu_has_not_is_an_error_of_one_line(model: Path, flags: list[str], words: str) -> None:
    done = run_engine(model, *flags)
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_machine_without_a_driver(model: Path, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    done = run_engine(model, "--device", "cuda", LD_LIBRARY_PATH=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "error: device cuda:0 can't be used: libcuda.so.1, which comes with" in done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        assert ready(model, device="auto").device == "cpu"
        with pytest.raises(EngineStartError, match="device cuda:0 can't be used"):
            LLM(str(model), device="cuda", **OPTIONS)


def ready(model: Path, **options: Any) -> Ready:
    """Return what an engine tells its clients."""

    async def main() -> Ready:
        async with engine(model, **options) as llm:
            return llm.engine_info

    return asyncio.run(main())


def test_auto_takes_the_gpu(model: Path) -> None:
    found = ready(model, device="auto", memory_limit="8GiB")
    assert (found.device, found.memory_limit) == ("cuda:0", 8 << 30)


@pytest.mark.parametrize(
    ("options", "most"), [({}, 0.9 * (48 << 20)), ({"gpu_memory_utilization": 0.0045}, 0.0045 * (8 << 30))], ids=str
)
def test_kv_pages_take_what_is_left_of_a_gpu(model: Path, options: dict[str, Any], most: float) -> None:
    """They fill the part of the engine, of which weights and buffers have some; the GPU has 48 MiB that are free."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_EMULATED_OTHERS", str((8 << 10) - 48))
        found = ready(model, device="cuda", num_pages=None, max_num_batched_tokens=64, **options)
    assert 0.8 * most < found.kv_cache_bytes < most


def test_a_draft_model_finds_room_beside_its_target(model: Path) -> None:
    drafts = {"method": "draft_model", "model": str(model)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_EMULATED_OTHERS", str((8 << 10) - 96))
        found = ready(model, device="cuda", num_pages=None, max_num_batched_tokens=64, speculative_config=drafts)
    assert 0.4 * 0.9 * (96 << 20) < found.kv_cache_bytes < 0.5 * 0.9 * (96 << 20)
