"""The server reads the configs of adapters as the engine does, and while it does so its streams go on."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.frontend import adapter_config
from quire.frontend.adapter_config import MAX_CONFIG_BYTES, read_adapter_config
from quire.frontend.adapters import check_files
from quire.kernels.adapters import json_config, peft_config
from quire.kernels.adapters.json_config import read_config
from quire.kernels.errors import ModelError


def server_reading(path: Path) -> object:
    """Return what the server reads, None for an error."""
    try:
        return read_adapter_config(path)
    except ValueError:
        return None


def engine_reading(path: Path) -> object:
    """Return what the engine reads, None for an error."""
    try:
        return read_config(path, peft_config._MOST_BYTES)
    except ModelError:
        return None


@given(st.text(alphabet='{}[]",:\\eE+-.0123456789 \nanturfls', max_size=20))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_configs_are_read_as_the_engine_reads_them(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"x": ' + text + "}")
    assert server_reading(path) == engine_reading(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"x": [' + "[]," * 9_997 + "1]}", '{"x": [' + "[]," * 9_998 + "[]]}", '{"x": ' + "[" * 3000 + "]" * 3000 + "}",
        json.dumps({str(number): 0 for number in range(50_000)}),
        json.dumps({str(number): 0 for number in range(50_001)}),
        "[]", "1", "", "\xff", '{"x": 1e999}', '{"x": NaN}',
        "{}" + " " * (MAX_CONFIG_BYTES - 2), "{}" + " " * (MAX_CONFIG_BYTES - 1),
    ],
)  # fmt: skip
def test_the_limits_are_those_of_the_engine(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    assert server_reading(path) == engine_reading(path)


def test_the_decoders_are_the_same() -> None:
    for name in ("_MOST_CONTAINERS", "_MOST_NAMES"):
        assert getattr(adapter_config, name) == getattr(json_config, name)
    assert MAX_CONFIG_BYTES == peft_config._MOST_BYTES


def test_other_threads_go_on_while_a_config_is_decoded(tmp_path: Path) -> None:
    """A decoder in C would let this thread count to 1 or 2."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "x": [' + "1e308," * 150_000 + "1]}")
    decoding = threading.Thread(target=check_files, args=(str(tmp_path),))
    decoding.start()
    count = 0
    while decoding.is_alive():
        time.sleep(0)
        count += 1
    assert count > 10


def test_one_config_is_decoded_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    reading = threading.Thread(target=read_adapter_config, args=(tmp_path / "config.json",))
    with adapter_config._decoding:
        reading.start()
        reading.join(0.05)
        assert reading.is_alive()
    reading.join(60)
    assert not reading.is_alive()


def test_a_config_over_the_limit_is_too_large_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}' + " " * MAX_CONFIG_BYTES)
    with pytest.raises(ValueError, match=r"adapter_config.json has more than 2097152 bytes; it is not the config of"):
        check_files(str(tmp_path))
