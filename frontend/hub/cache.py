"""The models that the cache of the Hugging Face hub holds on this machine.

A model's folder there, `models--Qwen--Qwen3-0.6B`, has its files by checksum in `blobs`, a folder of links to them for
each commit in `snapshots`, and in `refs` the commit of each branch or tag that was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.frontend.hub.names import name_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEFAULT_REVISION = "main"


@dataclass(frozen=True)
class Snapshot:
    """The files of a model at one commit."""

    folder: Path

    @property
    def name(self) -> str:
        """Name of the model at the hub."""
        return name_of(str(self.folder))

    @property
    def commit(self) -> str:
        """The commit."""
        return self.folder.name

    @property
    def revisions(self) -> list[str]:
        """Branches and tags that stood at this commit when they were last asked for."""
        refs = self.folder.parent.parent / "refs"
        files = sorted(path for path in refs.rglob("*") if path.is_file())
        return [str(path.relative_to(refs)) for path in files if path.read_text().strip() == self.commit]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def missing_files(self) -> list[str]:
        """Return the names of needed files that are not there, such as those of a download that was interrupted."""
        needed = ["config.json"]
        if not (self.folder / WEIGHTS).is_file():
            index = self.folder / INDEX
            needed += shards(index) if index.is_file() else [WEIGHTS]
        return [name for name in needed if not (self.folder / name).is_file()]


def cache_folder(download_dir: str | None = None) -> Path:
    """Return the folder of the cache: `download_dir`, or the one of all programs that use the hub."""
    if download_dir is not None:
        return Path(download_dir).expanduser().absolute()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).absolute()


def model_folder(cache: Path, name: str) -> Path:
    """Return the folder of a model in a cache."""
    return cache / "--".join(("models", *name.split("/")))


def find_snapshot(cache: Path, name: str, revision: str | None) -> Snapshot | None:
    """Return the files of a model at a branch, tag or commit as the cache knows them, maybe incomplete."""
    folder, wanted = model_folder(cache, name), revision or DEFAULT_REVISION
    ref = folder / "refs" / wanted
    found = folder / "snapshots" / (ref.read_text().strip() if ref.is_file() else wanted)
    return Snapshot(found) if found.is_dir() else None


def all_snapshots(cache: Path) -> Iterator[Snapshot]:
    """Yield all models of a cache in the order of their names, each commit on its own."""
    for folder in sorted(cache.glob("models--*/snapshots/*"), key=lambda path: str(path).lower()):
        if folder.is_dir():
            yield Snapshot(folder)


def shards(index: Path) -> list[str]:
    """Return the names of the weight files that an index lists. Raises `ValueError` for another kind of file."""
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{index} is not a safetensors index") from None
    if not all(isinstance(file, str) and Path(file).name == file for file in files):
        raise ValueError(f"{index} names files outside of its folder")
    return sorted(files)
