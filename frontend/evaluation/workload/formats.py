"""Formats of traces, and their detection from the first line."""

from __future__ import annotations

from typing import Literal, get_args

from quire.frontend.evaluation.workload.mooncake import FIELDS, MooncakeParser
from quire.frontend.evaluation.workload.rows import RowParser, header_names, shown
from quire.frontend.evaluation.workload.tables import AzureParser, BurstGptParser

Format = Literal["mooncake", "azure", "burstgpt"]
FORMATS: tuple[Format, ...] = get_args(Format)

_TABLES: dict[Format, type[AzureParser | BurstGptParser]] = {"azure": AzureParser, "burstgpt": BurstGptParser}
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
_KNOWN = (
    f"JSON lines with {FIELDS}; or a CSV header with "
    f"{' or '.join(', '.join(table.COLUMNS) for table in _TABLES.values())}"
)


def has_header(name: Format) -> bool:
    """Return True if the first line of this format is a header."""
    return name in _TABLES


def parser_for(name: Format, first: bytes) -> RowParser:
    """Return a parser for the file with this first line. Raises ValueError if columns are missing."""
    return _TABLES[name](first) if name in _TABLES else MooncakeParser()


def detect(first: bytes) -> Format:
    """Return the format of the file with this first line, even if some columns are missing. Raises ValueError."""
    for magic, compression in _COMPRESSED.items():
        if first.startswith(magic):
            raise ValueError(f"the file is compressed with {compression}; decompress it first")
    if first.lstrip().startswith(b"{"):
        return "mooncake"
    found = {name: _num_found(table.COLUMNS, first) for name, table in _TABLES.items()}
    best = max(found, key=lambda name: found[name])
    if not found[best]:
        raise ValueError(f"the first line is {shown(first)}, of no known format; it must be {_KNOWN}")
    return best


def _num_found(columns: tuple[str, ...], header: bytes) -> int:
    try:
        return len(set(columns) & set(header_names(header)))
    except ValueError:
        return 0
