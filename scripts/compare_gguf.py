"""Distributions of GGUF files against llama.cpp's on the same files: `.venv/bin/python scripts/compare_gguf.py --help`.

llama.cpp's `llama-perplexity` reads a text in pieces and writes the logits of their second halves; Quire computes those
of the same tokens. A model that wants a token before each text has it as the first one of each piece. For each file the
table has the mean KL divergence and the share of positions whose likeliest token is the same: of both from the first
file, usually one of floats, as llama.cpp computes it, and of Quire from llama.cpp. Logits that are more than 16 below
the largest one count as that, since llama.cpp writes them so.

    .venv/bin/python scripts/compare_gguf.py --llama BIN --text README.md model-F32.gguf model-Q4_K_M.gguf
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from bench.builds import header, llama_build, python_call, quire_build

from quire.kernels._native import SamplingConfig
from quire.kernels.errors import ModelError
from quire.kernels.gguf.container import gguf_files, read_gguf
from quire.kernels.gguf.folder import model_folder
from quire.kernels.options import LoadOptions
from quire.kernels.runner import ModelRunner, load_model
from quire.kernels.step import StepInput

LogProbabilities = npt.NDArray[np.float64]

HEADER = f"{'file':<28}{'KL llama.cpp':>14}{'KL Quire':>12}{'same top':>10}{'KL between':>12}{'same top':>10}"
PROGRAM = "llama-perplexity"
_MAGIC = b"_logits_"
_RANGE = 16.0  # of the logits that llama-perplexity writes


@dataclass(frozen=True)
class Logits:
    """Output of `llama-perplexity`: token ids [pieces, length], log probabilities [pieces, positions, vocabulary].

    The positions are those from `first` on, but the last.
    """

    tokens: npt.NDArray[np.int32]
    values: LogProbabilities
    first: int


def read_logits(file: Path) -> Logits:
    """Read the file of `--save-all-logits`: 16 bits for each logit, with a scale and the least one of each position."""
    data = file.read_bytes()
    if data[:8] != _MAGIC:
        raise ValueError(f"{file} does not begin with {_MAGIC.decode()}; is it of this version of llama.cpp?")
    length, vocabulary, pieces = np.frombuffer(data, "<i4", 3, 8).tolist()
    tokens = np.frombuffer(data, "<i4", pieces * length, 20).reshape(pieces, length).copy()
    first, words = length // 2, 2 * ((vocabulary + 1) // 2) + 4
    positions = length - 1 - first
    rows = np.frombuffer(data, "<u2", pieces * positions * words, 20 + tokens.nbytes).reshape(-1, words)
    scale, least = rows[:, :4].copy().view("<f4").T[:, :, None].astype(np.float64)
    values = rows[:, 4 : 4 + vocabulary] * scale + least
    return Logits(tokens, values.reshape(pieces, positions, vocabulary), first)


def llama_command(arguments: argparse.Namespace, gguf: Path, logits: Path) -> list[str]:
    """Return the command by which llama.cpp writes the logits of a model."""
    length = str(arguments.length)
    return [
        str(arguments.llama / PROGRAM), "-m", str(gguf), "-f", str(arguments.text), "-c", length, "-b", length,
        "--chunks", str(arguments.pieces), "-t", str(arguments.threads), "--save-all-logits", str(logits),
    ]  # fmt: skip


def llama_logits(arguments: argparse.Namespace, gguf: Path) -> Logits:
    """Return the logits that llama.cpp computes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits"
        done = subprocess.run(llama_command(arguments, gguf, file), capture_output=True, text=True, check=False)
        if done.returncode != 0 or not file.exists():
            raise ValueError(f"llama-perplexity failed on {gguf}:\n{done.stderr[-2000:]}")
        return read_logits(file)


def quire_logits(model: ModelRunner, tokens: list[int], first: int) -> LogProbabilities:
    """Return the log probabilities after the positions from `first` on, but the last: [positions, vocabulary]."""
    sampling = SamplingConfig(temperature=0.0, prompt_logprobs=model.vocab_size)
    slot = model.sequences.open(tokens, len(tokens), sampling=sampling)
    if not model.sequences.reserve(slot, len(tokens) + 1):
        raise ValueError(f"{len(tokens)} tokens need more KV memory than there is")
    rows = model.run(StepInput([slot], [0], [len(tokens)])).prompt_logprobs[0][first:]
    model.sequences.close(slot)
    values = np.empty((len(rows), model.vocab_size))
    for target, (ids, logprobs, _) in zip(values, rows, strict=True):
        target[ids] = logprobs
    np.maximum(values, values.max(-1, keepdims=True) - _RANGE, out=values)
    return values


def divergence(base: LogProbabilities, other: LogProbabilities) -> float:
    """Return the mean KL divergence of `other` from `base`, in nats."""
    base = base - np.log(np.exp(base).sum(-1, keepdims=True))  # 16 bits have changed the sum
    other = other - np.log(np.exp(other).sum(-1, keepdims=True))
    return float((np.exp(base) * (base - other)).sum(-1).mean())


def agreement(base: LogProbabilities, other: LogProbabilities) -> float:
    """Return the percentage of positions at which both have the same likeliest token."""
    return float((base.argmax(-1) == other.argmax(-1)).mean() * 100)


def first_token(gguf: Path, given: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the token that llama.cpp puts in the place of the `given` ones at the begin of the pieces."""
    metadata = read_gguf(gguf_files(gguf)).metadata
    if not metadata.get("tokenizer.ggml.add_bos_token"):
        return given
    return np.full_like(given, metadata["tokenizer.ggml.bos_token_id"])


def compare(arguments: argparse.Namespace) -> None:
    """Print what is compared, and the table."""
    commands = [shlex.join(llama_command(arguments, gguf, Path("LOGITS"))) for gguf in arguments.files]
    own = {"model": str(arguments.files[0]), "dtype": arguments.dtype, "max_model_len": arguments.length + 1}
    builds = [
        quire_build(python_call("load_model", own), arguments.threads),
        llama_build(arguments.llama / PROGRAM, arguments.threads, commands),
    ]
    print("\n".join(header(builds)))
    print(HEADER)
    base: LogProbabilities | None = None
    for gguf in arguments.files:
        theirs = llama_logits(arguments, gguf)
        options = LoadOptions(
            str(model_folder(gguf)), dtype=arguments.dtype, max_model_len=arguments.length + 1,
            max_num_batched_tokens=arguments.length, num_pages=arguments.length // 32 + 2, threads=arguments.threads,
        )  # fmt: skip
        theirs.tokens[:, :1] = first_token(gguf, theirs.tokens[:, :1])
        model = load_model(options)
        ours = np.stack([quire_logits(model, piece.tolist(), theirs.first) for piece in theirs.tokens])
        base = theirs.values if base is None else base
        print(
            f"{gguf.stem:<28}{divergence(base, theirs.values):>14.5f}{divergence(base, ours):>12.5f}"
            f"{agreement(base, ours):>9.1f}%{divergence(theirs.values, ours):>12.5f}"
            f"{agreement(theirs.values, ours):>9.1f}%",
            flush=True,
        )
    print(f"{ours.shape[0] * ours.shape[1]} positions")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE", help="GGUF files of one model")
    add("--llama", type=Path, required=True, metavar="BIN_DIR", help="folder of llama.cpp's programs")
    add("--text", type=Path, required=True, metavar="FILE", help="plain text")
    add("--length", type=int, default=512, help="tokens of a piece (default 512)")
    add("--pieces", type=int, default=8, help="number of pieces (default 8)")
    add("--threads", type=int, default=2)
    add("--dtype", default="float32", help="of Quire, for what is not quantized (default float32)")
    return parser.parse_args()


def main() -> None:
    """Compare, or say what is wrong."""
    try:
        compare(parse_arguments())
    except (OSError, ValueError, ModelError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
