"""Target `traces`: the readers of traces. An input is a byte that chooses the options, and then the file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random

from fuzzing.target import mutate_json, replace

from quire.frontend.evaluation.workload.blocks import Prompts, blocks_for
from quire.frontend.evaluation.workload.formats import FORMATS
from quire.frontend.evaluation.workload.lines import TraceError
from quire.frontend.evaluation.workload.reading import read_trace
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.evaluation.workload.rows import MOST_TOKENS

_FORMATS = (None, *FORMATS)
_SKIP_BAD = 0x80
_LONGEST_MADE = 4096  # prompts of which the tokens are made
_MOST_ROWS = 1000

_MOONCAKE = (
    b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    b'{"timestamp": 27.5, "input_length": 40, "output_length": 5, "hash_ids": [7, 9], "block_tokens": 32}\n'
    b'{"input_length": 40, "output_length": 5, "session_id": "a", "delay": 5.5, "text_input": "text"}\n'
    b'{"timestamp": 90, "input_length": 4, "output_length": 5, "session_id": 3, "messages": [{"role": "user"}], '
    b'"params": {"temperature": 0.5, "logit_bias": {"5": 1.0}, "stop": ["a"], "structured_outputs": null}}\n'
)
_AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    b'2023-11-16T18:15:50+01:00,"396",109.0\r\n'
)
_BURSTGPT = (
    b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,,1.5,ChatGPT,472,18,490,Conversation log\n45,3,1.5,GPT-4,1087,0,230,API log\n46.5,3,1,GPT-4,7,9,16,API log\n"
)


class Traces:
    """Every file yields requests within the documented limits, in order, or raises TraceError."""

    words = (
        *(
            "timestamp",
            "input_length",
            "output_length",
            "hash_ids",
            "block_tokens",
            "delay",
            "session_id",
            "text_input",
        ),
        *("messages", "params", "TIMESTAMP", "ContextTokens", "GeneratedTokens", "Timestamp", "Request tokens"),
        *("Response tokens", "Session ID", "logit_bias", "temperature", "1e999", "NaN", "\ufeff", '""'),
    )

    def __init__(self, folder: Path) -> None:
        self._path = folder / "trace"
        self._prompts = Prompts(1000, seed=3)

    def seeds(self) -> Iterator[bytes]:
        """See Target."""
        for text in (_MOONCAKE, _AZURE, _BURSTGPT):
            for options in (0, _SKIP_BAD):
                yield bytes([options]) + text
            lines = text.splitlines(keepends=True)
            yield b"\0" + b"".join(lines[:1] + lines[-1:])
        yield b"\1" + _MOONCAKE
        yield b"\2" + _AZURE
        yield b"\3" + _BURSTGPT

    def test(self, data: bytes) -> None:
        """See Target."""
        options = data[0] if data else 0
        replace(self._path, data[1:])
        last = 0.0
        try:
            trace = read_trace(
                self._path, format=_FORMATS[options % len(_FORMATS)], skip_bad=bool(options & _SKIP_BAD),
                max_requests=_MOST_ROWS,
            )  # fmt: skip
            for request in trace:
                assert last <= request.arrival < math.inf
                last = request.arrival
                self._check(request)
        except TraceError as error:
            if str(self._path) not in str(error):
                raise AssertionError("the error does not name the file") from error

    def _check(self, request: WorkloadRequest) -> None:
        assert 1 <= request.prompt_tokens <= MOST_TOKENS
        assert 1 <= request.output_tokens <= MOST_TOKENS
        assert 0 <= request.delay < math.inf
        assert len(request.blocks) == blocks_for(request.prompt_tokens, request.block_tokens)
        if request.prompt_tokens <= _LONGEST_MADE and request.block_tokens <= _LONGEST_MADE:
            assert len(self._prompts.tokens(request)) == request.prompt_tokens

    def mutate(self, data: bytes, random: Random) -> bytes:
        """See Target."""
        lines = data[1:].splitlines()
        if not lines:
            raise ValueError("no line")
        at = random.randrange(len(lines))
        if random.randrange(4) == 0:
            lines.insert(random.randrange(len(lines) + 1), lines[at])
        elif lines[at].startswith(b"{"):
            lines[at] = mutate_json(lines[at], random)
        else:
            cells = lines[at].split(b",")
            cells[random.randrange(len(cells))] = random.choice((*cells, b"", b"-1", b"1e999", b'"', b"nan", b"9" * 40))
            lines[at] = b",".join(cells)
        return data[:1] + b"\n".join(lines)
