"""The folder of an adapter that is given by its name at the Hugging Face hub."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from quire.frontend.errors import HubError
from quire.frontend.hub.cache import ADAPTER_CONFIG, CachedModel, Snapshot, cache_folder
from quire.frontend.hub.download import HubFile, Place
from quire.frontend.hub.gguf_files import HubGguf
from quire.frontend.hub.resolve import Resolution

_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors")


def resolve_adapter(name: str, download_dir: str | None = None) -> str:
    """Return the folder of an adapter's files, downloaded if the cache lacks them; `download_dir` as for a model.

    Raises `HubError` if there is no such adapter, it cannot be reached, or the download fails.
    """
    return str(_AdapterResolution(name, None, cache_folder(download_dir)).path())


def resolving_adapter(name: str) -> Future[str]:
    """Begin to resolve an adapter, on a thread for which a program that ends does not wait."""
    future = Future[str]()
    future.set_running_or_notify_cancel()  # nobody who waits for it cancels it

    def work() -> None:
        try:
            future.set_result(resolve_adapter(name))
        except BaseException as error:  # noqa: BLE001 - raised by those who wait
            future.set_exception(error)

    threading.Thread(target=work, name="quire-hub-adapter", daemon=True).start()
    return future


_lock = threading.Lock()  # of what follows
_known: dict[str, Future[str]] = {}


def known_adapter(name: str) -> Future[str]:
    """Return the folder of an adapter's files: once there is one, this process asks the hub no more.

    Requests that name an adapter would ask it each time.
    """
    with _lock:
        found = _known.get(name)
        if found is None or (found.done() and found.exception() is not None):
            found = _known[name] = resolving_adapter(name)
    return found


class _AdapterResolution(Resolution):
    """The search for one adapter. Pickles are never downloaded."""

    def _choose_gguf(self, *_files: object) -> HubGguf | None:
        return None

    def _needed_files(self, files: dict[str, HubFile], _snapshot: Snapshot, _place: Place) -> list[str]:
        if lacks := [name for name in _FILES if name not in files]:
            raise HubError(
                f"{self._name} is not an adapter that can be loaded: it lacks {' and '.join(lacks)}; choose one that "
                "PEFT's save_pretrained has written, as safetensors"
            )
        return list(_FILES)

    def _is_whole(self, snapshot: Snapshot) -> bool:
        return not _missing_files(snapshot)

    def _missing_files(self, model: CachedModel) -> list[str]:
        return _missing_files(model.snapshot)


def _missing_files(snapshot: Snapshot) -> list[str]:
    return [name for name in _FILES if not (snapshot.folder / name).is_file()]
