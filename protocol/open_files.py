"""The limit of open files (RLIMIT_NOFILE), which bounds the connections of a process."""

from __future__ import annotations

import resource

OTHER_FILES = 64
"""Files that a process opens beside its connections: sockets and pipes of its own, of the model, temporary ones."""


def allow_connections(count: int) -> int:
    """Raise the process's limit of open files to fit `count` connections; return how many of them fit, perhaps none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return count
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(0, most - OTHER_FILES)
