"""The SQLite database of stored responses, bounded in entries, bytes and age."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quire.frontend.http.response_file import StoreError, opened

_SECONDS_A_DAY = 86_400

_NUMBERS = "SELECT value FROM json_each(?)"


@dataclass(frozen=True, slots=True)
class StoredItem:
    """An item of a conversation as JSON; `number` is its key in the database, None if it is not there yet."""

    item: bytes
    number: int | None = None


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON. `input`: the whole conversation before it; `output`: what it adds to the conversation."""

    id: str
    response: bytes
    input: Sequence[StoredItem]
    output: Sequence[StoredItem]


class ResponseDatabase:
    """Stored responses of all tenants, none of which sees another's.

    The items of a conversation are shared by its responses, so that a conversation of n turns takes the space of n, and
    an item lives as long as one of them. Beyond a bound, the tenant that has the most loses its oldest response.
    `max_bytes` bounds the pages in use, `max_entry_bytes` a response with its conversation. Several processes may use
    one file. Methods must be called by one thread at a time. `clock`: seconds since 1970.
    Raises `ValueError` for a file that can't be used, and the methods `StoreError`.
    """

    def __init__(
        self,
        path: str,
        *,
        max_entries: int,
        max_bytes: int,
        max_entry_bytes: int,
        max_days: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._max_entry_bytes = max_entry_bytes
        self._max_seconds = max_days * _SECONDS_A_DAY
        self._clock = clock
        try:
            self._connection = opened(Path(path))
            with self._transaction():
                self._drop_old()
                self._fit()
            self._connection.executescript("PRAGMA incremental_vacuum")  # execute() would free one page only
        except (OSError, sqlite3.Error, StoreError) as error:
            raise ValueError(
                f"response_store={path!r} can't be used: {error}; give another path, or move this file away"
            ) from None

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Store a response, in place of one with the same id."""
        size = len(stored.response) + sum(len(each.item) for each in (*stored.input, *stored.output))
        if size > self._max_entry_bytes:
            raise StoreError(f"it has {size} bytes with its conversation, and {self._max_entry_bytes} are allowed")
        with self._transaction():
            self._drop_old()
            self._drop(tenant, stored.id)
            given, produced = (self._numbers(tenant, items) for items in (stored.input, stored.output))
            for numbers in (given, produced):
                self._execute(f"UPDATE items SET uses = uses + 1 WHERE number IN ({_NUMBERS})", json.dumps(numbers))  # noqa: S608
            self._execute(
                "INSERT INTO responses (tenant, id, created, size, input, output, response) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                *(tenant, stored.id, self._clock(), size, json.dumps(given), json.dumps(produced), stored.response),
            )
            self._fit()

    def response(self, tenant: str, response_id: str) -> bytes | None:
        """Return a response as JSON; None if there is none."""
        with self._errors():
            row = self._row(tenant, response_id, "response")
            return None if row is None else bytes(row[0])

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response with its conversation; None if there is none."""
        with self._errors():
            self._execute("BEGIN")  # one state of the database for all reads
            row = self._row(tenant, response_id, "response, input, output")
            if row is None:
                return None
            given, produced = (self._items(tenant, numbers) for numbers in row[1:])
            return StoredResponse(response_id, bytes(row[0]), given, produced)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response; return False if there is none."""
        with self._transaction():
            self._drop_old()
            return self._drop(tenant, response_id)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _row(self, tenant: str, response_id: str, columns: str) -> tuple[bytes, ...] | None:
        found: tuple[bytes, ...] | None = self._execute(
            f"SELECT {columns} FROM responses WHERE tenant = ? AND id = ? AND created >= ?",  # noqa: S608
            *(tenant, response_id, self._clock() - self._max_seconds),
        ).fetchone()
        return found

    def _items(self, tenant: str, numbers: bytes) -> list[StoredItem]:
        rows = self._execute(
            "SELECT item, number FROM json_each(?) JOIN items ON number = value WHERE tenant = ? ORDER BY key",
            *(numbers, tenant),
        )
        return [StoredItem(bytes(item), number) for item, number in rows]

    def _numbers(self, tenant: str, items: Sequence[StoredItem]) -> list[int]:
        """Return the numbers of items, after inserting those that the database does not have, or no longer has."""
        given = json.dumps([each.number for each in items if each.number is not None])
        known = {
            number
            for (number,) in self._execute(
                f"SELECT number FROM items WHERE tenant = ? AND number IN ({_NUMBERS})",  # noqa: S608
                *(tenant, given),
            )
        }
        kept = (each.number if each.number in known else None for each in items)
        return [
            self._insert(tenant, each.item) if number is None else number
            for each, number in zip(items, kept, strict=True)
        ]

    def _insert(self, tenant: str, item: bytes) -> int:
        number = self._execute("INSERT INTO items (tenant, uses, item) VALUES (?, 0, ?)", tenant, item).lastrowid
        assert number is not None
        return number

    def _fit(self) -> None:
        """Drop responses until both bounds hold."""
        while (count := self._count()) > 1:
            if count > self._max_entries:
                self._drop_oldest("count(*)")
            elif self._num_bytes() > self._max_bytes:
                self._drop_oldest("sum(size)")
            else:
                return

    def _count(self) -> int:
        return int(self._execute("SELECT count(*) FROM responses").fetchone()[0])

    def _num_bytes(self) -> int:
        pages, free, size = (
            int(self._execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def _drop_oldest(self, measure: str) -> None:
        """Drop the oldest response of the tenant that has the most by this measure."""
        self._drop(
            *self._execute(
                f"SELECT tenant, id FROM responses WHERE tenant = (SELECT tenant FROM responses GROUP BY tenant "  # noqa: S608
                f"ORDER BY {measure} DESC LIMIT 1) ORDER BY place LIMIT 1"
            ).fetchone()
        )

    def _drop_old(self) -> None:
        old = self._execute("SELECT tenant, id FROM responses WHERE created < ?", self._clock() - self._max_seconds)
        for tenant, response_id in old.fetchall():
            self._drop(tenant, response_id)

    def _drop(self, tenant: str, response_id: str) -> bool:
        """Remove a response and the items that no other one has; return False if there is no such response."""
        which = "FROM responses WHERE tenant = ? AND id = ?"
        gone = self._execute(f"SELECT input, output {which}", tenant, response_id).fetchall()
        self._execute(f"DELETE {which}", tenant, response_id)
        for numbers in (each for row in gone for each in row):
            self._execute(f"UPDATE items SET uses = uses - 1 WHERE number IN ({_NUMBERS})", numbers)  # noqa: S608
            self._execute(f"DELETE FROM items WHERE uses <= 0 AND number IN ({_NUMBERS})", numbers)  # noqa: S608
        return bool(gone)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors():
            self._execute("BEGIN IMMEDIATE")
            yield
            self._execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """End with no transaction open. Raises `StoreError` in place of the database's errors."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(str(error)) from None
        finally:
            if self._connection.in_transaction:
                self._connection.rollback()

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)
