"""vLLM's name of a module: this file is installed as `quire/lora/request.py` too."""

from __future__ import annotations

from quire.frontend.lora_request import LoRARequest

__all__ = ["LoRARequest"]
