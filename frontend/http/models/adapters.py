"""The LoRA adapters of a model, which clients name as models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from quire.frontend.http.service import with_tag
from quire.frontend.lora_request import LoRARequest

MAX_ADAPTERS = 4096
"""Adapters that a model may have names for."""


class ServedAdapters:
    """The adapters of a model by name: those with which its engine was started, and those that clients have loaded.

    A name only says where the files are: the engine reads them for the first request, and again after others have taken
    their place.
    """

    def __init__(self, folders: Mapping[str, str] | None = None) -> None:
        self._ids = itertools.count(1)  # one that has been unloaded leaves its id to no other
        self._adapters: dict[str, LoRARequest] = {}
        for name, folder in (folders or {}).items():
            self.put(name, folder)

    def __len__(self) -> int:
        return len(self._adapters)

    def __iter__(self) -> Iterator[LoRARequest]:
        return iter(list(self._adapters.values()))

    def find(self, name: str) -> LoRARequest | None:
        """Return the adapter of a name, with or without its tag."""
        return self._adapters.get(with_tag(name))

    def put(self, name: str, path: str) -> None:
        """Give a path a name, in the place of the one that has had it. Raises `ValueError`."""
        before = self.find(name)
        number = next(self._ids) if before is None else before.lora_int_id
        self._adapters[with_tag(name)] = LoRARequest(name, number, path)

    def remove(self, name: str) -> bool:
        """Forget a name; return False if there is none. Requests that have begun go on."""
        return self._adapters.pop(with_tag(name), None) is not None

    @staticmethod
    def number_of(adapter: LoRARequest) -> int:
        """Return the number of an adapter in llama.cpp's API, which counts from 0."""
        return adapter.lora_int_id - 1

    def numbered(self, number: int) -> LoRARequest | None:
        """Return the adapter of such a number."""
        return next((each for each in self._adapters.values() if self.number_of(each) == number), None)
