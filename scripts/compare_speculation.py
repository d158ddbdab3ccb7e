#!/usr/bin/env python3
"""Check that speculative decoding changes no bit: random requests with and without it, compared with ==.

    scripts/compare_speculation.py --requests 2000 --speculative-config '{"method": "suffix"}'
    scripts/compare_speculation.py --kv-cache-dtype int8 --quantization int4 --num-pages 40

Requests have prompts that repeat themselves, or not; they are greedy or sampled, with penalties, biases, log
probabilities, stop strings, grammars, several answers. With few pages they are preempted. Tokens, log probabilities,
texts and reasons of the ends must be equal, and no page may be lost; the counts of drafted and accepted tokens are
printed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

from quire.frontend import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.frontend.engine_args import DEMO_MODEL

TALES = (
    "Once upon a time there was a king who had three sons.",
    "The fox said to the crow: give me the cheese, and I will give you a song.",
    "In the wood there lived a poor woman and her children; in the wood there lived a wolf.",
    "The miller's daughter spun the straw to gold, and the gold to straw.",
)
STATISTICS = ("drafts", "draft_tokens", "accepted_tokens")


def prompt(rng: random.Random) -> str:
    """Return a text, most often one that repeats itself."""
    words = rng.choice(TALES).split()
    part = " ".join(words[: rng.randrange(3, len(words) + 1)])
    return " ".join([part] * rng.choice((1, 1, 2, 3, 6)))


def params(rng: random.Random, max_tokens: int) -> SamplingParams:
    """Return parameters with some of all features."""
    chosen: dict[str, Any] = {"max_tokens": rng.randrange(1, max_tokens + 1), "seed": rng.randrange(1 << 30)}
    chosen["temperature"] = rng.choice((0.0, 0.0, 0.3, 0.8, 1.2))
    options: list[dict[str, Any]] = [
        {"logprobs": 3}, {"repetition_penalty": 1.2, "presence_penalty": 0.3}, {"frequency_penalty": 0.5},
        {"top_k": 40, "top_p": 0.9}, {"min_p": 0.05}, {"stop": [" the ", "."]}, {"min_tokens": 1}, {"n": 2},
        {"logit_bias": {17: 2.0, 99: -100.0}}, {"ignore_eos": True}, {"stop_token_ids": [13, 200]},
        {"structured_outputs": StructuredOutputsParams(regex=r"(the king|a fox|the wood)( and (the king|a fox)){1,9}")},
        {"structured_outputs": StructuredOutputsParams(json={"type": "array", "items": {"enum": ["king", "fox"]}})},
        {"prompt_logprobs": 1},
    ]  # fmt: skip
    for option in rng.sample(options, rng.choice((0, 1, 1, 2))):
        chosen |= option
    return SamplingParams(**chosen)


def requests(count: int, seed: int, max_tokens: int) -> tuple[list[str], list[SamplingParams]]:
    """Return prompts and parameters."""
    rng = random.Random(seed)
    return [prompt(rng) for _ in range(count)], [params(rng, max_tokens) for _ in range(count)]


def answer(output: RequestOutput) -> tuple[Any, ...]:
    """Return all of an answer that must be equal."""
    samples = [
        (each.token_ids, each.text, each.logprobs, each.finish_reason, each.stop_reason) for each in output.outputs
    ]
    return output.prompt_token_ids, output.prompt_logprobs, samples


def ask(llm: LLM, given: tuple[list[str], list[SamplingParams]], at_once: int) -> tuple[list[Any], float]:
    """Return the answers and the seconds that they took."""
    begun, answers = time.perf_counter(), []
    for start in range(0, len(given[0]), at_once):
        part = slice(start, start + at_once)
        answers += [answer(output) for output in llm.generate(given[0][part], given[1][part], use_tqdm=False)]
    return answers, time.perf_counter() - begun


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(DEMO_MODEL), help="checkpoint folder or GGUF file; the demo model by default")
    add("--speculative-config", default='{"method": "ngram", "prompt_lookup_min": 2}', metavar="JSON")
    add("--requests", type=int, default=200, metavar="N")
    add("--at-once", type=int, default=64, metavar="N", help="requests that run together (default 64)")
    add("--max-tokens", type=int, default=64, metavar="N", help="most tokens of an answer (default 64)")
    add("--seed", type=int, default=0, metavar="N")
    add("--dtype", default="auto")
    add("--quantization", metavar="MODE")
    add("--kv-cache-dtype", default="auto")
    add("--max-num-batched-tokens", type=int, default=2048, metavar="N")
    add("--num-pages", type=int, default=1024, metavar="N", help="few pages make preemptions")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; return 1 if an answer differs, a page was lost, or nothing was accepted."""
    args = parse(arguments)
    given = requests(args.requests, args.seed, args.max_tokens)
    options = {
        name: getattr(args, name)
        for name in ("dtype", "quantization", "kv_cache_dtype", "max_num_batched_tokens", "num_pages")
    }
    with LLM(args.model, **options) as llm:
        expected, plain_seconds = ask(llm, given, args.at_once)
    with LLM(args.model, speculative_config=args.speculative_config, **options) as llm:
        answers, seconds = ask(llm, given, args.at_once)
        stats = llm.stats()
    totals = stats["totals"]["speculation"]
    different = [index for index, (own, other) in enumerate(zip(answers, expected, strict=True)) if own != other]
    for index in different[:3]:
        print(f"request {index} differs: {given[1][index]}\n  {answers[index]}\n  {expected[index]}")
    report = {"requests": args.requests, "different": len(different), **{name: totals[name] for name in STATISTICS}}
    report |= {"preemptions": stats["preemptions"], "speed_up": round(plain_seconds / seconds, 2)}
    print(json.dumps(report))
    lost = args.num_pages - stats["pages_free"] - stats["pages_cached"]
    if lost:
        print(f"{lost} of {args.num_pages} pages are neither free nor cached")
    return 1 if different or lost or not totals["accepted_tokens"] else 0


if __name__ == "__main__":
    sys.exit(main())
