"""`python -m quire.kernels.gguf.folder FILE.gguf`: the model folder that a GGUF file stands for, as JSON.

The folder is in the user's cache. It holds the files that a checkpoint has beside its weights, made from the metadata,
and links to the GGUF file and its other parts; the weights stay where they are. Its name comes from the paths, sizes
and times of the files, so it is made once for each of them, and it may be deleted when nothing uses it. The folders
used last are kept (`kept_folders.py`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from quire.kernels import host
from quire.kernels.errors import ModelError
from quire.kernels.gguf.config import config_of, generation_config_of, pooling_files_of
from quire.kernels.gguf.container import gguf_files, read_gguf
from quire.kernels.gguf.description import DESCRIPTION, description_of
from quire.kernels.gguf.kept_folders import evict, use
from quire.kernels.gguf.tokenizer import tokenizer_files

SUFFIX = ".gguf"
"""End of the names of GGUF files. The file itself may lack it, its link in the folder has it."""

LAYOUT = 6
"""Version of what is made from the metadata."""


def model_folder(file: Path, root: Path | None = None) -> Path:
    """Return the model folder of a GGUF file, made if it is not there. Raises ModelError.

    `root` is the folder of all such folders, that of the user by default.
    """
    files = [path.absolute() for path in gguf_files(file)]
    folder = (root or host.user_cache() / "gguf") / _key(files) / file.name.removesuffix(SUFFIX)
    if not use(folder):
        _make(folder, files)
    return folder


def _key(files: list[Path]) -> str:
    try:
        facts = [(str(path), (status := path.stat()).st_size, status.st_mtime_ns, status.st_ctime_ns) for path in files]
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}; a GGUF file needs all of its parts beside it") from None
    return hashlib.blake2b(repr((LAYOUT, facts)).encode(), digest_size=16).hexdigest()


def _make(folder: Path, files: list[Path]) -> None:
    model = read_gguf(files)
    try:
        contents: dict[str, Any] = {
            "config.json": config_of(model),
            "generation_config.json": generation_config_of(model.metadata),
            DESCRIPTION: description_of(model),
            **pooling_files_of(model),
            **tokenizer_files(model.metadata),
        }
    except ValueError as error:
        raise ModelError(f"{files[0]}: {error}") from None
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="new-", dir=folder.parent.parent))
        try:
            (made / folder.name).mkdir()
            for name, content in contents.items():
                (made / folder.name / name).parent.mkdir(exist_ok=True)
                (made / folder.name / name).write_bytes(msgspec.json.encode(content))
            for path in files:
                (made / folder.name / f"{path.name.removesuffix(SUFFIX)}{SUFFIX}").symlink_to(path)
            made.chmod(0o755)
            made.rename(folder.parent)
            evict(folder.parent.parent)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        if not folder.is_dir():  # another process did not make it meanwhile
            raise ModelError(
                f"{folder}: {error.strerror}; choose another folder for caches with XDG_CACHE_HOME"
            ) from None


def main(arguments: list[str]) -> int:
    """Print the folder of the GGUF file that is named, or the error that it has."""
    try:
        folder = model_folder(Path(arguments[0]))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    sys.stdout.write(msgspec.json.encode({"folder": os.fspath(folder)}).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
