"""Names of models: folders and GGUF files of this machine, and names at the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire.frontend.hub.gguf_files import SUFFIX, tag_of
from quire.frontend.path_kind import what_is

_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]{0,95}(?<![.-])", re.ASCII)
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_MAGIC = b"GGUF"
_FORBIDDEN = ("--", "..")  # anywhere in a name; in the cache `--` stands for the slash


def is_hub_name(model: str) -> bool:
    """Return True if a model at the hub may have this name, such as `Qwen/Qwen3-0.6B`, `gpt2` or `org/repo:Q4_K_M`."""
    name, tag = split_tag(model)
    if tag is not None and ("/" not in name or _TAG.fullmatch(tag) is None):
        return False
    return _HUB_NAME.fullmatch(name) is not None and not any(part in name for part in _FORBIDDEN)


def is_adapter_name(path: object) -> bool:
    """Return True if an adapter at the hub may be meant, as `owner/name`: there is no such path here."""
    if not isinstance(path, str) or "/" not in path or ":" in path or path.endswith(SUFFIX):
        return False
    return is_hub_name(path) and not os.path.lexists(path)


def split_tag(model: str) -> tuple[str, str | None]:
    """Return the name of a model at the hub, and the tag that chooses one of its GGUF files, None if there is none."""
    name, colon, tag = model.partition(":")
    return name, tag if colon else None


def is_gguf(model: str) -> bool:
    """Return True if a model is a GGUF file of this machine, whatever its name, or was meant to be one."""
    return (model.endswith(SUFFIX) and (":" not in model or Path(model).exists())) or _begins_as_gguf(Path(model))


def _begins_as_gguf(path: Path) -> bool:
    try:
        if not path.is_file():  # a pipe could wait for ever
            return False
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):  # not to be read, or no path
        return False


def check_model(model: str, revision: str | None = None) -> None:
    """Raise `ValueError` unless `model` is a folder, a GGUF file or a possible name, which alone has revisions."""
    path = Path(model)
    if path.is_dir() or (path.is_file() and is_gguf(model)):
        if revision is not None:
            kind = "folder" if path.is_dir() else "file"
            raise ValueError(
                f"revision={revision!r} applies to a model given by its name, and {model} is a {kind}; leave it out"
            )
    elif is_gguf(model):
        raise ValueError(f"model={model!r} {what_is(path)}; give the path of a GGUF file")
    elif path.exists() or not is_hub_name(model):
        what = (
            f"{what_is(path)}, neither a folder nor a GGUF file"
            if path.exists()
            else "is not a folder, nor a name at the Hugging Face hub"
        )
        raise ValueError(
            f"model={model!r} {what}; give the folder of a checkpoint (config.json, *.safetensors and tokenizer.json), "
            "a GGUF file, a name such as Qwen/Qwen3-0.6B or org/repo:Q4_K_M, or leave model out for the demo model"
        )


def name_of(folder: str) -> str:
    """Return the name of a model: at the hub if its folder or GGUF file is in a cache, else the name of the folder.

    In a cache it is `models--Qwen--Qwen3-0.6B/snapshots/COMMIT`.
    """
    path = Path(folder)
    if (name := _cached_name(path)) is not None:
        return name
    for link in sorted(path.glob(f"*{SUFFIX}")):
        file = link.readlink() if link.is_symlink() else link
        for name in filter(None, map(_cached_name, file.parents)):
            return f"{name}:{tag_of(file.name)}"
    return path.name


def _cached_name(snapshot: Path) -> str | None:
    """Return the name at the hub of a model whose snapshot this folder would be."""
    kind, *parts = snapshot.parent.parent.name.split("--")
    is_cached = snapshot.parent.name == "snapshots" and kind == "models" and parts
    return "/".join(parts) if is_cached else None
