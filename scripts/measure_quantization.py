"""Perplexity of each weight format: `.venv/bin/python scripts/measure_quantization.py --help`.

The engine reads a text once in each format and returns the log probability of every token, and the likeliest one at its
place. Formats are compared with the first one token by token, so that the standard error of a change is much smaller
than that of a perplexity. The table also has the root mean square of the log probabilities' differences, and the share
of places whose likeliest token is the same. Judge formats on real weights (`scripts/real_models.py`).

Texts longer than the context are cut into pieces that are read independently; each piece starts with the last token of
the one before, so that every token but the first of a text is predicted once.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.frontend import LLM, SamplingParams
from quire.frontend.engine_args import DEMO_MODEL
from quire.frontend.errors import EngineStartError
from quire.frontend.text.tokenizer import Tokenizer
from quire.kernels.options import LoadOptions
from quire.kernels.runner import describe
from quire.protocol.engine_options import KV_CACHE_DTYPES

FORMATS: dict[str, tuple[str, str | None]] = {  # dtype and quantization
    "bfloat16": ("bfloat16", None),
    "float32": ("float32", None),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}
CONTEXT_LENGTH = 2048  # unless the model's is shorter
HEADER = (
    f"{'weights':<10}{'KV':<6}{'MiB':>9}{'nats/token':>12}{'perplexity':>12}{'change, %':>18}{'rms':>9}{'same top':>10}"
)


@dataclass(frozen=True)
class Measurement:
    """Result of one format: bytes of its packed matrices, nats per token, perplexity.

    The change of the perplexity is relative to the first format with the same KV dtype, with its standard error; so are
    the root mean square of the differences in nats, and the percentage of places with the same likeliest token.
    """

    weights: str
    kv: str
    weight_bytes: int
    tokens: int
    nats: float
    perplexity: float
    change_percent: float
    error_percent: float
    rms: float
    same_top_percent: float

    def row(self) -> str:
        """Format a line of the table."""
        size = f"{self.weight_bytes / 2**20:.1f}"
        change = f"{self.change_percent:+.2f} ± {self.error_percent:.2f}"
        return (
            f"{self.weights:<10}{self.kv:<6}{size:>9}{self.nats:>12.4f}{self.perplexity:>12.3f}{change:>18}"
            f"{self.rms:>9.4f}{self.same_top_percent:>9.2f}%"
        )


@dataclass(frozen=True)
class Reading:
    """The nats of every token but the first of each prompt, and the likeliest token at its place."""

    losses: list[float]
    likeliest: list[int]


def read_texts(file: Path) -> list[str]:
    """Return the field `text` of every line of a .jsonl file, or the whole text of any other file."""
    content = file.read_text(encoding="utf-8")
    if file.suffix != ".jsonl":
        return [content]
    return [json.loads(line)["text"] for line in content.split("\n") if line.strip()]


def held_out_texts(corpus: Path, seed: int) -> list[str]:
    """Return the tales that were held out of the demo model's training, each with its end token."""
    from train_demo_model import END, read_tales, split_tales  # needs torch

    return [tale.text + END for tale in split_tales(read_tales(corpus), seed)[1]]


def pieces(token_ids: Sequence[int], length: int) -> list[list[int]]:
    """Cut `token_ids` into lists of at most `length`, each starting with the last token of the one before."""
    return [list(token_ids[start : start + length]) for start in range(0, len(token_ids) - 1, length - 1)]


def read(model: str, options: dict[str, Any], prompts: list[list[int]]) -> Reading:
    """Read the prompts by an engine with `options`."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with LLM(model, **options) as llm:
        outputs = llm.generate(prompts, params)
    reading = Reading([], [])
    for prompt, output in zip(prompts, outputs, strict=True):
        for token, entry in zip(prompt, output.prompt_logprobs or (), strict=True):
            if entry is not None:  # the first token has none
                reading.losses.append(-entry[token].logprob)
                reading.likeliest.append(max(entry, key=lambda each: entry[each].logprob))
    return reading


def compare(reading: Reading, base: Reading) -> tuple[float, float, float, float]:
    """Return the last four fields of a `Measurement`; the standard error is that of independent tokens."""
    differences = [loss - other for loss, other in zip(reading.losses, base.losses, strict=True)]
    ratio = math.exp(statistics.fmean(differences))
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    rms = math.sqrt(statistics.fmean(difference**2 for difference in differences))
    same = statistics.fmean(map(operator.eq, reading.likeliest, base.likeliest))
    return 100 * (ratio - 1), 100 * ratio * error, rms, 100 * same


def measure(
    model: str, texts: list[str], formats: list[str], kv_cache_dtypes: list[str], length: int
) -> list[Measurement]:
    """Measure every format with every KV dtype, and print a line for each."""
    tokenizer = Tokenizer(model)
    prompts = [piece for text in texts for piece in pieces(tokenizer.encode(text), length - 1)]
    if not prompts:
        raise ValueError("the text has fewer than 2 tokens; give a longer one")
    measurements = []
    for kv in kv_cache_dtypes:
        base: Reading | None = None
        for name in formats:
            dtype, quantization = FORMATS[name]
            plan, _ = describe(LoadOptions(model, dtype=dtype, quantization=quantization, kv_cache_dtype=kv))
            options = {
                "dtype": dtype, "quantization": quantization, "kv_cache_dtype": kv, "max_model_len": length,
            }  # fmt: skip
            reading = read(model, options, prompts)
            base = base or reading
            nats = statistics.fmean(reading.losses)
            change = compare(reading, base)
            found = Measurement(name, kv, plan.weight_bytes, len(reading.losses), nats, math.exp(nats), *change)
            print(found.row(), flush=True)
            measurements.append(found)
    return measurements


def context_length(model: str, chosen: int | None) -> int:
    """Return the context length to use. Raises `ValueError` if the model does not allow the `chosen` one."""
    longest = describe(LoadOptions(model))[0].limits.max_model_len
    length = min(CONTEXT_LENGTH, longest) if chosen is None else chosen
    if not 3 <= length <= longest:
        raise ValueError(f"--max-model-len {length} is out of range; this model allows 3 to {longest}")
    return length


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL, help="checkpoint folder; the demo model by default")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, metavar="FILE", help='plain text, or .jsonl with "text" in every line')
    source.add_argument(
        "--held-out",
        type=Path,
        metavar="CORPUS",
        help="corpus of train_demo_model.py, whose held-out part is read; needs torch",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the split that holds tales out (default 0)")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        default=list(FORMATS),
        help="weight formats; the others are compared with the first (default: all; a quantized checkpoint keeps its "
        "own, so only the two float formats apply)",
    )
    parser.add_argument("--kv-cache-dtypes", nargs="+", choices=KV_CACHE_DTYPES, default=list(KV_CACHE_DTYPES))
    parser.add_argument(
        "--max-model-len", type=int, help=f"context length in tokens; {CONTEXT_LENGTH}, or the model's if shorter"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser.parse_args()


def main() -> None:
    """Print the table."""
    arguments = parse_arguments()
    try:
        texts = held_out_texts(arguments.held_out, arguments.seed) if arguments.held_out else read_texts(arguments.text)
        length = context_length(arguments.model, arguments.max_model_len)
        print(HEADER)
        measurements = measure(arguments.model, texts, arguments.formats, arguments.kv_cache_dtypes, length)
    except (OSError, ValueError, EngineStartError) as error:
        raise SystemExit(str(error)) from None
    print(f"{measurements[0].tokens} tokens, predicted from at most {length - 2} before them")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(found) for found in measurements], indent=2) + "\n")


if __name__ == "__main__":
    main()
