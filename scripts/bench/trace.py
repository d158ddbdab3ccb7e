"""Traces of real workloads: when requests came, how long they were and what they shared; no text."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np

BLOCK = 512
"""Tokens of a block of a prompt. Prompts that begin with the same blocks begin with the same tokens."""


class TraceError(ValueError):
    """A trace that can't be read; the text names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request that came `arrival` seconds after the trace began; lengths in tokens.

    `blocks` names the blocks of its prompt, of which the last is cut to the prompt's length.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class _MooncakeRow(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path) -> list[TraceRequest]:
    """Reads Mooncake's JSON lines or, by the ending `.csv`, Azure's table; in order of arrival, the first at 0.

    Raises TraceError for a malformed line, or a file that can't be read or has no request.
    """
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            requests = list(_azure(path, lines) if path.suffix == ".csv" else _mooncake(path, lines))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}; give a trace as JSON lines (Mooncake) or .csv (Azure)") from error
    if not requests:
        raise TraceError(f"{path} has no requests; give a trace with at least one")
    requests.sort(key=lambda request: request.arrival)
    first = requests[0].arrival
    return [replace(request, arrival=request.arrival - first) for request in requests]


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, 1):
        try:
            row = msgspec.json.decode(line, type=_MooncakeRow)
            yield _checked(row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids)
        except ValueError as error:
            raise TraceError(f"{path}:{number}: {error}") from error


def _azure(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Nobody shares anything: each block has a name of its own."""
    num_blocks = 0
    rows = csv.DictReader(lines)
    for row in rows:
        try:
            arrival = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            blocks = range(num_blocks, num_blocks + blocks_for(prompt))
            num_blocks += len(blocks)
            yield _checked(arrival, prompt, output, blocks)
        except KeyError as error:
            raise TraceError(
                f"{path}:1: there is no column {error}; the columns must be TIMESTAMP, ContextTokens, GeneratedTokens"
            ) from error
        except (ValueError, TypeError) as error:
            raise TraceError(f"{path}:{rows.line_num}: {error}") from error


def _checked(arrival: float, prompt: int, output: int, blocks: list[int] | range) -> TraceRequest:
    if prompt < 1 or output < 1:
        raise ValueError(f"a request of {prompt} prompt and {output} output tokens; each must be at least 1")
    if len(blocks) != blocks_for(prompt):
        raise ValueError(
            f"{len(blocks)} hash_ids for a prompt of {prompt} tokens; there must be one for each {BLOCK}, "
            f"{blocks_for(prompt)}"
        )
    return TraceRequest(arrival, prompt, output, tuple(blocks))


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens of a prompt."""
    return -(-tokens // BLOCK)


class Prompts:
    """Makes the prompts of a trace; the same block has the same tokens in each."""

    def __init__(self, vocab_size: int) -> None:
        # Prompts share the int objects, so that a token that waits takes 8 bytes and not 40.
        self._ints = np.array(range(vocab_size), dtype=object)

    def tokens(self, request: TraceRequest) -> list[int]:
        """The prompt's tokens: pseudo-random ones that the block and the place in it decide."""
        places = np.asarray(request.blocks)[:, np.newaxis] * BLOCK + np.arange(BLOCK)
        mixed = (places * 0x9E3779B1 >> 13) % len(self._ints)
        prompt: list[int] = self._ints[mixed.ravel()[: request.prompt_tokens]].tolist()
        return prompt


def infinite_cache_hits(requests: list[TraceRequest], page_size: int) -> int:
    """Prompt tokens that a prefix cache without bounds would find, in full pages, serving one request after the other.

    As in the engine, at least one token of each prompt is left to compute. What was answered is not looked for, since
    the trace does not tell it. `page_size` divides BLOCK.
    """
    nodes: dict[tuple[int, int], int] = {}  # (node of the prefix, block): node
    computed: list[int] = [0]  # by node: tokens of its block that have been computed, in full pages
    hits = 0
    for request in requests:
        node, found, left = 0, 0, request.prompt_tokens
        in_cache = True
        for block in request.blocks:
            node = nodes.setdefault((node, block), len(computed))
            if node == len(computed):
                computed.append(0)
            tokens = min(left, BLOCK) // page_size * page_size
            if in_cache:
                found += min(tokens, computed[node])
                in_cache = computed[node] == BLOCK
            computed[node] = max(computed[node], tokens)
            left -= BLOCK
        hits += min(found, (request.prompt_tokens - 1) // page_size * page_size)
    return hits


def shared_blocks(requests: list[TraceRequest]) -> float:
    """The share of blocks that came before with the same blocks in front: the figure that papers tell of a trace."""
    nodes: dict[tuple[int, int], int] = {}  # (node of the prefix, block): node
    for request in requests:
        node = 0
        for block in request.blocks:
            node = nodes.setdefault((node, block), len(nodes) + 1)
    return 1 - len(nodes) / sum(len(request.blocks) for request in requests)
