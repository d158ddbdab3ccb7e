"""Engines that serve the same requests take the same adapters, or one that joins the others is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from fake_engine import FakeEngine, ready
from patience import PATIENCE

from quire.frontend.client.engine_set import EngineSet
from quire.frontend.client.missing_adapters import missing_adapters
from quire.frontend.client.remote_prefill import check_fetch
from quire.frontend.client.routing import Routing
from quire.frontend.errors import EngineConnectionError
from quire.protocol.messages import AdapterInfo, Hello
from quire.protocol.routing.routers import LeastLoaded

TALES = AdapterInfo({"tales": "/tales"})
BOTH = AdapterInfo({"stories": "/tales", "poems": "/poems"})
ANY = AdapterInfo({"tales": "/tales"}, takes_any=True)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (None, None, None),
        (TALES, None, None),
        (None, TALES, "takes no LoRA adapters"),
        (TALES, TALES, None),
        (BOTH, TALES, None),  # whatever its name
        (TALES, BOTH, "does not take the adapter poems in /poems"),
        (ANY, BOTH, None),
        (BOTH, ANY, "takes no adapters but its lora_modules"),
    ],
)
def test_an_engine_must_take_what_another_takes(
    own: AdapterInfo | None, other: AdapterInfo | None, expected: str | None
) -> None:
    assert missing_adapters(own, other) == expected


def test_an_engine_without_the_adapters_of_a_set_cannot_join_it() -> None:
    engines = EngineSet(lambda _delivery: None, Routing(LeastLoaded()))
    with FakeEngine() as first, FakeEngine() as second, ThreadPoolExecutor(1) as pool:
        for engine, adapters in ((first, TALES), (second, None)):
            joining = pool.submit(engines.join, engine.address, reconnect_timeout=0.0, timeout=PATIENCE)
            engine.receive(Hello)
            engine.send(msgspec.structs.replace(ready(), adapters=adapters))
            error = joining.exception(PATIENCE)
        engines.close()
    assert isinstance(error, EngineConnectionError)
    assert f"the engine at {second.address} takes no LoRA adapters, unlike the one at {first.address}" in str(error)


def test_a_prefill_engine_takes_the_adapters_of_the_engine_that_answers() -> None:
    own, other = (msgspec.structs.replace(ready(), adapters=adapters) for adapters in (TALES, None))
    check_fetch(other, own, "ipc:///prefill")
    with pytest.raises(EngineConnectionError, match="prefill_address=ipc:///prefill takes no LoRA adapters, unlike"):
        check_fetch(own, other, "ipc:///prefill")
