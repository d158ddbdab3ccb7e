"""`python -m quire.kernels.quantize OPTIONS`: save a float checkpoint with quantized weights, as compressed-tensors.

OPTIONS is a JSON object of `SaveRequest`. Lines of JSON on stdout tell the progress in bytes, as `{"task", "done",
"total"}`, and at last the result, `{"modules", "source_bytes", "bytes"}`.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec

from quire.kernels.errors import ModelError
from quire.kernels.models import build_graph
from quire.kernels.options import LoadOptions, choose_threads, config_of
from quire.kernels.saving.compressed_folder import SavedModule, check_target, modules_of, save
from quire.kernels.saving.feedback import Feedback
from quire.kernels.trial import TrialRun, mean_squares
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.gguf_checkpoint import GgufCheckpoint, open_checkpoint
from quire.kernels.weights.quantized import scheme_of

BITS = {"int8": 8, "int4": 4}
"""Bits of a weight by the names of the modes."""

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class SaveRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Request to save the checkpoint folder `model` in the folder `output`, quantized to `int8` or `int4`.

    `passages`: token ids of passages of a text to calibrate int4 with; none if there is no text.
    """

    model: str
    output: str
    quantization: str
    threads: int | None = None
    passages: list[list[int]] = []


def quantize(request: SaveRequest) -> dict[str, Any]:
    """Save a quantized checkpoint, and return its sizes. Raises ModelError and OSError."""
    target = Path(request.output).resolve()
    above = check_target(target)
    checkpoint = open_checkpoint(request.model)
    options = LoadOptions(request.model, threads=request.threads, quantization=request.quantization)
    _check_source(checkpoint, options)
    modules = modules_of(checkpoint, build_graph(config_of(options, checkpoint)), BITS[request.quantization])
    if not modules:
        raise ModelError(f"{checkpoint.folder} has no linear layers whose inputs are a multiple of 32")
    with ThreadPoolExecutor(choose_threads(options)) as pool, tempfile.TemporaryFile(dir=above) as spill:
        if request.quantization == "int4":
            _measure_inputs(modules, TrialRun(options, checkpoint, _say, request.passages), pool, spill)
        save(checkpoint, modules, target, pool, _say)
    return {
        "modules": len(modules),
        "source_bytes": sum(len(tensor.stored) for tensor in checkpoint.tensors.values()),
        "bytes": (target / "model.safetensors").stat().st_size,
    }


def _measure_inputs(
    modules: Mapping[str, SavedModule], trial: TrialRun, pool: ThreadPoolExecutor, spill: BinaryIO
) -> None:
    """Give the layers the importance of their inputs; if the trial is of a text, calibrate them by it.

    Experts have importance only, as their inputs are measured together, and so have layers whose inputs come from
    several places, are too many, or are too large to be squared.
    """
    for layer, inputs in trial.inputs():
        squares = mean_squares(inputs, layer.matrix)
        found = [(part, modules.get(trial.checkpoint.get(part.tensor, part.shape).name)) for part in layer.matrix.parts]
        wanted = [(part, module) for part, module in found if module is not None and module.calibrated is None]
        for part, module in wanted:
            module.importance[part.first_k] = squares
        whole = {module.name: module for part, module in wanted if part.k == part.whole_k}
        if whole and trial.passages and not layer.of_experts and (feedback := Feedback.of(inputs)) is not None:
            for module in whole.values():
                module.calibrate(feedback, pool, spill)


def _check_source(checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Raise ModelError unless the checkpoint is a folder of float weights."""
    if isinstance(checkpoint, GgufCheckpoint):
        raise ModelError(
            "a GGUF file can't be saved as compressed-tensors; give the folder of the model that it was made from, or "
            "serve the file as it is"
        )
    scheme = scheme_of(config_of(options, checkpoint))
    if scheme is not None or type(checkpoint) is not Checkpoint:
        method = "fp8" if scheme is None else scheme.method
        raise ModelError(f"{checkpoint.folder} is quantized by {method} already; give the model in bfloat16 or float32")


def _say(task: str, done: int, total: int) -> None:
    _write({"task": task, "done": done, "total": total})


def _write(line: dict[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def _end(*_: object) -> NoReturn:
    """End, and let no other signal disturb that."""
    for number in _ENDS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    """Save the checkpoint that the options name, or print the error. Nothing is left if a signal ends it."""
    for number in _ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        _write(quantize(msgspec.json.decode(arguments[0], type=SaveRequest)))
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
