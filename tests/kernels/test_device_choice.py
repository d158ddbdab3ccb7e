"""The choice of a device by a name that leaves it open."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from quire.kernels.devices import choice
from quire.kernels.host import MachineShare


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Let other tests find what this machine has."""
    yield
    choice.resolve_device.cache_clear()


def has_gpus(monkeypatch: pytest.MonkeyPatch, *names: str, problem: str = "", old: str = "") -> None:
    """Let this machine have GPUs of these names, of which one is too old."""

    class Gpus:
        @staticmethod
        def names() -> list[str]:
            if problem:
                raise RuntimeError(problem)
            return list(names)

        @staticmethod
        def architecture_of(ordinal: int) -> str:
            if names[ordinal] == old:
                raise RuntimeError(f"{old} is too old")
            return "sm_90"

    monkeypatch.setattr(choice, "CudaDevice", Gpus)
    choice.resolve_device.cache_clear()


@pytest.mark.parametrize(
    ("device", "share", "chosen"),
    [
        ("auto", None, "cuda:0"), ("cuda", None, "cuda:0"), ("cuda:1", None, "cuda:1"), ("cpu", None, "cpu"),
        ("auto", "1/3", "cuda:1"), ("cuda", "2/3", "cuda:0"), ("cuda:1", "0/3", "cuda:1"), ("cpu", "1/3", "cpu"),
    ],
)  # fmt: skip
def test_engines_of_a_machine_take_its_gpus_in_turn(
    device: str, share: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpus(monkeypatch, "one", "another")
    assert choice.resolve_device(device, MachineShare.parse(share)) == chosen


@pytest.mark.parametrize(("share", "chosen"), [(None, "cuda:1"), ("1/3", "cuda:2"), ("2/3", "cuda:1")])
def test_gpus_that_cannot_be_used_are_left_out(share: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, "one", "another", "third", old="one")
    for device in ("auto", "cuda"):
        assert choice.resolve_device(device, MachineShare.parse(share)) == chosen
    assert [choice.engines_on("auto", MachineShare(index, 3)) for index in range(3)] == [2, 1, 2]


def test_engines_know_how_many_compute_on_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, "one", "another")
    shares = [MachineShare(index, 5) for index in range(5)]
    assert [choice.engines_on("cuda", share) for share in shares] == [3, 2, 3, 2, 3]
    assert [choice.engines_on("cuda:1", share) for share in shares] == [5] * 5
    assert choice.engines_on("auto", MachineShare()) == choice.engines_on("cuda:0", MachineShare()) == 1


@pytest.mark.parametrize("problem", ["", "libcuda.so.1 can't be loaded"])
def test_without_a_gpu_auto_is_the_cpu_and_the_log_says_why(
    problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has_gpus(monkeypatch, problem=problem)
    with caplog.at_level(logging.INFO):
        assert choice.resolve_device("auto") == "cpu"
    assert caplog.messages == ["device auto is cpu: " + (problem or "this machine has no GPU of NVIDIA's")]
    assert choice.resolve_device("cuda") == "cuda:0"  # whose opening is the error
    assert choice.gpu_names() == []
