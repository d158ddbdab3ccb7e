"""Tokenizers of encoders in GGUF files make the tokens of the tokenizers that they were made of."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest
from gguf_vocabularies import Metadata, byte_level_bpe, unigram, word_pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_libraries import import_reference
from small_tokenizers import TEXTS, byte_level
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from quire.kernels.gguf.tokenizer import tokenizer_files

CHARSMAP = zlib.decompress(base64.b85decode(
    "c-ke?1*{fS6ae7+-oT9w1SOS}Zs|7Y?i4|Nbcm#g<WJY5ySqbBN<alAN0)?j4BS8o1q6xjhr4|{XFKQKo$c;~1R;b>AtXu?q9-ym"
    "eF$%e6XIjT{DdLI$|DJ4LnL1a+as}Ifx0V^#F~@xCU239<h)HvQjnTdyh9q&@-ChT>BvY1-g`Yl$U<hak(C@|Cl@)%LvD-`^720U"
    "DM$edQ;4Dzp*Y1TNeN0*iVrBmM|?<GKBhe7s7M7WQ;Dinp*q#5NeyaKi@MaIKJ{ow0~*taPiVrYG^IJs_?*v(;|p5Sg4VR6Ep2E|"
    "J37*VPJBsczM?B#=uS7jrU&29lW*xoA9~Y|z6_v01EU|$U<NUiAq;02BN@SHMlptX#xa%&jAs%PnZjhIF_jriXBIP=!))d;mj%pc"
    "5er$uVwSO#6)a~JD_O&8zGE%xS;r52&qg+|nN9r27PhgKpV-bX{LD^v@EgCfn_cW>5Bu52foM;Wm~cou$Po^6jH8_3IHx$tX@2J{"
    "XZVA2T;M#HxX2YQbB(Lq;5s+?yFyI(Q@j<eJ&p<2;$y-c`R!<pzqrR;9&n$3`G-e5<UbzslqWpne_rtX)$SFv195TTC8?r{Qv"
))  # fmt: skip
"""Of SentencePiece's trainer, with the rules of RULES."""

RULES = {"\uff21": "A", "\u00c5": "aa", "\u2460": "1", "\t": " ", "\u3000": " "}
SAMPLES = [
    *TEXTS[:2],
    "",
    "  Two  spaces ",
    "Caf\u00e9 na\u00efve caf\u0065\u0301",
    "\u65e5\u672c ##x \u2581 [CLS] a",
    "x" * 150,
]


def backend(metadata: Metadata) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_files(metadata)["tokenizer.json"]))


def bert(lowercase: bool = True) -> Tokenizer:
    """Train a WordPiece tokenizer as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, *SAMPLES], trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return tokenizer


BERT, CASED = bert(), bert(lowercase=False)
BERT_OURS = backend(word_pieces(BERT))


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text("ab [CLS]##1\n\t\u00e9\u65e5", max_size=40), st.none() | st.text(max_size=10))
def test_text_becomes_the_tokens_of_bert(text: str, pair: str | None) -> None:
    ours, theirs = BERT_OURS.encode(text, pair), BERT.encode(text, pair)
    assert (ours.ids, ours.type_ids) == (theirs.ids, theirs.type_ids)


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        (BERT, {}),
        (CASED, {}),
        (BERT, {"normalizer.lowercase": True, "normalizer.strip_accents": True}),
        (CASED, {"normalizer.lowercase": False}),
        (BERT, {"bos_token_id": 2**32 - 1, "eos_token_id": 2**32 - 1, "add_bos_token": True, "add_sep_token": False}),
    ],
    ids=["uncased", "cased", "uncased-key", "cased-key", "older"],
)
def test_case_and_ends_of_word_pieces(source: Tokenizer, fields: dict[str, Any]) -> None:
    tokenizer = backend(word_pieces(source, **fields))
    for text in SAMPLES:
        assert tokenizer.encode(text).ids == source.encode(text).ids
        assert tokenizer.encode(text, "b a").ids == source.encode(text, "b a").ids
    assert tokenizer.get_vocab() == source.get_vocab()


def test_the_config_names_the_special_tokens() -> None:
    config = tokenizer_files(word_pieces(BERT))["tokenizer_config.json"]
    assert {name: config[name] for name in ("cls_token", "sep_token", "pad_token", "unk_token")} == {
        "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]",
    }  # fmt: skip


def pieces() -> list[tuple[str, float]]:
    """Train the pieces of a unigram model, and put them between XLM-RoBERTa's special tokens."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([text.replace("a", "aa") for text in TEXTS], trainer)
    trained = [(token, float(score)) for token, score in json.loads(tokenizer.to_str())["model"]["vocab"][1:]]
    head = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return [*head, *trained, ("<mask>", 0.0)]


PIECES = pieces()


@pytest.mark.parametrize("charsmap", [b"", CHARSMAP], ids=["plain", "charsmap"])
def test_text_becomes_the_tokens_of_xlm_roberta(charsmap: bytes) -> None:
    transformers = import_reference("transformers")
    source = transformers.XLMRobertaTokenizer(vocab=PIECES, _spm_precompiled_charsmap=charsmap or None)
    tokenizer = backend(unigram(PIECES, charsmap))
    for text in [*SAMPLES[:-1], "".join(RULES), "a \uff21\u3000\t\u2460"]:
        assert tokenizer.encode(text).ids == source(text)["input_ids"]
        assert tokenizer.encode(text, "b a").ids == source(text, "b a")["input_ids"]
        assert set(tokenizer.encode(text, "b a").type_ids) == {0}
    normalizer = tokenizer.normalizer
    if charsmap:
        assert normalizer is not None
        assert normalizer.normalize_str("".join(RULES)) == "".join(RULES.values())
    else:
        assert normalizer is None


def test_roberta_has_two_separators_in_pairs() -> None:
    source = byte_level()
    begin, end = source.token_to_id("<|begin|>") or 0, source.token_to_id("<|end|>") or 0
    ids = {"bos_token_id": begin, "eos_token_id": end, "seperator_token_id": end}
    metadata = byte_level_bpe(source, "roberta-bpe", **ids) | {"general.architecture": "bert"}
    metadata["tokenizer.ggml.token_type_count"] = 1
    found = backend(metadata).encode("a", "b")
    a, b = (source.encode(text, add_special_tokens=False).ids for text in "ab")
    assert found.ids == [begin, *a, end, end, *b, end]
    assert set(found.type_ids) == {0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (CHARSMAP[:3], "is damaged"),
        (CHARSMAP[:700], "is damaged"),
        (b"\xff\xff\xff\xff" + CHARSMAP[4:], "is damaged"),
        (CHARSMAP[:4] + b"\x01\xff\xff\x7f" + CHARSMAP[8:], "is damaged"),
        (CHARSMAP[:-3] + b"\xff\xff\0", "is damaged"),
        (CHARSMAP[:-6], "is damaged"),
    ],
)
def test_a_damaged_map_of_characters_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_files(unigram(PIECES, content))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (unigram(PIECES, unknown_token_id=2**32 - 1), "unknown_token_id names no token, which a unigram model needs"),
        (unigram(PIECES, scores=[0.0]), "has 1 scores for"),
        (unigram(PIECES, precompiled_charsmap=[300]), "items that are not bytes"),
        (word_pieces(BERT, unknown_token_id=2**32 - 1), "unknown_token_id names no token, which WordPiece needs"),
        (word_pieces(BERT, **{"normalizer.lowercase": 1}), "lowercase is of type int"),
    ],
)
def test_metadata_that_does_not_make_a_tokenizer_is_rejected(metadata: Metadata, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer_files(metadata)
