"""KV memory that outlives the engine: a file, usually a memfd, whose descriptor a supervisor hands to every engine.

The file begins with a line that states whose KV it holds. A later engine takes the pages over only if it would compute
the same bits, so the line names all that they depend on besides tokens. Records of the pages and the pages themselves
follow: see native/kv_cache/kv_file.h and page_ledger.h.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

import msgspec
import numpy as np

from quire.kernels import _native
from quire.kernels._native import checksum
from quire.kernels.errors import ModelError
from quire.kernels.operands import Matrix
from quire.kernels.plan import ModelPlan

_HEADER_BYTES = 4096


class _Header(msgspec.Struct):
    model: str
    num_pages: int
    num_records: int = 0


class KvFile:
    """KV memory in the file `fd`, which one process at a time may use, from `prepare` on.

    `size` has the numbers of pages and of records of state of which the file holds KV of this model; None if it holds
    none. Raises ModelError if the file is unusable.
    """

    def __init__(self, fd: int, model: str) -> None:
        self.fd = fd
        self.model = model
        self.size: tuple[int, int] | None = None
        try:
            os.set_inheritable(fd, False)
            self.size = self._kept_size()
        except OSError as error:
            raise self._unfit(error) from None

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that the file takes already."""
        return os.fstat(self.fd).st_blocks * 512

    def prepare(self, num_pages: int, num_records: int = 0) -> None:
        """Take the file, and discard KV of another model or of a pool of another size.

        Raises ModelError if another process has it.
        """
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it does
            if self._kept_size() != (num_pages, num_records):
                os.truncate(self.fd, 0)
                os.pwrite(self.fd, msgspec.json.encode(_Header(self.model, num_pages, num_records)) + b"\n", 0)
        except BlockingIOError:
            raise ModelError(
                f"kv_memory_fd={self.fd} is used by another engine; end that one, or give a memfd of its own"
            ) from None
        except OSError as error:
            raise self._unfit(error) from None
        self.size = num_pages, num_records

    def _kept_size(self) -> tuple[int, int] | None:
        line = os.pread(self.fd, _HEADER_BYTES, 0).partition(b"\n")[0]
        try:
            header = msgspec.json.decode(line, type=_Header)
        except (ValueError, RecursionError):  # no JSON, no UTF-8, too deep, or no header
            return None
        return (header.num_pages, header.num_records) if header.model == self.model else None

    def _unfit(self, error: OSError) -> ModelError:
        return ModelError(
            f"kv_memory_fd={self.fd}: {error.strerror}; give a memfd that the engine inherits, or leave it out"
        )


def model_name(plan: ModelPlan, product: str) -> str:
    """Return a hash of all that the bits of a plan's KV depend on besides tokens, and their place in a page.

    It is quick, and takes files for the same that have not been touched, nothing else. `product`: see Device.
    """
    return _hash(plan.quantization.checkpoint.digest(), _described(plan, product), _code())


def kv_format(plan: ModelPlan, product: str) -> str:
    """Return a hash of all that the bits of a page of a plan's KV depend on besides tokens, as other hosts have it.

    It reads all weights and the package's code. `product`: see Device.
    """
    return _hash(plan.quantization.checkpoint.content_digest(), _described(plan, product), _code_content())


def _described(plan: ModelPlan, product: str) -> bytes:
    """Return what KV depends on in a plan.

    All devices and instruction sets compute the same bits of it, but for a GPU's tensor cores with `fast_matmul`.
    """
    device = product if plan.context.fast_matmul else None
    limits = plan.limits.max_model_len, plan.limits.block_size
    matrices = [weight for weight in plan.weights if isinstance(weight, Matrix)]
    dtypes = plan.dtypes.plain.weights, plan.dtypes.rounding, plan.dtypes.kv.weights
    described = (plan.config, plan.quantization.scheme, matrices, dtypes, limits, plan.kv_layers, plan.state_bytes)
    return repr((*described, device)).encode()


def _hash(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def _code() -> bytes:
    """Return the identity of this package's code, which may be replaced while a supervisor holds the file."""
    found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in _code_files()]
    return repr(found).encode()


def _code_content() -> bytes:
    """Return the contents of this package's code, hashed."""
    return repr([(path.name, checksum(np.fromfile(path, np.uint8))) for path in _code_files()]).encode()


def _code_files() -> list[Path]:
    return sorted([Path(_native.__file__), *Path(__file__).parent.rglob("*.py")])
