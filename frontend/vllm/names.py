"""Names that vLLM's scripts import and that Quire alone would not need."""

from __future__ import annotations

import gc
import os
from typing import Any

from quire.frontend.hub.resolve import resolve_model
from quire.frontend.text.tokenizer import Tokenizer
from quire.frontend.text.tokenizer_trial import check_tokenizer
from quire.frontend.vllm.options import own_options

__all__ = ["AttentionConfig", "cleanup_dist_env_and_memory", "get_tokenizer"]


class AttentionConfig:
    """Choice of vLLM's attention kernels; as `attention_config` it has no effect, and a warning says so."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __repr__(self) -> str:
        return f"AttentionConfig({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free what a deleted `LLM` has left, its engine process included. There is nothing distributed to clean up."""
    del shutdown_ray  # Ray is the caller's
    gc.collect()


def get_tokenizer(
    tokenizer_name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    **options: Any,
) -> Tokenizer:
    """Return the tokenizer of a model: a folder, a GGUF file, or a name at the Hugging Face hub.

    `options`: vLLM's, such as `tokenizer_mode` and `trust_remote_code`. Raises `ValueError` if there is no tokenizer,
    or an option cannot be had, and `HubError` as `LLM` does.
    """
    own_options(options, {"revision", "download_dir"})
    folder = resolve_model(os.fspath(tokenizer_name), revision, download_dir)
    check_tokenizer(folder)
    return Tokenizer(folder)
