"""The LoRA adapters of a model, which clients name as models."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from quire.frontend.http.service import with_tag
from quire.frontend.lora_request import LoRARequest
from quire.protocol.messages import AdapterInfo

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 4096
"""Adapters that a model may have names for."""


def check_names(model: Sequence[str], adapters: Iterable[str]) -> None:
    """Raise `ValueError` for an adapter whose name is the model's or another adapter's, with or without their tags."""
    taken = {with_tag(name): f"a name of the model, {name!r}" for name in model}
    for name in adapters:
        if (other := taken.get(with_tag(name))) is not None:
            raise ValueError(
                f"lora_modules: to clients of the server {name!r:.100} is the same as {other:.120}; give each adapter "
                "a name of its own, or the model another one with --served-model-name"
            )
        taken[with_tag(name)] = f"another adapter, {name!r}"


class ServedAdapters:
    """The adapters of a model by name: those with which its engine was started, and those that clients have loaded.

    A name only says where the files are: the engine reads them for the first request, and again after others have taken
    their place.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)  # one that has been unloaded leaves its id to no other
        self._adapters: dict[str, LoRARequest] = {}
        self._engine: AdapterInfo | None = None

    def follow(self, engine: AdapterInfo | None) -> None:
        """Have the names of an engine, which a reload changes; what clients have loaded stays if it takes any adapter.

        Once an engine has been started again as it was, nothing changes.
        """
        former, self._engine = self._engine, engine
        if engine is former or engine == former:
            return
        before, now, takes_any = _folders(former), _folders(engine), engine is not None and engine.takes_any
        for each in self:
            is_loaded = takes_any and before.get(each.lora_name) != each.lora_path
            if each.lora_name not in now and not is_loaded:
                self.remove(each.lora_name)
        for name, folder in now.items():
            try:
                self.put(name, folder)
            except ValueError as error:  # of an engine that another program has started
                logger.warning("an adapter of the engine is not served: %s", error)

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

    def by_number(self) -> dict[int, LoRARequest]:
        """Return the adapters by these numbers."""
        return {self.number_of(each): each for each in self}


def _folders(engine: AdapterInfo | None) -> Mapping[str, str]:
    return {} if engine is None else engine.folders
