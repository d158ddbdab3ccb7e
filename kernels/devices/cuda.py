"""NVIDIA's GPUs: kernels in PTX, of which the driver makes code. No toolkit is needed, and no GPU to compile."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from quire.kernels._native import CudaDevice, PtxCompiler
from quire.kernels.devices.cpu import start_threads
from quire.kernels.emit.builder import F32
from quire.kernels.emit.context import Capabilities, EmitContext, Kernel
from quire.kernels.emit.cuda.choice import gpu_kernel
from quire.kernels.emit.cuda.threads import ENTRY, GpuKernel, LaunchShape
from quire.kernels.emit.dots import CUDA
from quire.kernels.errors import ModelError

logger = logging.getLogger(__name__)

ARCHITECTURES = ("sm_80", "sm_90", "sm_120")
"""Architectures that kernels are compiled for in tests; others of LLVM's may do as well."""

CAPABILITIES = Capabilities(CUDA, F32, product_rows=128, query_rows=16, samples=True, fetches=True)
"""Capabilities of every GPU: an item of products has as many rows as share a tile of weights, one of attention few,
since many threads need many items."""

_LEAST_ARCHITECTURE = 80  # of kernels, which copy to shared memory by cp.async
_MOST_COMPILERS = 8  # threads, each with the memory of a compiler


class Cuda:
    """A GPU as a `Device`. The driver opens it when `native` is first asked for.

    Of an architecture alone, which may be that of no GPU here, kernels can only be compiled.
    """

    def __init__(self, name: str, cache: Path, threads: int = 1, *, pin_threads: bool = False) -> None:
        """`name`: the GPU's number, by default 0, or an architecture, as sm_90. Raises ModelError."""
        if not re.fullmatch(r"|\d{1,3}|sm_\w{1,8}", name):
            raise ModelError(f"device is 'cuda:{name[:100]}'; it must be cuda, or as cuda:0, or as cuda:sm_90")
        self._name = name or "0"
        self._cache = cache
        self._threads = threads
        self._pin_threads = pin_threads
        self._is_architecture = name.startswith("sm_")
        if self._is_architecture:
            self._compiler  # noqa: B018 - which is checked here

    @property
    def name(self) -> str:
        """See Device."""
        return f"cuda:{self._name}"

    @property
    def product(self) -> str:
        """See Device."""
        return self.native.name

    @property
    def in_host_memory(self) -> bool:
        """See Device."""
        return False

    @property
    def own_memory(self) -> int | None:
        """See Device."""
        return self.native.total_memory

    @property
    def thread_memory(self) -> int:
        """See Device."""
        return self.native.thread_memory

    @property
    def capabilities(self) -> Capabilities:
        """See Device."""
        return CAPABILITIES

    @cached_property
    def native(self) -> CudaDevice:
        """See Device."""
        if self._is_architecture:
            raise ModelError(f"{self.name} is an architecture; give a GPU's number to run a model, as cuda:0")
        self._compiler  # noqa: B018 - before threads start, and the GPU is opened
        threads = start_threads(self._threads, pin=self._pin_threads)
        try:
            return CudaDevice(int(self._name), threads, str(self._cache), logger.warning)
        except RuntimeError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> ModelError:
        return ModelError(f"device {self.name} can't be used: {error}; give the device cpu")

    @cached_property
    def _compiler(self) -> PtxCompiler:
        if not self._is_architecture:
            try:
                return self._compiler_for(CudaDevice.architecture_of(int(self._name)))
            except (RuntimeError, ValueError) as error:
                raise self._unusable(error) from None
        known = f"give one such as {', '.join(ARCHITECTURES)}"
        if 0 < _number_of(self._name) < _LEAST_ARCHITECTURE:
            raise ModelError(f"device is '{self.name}', which lacks cp.async; kernels need sm_80 or later; {known}")
        try:
            return PtxCompiler(self._name, str(self._cache))
        except ValueError as error:
            raise ModelError(f"{error}; {known}") from None

    def _compiler_for(self, architecture: str) -> PtxCompiler:
        """Return a compiler for a GPU's architecture, or if LLVM does not know it for the newest one that it follows,
        whose PTX the driver takes."""
        try:
            return PtxCompiler(architecture, str(self._cache))
        except ValueError:
            older = [name for name in ARCHITECTURES if _number_of(name) < _number_of(architecture)]
            if not older:
                raise
            logger.warning("%s: LLVM does not know %s; kernels are compiled for %s", self.name, architecture, older[-1])
            return PtxCompiler(older[-1], str(self._cache))

    @property
    def compiled(self) -> int:
        """See Device."""
        return self._compiler.cache.compiled + (0 if self._is_architecture else self.native.cache.compiled)

    @property
    def rejected(self) -> list[str]:
        """See Device."""
        return self._compiler.cache.rejected + ([] if self._is_architecture else self.native.cache.rejected)

    def compile(self, kernels: Iterable[Kernel], context: EmitContext) -> Iterator[int]:
        """Yield the numbers of kernels, which several threads compile."""
        native, chosen = self.native, [gpu_kernel(kernel, context) for kernel in kernels]

        def load(kernel: GpuKernel) -> int:
            shape = kernel.shape
            ptx = self._compiler.compile(kernel.text)
            return native.load(ptx, ENTRY, shape.threads_per_item, shape.threads_per_block, shape.shared_bytes)

        pool = ThreadPoolExecutor(min(self._threads, _MOST_COMPILERS))
        try:
            loaded = {kernel: pool.submit(load, kernel) for kernel in dict.fromkeys(chosen)}
            for kernel in chosen:
                yield loaded[kernel].result()
        finally:
            pool.shutdown(cancel_futures=True)

    def ptx(self, kernel: Kernel, context: EmitContext) -> str:
        """Return the PTX of a kernel."""
        return self._compiler.compile(gpu_kernel(kernel, context).text)

    @staticmethod
    def shape(kernel: Kernel, context: EmitContext) -> LaunchShape:
        """Return how many threads compute the kernel."""
        return gpu_kernel(kernel, context).shape

    def available_memory(self) -> int:
        """See Device."""
        return self.native.free_memory


def _number_of(architecture: str) -> int:
    """Return the number of an architecture, as 90 of sm_90a; 0 if there is none."""
    found = re.match(r"sm_(\d+)", architecture)
    return 0 if found is None else int(found[1])


def local_bytes(ptx: str) -> int:
    """Return the bytes of local memory that each thread of PTX reserves, for what registers do not hold."""
    return sum(int(size) for size in re.findall(r"\.local \.align \d+ \.b8\s+\w+\[(\d+)\]", ptx))
