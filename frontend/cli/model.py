"""The model that a command works with: an `AsyncLLM` made from the flags, and what its folder says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.frontend.cli.flags import AttachFlags, EngineFlags, SamplingFlags, changed

if TYPE_CHECKING:
    import asyncio

    from quire.frontend.async_llm import AsyncLLM
    from quire.protocol.messages import SamplingParams

# Flags whose names differ from those of `LLM`, which are vLLM's.
NAMES = {
    "page_size": "block_size",
    "kv_memory": "kv_cache_memory_bytes",
    "kv_dtype": "kv_cache_dtype",
    "prefix_caching": "enable_prefix_caching",
    "long_prefill_threshold": "long_prefill_token_threshold",
    "address": "engine_address",
}
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Model:
    """A model ready to generate, and the runner of the event loop it works on.

    `folder` is where its tokenizer is; None if it has none, so that it takes no text.
    """

    llm: AsyncLLM
    runner: asyncio.Runner
    folder: Path | None

    def params(self, flags: SamplingFlags) -> SamplingParams:
        """Sampling parameters: the flags that were given, else the model's own, else the library's."""
        from quire.frontend.sampling import SamplingParams

        return SamplingParams(**{"max_tokens": None, **self.defaults(flags)})

    def defaults(self, flags: SamplingFlags) -> dict[str, Any]:
        """What holds for a request that does not say otherwise, where that is not the library's value."""
        own = {} if self.folder is None else generation_defaults(self.folder)
        return {**own, **changed(flags)}

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be written as prompts for it."""
        from quire.frontend.text.chat.template import template_sources

        return self.folder is not None and "default" in template_sources(self.folder)


@contextmanager
def open_model(engine: EngineFlags, attach: AttachFlags, more: Mapping[str, Any] | None = None) -> Iterator[Model]:
    """Start an engine, or attach to one; at the end of the `with` it is left, and ended if it was started here.

    `more`: arguments of `AsyncLLM` that are no flags of either.
    """
    import asyncio

    import uvloop

    from quire.frontend.async_llm import AsyncLLM

    model, options = engine_options(engine, attach)
    llm = AsyncLLM(model, **{**options, **(more or {})})
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            # Not by `runner.run`: it takes Ctrl-C for a wish to cancel, and a coroutine that never waits ignores that.
            folder = runner.get_loop().run_until_complete(_tokenizer_folder(llm))
            yield Model(llm, runner, folder)
    finally:
        llm.close()


async def _tokenizer_folder(llm: AsyncLLM) -> Path | None:
    try:
        return (await llm.get_tokenizer()).path
    except ValueError:  # the model has no tokenizer
        return None


def engine_options(engine: EngineFlags, attach: AttachFlags) -> tuple[str | None, Any]:
    """Return the model and the keyword arguments of `AsyncLLM` that the flags stand for, only those given."""
    flags = {**changed(engine), **changed(attach)}
    model = flags.pop("model", None)
    given = {NAMES.get(name, name): value for name, value in flags.items()}
    options = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return None if model is None else str(model), options


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling values of generation_config.json; `do_sample: false` there means temperature 0."""
    from quire.frontend.text.tokenizer_files import read_json

    config = read_json(folder, "generation_config.json")
    found = {name: config[name] for name in GENERATION_DEFAULTS if config.get(name) is not None}
    return {**found, "temperature": 0.0} if config.get("do_sample") is False else found
