"""The pre-tokenizers of byte-level BPE that `tokenizer.ggml.pre` names, as the models' own tokenizer.json has them.

A pre-tokenizer splits a text into words, which merges never cross. A GGUF file only names it, so that each must be
known here: with another one a model would run, on tokens that it has never seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # %s: how many digits make a word
_MARKED_WORDS = _CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LINED_WORDS = _CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # punctuation does not take the ends of lines
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # a word ends where a lower-case letter is followed by an upper-case one; %s: endings, twice, and digits
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)  # the list of an older Unicode, as the tokenizer has it
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer, with what else a GGUF file leaves to it.

    `patterns` split the text one after the other; if there are none, GPT-2's pattern does. `digits` makes each digit a
    word, before GPT-2's pattern and after those given. `nfc` normalizes the text. With `ignore_merges` a word that is
    a token becomes this token, whatever the merges make of it. `adds_bos` and `adds_eos` are what holds where the file
    does not say it.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    adds_eos: bool = False

    def normalizer(self) -> dict[str, Any] | None:
        """Return `normalizer` of tokenizer.json."""
        return {"type": "NFC"} if self.nfc else None

    def steps(self) -> dict[str, Any]:
        """Return `pre_tokenizer` of tokenizer.json."""
        splits: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        digits = [{"type": "Digits", "individual_digits": True}] if self.digits else []
        return {"type": "Sequence", "pretokenizers": [*splits, *digits, byte_level(use_regex=not self.patterns)]}


def byte_level(use_regex: bool = True) -> dict[str, Any]:
    """Return the component of tokenizer.json that writes bytes as characters, and before that may split as GPT-2."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer that `tokenizer.ggml.pre` names. Raises ValueError for an unknown one."""
    if name not in _KNOWN:
        raise ValueError(
            f"tokenizer.ggml.pre is {name[:40]!r}, a pre-tokenizer that is not known; "
            f"known are {', '.join(sorted(_KNOWN))}"
        )
    return _KNOWN[name]


_GPT2 = PreTokenizer()
_GPT_NEOX = PreTokenizer(nfc=True)
_DIGITS = PreTokenizer(digits=True)
_CL100K = PreTokenizer((_WORDS % "{1,3}",))
_LLAMA3 = PreTokenizer((_WORDS % "{1,3}",), ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((_WORDS % "",), nfc=True)
_O200K = PreTokenizer((_CASED_WORDS % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", "{1,3}"),))

_KNOWN = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "roberta-bpe": PreTokenizer(adds_bos=True, adds_eos=True),
    "a.x-4.0": _GPT2,
    "mellum": _GPT2,
    "exaone4": _GPT2,
    "trillion": _GPT2,
    "mpt": _GPT_NEOX,
    "olmo": _GPT_NEOX,
    "starcoder": _DIGITS,
    "refact": _DIGITS,  # also Granite's
    "smollm": _DIGITS,
    "minerva-7b": _DIGITS,
    "command-r": PreTokenizer(digits=True, nfc=True),
    "dbrx": _CL100K,  # also that of OLMo 2 and Phi-4
    "chatglm-bpe": _CL100K,
    "glm4": PreTokenizer((_WORDS % "{1,3}",), ignore_merges=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,  # stands for several tokenizers, which split more finely, where no merges of theirs cross
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "lfm2": _LLAMA3,  # that of LFM2.5-8B, under the same name, differs in ends of lines
    "smaug-bpe": PreTokenizer((_WORDS % "{1,3}",), ignore_merges=True),  # Llama 3's without bos, such as SmolLM 3's
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "kormo": _QWEN2,
    "seed-coder": PreTokenizer((_LINED_WORDS,)),
    "qwen35": PreTokenizer((_MARKED_WORDS,), nfc=True),
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "kanana2": _O200K,
    "minimax-m2": _O200K,
    "tiny_aya": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_O200K.patterns)),
    "tekken": PreTokenizer((_CASED_WORDS % ("", "", ""),), ignore_merges=True, adds_bos=True),
    "deepseek-llm": PreTokenizer(_DEEPSEEK, digits=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK), digits=True),
    "deepseek-v3": PreTokenizer(_DEEPSEEK_3),
    "hunyuan-dense": PreTokenizer(_DEEPSEEK_3),
}
