"""CSV traces: Azure's (https://github.com/Azure/AzurePublicDataset) and BurstGPT's (https://github.com/HPMLL/BurstGPT).

Prompts of these traces share nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime

from quire.frontend.evaluation.workload.blocks import FreshBlocks, blocks_for
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.evaluation.workload.rows import CsvColumns, check_length, check_seconds, shown, whole_number


class AzureParser:
    """Parser of Azure's LLM inference traces of 2023 and 2024: a date and time, and two lengths in tokens."""

    COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def __init__(self, header: bytes) -> None:
        self._columns = CsvColumns(header, self.COLUMNS)
        self._blocks = FreshBlocks()

    def parse(self, line: bytes, _previous: float | None) -> WorkloadRequest:
        """See `RowParser`."""
        cells = self._columns.split(line)
        time, prompt, output = self._columns.places
        prompt_tokens = whole_number("ContextTokens", cells[prompt])
        output_tokens = whole_number("GeneratedTokens", cells[output])
        check_length("ContextTokens", prompt_tokens)
        check_length("GeneratedTokens", output_tokens)
        blocks = self._blocks.take(blocks_for(prompt_tokens))
        return WorkloadRequest(_azure_seconds(cells[time]), prompt_tokens, output_tokens, blocks)


class BurstGptParser:
    """Parser of BurstGPT's traces: a time in seconds, two lengths in tokens and, in newer files, the session.

    A row without response tokens is a request that failed when it was recorded. Its length is unknown, so it is bad.
    """

    COLUMNS = ("Timestamp", "Request tokens", "Response tokens")

    def __init__(self, header: bytes) -> None:
        self._columns = CsvColumns(header, self.COLUMNS, ("Session ID",))
        self._blocks = FreshBlocks()

    def parse(self, line: bytes, _previous: float | None) -> WorkloadRequest:
        """See `RowParser`."""
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
        return WorkloadRequest(_burstgpt_seconds(cells[time]), prompt_tokens, output_tokens, blocks, session=name)


def _azure_seconds(text: str) -> float:
    """Return seconds since 1970. A time without a zone is taken as UTC, so that no hour repeats or is missing."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"TIMESTAMP is {shown(text)}; it must be a date and time such as 2023-11-16 18:15:46.6805900"
        ) from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def _burstgpt_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"Timestamp is {shown(text)}; it must be a number of seconds") from None
    check_seconds("Timestamp", seconds)
    return seconds
