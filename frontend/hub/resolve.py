"""The folder of a model that is given as a folder or by its name at the Hugging Face hub."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.frontend.errors import HubError
from quire.frontend.hub.cache import (
    DEFAULT_REVISION,
    INDEX,
    WEIGHTS,
    CachedModel,
    Snapshot,
    all_models,
    cache_folder,
    find_snapshot,
    model_folder,
    shards,
)
from quire.frontend.hub.download import HubFile, Place, download
from quire.frontend.hub.gguf_files import HubGguf, choose_gguf, gguf_models
from quire.frontend.hub.names import check_model, is_gguf, split_tag
from quire.frontend.kernels import ask_kernels
from quire.frontend.progress import download_bar, report

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoSibling

_FILES = frozenset({
    "config.json", "generation_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json",
    "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json",
})  # fmt: skip
_TEMPLATES = "additional_chat_templates"
_MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")  # of sentence-transformers
_OTHERS_SHOWN = 6
_CACHED_SECONDS = 3.0
"""Time that the hub may take to list a model whose files the cache has."""


def resolve_model(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Return the folder of a model: `model` itself, or the files of that name, downloaded if the cache lacks them.

    For a GGUF file it is a folder in the user's cache, with the files that its metadata stand for and a link to it.
    After a name, `:TAG` chooses one of its GGUF files; a model that has only these needs none.

    `revision` is a branch, a tag or a commit of a model given by its name; `download_dir` takes the place of the cache
    of the hub. Raises `ValueError` for a model or revision that cannot be, and `HubError` if there is no such model, it
    cannot be reached, or the download fails.
    """
    check_model(model, revision)
    folder = Path(model)
    if folder.is_dir():
        return folder.absolute()
    if not is_gguf(model):
        folder = Resolution(model, revision, cache_folder(download_dir)).path()
    return folder if folder.is_dir() else _gguf_folder(folder)


def _gguf_folder(file: Path) -> Path:
    try:
        return Path(ask_kernels("gguf.folder", str(file))["folder"])
    except RuntimeError as error:
        raise ValueError(str(error)) from None


class _UnreachableError(Exception):
    """The hub does not answer; the message says why."""


class Resolution:
    """The search for one model, which translates the errors of `huggingface_hub` into lines for users."""

    def __init__(self, model: str, revision: str | None, cache: Path) -> None:
        from huggingface_hub import constants

        self._name, self._tag = split_tag(model)
        self._model, self._revision, self._cache = model, revision, cache
        self._hub = constants.ENDPOINT
        self._is_offline = constants.HF_HUB_OFFLINE

    def path(self) -> Path:
        """Return the folder of the model's files, or the first of its GGUF files. Raises `HubError`."""
        try:
            commit, files = self._list()
        except _UnreachableError as error:
            reason = str(error)
        else:
            return self._fetched(commit, files)
        return self._cached(reason)

    def _fetched(self, commit: str, files: dict[str, HubFile]) -> Path:
        """Return the model's path after files that the cache lacks have been downloaded."""
        place = Place(self._name, commit, self._cache)
        snapshot = Snapshot(model_folder(self._cache, self._name) / "snapshots" / commit)
        gguf = self._choose_gguf(files, gguf_models(files))
        try:
            needed = self._needed_files(files, snapshot, place) if gguf is None else gguf.files
            self._download(needed, files, snapshot, place)
            self._note_commit(commit)
        except HubError:
            raise
        except Exception as error:
            raise self._download_error(error, snapshot) from error
        return CachedModel(snapshot, gguf).path

    def _choose_gguf(self, files: Iterable[str], models: list[HubGguf]) -> HubGguf | None:
        """Return the GGUF model that is asked for, None for the checkpoint. Raises `HubError`."""
        is_wanted = self._tag is not None or (models and not {WEIGHTS, INDEX} & set(files))
        return choose_gguf(self._name, models, self._tag) if is_wanted else None

    def _list(self) -> tuple[str, dict[str, HubFile]]:
        """Return the commit and the files of the model at the hub. Raises `_UnreachableError` or `HubError`."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

        if self._is_offline:
            raise _UnreachableError("HF_HUB_OFFLINE is set")
        try:
            info = HfApi(library_name="quire").model_info(
                self._name, revision=self._revision, files_metadata=True, timeout=self._timeout()
            )
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status == 429 or status >= 500:
                raise _UnreachableError(f"the hub at {self._hub} answers with status {status}") from None
            raise HubError(self._refusal(error)) from None
        except HTTPError as error:
            raise _UnreachableError(f"the hub at {self._hub} cannot be reached ({_line(error)})") from None
        except (ValueError, TypeError, KeyError) as error:
            raise _UnreachableError(f"{self._hub} does not answer as a hub does ({_line(error)})") from None
        if info.sha is None:
            raise _UnreachableError(f"{self._hub} does not answer as a hub does (it names no commit)")
        return info.sha, {file.rfilename: _hub_file(file) for file in info.siblings or []}

    def _timeout(self) -> float:
        """Return the seconds that the hub may take to list the model: fewer where that brings only news."""
        from huggingface_hub import constants

        own = float(constants.HF_HUB_ETAG_TIMEOUT)
        snapshot = find_snapshot(self._cache, self._name, self._revision)
        is_cached = snapshot is not None and self._is_whole(snapshot)
        return min(own, _CACHED_SECONDS) if is_cached and "HF_HUB_ETAG_TIMEOUT" not in os.environ else own

    def _is_whole(self, snapshot: Snapshot) -> bool:
        """Return True if a model of the snapshot has all of its files."""
        return any(model.problem() is None for model in snapshot.models())

    def _missing_files(self, model: CachedModel) -> list[str]:
        """Return the names of needed files that are not there. Raises `ValueError`."""
        return model.missing_files()

    def _refusal(self, error: HfHubHTTPError) -> str:
        from huggingface_hub import errors, get_token

        url, status = f"{self._hub}/{self._name}", error.response.status_code
        if isinstance(error, errors.GatedRepoError):
            advice = "ask there with the account of the token in use" if get_token() else "ask there"
            return f"{self._name} is open only to those who asked for it at {url}; {advice}, and {_TOKEN}"
        if isinstance(error, errors.RevisionNotFoundError):
            return (
                f"{self._name} has no revision {self._revision!r}; choose a branch, a tag or a whole commit of "
                f"{url}/commits/main, or leave it out"
            )
        if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
            return (
                f"{self._name} is not a folder here, and {self._hub} has no model of this name, or a private one; "
                f"check the spelling, or {_TOKEN}"
            )
        if status == 401:
            return f"{self._hub} does not accept the token; {_TOKEN}"
        if status == 403:
            return f"the token in use may not read {url}; {_TOKEN}"
        return f"{self._hub} refuses to list {self._name} with status {status}"

    def _check_files(self, files: dict[str, HubFile]) -> None:
        lacks = [] if "config.json" in files else ["config.json"]
        lacks += [] if {WEIGHTS, INDEX} & files.keys() else [WEIGHTS]
        if lacks:
            others = [name for name in sorted(files) if not name.startswith(".")]
            listed = ", ".join(others[:_OTHERS_SHOWN]) + ", ..." * (len(others) > _OTHERS_SHOWN)
            advice = "choose a model with config.json and safetensors"
            if "adapter_config.json" in files:
                advice = "it is an adapter: give the model that it was trained on, and this by --lora-modules"
            elif any(name.endswith((".bin", ".pth", ".pt")) for name in others):
                advice += ", or convert this one with `save_pretrained` of transformers"
            raise HubError(
                f"{self._name} is not a checkpoint that can be loaded: it lacks {' and '.join(lacks)}, and has "
                f"{listed or 'no files'}; {advice}"
            )

    def _needed_files(self, files: dict[str, HubFile], snapshot: Snapshot, place: Place) -> list[str]:
        """Return the files of a checkpoint that are read. Raises `HubError`, and the errors of `huggingface_hub`."""
        self._check_files(files)
        names = [name for name in files if name in _FILES or _is_template(name) or _MODULE.fullmatch(name)]
        if WEIGHTS in files:
            names.append(WEIGHTS)
        else:
            if not (snapshot.folder / INDEX).is_file():
                download([files[INDEX]], place, lambda _num_bytes: None)
            names += shards(snapshot.folder / INDEX)
        return names

    def _download(self, names: Sequence[str], files: dict[str, HubFile], snapshot: Snapshot, place: Place) -> None:
        """Download what is missing. Raises `HubError`, and the errors of `huggingface_hub`."""
        if absent := [name for name in names if name not in files]:
            other = names[0] if is_gguf(names[0]) else INDEX
            raise HubError(f"{self._name} lacks {absent[0]}, which its {other} names; choose another revision")
        missing = [files[name] for name in names if not _is_whole(snapshot.folder / name, files[name].size)]
        if not missing:
            return
        for file in missing:
            _remove(snapshot.folder / file.path)
        num_bytes = sum(file.size for file in missing)
        self._check_space(num_bytes)
        details = f"{len(missing)} files of commit {place.commit[:7]}"
        with download_bar(self._model, details, num_bytes) as advance:
            download(missing, place, advance)

    def _check_space(self, num_bytes: int) -> None:
        if (free := shutil.disk_usage(self._existing_cache()).free) < num_bytes:
            raise HubError(
                f"{self._name} takes {num_bytes} bytes more, but {free} are free in {self._cache}; make room there, or "
                "choose another folder with download_dir"
            )

    def _existing_cache(self) -> Path:
        """Return the cache, or the folder in which it is to be made."""
        return next(folder for folder in (self._cache, *self._cache.parents) if folder.is_dir())

    def _note_commit(self, commit: str) -> None:
        """Let the cache know which commit the revision is, as without a network it is looked up there."""
        ref = model_folder(self._cache, self._name) / "refs" / (self._revision or DEFAULT_REVISION)
        if self._revision != commit and not (ref.is_file() and ref.read_text() == commit):
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)

    def _download_error(self, error: Exception, snapshot: Snapshot) -> HubError:
        what = f"the download of {self._name} to {self._cache} failed"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return HubError(f"{what}: the disk is full; make room there, or choose another folder with download_dir")
        if isinstance(error, PermissionError | FileExistsError | NotADirectoryError) or _is_read_only(error):
            return HubError(f"{what}: {_line(error)}; choose another folder with download_dir")
        kept = ", ".join(sorted(path.name for path in snapshot.folder.glob("*"))) or "no file"
        return HubError(f"{what}: {_line(error)}; try again, it goes on after the files that are complete ({kept})")

    def _cached(self, reason: str) -> Path:
        """Return the model's path in the cache. Raises `HubError` that says what the cache has."""
        snapshot = find_snapshot(self._cache, self._name, self._revision)
        missing = []
        if snapshot is not None:
            files = snapshot.files
            models = gguf_models(files)
            whole = [model for model in models if set(model.files) <= set(files)] if self._tag is None else []
            try:
                found = CachedModel(snapshot, self._choose_gguf(files, whole or models))
            except HubError as error:
                raise HubError(f"{reason}, and in the cache {error}") from None
            try:
                missing = self._missing_files(found)
            except ValueError as error:
                raise HubError(f"{reason}, and in the cache {error}; remove it, and download the model again") from None
            if not missing:
                if not self._is_offline:
                    report(f"{reason}; using the files of {self._model} in {snapshot.folder}")
                return found.path
        at = "" if self._revision is None else f" at revision {self._revision!r}"
        lacks = f"{', '.join(missing)} of {self._model}{at}" if missing else f"{self._model}{at}"
        names = sorted({each.name for each in all_models(self._cache) if each.problem() is None})
        others = f"which has {', '.join(names)}" if names else "which has no model"
        raise HubError(f"{reason}, there is no such folder, and {lacks} is not in the cache {self._cache}, {others}")


_TOKEN = "give a token with access in HF_TOKEN, or by `hf auth login`"  # noqa: S105 - words


def _is_template(name: str) -> bool:
    folder, _, file = name.partition("/")
    return folder == _TEMPLATES and file.endswith(".jinja") and "/" not in file


def _is_whole(path: Path, size: int) -> bool:
    """Return True if a file of the cache is there, and not shorter than at the hub."""
    return path.is_file() and path.stat().st_size >= size


def _remove(path: Path) -> None:
    """Remove a truncated file of the cache, whose name is a link to its contents, so that it is downloaded again."""
    if path.is_file():
        path.resolve().unlink()
        path.unlink(missing_ok=True)


def _hub_file(file: RepoSibling) -> HubFile:
    checksum = file.blob_id if file.lfs is None else file.lfs.sha256
    return HubFile(file.rfilename, file.size or 0, checksum)


def _is_read_only(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EROFS


def _line(error: Exception) -> str:
    """Return the first line of an error's message; further ones are advice for programs."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
