"""`LoRARequest`, by which a request names its adapter."""

from __future__ import annotations

import os
from dataclasses import dataclass

from quire.frontend.hub.names import is_adapter_name
from quire.protocol.messages import MAX_PATH

MAX_NAME = 256
"""Characters of an adapter's name."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The LoRA adapter that computes a request, in vLLM's words. Raises `ValueError` for fields that cannot be.

    `lora_path`: its folder in PEFT's format, a GGUF file, or its name at the Hugging Face hub; it alone says which
    adapter it is. `lora_name` and `lora_int_id`, from 1 on, are for people and logs. The engine reads a folder anew
    once its files have changed, with `load_inplace` or without.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        check_name(self.lora_name)
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id={self.lora_int_id!r} is no id; give a whole number from 1 on")
        if not str(self.lora_path):
            raise ValueError("lora_path is empty; give the folder of the adapter, or its GGUF file")
        if not is_adapter_name(self.lora_path):
            object.__setattr__(self, "lora_path", absolute(self.lora_path))
        if len(self.lora_path) > MAX_PATH:
            raise ValueError(f"lora_path has {len(self.lora_path)} characters; it may have {MAX_PATH}")

    @property
    def adapter_id(self) -> int:
        """The id, by vLLM's other name."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The name, by vLLM's other name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The path, by vLLM's other name."""
        return self.lora_path


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path as an engine sees it, which may have another working directory; links stay."""
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - Path keeps "..", and two names are one


def check_name(name: object) -> None:
    """Raise `ValueError` for a name that no adapter can have."""
    may_be = isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable() and ".." not in name.split("/")
    if not may_be or "," in str(name):  # with which metrics separate names
        raise ValueError(
            f"{name!r:.100} is no name of an adapter; give 1 to {MAX_NAME} printable characters, without commas, and "
            "without .. between slashes"
        )
