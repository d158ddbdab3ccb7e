"""Files in memory in which several engines of one owner find their weights packed, see the option `weights_fd`."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping

from quire.frontend.client.launcher import closed_in_forks
from quire.frontend.client.memory_file import memory_file

_DECIDE = ("model", "dtype", "quantization", "hf_overrides")
"""Options by which weights differ; the files have a key of all else that they depend on."""


class WeightFile:
    """A file, which is closed when nobody refers to it any more. Engines that have it keep the weights."""

    def __init__(self) -> None:
        self.fd = memory_file("quire-weights")
        self._finalizer = weakref.finalize(self, _close, self.fd)
        closed_in_forks.add(self)

    def close_in_child(self) -> None:
        """See `Inherited`."""
        self._finalizer()


class WeightFiles:
    """The files, one for all engines whose options make the same weights."""

    def __init__(self) -> None:
        self._files: weakref.WeakValueDictionary[tuple[object, ...], WeightFile] = weakref.WeakValueDictionary()

    def of(self, settings: Mapping[str, object]) -> WeightFile:
        """Return the file for engines with these options."""
        key = tuple(settings.get(name) for name in _DECIDE)
        file = self._files.get(key)
        if file is None:
            file = self._files[key] = WeightFile()
        return file


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
