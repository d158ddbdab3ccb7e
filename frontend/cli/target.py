"""The target that a command measures, and the end of its runs."""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.frontend.cli.flags import AttachFlags, EngineFlags, changed, flag_names, option
from quire.frontend.cli.output import say
from quire.frontend.hub.names import name_of

if TYPE_CHECKING:
    import asyncio

    from quire.frontend.evaluation.replay.http_target import HttpOptions
    from quire.frontend.evaluation.replay.load import Extent, Load
    from quire.frontend.evaluation.replay.runner import Replay, RunCollector, Runs
    from quire.frontend.evaluation.replay.target import Target
    from quire.frontend.evaluation.workload.request import WorkloadRequest


_server = functools.partial(option, "An HTTP server")
_FOR_SERVERS_TOO = ("model", "tokenizer", "max_model_len")
_CHOICES = {"endpoint_type": ("completions", "chat"), "prompt_as": ("tokens", "text")}


@dataclass(frozen=True)
class ServerFlags:
    """Flags of an OpenAI-compatible server; None means not given."""

    base_url: Annotated[
        str | None,
        _server("Send to the OpenAI-compatible server at http://HOST:PORT; --model names one of its models.", "URL"),
    ] = None
    endpoint_type: Annotated[str | None, _server("completions or chat. Default: completions.", "NAME")] = None
    prompt_as: Annotated[
        str | None, _server("Prompts as tokens, or as text made by --tokenizer. Default: tokens.", "FORM")
    ] = None
    api_key: Annotated[str | None, _server("Key that the server asks for.", "KEY")] = None
    header: Annotated[list[str] | None, _server("A further header; may be given several times.", "NAME:VALUE")] = None
    extra_body: Annotated[
        str | None, _server('Further fields for each body, such as {"top_k": 20}; null leaves one out.', "JSON")
    ] = None

    def options(self, engine: EngineFlags, attach: AttachFlags) -> HttpOptions:
        """Return the options for `HttpTarget.open`. Raises `BadParameter`, also for flags that only an engine has."""
        from quire.frontend.evaluation.replay.http_target import HttpOptions
        from quire.frontend.text.tokenizer import Tokenizer

        assert self.base_url is not None
        given_for_engine = {**engine.given, **attach.given}
        if given := {name: value for name, value in given_for_engine.items() if name not in _FOR_SERVERS_TOO}:
            raise typer.BadParameter(f"{flag_names(given)} cannot be set for a server at --base-url; leave out")
        if self.endpoint_type == "chat" and self.prompt_as == "tokens":
            raise typer.BadParameter("--prompt-as tokens cannot be sent as a chat, which is text; leave it out")
        return HttpOptions(
            self.base_url,
            endpoint=self._choice("endpoint_type"),
            model=None if engine.model is None else str(engine.model),
            api_key=self.api_key,
            headers=dict(_header(each) for each in self.header or ()),
            prompt_as=self._choice("prompt_as"),
            tokenizer=None if attach.tokenizer is None else Tokenizer(str(attach.tokenizer)),
            extra_body=_fields(self.extra_body),
        )

    def refuse(self) -> None:
        """Raise `BadParameter` for flags that mean nothing without a server."""
        if given := changed(self):
            raise typer.BadParameter(f"{flag_names(given)} is for an HTTP server; name one with --base-url")

    def _choice(self, name: str) -> Any:
        choices = _CHOICES[name]
        value = getattr(self, name) or choices[0]
        if value not in choices:
            raise typer.BadParameter(
                f"{flag_names({name: value})} {value} is not known; it can be {' or '.join(choices)}"
            )
        return value


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise typer.BadParameter(f"--header {text!r} is not a header; give NAME:VALUE")
    return name.strip(), value.strip()


def _fields(text: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise typer.BadParameter(f"--extra-body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise typer.BadParameter(f'--extra-body {text} is not an object; give one such as {{"top_k": 20}}')
    return fields


@dataclass(frozen=True)
class TargetFlags:
    """Flags for the target: an HTTP server, a running engine, or one started by the command."""

    server: ServerFlags
    attach: AttachFlags
    engine: EngineFlags


@dataclass(frozen=True)
class OpenTarget:
    """A target and its event loop; `runs` runs workloads on it.

    `context_length` is that of --max-model-len if the server does not report one. `engine_flags`: of an own engine.
    """

    runs: Runs
    loop: asyncio.AbstractEventLoop
    context_length: int | None
    engine_flags: Mapping[str, Any]

    @property
    def target(self) -> Target:
        """The target of the measurement."""
        return self.runs.target

    def title(self, what: str) -> str:
        """Return the title of a report: the workload `what` and the model."""
        return f"{what} on {name_of(self.target.info.model)}"

    def config(self, **more: Any) -> dict[str, Any]:
        """Return the configuration of a run for the report, without values that are None."""
        from quire.frontend.evaluation.replay.host import processor

        info = self.target.info
        config = {
            "backend": info.backend,
            "model_id": info.model,
            "target": info.address,
            "max_model_len": info.max_model_len,
            "vocab_size": self.runs.vocab_size,
            **more,
            "build": info.build,
            "engine_flags": {name: str(value) for name, value in self.engine_flags.items()} or None,
            "client_host": processor(),
        }
        return {name: value for name, value in config.items() if value is not None}

    def measure(
        self,
        run: RunCollector,
        requests: Iterable[WorkloadRequest],
        load: Load,
        *,
        seed: int,
        extent: Extent,
        empties_cache: bool,
    ) -> None:
        """Run a workload and show its progress. `seed` determines the tokens of its prompts.

        `empties_cache`: start with an empty prefix cache. Raises the errors of `complete`, and those of reading the
        workload.
        """

        def replay() -> Coroutine[Any, Any, str | None]:
            return self.runs.replay(run, requests, load, seed=seed, extent=extent)

        self.complete(with_empty_cache(self.runs, replay) if empties_cache else replay())

    def complete(self, work: Coroutine[Any, Any, str | None]) -> None:
        """Complete `work`, which may run several workloads and returns the reason if it ended early.

        After the work is done, with everything measured, raises `KeyboardInterrupt` or `SystemExit` if a signal ended
        the current run, `RuntimeError` if the target has died.
        """
        received: list[signal.Signals] = []
        # Not `asyncio.Runner.run`: its Ctrl-C would cancel the run before its results are complete.
        reason = self.loop.run_until_complete(_stoppable(self.runs, work, received))
        if received:
            raise KeyboardInterrupt if received[0] is signal.SIGINT else SystemExit(128 + received[0])
        if reason is not None:
            raise RuntimeError(f"the run ended early: {reason}")


async def with_empty_cache(runs: Runs, work: Callable[[], Awaitable[str | None]]) -> str | None:
    """Do the work with an empty prefix cache, since an earlier benchmark may have had the same prompts."""
    if not await runs.target.reset_cache():
        say("the server's prefix cache cannot be emptied; give a new --seed each time, or prompts may be cached")
    return await work()


@contextmanager
def open_target(flags: TargetFlags, vocab_size: int | None = None) -> Iterator[OpenTarget]:
    """Connect to a server or engine, or start one; disconnect at the end. Raises `RuntimeError` if that fails.

    `vocab_size` is that of synthetic prompts, None for the target's.
    """
    import asyncio

    import uvloop

    from quire.frontend.evaluation.replay.runner import Runs

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        target = _open(loop, flags)
        try:
            runs = Runs(target, vocab_size=vocab_size, shown=_shown)
            length = flags.engine.max_model_len or target.info.max_model_len
            yield OpenTarget(runs, loop, length, flags.engine.given)
        finally:
            loop.run_until_complete(target.close())


def _open(loop: asyncio.AbstractEventLoop, flags: TargetFlags) -> Target:
    from quire.frontend.evaluation.replay.engine_target import EngineTarget
    from quire.frontend.evaluation.replay.http_target import HttpTarget

    if flags.server.base_url is not None:
        options = flags.server.options(flags.engine, flags.attach)
        _allow_connections()
        return loop.run_until_complete(HttpTarget.open(options))
    flags.server.refuse()
    return EngineTarget.from_options(**flags.engine.given, **flags.attach.given)


@asynccontextmanager
async def _shown(replay: Replay) -> AsyncIterator[None]:
    """Show the progress of a run, and at its end problems that are not in its figures."""
    from quire.frontend.evaluation.replay.progress import shown

    async with shown(replay):
        yield
    if replay.cold:
        first = replay.cold[0]
        say(f"{len(replay.cold)} requests of the warm-up did not complete, for example {first.outcome}: {first.error}")
    if replay.num_short:
        say(f"{replay.num_short} answers are shorter than in the workload: the server ignores ignore_eos")


async def _stoppable(runs: Runs, work: Coroutine[Any, Any, str | None], received: list[signal.Signals]) -> str | None:
    with _stopping(runs, received):
        return await work


@contextmanager
def _stopping(runs: Runs, received: list[signal.Signals]) -> Iterator[None]:
    """Let the first signal end the run, with a report, and a second one the command."""
    import asyncio

    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        received.append(number)
        loop.remove_signal_handler(number)
        runs.stop(f"it was stopped by {number.name}")

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as it is under nohup
            loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _allow_connections() -> None:
    """Raise the limit of file descriptors, since every open request has a connection."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
