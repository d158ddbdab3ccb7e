"""The emulated GPU runs threads that wait for each other, and finds those that wait in vain."""

from __future__ import annotations

from pathlib import Path

import emulated_gpu
import numpy as np
import numpy.typing as npt
import pytest

from quire.kernels import _native

THREADS = 64

PTX = """
.version 7.8
.target sm_90
.address_size 64
.shared .align 16 .b8 exchanged[512];
.visible .entry entry(.param .u64 buffers, .param .u64 dims, .param .u64 items)
.maxntid 64
{
  .reg .pred %p<3>;
  .reg .b32 %r<9>;
  .reg .b64 %rd<9>;
  ld.param.b64 %rd1, [buffers];
  ld.b64 %rd1, [%rd1];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd1, %rd1, %rd2;
  ld.b32 %r2, [%rd1];
  mov.u64 %rd3, exchanged;
  BODY
  st.b32 [%rd1], %r2;
  ret;
}
"""

SHUFFLE = "shfl.sync.bfly.b32 %r3, %r2, 8, 4127, -1;\n"
STORE = "add.s64 %rd4, %rd3, %rd2;\n st.shared.b32 [%rd4], %r2;\n"
REVERSED = "sub.s64 %rd5, 252, %rd2;\n add.s64 %rd5, %rd3, %rd5;\n ld.shared.b32 %r2, [%rd5];\n"
EACH_BUT_5 = "and.b32 %r4, %r1, 31;\n setp.eq.u32 %p1, %r4, 5;\n @%p1 bra $L_1;\n"
COPY = """and.b64 %rd4, %rd1, -16; and.b64 %rd5, %rd2, -16; add.s64 %rd5, %rd3, %rd5;
  cp.async.cg.shared.global [%rd5], [%rd4], 16; cp.async.commit_group;
  cp.async.cg.shared.global [%rd5+256], [%rd4], 16; cp.async.commit_group;
  """
OF_5 = "shfl.sync.idx.b32 %r2, %r2, 5, 31, -33;\n"
ONLY_BELOW_7 = "setp.lt.u32 %p1, %r1, 7;\n @%p1 bra $L_1;\n"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulated_gpu.use(monkeypatch, tmp_path)


def run(body: str, blocks: int = 1, ptx: str = PTX, shared_bytes: int = 0) -> npt.NDArray[np.int32]:
    """Return what a kernel makes of 0, 1, ..."""
    device = _native.CudaDevice(0, _native.ThreadPool(1, False))
    kernel = device.load(ptx.replace("BODY", body), "entry", THREADS, THREADS, shared_bytes)
    values = device.upload(np.arange(THREADS, dtype=np.int32))
    plan = _native.Plan()
    plan.add(kernel, [values], "tokens")
    device.run(plan, {"tokens": blocks})
    result = np.empty(THREADS, np.int32)
    device.read(values, result.view(np.uint8))
    return result


def test_threads_exchange_values() -> None:
    assert run(SHUFFLE + "add.s32 %r2, %r2, %r3;\n").tolist() == [i + (i ^ 8) for i in range(THREADS)]


def test_lanes_of_half_a_warp_read_one_of_theirs() -> None:
    assert run("shfl.sync.idx.b32 %r2, %r2, 5, 4127, -1;\n").tolist() == [i // 16 * 16 + 5 for i in range(THREADS)]


def test_threads_of_a_block_share_memory() -> None:
    assert run(STORE + "bar.sync 0;\n" + REVERSED).tolist() == [*reversed(range(THREADS))]


@pytest.mark.parametrize(
    ("wait", "ended"), [("wait_all", [True, True]), ("wait_group 0", [True, True]), ("wait_group 1", [True, False])]
)
def test_copies_are_there_once_their_group_is_waited_for(wait: str, ended: list[bool]) -> None:
    waited = COPY + f"cp.async.{wait};\n bar.sync 0;\n add.s64 %rd4, %rd3, %rd2;\n"
    copied = [run(waited + f"ld.shared.b32 %r2, [%rd4+{at}];\n").tolist() for at in (0, 256)]
    assert [each == [*range(THREADS)] for each in copied] == ended


def test_a_missing_barrier_shows() -> None:
    assert run(STORE + REVERSED).tolist() != [*reversed(range(THREADS))]


def test_shared_memory_begins_undefined_in_every_block() -> None:
    assert set(run(REVERSED, blocks=2).view(np.uint32).tolist()) == {0xABABABAB}


def test_launches_give_the_shared_memory_that_was_asked_for() -> None:
    ptx = PTX.replace(".shared .align 16 .b8 exchanged[512];", ".extern .shared .align 4 .b8 exchanged[];")
    for shared_bytes in (256, 99 << 10):
        found = run(STORE + "bar.sync 0;\n" + REVERSED, 2, ptx, shared_bytes)
        assert found.tolist() == [*range(THREADS)]  # by the second block as before
    for text, shared_bytes in ((ptx, 100 << 10), (PTX, 256)):
        with pytest.raises(RuntimeError, match=rf"give a block of threads {shared_bytes} bytes of shared memory"):
            run(STORE, 1, text, shared_bytes)


def test_an_address_that_is_not_aligned_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="an address is not aligned"):
        run("bar.sync 0;\n ld.b32 %r2, [%rd1+2];\n")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (ONLY_BELOW_7 + SHUFFLE + "$L_1:\n", "not all threads that a shuffle names reach it"),
        (ONLY_BELOW_7 + "bar.warp.sync 255;\n$L_1:\n", "a thread is not among those that it meets"),
        (ONLY_BELOW_7 + "bar.sync 0;\n$L_1:\n", "not all threads of a block reach a barrier"),
        (ONLY_BELOW_7 + "bar.sync 0;\n bra $L_2;\n$L_1:\n bar.sync 0;\n$L_2:\n", "not all threads of a block"),
        (OF_5, "a thread is not among those that it meets"),
        (EACH_BUT_5 + OF_5 + "$L_1:\n", "a shuffle reads a thread that it does not name"),
    ],
)
def test_threads_that_wait_in_vain_are_an_error(body: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        run(body)
