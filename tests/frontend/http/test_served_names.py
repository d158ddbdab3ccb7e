"""Several names of one model, as vLLM's command line gives them."""

from __future__ import annotations

from pathlib import Path

from http_server import Server


def test_each_name_is_served_and_answers_have_the_first(demo_model: Path) -> None:
    with Server.start(str(demo_model), "--served-model-name", "tales", "org/tales-2", "--num-pages", "64") as server:
        assert server.model == "tales"
        cards = server.request("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["tales", "org/tales-2"]
        for name in ("tales", "org/tales-2"):
            assert server.request(f"/v1/models/{name}").json()["id"] == name
            body = {"model": name, "prompt": "Once", "max_tokens": 2}
            assert server.request("/v1/completions", body).json()["model"] == "tales"
        for listed in server.request("/api/tags").json()["models"]:
            assert listed["name"].endswith(":latest")
            body = {"model": listed["name"], "prompt": "Once", "max_tokens": 2}
            assert server.request("/v1/completions", body).json()["model"] == "tales"
            assert server.request(f"/v1/models/{listed['name']}").status == 200
        for other in ("other", "tales:8b", "tales:latest:latest"):
            refused = server.request("/v1/completions", {"model": other, "prompt": "Once"})
            assert refused.status == 404
            assert "tales" in refused.error["message"]
