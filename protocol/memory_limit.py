"""The limit of a process's address space (`ulimit -v`), beneath which almost anything may fail, imports included."""

from __future__ import annotations

import resource


def explain_failure(error: Exception, *, is_import: bool = False) -> str | None:
    """Return in one line what failed for want of memory; None if `error` has another cause.

    Under a limit, libraries report it in many ways: they cannot be loaded, or no thread starts. An import may raise
    anything, even for modules that it cannot parse.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    is_limited = soft != resource.RLIM_INFINITY
    is_likely = is_import or isinstance(error, ImportError | RuntimeError | SyntaxError | SystemError | OSError)
    if not isinstance(error, MemoryError) and not (is_limited and is_likely):
        return None
    lines = str(error).strip().splitlines()
    words = f": {lines[-1].strip()}" if lines else ""
    if not is_limited:
        return f"memory ran out ({type(error).__name__}{words}); free some, or give the engine less to hold"
    return (
        f"the address space of this process is limited to {soft} bytes (ulimit -v), which may not be enough "
        f"({type(error).__name__}{words}); raise the limit, or remove it with `ulimit -v unlimited`"
    )
