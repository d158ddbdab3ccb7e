from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from quire.frontend.text.tokenizer_files import TokenizerError, TokenizerMissingError

TEXT = "Once upon a time, naïve 日本語 👩‍👩‍👧‍👦 ﷽ end"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte_level": small_tokenizers.write(base / "b", "byte_level", bos_token="<|begin|>", eos_token="<|end|>"),
        "sentencepiece": small_tokenizers.write(base / "s", "sentencepiece", bos_token="<s>", eos_token="</s>"),
        "word_piece": small_tokenizers.write(base / "w", "word_piece"),
    }


@pytest.fixture(scope="module")
def byte_level(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer(folders["byte_level"])


def copy(source: Path, target: Path, **files: Any) -> Path:
    shutil.copytree(source, target)
    for name, value in files.items():
        (target / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return target


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_text_survives_the_round_trip(folders: dict[str, Path], kind: str) -> None:
    tokenizer = Tokenizer(folders[kind])
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode_batch([TEXT, "fox"]) == [tokenizer.encode(TEXT), tokenizer.encode("fox")]


def test_special_tokens_are_added_or_omitted(byte_level: Tokenizer) -> None:
    begin = byte_level.bos_token_id
    assert begin == byte_level.token_id("<|begin|>")
    assert byte_level.encode("fox") == [begin, *byte_level.encode("fox", add_special_tokens=False)]
    assert byte_level.encode("<|begin|>fox") == byte_level.encode("fox")  # as a chat template begins
    assert byte_level.encode("<|begin|><|begin|>fox") == [begin, *byte_level.encode("fox")]
    assert byte_level.encode("<|begin|>fox", add_special_tokens=False) == byte_level.encode("fox")
    assert byte_level.encode("<|end|>fox")[0] == begin
    assert byte_level.decode(byte_level.encode("fox"), skip_special_tokens=False) == "<|begin|>fox"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_token_bytes_make_the_text(folders: dict[str, Path], kind: str, data: st.DataObject) -> None:
    """The bytes of the tokens, joined, are the text that the library decodes (a leading space aside)."""
    tokenizer = Tokenizer(folders[kind])
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    pieces = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in ids)
    text = pieces.decode(errors="replace")
    library = tokenizers.Tokenizer.from_file(str(folders[kind] / "tokenizer.json")).decode(ids, False)
    if kind == "byte_level":
        assert library == text == tokenizer.decode(ids, skip_special_tokens=False)
    elif "\ufffd" not in text:
        assert library == text.removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=False)


def test_an_invalid_byte_does_not_affect_adjacent_characters(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["sentencepiece"])
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in b"\xe2\x82\xac\xe2\x82"]
    assert tokenizer.decode([token_id for token_id in ids if token_id is not None]) == "€\ufffd\ufffd"


def test_text_of_single_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("the fox", add_special_tokens=False)
    assert "".join(byte_level.token_text(token_id) for token_id in ids) == "the fox"
    assert byte_level.token_text(byte_level.bos_token_id or 0) == "<|begin|>"
    assert byte_level.token_bytes(10**6) == b""
    assert byte_level.decode([10**6]) == ""


def test_tokens_without_bytes_of_their_own(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer(folders["word_piece"])
    token_id = tokenizer.encode("fox")[0]
    assert tokenizer.token_bytes(token_id) is None
    assert tokenizer.token_text(token_id) == "fox"


def test_eos_ids_are_those_of_the_tokenizer_and_of_the_generation_config(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    end = Tokenizer(folders["byte_level"]).token_id("<|end|>")
    assert Tokenizer(folders["byte_level"]).eos_token_ids == [end]
    many = copy(folders["byte_level"], tmp_path / "many", generation_config={"eos_token_id": [end, 2, 7]})
    assert Tokenizer(many).eos_token_ids == [end, 2, 7]
    model = copy(folders["byte_level"], tmp_path / "model", config={"eos_token_id": 9})
    assert Tokenizer(model).eos_token_ids == [end, 9]
    bare = copy(folders["word_piece"], tmp_path / "bare", config={"eos_token_id": None})
    assert Tokenizer(bare).eos_token_ids == []


def test_a_token_configured_as_special_is_skipped(folders: dict[str, Path], tmp_path: Path) -> None:
    """Also when tokenizer.json itself does not mark it as special."""
    state = json.loads((folders["byte_level"] / "tokenizer.json").read_text(encoding="utf-8"))
    for token in state["added_tokens"]:
        token["special"] = False
    named = copy(
        folders["byte_level"], tmp_path / "n", tokenizer=state, tokenizer_config={"eos_token": {"content": "<|end|>"}}
    )
    tokenizer = Tokenizer(named)
    assert tokenizer.decode(tokenizer.encode("<|user|>fox<|end|>")) == "<|begin|><|user|>fox"
    assert tokenizer.eos_token_ids == [tokenizer.token_id("<|end|>")]


def test_add_bos_token_of_a_llama_tokenizer_overrides_the_file(folders: dict[str, Path], tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    without = copy(folders["sentencepiece"], tmp_path / "0", tokenizer_config={**config, "add_bos_token": False})
    both = copy(
        folders["sentencepiece"],
        tmp_path / "1",
        tokenizer_config={**config, "add_bos_token": True, "add_eos_token": True},
    )
    plain = Tokenizer(without).encode("fox")
    assert Tokenizer(both).encode("fox") == [1, *plain, 2]


@pytest.mark.parametrize("kind", [None, "GPT2Tokenizer", "Qwen2Tokenizer"])
def test_a_folder_with_vocab_and_merges_only(folders: dict[str, Path], tmp_path: Path, kind: str | None) -> None:
    state = json.loads((folders["byte_level"] / "tokenizer.json").read_text(encoding="utf-8"))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(state["model"]["vocab"]), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}', encoding="utf-8")
    if kind:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    reference = Tokenizer(folders["byte_level"])
    text = "Once upon a time there was a fox<|end|>"
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eos_token_ids == [reference.token_id("<|end|>")]


def test_another_class_with_vocab_and_merges_only_is_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    with pytest.raises(TokenizerError, match=r"RobertaTokenizer.*GPT2Tokenizer"):
        Tokenizer(tmp_path)


def test_truncation_and_padding_of_the_file_are_switched_off(folders: dict[str, Path], tmp_path: Path) -> None:
    state = tokenizers.Tokenizer.from_file(str(folders["byte_level"] / "tokenizer.json"))
    state.enable_truncation(4)
    state.enable_padding(length=8)
    cut = copy(folders["byte_level"], tmp_path / "cut")
    state.save(str(cut / "tokenizer.json"))
    assert Tokenizer(cut).encode(TEXT) == Tokenizer(folders["byte_level"]).encode(TEXT)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="nowhere does not exist"):
        Tokenizer(tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(TokenizerMissingError, match=r"no tokenizer.json.*holds model.safetensors; add"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerMissingError, match="save_pretrained"):
        Tokenizer(tmp_path)
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(TokenizerError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_is_named(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    broken = copy(folders["byte_level"], tmp_path / "broken")
    (broken / name).write_text('{"a": ', encoding="utf-8")
    with pytest.raises(TokenizerError, match=name):
        load_tokenizer(broken)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tokenizer_class": {"a": 1}}, "tokenizer_class"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"5": {}}}, "content"),
        ({"added_tokens_decoder": {"5": {"content": {"a": 1}}}}, "content"),
        ({"added_tokens_decoder": {"-5": {"content": "a"}}}, "added_tokens_decoder"),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": "yes"}, "add_bos_token"),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<nowhere>"}, "'<nowhere>'"),
    ],
)
def test_a_config_of_wrong_types_is_rejected_with_the_field(
    folders: dict[str, Path], tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    broken = copy(folders["byte_level"], tmp_path / "broken")
    (broken / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(TokenizerError, match=words):
        Tokenizer(broken)


@pytest.mark.parametrize("added", ['{"<more>": []}', '{"<more>": 1e999}', '{"<more>": -1}', "[" * 100_000])
def test_added_tokens_of_wrong_types_are_rejected(tmp_path: Path, added: str) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b")
    (tmp_path / "added_tokens.json").write_text(added)
    with pytest.raises(TokenizerError, match=r"added_tokens\.json"):
        Tokenizer(tmp_path)


def test_a_panic_of_the_library_is_an_error_of_the_file(tmp_path: Path) -> None:
    """Of its release 0.23, where the prefix of subwords is longer than a token."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]], "continuing_subword_prefix": "####"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_encode_says_so(tmp_path: Path) -> None:
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 100, "vocab": {"a": 0}}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    with pytest.raises(TokenizerError, match="cannot be encoded by this tokenizer"):
        Tokenizer(tmp_path).encode("b")


def test_a_panic_of_the_library_while_decoding_is_an_error(tmp_path: Path) -> None:
    """Of its release 0.23, where a decoder strips more characters than a token has."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    decoder = {"type": "Strip", "content": "a", "start": 0, "stop": 2}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": model, "added_tokens": [], "decoder": decoder})
    )
    with pytest.raises(TokenizerError, match="token ids"):
        Tokenizer(tmp_path).decode([0])


def test_ids_that_are_no_tokens_end_no_answer(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy(folders["word_piece"], tmp_path / "copy")
    (folder / "generation_config.json").write_text('{"eos_token_id": [-1, true, 7], "bos_token_id": -1}')
    tokenizer = Tokenizer(folder)
    assert tokenizer.eos_token_ids == [7]
    assert tokenizer.bos_token_id is None


def test_text_that_cannot_be_encoded(byte_level: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"lone surrogate .* at character 3"):
        byte_level.encode("fox\ud800")
    with pytest.raises(TokenizerError, match="must be a str, not int"):
        byte_level.encode_batch(["fox", 5])  # type: ignore[list-item]
    with pytest.raises(TokenizerError, match="token ids"):
        byte_level.decode([-1])
