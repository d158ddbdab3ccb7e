"""Speed of speculative decoding against the same engine without it, in turns, on texts of which a part is predictable.

    .venv/bin/python scripts/bench_speculation.py --streams 1,4,16,64
    .venv/bin/python scripts/bench_speculation.py --streams 32 --predictable 0.5

Each turn sends every engine the same requests, all at once. The predictable ones are the same in all turns, so that an
engine that keeps answers has seen theirs; the others are new. An engine that is started twice without drafts tells how
much of a ratio is noise. Acceptance length: tokens of a sequence in a step that has drafts for it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from bench.builds import header, python_call, quire_build
from rich import box
from rich.console import Console
from rich.table import Table

from quire.frontend import LLM, EngineStartError, SamplingParams
from quire.frontend.engine_args import DEMO_MODEL
from quire.protocol.speculative_config import parse_speculative_config

TEXT = (
    "Once upon a time there was a poor old king in the dark wood who had three sons and one daughter, and the fox said "
    "to the raven that the wolf would come by night and take the golden bird from the tree beside the well"
)
PROMPT_WORDS = 16
COLUMNS = ("streams", "drafts", "tok/s", "of off", "acceptance", "drafted", "accepted")


@dataclass
class Runs:
    """The turns of an engine with one number of streams."""

    llm: LLM
    rates: list[float] = field(default_factory=list)  # tokens a second
    counts: dict[str, int] = field(default_factory=dict)  # counts of drafts, draft tokens and accepted tokens, by name

    def run(self, prompts: list[str], params: list[SamplingParams], repeats: int) -> None:
        """Answer the prompts `repeats` times, or as many others if there are more, and add the rate."""
        before, begun, tokens = self._totals(), time.perf_counter(), 0
        for number in range(repeats):
            part = slice(number * len(params), (number + 1) * len(params))
            outputs = self.llm.generate(prompts[part], params, use_tqdm=False)
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        self.rates.append(tokens / (time.perf_counter() - begun))
        for name, value in self._totals().items():
            self.counts[name] = self.counts.get(name, 0) + value - before[name]

    def _totals(self) -> dict[str, int]:
        totals = self.llm.stats()["totals"]["speculation"]
        return {name: totals[name] for name in ("drafts", "draft_tokens", "accepted_tokens")}


def prompt(seed: str) -> str:
    """Return a prompt of its own for each seed."""
    return " ".join(random.Random(seed).choices(TEXT.split(), k=PROMPT_WORDS))


def measure(llms: dict[str, LLM], streams: int, args: argparse.Namespace) -> dict[str, Runs]:
    """Return the turns of all engines, after one that is not timed."""
    found = {name: Runs(llm) for name, llm in llms.items()}
    repeats = max(1, args.least_requests // streams)
    num_known = round(args.predictable * streams)
    params = [
        SamplingParams(temperature=args.temperature, seed=number, max_tokens=args.gen, ignore_eos=True)
        for number in range(streams)
    ]
    for turn in range(args.turns + 1):
        prompts = [
            prompt(f"{number}" if number < num_known else f"{turn} {repeat} {number}")
            for repeat in range(repeats) for number in range(streams)
        ]  # fmt: skip
        for runs in found.values():
            runs.run(prompts, params, repeats)
    for runs in found.values():
        del runs.rates[0]
    return found


def ratio(runs: Runs, off: Runs) -> float:
    """Return the median of the turns' ratios: drift from turn to turn cancels."""
    return statistics.median(own / other for own, other in zip(runs.rates, off.rates, strict=True))


def row(streams: int, name: str, runs: Runs, off: Runs) -> list[str]:
    """Return the cells of an engine."""
    counts = runs.counts
    length = f"{1 + counts['accepted_tokens'] / counts['drafts']:.2f}" if counts["drafts"] else ""
    drafted = [f"{counts['draft_tokens']:,}", f"{counts['accepted_tokens']:,}"] if counts["drafts"] else ["", ""]
    return [f"{streams}", name, f"{statistics.median(runs.rates):,.0f}", f"{ratio(runs, off):.3f}", length, *drafted]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(DEMO_MODEL), help="checkpoint folder or GGUF file; the demo model by default")
    add("--speculative-config", action="append", metavar="JSON", help="may be given several times (default: suffix)")
    add("--streams", default="1,4,16,64", metavar="NUMBERS", help="requests at a time (default 1,4,16,64)")
    add("--predictable", type=float, default=0.0, metavar="SHARE", help="of the requests, from 0 to 1 (default 0)")
    add("--temperature", type=float, default=0.0)
    add("--gen", type=int, default=256, help="tokens of an answer (default 256)")
    add("--turns", type=int, default=7, help="of each engine (default 7)")
    add("--least-requests", type=int, default=8, metavar="N", help="of a turn, one after the other (default 8)")
    add("--quantization", metavar="MODE")
    add("--num-pages", type=int, metavar="N", help="KV pages of each engine (default: as quire serve has)")
    add("--threads", type=int)
    args = parser.parse_args()
    if not 0 <= args.predictable <= 1:
        parser.error(f"--predictable {args.predictable} is no share; give 0 to 1")
    for name in ("gen", "turns", "least_requests"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is too small; give 1 or more")
    return args


def main() -> None:
    """Measure, and print the table."""
    args = parse_arguments()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "drafts" else "right", no_wrap=True)
    names = ("quantization", "threads", "num_pages")
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    given = {name: value for name, value in options.items() if value is not None}
    try:
        configs = {"off": None, "off again": None}
        for text in args.speculative_config or ['{"method": "suffix"}']:
            configs[f"{len(configs) - 1}: {parse_speculative_config(text).method}"] = text
        calls = [
            python_call("LLM", {"model": args.model, "speculative_config": text, **given}) for text in configs.values()
        ]
        builds = [quire_build(call, args.threads) for call in calls]
        llms = {name: LLM(args.model, speculative_config=text, **given) for name, text in configs.items()}
        for streams in map(int, args.streams.split(",")):
            found = measure(llms, streams, args)
            for name, runs in found.items():
                table.add_row(*row(streams, name, runs, found["off"]))
            table.add_section()
        for llm in llms.values():
            llm.close()
    except (ValueError, EngineStartError) as error:
        sys.exit(f"error: {error}")
    print("\n".join(header(builds)))
    Console(highlight=False, width=100).print(table)
    print("Medians; a ratio is the median of the turns' ratios.")


if __name__ == "__main__":
    main()
