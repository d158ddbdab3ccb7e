"""The choice of a device by a name that leaves it open."""

from __future__ import annotations

import logging

import pytest

from quire.kernels.devices import choice
from quire.kernels.host import MachineShare


def has_gpus(monkeypatch: pytest.MonkeyPatch, *names: str, problem: str = "") -> None:
    class Gpus:
        @staticmethod
        def names() -> list[str]:
            if problem:
                raise RuntimeError(problem)
            return list(names)

    monkeypatch.setattr(choice, "CudaDevice", Gpus)


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
