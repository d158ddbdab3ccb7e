"""Coverage-guided fuzzing of what reads hostile input: `.venv/bin/python scripts/robustness.py fuzz codec`.

Needs atheris (`pip install '.[fuzz]'`). Ends with status 1 or more at the first input for which a target raises what it
may not raise, gives a wrong result, or takes too long or too much memory. The traceback says where, and the input is
kept in `build/fuzz/TARGET/`, to be run again with `--replay FILE`. The corpus in `build/fuzz/TARGET/corpus/` grows from
run to run; it begins with inputs that the target makes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

if TYPE_CHECKING:
    from fuzzing.target import Target

RSS_MIB = 2048
FROM_STRUCTURE = 0.7  # of the mutations; the others are of bytes


def atheris_module() -> ModuleType:
    """Return atheris, or end the process with advice."""
    try:
        return importlib.import_module("atheris")
    except ImportError:
        sys.exit("fuzzing needs atheris; install it with: .venv/bin/python -m pip install '.[fuzz]'")


@contextlib.contextmanager
def target_of(name: str) -> Iterator[Target]:
    """Yield the target, whose files are in memory where possible."""
    from fuzzing.targets import TARGETS

    memory = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
    with tempfile.TemporaryDirectory(prefix="fuzzing-", dir=memory if memory.is_dir() else None) as folder:
        yield TARGETS[name].make(Path(folder))


def replay(name: str, files: list[Path]) -> None:
    """Run the target on inputs from files, without atheris."""
    with target_of(name) as target:
        for file in files:
            print(file)
            target.test(file.read_bytes())
    print(f"{len(files)} inputs passed")


def fuzz(name: str, seconds: int, folder: Path) -> None:
    """Run the target on mutated inputs for that long. Does not return: libFuzzer ends the process."""
    atheris = atheris_module()
    from fuzzing.targets import TARGETS

    atheris.instrument_all()  # the loader of an editable install keeps imports from being instrumented
    setup, folder = TARGETS[name], folder / name
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    with target_of(name) as target:
        for seed in target.seeds():
            target.test(seed)
            (corpus / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
        words = folder / "words"
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in target.words))

        def mutate(data: bytes, max_size: int, seed: int) -> bytes:
            chance = random.Random(seed)
            if chance.random() < FROM_STRUCTURE:
                with contextlib.suppress(ValueError, RecursionError):  # it is not well-formed
                    return target.mutate(data, chance)[:max_size]
            mutated: bytes = atheris.Mutate(data, max_size)
            return mutated

        def test(data: bytes) -> None:
            try:
                target.test(data)
            except Exception:
                raise
            except BaseException as error:  # a panic of a library in Rust, which atheris takes for an exit
                raise RuntimeError("not an Exception") from error

        arguments = [
            sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-timeout={setup.max_seconds}",
            f"-max_len={setup.max_bytes}", f"-rss_limit_mb={RSS_MIB}", f"-dict={words}", f"-artifact_prefix={folder}/",
            "-print_final_stats=1", "-len_control=0",
        ]  # fmt: skip
        atheris.Setup(arguments, test, custom_mutator=mutate)
        atheris.Fuzz()


def _escaped(word: str) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in word.encode())


def main() -> None:
    """Parse the command line, and fuzz or replay."""
    names = ("codec", "traces", "safetensors", "gguf", "configs", "pages", "grammars")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=names, help="code under test, a module of robustness/fuzzing/ each")
    parser.add_argument("--seconds", type=int, default=1200, help="time to fuzz, 1200 by default")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz", help="of corpora and failing inputs")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="run these inputs and nothing else")
    arguments = parser.parse_args()
    if arguments.replay:
        replay(arguments.target, arguments.replay)
    else:
        fuzz(arguments.target, arguments.seconds, arguments.folder)
