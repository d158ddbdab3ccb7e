"""`speculative_config`: how tokens are drafted. Names and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from quire.protocol.options import Range, json_object


class _Field(NamedTuple):
    """A field: its kind, the values that it may have, and the methods that have it."""

    kind: type
    range: Range
    methods: tuple[str, ...]


EAGLE_METHODS = ("eagle", "eagle3")
"""Methods whose model is a draft head."""

MTP = "mtp"
"""The method whose draft head is in the files of the model that it drafts for."""

HEAD_METHODS = (*EAGLE_METHODS, MTP)
"""Methods with a draft head."""

METHODS = ("ngram", "suffix", "draft_model", *HEAD_METHODS)
"""Methods that are supported."""

_ALIASES = dict.fromkeys(
    ("deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp"), MTP
)  # fmt: skip
"""Other names of methods, which vLLM has too."""

_MOST_DRAFTS = 32
_LONGEST_MATCH = 64
_HALVINGS = 40
_FIELDS: dict[str, _Field] = {
    "num_speculative_tokens": _Field(int, Range(1, _MOST_DRAFTS), METHODS),
    "prompt_lookup_min": _Field(int, Range(1, _LONGEST_MATCH), ("ngram",)),
    "prompt_lookup_max": _Field(int, Range(1, _LONGEST_MATCH), ("ngram",)),
    "suffix_decoding_max_tree_depth": _Field(int, Range(2, _LONGEST_MATCH), ("suffix",)),
    "suffix_decoding_max_cached_requests": _Field(int, Range(0, 1 << 20), ("suffix",)),
    "suffix_decoding_max_spec_factor": _Field(float, Range(0, 1000), ("suffix",)),
    "suffix_decoding_min_token_prob": _Field(float, Range(0, 1), ("suffix",)),
    "synthetic_acceptance_length": _Field(float, Range(1, _MOST_DRAFTS + 1), METHODS),
}
_ADAPTIVE = "adaptive"
_WITH_MODEL = ("draft_model", *EAGLE_METHODS)
_TEXTS = {"model": _WITH_MODEL, "quantization": (*_WITH_MODEL, MTP)}


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of speculative decoding.

    `num_speculative_tokens`: most drafts of a sequence in a step. ngram: what followed the last `prompt_lookup_min` to
    `prompt_lookup_max` tokens where the sequence has had them before. suffix: the same with up to `..._max_tree_depth`
    tokens, also in the answers of the last `..._max_cached_requests` requests; at most `..._max_spec_factor` drafts for
    each token that matches, each as probable as `..._min_token_prob`. draft_model: what `model` samples. eagle,
    eagle3: what the head `model` samples, which reads hidden states of the model that it was trained for. mtp: what the
    head for multi-token prediction samples that the model's own files have. `quantization`: mode for what drafts; by
    default none, with mtp that of the model.
    `synthetic_acceptance_length`, for benchmarks only: drafts are accepted as often as gives that many tokens a step
    with all of them, whatever is sampled. Drafts are as many as pay; without `adaptive` they are as many as there can
    be, to measure how many are accepted.
    """

    method: str
    num_speculative_tokens: int = 0  # 0: the default of the method
    prompt_lookup_min: int = 5
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    model: str | None = None
    quantization: str | None = None
    synthetic_acceptance_length: float | None = None
    adaptive: bool = True

    @property
    def max_drafts(self) -> int:
        """Most drafts of a sequence in a step."""
        return self.num_speculative_tokens or {"suffix": _MOST_DRAFTS}.get(self.method, 8)

    @property
    def loads_weights(self) -> bool:
        """True if a draft model or head is loaded."""
        return self.model is not None or self.method in HEAD_METHODS

    @property
    def synthetic_acceptance(self) -> float | None:
        """Acceptance probability at which a step of all drafts gives `synthetic_acceptance_length` tokens."""
        if self.synthetic_acceptance_length is None:
            return None
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            length = sum(middle**number for number in range(self.max_drafts + 1))
            low, high = (middle, high) if length < self.synthetic_acceptance_length else (low, middle)
        return high


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Return the configuration in a JSON object. Raises `ValueError` for the first field that is not allowed."""
    return check_speculative_config(json_object("speculative_config", text))


def check_speculative_config(fields: Mapping[str, Any]) -> SpeculativeConfig:
    """Return the configuration that these fields make. Raises `ValueError` for the first one that is not allowed."""
    given = {name: value for name, value in fields.items() if value is not None}
    method = given.pop("method", "draft_model" if "model" in given else None)
    method = _ALIASES.get(method, method) if isinstance(method, str) else method
    if method not in METHODS:
        raise ValueError(f"speculative_config: method is {method!r}; it must be one of {', '.join(METHODS)}")
    for name, value in given.items():
        _check(method, name, value)
    config = SpeculativeConfig(method=method, **_with_both_lengths(given))
    if method in _WITH_MODEL and config.model is None:
        needed = "a smaller model" if method == "draft_model" else "a draft head that was trained for this model"
        raise ValueError(f"speculative_config: model is missing; method {method} needs the folder of {needed}")
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ValueError(
            f"speculative_config: prompt_lookup_min is {config.prompt_lookup_min}, above the prompt_lookup_max of "
            f"{config.prompt_lookup_max}"
        )
    if (length := config.synthetic_acceptance_length) is not None and length > config.max_drafts + 1:
        raise ValueError(
            f"speculative_config: synthetic_acceptance_length is {length:g}; with num_speculative_tokens of "
            f"{config.max_drafts} it can be at most {config.max_drafts + 1}"
        )
    return config


def _with_both_lengths(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with both bounds of a match where one is given: vLLM lets it stand for the other."""
    low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    both = {"prompt_lookup_min": high if low is None else low, "prompt_lookup_max": low if high is None else high}
    return {**given, **{name: value for name, value in both.items() if value is not None}}


def _check(method: str, name: str, value: object) -> None:
    methods: tuple[str, ...]
    if name in _TEXTS:
        methods, is_allowed, allowed = _TEXTS[name], isinstance(value, str) and bool(value), "a text that is not empty"
    elif name == _ADAPTIVE:
        methods, is_allowed, allowed = METHODS, isinstance(value, bool), "true or false"
    elif name in _FIELDS:
        kind, bounds, methods = _FIELDS[name]
        is_number = type(value) in ((int, float) if kind is float else (int,))
        is_allowed = is_number and bounds.holds(value)  # type: ignore[arg-type]
        allowed = f"a {'whole ' if kind is int else ''}number {bounds}"
    else:
        known = ", ".join(("method", *_FIELDS, *_TEXTS, _ADAPTIVE))
        raise ValueError(f"speculative_config: {name} is not supported; supported are {known}")
    if method not in methods:
        raise ValueError(f"speculative_config: {name} does not belong to method {method}; leave it out")
    if not is_allowed:
        raise ValueError(f"speculative_config: {name} is {value!r}; it must be {allowed}")
