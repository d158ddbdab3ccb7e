"""Prefill and decode speed of a model: Quire alone, or in turns with vLLM and llama.cpp.

Quire is measured as users run it, an `LLM` and an engine process behind a socket. The rate of a prefill is the prompt's
tokens over the time to the first token; that of a decode is of all tokens that arrive while all sequences run, from the
first token of the last one to the last token of the first. Prompts are random token ids, or the beginnings of texts
(--texts), new ones each time and the same for every engine; sampling is greedy, end tokens are ignored, prefix caching
is off. In each repetition the engines take turns, and all but one are stopped.

    .venv/bin/python scripts/bench_model.py --model FOLDER --threads 2 --quantization none,int8
    .venv/bin/python scripts/bench_model.py --model FOLDER --threads 2 --vllm VENV --llama BIN --gguf A.gguf B.gguf
    .venv/bin/python scripts/bench_model.py --texts FILE --decode 1x512 --speculative-config '{"method": "ngram"}'
    .venv/bin/python scripts/bench_model.py --async --prefill "" --decode 1x16 --gen 256      # one stream
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from bench.bandwidth import Bandwidth
from bench.builds import as_json as builds_as_json
from bench.engines import BenchEngine, BenchError
from bench.lineup import start_engines, unquantized
from bench.report import save_figure, show
from bench.samples import Samples, WorkSamples, as_json
from bench.work import BatchTiming, Decode, Prompts, Work, parse_decode, parse_prefill, random_prompts, text_prompts

from quire.frontend import EngineConnectionError, EngineDeadError, EngineStartError
from quire.frontend.engine_args import DEMO_MODEL
from quire.frontend.text.tokenizer import Tokenizer
from quire.kernels.info import host_info

PREFILL, DECODE = "128,512,2048", "1x64,1x2048,8x64,32x64"
WARM_TOKENS = (16, 4)  # of prompt and answer of the untimed request that begins a turn
SPARE_TOKENS = 16  # of context beyond the longest work


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="checkpoint folder or GGUF file; the demo model by default")
    add("--threads", type=int, help="threads of every engine; by default one for each available CPU")
    add("--dtype", default="auto", help="of Quire and vLLM: auto, bfloat16 or float32")
    add("--prefill", metavar="LENGTHS", help=f"prompt lengths, by default those of {PREFILL} that fit")
    add("--decode", metavar="SHAPES", help=f"BATCHxCONTEXT,..., by default those of {DECODE} that fit")
    add("--gen", type=int, default=64, help="tokens that each sequence of a decode generates (default 64)")
    add("--reps", type=int, default=5, help="repetitions, each a turn of every engine (default 5)")
    add("--device", default="cpu", metavar="NAMES", help="of Quire, separated by commas: cpu,cuda")
    add("--quantization", default="none", metavar="NAMES", help="of Quire, separated by commas: none,int8")
    add("--kv-cache-dtype", default="auto", metavar="NAMES", help="of Quire's KV pages, separated by commas: auto,int8")
    add(
        "--speculative-config", action="append", default=[], metavar="JSON",
        help="measure Quire with this speculative decoding too; may be given several times",
    )  # fmt: skip
    add(
        "--async",
        dest="streaming",
        action="store_true",
        help="stream through the AsyncLLM of Quire and vLLM; times are the caller's",
    )
    add("--texts", type=Path, metavar="FILE", help="JSON lines of texts, whose first CONTEXT tokens are the prompts")
    add("--vllm", type=Path, metavar="VENV", help="virtual environment that has vLLM for CPUs")
    add("--vllm-speculative-config", metavar="JSON", help="of vLLM")
    add("--llama", type=Path, metavar="BIN_DIR", help="folder of llama.cpp's programs")
    add("--gguf", type=Path, nargs="+", default=[], metavar="FILE", help="model files for llama.cpp")
    add("--llama-flash-attn", default="on,off", metavar="MODES", help="on, off or both, of which the better one counts")
    add("--llama-spec-type", metavar="TYPE", help="speculative decoding of llama.cpp, as ngram-simple or ngram-cache")
    add("--json", type=Path, metavar="FILE", help="write all samples")
    add("--figure", type=Path, metavar="FILE", help="draw a figure; needs matplotlib")
    arguments = parser.parse_args()
    for name in ("gen", "reps", "threads"):
        if (value := getattr(arguments, name)) is not None and value < (2 if name == "gen" else 1):
            parser.error(f"--{name} {value} is too small")
    if bool(arguments.llama) != bool(arguments.gguf):
        parser.error("--llama and --gguf belong together: the programs, and the model files for them")
    if unknown := set(arguments.llama_flash_attn.split(",")) - {"on", "off"}:
        parser.error(f"--llama-flash-attn {', '.join(sorted(unknown))}: it can be on, off or on,off")
    return arguments


def choose_works(arguments: argparse.Namespace, positions: int) -> list[Work]:
    """Return the works to measure: the given ones, or the default ones that fit the model's positions."""
    chosen: list[Work] = []
    for given, default, parse in (
        (arguments.prefill, PREFILL, parse_prefill),
        (arguments.decode, DECODE, lambda text: [Decode(*shape, arguments.gen) for shape in parse_decode(text)]),
    ):
        works: list[Work] = list(parse(default if given is None else given))
        fitting = [work for work in works if work.longest <= positions]
        if given is not None and fitting != works:
            long = next(work for work in works if work not in fitting)
            raise BenchError(f"{long.name} needs {long.longest} positions, and the model has {positions}; leave it out")
        chosen += fitting
    if not chosen:
        raise BenchError("there is nothing to measure; give lengths with --prefill or shapes with --decode")
    return chosen


def measure(
    work: Work, engines: list[BenchEngine], bandwidth: Bandwidth, repetitions: int, prompts: Prompts
) -> WorkSamples:
    """Measure every engine in turn, once untimed and then `repetitions` times."""
    result = WorkSamples(work, [Samples(work, engine) for engine in engines])
    for engine in engines:
        engine.prepare(work)
        with engine.turn():
            run(work, engine, 0, prompts)
    for repetition in range(1, repetitions + 1):
        if isinstance(work, Decode):
            result.bandwidths.append(bandwidth.measure())
        for samples in result.engines:
            with samples.engine.turn():
                run(Decode(1, *WARM_TOKENS), samples.engine, repetition, prompts)
                samples.timings.append(run(work, samples.engine, repetition, prompts))
            where = f"{work.name}, {repetition} of {repetitions}, {samples.engine.full_name}"
            print(f"{where}: {samples.rates[-1]:.1f} tok/s", file=sys.stderr, flush=True)
    return result


def run(work: Work, engine: BenchEngine, seed: int, prompts: Prompts) -> BatchTiming:
    """Run `work` once, with prompts determined by `seed`."""
    return engine.generate(prompts(seed, work.batch, work.context), work.length)


def choose_prompts(arguments: argparse.Namespace, vocab_size: int) -> Prompts:
    """Return what makes prompts: random ones, or those of texts."""
    if arguments.texts is None:
        return functools.partial(random_prompts, vocab_size=vocab_size)
    tokenizer = Tokenizer(arguments.model)
    texts = [json.loads(line) for line in arguments.texts.read_text().splitlines()]
    return functools.partial(text_prompts, texts=[tokenizer.encode(text) for text in texts])


def compare(arguments: argparse.Namespace) -> None:
    """Measure all works, and show the results."""
    plan = unquantized(arguments).plan()
    positions = plan.limits.max_model_len
    works = choose_works(arguments, positions)
    host = host_info()
    threads = arguments.threads or host["threads"]
    length = min(positions, max(work.longest for work in works) + SPARE_TOKENS)
    about: dict[str, Any] = {
        "command": sys.argv[1:], "model": arguments.model, "begun": time.time(), "host": host, "threads": threads,
    }  # fmt: skip
    results: list[WorkSamples] = []
    prompts = choose_prompts(arguments, plan.vocab_size)
    with contextlib.ExitStack() as stack:
        bandwidth = Bandwidth(threads)
        engines = start_engines(stack, arguments, length, threads)
        for work in works:
            results.append(measure(work, engines, bandwidth, arguments.reps, prompts))
            if arguments.json is not None:  # after each work, so that an interrupted benchmark has results
                about["builds"] = builds_as_json(engine.build for engine in engines)
                arguments.json.write_text(json.dumps({**about, "results": as_json(results)}, indent=1) + "\n")
    show(results)
    if arguments.figure is not None:
        save_figure(results, arguments.figure)


def end(number: int, frame: FrameType | None) -> NoReturn:
    """Exit, ending the started processes."""
    del frame
    raise SystemExit(128 + number)


def main() -> None:
    """Run the benchmark; print errors in one line."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, end)
    try:
        compare(arguments)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except (BenchError, ValueError, OSError, EngineStartError, EngineConnectionError, EngineDeadError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
