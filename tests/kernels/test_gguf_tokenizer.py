from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import gguf_vocabularies
import pytest
import small_tokenizers
from gguf_vocabularies import USER_DEFINED, Metadata
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_libraries import import_reference
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from quire.frontend.text.chat.template_files import template_sources
from quire.frontend.text.tokenizer import Tokenizer as TextTokenizer
from quire.kernels.gguf.tokenizer import tokenizer_files

DEMO = Path(__file__).parents[2] / "frontend" / "demo_model" / "tokenizer.json"
SAMPLE = "IT'S BigWord's naï 1234 日。한 a\u0301b\t\n\n\tf(b);\r\n  end... don't/\n"
WORDS = {
    "gpt-2": "IT|'|S| BigWord|'s| naï| 1234| 日|。|한| a|\u0301|b|\t\n\n|\t|f|(|b|);|\r\n | end|...| don|'t|/|\n",
    "starcoder": (
        "IT|'|S| BigWord|'s| naï| |1|2|3|4| 日|。|한| a|\u0301|b|\t\n\n|\t|f|(|b|);|\r\n | end|...| don|'t|/|\n"
    ),
    "llama3": ("IT|'S| BigWord|'s| naï| |123|4| 日|。한| a|\u0301b|\t\n\n|\tf|(b|);\r\n| | end|...| don|'t|/\n"),
    "qwen2": ("IT|'S| BigWord|'s| naï| |1|2|3|4| 日|。한| a|\u0301b|\t\n\n|\tf|(b|);\r\n| | end|...| don|'t|/\n"),
    "qwen35": ("IT|'S| BigWord|'s| naï| |1|2|3|4| 日|。한| a\u0301b|\t\n\n|\tf|(b|);\r\n| | end|...| don|'t|/\n"),
    "seed-coder": (
        "IT|'S| BigWord|'s| naï| |1|2|3|4| 日|。한| a|\u0301b|\t\n\n|\tf|(b|);|\r\n| | end|...| don|'t|/|\n"
    ),
    "tiny_aya": "IT'S| Big|Word's| naï| |1|234| 日|。한| a\u0301b|\t\n\n|\tf|(b|);\r\n| | end|...| don't|/\n",
    "gpt-4o": "IT'S| Big|Word's| naï| |123|4| 日|。한| a\u0301b|\t\n\n|\tf|(b|);\r\n| | end|...| don't|/\n",
    "tekken": ("IT|'S| Big|Word|'s| naï| |1|2|3|4| 日|。한| a\u0301b|\t\n\n|\tf|(b|);\r\n| | end|...| don|'t|/\n"),
    "deepseek-llm": (
        "IT|'|S| BigWord|'|s| na|ï| |1|2|3|4| |日|。|한| a|\u0301|b|\t|\n|\n|\tf|(|b|);|\r|\n| | end|...| don|'|t|/|\n"
    ),
    "deepseek-coder": (
        "IT|'|S| BigWord|'|s| naï| |1|2|3|4| |日|。|한| a|\u0301|b|\t|\n|\n|\tf|(|b|);|\r|\n| | end|...| don|'|t|/|\n"
    ),
    "deepseek-v3": ("IT|'S| BigWord|'s| naï| |123|4| |日|。|한| a\u0301b|\t\n\n|\tf|(b|);\r\n| | end|...| don|'t|/\n"),
}
"""The words of SAMPLE, by the first name of each pre-tokenizer."""

SAME_WORDS = {
    "gpt-2": ["phi-2", "roberta-bpe", "a.x-4.0", "mellum", "exaone4", "trillion", "mpt", "olmo"],
    "starcoder": ["refact", "smollm", "minerva-7b", "command-r"],
    "llama3": [
        "llama-bpe",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "smaug-bpe",
        "dbrx",
        "chatglm-bpe",
        "glm4",
    ],
    "qwen2": ["deepseek-r1-qwen", "megrez", "kormo"],
    "gpt-4o": ["llama4", "kanana2", "minimax-m2"],
    "deepseek-v3": ["hunyuan-dense"],
}
NAMES = [*WORDS, *(name for names in SAME_WORDS.values() for name in names)]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


def backend(metadata: Metadata) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_files(metadata)["tokenizer.json"]))


def write(folder: Path, metadata: Metadata) -> Path:
    for name, content in tokenizer_files(metadata).items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def across_words() -> Tokenizer:
    """BPE that has merged across the borders of words, so that each difference of pre-tokenizers changes tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator([SAMPLE, *small_tokenizers.TEXTS], trainer)
    return tokenizer


DEMO_METADATA = gguf_vocabularies.byte_level_bpe(Tokenizer.from_file(str(DEMO)), "gpt-2", 64, bos_token_id=0)
DEMO_METADATA["tokenizer.ggml.add_bos_token"] = True


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text("ab <|end|>'s1\n\té日"))
def test_text_becomes_the_tokens_of_the_demo_model(text: str) -> None:
    source, tokenizer = Tokenizer.from_file(str(DEMO)), backend(DEMO_METADATA)
    ids = source.encode(text).ids
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.encode(text, add_special_tokens=False).ids == source.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == source.decode(ids)


def test_padding_is_no_token_and_added_tokens_keep_their_ids() -> None:
    source = small_tokenizers.byte_level()
    tokenizer = backend(gguf_vocabularies.byte_level_bpe(source, "gpt-2", 10))
    assert tokenizer.get_vocab() == source.get_vocab()
    assert tokenizer.get_added_tokens_decoder().keys() == source.get_added_tokens_decoder().keys()
    ids = tokenizer.encode("fox<tool>fox<|end|>").ids
    assert ids == source.encode("fox<tool>fox<|end|>", add_special_tokens=False).ids
    assert tokenizer.decode(ids) == "fox<tool>fox"


@pytest.mark.parametrize(
    ("name", "same"), [(name, same) for name in WORDS for same in (name, *SAME_WORDS.get(name, []))]
)
def test_each_pre_tokenizer_splits_into_its_words(across_words: Tokenizer, name: str, same: str) -> None:
    split = backend(gguf_vocabularies.byte_level_bpe(across_words, same)).pre_tokenizer
    assert split is not None
    assert "|".join(SAMPLE[begin:end] for _, (begin, end) in split.pre_tokenize_str(SAMPLE)) == WORDS[name]


@pytest.mark.parametrize(
    ("pre", "model"),
    [
        ("gpt-2", "gpt2.tokenization_gpt2.GPT2Tokenizer"),
        ("olmo", "gpt_neox.tokenization_gpt_neox.GPTNeoXTokenizer"),
        ("command-r", "cohere.tokenization_cohere.CohereTokenizer"),
        ("qwen2", "qwen2.tokenization_qwen2.Qwen2Tokenizer"),
        ("qwen35", "qwen3_5.tokenization_qwen3_5.Qwen3_5Tokenizer"),
    ],
)
def test_tokens_are_those_of_the_tokenizer_of_transformers(across_words: Tokenizer, pre: str, model: str) -> None:
    import_reference("transformers")
    module, _, name = model.rpartition(".")
    state = json.loads(across_words.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    source = kind(vocab=state["vocab"], merges=merges, unk_token="<|end|>", bos_token="<|end|>", pad_token="<|end|>")
    tokenizer = backend(gguf_vocabularies.byte_level_bpe(across_words, pre))
    for text in (SAMPLE, "e\u0301 \u1100\u1161 x", *small_tokenizers.TEXTS[:2]):
        assert tokenizer.encode(text).ids == source(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("pre", "ids"), [("llama-bpe", [1]), ("tekken", [1]), ("smaug-bpe", [1]), ("dbrx", [2, 3, 4])])
def test_a_word_that_is_a_token_needs_no_merges_in_some_models(pre: str, ids: list[int]) -> None:
    tokens = {"tokens": ["<|b|>", "abc", "a", "b", "c"], "token_type": [3, 1, 1, 1, 1], "merges": []}
    fields = {f"tokenizer.ggml.{name}": value for name, value in {"model": "gpt2", "pre": pre, **tokens}.items()}
    tokenizer = backend(fields)
    assert tokenizer.encode("abc", add_special_tokens=False).ids == ids


@pytest.mark.parametrize(
    ("pre", "fields", "expected"),
    [
        ("gpt-2", {}, []),
        ("llama-bpe", {}, ["<|begin|>"]),
        ("tekken", {}, ["<|begin|>"]),
        ("llama-bpe", {"add_bos_token": False}, []),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, ["<|begin|>", "<|end|>"]),
        ("qwen2", {"add_eos_token": True}, ["<|end|>"]),
    ],
)
def test_bos_and_eos_are_put_around_a_text(
    tmp_path: Path, pre: str, fields: dict[str, bool], expected: list[str]
) -> None:
    metadata = gguf_vocabularies.byte_level_bpe(small_tokenizers.byte_level(), pre, bos_token_id=0, eos_token_id=1)
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    tokenizer = TextTokenizer(write(tmp_path, metadata))
    ids = tokenizer.encode("fox")
    plain = tokenizer.encode("fox", add_special_tokens=False)
    assert [token for token in (tokenizer.token_text(index) for index in ids) if token.startswith("<|")] == expected
    assert [index for index in ids if index > 1] == plain
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == [1]


def test_the_chat_template_and_special_tokens_are_in_the_config(tmp_path: Path) -> None:
    metadata = gguf_vocabularies.byte_level_bpe(
        small_tokenizers.byte_level(), "qwen2", bos_token_id=2**32 - 1, eos_token_id=1, padding_token_id=2
    )
    write(tmp_path, metadata | {"tokenizer.chat_template": TEMPLATE})
    assert template_sources(tmp_path) == {"default": TEMPLATE}
    assert TextTokenizer(tmp_path).special_tokens == {"eos_token": "<|end|>", "pad_token": "<|user|>"}
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    write(tmp_path, metadata | {"tokenizer.chat_template": TEMPLATE} | named)
    assert template_sources(tmp_path) == {"default": TEMPLATE, "tool_use": "tools"}
    write(tmp_path, metadata)
    assert template_sources(tmp_path) == {}


def pieces() -> dict[str, float]:
    """Return characters and merged pieces of a small text with the scores of SentencePiece: minus their ranks."""
    tokens = small_tokenizers.sentencepiece().get_vocab()
    special = {"<unk>", "<s>", "</s>"}
    ordered = [token for token in sorted(tokens, key=tokens.__getitem__) if token not in special and token[:3] != "<0x"]
    merged = [token for token in ordered if len(token) > 1]
    return {token: -float(rank) for rank, token in enumerate([*merged, *(t for t in ordered if len(t) == 1)])}


PIECES = pieces()
RUNS = tuple("\u2581" * length for length in range(2, 6))


def by_definition(metadata: Metadata, text: str, prefix: bool) -> list[int]:
    """Tokenize as SentencePiece defines it: merge the first of the pairs with the best score, until none is left.

    Tokens of the user are found first, the longest one, and are never merged.
    """
    names: list[str] = metadata["tokenizer.ggml.tokens"]
    scores, types = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
    ids = {name.replace(" ", "\u2581"): index for index, name in enumerate(names)}
    whole = sorted((name for name, index in ids.items() if types[index] == USER_DEFINED), key=len, reverse=True)
    rest = ("\u2581" if prefix else "") + text.replace(" ", "\u2581")
    symbols = []
    while rest:
        symbols.append(next((name for name in whole if rest.startswith(name)), rest[0]))
        rest = rest[len(symbols[-1]) :]
    while True:
        pairs = [
            (-scores[ids[left + right]], index)
            for index, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in PIECES and left not in whole and right not in whole
        ]
        if not pairs:
            break
        _, index = min(pairs)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
    unknown = [[ids[f"<0x{byte:02X}>"] for byte in symbol.encode()] for symbol in symbols]
    known = [[ids[symbol]] if symbol in ids else unknown[index] for index, symbol in enumerate(symbols)]
    return [index for group in known for index in group]


ALPHABET = "".join(sorted({char for text in small_tokenizers.TEXTS for char in text}))
TEXT = st.text(ALPHABET) | st.lists(st.sampled_from(["fox", "the", " ", "  ", "\n", "日本", "ñ", "🙃", "12"])).map(
    "".join
)


@pytest.mark.parametrize("prefix", [True, False])
@settings(max_examples=300, deadline=None)
@given(text=TEXT)
def test_text_becomes_the_tokens_of_sentencepiece(prefix: bool, text: str) -> None:
    runs = () if prefix else RUNS
    others = {token: score for token, score in PIECES.items() if prefix or RUNS[0] not in token}
    metadata = gguf_vocabularies.sentencepiece(others, runs, add_space_prefix=prefix)
    tokenizer = backend(metadata)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == (by_definition(metadata, text, prefix) if text else [])
    assert tokenizer.decode(ids) == text


def test_a_text_survives_the_tokenizer_of_the_frontend(tmp_path: Path) -> None:
    tokenizer = TextTokenizer(write(tmp_path, gguf_vocabularies.sentencepiece(PIECES)))
    text = "Once upon a time, naïve 日本語 👩‍👩‍👧‍👦 ﷽ end"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == [2]
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(index) or b"" for index in ids[1:]) == b" " + text.encode()


def test_merges_are_those_that_transformers_derives_from_the_scores() -> None:
    transformers = import_reference("transformers.tokenization_utils_base")
    metadata = gguf_vocabularies.sentencepiece(PIECES)
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    expected = transformers.generate_merges(
        vocabulary, dict(zip(tokens, scores, strict=True)), skip_tokens=tokens[:259]
    )
    assert len(expected) > len(PIECES) / 2
    assert tokenizer_files(metadata)["tokenizer.json"]["model"]["merges"] == expected


def test_given_merges_are_used_in_place_of_scores() -> None:
    tokens = {"a": -1.0, "b": -1.0, "c": -1.0, "ab": -2.0, "bc": -1.0}
    metadata = gguf_vocabularies.sentencepiece(tokens, add_space_prefix=False)
    assert backend(metadata).encode("abc", add_special_tokens=False).tokens == ["a", "bc"]
    assert backend(metadata | {"tokenizer.ggml.merges": ["a b"]}).encode("abc").tokens == ["<s>", "ab", "c"]


def test_tokens_of_gemma_4_are_those_of_transformers() -> None:
    gemma = import_reference("transformers.models.gemma.tokenization_gemma")
    metadata = gguf_vocabularies.sentencepiece(PIECES)
    merges = tokenizer_files(metadata)["tokenizer.json"]["model"]["merges"]
    del metadata["tokenizer.ggml.scores"]
    metadata |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": [" ".join(merge) for merge in merges]}
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    source = gemma.GemmaTokenizer(
        vocabulary, merges, bos_token="<s>", eos_token="</s>", pad_token="</s>", mask_token="</s>"
    )
    for text in (SAMPLE, "the fox  and\n\n\nthe crow", *small_tokenizers.TEXTS):
        ids = backend(metadata).encode(text).ids
        assert ids == [1, *source(text, add_special_tokens=False)["input_ids"]]
        assert backend(metadata).decode(ids) == source.decode(ids, skip_special_tokens=True) == text


def test_added_tokens_of_phi_3_take_the_white_space_after_them() -> None:
    metadata = gguf_vocabularies.sentencepiece(PIECES, ("<|end|>",), add_space_prefix=False)
    plain, phi3 = backend(metadata), backend(metadata | {"general.architecture": "phi3"})
    end, newline = plain.token_to_id("<|end|>"), plain.token_to_id("\n")
    assert plain.encode("<|end|>\n<s>\n").ids == [1, end, newline, 1, newline]
    assert phi3.encode("<|end|>\n<s>\n").ids == [1, end, 1, newline]


def test_a_run_of_spaces_may_be_a_token_beside_the_same_run_of_marks() -> None:
    tokens = gguf_vocabularies.sentencepiece({"\u2581": -2.0, "\u2581\u2581": -1.0}, ("\u2581\u2581",))
    tokenizer = backend(tokens)
    assert tokenizer.token_to_id("\u2581\u2581") == 261
    assert tokenizer.encode("  ", add_special_tokens=False).ids == [259]


def test_an_empty_token_gets_a_name_and_keeps_its_place() -> None:
    metadata = gguf_vocabularies.sentencepiece({"a": -1.0, "": -2.0, "b": -3.0})
    assert backend(metadata).token_to_id("b") == 261


SPM = gguf_vocabularies.sentencepiece({"a": -1.0, "b": -2.0, "ab": -3.0})
SPM_TOKENS = SPM["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'; supported are gpt2 .*, llama .*, bert .*, t5 "),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": 3}, "tokenizer.ggml.model is of type int, but must be of type str"),
        ({"model": "gpt2"}, "tokenizer.ggml.pre is 'default', a pre-tokenizer that is not known; known are .*qwen2"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [*SPM_TOKENS[:-1], 7]}, "tokenizer.ggml.tokens has items that are not of type str"),
        ({"tokens": [*SPM_TOKENS[:-1], "a"]}, "tokenizer.ggml.tokens has 'a' twice, as token 259 and 261"),
        ({"tokens": [*SPM_TOKENS[:-1], "a" * 1025]}, "tokenizer.ggml.tokens has a token of 1025 characters, 'aaa"),
        ({"token_type": None}, "tokenizer.ggml.token_type is missing"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 items, but there are 262 tokens"),
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 scores for 262 tokens"),
        ({"scores": [float("nan")] * 262}, "tokenizer.ggml.scores .*finite"),
        (
            {"scores": [-1000.0] * 264, "tokens": [*SPM_TOKENS, "ba", "aba"], "token_type": [1] * 264},
            "all -1000.0, which",
        ),
        ({"merges": ["a b", "a c"]}, "tokenizer.ggml.merges has 'a c' as merge 1, which is not two tokens"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges has 'ab' as merge 0"),
        ({"bos_token_id": 262}, "tokenizer.ggml.bos_token_id is 262, but there are 262 tokens"),
        (
            {"eos_token_id": 2**32 - 1, "add_eos_token": True},
            "add_eos_token is true, but .*eos_token_id names no token",
        ),
        ({"add_space_prefix": 1}, "tokenizer.ggml.add_space_prefix is of type int, but must be of type bool"),
    ],
)
def test_metadata_that_does_not_make_a_tokenizer_is_rejected(changes: dict[str, Any], message: str) -> None:
    changed = SPM | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(ValueError, match=message) as raised:
        tokenizer_files({key: value for key, value in changed.items() if value is not None})
    assert "\n" not in str(raised.value)


VALUE = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["gpt2", "llama", "qwen2"])
)
LIST = st.lists(st.text("ab \u2581") | st.integers(0, 7), max_size=6)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from([SPM, DEMO_METADATA]), st.data())
def test_any_metadata_makes_a_tokenizer_or_is_rejected_in_one_line(metadata: Metadata, data: st.DataObject) -> None:
    keys = st.sampled_from(
        [*metadata, "tokenizer.ggml.merges", "tokenizer.chat_template", "tokenizer.ggml.add_eos_token"]
    )
    changes = data.draw(st.dictionaries(keys, VALUE | LIST, min_size=1, max_size=3))
    problem = ""
    try:
        files = tokenizer_files({key: value for key, value in (metadata | changes).items() if value is not None})
        Tokenizer.from_str(json.dumps(files["tokenizer.json"])).encode("ab <s> \u2581")
    except ValueError as error:
        problem = str(error)
    assert "\n" not in problem


def test_all_known_pre_tokenizers_are_tested() -> None:
    metadata = gguf_vocabularies.byte_level_bpe(small_tokenizers.byte_level(), "unheard-of")
    with pytest.raises(ValueError, match="unheard-of") as raised:
        tokenizer_files(metadata)
    assert str(raised.value).partition("known are ")[2].split(", ") == sorted(NAMES)
