"""The database of stored responses: bounds, isolation, sharing of items, and files that can't be used."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.http.response_database import ResponseDatabase, StoredItem, StoredResponse
from quire.frontend.http.response_file import StoreError

MIB = 1 << 20


def opened(
    path: Path, entries: int = 100, size: int = 16 * MIB, days: float = 1.0, clock: Callable[[], float] = time.time
) -> ResponseDatabase:
    return ResponseDatabase(
        str(path), max_entries=entries, max_bytes=size, max_entry_bytes=size // 2, max_days=days, clock=clock
    )


def turn(name: str, *given: StoredItem, answer: str = "answer") -> StoredResponse:
    return StoredResponse(name, json.dumps({"id": name}).encode(), given, [StoredItem(answer.encode())])


def words(stored: StoredResponse | None) -> list[str]:
    assert stored is not None
    return [each.item.decode() for each in (*stored.input, *stored.output)]


def conversation(database: ResponseDatabase, tenant: str, name: str) -> list[StoredItem]:
    found = database.get(tenant, name)
    assert found is not None
    return [*found.input, *found.output]


def num_rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_a_conversation_survives_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(opened(path)) as database:
        database.put("a", turn("1", StoredItem(b"one")))
        database.put("a", turn("2", *conversation(database, "a", "1"), StoredItem(b"two")))
        assert num_rows(path, "items") == 4  # of which both responses share two
        assert database.delete("a", "1")
        assert database.get("a", "1") is None
    with closing(opened(path)) as database:
        assert words(database.get("a", "2")) == ["one", "answer", "two", "answer"]
        assert not database.delete("a", "1")
        assert database.delete("a", "2")
        assert num_rows(path, "items") == 0


def test_tenants_do_not_see_each_others_responses_and_items(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(opened(path)) as database:
        database.put("a", turn("1", StoredItem(b"secret")))
        database.put("b", turn("1", StoredItem(b"other")))
        [secret, *_] = conversation(database, "a", "1")
        assert (words(database.get("a", "1")), words(database.get("b", "1"))) == (
            ["secret", "answer"],
            ["other", "answer"],
        )
        assert database.response("c", "1") is None
        assert not database.delete("c", "1")
        database.put("b", turn("2", StoredItem(b"mine", secret.number)))  # a number that is another tenant's
        assert words(database.get("b", "2")) == ["mine", "answer"]
        assert database.delete("b", "1")
        assert database.get("a", "1") is not None


def test_items_that_are_gone_meanwhile_are_stored_again(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "store.db")) as database:
        database.put("a", turn("1", StoredItem(b"one")))
        before = conversation(database, "a", "1")
        database.delete("a", "1")
        database.put("a", turn("other", StoredItem(b"x"), StoredItem(b"y")))
        database.put("a", turn("2", *before))
        assert words(database.get("a", "2")) == ["one", "answer", "answer"]


def test_the_same_id_replaces(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(opened(path)) as database:
        database.put("a", turn("1", StoredItem(b"one")))
        database.put("a", turn("1", StoredItem(b"two")))
        assert words(database.get("a", "1")) == ["two", "answer"]
        assert (num_rows(path, "responses"), num_rows(path, "items")) == (1, 2)


def test_the_tenant_with_the_most_loses_its_oldest(tmp_path: Path) -> None:
    with closing(opened(tmp_path / "store.db", entries=4)) as database:
        for name in "12":
            database.put("small", turn(name))
        for name in "12345":
            database.put("big", turn(name))
        kept = [name for name in "12345" if database.response("big", name)]
        assert kept in (["4", "5"], ["3", "4", "5"])
        assert all(database.response("small", name) for name in "12"[3 - len(kept) :])


def test_the_file_keeps_to_its_size(tmp_path: Path) -> None:
    path, size = tmp_path / "store.db", MIB
    with closing(opened(path, size=size)) as database:
        for index in range(40):
            database.put("a", turn(str(index), StoredItem(os.urandom(100_000))))
        kept = [index for index in range(40) if database.response("a", str(index))]
        assert kept == list(range(40 - len(kept), 40))
        assert 5 <= len(kept) <= 10
        with pytest.raises(StoreError, match="524288 are allowed"):
            database.put("a", turn("big", StoredItem(bytes(600_000))))
        assert database.response("a", "39")
    assert path.stat().st_size < size + 200_000
    with closing(opened(path, size=size // 2)) as database:
        assert database.response("a", "39")
    assert path.stat().st_size < size // 2 + 200_000


def test_old_responses_go(tmp_path: Path) -> None:
    path, now = tmp_path / "store.db", [1e9]
    with closing(opened(path, days=2.0, clock=lambda: now[0])) as database:
        database.put("a", turn("1", StoredItem(b"one")))
        now[0] += 1.5 * 86_400
        database.put("a", turn("2", *conversation(database, "a", "1")))
        now[0] += 86_400
        assert database.response("a", "1") is None
        assert database.get("a", "1") is None
        assert words(database.get("a", "2")) == ["one", "answer", "answer"]
        assert not database.delete("a", "1")
        assert num_rows(path, "responses") == 1


def test_two_servers_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(opened(path)) as one, closing(opened(path)) as two:
        one.put("a", turn("1", StoredItem(b"one")))
        two.put("a", turn("2", *conversation(two, "a", "1")))
        assert words(one.get("a", "2")) == ["one", "answer", "answer"]
        assert one.delete("a", "1")
        assert two.get("a", "1") is None


def test_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with closing(opened(path)) as database:
        database.put("a", turn("1"))
        modes = [stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()]
    assert modes == [0o600] * len(modes)
    assert len(modes) >= 2  # with the log


def other_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (x)")


def other_version(path: Path) -> None:
    opened(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 7")


def damaged(path: Path) -> None:
    with closing(opened(path)) as database:
        for index in range(9):
            database.put("a", turn(str(index), StoredItem(bytes(9000))))
    data = bytearray(path.read_bytes())
    data[4096 : len(data) // 2] = os.urandom(len(data) // 2 - 4096)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_bytes(os.urandom(8192)), "not a database"),
        (other_program, "another program"),
        (other_version, "version 7"),
        (damaged, "damaged|malformed"),
        (Path.mkdir, "directory"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    path = tmp_path / "store.db"
    make(path)
    before = None if path.is_dir() else path.read_bytes()
    with pytest.raises(ValueError, match=f"response_store='.*store.db' can't be used: .*({words})"):
        opened(path)
    assert before is None or path.read_bytes() == before
    with pytest.raises(ValueError, match="No such file"):
        opened(tmp_path / "missing" / "store.db")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.sampled_from(["put", "on", "delete"]))))
def test_what_is_stored_is_what_a_dictionary_would_hold(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, str]]
) -> None:
    path, model = tmp_path_factory.mktemp("stores") / "store.db", dict[tuple[str, str], list[str]]()
    with closing(opened(path)) as database:
        for index, (tenant, number, step) in enumerate(steps):
            name, text = str(number), f"item {index}"
            if step == "delete":
                assert database.delete(tenant, name) == (model.pop((tenant, name), None) is not None)
                continue
            known = [key for key in model if key[0] == tenant and step == "on"]
            before = conversation(database, *known[0]) if known else []
            database.put(tenant, turn(name, *before, StoredItem(text.encode()), answer=f"to {text}"))
            model[tenant, name] = [*(model[known[0]] if known else []), text, f"to {text}"]
        for key, expected in model.items():
            assert words(database.get(*key)) == expected
        assert num_rows(path, "responses") == len(model)
        assert num_rows(path, "items") == len({text for texts in model.values() for text in texts})
