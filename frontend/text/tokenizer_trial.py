"""The trial of a model's tokenizer, in a process of its own, before this process and the engine load it.

A tokenizer is a program of whoever made the checkpoint: three normalizers that replace each `a` by a thousand make one
character a gigabyte, at the load already, if an added token holds an `a`. The trial bounds how much the tokenizer can
lengthen a text, then loads and uses it, within limits that the kernel enforces. Files that have passed once are not
tried again.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from quire.frontend.bounded_trial import run_trial
from quire.frontend.text.tokenizer_files import TokenizerError
from quire.protocol.model_files import hash_of_all, hash_text_files

_VERSION = b"1"  # of what a trial looks at
CPU_SECONDS = 60
_WALL_SECONDS = 600.0  # on the busiest host
_LEAST_BYTES = 1 << 30
_BYTES_PER_BYTE = 64  # of the files; a vocabulary takes 20 to 30
REFUSED = 3  # exit status of a trial that writes its reason


def check_tokenizer(folder: str | os.PathLike[str]) -> None:
    """Have a bounded process load and use the tokenizer of a model's folder. Raises TokenizerError if it fails."""
    files = hash_text_files(os.fspath(folder))
    if "tokenizer.json" not in files and "vocab.json" not in files:
        return
    passed = _passed_folder() / hashlib.blake2b(_VERSION + hash_of_all(files).encode(), digest_size=16).hexdigest()
    if not passed.exists():
        _run_trial(Path(folder))
        _remember(passed)


def _passed_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "tokenizers"


def _remember(passed: Path) -> None:
    try:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
    except OSError:  # a home that can't be written: the next start tries it again
        return


def _run_trial(folder: Path) -> None:
    trial = run_trial("quire.frontend.text.trial_process", str(folder), seconds=_WALL_SECONDS)
    if trial.status == 0:
        return
    if trial.status == REFUSED:
        raise TokenizerError(trial.written.decode(errors="replace").strip())
    what = "it took too long" if trial.took_too_long else "it ended the process that tried it"
    raise TokenizerError(
        f"the tokenizer of {folder} is not loaded: {what}, which may take {CPU_SECONDS} s of CPU time and "
        f"{memory_limit(folder)} bytes of memory; restore the tokenizer files from the model's source"
    )


def memory_limit(folder: Path) -> int:
    """Return the bytes that a trial may take beyond those of Python itself."""
    sizes = [path.stat().st_size for path in folder.iterdir() if path.suffix in {".json", ".txt"} and path.is_file()]
    return _LEAST_BYTES + _BYTES_PER_BYTE * sum(sizes)
