"""Scenes: loads that show the cost of a step and of a rest. Most vary one term of the step time, mixes vary all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from quire.protocol.engine_shape import EngineShape

_SHORT = 8  # tokens of a prompt at no cost
_ANSWER = 40  # tokens, and so steps of a decoding batch
_MOST_TOKENS = 20_000  # of the prompts of a scene
_MIX_PART = 6  # the mean prompt of a mix has this part of the context, answers a quarter of the prompt
_MIXES = (2, 8, 32, 128)
_BATCHED = (32, 128, 512)  # tokens of each prompt
_RESTS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08)  # seconds


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Lengths of one request in tokens."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Scene:
    """Requests of which `concurrency` are served at a time.

    `rest` is the pause in seconds before each request, in scenes that differ in this alone.
    """

    name: str
    requests: list[RequestSize]
    concurrency: int
    rest: float | None = None


def families(shape: EngineShape) -> list[list[Scene]]:
    """Return families of scenes, each cheap ones first. Mixes repeat, since they are what engines usually serve."""
    longest = shape.max_model_len - _ANSWER - 1
    mixes = _mixes(shape)
    prompts = _prompts(shape, longest)
    return [_decodes(shape), mixes, _rests(), prompts, _batches(shape), mixes, _contexts(shape, longest), mixes]


def _decodes(shape: EngineShape) -> list[Scene]:
    """Return scenes with more and more decoding sequences."""
    sizes = _powers(1, min(shape.max_num_seqs, shape.num_pages // 2))
    return [Scene(f"{size} decode", [RequestSize(_SHORT, _ANSWER)] * size, size) for size in sizes]


def _rests() -> list[Scene]:
    """Return scenes of short prompts after pauses."""
    request = RequestSize(_SHORT, 1)
    return [Scene(f"one after {rest * 1e3:.0f} ms", [request] * 6, 1, rest) for rest in _RESTS]


def _contexts(shape: EngineShape, longest: int) -> list[Scene]:
    """Return scenes of decoding sequences with long contexts."""
    room = min(max(_MOST_TOKENS, longest), shape.num_pages * shape.block_size // 2)
    scenes = []
    for part in (4, 2, 1):
        tokens = max(longest // part, 1)
        sizes = _powers(1, min(shape.max_num_seqs, room // (tokens + _ANSWER)))
        scenes += [
            Scene(f"{size} with {tokens} tokens", [RequestSize(tokens, _ANSWER)] * size, size) for size in sizes[::2]
        ]
    return sorted(scenes, key=lambda scene: len(scene.requests) * scene.requests[0].prompt_tokens)


def _prompts(shape: EngineShape, longest: int) -> list[Scene]:
    """Return scenes of longer and longer prompts, one at a time."""
    lengths = _powers(16, min(longest, 4 * shape.max_num_batched_tokens))
    return [Scene(f"prompts of {length} tokens", [RequestSize(length, 1)] * 3, 1) for length in lengths]


def _batches(shape: EngineShape) -> list[Scene]:
    """Return scenes of concurrent prompts, up to as many as fit into a step."""
    most = min(shape.max_num_batched_tokens, shape.num_pages * shape.block_size // 2, _MOST_TOKENS)
    batches = [
        (size, length)
        for length in _BATCHED
        if length < shape.max_model_len
        for size in _powers(1, min(most // length, shape.max_num_seqs))[1:]
    ]
    return [
        Scene(f"{size} prompts of {length} tokens", [RequestSize(length, 1)] * size, size)
        for size, length in sorted(batches, key=lambda batch: batch[0] * batch[1])
    ]


def _mixes(shape: EngineShape) -> list[Scene]:
    """Return scenes with requests of all lengths."""
    random_ = random.Random(0)
    mean = max(shape.max_model_len // _MIX_PART, 1)

    def request() -> RequestSize:
        prompt = min(1 + int(random_.expovariate(1 / mean)), shape.max_model_len - 2)
        output = 1 + int(random_.expovariate(4 / mean))
        return RequestSize(prompt, min(output, shape.max_model_len - prompt))

    most = max(_MOST_TOKENS // mean, 1)
    sizes = [size for size in _MIXES if size <= min(shape.max_num_seqs, most)]
    return [Scene(f"a mix of {size}", [request() for _ in range(min(4 * size + 8, most))], size) for size in sizes]


def _powers(least: int, most: int) -> list[int]:
    return list(_doubled(least, max(most, least)))


def _doubled(value: int, most: int) -> Iterator[int]:
    while value < most:
        yield value
        value *= 2
    yield most
