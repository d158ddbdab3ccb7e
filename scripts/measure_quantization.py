"""Perplexity of each weight format: `.venv/bin/python scripts/measure_quantization.py --help`.

The engine reads a text once in each format and returns the log probability of every token, and the likeliest ones at
its place. Formats are compared with the first one token by token, so that the standard error of a change is much
smaller than that of a perplexity. The table also has the root mean square and the largest of the log probabilities'
differences, the KL divergence from the first format (of the 20 likeliest tokens, all others taken as one), and the
share of places whose likeliest token is the same. Judge formats on real weights (`scripts/real_models.py`).

`--saved FOLDER` adds models that `quire quantize` has saved. `--llama FOLDER --gguf FILE` also has llama.cpp's
programs in FOLDER make types of GGUF from FILE, the same weights, by way of bf16. The engine reads them like the other
formats; the last column is llama.cpp's own change of perplexity, against bf16 on the same text in pieces of 512 tokens.

Texts longer than the context are cut into pieces that are read independently; each piece starts with the last token of
the one before, so that every token but the first of a text is predicted once.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import re
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire.frontend import LLM, SamplingParams
from quire.frontend.engine_args import DEMO_MODEL
from quire.frontend.errors import EngineStartError
from quire.frontend.text.tokenizer import Tokenizer
from quire.kernels.gguf.folder import model_folder
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
LIKELIEST = 20  # tokens of which a KL divergence is computed
LLAMA_TYPES = ("Q8_0", "Q4_K_M")
NAME_WIDTH = 12
HEADER = (
    f"{'weights':<{NAME_WIDTH}}{'KV':<6}{'MiB':>9}{'nats/token':>12}{'perplexity':>12}{'change, %':>18}{'rms':>9}"
    f"{'largest':>9}{'KL':>9}{'same top':>10}{'llama.cpp, %':>14}"
)


@dataclass(frozen=True)
class Measurement:
    """Result of one format: bytes of its packed matrices, nats per token, perplexity.

    The change of the perplexity is relative to the first format with the same KV dtype, with its standard error; so are
    the root mean square and the largest of the differences in nats, the KL divergence, and the percentage of places
    with the same likeliest token. `llama_percent` is the change of perplexity in llama.cpp, None where it is not asked.
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
    largest: float
    kl: float
    same_top_percent: float
    llama_percent: float | None = None

    def row(self) -> str:
        """Format a line of the table."""
        size = f"{self.weight_bytes / 2**20:.1f}"
        change = f"{self.change_percent:+.2f} ± {self.error_percent:.2f}"
        llama = "" if self.llama_percent is None else f"{self.llama_percent:+14.2f}"
        return (
            f"{self.weights:<{NAME_WIDTH}}{self.kv:<6}{size:>9}{self.nats:>12.4f}{self.perplexity:>12.3f}{change:>18}"
            f"{self.rms:>9.4f}{self.largest:>9.3f}{self.kl:>9.5f}{self.same_top_percent:>9.2f}%{llama}"
        )


@dataclass(frozen=True)
class Reading:
    """The nats of every token but the first of each prompt, and the log probabilities of the likeliest at its place."""

    losses: list[float]
    likeliest: list[dict[int, float]]

    @property
    def tops(self) -> list[int]:
        """The likeliest token of each place."""
        return [max(entry, key=entry.__getitem__) for entry in self.likeliest]


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
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=LIKELIEST)
    with LLM(model, **options) as llm:
        outputs = llm.generate(prompts, params)
    reading = Reading([], [])
    for prompt, output in zip(prompts, outputs, strict=True):
        for token, entry in zip(prompt, output.prompt_logprobs or (), strict=True):
            if entry is not None:  # the first token has none
                reading.losses.append(-entry[token].logprob)
                reading.likeliest.append({each: found.logprob for each, found in entry.items()})
    return reading


def divergence(base: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the KL divergence of `other` from `base`, in nats: of the tokens that both have, all others as one."""
    shared = base.keys() & other.keys()
    total = sum(math.exp(base[token]) * (base[token] - other[token]) for token in shared)
    rest, other_rest = (max(0.0, 1 - sum(math.exp(each[token]) for token in shared)) for each in (base, other))
    return total + (rest * math.log(rest / other_rest) if rest > 0 < other_rest else 0.0)


def compare(reading: Reading, base: Reading) -> dict[str, float]:
    """Return the fields of a `Measurement` that compare; the standard error is that of independent tokens."""
    differences = [loss - other for loss, other in zip(reading.losses, base.losses, strict=True)]
    ratio = math.exp(statistics.fmean(differences))
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    rms = math.sqrt(statistics.fmean(difference**2 for difference in differences))
    return {
        "change_percent": 100 * (ratio - 1),
        "error_percent": 100 * ratio * error,
        "rms": rms,
        "largest": max(map(abs, differences)),
        "kl": statistics.fmean(map(divergence, base.likeliest, reading.likeliest)),
        "same_top_percent": 100 * statistics.fmean(map(operator.eq, reading.tops, base.tops)),
    }


class Llama:
    """llama.cpp's programs in a folder, and the types of GGUF that they make of a file's weights, below `scratch`."""

    def __init__(self, programs: Path, source: Path, texts: list[str], scratch: Path) -> None:
        self._programs, self._scratch = programs, scratch
        self._text = scratch / "text.txt"
        self._text.write_text("\n\n".join(texts), encoding="utf-8")
        self._base = self._make(source, "BF16")
        self._perplexity = self._measure(self._base)

    def make(self, kind: str) -> tuple[str, float]:
        """Return the model folder of a type, and the change of its perplexity in percent."""
        file = self._make(self._base, kind)
        return str(model_folder(file)), 100 * (self._measure(file) / self._perplexity - 1)

    def _make(self, source: Path, kind: str) -> Path:
        target = self._scratch / f"{kind}.gguf"
        self._run("llama-quantize", "--allow-requantize", source, target, kind)
        return target

    def _measure(self, model: Path) -> float:
        found = re.search(r"PPL = ([0-9.]+)", self._run("llama-perplexity", "-m", model, "-f", self._text, "-c", "512"))
        if found is None:
            raise ValueError("llama-perplexity gave no perplexity; it needs a text of more than 1,024 tokens")
        return float(found[1])

    def _run(self, program: str, *arguments: str | Path) -> str:
        command = [str(self._programs / program), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise ValueError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
        return done.stdout + done.stderr


@dataclass(frozen=True)
class Subject:
    """A row of the table: its name, its model folder with options, and what llama.cpp says of it."""

    name: str
    model: str
    dtype: str
    quantization: str | None = None
    llama_percent: float | None = None


def subjects(
    model: str, formats: list[str], saved: list[Path], llama: Llama | None, types: list[str]
) -> Iterator[Subject]:
    """Yield the formats of a model, then folders with its weights, then the types that llama.cpp makes of these."""
    for name in formats:
        yield Subject(name, model, *FORMATS[name])
    for path in saved:
        yield Subject(path.name, str(path), "bfloat16")
    if llama is not None:
        for kind in types:
            folder, change = llama.make(kind)
            yield Subject(kind, folder, "bfloat16", None, change)


def measure(
    model: str, texts: list[str], rows: list[Subject], kv_cache_dtypes: list[str], length: int
) -> list[Measurement]:
    """Measure every row with every KV dtype, and print a line for each."""
    tokenizer = Tokenizer(model)
    prompts = [piece for text in texts for piece in pieces(tokenizer.encode(text), length - 1)]
    if not prompts:
        raise ValueError("the text has fewer than 2 tokens; give a longer one")
    measurements = []
    for kv in kv_cache_dtypes:
        base: Reading | None = None
        for row in rows:
            options: dict[str, Any] = {"dtype": row.dtype, "quantization": row.quantization, "kv_cache_dtype": kv}
            plan, _ = describe(LoadOptions(row.model, **options))
            reading = read(row.model, {**options, "max_model_len": length}, prompts)
            base = base or reading
            nats = statistics.fmean(reading.losses)
            found = Measurement(
                row.name, kv, plan.weight_bytes, len(reading.losses), nats, math.exp(nats),
                **compare(reading, base), llama_percent=row.llama_percent,
            )  # fmt: skip
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
    parser.add_argument(
        "--saved", type=Path, nargs="+", default=[], metavar="FOLDER", help="the same model, saved by `quire quantize`"
    )
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="of llama-quantize and llama-perplexity")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="the model's weights, of which --llama makes types")
    parser.add_argument(
        "--llama-types", nargs="+", default=list(LLAMA_TYPES), metavar="TYPE", help="default: " + " ".join(LLAMA_TYPES)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args()
    if (arguments.llama is None) != (arguments.gguf is None):
        parser.error("--llama and --gguf go together")
    return arguments


def main() -> None:
    """Print the table."""
    arguments = parse_arguments()
    try:
        texts = held_out_texts(arguments.held_out, arguments.seed) if arguments.held_out else read_texts(arguments.text)
        length = context_length(arguments.model, arguments.max_model_len)
        with tempfile.TemporaryDirectory() as scratch:
            llama = Llama(arguments.llama, arguments.gguf, texts, Path(scratch)) if arguments.llama else None
            rows = [*subjects(arguments.model, arguments.formats, arguments.saved, llama, arguments.llama_types)]
            print(HEADER)
            measurements = measure(arguments.model, texts, rows, arguments.kv_cache_dtypes, length)
    except (OSError, ValueError, EngineStartError) as error:
        raise SystemExit(str(error)) from None
    print(f"{measurements[0].tokens} tokens, predicted from at most {length - 2} before them")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(found) for found in measurements], indent=2) + "\n")


if __name__ == "__main__":
    main()
