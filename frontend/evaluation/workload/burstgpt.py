"""BurstGPT's traces: https://github.com/HPMLL/BurstGPT."""

from __future__ import annotations

from quire.frontend.evaluation.workload.blocks import FreshBlocks, blocks_for
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.evaluation.workload.rows import Columns
from quire.frontend.evaluation.workload.values import check_length, check_seconds, shown, whole_number

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
SESSION = "Session ID"


class BurstGptRows:
    """A time in seconds, two lengths in tokens and, in newer files, the session; prompts share nothing.

    A row without response tokens is a request that failed when it was recorded: its length is not known, so it is bad.
    """

    def __init__(self, header: bytes) -> None:
        self._columns = Columns(header, COLUMNS, (SESSION,))
        self._blocks = FreshBlocks()

    def parse(self, line: bytes, _previous: float | None) -> WorkloadRequest:
        """See `Rows`."""
        cells = self._columns.split(line)
        time, prompt, output = self._columns.places
        (session,) = self._columns.optional
        prompt_tokens = whole_number("Request tokens", cells[prompt])
        output_tokens = whole_number("Response tokens", cells[output])
        check_length("Request tokens", prompt_tokens)
        if output_tokens == 0:
            raise ValueError("Response tokens is 0, a request that failed when it was recorded; it must be at least 1")
        check_length("Response tokens", output_tokens)
        blocks = self._blocks.take(blocks_for(prompt_tokens))
        name = None if session is None else cells[session].strip() or None
        return WorkloadRequest(_seconds(cells[time]), prompt_tokens, output_tokens, blocks, session=name)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"Timestamp is {shown(text)}; it must be a number of seconds") from None
    check_seconds("Timestamp", seconds)
    return seconds
