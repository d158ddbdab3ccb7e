"""The SQLite file of stored responses: its tables, and the checks before it is used."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

_APPLICATION_ID = 0x51756972  # "Quir", in the file's header
_VERSION = 1
_BUSY_SECONDS = 10.0  # to wait for another server's transaction

# Numbers of items are never used again (AUTOINCREMENT): a stale one can't refer to another conversation's item.
_TABLES = """
CREATE TABLE responses (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    created REAL NOT NULL,
    size INTEGER NOT NULL,
    input TEXT NOT NULL,
    output TEXT NOT NULL,
    response BLOB NOT NULL,
    UNIQUE (tenant, id)
);
CREATE INDEX of_ages ON responses (created);
CREATE INDEX of_tenants ON responses (tenant, place, size);
CREATE TABLE items (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL,
    uses INTEGER NOT NULL,
    item BLOB NOT NULL
);
"""


class StoreError(Exception):
    """The database can't do what was asked; the message says why."""


def opened(path: Path) -> sqlite3.Connection:
    """Return a connection to the database, which is made if there is no file. Raises `StoreError`, or sqlite3's."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # readable by its owner only, as the files beside it are
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        _check(connection)
        if not path.stat().st_size:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {16 << 20}").fetchall()
        _create(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection) -> None:
    """Raise `StoreError` for a database that is damaged, of another program, or of another version."""
    application, version, tables = _identity(connection)
    if application != _APPLICATION_ID and (application or tables):
        raise StoreError("it is the database of another program")
    if application == _APPLICATION_ID and version != _VERSION:
        raise StoreError(f"it has version {version} of the format, and this server has {_VERSION}")
    with closing(connection.execute("PRAGMA quick_check(1)")) as found:
        if (problem := found.fetchone()[0]) != "ok":
            raise StoreError(f"it is damaged: {problem}")


def _create(connection: sqlite3.Connection) -> None:
    """Make the tables, unless they are there, or another server makes them now."""
    connection.execute("BEGIN IMMEDIATE")
    if _identity(connection)[0] != _APPLICATION_ID:
        for statement in filter(str.strip, _TABLES.split(";")):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {_VERSION}")
    connection.execute("COMMIT")


def _identity(connection: sqlite3.Connection) -> tuple[int, int, int]:
    """Return the program's id, the version of its format, and the number of tables and indexes."""
    application, version, tables = (
        int(connection.execute(statement).fetchone()[0])
        for statement in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    )
    return application, version, tables
