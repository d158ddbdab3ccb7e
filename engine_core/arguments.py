"""The command line of the engine process, `python -m quire.engine_core`."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from quire.engine_core.scheduling.policies import POLICIES
from quire.kernels.options import KV_DTYPES, LoadOptions
from quire.kernels.weights.quantization import NAMES

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.IGNORECASE)

_MOST_DIGITS = 20
_MOST_INT32 = 2**31 - 1
_MOST_SEQS = 1 << 16
_MOST_BATCHED_TOKENS = 1 << 20
_MOST_THREADS = 1024

_LOG_LEVELS = ("debug", "info", "warning", "error")


def parse_size(text: str) -> int:
    """Bytes of a size such as `4GiB`, `512MB`, `1.5G` or `1048576`. K, M, G, T alone mean KiB, MiB, GiB, TiB."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it as 4GiB, 512MiB or a number of bytes")
    number, unit, binary = match.groups()
    decimal = unit and not binary and text.strip().upper().endswith("B")
    size = float(number) * (1000 if decimal else 1024) ** ("KMGT".index(unit.upper()) + 1 if unit else 0)
    if size >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is more than there can be; write it as 4GiB, 512MiB")
    return int(size)


def whole(most: int) -> Callable[[str], int]:
    """Reads a whole number from 1 to `most`."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > _MOST_DIGITS or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to {most}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """A time above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return value


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line that begins as all errors of an engine do, which its owner looks for."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        self.exit(2, f"error: {message}\n")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; prints what is wrong with them and raises SystemExit(2)."""
    parser = Parser(
        prog="python -m quire.engine_core",
        description="Runs one engine. Prints `READY <address>` once clients can connect. "
        "SIGTERM lets its requests end first, SIGINT aborts them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_model(parser)
    _add_scheduling(parser)
    _add_process(parser)
    parsed = parser.parse_args(arguments)
    if parsed.kv_memory is not None and parsed.num_pages is not None:
        parser.error("--kv-memory and --num-pages both give the size of the KV memory; leave one of them out")
    return parsed


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", required=True, metavar="PATH", help="checkpoint folder")
    group.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="of the model")
    group.add_argument(
        "--quantization",
        choices=NAMES,
        help="of the weights of a float checkpoint; gptq, awq and compressed-tensors only confirm what a checkpoint is",
    )
    group.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="of KV pages; auto is that of the model")
    group.add_argument(
        "--max-model-len", type=whole(_MOST_INT32), metavar="N", help="context length; the model's own by default"
    )
    group.add_argument(
        "--threads", type=whole(_MOST_THREADS), metavar="N", help="as many as the cores granted by default"
    )
    group.add_argument(
        "--pin-threads", action=argparse.BooleanOptionalAction, default=False, help="bind each to a CPU of its own"
    )
    group.add_argument("--cache-dir", type=Path, metavar="DIR", help="where compiled kernels are kept")
    group.add_argument("--weight-cache", type=Path, metavar="DIR", help="keep packed weights there for the next start")


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batches and KV memory")
    group.add_argument(
        "--max-num-seqs", type=whole(_MOST_SEQS), default=256, metavar="N", help="requests that run at once"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=whole(_MOST_BATCHED_TOKENS),
        default=2048,
        metavar="N",
        help="tokens in one step",
    )
    group.add_argument(
        "--page-size", type=whole(_MOST_INT32), default=32, metavar="N", help="tokens in one KV page: 32, 64 or 128"
    )
    group.add_argument("--kv-memory", type=parse_size, metavar="SIZE", help="for KV pages, such as 4GiB")
    group.add_argument("--num-pages", type=whole(_MOST_INT32), metavar="N", help="KV pages, instead of --kv-memory")
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep KV pages for requests that begin with the same tokens",
    )
    group.add_argument("--scheduling-policy", choices=POLICIES, default="fcfs", help="who of those that wait is next")
    group.add_argument(
        "--long-prefill-threshold",
        type=whole(_MOST_BATCHED_TOKENS),
        metavar="N",
        help="tokens of one prompt in a step; by default as many as hardly slow the others",
    )
    group.add_argument(
        "--max-waiting-requests", type=whole(_MOST_INT32), default=4096, metavar="N", help="more are refused"
    )
    group.add_argument(
        "--max-waiting-tokens", type=whole(_MOST_INT32), default=1 << 24, metavar="N", help="of their prompts"
    )
    group.add_argument(
        "--grammar-timeout", type=seconds, default=10.0, metavar="S", help="most time to compile a grammar"
    )
    group.add_argument(
        "--preload-grammars",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="read the tokenizer for grammars at the start, not when the first is needed, which would pause all others",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="for requests that bring none")


def _add_process(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("process and socket")
    group.add_argument("--address", metavar="ADDR", help="ipc://PATH or tcp://HOST:PORT; a private ipc:// by default")
    group.add_argument("--curve-keys", type=Path, metavar="DIR", help="CURVE keys, without which tcp:// is refused")
    group.add_argument("--insecure-tcp", action="store_true", help="allow tcp:// without keys, for whoever reaches it")
    group.add_argument("--heartbeat-seconds", type=seconds, default=1.0, metavar="S", help="between signs of life")
    group.add_argument("--drain-seconds", type=seconds, default=30.0, metavar="S", help="most time to end on SIGTERM")
    group.add_argument("--log-level", choices=_LOG_LEVELS, default="warning", help="of messages on stderr")
    group.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="end when the process that started this one is gone; PID, if given, is that process",
    )


def load_options(parsed: argparse.Namespace) -> LoadOptions:
    """What of the arguments concerns the model."""
    return LoadOptions(
        model=parsed.model,
        dtype=parsed.dtype,
        max_model_len=parsed.max_model_len,
        max_num_seqs=parsed.max_num_seqs,
        max_num_batched_tokens=parsed.max_num_batched_tokens,
        page_size=parsed.page_size,
        kv_bytes=parsed.kv_memory,
        num_pages=parsed.num_pages,
        threads=parsed.threads,
        pin_threads=parsed.pin_threads,
        cache_dir=None if parsed.cache_dir is None else str(parsed.cache_dir),
        weight_cache=None if parsed.weight_cache is None else str(parsed.weight_cache),
        quantization=parsed.quantization,
        kv_dtype=parsed.kv_dtype,
    )
