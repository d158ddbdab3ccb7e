"""Names of models: folders and GGUF files of this machine, and names at the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]{0,95}(?<![.-])", re.ASCII)
_FORBIDDEN = ("--", "..")  # anywhere in a name; in the cache `--` stands for the slash


def is_hub_name(model: str) -> bool:
    """Return True if a model at the hub may have this name, such as `Qwen/Qwen3-0.6B` or `gpt2`."""
    return _HUB_NAME.fullmatch(model) is not None and not any(part in model for part in _FORBIDDEN)


def is_gguf(model: str) -> bool:
    """Return True if a model is a GGUF file of this machine, or was meant to be one."""
    return model.endswith(".gguf")


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
        raise ValueError(f"model={model!r} does not exist; give the path of a GGUF file")
    elif path.exists() or not is_hub_name(model):
        what = (
            "is a file, neither a folder nor a GGUF file"
            if path.exists()
            else "is not a folder, nor a name at the Hugging Face hub"
        )
        raise ValueError(
            f"model={model!r} {what}; give the folder of a checkpoint (config.json, *.safetensors and tokenizer.json), "
            "a GGUF file, a name such as Qwen/Qwen3-0.6B, or leave model out for the demo model"
        )


def name_of(folder: str) -> str:
    """Return the name of a model: at the hub if its folder is one of a cache, else the name of the folder.

    In a cache it is `models--Qwen--Qwen3-0.6B/snapshots/COMMIT`.
    """
    snapshots = Path(folder).parent
    kind, *parts = snapshots.parent.name.split("--")
    is_cached = snapshots.name == "snapshots" and kind == "models" and parts
    return "/".join(parts) if is_cached else Path(folder).name
