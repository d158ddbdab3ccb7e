"""The index of texts that drafts come from, against a search of everything, and what a proposer makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels._native import Sequences, TextProposer, TextProposerConfig, TokenIndex

END = -1
MANY = 10_000
tokens = st.integers(0, 3)  # few, so that runs repeat
texts = st.lists(st.lists(tokens, max_size=60), min_size=1, max_size=6)


def longest_matches(text: list[int], sequence: list[int], run: int, longest: int) -> list[tuple[int, int]]:
    """Return what `TokenIndex.find` is to find in the tokens that are kept: (place in the text, length)."""
    found: list[tuple[int, int]] = []
    for place in range(len(text) - 1, -1, -1):
        length = 0
        while length < min(longest, len(sequence), place) and text[place - 1 - length] == sequence[-1 - length]:
            length += 1
        if text[place] != END and length >= run:
            found.append((place, length))
    most = max((length for _, length in found), default=0)
    return [match for match in found if match[1] == most]


@settings(max_examples=300)
@given(texts=texts, sequence=st.lists(tokens, max_size=30), run=st.integers(1, 4), capacity=st.integers(4, 200))
def test_the_longest_matches_are_found_in_what_is_kept(
    texts: list[list[int]], sequence: list[int], run: int, capacity: int
) -> None:
    index, written = TokenIndex(run, capacity), list[int]()
    for text in texts:
        for token in text:
            index.append(token)
        index.end_text()
        written += [*text, END]
    assert index.end == len(written)
    kept = 1 << (capacity - 1).bit_length()
    first = max(0, len(written) - kept)
    assert [index.token(place) for place in range(first, len(written))] == written[first:]
    assert index.token(first - 1) == END
    expected = longest_matches(written[first:], sequence, run, 8)
    assert index.find(sequence, 8, MANY) == [(first + place, length) for place, length in expected]


def test_texts_before_a_place_are_dropped() -> None:
    index = TokenIndex(2, 64)
    for token in (1, 2, 3, 1, 2, 4):
        index.append(token)
    assert [place for place, _ in index.find([1, 2], 8, MANY)] == [5, 2]
    index.forget_before(3)
    assert [place for place, _ in index.find([1, 2], 8, MANY)] == [5]


@pytest.mark.parametrize(("run", "capacity"), [(0, 10), (5, 4), (1, 0), (65, 100)])
def test_impossible_sizes_are_rejected(run: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="an index of"):
        TokenIndex(run, capacity)


def sequence_of(sequences: Sequences, given: list[int], num_prompt: int, salt: str | None = "") -> int:
    slot = sequences.open(given, num_prompt, cache_salt=salt)
    sequences.start(slot, len(given))
    return slot


def test_the_majority_of_places_is_followed() -> None:
    sequences = Sequences(8, 32, 64)
    slot = sequence_of(sequences, [1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 7, 8, 1, 2], 14)
    for majority, expected in ((False, [7, 8]), (True, [3, 9])):
        proposer = TextProposer(sequences, TextProposerConfig(shortest=2, longest=2, majority=majority))
        assert proposer.propose([slot], [2], 0.0) == [2]
        assert sequences.tail(slot, 14) == expected
        sequences.truncate(slot, 14)


@pytest.mark.parametrize("majority", [False, True])
@pytest.mark.parametrize("period", [[5], [5, 6], [5, 6, 7], [5, 6, 5, 7]])
def test_what_repeats_itself_at_once_goes_on_from_its_drafts(period: list[int], majority: bool) -> None:
    """However short what is repeated is. A prediction that has ended does not begin again."""
    sequences = Sequences(8, 32, 64)
    given = [1, 2, *period * 4][: 2 + 3 * len(period)]
    config = TextProposerConfig(shortest=2, longest=8, majority=majority)
    slot = sequence_of(sequences, given, 2)
    assert TextProposer(sequences, config).propose([slot], [9], 0.0) == [9]
    assert sequences.tail(slot, len(given)) == (period * 9)[:9]
    other = sequence_of(sequences, [1, 2, 3, 4, 10], 4)
    proposer = TextProposer(sequences, config)
    proposer.predict(other, [10, 11, 12])
    assert proposer.propose([other], [9], 0.0) == [2]


def test_drafts_end_where_they_hardly_hold() -> None:
    sequences = Sequences(8, 32, 64)
    slot = sequence_of(sequences, [1, 2, 3, 4, 5, 6, 7, 1, 2], 9)
    proposer = TextProposer(sequences, TextProposerConfig(shortest=2, longest=8))
    counts = []
    for least in (0.0, 0.3, 0.5, 0.99):
        counts += proposer.propose([slot], [5], least)
        sequences.truncate(slot, 9)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 5
    assert counts[-1] == 0


def test_what_has_not_held_is_proposed_less() -> None:
    sequences = Sequences(8, 32, 64)
    slot = sequence_of(sequences, [1, 2, 3, 4, 5, 6, 7, 1, 2], 9)
    proposer = TextProposer(sequences, TextProposerConfig(shortest=2, longest=8))
    before = proposer.acceptance(2)
    for _ in range(20):
        if proposer.propose([slot], [4], 0.2) == [0]:
            break
        proposer.learn([slot], [0])
        sequences.truncate(slot, 9)
    else:
        pytest.fail("drafts that never hold go on")
    assert proposer.acceptance(2) < before
    for _ in range(300):  # it is tried again later
        if proposer.propose([slot], [4], 0.2) != [0]:
            return
    pytest.fail("nothing is ever tried again")


def test_answers_are_found_under_their_salt() -> None:
    sequences = Sequences(8, 32, 64)
    proposer = TextProposer(sequences, TextProposerConfig(shortest=2, longest=8, most_answers=1))
    for salt, answer in (("a", [10, 11, 12, 13]), (None, [20, 21, 22, 23])):
        slot = sequence_of(sequences, [1, 2, 3, *answer], 3, salt)
        proposer.end(slot)
        sequences.close(slot)

    def drafts(salt: str | None) -> list[int]:
        slot = sequence_of(sequences, [7, 1, 2, 3], 4, salt)
        proposer.propose([slot], [4], 0.0)
        found: list[int] = sequences.tail(slot, 4)
        sequences.close(slot)
        return found

    assert [drafts(salt) for salt in ("a", "b", None)] == [[10, 11, 12, 13], [], []]
    slot = sequence_of(sequences, [5, 6, 7, 8], 2, "a")  # takes the place of the only answer that is kept
    proposer.end(slot)
    sequences.close(slot)
    assert drafts("a") == []


def test_a_slot_that_is_used_again_has_another_text() -> None:
    sequences = Sequences(8, 32, 64)
    proposer = TextProposer(sequences, TextProposerConfig(shortest=2, longest=4))
    slot = sequence_of(sequences, [1, 2, 3, 4, 1, 2], 6)
    assert proposer.propose([slot], [1], 0.0) == [1]
    sequences.close(slot)
    again = sequence_of(sequences, [9, 1, 2], 3)
    assert again == slot
    assert proposer.propose([again], [1], 0.0) == [0]


def test_a_prediction_is_followed_from_its_beginning() -> None:
    sequences = Sequences(8, 32, 64)
    proposer = TextProposer(sequences, TextProposerConfig(shortest=3, longest=8, own_text=False))
    slot = sequence_of(sequences, [1, 2, 3, 4, 10, 11], 4)  # two tokens of the answer are there
    assert proposer.propose([slot], [4], 0.0) == [0]
    proposer.predict(slot, [10, 11, 12, 13, 14])
    assert proposer.propose([slot], [4], 0.0) == [3]
    assert sequences.tail(slot, 6) == [12, 13, 14]
    with pytest.raises(ValueError, match="token id 64 is not in the vocabulary"):
        proposer.predict(slot, [64])


def test_a_long_prediction_is_kept_whole() -> None:
    sequences = Sequences(4, 32, 32_768)
    proposer = TextProposer(sequences, TextProposerConfig(shortest=3, longest=8))
    slot = sequence_of(sequences, [1, 2, 3, 4], 4)
    predicted = list(range(10, 32_000))
    proposer.predict(slot, predicted)
    assert proposer.propose([slot], [4], 0.0) == [4]
    assert sequences.tail(slot, 4) == predicted[:4]


def test_a_long_text_is_looked_up_from_its_last_tokens_on() -> None:
    sequences = Sequences(1200, 32, 32_768)
    proposer = TextProposer(sequences, TextProposerConfig(shortest=3, longest=8))
    text = [1, 2, 3, 4, *range(10, 32_000), 5, 6, 7, 8, *range(100, 200)]
    for last, expected in (([1, 2, 3], 0), ([5, 6, 7], 1)):
        slot = sequence_of(sequences, text + last, 4)
        assert proposer.propose([slot], [1], 0.0) == [expected]
        sequences.close(slot)


def test_no_draft_goes_beyond_the_pages() -> None:
    sequences = Sequences(1, 32, 64)
    given = [1, 2, 3, 4] * 7 + [1, 2]
    slot = sequence_of(sequences, given, 4)
    proposer = TextProposer(sequences, TextProposerConfig(shortest=2, longest=8))
    assert proposer.propose([slot], [8], 0.0) == [2]
    assert sequences.free_pages == 0
