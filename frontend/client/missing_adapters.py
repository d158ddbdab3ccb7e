"""The adapters of engines that serve the same requests: each must take all that the others take."""

from __future__ import annotations

from quire.protocol.messages import AdapterInfo


def missing_adapters(own: AdapterInfo | None, other: AdapterInfo | None) -> str | None:
    """Return which adapters of another engine this one does not take, in words; None if it takes all of them."""
    if other is None:
        return None
    if own is None:
        return "takes no LoRA adapters"
    if other.takes_any and not own.takes_any:
        return "takes no adapters but its lora_modules"
    folders = set(own.folders.values())
    lacking = (name for name, folder in other.folders.items() if folder not in folders and not own.takes_any)
    name = next(lacking, None)
    return None if name is None else f"does not take the adapter {name} in {other.folders[name]}"
