"""The arguments of `LLM` and `AsyncLLM`: none is ignored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from adapter_files import write_adapter

from quire.frontend import LLM
from quire.frontend.adapters import check_files
from quire.frontend.engine_args import DEMO_MODEL, EngineArgs, reload_arguments
from quire.protocol.options import command_line


def test_the_demo_model_is_the_default(demo_model: Path) -> None:
    assert EngineArgs.from_options(None, {}).model == DEMO_MODEL == str(demo_model)


def test_none_stands_for_the_default() -> None:
    args = EngineArgs.from_options(None, {"enable_prefix_caching": None, "max_num_seqs": None, "seed": None})
    assert (args.enable_prefix_caching, args.max_num_seqs, args.seed) == (True, 256, None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tensor_parallel_size": 2}, ValueError, r"tensor_parallel_size=2 is not supported.*it can only be 1"),
        ({"quantization": "fp8"}, ValueError, "quantization='fp8' is not possible; it must be one of int8, int4"),
        ({"weight_cache": True}, ValueError, "weight_cache=True is not possible; it must be the path of a folder"),
        ({"weight_cache": ""}, ValueError, "weight_cache='' is not possible"),
        ({"kv_cache_dtype": "fp8"}, ValueError, "kv_cache_dtype='fp8' is not possible; it must be one of auto, int8"),
        ({"enable_prefix_caching": "yes"}, ValueError, "enable_prefix_caching='yes'"),
        ({"scheduling_policy": "random"}, ValueError, "it must be one of fcfs, priority, lpm, sjf"),
        ({"long_prefill_token_threshold": -1}, ValueError, "long_prefill_token_threshold=-1"),
        ({"lora_modules": "a"}, ValueError, "lora_modules='a' is no NAME=FOLDER"),
        ({"lora_modules": ["a=/b/c"]}, ValueError, "the adapter /b/c does not exist; give the folder"),
        ({"lora_modules": [{"name": "a"}]}, ValueError, "missing required field `path`"),
        ({"lora_modules": ["../a=/b"]}, ValueError, "'../a' is no name of an adapter"),
        ({"max_lora_rank": 0}, ValueError, "max_lora_rank=0 is out of range"),
        ({"allow_runtime_lora": True}, ValueError, "allow_runtime_lora is given without enable_lora"),
        ({"max_num_seq": 3}, TypeError, "did you mean max_num_seqs"),
        ({"kv_dtype": "int8"}, TypeError, "did you mean .*kv_cache_dtype"),
        ({"tool_call_parser": "xml"}, ValueError, "it must be one of none, hermes"),
        ({"wibble": 3}, TypeError, "wibble is not an argument"),
        (
            {"dtype": "float8"},
            ValueError,
            "dtype='float8' is not possible; it must be one of auto, bfloat16, float32",
        ),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs=0"),
        ({"max_model_len": 2.5}, ValueError, r"max_model_len=2\.5"),
        ({"block_size": 33}, ValueError, "block_size=33"),
        ({"block_size": 32.0}, ValueError, r"block_size=32\.0"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"num_pages": 3, "kv_cache_memory_bytes": "1GiB"}, ValueError, "give one of them"),
        ({"engine_address": "ipc:///x", "threads": 2}, ValueError, "threads cannot be set"),
        ({"start_timeout": 0}, ValueError, "start_timeout=0"),
        ({"start_timeout": "x"}, ValueError, "start_timeout='x' is out of range; it must be a number above 0"),
        ({"start_timeout": math.inf}, ValueError, "start_timeout=inf"),
        ({"start_timeout": math.nan}, ValueError, "start_timeout=nan"),
        ({"pin_threads": "yes"}, ValueError, "pin_threads='yes' is not possible; it must be True or False"),
        ({"threads": 5000}, ValueError, "threads=5000 is out of range; it must be a whole number from 1 to 1024"),
        ({"max_num_batched_tokens": 10**20}, ValueError, "it must be a whole number from 1 to 1048576"),
        ({"max_num_seqs": 65537}, ValueError, "it must be a whole number from 1 to 65536"),
        ({"max_model_len": 2**31}, ValueError, "it must be a whole number from 1 to 2147483647"),
        ({"num_pages": 2**31}, ValueError, "it must be a whole number from 1 to 2147483647"),
        ({"kv_cache_memory_bytes": "1x"}, ValueError, "^kv_cache_memory_bytes='1x' is not possible; .* such as '4GiB'"),
        ({"kv_cache_memory_bytes": "9" * 400}, ValueError, "^kv_cache_memory_bytes='999"),
        ({"kv_cache_memory_bytes": 0}, ValueError, "kv_cache_memory_bytes=0"),
        ({"kv_cache_memory_bytes": 1.5}, ValueError, r"kv_cache_memory_bytes=1\.5"),
    ],
)
def test_a_bad_argument_is_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(**options)


def test_a_model_that_is_no_folder_and_no_name_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"model='\./tales' is not a folder, nor a name at the Hugging Face hub"):
        LLM("./tales")


def test_the_command_line_has_what_was_given(demo_model: Path) -> None:
    options = {"max_model_len": 128, "kv_cache_memory_bytes": "4GiB", "threads": 2, "seed": 0}
    line = command_line(EngineArgs.from_options(str(demo_model), options).settings())
    pairs = dict(word.split("=") for word in line)
    assert pairs["--model"] == str(demo_model)
    assert (pairs["--max-model-len"], pairs["--kv-cache-memory-bytes"], pairs["--seed"]) == ("128", "4GiB", "0")
    assert "--num-pages" not in pairs
    switches = {"pin_threads": True, "enable_prefix_caching": False, "preload_grammars": False}
    line = command_line(EngineArgs.from_options(str(demo_model), switches).settings())
    assert line == [f"--model={demo_model}", "--pin-threads", "--no-enable-prefix-caching"]


def test_adapters_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine may have another working directory. Names may come in each of vLLM's forms."""
    folder = str(write_adapter(tmp_path / "adapter"))
    monkeypatch.chdir(tmp_path)
    expected = (f"a={folder}",)
    for given in ("a=adapter", ["a=adapter"], [{"name": "a", "path": "adapter"}], ['{"name": "a", "path": "adapter"}']):
        assert EngineArgs.from_options(None, {"lora_modules": given}).lora_modules == expected
    assert reload_arguments({"lora_modules": "a=adapter"}, drain=False, drain_timeout=1).settings == {
        "lora_modules": list(expected)
    }


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ("a", {"max_lora_rank": 1}, "has rank 2, and max_lora_rank is 1; start the engine with 2"),
        ("a", {"enable_lora": False}, "enable_lora=False turns them off; give one of the two"),
        ("aba", {}, "lora_modules has the name 'a' twice; give each adapter one of its own"),
    ],
)
def test_adapters_that_the_engine_could_not_serve_are_rejected_at_once(
    names: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter")
    with pytest.raises(ValueError, match=message):
        LLM(lora_modules=tuple(f"{name}={folder}" for name in names), **options)


def test_an_engine_of_ones_own_takes_any_adapter() -> None:
    assert EngineArgs.from_options(None, {"enable_lora": True}).allow_runtime_lora
    assert not EngineArgs.from_options(None, {"enable_lora": True, "allow_runtime_lora": False}).allow_runtime_lora
    assert not EngineArgs.from_options(None, {}).allow_runtime_lora


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "cannot be read: Expected `object`"),
        ("{}", "has peft_type None"),
        ("{", "cannot be read: Input data was"),
    ],
)
def test_what_is_no_adapter_is_rejected_at_once(tmp_path: Path, config: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        EngineArgs.from_options(None, {"lora_modules": f"a={tmp_path}"})
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        EngineArgs.from_options(None, {"lora_modules": f"a={tmp_path}"})


def test_only_the_type_and_the_rank_of_an_adapter_are_decoded(tmp_path: Path) -> None:
    """Numbers of a hostile config would hold the GIL for seconds."""
    config = tmp_path / "adapter_config.json"
    config.write_text('{"peft_type": "LORA", "r": 8, "x": 1e999}')
    check_files(str(tmp_path), 8)
    config.write_text('{"peft_type": "LORA", "r": ' + "9" * 1000 + "}")
    check_files(str(tmp_path), 8)
    config.write_text('{"peft_type": "LORA", "r": 1e999}')
    with pytest.raises(ValueError, match=r"cannot be read: .*out of range"):
        check_files(str(tmp_path), 8)
