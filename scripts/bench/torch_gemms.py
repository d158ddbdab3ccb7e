"""GEMMs of torch in f32, to compare kernels with: on CPUs without bf16 units it is torch's fastest float dtype."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.errors import ModelError

if TYPE_CHECKING:
    import torch

CALLS = 4
"""Least number of calls of a measurement."""


class TorchGemms:
    """Times `torch.mm` on random operands of the shapes of kernels, with weights that are not in a cache."""

    def __init__(self, threads: int, cache_bytes: int) -> None:
        try:
            import torch
        except ImportError as error:
            raise ModelError("--torch needs torch; install it: pip install -e '.[reference]'") from error
        self._torch, self._cache_bytes = torch, cache_bytes
        self._weights: dict[tuple[int, int], list[torch.Tensor]] = {}
        torch.set_num_threads(threads)

    def profile(self, kernel: GemmKernel, rows: int) -> list[float]:
        """Return the seconds of each of some calls; the first one, which starts torch's threads, is left out."""
        torch = self._torch
        x, out = torch.randn(rows, kernel.k), torch.empty(rows, kernel.n)
        weights, seconds = self._weights_of(kernel.k, kernel.n), []
        for call in range(1 + max(CALLS, len(weights))):
            w = weights[call % len(weights)].t()
            start = time.perf_counter()
            torch.mm(x, w, out=out)
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def _weights_of(self, k: int, n: int) -> list[torch.Tensor]:
        """Return weights [n, k] of twice the size of the cache, the same ones at each call."""
        if (k, n) not in self._weights:
            count = 1 + 2 * self._cache_bytes // (4 * k * n)
            self._weights[k, n] = list(self._torch.randn(count, n, k))
        return self._weights[k, n]
