"""The GGUF files of a model at the hub, and the tags that choose one of them, as in `org/repo:Q4_K_M`.

A repository holds the same model in several types, each in one file or in parts `NAME-00001-of-00003.gguf`, maybe in a
folder. A tag is what a file's name says of its type, or any other whole part of the name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from quire.frontend.errors import HubError

SUFFIX = ".gguf"
DEFAULT_TAG = "Q4_K_M"

_NO_MODELS = ("mmproj", "imatrix")  # projectors of images, statistics of quantization
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_TYPE = re.compile(
    r"(?<![a-z0-9])(?:UD[-_])?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_[A-Z0-9]+)*|(?:BF|FP?)16|FP?32)(?![a-z0-9_])",
    re.IGNORECASE,
)
_TAGS_SHOWN = 24


class HubGguf(NamedTuple):
    """A model in GGUF: all of its files, the first part first, the tag, and the name without what numbers the parts."""

    files: tuple[str, ...]
    tag: str
    stem: str


def gguf_models(paths: Iterable[str]) -> list[HubGguf]:
    """Return the models among the files of a repository, in the order of their names."""
    found = {}
    for path in sorted(paths):
        name = path.removesuffix(SUFFIX)
        if name == path or any(word in PurePosixPath(path).name.lower() for word in _NO_MODELS):
            continue
        part = _PART.fullmatch(name)
        stem = part["stem"] if part else name
        files = [path]
        if part:
            files = [f"{stem}-{number:05}-of-{part['count']}{SUFFIX}" for number in range(1, int(part["count"]) + 1)]
        found[stem, len(files)] = HubGguf(tuple(files), tag_of(path), stem)
    return list(found.values())


def tag_of(path: str) -> str:
    """Return the tag of a file: its type as the name has it, or else the whole name."""
    whole = path.removesuffix(SUFFIX)
    part = _PART.fullmatch(whole)
    stem = PurePosixPath(part["stem"] if part else whole)
    for name in (stem.name, stem.parent.name):
        if types := _TYPE.findall(name):
            return str(types[-1])
    return stem.name


def choose_gguf(name: str, models: Sequence[HubGguf], tag: str | None) -> HubGguf:
    """Return the model that `tag` means in the repository `name`.

    Without a tag it is the one of type Q4_K_M, or else the first. Raises `HubError` that lists the tags there are.
    """
    matches = _matches(models, tag or DEFAULT_TAG)
    if not matches and tag is None and models:
        return models[0]
    if len(matches) == 1:
        return matches[0]
    tags = _distinct_tags(matches or models)
    shown = ", ".join(tags[:_TAGS_SHOWN]) + ", ..." * (len(tags) > _TAGS_SHOWN) or "no GGUF file"
    if matches:
        raise HubError(f"{name} has {len(matches)} GGUF models for the tag {tag or DEFAULT_TAG}; choose one of {shown}")
    raise HubError(f"{name} has no GGUF model for the tag {tag}; it has {shown}")


def _matches(models: Sequence[HubGguf], tag: str) -> list[HubGguf]:
    exact = [model for model in models if model.tag.lower() == tag.lower()]
    word = re.escape(tag.removesuffix(SUFFIX))
    whole = re.compile(rf"(?<![a-z0-9_]){word}(?![a-z0-9_])", re.IGNORECASE)
    return exact or [model for model in models if whole.search(model.stem)]


def _distinct_tags(models: Sequence[HubGguf]) -> list[str]:
    """Return the tags, or the whole name of files that share one."""
    count = Counter(model.tag.lower() for model in models)
    return [model.tag if count[model.tag.lower()] == 1 else PurePosixPath(model.stem).name for model in models]
