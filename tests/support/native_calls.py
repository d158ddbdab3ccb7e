"""A program that calls all native functions with good and bad arguments, in random order and on shared objects.

It prints each call to stderr. It must end with status 0: whatever the arguments are, there is a result or an exception.
"""

from __future__ import annotations

import ast
import faulthandler
import functools
import math
import os
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kernels import _native

STUB = Path(_native.__file__).with_name("_native.pyi")
EXEMPT = {
    *("Plan.add", "Device.run", "Device.profile", "adds_pairs_by_fma"),  # functions and buffers are bare addresses
    *("Jit.compile", "Jit.assembly"),  # LLVM takes long
    *("CudaDevice", "PtxCompiler"),  # see tests/kernels/test_emulated_gpu.py; there is no GPU, and LLVM takes long
    *("Vocabulary", "Matcher", "Constraint"),  # of llguidance, see tests/engine_core/grammar
    "KvPages",  # for tests alone; what it has in common with Runner is called there
}
"""Functions and classes that are not called."""
EXAMPLES = 200
CALLS = 60  # of an example
SPARE_BYTES = 2 << 30  # address space of the process beyond what it has at its start

# Integers around every bound there is, and small ones, which are often good.
INTEGERS = st.integers(-2, 12) | st.sampled_from(
    [
        sign * (1 << bits) + more
        for bits in (5, 16, 31, 32, 40, 48, 56, 62, 63, 64)
        for sign in (-1, 1)
        for more in (-1, 0)
    ]
)
FLOATS = st.sampled_from([-1.0, 0.0, 1e-3, 0.5, 1.0, 2.0, 1e300, -math.inf, math.inf, math.nan])
ARRAYS: dict[str, list[Any]] = {
    "float32, 1": [np.zeros(0, np.float32), np.arange(50, dtype=np.float32), np.full(9, np.nan, np.float32)],
    "uint8, 1": [np.zeros(size, np.uint8) for size in (0, 7, 1 << 16)],
    "uint8, 2": [np.full(shape, 255, np.uint8) for shape in ((0, 0), (3, 64), (64, 128))],
    "float32, 2": [np.ones(shape, np.float32) for shape in ((0, 0), (3, 1), (64, 1), (1, 64))],
    "int32, 1": [np.zeros(0, np.int32), np.arange(9, dtype=np.int32)],
    "int16, 2": [np.ones(shape, np.int16) for shape in ((0, 0), (3, 1), (64, 1))],
}
"""Arrays by dtype and number of dimensions."""
ANY_ARRAYS = [np.zeros(0), np.zeros((2, 3)), np.array(["text"]), np.zeros((4, 4))[:, ::2]]

RUNNER_SIZES: dict[str, Any] = {
    "num_pages": 8, "block_size": 32, "vocab_size": 50, "max_num_batched_tokens": 64,
    "max_logit_rows": 4, "logit_stride": 64, "hidden_size": 8, "tokens_per_entry": 4, "window": 5,
}  # fmt: skip
KV_LAYER: dict[str, Any] = {"heads": 1, "tile_bytes": 64, "value_offset": 32}

# What would take long, or have effects outside the process, otherwise.
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "threads": st.sampled_from([-1, 0, 1, 2, 1025, 1 << 40]),
    "launches": st.sampled_from([-(1 << 31), -1, 0, 3]),
    "descriptor": st.sampled_from([-1, 1 << 20, 1 << 31]),
    "seconds": FLOATS.map(lambda value: 1e-3 if 1e-3 < value <= 2.0 else value),
    "root": st.sampled_from(["", "/", "/nonexistent", "\0"]),
    "features": st.just(""),
    "cpu": st.sampled_from(["", "i386", "nonsense", "x86-64-v3"]),
    "dim": st.sampled_from(["tokens", "", "nonsense"]),
    "type": st.sampled_from(["Q8_0", "Q4_K", "MXFP4", "", "nonsense"]),
    "dtype": st.sampled_from(["bf16", "f16", "f32", "", "i8"]),
}


@functools.cache
def functions() -> list[tuple[str, list[ast.arg]]]:
    """Return the name and the parameters of what is called."""
    return [found for found in _all_functions() if not EXEMPT & {found[0], found[0].split(".")[0]}]


def _all_functions() -> Iterator[tuple[str, list[ast.arg]]]:
    """Yield the name and the parameters of all functions, constructors and methods."""
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node.args.args
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                is_property = isinstance(method, ast.FunctionDef) and method.decorator_list
                if isinstance(method, ast.FunctionDef) and (not is_property or "overload" in ast.dump(method)):
                    parameters = [*method.args.args[1:], *method.args.kwonlyargs]
                    if method.name == "__init__":
                        yield node.name, parameters
                    elif not method.name.startswith("_"):
                        yield f"{node.name}.{method.name}", parameters


def world() -> dict[str, list[Any]]:
    """Return objects of every class, in use, by the names of their classes."""
    pool, sequences = _native.PagePool(8), _native.Sequences(8, 4, 50)
    shapes = [_native.StateShape(record_bytes=size, num_records=3, snapshot_pages=1) for size in (0, 8)]
    with_state = _native.Sequences(8, 4, 50, shapes[1])
    tree = _native.RadixTree(pool, 4)
    root = tree.enter("salt")
    first, second = pool.allocate(2) or []
    tree.insert(root, [1, 2, 3, 4], first)
    tree.insert(first, [5, 6, 7, 8], second)
    tree.release(second)
    device = _native.CpuDevice(_native.ThreadPool(1))
    runner = _native.Runner(_native.RunnerConfig(**RUNNER_SIZES, kv_layers=[_native.KvLayerShape(**KV_LAYER)]), device)
    runner.open_kv()
    for opened in (sequences, with_state, runner.sequences):
        for salt in (None, "salt"):
            slot = opened.open(list(range(40)), 39, cache_salt=salt)
            opened.start(slot, 40 if opened is runner.sequences else 8)
    proposer, index = _native.TextProposer(sequences, _native.TextProposerConfig()), _native.TokenIndex(2, 16)
    for token in (1, 2, 3, 1, 2):
        index.append(token)
    form, address = _native.QuantizedFormat(8), device.allocate(1 << 16)
    return {
        "PagePool": [pool],
        "RadixTree": [tree],
        "PrefixWatch": [tree.watch(), runner.sequences.tree.watch_salts()],
        "Sequences": [sequences, with_state, runner.sequences],
        "StateShape": shapes,
        "StateStore": [with_state.states],
        "Device": [device],
        "MatrixBuffer": [device.matrix_buffer()],
        "CpuDevice": [device],
        "Runner": [runner],
        "SealedQueue": _native.KvPages(device, os.memfd_create("kv"), "", 8, 32, 64, 50).sealed_queues,
        "StepResult": [runner.step([0], [0], [40])],
        "RunnerConfig": [
            _native.RunnerConfig(**{**RUNNER_SIZES, field: value}, kv_layers=[_native.KvLayerShape(**KV_LAYER)])
            for field in RUNNER_SIZES
            for value in (-1, 0, 1, 1 << 30)
        ],
        "KvLayerShape": [
            _native.KvLayerShape(**{**KV_LAYER, field: value}) for field in KV_LAYER for value in (-1, 0, 1, 1 << 30)
        ],
        "SampleRequests": [_native.SampleRequests(50)],
        "SamplingConfig": [_native.SamplingConfig(temperature=0.0, logprobs=3, prompt_logprobs=2)],
        "PoolingConfig": [_native.PoolingConfig()],
        "PoolingHead": [_native.PoolingHead()],
        "TextProposer": [proposer],
        "TextProposerConfig": [_native.TextProposerConfig(shortest=1, longest=4, most_answers=2)],
        "TokenIndex": [index],
        "TokenMask": [_native.TokenMask(50), _native.TokenMask(1)],
        "TokenConstraint": [_native.TokenMask(50), _native.TokenMask(1)],
        "Place": [_native.Place(0, [0]), _native.Place(-1, [-1]), _native.Place(7, [1 << 30])],
        "ThreadPool": [_native.ThreadPool(1)],
        "Jit": [],
        "Plan": [runner.body],
        "QuantizedFormat": [form, _native.QuantizedFormat(4, 32, True)],
        "GgufMatrix": [_native.GgufMatrix(np.zeros(64 * 68, np.uint8), "Q8_0", 64, 64)],
        "Mxfp4Matrix": [_native.Mxfp4Matrix(np.zeros(64 * 32, np.uint8), np.zeros(64 * 2, np.uint8), 64, 64, 32, 2)],
        "MatrixView": [_native.MatrixView(np.ones(64 * 64 * 4, np.uint8), "f32", 64, 64, 64, 1)],
        "PackedWeights": [_native.PackedWeights(at, "f32", k) for at in (0, 8, address) for k in (1, 64, 1 << 40)],
        "QuantizedWeights": [_native.QuantizedWeights(at, form, k) for at in (0, 8, address) for k in (1, 64, 1 << 40)],
    }


def strategy(annotation: ast.expr, objects: dict[str, list[Any]]) -> st.SearchStrategy[Any]:
    """Return values of a type of the stub, good and bad ones."""
    simple: dict[str, st.SearchStrategy[Any]] = {
        "int": INTEGERS,
        "float": FLOATS,
        "bool": st.booleans(),
        "str": st.sampled_from(["", "salt", "mean", "\0", "é" * 1000]),
        "bytes": st.binary(max_size=9),
        "None": st.none(),
    }
    text = ast.unparse(annotation)
    if text in simple:
        return simple[text]
    if text in objects:
        return st.sampled_from(objects[text]) if objects[text] else st.nothing()
    if isinstance(annotation, ast.BinOp):
        return strategy(annotation.left, objects) | strategy(annotation.right, objects)
    if text.startswith("Sequence["):
        assert isinstance(annotation, ast.Subscript)
        items = strategy(annotation.slice, objects)
        return st.lists(items, max_size=5) | items.map(lambda item: [item] * 40)
    if text.startswith("Mapping["):
        return st.dictionaries(st.sampled_from(["tokens", "entries", "kv_splits", "reductions", "nonsense"]), INTEGERS)
    if text.startswith("tuple["):
        assert isinstance(annotation, ast.Subscript)
        assert isinstance(annotation.slice, ast.Tuple)
        return st.tuples(*(strategy(each, objects) for each in annotation.slice.elts))
    if text.startswith("Callable"):
        return st.just(lambda *_: 1 / 0)
    for key, arrays in ARRAYS.items():
        dtype, _, dimensions = key.partition(", ")
        if f"NDArray[numpy.{dtype}]" in text and text.count("None") == int(dimensions):
            return st.sampled_from(arrays)
    assert "NDArray[Any]" in text, text
    return st.sampled_from(ANY_ARRAYS)


def argument(parameter: ast.arg, objects: dict[str, list[Any]]) -> st.SearchStrategy[Any]:
    """Return values for a parameter."""
    if parameter.arg in BY_NAME:
        return BY_NAME[parameter.arg]
    assert parameter.annotation is not None
    return strategy(parameter.annotation, objects)


def callables(objects: dict[str, list[Any]]) -> dict[str, tuple[list[Callable[..., Any]], list[ast.arg]]]:
    """Return what to call by each name: a function, or a method of each object of its class."""
    found = {}
    for name, parameters in functions():
        owner, _, method = name.partition(".")
        targets = [getattr(each, method) for each in objects[owner]] if method else [getattr(_native, name)]
        found[name] = (targets, parameters)
    return found


@settings(
    max_examples=EXAMPLES, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(st.data())
def call_everything(data: st.DataObject) -> None:
    """Make random calls. What they raise does not matter."""
    objects = world()
    known = callables(objects)
    names = [name for name, (targets, _) in known.items() if targets]
    for _ in range(CALLS):
        name = data.draw(st.sampled_from(names))
        targets, parameters = known[name]
        function = data.draw(st.sampled_from(targets))
        values = {each.arg: data.draw(argument(each, objects)) for each in parameters}
        sys.stderr.write(f"{name} {values!r}\n"[:500])
        try:
            made = function(**values)
        except Exception as error:  # noqa: BLE001 - any will do
            made = error
        if type(made).__name__ in objects:
            objects[type(made).__name__].append(made)
            known = callables(objects)


if __name__ == "__main__":
    faulthandler.enable()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    call_everything()
