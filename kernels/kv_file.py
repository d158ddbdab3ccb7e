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

from quire.kernels import _native
from quire.kernels.errors import ModelError
from quire.kernels.operands import Matrix
from quire.kernels.plan import ModelPlan

_HEADER_BYTES = 4096


class _Header(msgspec.Struct):
    model: str
    num_pages: int


class KvFile:
    """KV memory in the file `fd`, which no other process may use; KV of another model in it is discarded.

    `num_pages` is the number of pages of which the file holds KV; None if it holds none. Raises ModelError if the file
    is unusable.
    """

    def __init__(self, fd: int, model: str) -> None:
        self.fd = fd
        self.model = model
        self.num_pages: int | None = None
        try:
            os.set_inheritable(fd, False)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it does
            self.num_pages = self._kept_pages()
        except BlockingIOError:
            raise ModelError(
                f"kv_memory_fd={fd} is used by another engine; end that one, or give a memfd of its own"
            ) from None
        except OSError as error:
            raise self._unfit(error) from None
        if self.num_pages is None:
            self._discard()

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that the file takes already."""
        return os.fstat(self.fd).st_blocks * 512

    def prepare(self, num_pages: int) -> None:
        """Discard the KV of a pool of another size."""
        if num_pages == self.num_pages:
            return
        self._discard()
        os.pwrite(self.fd, msgspec.json.encode(_Header(self.model, num_pages)) + b"\n", 0)
        self.num_pages = num_pages

    def _discard(self) -> None:
        try:
            os.truncate(self.fd, 0)
        except OSError as error:
            raise self._unfit(error) from None

    def _kept_pages(self) -> int | None:
        line = os.pread(self.fd, _HEADER_BYTES, 0).partition(b"\n")[0]
        try:
            header = msgspec.json.decode(line, type=_Header)
        except (ValueError, RecursionError):  # no JSON, no UTF-8, too deep, or no header
            return None
        return header.num_pages if header.model == self.model else None

    def _unfit(self, error: OSError) -> ModelError:
        return ModelError(
            f"kv_memory_fd={self.fd}: {error.strerror}; give a memfd that the engine inherits, or leave it out"
        )


def model_name(plan: ModelPlan, isa: str) -> str:
    """Return a hash of all that the bits of a plan's KV depend on besides tokens, and their place in memory."""
    checkpoint = plan.quantization.checkpoint
    matrices = [weight for weight in plan.weights if isinstance(weight, Matrix)]
    described = (checkpoint.config, plan.quantization.scheme, matrices, plan.dtypes, plan.limits, plan.heads, isa)
    digest = hashlib.blake2b(checkpoint.digest() + repr(described).encode() + _code(), digest_size=16)
    return digest.hexdigest()


def _code() -> bytes:
    """Return the identity of this package's code, which may be replaced while a supervisor holds the file."""
    folder = Path(__file__).parent
    files = [Path(_native.__file__), *folder.rglob("*.py")]
    found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)]
    return repr(found).encode()
