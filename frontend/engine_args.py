"""The arguments of `LLM` and `AsyncLLM`: the names of vLLM where there is one, and clear words for what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

from quire.frontend.text.chat.reasoning import REASONING_PARSERS
from quire.frontend.text.chat.tool_parsers import TOOL_PARSERS
from quire.frontend.vllm_args import refuse
from quire.protocol.keys import Security

DEMO_MODEL = str(Path(__file__).parent / "demo_model")

DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = ("int8", "int4", "int4-g64", "int4-g32", "gptq", "awq", "compressed-tensors")
KV_CACHE_DTYPES = ("auto", "int8")
BLOCK_SIZES = (32, 64, 128)
SCHEDULING_POLICIES = ("fcfs", "priority", "lpm", "sjf")
MOST_SECONDS = 1e9  # that a wait may take: 30 years, which every clock can count

_NAMES: dict[str, tuple[str | None, ...]] = {
    "dtype": DTYPES,
    "quantization": (*QUANTIZATIONS, None),
    "kv_cache_dtype": KV_CACHE_DTYPES,
    "scheduling_policy": SCHEDULING_POLICIES,
    "tool_call_parser": ("none", *TOOL_PARSERS, None),
    "reasoning_parser": ("none", *REASONING_PARSERS, None),
}
# Most of what is counted, at least 1 of each; the engine has the same limits.
_MOST: dict[str, int] = {
    "max_model_len": 2**31 - 1,
    "max_num_seqs": 1 << 16,
    "max_num_batched_tokens": 1 << 20,
    "num_pages": 2**31 - 1,
    "threads": 1024,
    "max_waiting_requests": 2**31 - 1,
    "max_waiting_tokens": 2**31 - 1,
}
_SIZE = re.compile(r"\s*\d{1,18}(\.\d+)?\s*([KMGT]i?B?|B)?\s*", re.IGNORECASE)  # what the engine reads


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `LLM` and `AsyncLLM`; `EngineArgs` tells their meanings and defaults."""

    tokenizer: str | None
    skip_tokenizer_init: bool
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_memory_bytes: int | str | None
    num_pages: int | None
    threads: int | None
    pin_threads: bool
    seed: int | None
    enable_prefix_caching: bool | None
    scheduling_policy: str
    long_prefill_token_threshold: int
    max_waiting_requests: int
    max_waiting_tokens: int
    grammar_timeout: float
    preload_grammars: bool
    cache_dir: str | None
    weight_cache: str | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    engine_address: str | None
    curve_keys: str | None
    insecure_tcp: bool
    start_timeout: float


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """How to get an engine: start one with these arguments, or attach to a running one at `engine_address`.

    model: folder of a checkpoint. tokenizer: folder, when it is not the model's. skip_tokenizer_init: token ids only.
    dtype: "auto" (the checkpoint's), "bfloat16" or "float32". max_model_len: context length, the model's when None.
    quantization: "int8", "int4" (a scale for each 128 weights), "int4-g64" or "int4-g32" turn the weights of a float
    checkpoint into integers; "gptq", "awq" and "compressed-tensors" confirm that a checkpoint is such a one.
    kv_cache_dtype: "auto" (the model's) or "int8".
    max_num_seqs: sequences that run at once. max_num_batched_tokens: token budget of a step.
    block_size: tokens in a KV page. kv_cache_memory_bytes: memory for KV pages, a number or text such as "4GiB";
    num_pages: the same in pages. threads: of the engine; as many as usable cores when None.
    pin_threads: bind each to a CPU of its own, for a machine with nothing else to do.
    seed: of the seeds that requests without one are given; a fresh one when None.
    enable_prefix_caching: keep KV pages for requests that begin with the same tokens; None means yes.
    scheduling_policy: who of those that wait is next. "fcfs": who came first; "priority": the least `priority`;
    "lpm": who shares the longest prefix with what is cached; "sjf": who has the fewest tokens to prefill.
    long_prefill_token_threshold: tokens of one prompt in a step; 0 for as many as hardly slow the others down.
    max_waiting_requests, max_waiting_tokens (of prompts): what may wait; more is refused.
    grammar_timeout: seconds that compiling the grammar of a request's structured_outputs may take.
    preload_grammars: read the tokenizer for grammars at the start, which takes a second where it is large; otherwise
    the first request with structured_outputs pauses all others for so long.
    cache_dir: where compiled kernels are kept.
    weight_cache: folder where packed weights are kept, so that the next start maps them instead of packing them.
    tool_call_parser: how the model writes tool calls, "hermes", "llama3_json", "json_call" or "none"; reasoning_parser:
    how it writes its thoughts, "think", "qwen3", "deepseek_r1" or "none". As its chat template shows when None.
    engine_address: attach there instead of starting an engine.
    curve_keys: folder of keys for tcp://; insecure_tcp: tcp:// without keys.
    start_timeout: seconds until an engine that is not ready, or does not answer, is given up.
    """

    model: str = DEMO_MODEL
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 32
    kv_cache_memory_bytes: int | str | None = None
    num_pages: int | None = None
    threads: int | None = None
    pin_threads: bool = False
    seed: int | None = None
    enable_prefix_caching: bool | None = None
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 1 << 24
    grammar_timeout: float = 10.0
    preload_grammars: bool = False
    cache_dir: str | None = None
    weight_cache: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    engine_address: str | None = None
    curve_keys: str | None = None
    insecure_tcp: bool = False
    start_timeout: float = 600.0

    @classmethod
    def from_options(cls, model: str | None, options: Mapping[str, Any]) -> EngineArgs:
        """Arguments from keywords as a user gave them. Raises `TypeError` or `ValueError` that names what is wrong."""
        known = {field.name for field in fields(cls)}
        for name, value in options.items():
            if name not in known:
                refuse(name, value, known)
        given = {name: value for name, value in options.items() if name in known}
        if given.get("engine_address") is not None:
            _check_attach(model, given)
        args = cls(**given) if model is None else cls(model=str(model), **given)
        check_arguments(args)
        return args

    @property
    def security(self) -> Security:
        """What the sockets need to know."""
        return Security(None if self.curve_keys is None else Path(self.curve_keys), self.insecure_tcp)

    def command_line(self) -> list[str]:
        """The flags of the engine process, its address left out."""
        flags: dict[str, float | str | None] = {
            "--model": str(Path(self.model).absolute()),
            "--dtype": self.dtype,
            "--quantization": self.quantization,
            "--kv-dtype": self.kv_cache_dtype,
            "--max-model-len": self.max_model_len,
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--page-size": self.block_size,
            "--kv-memory": self.kv_cache_memory_bytes,
            "--num-pages": self.num_pages,
            "--threads": self.threads,
            "--seed": self.seed,
            "--scheduling-policy": self.scheduling_policy,
            "--long-prefill-threshold": self.long_prefill_token_threshold or None,
            "--max-waiting-requests": self.max_waiting_requests,
            "--max-waiting-tokens": self.max_waiting_tokens,
            "--grammar-timeout": self.grammar_timeout,
            "--cache-dir": self.cache_dir,
            "--weight-cache": self.weight_cache,
        }
        line = [text for name, value in flags.items() if value is not None for text in (name, str(value))]
        switches = {
            "--pin-threads": self.pin_threads,
            "--no-prefix-caching": self.enable_prefix_caching is False,
            "--preload-grammars": self.preload_grammars,
        }
        return line + [name for name, wanted in switches.items() if wanted]


def check_arguments(args: EngineArgs) -> None:
    """Raise `ValueError` for the first argument that is out of range."""
    for name, known in _NAMES.items():
        if getattr(args, name) not in known:
            names = ", ".join(word for word in known if word is not None)
            raise ValueError(f"{name}={getattr(args, name)!r} is not known; it can be {names}")
    for name, most in _MOST.items():
        _check_count(name, getattr(args, name), most)
    if args.seed is not None and (type(args.seed) is not int or args.seed < 0):
        raise ValueError(f"seed={args.seed!r} is out of range; give a whole number, 0 or more")
    if type(args.block_size) is not int or args.block_size not in BLOCK_SIZES:
        raise ValueError(
            f"block_size={args.block_size!r} is not possible; it can be {', '.join(map(str, BLOCK_SIZES))}"
        )
    _check_switch("pin_threads", args.pin_threads)
    _check_switch("preload_grammars", args.preload_grammars)
    if args.enable_prefix_caching is not None:
        _check_switch("enable_prefix_caching", args.enable_prefix_caching)
    if args.long_prefill_token_threshold != 0:
        _check_count("long_prefill_token_threshold", args.long_prefill_token_threshold, _MOST["max_num_batched_tokens"])
    for name in ("cache_dir", "weight_cache"):
        folder = getattr(args, name)
        if folder is not None and (not isinstance(folder, str | PathLike) or not str(folder)):
            raise ValueError(f"{name}={folder!r} is not a folder; give its path, or leave it out")
    if args.kv_cache_memory_bytes is not None and args.num_pages is not None:
        raise ValueError("kv_cache_memory_bytes and num_pages both size the KV memory; give one of them")
    _check_size("kv_cache_memory_bytes", args.kv_cache_memory_bytes)
    _check_seconds("grammar_timeout", args.grammar_timeout)
    _check_seconds("start_timeout", args.start_timeout)
    if args.engine_address is None and not Path(args.model).is_dir():
        raise ValueError(
            f"model={args.model!r} is not a folder; give the folder of a checkpoint (config.json, *.safetensors "
            "and tokenizer.json), or leave model out for the demo model"
        )


# Arguments that mean something with an engine that runs already; the rest was decided when it was started.
_ATTACH = {
    "engine_address", "tokenizer", "skip_tokenizer_init", "seed", "curve_keys", "insecure_tcp", "start_timeout",
    "tool_call_parser", "reasoning_parser",
}  # fmt: skip


def _check_attach(model: str | None, given: Mapping[str, Any]) -> None:
    decided = sorted({*given} - _ATTACH) + ([] if model is None else ["model"])
    if decided:
        raise ValueError(
            f"{', '.join(decided)} cannot be set for the engine at {given['engine_address']}, which is running "
            "already; leave out, or set when that engine is started"
        )


def _check_count(name: str, value: object, most: int) -> None:
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise ValueError(f"{name}={value!r} is out of range; give a whole number from 1 to {most}")


def _check_switch(name: str, value: object) -> None:
    if type(value) is not bool:
        raise ValueError(f"{name}={value!r} is not possible; it can be True or False")


def _check_size(name: str, value: object) -> None:
    good = _SIZE.fullmatch(value) is not None if isinstance(value, str) else type(value) is int and 0 < value < 1 << 63
    if value is not None and not good:
        raise ValueError(f"{name}={value!r} is not a size; give a number of bytes, or text such as '4GiB' or '512MiB'")


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give a number of seconds")
    if not 0 < value <= MOST_SECONDS:
        raise ValueError(f"{name}={value} is not a time; give seconds above 0, at most {MOST_SECONDS:.0f}")
