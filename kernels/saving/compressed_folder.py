"""Saving of a float checkpoint as compressed-tensors, the format of llm-compressor that vLLM and transformers read too.

Linear layers get integers in groups of 32 inputs ("pack-quantized", see weights/quantized/compressed.py), the other
tensors stay as they are: embeddings, the head, norms, the routers of experts, other layers that no mode quantizes;
those of types that no weight has, such as masks, are left out. All layers have one format: transformers reads no other.
Tensors are read, quantized and written one after the other, so that a model of any size needs the memory of its
largest matrix. Calibration (feedback.py) comes before that, layer by layer, and leaves what is stored in a file.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from quire.kernels.emit.context import Capabilities, EmitContext
from quire.kernels.emit.experts import ExpertGemmKernel
from quire.kernels.emit.gemm import GemmKernel
from quire.kernels.emit.layout import Dtypes
from quire.kernels.errors import ModelError
from quire.kernels.graph.operations import Graph
from quire.kernels.lowering.model import lower
from quire.kernels.operands import Matrix, MatrixPart, PlanLimits
from quire.kernels.options import BLOCK_SIZES
from quire.kernels.saving.feedback import Feedback, fit_with_feedback
from quire.kernels.saving.fit import Fitted, Floats, bf16_bits, fit
from quire.kernels.saving.safetensors_file import FileTensor, write_safetensors
from quire.kernels.weights.checkpoint import Checkpoint
from quire.kernels.weights.quantization import ALL_LAYERS, Quantization
from quire.kernels.weights.quantized.scheme import words_for
from quire.kernels.weights.tensor import Tensor

GROUP = 32
_WEIGHT = ".weight"
_LANGUAGE = re.compile(r"(model\.)?language_model\.(model\.)?")  # prefix of a part
_CHUNK_WEIGHTS = 1 << 18  # that are quantized at once, so that they stay in the cache
_CALIBRATED_ROWS = 512  # most that are, enough for what is done for each input to be worth a call
_COPIED_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".md", ".py"}
_TEMPLATES, _MODULES = "additional_chat_templates", "modules.json"  # the latter of sentence-transformers
_LEFT_OUT = {"model.safetensors.index.json", "config.json", "README.md"}


@dataclass
class SavedModule:
    """A linear layer that is quantized: its stored tensor [n, k] and the bits of a weight.

    `importance` of its inputs, f32 of those from each number on that parts of it have; they count alike if it has none.
    `calibrated`: what is stored, if it has been computed already.
    """

    tensor: Tensor
    bits: int
    importance: dict[int, Floats] = field(default_factory=dict)
    calibrated: list[npt.NDArray[np.generic]] | None = None

    @property
    def name(self) -> str:
        """Name of the module in the checkpoint."""
        return self.tensor.name.removesuffix(_WEIGHT)

    @property
    def entries(self) -> list[FileTensor]:
        """The tensors that take the place of its weight."""
        (n, k), name, groups = self.tensor.shape, self.name, self.tensor.shape[1] // GROUP
        entries = [
            FileTensor(f"{name}.weight_packed", "I32", (n, words_for(k, self.bits))),
            FileTensor(f"{name}.weight_scale", "BF16", (n, groups)),
            FileTensor(f"{name}.weight_shape", "I64", (2,)),
        ]
        if self.bits < 8:
            entries.append(FileTensor(f"{name}.weight_zero_point", "I32", (words_for(n, self.bits), groups)))
        return entries

    def data(self, pool: ThreadPoolExecutor) -> list[npt.NDArray[np.generic]]:
        """Return the data of `entries`. Raises ModelError if a weight is no number."""
        if self.calibrated is not None:
            return self.calibrated
        counts = [self.importance[first] for first in sorted(self.importance)]
        k = self.tensor.shape[1]
        importance = np.concatenate(counts) if sum(map(len, counts)) == k else None
        rows = max(1, _CHUNK_WEIGHTS // k)
        return self._fit(pool, rows, lambda weights: fit(weights, importance, self.bits, GROUP))

    def calibrate(self, feedback: Feedback, pool: ThreadPoolExecutor, spill: BinaryIO) -> None:
        """Quantize it now, with the feedback of all of its inputs. What is stored waits in `spill`, not in memory."""
        n = self.tensor.shape[0]
        rows = -(-n // (2 * -(-n // (2 * _CALIBRATED_ROWS))))  # an even number of parts
        self.calibrated = []
        for array in self._fit(pool, rows, lambda weights: fit_with_feedback(weights, feedback, self.bits, GROUP)):
            offset = spill.seek(0, os.SEEK_END)
            spill.write(np.ascontiguousarray(array).data)
            spill.flush()
            self.calibrated.append(np.memmap(spill, array.dtype, "r", offset, array.shape))

    def _fit(
        self, pool: ThreadPoolExecutor, rows: int, fit_rows: Callable[[Floats], Fitted]
    ) -> list[npt.NDArray[np.generic]]:
        """Quantize so many rows at once on each thread, and return the data of `entries`."""
        n, k = self.tensor.shape

        def fit_some(first: int) -> Fitted:
            weights = self.tensor.rows(first, min(rows, n - first)).to_f32()
            if not np.isfinite(weights).all():
                raise ModelError(f"tensor {self.tensor.name} holds an infinity or a NaN; the checkpoint may be damaged")
            return fit_rows(weights)

        fitted = list(pool.map(fit_some, range(0, n, rows)))
        data: list[npt.NDArray[np.generic]] = [
            pack(np.concatenate([part.values for part in fitted]), self.bits),
            bf16_bits(np.concatenate([part.scales for part in fitted])),
            np.array([n, k], np.int64),
        ]
        if self.bits < 8:
            data.append(pack(np.concatenate([part.zeros for part in fitted]).T, self.bits).T)
        return data


def pack(values: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    """Pack values [n, k] along k to words, i32 [n, ceil(k * bits / 32)], the first one in the lowest bits."""
    per_word = 32 // bits
    padded: npt.NDArray[np.uint8] = np.pad(values, ((0, 0), (0, -values.shape[1] % per_word)))
    if bits == 4:
        padded = padded[:, 0::2] | padded[:, 1::2] * np.uint8(16)
    words: npt.NDArray[np.int32] = np.ascontiguousarray(padded).view("<i4")
    return words


def modules_of(checkpoint: Checkpoint, graph: Graph, bits: int) -> dict[str, SavedModule]:
    """Return the layers to quantize to `bits`, 4 or 8, by the names of their tensors.

    Raises ModelError if the checkpoint has them in a form that compressed-tensors has not.
    """
    modules = {}
    for part in _parts(checkpoint, graph):
        name, tensor = part.tensor, checkpoint.get(part.tensor, part.shape)
        if part.transposed or checkpoint.tensors.get(tensor.name) is not tensor or not name.endswith(_WEIGHT):
            raise ModelError(
                f"{checkpoint.folder}: {name} is transposed or stacked with others, and compressed-tensors holds "
                "linear layers only; serve the model with --quantization instead"
            )
        if tensor.shape[1] % GROUP == 0:
            modules[tensor.name] = SavedModule(tensor, bits)
    return modules


def _parts(checkpoint: Checkpoint, graph: Graph) -> Iterator[MatrixPart]:
    """Yield the parts of the linear layers' tensors that modes quantize, but for the head."""
    limits = PlanLimits(1, 1, min(BLOCK_SIZES))
    context = EmitContext(Capabilities("", "f32"), Dtypes("bf16", "bf16", "f32"))  # of no device: nothing is emitted
    plan = lower(graph, context, limits, Quantization(checkpoint, ALL_LAYERS))
    for launch in plan.launches:
        if isinstance(launch.kernel, GemmKernel | ExpertGemmKernel) and not launch.head:
            for matrix in (operand for operand in launch.operands if isinstance(operand, Matrix)):
                if matrix.quantized is not None:
                    yield from matrix.parts


def save(
    checkpoint: Checkpoint,
    modules: Mapping[str, SavedModule],
    target: Path,
    pool: ThreadPoolExecutor,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Write the folder `target`, with the files of the checkpoint that are no weights. Raises ModelError and OSError.

    The folder appears when it is whole. `progress(task, done, total)` counts bytes of the checkpoint.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _copy_rest(checkpoint.folder, draft)
        config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
        config["quantization_config"] = section_of(checkpoint, modules)
        (draft / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")
        entries = [entry for tensor in checkpoint.tensors.values() for entry in _entries(tensor, modules)]
        write_safetensors(draft / "model.safetensors", entries, _data(checkpoint, modules, pool, progress))
        draft.chmod(0o755)
        if target.is_dir():
            target.rmdir()  # it is empty
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def section_of(checkpoint: Checkpoint, modules: Mapping[str, SavedModule]) -> dict[str, Any]:
    """Return `quantization_config` of config.json."""
    bits = next(iter(modules.values())).bits
    weights = {
        "num_bits": bits, "type": "int", "symmetric": bits == 8, "strategy": "group", "group_size": GROUP,
        "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(_ignored(checkpoint, modules)),
        "kv_cache_scheme": None,
    }


def _ignored(checkpoint: Checkpoint, modules: Mapping[str, SavedModule]) -> set[str]:
    """Return the names or patterns of linear layers that are not quantized; tied ones have no tensor.

    In models of several parts others call the parts otherwise than the checkpoint does; patterns leave these names out.
    """
    kept = [name for name, tensor in checkpoint.tensors.items() if name not in modules and len(tensor.shape) == 2]
    names = {name.removesuffix(_WEIGHT) for name in kept if name.endswith(_WEIGHT)}
    if any(_LANGUAGE.match(name) for name in checkpoint.tensors):
        names = {f"re:.*{re.escape(_LANGUAGE.sub('', name))}$" for name in names}
    tied = {"re:.*decoder$"} if checkpoint.config.get("architectures", [""])[0].endswith("ForMaskedLM") else set()
    return names | tied | {"lm_head"}


def _entries(tensor: Tensor, modules: Mapping[str, SavedModule]) -> list[FileTensor]:
    if tensor.name in modules:
        return modules[tensor.name].entries
    return [FileTensor(tensor.name, tensor.dtype, tensor.shape)]


def _data(
    checkpoint: Checkpoint,
    modules: Mapping[str, SavedModule],
    pool: ThreadPoolExecutor,
    progress: Callable[[str, int, int], None] | None,
) -> Iterator[npt.NDArray[np.generic]]:
    """Yield the data of all tensors, in their order."""
    done, total = 0, sum(len(tensor.stored) for tensor in checkpoint.tensors.values())
    for tensor in checkpoint.tensors.values():
        yield from modules[tensor.name].data(pool) if tensor.name in modules else (tensor.data,)
        done += len(tensor.stored)
        if progress is not None:
            progress("quantizing weights", done, total)
        checkpoint.drop_pages()


def _copy_rest(source: Path, target: Path) -> None:
    """Copy the files of a checkpoint folder that its tokenizer, its templates and its pooling have."""
    for path in filter(Path.is_file, source.iterdir()):
        is_wanted = path.suffix in _COPIED_SUFFIXES and path.name not in _LEFT_OUT
        if is_wanted or path.name.startswith(("LICENSE", "NOTICE")):
            shutil.copyfile(path, target / path.name)
    modules = msgspec.json.decode((source / _MODULES).read_bytes()) if (source / _MODULES).exists() else []
    for name in (_TEMPLATES, *(module["path"] for module in modules if module.get("path"))):
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)


def check_target(target: Path) -> Path:
    """Return the nearest folder above `target` that exists. Raises ModelError if no folder can be made at `target`."""
    if target.is_dir() and any(target.iterdir()):
        raise ModelError(f"{target} is a folder with files already; name a new one, or remove it")
    if target.is_mount():
        raise ModelError(f"{target} is a mount point; name a folder in it")
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target} is a file; name a new folder")
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ModelError(f"{target} can't be written: {parent} is no folder that you may write to")
    return parent
