"""The model of a command: an `AsyncLLM` made from the flags, and the defaults in its folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.frontend.cli.flags import AttachFlags, EngineFlags, SamplingFlags, wrong_usage
from quire.frontend.text.generation_config import GENERATION_DEFAULTS, model_defaults

if TYPE_CHECKING:
    import asyncio

    from quire.frontend.async_llm import AsyncLLM
    from quire.protocol.messages import SamplingParams


@dataclass(frozen=True)
class Model:
    """A model ready to generate, and the runner of its event loop."""

    llm: AsyncLLM
    runner: asyncio.Runner

    @property
    def folder(self) -> Path | None:
        """Folder of its tokenizer; None if it has none and so takes no text."""
        return None if self.llm.tokenizer is None else self.llm.tokenizer.path

    def params(self, flags: SamplingFlags) -> SamplingParams:
        """Return the sampling parameters: the flags that were given, else the model's own, else the library's."""
        from quire.frontend.sampling import SamplingParams

        return SamplingParams(**{"max_tokens": None, **self.defaults(flags)})

    def defaults(self, flags: SamplingFlags) -> dict[str, Any]:
        """Return the defaults of requests that differ from the library's: the flags, else the model's own."""
        return {**self._own_defaults, **flags.given}

    @property
    def _own_defaults(self) -> dict[str, Any]:
        return model_defaults(self.folder, self.llm.model)

    def sampling_line(self, flags: SamplingFlags) -> str:
        """Return the sampling parameters of requests that give none, as a line for users."""
        values = {"temperature": 1.0} | self.defaults(flags)
        return ", ".join(f"{name}={values[name]}" for name in GENERATION_DEFAULTS if name in values)

    @property
    def has_chat_template(self) -> bool:
        """True if conversations can be written as prompts for the model."""
        return self.chat_template != ""

    @property
    def chat_template(self) -> str:
        """The main chat template, empty without one."""
        return self.llm.chat_template


@contextmanager
def open_model(engine: EngineFlags, attach: AttachFlags, more: Mapping[str, Any] | None = None) -> Iterator[Model]:
    """Start an engine, or attach to one; the end of the `with` leaves it, and ends it if it was started here.

    `more`: further arguments of `AsyncLLM`.
    """
    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.engine_args import check_attaching

    with wrong_usage():
        check_attaching({**engine.given, **attach.given})
    llm = AsyncLLM(**engine.given, **attach.given, **(more or {}))
    try:
        # Not `runner.run`: it turns Ctrl-C into a cancellation, which a coroutine that never waits ignores.
        with new_runner() as runner:
            yield Model(llm, runner)
    finally:
        llm.close()


def starts_engines(engine: EngineFlags, attach: AttachFlags) -> bool:
    """Return True if a command with these flags starts engines, and doesn't only attach to some."""
    return (attach.engine_address is None and not attach.engine) or (engine.data_parallel_size or 1) > 1


def new_runner() -> asyncio.Runner:
    """Return the runner of an event loop, as commands use it."""
    import asyncio

    import uvloop

    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
