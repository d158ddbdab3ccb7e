"""The models that the cache of the Hugging Face hub holds on this machine.

A model's folder there, `models--Qwen--Qwen3-0.6B`, has its files by checksum in `blobs`, a folder of links to them for
each commit in `snapshots`, and in `refs` the commit of each branch or tag that was asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.frontend.hub.gguf_files import HubGguf, gguf_models
from quire.frontend.hub.names import name_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
DEFAULT_REVISION = "main"

_COMMIT = re.compile(r"[0-9a-f]{7,64}")


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
        return [str(path.relative_to(refs)) for path in files if _commit_of(path) == self.commit]

    @property
    def files(self) -> list[str]:
        """Paths of the files in the folder."""
        return [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()]

    def missing_files(self) -> list[str]:
        """Return the names of a checkpoint's files that are not there, such as after an interrupted download.

        Raises `ValueError` for an index that does not list files.
        """
        needed = ["config.json"]
        if not (self.folder / WEIGHTS).is_file():
            index = self.folder / INDEX
            needed += shards(index) if index.is_file() else [WEIGHTS]
        return [name for name in needed if not (self.folder / name).is_file()]

    def models(self) -> list[CachedModel]:
        """Return the models in the folder: the checkpoint, unless there are only GGUF files, and each GGUF model.

        An adapter is none.
        """
        files = self.files
        found = [CachedModel(self, model) for model in gguf_models(files)]
        if ADAPTER_CONFIG in files and not found and not {WEIGHTS, INDEX} & set(files):
            return []
        return found if found and not {WEIGHTS, INDEX} & set(files) else [CachedModel(self), *found]


@dataclass(frozen=True)
class CachedModel:
    """A model of a snapshot, its checkpoint or a GGUF model."""

    snapshot: Snapshot
    gguf: HubGguf | None = None

    @property
    def name(self) -> str:
        """The name by which it can be asked for."""
        return self.snapshot.name if self.gguf is None else f"{self.snapshot.name}:{self.gguf.tag}"

    @property
    def path(self) -> Path:
        """The folder of the checkpoint, or the GGUF file."""
        return self.snapshot.folder if self.gguf is None else self.snapshot.folder / self.gguf.files[0]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        own = gguf_models(self.snapshot.files) if self.gguf is None else []
        others = {file for model in own for file in model.files}
        files = self.snapshot.files if self.gguf is None else self.gguf.files
        paths = (self.snapshot.folder / file for file in files if file not in others)
        return sum(path.stat().st_size for path in paths if path.is_file())

    def missing_files(self) -> list[str]:
        """Return the names of needed files that are not there. Raises `ValueError` as `Snapshot.missing_files` does."""
        if self.gguf is None:
            return self.snapshot.missing_files()
        return [file for file in self.gguf.files if not (self.snapshot.folder / file).is_file()]

    def problem(self) -> str | None:
        """Return why it cannot be loaded as it lies there, None if all of its files are there."""
        try:
            missing = self.missing_files()
        except (ValueError, OSError) as error:
            return f"damaged: {error}"
        return f"incomplete: {', '.join(missing)} missing" if missing else None


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
    found = folder / "snapshots" / (_commit_of(folder / "refs" / wanted) or wanted)
    return Snapshot(found) if found.is_dir() else None


def _commit_of(ref: Path) -> str | None:
    """Return the commit that a branch or tag of the cache stands for, None if there is none or it cannot be read."""
    try:
        commit = ref.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def all_models(cache: Path) -> Iterator[CachedModel]:
    """Yield all models of a cache in the order of their names, each commit on its own."""
    for folder in sorted(cache.glob("models--*/snapshots/*"), key=lambda path: str(path).lower()):
        if folder.is_dir():
            yield from Snapshot(folder).models()


def shards(index: Path) -> list[str]:
    """Return the names of the weight files that an index lists. Raises `ValueError` for another kind of file."""
    problem = f"{index} is not a safetensors index"
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(problem) from None
    if not files or not all(isinstance(file, str) for file in files):
        raise ValueError(problem)
    if not all(Path(file).name == file for file in files):
        raise ValueError(f"{index} names files outside of its folder")
    return sorted(files)
