"""Azure's traces of LLM inference: https://github.com/Azure/AzurePublicDataset, of 2023 and 2024."""

from __future__ import annotations

from datetime import UTC, datetime

from quire.frontend.evaluation.workload.blocks import FreshBlocks, blocks_for
from quire.frontend.evaluation.workload.request import WorkloadRequest
from quire.frontend.evaluation.workload.rows import Columns
from quire.frontend.evaluation.workload.values import check_length, shown, whole_number

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class AzureRows:
    """A date and time, with or without its zone, and two lengths in tokens; prompts share nothing."""

    def __init__(self, header: bytes) -> None:
        self._columns = Columns(header, COLUMNS)
        self._blocks = FreshBlocks()

    def parse(self, line: bytes, _previous: float | None) -> WorkloadRequest:
        """See `Rows`."""
        cells = self._columns.split(line)
        time, prompt, output = self._columns.places
        prompt_tokens = whole_number("ContextTokens", cells[prompt])
        output_tokens = whole_number("GeneratedTokens", cells[output])
        check_length("ContextTokens", prompt_tokens)
        check_length("GeneratedTokens", output_tokens)
        blocks = self._blocks.take(blocks_for(prompt_tokens))
        return WorkloadRequest(_seconds(cells[time]), prompt_tokens, output_tokens, blocks)


def _seconds(text: str) -> float:
    """Since 1970. A time without a zone is taken as UTC, so that no hour is twice or never there."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"TIMESTAMP is {shown(text)}; it must be a date and time such as 2023-11-16 18:15:46.6805900"
        ) from None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
