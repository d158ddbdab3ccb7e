"""Changes of the live view's pictures, against a viewer that applies them."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from engine_mirror import changed
from hypothesis import given
from hypothesis import strategies as st

from quire.frontend.http.operations.changes import PICTURES_PER_MAP, PICTURES_PER_PREFIXES, Feed
from quire.frontend.http.operations.pictures import MAX_BATCH, PagesPicture, Picture, PrefixPicture
from quire.protocol.messages import BatchEntry, SchedulerStats, WaitingEntry

MOST_BYTES_PER_SECOND = 10_000
PICTURES_PER_SECOND = 4


def picture(**values: Any) -> Picture:
    """Return a picture of an idle engine with some values."""
    plain: dict[str, Any] = {
        "stats": msgspec.structs.asdict(SchedulerStats()),
        "batch": [],
        "batch_size": 0,
        "waiting": [],
        "waiting_tokens": 0,
        "pages": PagesPicture(32, [4, 0, 0, 0, 0], 1, bytes(4)),
        "prefixes": [],
        "prefill_tokens_per_second": 0.0,
        "decode_tokens_per_second": 0.0,
    }
    return Picture(**{**plain, **values})


def data_of(encoded: bytes) -> tuple[str, Any]:
    match = re.fullmatch(r"event: (\w+)\ndata: (.*)\n\n", encoded.decode(), re.DOTALL)
    assert match
    return match[1], json.loads(match[2])


SMALL = st.integers(0, 3)
PREFIXES = st.builds(PrefixPicture, SMALL, SMALL, SMALL, st.booleans(), st.sampled_from(["", "a", "b"]), st.just(""))
PICTURES = st.builds(
    picture,
    stats=st.builds(lambda step: msgspec.structs.asdict(SchedulerStats(step=step)), SMALL),
    batch=st.lists(st.builds(BatchEntry, SMALL, st.booleans(), SMALL, SMALL, SMALL, SMALL), max_size=3),
    waiting=st.lists(st.builds(WaitingEntry, SMALL, SMALL, st.just(0.5), st.just("waiting")), max_size=2),
    pages=st.builds(
        lambda cells: PagesPicture(32, [cells.count(state) for state in range(5)], 1, bytes(cells)),
        st.lists(st.integers(0, 4), min_size=40, max_size=40),
    ),
    prefixes=st.lists(PREFIXES, max_size=3, unique_by=lambda each: (each.pages, each.is_salted, each.first)),
    decode_tokens_per_second=st.sampled_from([0.0, 1.5]),
    ttft=st.sampled_from([None, 0.25]),
)


@given(st.lists(PICTURES, min_size=1, max_size=12))
def test_changes_make_the_next_picture(pictures: list[Picture]) -> None:
    feed, mirror = Feed(), None
    for each in pictures:
        expected = json.loads(msgspec.json.encode(each))
        feed.publish(each)
        kind, data = data_of(feed.event_after(feed.number - 1 if mirror else 0))
        assert kind == ("change" if mirror else "picture")
        mirror = changed(mirror, data) if mirror else data
        if feed.number % PICTURES_PER_MAP:
            expected["pages"]["cells"] = mirror["pages"]["cells"]
        if feed.number % PICTURES_PER_PREFIXES and feed.number > 1:
            expected["prefixes"] = mirror["prefixes"]
        assert mirror == expected or feed.number == 1
        assert data_of(feed.event_after(0 if feed.number > 1 else -1)) == ("picture", mirror)


def test_a_viewer_that_missed_a_picture_gets_a_whole_one() -> None:
    feed = Feed()
    for number in range(3):
        feed.publish(picture(batch_size=number))
    assert data_of(feed.event_after(2)) == ("change", {"batch_size": 2})
    assert data_of(feed.event_after(1))[0] == "picture"


def test_another_pool_is_a_whole_picture() -> None:
    feed = Feed()
    feed.publish(picture())
    feed.publish(picture(pages=PagesPicture(32, [8, 0, 0, 0, 0], 1, bytes(8))))
    kind, data = data_of(feed.event_after(1))
    assert (kind, data["pages"]["num_pages"]) == ("picture", [8, 0, 0, 0, 0])


def test_a_busy_engine_is_a_few_kilobytes_a_second() -> None:
    """256 streams, each of which takes a page within a second; waiting requests; prefixes found all the time."""
    feed, cells, sent = Feed(), bytearray(4096), []
    for number in range(1, 1 + 5 * PICTURES_PER_SECOND):
        for stream in range(64 * (number % PICTURES_PER_SECOND), 64 * (number % PICTURES_PER_SECOND + 1)):
            cells[(stream * 16 + number) % len(cells)] = 1
        stats = SchedulerStats(
            step=12_345 + number, running=256, waiting=40, decode_tokens=256, pages_held=4000 + number
        )
        stats.execute_seconds = round(0.0123 + number / 1e6, 6)
        feed.publish(
            picture(
                stats=msgspec.structs.asdict(stats),
                batch=[BatchEntry(900 + row, False, 1, 1234 + number, 1000, 235 + number) for row in range(MAX_BATCH)],
                batch_size=256,
                waiting=[WaitingEntry(1200 + row, 512, number / 10, "waiting") for row in range(16)],
                waiting_tokens=20_000 + number,
                pages=PagesPicture(32, [10, 4000 + number, 5, 81, 0], 1, bytes(cells)),
                prefixes=[PrefixPicture(row + number, 9, 3, False, f"{row} " * 60, "z " * 60) for row in range(16)],
                decode_tokens_per_second=5000.0 + number,
                itl=0.0123 + number / 1e6,
            )
        )
        if number > PICTURES_PER_SECOND:
            sent.append(len(feed.event_after(number - 1)))
    assert sum(sent) / len(sent) * PICTURES_PER_SECOND < MOST_BYTES_PER_SECOND
