"""Sampling parameters in the fields of llama.cpp's API, and the settings that its answers repeat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from quire.frontend.http.errors import bad_request
from quire.frontend.http.models.adapters import MAX_ADAPTERS
from quire.frontend.http.shared_fields import LOCAL_SAMPLING, NO_PENALTIES, NOT_HERE, ignored_window
from quire.frontend.http.transport.bodies import Body, Refusals
from quire.frontend.structured_outputs import check_structured_outputs
from quire.protocol.messages import LOGIT_BIAS, SAMPLING_LENGTHS, SAMPLING_RANGES, SamplingParams, StructuredOutputs
from quire.protocol.options import MAX_INT64

_MOST_SHOWN = 4096  # characters of a grammar that are repeated

RANDOM_SEED = (1 << 32) - 1
"""The seed that stands for a fresh one, as a negative one does."""

FIELD_NAMES = {  # name in errors -> name in this API
    "repetition_penalty": "repeat_penalty",
    "max_tokens=": "n_predict=",
    "logprobs=": "n_probs=",
    "structured_outputs.json": "json_schema",
    "structured_outputs.grammar": "grammar",
}
_SAMPLING = {**LOCAL_SAMPLING, "ignore_eos": "ignore_eos"}
_STAGES: Mapping[
    str, Mapping[str, float]
] = {  # name among `samplers`, in the order of the sampler -> its parameters, with the values that change nothing
    "penalties": NO_PENALTIES,
    "temperature": {"temperature": 1.0},
    "min_p": {"min_p": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
}
_OFF = frozenset({"dry", "xtc", "typ_p", "typical_p", "top_n_sigma"})  # whose own fields turn them off
INFILL = "infill"

_ZERO = (0, 0.0)
_SAMPLERS = "use temperature, top_p, top_k and min_p"
REFUSED: Refusals = {
    "backend_sampling": ((False,), NOT_HERE),
    "dry_multiplier": (_ZERO, "use repeat_penalty, presence_penalty and frequency_penalty"),
    "dynatemp_range": (_ZERO, "the temperature does not vary"),
    "grammar_lazy": ((False,), "a grammar applies from the first token on"),
    "grammar_triggers": (([],), "a grammar applies from the first token on"),
    "min_keep": ((0, 1), _SAMPLERS),
    "mirostat": ((0,), _SAMPLERS),
    "post_sampling_probs": ((False,), "log probabilities are the model's own, from before the samplers"),
    "preserved_tokens": (([],), NOT_HERE),
    "return_progress": ((False,), "a stream begins with the first token"),
    "top_n_sigma": ((-1, -1.0, *_ZERO), _SAMPLERS),
    "typical_p": ((1, 1.0), _SAMPLERS),
    "xtc_probability": (_ZERO, _SAMPLERS),
}

_PAIRS: dict[str, Any] = {
    "anyOf": [
        {"type": "array", "items": {"type": "array", "minItems": 2, "maxItems": 2, "items": {}}},
        {"type": "object", "additionalProperties": {"type": ["number", "boolean"]}},
        {"type": "null"},
    ]
}
_FREE = "Accepted; it changes no result here."
_Int = Annotated[Annotated[int, Meta(ge=-MAX_INT64, le=MAX_INT64)] | None, Meta(description=_FREE)]
_Float = Annotated[float | None, Meta(description=_FREE)]
_Limit = Annotated[int, Meta(ge=-2, le=MAX_INT64)]


_ADAPTERS = Meta(max_length=MAX_ADAPTERS)


class AdapterScale(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter by its id in /lora-adapters, and how much of it is added: 0 or 1."""

    id: Annotated[int, Meta(ge=0, le=MAX_INT64)]
    scale: float


class SamplingFields(Body, kw_only=True):
    """The fields that say how to sample; None means left out. Those left out are the model's own."""

    refused: ClassVar[Refusals] = REFUSED
    is_lenient: ClassVar[bool] = True

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    repeat_penalty: Annotated[float | None, Meta(description="The same as repetition_penalty of other APIs.")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Annotated[
        int | None,
        Meta(description="0: no penalties. With any other value they apply to all tokens, as with -1."),
    ] = None
    ignore_eos: bool | None = None
    n_predict: Annotated[
        _Limit | None,
        Meta(
            description="Maximum number of tokens; 0: only compute the prompt; -1 or -2: as many as the context holds."
        ),
    ] = None
    max_tokens: Annotated[_Limit | None, Meta(description="Another name of n_predict.")] = None
    n_probs: Annotated[int | None, Meta(description="Return log probabilities of this many likeliest tokens.")] = None
    n_cmpl: Annotated[int | None, Meta(description="Number of completions of each prompt.")] = None
    n: int | None = None
    logit_bias: Annotated[
        list[Any] | dict[str, Any] | None,
        Meta(
            description="Pairs of a token id or a text, whose tokens are meant, and a number to add to its logit, or "
            "false to ban it; or an object of these.",
            extra_json_schema=_PAIRS,
        ),
    ] = None
    grammar: Annotated[str | None, Meta(description="A grammar in GBNF that the answer follows.")] = None
    json_schema: Annotated[Any, Meta(description="A JSON schema that the answer follows; {} for any JSON.")] = None
    lora: Annotated[
        Annotated[list[AdapterScale], _ADAPTERS] | None,
        Meta(description="The adapter that computes the answer, with a scale of 1; others may be given with 0."),
    ] = None
    samplers: Annotated[
        list[str] | None,
        Meta(
            description="The samplers to apply; the parameters of others count as left off. Their order is always that "
            "of generation_settings.samplers in the answer."
        ),
    ] = None

    cache_prompt: Annotated[bool | None, Meta(description=_FREE)] = None
    dry_allowed_length: _Int = None
    dry_base: _Float = None
    dry_penalty_last_n: _Int = None
    dry_sequence_breakers: Annotated[list[str] | None, Meta(description=_FREE)] = None
    dynatemp_exponent: _Float = None
    id_slot: _Int = None
    mirostat_eta: _Float = None
    mirostat_tau: _Float = None
    n_cache_reuse: _Int = None
    n_discard: _Int = None
    n_keep: _Int = None
    sse_ping_interval: _Int = None
    t_max_prompt_ms: _Float = None
    xtc_threshold: _Float = None

    @property
    def adapter_scales(self) -> Mapping[int, float]:
        """See `Body`."""
        given = self.lora or []
        used = [each for each in given if each.scale]
        if len(used) > 1 or any(each.scale != 1 for each in used):
            raise bad_request(
                "lora has several adapters, or a scale other than 0 and 1; give one adapter with the scale 1", "lora"
            )
        scales = {each.id: each.scale for each in given}
        if len(scales) < len(given):
            raise bad_request("lora has an id twice; give each adapter once", "lora")
        return scales

    @property
    def num_predict(self) -> int | None:
        """The most tokens of an answer, None for as many as the context holds. Raises `ApiError` 400."""
        if None not in (self.n_predict, self.max_tokens) and self.n_predict != self.max_tokens:
            raise bad_request(
                f"n_predict={self.n_predict} and max_tokens={self.max_tokens} are the same limit, but differ; give one",
                "n_predict",
            )
        given = self.max_tokens if self.n_predict is None else self.n_predict
        return None if given is None or given < 0 else given

    @property
    def num_completions(self) -> int:
        """The number of completions of each prompt."""
        return next((each for each in (self.n_cmpl, self.n) if each is not None), 1)

    def params(self, defaults: Mapping[str, Any], *, is_infill: bool = False) -> SamplingParams:
        """Return the sampling parameters, without those of `logit_bias`. Raises `ApiError` 400 or `ValueError`."""
        given = {ours: value for name, ours in _SAMPLING.items() if (value := getattr(self, name)) is not None}
        for name, value in given.items():
            if name in SAMPLING_RANGES and not (name == "seed" and self._wants_fresh_seed):
                SAMPLING_RANGES[name].check("repeat_penalty" if name == "repetition_penalty" else name, value)
        params = {**defaults, **given, "n": self.num_completions, "max_tokens": self.num_predict or None}
        SAMPLING_RANGES["n"].check("n_cmpl", self.num_completions)
        if self.num_predict == 0:
            params["max_tokens"] = 1  # to have the prompt computed; the token is left out
        if self._wants_fresh_seed:
            params.pop("seed", None)
        if isinstance(self.stop, str):
            params["stop"] = [self.stop]
        if self.n_probs:
            SAMPLING_RANGES["logprobs"].check("n_probs", self.n_probs)
            params["logprobs"] = self.n_probs
        self._restrict(params, is_infill)
        self._apply_window(params)
        params["structured_outputs"] = self.structured_outputs
        return SamplingParams(**params)

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        """The constraint on the answer, None without one. Raises `ApiError` 400."""
        if self.grammar and self.json_schema is not None:
            raise bad_request("grammar and json_schema both constrain the answer; give only one of them", "grammar")
        if self.grammar:
            return StructuredOutputs(grammar=self.grammar)
        if self.json_schema is None:
            return None
        schema = self.json_schema
        structured = StructuredOutputs(json=schema if isinstance(schema, dict) else _json(schema))
        try:
            check_structured_outputs(structured)
        except ValueError as error:
            raise bad_request(str(error).replace("structured_outputs.json", "json_schema"), "json_schema") from None
        return structured

    @property
    def _wants_fresh_seed(self) -> bool:
        return self.seed is not None and (self.seed < 0 or self.seed == RANDOM_SEED)

    def _restrict(self, params: dict[str, Any], is_infill: bool) -> None:
        """Turn off the samplers that are not among those given. Raises `ApiError` 400 for an unknown one."""
        if self.samplers is None:
            return
        known = {*_STAGES, *_OFF, *([INFILL] if is_infill else [])}
        for name in self.samplers:
            if name not in known:
                raise bad_request(
                    f"samplers has {name[:100]!r}, which is not available; leave it out, or choose from "
                    f"{', '.join(_STAGES)}",
                    "samplers",
                    "unsupported_parameter",
                )
        for stage, neutral in _STAGES.items():
            if stage not in self.samplers:
                params.update(neutral)

    def _apply_window(self, params: dict[str, Any]) -> None:
        """Turn penalties off with `repeat_last_n` 0; else they are for all tokens. Raises `ApiError` 400."""
        last = self.repeat_last_n
        if last == 0:
            params.update(NO_PENALTIES)
        elif last is not None and last < -1:
            raise bad_request(f"repeat_last_n={last} is out of range; it must be -1 or more", "repeat_last_n")

    def ignored(self, params: SamplingParams, max_model_len: int) -> list[str]:
        """Return the fields that have no effect here, and would have one in llama.cpp."""
        return ignored_window(self.repeat_last_n, params, max_model_len)

    def settings(self, params: SamplingParams, model: str, max_model_len: int, *, stream: bool) -> GenerationSettings:
        """Return the settings that an answer repeats."""
        limit = -1 if self.num_predict is None else self.num_predict
        return GenerationSettings(
            n_ctx=max_model_len,
            model=model,
            n_predict=limit,
            max_tokens=limit,
            seed=RANDOM_SEED if params.seed is None else params.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repeat_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            stop=params.stop or [],
            ignore_eos=params.ignore_eos,
            stream=stream,
            n_probs=self.n_probs or 0,
            grammar=(self.grammar or "")[:_MOST_SHOWN],
        )


class GenerationSettings(msgspec.Struct, kw_only=True):
    """Sampling settings of an answer. `samplers`: those that are applied, in this order. The context length is `n_ctx`.

    `repeat_last_n` is always -1: penalties apply to all tokens. `seed` is 4294967295 if there was none. A long
    `grammar` is cut.
    """

    n_ctx: int
    model: str
    n_predict: int = -1
    max_tokens: int = -1
    seed: int = RANDOM_SEED
    temperature: float = 1.0
    dynatemp_range: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    repeat_last_n: int = -1
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    mirostat: int = 0
    stop: list[str] = []
    ignore_eos: bool = False
    stream: bool = False
    n_probs: int = 0
    min_keep: int = 0
    grammar: str = ""
    samplers: list[str] = msgspec.field(default_factory=lambda: list(_STAGES))


def bias_pairs(given: Sequence[Any] | Mapping[str, Any]) -> list[tuple[int | str, float | None]]:
    """Return the pairs of a `logit_bias`: a token id or a text, and its bias, None to ban it. Raises `ApiError` 400."""
    SAMPLING_LENGTHS["logit_bias"].check("logit_bias", given)
    entries = [list(entry) for entry in given.items()] if isinstance(given, Mapping) else given
    return [_pair(entry, f"logit_bias[{index}]") for index, entry in enumerate(entries)]


def _pair(entry: Any, where: str) -> tuple[int | str, float | None]:
    if not isinstance(entry, list) or len(entry) != 2 or type(entry[0]) not in {int, float, str}:
        raise bad_request(f"{where} is not a pair; give [TOKEN ID OR TEXT, NUMBER OR false]", "logit_bias")
    token, bias = entry
    if isinstance(token, float):
        if not token.is_integer():
            raise bad_request(f"{where}[0]={token} is no token id; give an integer, or a text", "logit_bias")
        token = int(token)
    if isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) < 10:
        token = int(token)  # the key of an object
    if bias is False:
        return token, None
    if type(bias) not in {int, float} or not math.isfinite(bias):
        raise bad_request(f"{where} has no number as its bias; give one, or false to ban the token", "logit_bias")
    LOGIT_BIAS.check(f"{where}[1]", bias)
    return token, float(bias)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
