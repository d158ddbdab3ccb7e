"""The names of a model's adapters when its engine has others, after a reload."""

from __future__ import annotations

from quire.frontend.http.models.adapters import ServedAdapters
from quire.protocol.messages import AdapterInfo


def served(adapters: ServedAdapters) -> dict[str, tuple[int, str]]:
    return {each.lora_name: (each.lora_int_id, each.lora_path) for each in adapters}


def test_names_follow_the_engine() -> None:
    adapters = ServedAdapters()
    adapters.follow(AdapterInfo({"a": "/a", "b": "/b"}, takes_any=True))
    adapters.put("late", "/late")
    adapters.put("a", "/other")
    adapters.remove("b")
    before = served(adapters)
    adapters.follow(AdapterInfo({"a": "/a", "b": "/b"}, takes_any=True))
    assert served(adapters) == before == {"a": (1, "/other"), "late": (3, "/late")}
    adapters.follow(AdapterInfo({"b": "/b", "c": "/c"}, takes_any=True))
    assert served(adapters) == before | {"b": (4, "/b"), "c": (5, "/c")}
    adapters.follow(AdapterInfo({"c": "/new", "no,name": "/d"}))
    assert served(adapters) == {"c": (5, "/new")}
    adapters.follow(None)
    assert not adapters
