"""A GPU gives the bits of the CPU: the driver is emulated, and runs the very PTX that a GPU would."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import emulated_gpu
import greedy_steps
import numpy as np
import pytest
import tiny_model
from checkpoints import CHECKPOINTS, ReferenceCheckpoint

from quire.kernels import _native, options, runner
from quire.kernels.errors import ModelError
from quire.kernels.step import StepInput


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A small model."""
    return tiny_model.write(tmp_path / "tiny", tiny_model.weights())


def generate(
    device: str, model: Path, chunk: int, formats: dict[str, str], lengths: tuple[int, ...] = (1, 17, 70)
) -> greedy_steps.Outputs:
    """Return tokens and log probabilities of greedy steps after prompts, which are computed in chunks."""
    chosen = options.LoadOptions(
        str(model), dtype="bfloat16", num_pages=64, threads=2, max_num_batched_tokens=chunk, device=device,
        quantization=formats.get("quantization"), kv_cache_dtype=formats.get("kv_cache_dtype", "auto"),
    )  # fmt: skip
    return greedy_steps.generate(chosen, lengths)


@pytest.mark.parametrize(
    ("chunk", "formats"),
    [(512, {}), (7, {}), (64, {"quantization": "int8", "kv_cache_dtype": "int8"}), (64, {"quantization": "int4"})],
    ids=str,
)
def test_it_gives_the_bits_of_the_cpu(demo_model: Path, chunk: int, formats: dict[str, str]) -> None:
    assert generate("cuda", demo_model, chunk, formats) == generate("cpu", demo_model, 512, formats)


@pytest.mark.parametrize("formats", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}], ids=["bf16", "int8"])
@pytest.mark.parametrize("major", [8, 12])
def test_other_architectures_give_the_bits_of_the_cpu(
    major: int, formats: dict[str, str], demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLVM joins operations in pairs for sm_100 and later, where one instruction computes both."""
    loaded: list[str] = []
    load = _native.CudaDevice.load

    def recorded(device: _native.CudaDevice, ptx: str, entry: str, *shape: int) -> int:
        loaded.append(ptx)
        return load(device, ptx, entry, *shape)

    monkeypatch.setattr(_native.CudaDevice, "load", recorded)
    monkeypatch.setenv("QUIRE_EMULATED_MAJOR", str(major))
    assert generate("cuda", demo_model, 64, formats) == generate("cpu", demo_model, 512, formats)
    assert all(f".target sm_{major}0\n" in ptx for ptx in loaded)
    assert any("fma.rn.ftz.f32x2" in ptx for ptx in loaded) == (major == 12)


@pytest.mark.parametrize("name", ["mistral-window77", "qwen2-tied-window", "llama-gqa8-dynamic"])
def test_long_contexts_have_the_bits_of_the_cpu(name: str, checkpoints: Path) -> None:
    """Chunks and single tokens attend over several blocks of 256 tokens, also within windows."""
    model, formats, lengths = checkpoints / name, {"kv_cache_dtype": "int8"}, (254, 600)
    assert generate("cuda", model, 128, formats, lengths) == generate("cpu", model, 512, formats, lengths)


def test_a_decoding_token_has_its_kv_split(demo_model: Path) -> None:
    chosen = options.LoadOptions(str(demo_model), num_pages=64, threads=1, device="cuda")
    native = runner.assemble(runner.describe(chosen)[0], chosen).native
    entry = np.array([0, 1, 600, 0], np.int64)
    ctypes.memmove(native.inputs["entries"], entry.ctypes.data, entry.nbytes)
    found = native.split_attention({"entries": 1})
    assert [found[name] for name in ("entries", "kv_splits", "reductions")] == [0, 3, 1]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda checkpoint: checkpoint.name)
def test_every_architecture_gives_the_bits_of_the_cpu(checkpoint: ReferenceCheckpoint, checkpoints: Path) -> None:
    model = checkpoints / checkpoint.name
    assert generate("cuda", model, 64, {}) == generate("cpu", model, 512, {})


def test_memory_of_files_cannot_be_had() -> None:
    device = _native.CudaDevice(0, _native.ThreadPool(1, False))
    assert (device.name, device.architecture) == ("Emulated GPU", "sm_90")
    with pytest.raises(RuntimeError, match="memory of files"):
        device.map_file(0, 4096, False)


def test_ptx_that_the_driver_rejects_is_an_error() -> None:
    device = _native.CudaDevice(0, _native.ThreadPool(1, False))
    with pytest.raises(
        RuntimeError, match=r"the GPU failed to compile a kernel \(the emulated assembler can't read it\): CUDA_ERROR"
    ):
        device.load("nonsense", "entry", 1, 32)


def test_a_gpu_that_is_not_there_is_an_error(demo_model: Path) -> None:
    with pytest.raises(ModelError, match=r"cuda:3 can't be used: there is no GPU number 3: this machine has 1"):
        runner.load_model(options.LoadOptions(str(demo_model), device="cuda:3"))


def test_a_gpu_without_shared_addresses_is_an_error(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_EMULATED_UNIFIED", "no")
    with pytest.raises(ModelError, match="Emulated GPU and the host have no addresses in common"):
        runner.load_model(options.LoadOptions(str(demo_model), device="cuda"))


def in_process(code: str, model: Path, folder: Path, **environment: str) -> str:
    """Return what a process of its own prints, which begins with a driver that nobody has used."""
    done = run_process(code, model, folder, environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_process(code: str, model: Path, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    preface = "import ctypes, sys\nimport numpy as np\nfrom quire.kernels import options, runner\n"
    preface += "from quire.kernels.step import StepInput\nimport greedy_steps, logging, threading\n"
    preface += "logging.basicConfig(stream=sys.stdout)\n"
    preface += "chosen = options.LoadOptions(sys.argv[1], num_pages=16, threads=1, device='cuda')\n"
    return subprocess.run(
        [sys.executable, "-c", preface + textwrap.dedent(code), str(model)],
        capture_output=True, text=True, check=False,
        env=os.environ | emulated_gpu.build(folder) | environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def test_each_matrix_goes_to_the_gpu_once_it_is_packed(tiny: Path, tmp_path: Path) -> None:
    """So the host needs no memory for all of them; from a weight cache too."""
    code = """
    from dataclasses import replace
    moved, seen = ctypes.CDLL("libcuda.so.1").emulated_bytes_to_gpu, []
    moved.restype = ctypes.c_size_t
    def progress(task, done, total):
        if task == "loading weights":
            seen.append((done, moved()))
    for cache in (None, "/cache", "/cache"):
        runner.load_model(replace(chosen, weight_cache=cache and sys.argv[1] + cache), progress)
        for (done, before), (more, after) in zip(seen, seen[1:]):
            assert after - before == more - done > 0
        print(len(seen))
        seen.clear()
    """
    counts = [*map(int, in_process(code, tiny, tmp_path / "process").split())]
    assert counts == [counts[0]] * 3
    assert counts[0] > 5


def test_the_host_cannot_access_memory_of_the_gpu(tiny: Path, tmp_path: Path) -> None:
    """So all other tests find what does."""
    code = """
    engine = runner.load_model(chosen)
    print("loaded", flush=True)
    ctypes.c_char.from_address(engine._assembly.loader.addresses[engine._plan.weights[0]]).value
    print("read")
    """
    done = run_process(code, tiny, tmp_path / "gpu", {})
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "loaded\n")


@pytest.mark.parametrize("environment", [{}, {"QUIRE_EMULATED_PITCH": "no"}], ids=["any pitch", "own pitches"])
def test_a_page_is_copied_at_once(tiny: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    """All heads of all layers with one call of the driver; a fork copies what both sequences write to next.

    A driver may refuse copies within a GPU whose pitches are not its own: then each head is copied by itself.
    """
    code = """
    driver = ctypes.CDLL("libcuda.so.1")
    def calls(function, *arguments):
        before = driver.emulated_copies(), driver.emulated_waits()
        result = function(*arguments)
        return result, driver.emulated_copies() - before[0], driver.emulated_waits() - before[1]
    engine = runner.load_model(chosen)
    prompt = list(range(1, 41))
    slot = engine.sequences.open(prompt, 40, sampling=runner.SamplingConfig(logprobs=1), cache_salt="")
    engine.sequences.start(slot, 48)
    engine.run(StepInput([slot], [0], [40]))
    other = engine.sequences.open(prompt, 40, sampling=runner.SamplingConfig(temperature=0.0), cache_salt="")
    print(*calls(engine.fork, other, slot, 39, 48))
    for step in range(4):
        engine.run(StepInput([slot, other], [40 + step, 39 + step], [1, 1]))
    copy, page = np.empty(engine.page_bytes, np.uint8), engine.sequences.pages(slot)[0]
    engine.copy_page(page, copy)  # allocates what the next ones use
    content, *numbers = calls(engine.copy_page, page, copy)
    filled, *others = calls(engine.fill_page, 15, copy)
    print(*numbers, *others, filled == content == engine.copy_page(15, copy) != engine.copy_page(14, copy))
    """
    forked, counts = in_process(code, tiny, tmp_path / "gpu", **environment).splitlines()
    is_forked, copies, waits = forked.split()
    assert (is_forked, waits) == ("True", "1")
    assert int(copies) > 1 if environment else copies == "1"
    copies_out, waits_out, copies_in, waits_in, is_same = counts.split()
    assert (copies_out, copies_in, is_same) == ("1", "1", "True")
    assert max(int(waits_out), int(waits_in)) <= 3  # one for the copy, and those that find nothing left


def test_sealing_pages_reads_none_of_them(tiny: Path, tmp_path: Path) -> None:
    code = """
    driver, waits = ctypes.CDLL("libcuda.so.1"), []
    for queues in (0, 1):
        engine = runner.PreparedModel(chosen, sealed_queues=queues).open()
        for salt in ("a", "b"):  # the second time nothing is allocated
            slot = engine.sequences.open(list(range(1, 101)), 100, sampling=runner.SamplingConfig(), cache_salt=salt)
            assert engine.sequences.reserve(slot, 101)
            before = driver.emulated_waits(), driver.emulated_copies()
            engine.run(StepInput([slot], [0], [100]))
            found = driver.emulated_waits() - before[0], driver.emulated_copies() - before[1]
            engine.sequences.close(slot)
        waits.append(found)
    queue = engine.sealed_queues[0]
    sealed = queue.take(16, 0.0)
    print(len(sealed), all(queue.is_sealed(page, seal) for page, _, _, seal in sealed), waits[0] == waits[1])
    """
    assert in_process(code, tiny, tmp_path / "gpu").split() == ["6", "True", "True"]


@pytest.mark.parametrize("name", ["gemma4-shared-window100", "qwen3-next-experts"])
def test_sealed_pages_are_those_of_the_cpu(name: str, checkpoints: Path) -> None:
    """Where layers have KV of different sizes, and where snapshots of state are copied in pieces too."""
    found = []
    for device in ("cpu", "cuda"):
        chosen = options.LoadOptions(
            str(checkpoints / name), dtype="bfloat16", num_pages=32, threads=1, max_num_batched_tokens=320,
            device=device,
        )  # fmt: skip
        engine = runner.PreparedModel(chosen, sealed_queues=1).open()
        slot = engine.sequences.open([10 + 7 * i % 100 for i in range(300)], 300, cache_salt="")
        assert engine.sequences.reserve(slot, 301)
        engine.run(StepInput([slot], [0], [256]))
        engine.run(StepInput([slot], [256], [44]))
        engine.sequences.close(slot)
        queue, copy = engine.sealed_queues[0], np.empty(engine.page_bytes, np.uint8)
        sealed = queue.take(64, 0.0)
        found.append([(key, engine.copy_page(page, copy), copy.tobytes()) for page, _, key, _ in sealed])
        assert all(queue.is_sealed(page, seal) for page, _, _, seal in sealed)
    has_states = name == "qwen3-next-experts"
    assert (len(found[0]) > 9) == has_states
    assert found[0] == found[1]


def test_logits_stay_where_they_are(tiny: Path, tmp_path: Path) -> None:
    """Rows are sampled once more if a mask is needed for drafts, or if a constraint allows none of the tokens that were
    tried."""
    code = """
    from dataclasses import replace
    moved = ctypes.CDLL("libcuda.so.1").emulated_bytes_to_host
    engine = runner.load_model(replace(chosen, num_pages=64))
    def mask(is_written, allowed=range(3, 120)):
        mask = runner.TokenMask(engine.vocab_size)
        mask.allow(list(allowed))
        if is_written:
            mask.publish()
        return mask
    plain = [{"temperature": 0.0}, {"logprobs": 20}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1, "prompt_logprobs": 3}]
    edited = [{"presence_penalty": 0.5}, {"logit_bias": [(3, 1.0)], "logprobs": 2}, {"allowed_token_ids": [8, 9]},
        {"bad_words_token_ids": [[3]], "top_p": 0.9}, {"min_tokens": 2, "stop_token_ids": [4]}]
    rare = mask(True, [3])
    late = {"constraint": mask(False), "top_k": 2}
    again = [{"constraint": rare}, {"constraint": rare, "logprobs": 2}, {"constraint": mask(True, [4]), "drafts": 1},
        {"constraint": mask(True, [4]), "top_k": 2, "drafts": 1, "logprobs": 1}]
    wide = [{"temperature": 0.0, "logprobs": 100}]
    masked = [{"constraint": mask(True), **each}
        for each in ({}, {"temperature": 0.0}, {"top_k": 2}, {"drafts": 2}, *edited)]
    def bytes_of_step(configs, awaited=()):
        slots, drafts = [], []
        for number, each in enumerate(configs):
            own = dict(each)
            drafts.append(own.pop("drafts", 0))
            constraint = own.pop("constraint", None)
            slots.append(engine.sequences.open([6, 5, 4], 3 - drafts[-1], sampling=runner.SamplingConfig(**own),
                constraint=constraint, cache_salt=str(number)))
        for slot in slots:
            assert engine.sequences.reserve(slot, 8)
        before = moved()
        result = engine.run(StepInput(slots, [0] * len(slots), [3] * len(slots), drafts))
        for each in awaited:
            each.publish()
        while engine.collect_pending(result):
            pass
        assert not result.errors
        assert [not tokens for tokens in result.token_ids] == [each is late for each in configs]
        for slot in slots:
            engine.sequences.close(slot)
        return moved() - before
    rows = [bytes_of_step(configs)
        for configs in (plain, edited, masked, again, wide, [*edited, late, *wide, *masked, *again, *plain])]
    awaited = [mask(False) for _ in range(2)]
    print(*rows, bytes_of_step([{"constraint": each, "top_k": 2, "logprobs": 1} for each in awaited], awaited))
    """
    assert in_process(code, tiny, tmp_path / "gpu").split() == ["0"] * 7


def test_what_a_sampled_row_has_no_room_for_is_listed_or_sampled_once_more(tmp_path: Path) -> None:
    """Candidates of wide beam searches come as a list, and rows with too many edits for one launch have one each."""
    weights = tiny_model.weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = np.random.default_rng(1).standard_normal((1100, 64)).astype(np.float32)
    model = tiny_model.write(tmp_path / "model", weights, tiny_model.CONFIG | {"vocab_size": 1100})
    code = """
    from dataclasses import replace
    moved = ctypes.CDLL("libcuda.so.1").emulated_bytes_to_host
    banned = [[token] for token in range(50, 1050)] * 300
    rare = runner.TokenMask(1100)
    rare.allow([3])
    rare.publish()
    steps = [[{"temperature": 0.0, "logprobs": top} for top in (257, 550, 256, 300)], [{"logprobs": 551}],
        [{"temperature": 0.0, "bad_words_token_ids": banned, "logprobs": 2} for _ in range(3)],
        [{"prompt_logprobs": 300}], [{"constraint": rare, "logprobs": 280}]]
    for device in ("cpu", "cuda"):
        engine = runner.load_model(replace(chosen, device=device, max_num_batched_tokens=13))
        for step in steps:
            constraints = [each.get("constraint") for each in step]
            configs = [runner.SamplingConfig(**{k: v for k, v in each.items() if k != "constraint"}) for each in step]
            slots = [
                engine.sequences.open([6, 5, 4 + number], 3, sampling=config, constraint=constraint, cache_salt="")
                for number, (config, constraint) in enumerate(zip(configs, constraints))]
            for slot in slots:
                assert engine.sequences.reserve(slot, 8)
            before = moved()
            result = engine.run(StepInput(slots, [0] * len(slots), [3] * len(slots)))
            engine.collect_pending(result)
            logprobs = [result.logprobs(i) for i in range(len(step))], result.prompt_logprobs
            print(device, result.token_ids, logprobs, dict(result.errors), moved() - before, sep="; ")
            for slot in slots:
                engine.sequences.close(slot)
    """
    lines = [line.split("; ") for line in in_process(code, model, tmp_path / "gpu").splitlines()]
    cpu, gpu = ([line[1:-1] for line in lines if line[0] == device] for device in ("cpu", "cuda"))
    assert len(cpu) == 5
    assert cpu == gpu
    assert all(line[2] == "{}" for line in cpu)
    listed = [8 * (257 + 550 + 300), 4 * 1100, 0, 8 * 2 * 300, 8 * 280]
    assert [int(line[-1]) for line in lines] == [0] * 5 + listed


def test_a_gpu_that_is_lost_while_a_row_is_sampled_once_more_is_no_error_of_its_request(
    tiny: Path, tmp_path: Path
) -> None:
    failure = tmp_path / "failure"
    code = f"""
    engine = runner.load_model(chosen)
    mask = runner.TokenMask(engine.vocab_size)
    mask.allow([3])
    slot = engine.sequences.open([5, 6, 7], 3, sampling=runner.SamplingConfig(top_k=2), constraint=mask)
    assert engine.sequences.reserve(slot, 8)
    result = engine.run(StepInput([slot], [0], [3]))
    assert result.pending == [0]
    open({str(failure)!r}, "w").close()
    mask.publish()
    try:
        engine.collect_pending(result)
    except runner.DeviceLostError as error:
        print(error, engine.sequences.tokens(slot), dict(result.errors))
    """
    printed = in_process(code, tiny, tmp_path / "gpu", QUIRE_EMULATED_FAILURE=str(failure))
    assert printed.startswith("the GPU failed to ")
    assert printed.strip().endswith("[5, 6, 7] {}")


def test_a_logit_that_is_no_number_is_the_error_of_the_cpu(tmp_path: Path) -> None:
    weights = tiny_model.weights()
    weights["lm_head.weight"] = np.clip(weights["lm_head.weight"], -1, 1) * np.float32(3e38)
    code = """
    from dataclasses import replace
    moved = ctypes.CDLL("libcuda.so.1").emulated_bytes_to_host
    for device in ("cpu", "cuda"):
        engine = runner.load_model(replace(chosen, device=device))
        slot = engine.sequences.open([5, 6, 7], 3, sampling=runner.SamplingConfig(temperature=0.0), cache_salt="")
        assert engine.sequences.reserve(slot, 8)
        before = moved()
        print(engine.run(StepInput([slot], [0], [3])).errors)
    print(moved() - before)
    """
    model = tiny_model.write(tmp_path / "nan", weights)
    first, second, num_bytes = in_process(code, model, tmp_path / "gpu").splitlines()
    assert first == second
    assert num_bytes == "0"
    assert "is out of bounds for this input" in first


@pytest.mark.parametrize("environment", [{}, {"QUIRE_EMULATED_GRAPHS": "no"}], ids=["graphs", "launches"])
def test_steps_that_come_again_are_graphs(tiny: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    """Steps of about the same size share graphs, and those of more sizes come than are kept: answers are the CPU's."""
    code = """
    from dataclasses import replace
    engine = runner.load_model(chosen)
    cpu = runner.load_model(replace(chosen, device="cpu"))
    def answers(engine, length, others):
        slots = []
        for count in (length, *[1] * others):
            slots.append(engine.sequences.open([1 + n % 120 for n in range(count)], count,
                sampling=runner.SamplingConfig(temperature=0.0, logprobs=2)))
            assert engine.sequences.reserve(slots[-1], count + 1)
        counts = [length, *[1] * others]
        found = []
        for starts, counts in (([0] * len(slots), counts), (counts, [1] * len(slots))):
            result = engine.run(StepInput(slots, starts, counts))
            found.append((result.token_ids, [result.logprobs(i) for i in range(len(slots))]))
        for slot in slots:
            engine.sequences.close(slot)
        return found
    lengths = [*range(1, 99, 7), 57, 57, 58]
    for others in (*range(10), 0):
        for length in lengths:
            assert answers(engine, length, others) == answers(cpu, length, others)
    print(engine._assembly.device.native.num_graph_launches)
    """
    *told, launches = in_process(code, tiny, tmp_path / "gpu", **environment).splitlines()
    if environment:
        words = "steps are no graphs from now on, and take longer: the GPU failed to begin a graph: CUDA_ERROR_801"
        assert (len(told), launches) == (1, "0")
        assert words in told[0]
    else:
        assert not told
        assert int(launches) > 250


def test_a_graph_is_captured_while_another_thread_allocates(tiny: Path, tmp_path: Path) -> None:
    """An adapter may be loaded at any time. The capture takes until the other thread has allocated memory."""
    code = """
    engine = runner.load_model(chosen)
    native, ends, failed = engine._assembly.device.native, threading.Event(), []
    def allocate():
        try:
            while not ends.is_set():
                native.write(native.allocate(100), np.zeros(100, np.uint8))
        except Exception as error:
            failed.append(error)
    thread = threading.Thread(target=allocate)
    thread.start()
    for _ in range(3):
        slot = engine.sequences.open([5, 6, 7], 3, sampling=runner.SamplingConfig(temperature=0.0), cache_salt="")
        assert engine.sequences.reserve(slot, 8)
        engine.run(StepInput([slot], [0], [3]))
        engine.sequences.close(slot)
    ends.set()
    thread.join()
    assert not failed, failed
    print(native.num_graph_launches)
    """
    launches = in_process(code, tiny, tmp_path / "gpu", QUIRE_EMULATED_SLOW_CAPTURE="yes")
    assert int(launches) > 0


def test_code_is_kept_for_the_next_start(tiny: Path, tmp_path: Path) -> None:
    code = """
    from dataclasses import replace
    engine = runner.load_model(replace(chosen, cache_dir=sys.argv[1] + "/kept"))
    device = engine._assembly.device
    print(device.compiled, device.native.cache.hits, len(device.rejected))
    """
    linked, hits, rejected = map(int, in_process(code, tiny, tmp_path / "first").split())
    assert linked > 2
    assert (hits, rejected) == (0, 0)
    kernels = linked // 2
    assert in_process(code, tiny, tmp_path / "second").split() == ["0", str(kernels), "0"]
    newer = in_process(code, tiny, tmp_path / "third", QUIRE_EMULATED_VERSION="13000")
    assert newer.split() == [str(kernels), "0", "0"]
    for path in (tiny / "kept").glob("*.cubin"):
        path.write_bytes(path.read_bytes()[:-1])
    *told, last = in_process(code, tiny, tmp_path / "fourth").splitlines()
    assert last.split() == [str(kernels), "0", str(kernels)]
    assert len(told) == kernels
