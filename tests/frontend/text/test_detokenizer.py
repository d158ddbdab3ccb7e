from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import small_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.text.detokenizer import IncrementalDetokenizer, StopStrings
from quire.frontend.text.tokenizer import Tokenizer

KINDS = ["byte_level", "sentencepiece", "word_piece"]
BYTE_KINDS = KINDS[:2]
ASTRONAUT = "🧑‍🚀🧑🏽‍🚀"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    base = tmp_path_factory.mktemp("tokenizers")
    return {kind: Tokenizer(small_tokenizers.write(base / kind, kind)) for kind in KINDS}


def stream(detokenizer: IncrementalDetokenizer, ids: Sequence[int]) -> list[str]:
    """Feed tokens one by one; return the text of each."""
    deltas = []
    for token_id in ids:
        detokenizer.update([token_id])
        deltas.append(detokenizer.delta())
    detokenizer.finish()
    return [*deltas, detokenizer.delta()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip_special", [True, False])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_deltas_joined_are_the_full_decode(
    tokenizers: dict[str, Tokenizer], kind: str, skip_special: bool, data: st.DataObject
) -> None:
    """For any token ids, half characters and ids past the vocabulary among them."""
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip_special)
    assert "".join(stream(detokenizer, ids)) == tokenizer.decode(ids, skip_special) == detokenizer.text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_text_continues_the_prompt(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    """The output is the rest of the whole text after the prompt's, wherever it is cut between characters."""
    tokenizer = tokenizers[kind]
    text = data.draw(st.text(st.sampled_from("ab c.—é日🙂\n"), min_size=1, max_size=20))
    ids = tokenizer.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    prompt = tokenizer.decode(ids[:cut])
    deltas = stream(IncrementalDetokenizer(tokenizer, ids[:cut]), ids[cut:])
    if not prompt.endswith("\ufffd"):
        assert prompt + "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_an_incomplete_character_is_never_shown(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    ids = tokenizers[kind].encode(f"a {ASTRONAUT} b", add_special_tokens=False)
    deltas = stream(IncrementalDetokenizer(tokenizers[kind], []), ids)
    assert len(ids) > len(ASTRONAUT)
    assert "\ufffd" not in "".join(deltas)
    assert deltas[-1] == ""
    assert "".join(deltas) == f"a {ASTRONAUT} b"


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_invalid_bytes_are_shown_once_they_are_known_to_be_invalid(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    first = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xe2")
    letter = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"a")
    assert stream(IncrementalDetokenizer(tokenizer, []), [first, letter]) == ["", "\ufffda", ""]
    assert stream(IncrementalDetokenizer(tokenizer, []), [letter, first]) == ["a", "", "\ufffd"]


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_a_character_that_the_prompt_began_belongs_to_the_output(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    ids = tokenizers[kind].encode("x𝄞y", add_special_tokens=False)
    first_byte = next(n for n, i in enumerate(ids) if tokenizers[kind].token_bytes(i) == b"\xf0")
    for cut in range(first_byte, first_byte + 4):
        assert "".join(stream(IncrementalDetokenizer(tokenizers[kind], ids[:cut]), ids[cut:])) == "𝄞y"


def test_the_leading_space_is_stripped_only_at_the_start_of_the_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    ids = tokenizer.encode("fox", add_special_tokens=False)
    assert "".join(stream(IncrementalDetokenizer(tokenizer, [1]), ids)) == "fox"
    assert "".join(stream(IncrementalDetokenizer(tokenizer, [1, *ids]), ids)) == " fox"


def test_special_tokens_next_to_each_other(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["word_piece"]
    ids = [tokenizer.token_id("<|begin|>") or 0, tokenizer.token_id("<|user|>") or 0, *tokenizer.encode("fox")]

    def text(spaces_between: bool) -> str:
        detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=False, spaces_between_special_tokens=spaces_between
        )
        return "".join(stream(detokenizer, ids))

    assert text(True) == "<|begin|> <|user|> fox"
    assert text(False) == "<|begin|><|user|> fox"


def brute_force(
    pieces: Sequence[str], stops: Sequence[str], min_tokens: int, include: bool
) -> tuple[str, str | None, int]:
    """Return text, stop string and tokens kept, by looking at every prefix of the text."""
    text = ""
    for num_tokens, piece in enumerate(pieces, 1):
        for char in piece:
            text += char
            found = sorted((stop for stop in stops if text.endswith(stop)), key=len)
            if found and (num_tokens > min_tokens or min_tokens == 0):
                return text if include else text[: -len(found[-1])], found[-1], num_tokens
    return text, None, len(pieces)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(st.sampled_from("abc"), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    stops=st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), min_size=1, max_size=4),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_stop_strings_cut_as_brute_force_does(
    tokenizers: dict[str, Tokenizer], text: str, cuts: list[int], stops: list[str], min_tokens: int, include: bool
) -> None:
    """Wherever tokens begin and end, in updates of one token or of all; nothing shown is ever taken back."""
    tokenizer = tokenizers["byte_level"]
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    ids = [
        token_id
        for start, end in pairwise(edges)
        for token_id in tokenizer.encode(text[start:end], add_special_tokens=False)
    ]
    pieces = [tokenizer.token_text(token_id) for token_id in ids]
    expected = brute_force(pieces, stops, min_tokens, include)
    for step in (1, 3, len(ids) or 1):
        detokenizer = IncrementalDetokenizer(tokenizer, [], StopStrings(stops), include, min_tokens=min_tokens)
        shown = ""
        for start in range(0, len(ids), step):
            detokenizer.update(ids[start : start + step])
            shown += detokenizer.delta()
            assert expected[0].startswith(shown)
        stop = detokenizer.finish()
        shown += detokenizer.delta()
        assert (shown, stop, detokenizer.num_tokens) == expected
        assert detokenizer.text == shown


def test_only_what_may_begin_a_stop_string_is_held_back(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("say END now, EN", add_special_tokens=False)
    letters = [i for char in "a ENx EN" for i in tokenizer.encode(char, add_special_tokens=False)]
    assert stream(IncrementalDetokenizer(tokenizer, [], StopStrings(["END"])), letters) == [
        "a",
        " ",
        "",
        "",
        "ENx",
        " ",
        "",
        "",
        "EN",
    ]
    detokenizer = IncrementalDetokenizer(tokenizer, [], StopStrings(["END"]))
    assert detokenizer.update(ids) == "END"
    assert detokenizer.update(ids) == "END"
    assert detokenizer.finish() == "END"
    assert detokenizer.text == "say "
    assert detokenizer.num_tokens < len(ids)


def test_a_stop_token_is_counted_but_has_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    for include, text in ((False, "a"), (True, "a.")):
        ids = [tokenizer.encode(char, add_special_tokens=False)[0] for char in "a."]
        detokenizer = IncrementalDetokenizer(tokenizer, [], include_stop_str_in_output=include)
        detokenizer.update(ids, stop_token=True)
        assert (detokenizer.text, detokenizer.num_tokens) == (text, 2)


def test_the_cost_of_a_token_does_not_grow(tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A million characters are read once each; decoding them repeatedly would take hours."""
    tokenizer = tokenizers["byte_level"]
    monkeypatch.setattr(tokenizer, "decode", None)  # the stream never decodes earlier tokens again
    ids = tokenizer.encode("Once upon a time ", add_special_tokens=False) * 20_000
    detokenizer = IncrementalDetokenizer(tokenizer, ids, StopStrings(["never"]))
    detokenizer.update(ids)
    detokenizer.finish()
    assert detokenizer.text == "Once upon a time " * 20_000


def test_an_empty_stop_string_is_rejected() -> None:
    with pytest.raises(ValueError, match="stop string is empty"):
        StopStrings(["a", ""])
