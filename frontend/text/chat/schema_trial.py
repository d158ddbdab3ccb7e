"""The trial of tools' schemas: which one llguidance rejects, found in a process of its own that a schema may end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.frontend.bounded_trial import run_trial

CPU_SECONDS = 10
MEMORY_BYTES = 256 << 20
_SECONDS = 60.0  # on the busiest host


class Verdict(msgspec.Struct, frozen=True):
    """The schema at an index, and why it is rejected: None while that is not known."""

    index: int
    error: str | None


def rejected_of(schemas: Sequence[str]) -> Verdict | None:
    """Return the first schema that is rejected or ends the process, and why; None if there is none."""
    trial = run_trial(
        "quire.frontend.text.chat.schema_process", given=msgspec.json.encode(list(schemas)), seconds=_SECONDS
    )
    lines = trial.written.splitlines()
    verdict = msgspec.json.decode(lines[-1], type=Verdict | None) if lines else None
    if verdict is None or verdict.error is not None:
        return verdict
    return Verdict(
        verdict.index,
        f"it takes more than the stack, the {MEMORY_BYTES} bytes of memory or the {CPU_SECONDS} s that are allowed to "
        "compile it; make it simpler, with shorter chains of references",
    )
