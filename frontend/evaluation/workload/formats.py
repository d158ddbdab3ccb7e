"""The formats of traces, and how one is told from its first line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from quire.frontend.evaluation.workload import azure, burstgpt
from quire.frontend.evaluation.workload.azure import AzureRows
from quire.frontend.evaluation.workload.burstgpt import BurstGptRows
from quire.frontend.evaluation.workload.mooncake import FIELDS, MooncakeRows
from quire.frontend.evaluation.workload.rows import Rows, header_names
from quire.frontend.evaluation.workload.values import shown

Format = Literal["mooncake", "azure", "burstgpt"]
FORMATS: tuple[Format, ...] = get_args(Format)

_TABLES: dict[Format, tuple[tuple[str, ...], Callable[[bytes], Rows]]] = {
    "azure": (azure.COLUMNS, AzureRows),
    "burstgpt": (burstgpt.COLUMNS, BurstGptRows),
}
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
}
_KNOWN = (
    f"JSON lines with {FIELDS}; or a CSV header with {' or '.join(', '.join(each) for each, _ in _TABLES.values())}"
)


def has_header(name: Format) -> bool:
    """Whether the first line is not a row."""
    return name in _TABLES


def rows_of(name: Format, first: bytes) -> Rows:
    """The reader of the file whose first line this is. Raises ValueError if columns are missing."""
    return _TABLES[name][1](first) if name in _TABLES else MooncakeRows()


def detect(first: bytes) -> Format:
    """The format of the file whose first line this is, also if some columns are missing. Raises ValueError."""
    for magic, compression in _COMPRESSED.items():
        if first.startswith(magic):
            raise ValueError(f"the file is compressed with {compression}; decompress it first")
    if first.lstrip().startswith(b"{"):
        return "mooncake"
    found = {name: _num_found(columns, first) for name, (columns, _) in _TABLES.items()}
    best = max(found, key=lambda name: found[name])
    if not found[best]:
        raise ValueError(f"the first line is {shown(first)}, of no known format; it must be {_KNOWN}")
    return best


def _num_found(columns: tuple[str, ...], header: bytes) -> int:
    try:
        return len(set(columns) & set(header_names(header)))
    except ValueError:
        return 0
