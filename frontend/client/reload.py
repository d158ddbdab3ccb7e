"""The reload of an engine: a process with other settings loads its model, and takes the place of the one that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.frontend.client.launcher import KILL_SECONDS, EngineProcess, Loaded, ReloadCall
from quire.frontend.errors import EngineStartError
from quire.protocol.engine_options import EngineOptions
from quire.protocol.host import Host
from quire.protocol.options import options_of

Settings = Mapping[str, object]
"""Options of an engine process by name, without those that its supervisor gives it."""

_SIZES = ("kv_cache_memory_bytes", "num_pages")  # of which only one may be given


class Successor:
    """The process that is to take the place of `old`, from a client's call on.

    It loads its model while the old one works. Once it has, the old one is told to give way, and the process waits for
    `begin`. If it cannot be used, the client is told why, and the old one works on.
    """

    def __init__(
        self,
        old: EngineProcess,
        call: ReloadCall,
        settings: Settings,
        spawn: Callable[[Settings], EngineProcess],
        start_timeout: float,
        host: Host,
    ) -> None:
        """Start the process, by `spawn`. Raises `EngineStartError`."""
        self.settings = settings
        self.is_loaded = False
        self.has_failed = False
        self._old = old
        self._call = call
        self._start_timeout = start_timeout
        self.process = spawn(settings)
        self._thread = host.thread("quire-reload", self._load)
        self._thread.start()

    def cancel(self) -> None:
        """End the process. Idempotent."""
        self.process.stop(KILL_SECONDS)
        self._thread.join()

    def _load(self) -> None:
        try:
            new = self.process.wait_loaded(self._start_timeout)
            check_text(self._old.wait_loaded(0.0), new)
        except (EngineStartError, ValueError) as error:
            self.process.stop(KILL_SECONDS)
            self.has_failed = True
            refuse(self._old, self._call, str(error))
            return
        self.is_loaded = True
        self._old.tell(
            "GIVE_WAY",
            number=self._call.number,
            engine_pid=self.process.pid,
            drain_timeout=self._call.drain_timeout,
        )


def refuse(old: EngineProcess, call: ReloadCall, error: str) -> None:
    """Have the engine answer a call with an error."""
    old.tell("REFUSED", number=call.number, error=error)


def change(settings: Settings, changes: Settings) -> dict[str, object]:
    """Return the settings with some options changed; None stands for an option's default.

    Raises `ValueError` for an option that a reload cannot change, or a value that is not allowed.
    """
    rows = options_of(EngineOptions)
    for name, value in changes.items():
        if name not in rows:
            raise ValueError(f"{name} cannot be changed by a reload, but {', '.join(rows)} can")
        if value is None and rows[name].is_required:
            raise ValueError(f"{name} has no default; give a value, or leave it as it is")
    merged = {**settings, **changes}
    for name, other in (_SIZES, _SIZES[::-1]):
        if changes.get(name) is not None and other not in changes:
            merged[other] = None
    given = {name: value for name, value in merged.items() if value is not None}
    if settings.get("scheduling_policy") == "priority" != given.get("scheduling_policy"):
        raise ValueError(
            "scheduling_policy=priority cannot be changed by a reload, since open requests may have priorities; start "
            "the engine anew"
        )
    EngineOptions(**{name: value for name, value in given.items() if name in rows})  # type: ignore[arg-type]
    return given


def check_text(old: Loaded, new: Loaded) -> None:
    """Raise `ValueError` if a model differs from the one before in what frontends know about it and keep."""
    names = sorted(old.text_files.keys() | new.text_files.keys())
    if differing := [name for name in names if old.text_files.get(name) != new.text_files.get(name)]:
        raise ValueError(
            f"the new model has another tokenizer or chat template: {', '.join(differing)} differ, and frontends keep "
            "those of the model before; give it the same files, or start a new engine"
        )
    for name in ("vocab_size", "eos_token_ids"):
        if (before := getattr(old, name)) != (now := getattr(new, name)):
            raise ValueError(
                f"the new model has {name} {now}, and frontends know {before}; give it the same, or start a new engine"
            )
