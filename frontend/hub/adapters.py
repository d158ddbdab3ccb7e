"""The folder of an adapter that is given by its name at the Hugging Face hub."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future

from quire.frontend.errors import HubError
from quire.frontend.hub.cache import ADAPTER_CONFIG, CachedModel, Snapshot, cache_folder
from quire.frontend.hub.download import HubFile, Place
from quire.frontend.hub.gguf_files import HubGguf
from quire.frontend.hub.resolve import Resolution

_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors")

MAX_BYTES = 8 << 30
"""The most bytes of an adapter at the hub: rank 256 for all layers of a model of 70B has less in bf16."""

_MAX_SPARE_BYTES = 4 << 30  # of the disk that downloads leave free, or a tenth of a smaller one


def resolve_adapter(name: str, download_dir: str | None = None) -> str:
    """Return the folder of an adapter's files, downloaded if the cache lacks them; `download_dir` as for a model.

    Raises `HubError` if there is no such adapter, it cannot be reached, or the download fails.
    """
    return str(_AdapterResolution(name, None, cache_folder(download_dir)).path())


def resolving_adapter(name: str, download_dir: str | None = None) -> Future[str]:
    """Begin to resolve an adapter, on a thread for which a program that ends does not wait."""
    future = Future[str]()
    future.set_running_or_notify_cancel()  # nobody who waits for it cancels it

    def work() -> None:
        try:
            future.set_result(resolve_adapter(name, download_dir))
        except BaseException as error:  # noqa: BLE001 - raised by those who wait
            future.set_exception(error)

    threading.Thread(target=work, name="quire-hub-adapter", daemon=True).start()
    return future


_MOST_KNOWN = 4096  # beyond, the one that was named least recently is looked up again when it is named

_lock = threading.Lock()  # of what follows
_known: dict[tuple[str, str | None], Future[str]] = {}  # the most recently named last


def known_adapter(name: str, download_dir: str | None = None) -> Future[str]:
    """Return the folder of an adapter's files: once there is one, this process asks the hub no more.

    Requests that name an adapter would ask it each time.
    """
    with _lock:
        found = _known.pop((name, download_dir), None)
        if found is None or (found.done() and found.exception() is not None):
            found = resolving_adapter(name, download_dir)
        _known[name, download_dir] = found
        if len(_known) > _MOST_KNOWN:
            del _known[next(iter(_known))]
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

    def _check_space(self, num_bytes: int) -> None:
        """Raise `HubError` for a download that is too large: clients may name adapters, and must not fill the disk."""
        if num_bytes > MAX_BYTES:
            raise HubError(
                f"{self._name} has {num_bytes} bytes, and adapters of the hub may have {MAX_BYTES}; download it "
                "yourself, and give its folder"
            )
        super()._check_space(num_bytes)
        disk = shutil.disk_usage(self._existing_cache())
        if disk.free - num_bytes < (spare := min(_MAX_SPARE_BYTES, disk.total // 10)):
            raise HubError(
                f"{self._name} takes {num_bytes} bytes more, and would leave less than {spare} of the {disk.free} that "
                f"are free in {self._cache}; make room there, or choose another folder with download_dir"
            )

    def _is_whole(self, snapshot: Snapshot) -> bool:
        return not _missing_files(snapshot)

    def _missing_files(self, model: CachedModel) -> list[str]:
        return _missing_files(model.snapshot)


def _missing_files(snapshot: Snapshot) -> list[str]:
    return [name for name in _FILES if not (snapshot.folder / name).is_file()]
