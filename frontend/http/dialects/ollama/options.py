"""`options` of a request: how to sample an answer, and how Ollama would run the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.frontend.http.errors import bad_request
from quire.frontend.http.shared_fields import LOCAL_SAMPLING, NO_PENALTIES, ignored_window
from quire.frontend.http.transport.bodies import convert
from quire.protocol.messages import SAMPLING_LENGTHS, SAMPLING_RANGES, SamplingParams
from quire.protocol.options import MAX_INT64

FIELD_NAMES = {"stop=": "options.stop=", "structured_outputs.json": "format"}  # name in errors -> name in this API
_UNLIMITED = (-1, -2)  # values of num_predict: without end, and until the context is full

_KV = "the type of KV is that of the engine, see --kv-cache-dtype"
_REFUSED: Mapping[str, tuple[object, str]] = {  # the value that changes nothing, and why others are rejected
    "embedding_only": (False, "POST /api/embed gives embeddings"),
    "f16_kv": (True, _KV),
    "logits_all": (False, "this API returns no logits"),
    "mirostat": (0, "use temperature, top_p, top_k and min_p"),
    "penalize_newline": (True, "penalties apply to line breaks too"),
    "tfs_z": (1.0, "use temperature, top_p, top_k and min_p"),
    "typical_p": (1.0, "use temperature, top_p, top_k and min_p"),
    "vocab_only": (False, "the model is loaded as a whole"),
}


def _in_range(name: str) -> Meta:
    """Return the range of a sampling parameter for `/openapi.json`; `check` enforces it, in better words."""
    low, high, closed = SAMPLING_RANGES[name]
    limits = {"minimum" if closed else "exclusiveMinimum": low, "maximum": high}
    return Meta(extra_json_schema={key: value for key, value in limits.items() if math.isfinite(value)})


def _only(name: str) -> Meta:
    value, why = _REFUSED[name]
    return Meta(extra_json_schema={"enum": [value], "description": f"Not supported: {why}.", "x-refused": True})


_Int = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]


class Options(msgspec.Struct):
    """Options of a request; those left out are the model's own, and unknown ones have no effect, as in Ollama.

    `num_predict`: maximum number of tokens of the answer; -1 or -2: as many as the context holds. `num_ctx` does
    not change the context length. `repeat_last_n`: 0 turns all penalties off; with any other value they apply to all
    tokens, as with -1. `num_keep`, `mirostat_tau` and `mirostat_eta` have no
    effect without what they belong to, and those from `num_batch` to `use_mlock` none on the answer.
    """

    temperature: Annotated[float, _in_range("temperature")] | None = None
    top_p: Annotated[float, _in_range("top_p")] | None = None
    top_k: Annotated[int, _in_range("top_k")] | None = None
    min_p: Annotated[float, _in_range("min_p")] | None = None
    seed: int | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_INT64)] | None = None
    stop: list[str] | str | None = None
    repeat_penalty: Annotated[float, _in_range("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, _in_range("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _in_range("frequency_penalty")] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    num_ctx: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None

    num_keep: _Int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    num_batch: _Int | None = None
    num_gpu: _Int | None = None
    main_gpu: _Int | None = None
    num_thread: _Int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None

    embedding_only: Annotated[bool, _only("embedding_only")] | None = None
    f16_kv: Annotated[bool, _only("f16_kv")] | None = None
    logits_all: Annotated[bool, _only("logits_all")] | None = None
    mirostat: Annotated[int, _only("mirostat")] | None = None
    penalize_newline: Annotated[bool, _only("penalize_newline")] | None = None
    tfs_z: Annotated[float, _only("tfs_z")] | None = None
    typical_p: Annotated[float, _only("typical_p")] | None = None
    vocab_only: Annotated[bool, _only("vocab_only")] | None = None

    def check(self) -> None:
        """Raise `ApiError` 400 or `ValueError` for an option that is not supported or out of range."""
        for name, ours in LOCAL_SAMPLING.items():
            if ours in SAMPLING_RANGES and (ours != "seed" or not self._wants_fresh_seed):
                SAMPLING_RANGES[ours].check(f"options.{name}", getattr(self, name))
        SAMPLING_LENGTHS["stop"].check("options.stop", self._stops)
        for name, (harmless, why) in _REFUSED.items():
            if (value := getattr(self, name)) not in (None, harmless):
                given, allowed = _json(value), _json(harmless)
                raise bad_request(
                    f"options.{name}={given} is not supported: {why}; leave it out, or give {allowed}",
                    f"options.{name}",
                    "unsupported_parameter",
                )

    def ignored(self, params: SamplingParams, max_model_len: int) -> list[str]:
        """Return the options that have no effect here, and would have one in Ollama."""
        found = ignored_window(self.repeat_last_n, params, max_model_len)
        if self.num_ctx is not None and self.num_ctx > max_model_len:
            found.append(f"num_ctx (the context length stays {max_model_len})")
        return found

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters; options left out have the model's `defaults`, or the library's.

        Raises the errors of `check`, and `ApiError` 400 for options that contradict each other.
        """
        self.check()
        given = {ours: value for name, ours in LOCAL_SAMPLING.items() if (value := getattr(self, name)) is not None}
        params = {**defaults, **given, "max_tokens": self._max_tokens()}
        if self.stop is not None:
            params["stop"] = self._stops
        if self._wants_fresh_seed:
            del params["seed"]
        return SamplingParams(**(params | NO_PENALTIES if self.repeat_last_n == 0 else params))

    @property
    def _stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def _wants_fresh_seed(self) -> bool:
        return self.seed is not None and self.seed < 0

    def _max_tokens(self) -> int | None:
        if self.num_predict is None or self.num_predict in _UNLIMITED:
            return None
        if self.num_predict == 0:
            raise bad_request(
                "options.num_predict=0 leaves no tokens for the answer; give 1 or more, or -1 for as many as fit",
                "options.num_predict",
            )
        return self.num_predict


_DOCUMENTED = msgspec.json.schema(Options)["$defs"]["Options"]

GIVEN_OPTIONS = Meta(extra_json_schema={**_DOCUMENTED, "additionalProperties": True})
"""The JSON schema of options, which `read_options` reads."""


def read_options(given: Mapping[str, Any] | None) -> tuple[Options, list[str]]:
    """Return the options of a body, and the names of unknown ones. Raises `ApiError` 400."""
    given = given or {}
    options = convert(given, Options, "options")
    return options, sorted(name for name in given.keys() - set(Options.__struct_fields__) if given[name] is not None)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
