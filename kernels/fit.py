"""Advice on a model that does not fit into memory: the number formats and context lengths with which it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from quire.kernels.devices import Device
from quire.kernels.errors import MemoryShortageError, ModelError
from quire.kernels.options import LoadOptions, choose_device
from quire.kernels.runner import choose_memory, describe

_SMALLER_FORMATS = ("int8", "int4")
_SHORTEST_CONTEXT = 512
"""Shortest context that is advised, in tokens."""


@contextmanager
def advised(options: LoadOptions) -> Iterator[None]:
    """Add advice to a MemoryShortageError, and raise it as a ModelError."""
    try:
        yield
    except MemoryShortageError as error:
        raise ModelError("; ".join(filter(None, (str(error), advice(options))))) from None


def advice(options: LoadOptions) -> str | None:
    """Return a sentence that names the number formats, each with its longest context, with which the model fits.

    None if all that does not fit is the chosen size of the KV cache, or part of a GPU.
    """
    wanted, device = describe(options)[0].limits.max_model_len, choose_device(options)
    fitting = []
    for quantization in dict.fromkeys((options.quantization, *_SMALLER_FORMATS)):
        candidate = replace(options, quantization=quantization)
        if (length := _longest_context(candidate, device)) is None:
            continue
        changes = [] if quantization == options.quantization else [f"quantization={quantization}"]
        changes += [] if length == wanted else [f"max_model_len={length}"]
        fitting.append(" and ".join(changes))
    if not fitting:
        as_planned = replace(options, num_pages=None, kv_cache_memory_bytes=None, gpu_memory_utilization=None)
        if _longest_context(as_planned, device) is not None:
            return None
        return f"no number format makes it fit at {_SHORTEST_CONTEXT} tokens of context; choose a smaller model"
    return f"it fits with {', or with '.join(fitting)}"


def _longest_context(options: LoadOptions, device: Device) -> int | None:
    """Return the longest context that fits, the chosen one or a power of two below it; None if there is none.

    Also None if the checkpoint cannot be quantized so.
    """
    try:
        length = describe(options)[0].limits.max_model_len
        while not _fits(replace(options, max_model_len=length), device):
            length = 1 << (length - 1).bit_length() - 1
            if length < _SHORTEST_CONTEXT:
                return None
    except ModelError:
        return None
    return length


def _fits(options: LoadOptions, device: Device) -> bool:
    """Return True if the model fits, and with it the KV of one sequence of the context unless its size is chosen."""
    plan = describe(options)[0]
    try:
        pages = choose_memory(plan, options, device=device)[0].pages
    except MemoryShortageError:
        return False
    is_chosen = options.num_pages is not None or options.kv_cache_memory_bytes is not None
    return is_chosen or pages * plan.limits.block_size >= plan.limits.max_model_len
