"""Adapters as models of a server: listed, named by requests of every API, loaded and unloaded while it runs."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_adapters import write_demo_adapter
from engine_watch import wait_until
from http_server import Reply, Server
from openai import NotFoundError, OpenAI
from parsed_metrics import ParsedMetrics
from patience import PATIENCE
from quire_command import quire_command

from quire.frontend import LLM
from quire.frontend.cli import lora
from quire.frontend.cli.running_server import ANSWER_SECONDS

PROMPT = "Once upon a time there was a fox"
FIXED = {"max_tokens": 16, "temperature": 0}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADMIN = {"X-Admin-Key": "admin"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("tales", "songs"), 1):
        write_demo_adapter(folder / name, number)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    modules = [
        f"tales={folder}/tales",
        f"same={folder}/tales",
        json.dumps({"name": "songs", "path": f"{folder}/songs"}),
    ]
    allowed = ("--allow-runtime-lora", "--allowed-lora-folders", str(folder.parent))
    with Server.start("--num-pages", "128", *allowed, "--lora-modules", *modules) as server:
        yield server


@pytest.fixture(scope="module")
def openai(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def text(server: Server, model: str | None, **fields: Any) -> str:
    body = {"prompt": PROMPT, **FIXED, **({} if model is None else {"model": model}), **fields}
    answer = server.request("/v1/completions", body).json()
    assert answer["model"] == (model or server.model)
    return str(answer["choices"][0]["text"])


def names(server: Server) -> list[str]:
    return [card["id"] for card in server.request("/v1/models").json()["data"]]


def wait_for_names(server: Server, expected: list[str]) -> None:
    wait_until(lambda: names(server)[1:] == expected, "the server has other adapters")


def load(server: Server, name: str, path: Path | str, **more: Any) -> Reply:
    return server.request(LOAD, {"lora_name": name, "lora_path": str(path), **more})


def command(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = quire_command("lora", *arguments, "--url", server.url)
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_they_are_listed_after_the_model(server: Server, folder: Path) -> None:
    base, *adapters = server.request("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == (server.model, None)
    assert [(each["id"], each["parent"], each["root"]) for each in adapters] == [
        ("tales", base["id"], f"{folder}/tales"),
        ("same", base["id"], f"{folder}/tales"),
        ("songs", base["id"], f"{folder}/songs"),
    ]
    assert {each["max_model_len"] for each in adapters} == {base["max_model_len"]}
    assert (base["requests"], {each["requests"] for each in adapters}) == (None, {0})
    assert server.request("/v1/models/tales").json() == adapters[0]
    assert "songs:latest" in [each["name"] for each in server.request("/api/tags").json()["models"]]


def test_an_adapter_answers_by_each_of_its_names(server: Server) -> None:
    own, tales, songs = text(server, None), text(server, "tales"), text(server, "songs")
    assert len({own, tales, songs}) == 3
    assert text(server, "same") == tales
    assert text(server, server.model) == own


def test_every_api_takes_them_as_models(server: Server) -> None:
    """Each answer differs from the base's, and names the adapter."""
    messages = [{"role": "user", "content": "Tell me a tale."}]

    def ask(path: str, body: dict[str, Any], model: str) -> Any:
        reply = server.request(path, {**body, "model": model})
        assert reply.status == 200, reply.body
        return reply.json()

    requests: list[tuple[str, dict[str, Any], Any]] = [
        ("/v1/chat/completions", {"messages": messages, **FIXED}, lambda answer: answer["choices"][0]["message"]),
        (
            "/v1/responses",
            {"input": "Tell me a tale.", "max_output_tokens": 16, "temperature": 0},
            lambda answer: answer["output"][0]["content"],
        ),
        ("/v1/embeddings", {"input": PROMPT}, lambda answer: answer["data"][0]["embedding"]),
        ("/v1/messages", {"messages": messages, **FIXED}, lambda answer: answer["content"]),
        (
            "/api/generate",
            {"prompt": PROMPT, "stream": False, "options": {"num_predict": 16, "temperature": 0}},
            lambda answer: answer["response"],
        ),
        (
            "/api/chat",
            {"messages": messages, "stream": False, "options": {"num_predict": 16, "temperature": 0}},
            lambda answer: answer["message"],
        ),
    ]
    for path, body, part in requests:
        own, adapted = ask(path, body, server.model), ask(path, body, "tales")
        assert part(own) != part(adapted), path
        assert (own["model"], adapted["model"]) == (server.model, "tales"), path
        assert part(ask(path, body, "tales")) == part(adapted), path
    assert ask("/tokenize", {"prompt": PROMPT}, "tales") == ask("/tokenize", {"prompt": PROMPT}, server.model)


def test_a_stream_names_the_adapter(server: Server, openai: OpenAI) -> None:
    chunks = list(openai.completions.create(model="tales", prompt=PROMPT, max_tokens=16, temperature=0, stream=True))
    assert {chunk.model for chunk in chunks} == {"tales"}
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text(server, "tales")


def test_metrics_name_the_adapters_of_open_requests(server: Server, openai: OpenAI) -> None:
    def labels() -> dict[str, str]:
        page = ParsedMetrics(server.request("/metrics").body)
        [sample] = page.families["quire:lora_requests_info"].samples
        return {name: sample.labels[name] for name in ("max_lora", "running_lora_adapters", "waiting_lora_adapters")}

    idle = {"max_lora": "8", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert labels() == idle
    with openai.completions.create(
        model="songs", prompt=PROMPT, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert labels() == idle | {"running_lora_adapters": "songs"}
        assert server.request("/v1/models/songs").json()["requests"] == 1
    deadline = time.monotonic() + PATIENCE
    while labels() != idle:
        assert time.monotonic() < deadline


def test_an_unknown_name_is_status_404(server: Server, openai: OpenAI) -> None:
    with pytest.raises(NotFoundError, match=r"the model 'tale' does not exist; this server has .*tales, same, songs"):
        openai.completions.create(model="tale", prompt=PROMPT)
    assert server.request("/v1/models/tale").status == 404


def test_llama_cpp_names_them_by_number(server: Server, folder: Path) -> None:
    listed = server.request("/lora-adapters").json()
    assert listed == [
        {"id": 0, "path": f"{folder}/tales", "scale": 0},
        {"id": 1, "path": f"{folder}/tales", "scale": 0},
        {"id": 2, "path": f"{folder}/songs", "scale": 0},
    ]
    assert server.request("/lora-adapters", [{"id": 0, "scale": 0.5}]).status == 405

    def complete(**fields: Any) -> Reply:
        return server.request("/completion", {"prompt": PROMPT, "n_predict": 16, "temperature": 0, **fields})

    assert complete(lora=[{"id": 2, "scale": 1}, {"id": 0, "scale": 0}]).json()["content"] == text(server, "songs")
    assert complete(model="songs").json()["content"] == text(server, "songs")
    assert complete(lora=[]).json()["content"] == text(server, None)
    for given, message in (
        ([{"id": 0, "scale": 0.5}], "a scale other than 0 and 1"),
        ([{"id": 0, "scale": 1}, {"id": 2, "scale": 1}], "lora has several adapters"),
        ([{"id": 9, "scale": 1}], "lora[0].id=9 is not the id of an adapter"),
        ([{"id": 2, "scale": 1}, {"id": 9, "scale": 0}], "lora[1].id=9 is not the id of an adapter"),
        ([{"id": 0, "scale": 1}, {"id": 0, "scale": 0}], "lora has an id twice"),
    ):
        rejected = complete(lora=given)
        assert rejected.status == 400
        assert message in rejected.error["message"]
    for number, scale in ((2, 1), (0, 0)):
        rejected = complete(model="tales", lora=[{"id": number, "scale": scale}])
        assert (
            f"names the adapter 'tales', and lora[0] has id {number} with the scale {scale}"
            in rejected.error["message"]
        )
    agreed = complete(model="tales", lora=[{"id": 0, "scale": 1}, {"id": 2, "scale": 0}])
    assert agreed.json()["content"] == text(server, "tales")


def test_adapters_are_loaded_and_unloaded(server: Server, folder: Path) -> None:
    loaded = load(server, "late", folder / "songs")
    assert (loaded.status, loaded.body) == (200, b"Success: LoRA adapter 'late' added successfully.")
    assert text(server, "late") == text(server, "songs")
    again = load(server, "late", folder / "tales")
    assert again.status == 400
    assert "has already been loaded" in again.error["message"]
    assert load(server, "late", folder / "tales", load_inplace=True).status == 200
    assert text(server, "late") == text(server, "tales")
    for is_stacked in (True, False, None):  # of vLLM's: the file itself says it
        again = load(server, "late", folder / "tales", load_inplace=True, is_3d_lora_weight=is_stacked)
        assert again.status == 200, "the same path"
    removed = server.request(UNLOAD, {"lora_name": "late"})
    assert (removed.status, removed.body) == (200, b"Success: LoRA adapter 'late' removed successfully.")
    assert server.request(UNLOAD, {"lora_name": "late"}).status == 404
    assert server.request("/v1/completions", {"model": "late", "prompt": PROMPT}).status == 404
    assert [each["id"] for each in server.request("/lora-adapters").json()] == [0, 1, 2]


def test_changed_files_of_a_path_are_read_anew(server: Server, tmp_path: Path) -> None:
    """They have another answer, and share no pages with those of before, for which a stream goes on."""
    folder, prompt = tmp_path / "changing", PROMPT * 20

    def ask() -> tuple[str, int]:
        body = {"prompt": prompt, "model": "changing", **FIXED}
        answer = server.request("/v1/completions", body).json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    write_demo_adapter(folder, 1)
    assert load(server, "changing", folder).status == 200
    before, none = ask()
    assert none == 0
    again, cached = ask()
    assert (again, cached > 0) == (before, True)
    write_demo_adapter(folder, 2)
    other, none = ask()
    assert other != before
    assert none == 0
    write_demo_adapter(folder, 1)
    assert ask() == (before, cached), "the same contents as at first"
    assert server.request(UNLOAD, {"lora_name": "changing"}).status == 200


def test_commands_load_and_unload_them(server: Server, folder: Path) -> None:
    loaded = command(server, "load", f"late={folder}/songs")
    assert (loaded.returncode, loaded.stdout, loaded.stderr) == (
        0, "Success: LoRA adapter 'late' added successfully.\n", "",
    )  # fmt: skip
    assert command(server, "list").stdout.splitlines()[-1].split() == ["late", "0", f"{folder}/songs"]
    [card] = [each for each in json.loads(command(server, "list", "--json").stdout)["adapters"] if each["id"] == "late"]
    assert (card["root"], card["parent"]) == (f"{folder}/songs", server.model)
    again = command(server, "load", f"late={folder}/tales")
    assert (again.returncode, again.stdout, again.stderr.count("\n")) == (1, "", 1)
    assert "the lora adapter 'late' has already been loaded" in again.stderr
    assert command(server, "load", f"late={folder}/tales", "--load-inplace").returncode == 0
    assert command(server, "unload", "late").stdout == "Success: LoRA adapter 'late' removed successfully.\n"
    gone = command(server, "unload", "late")
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "the LoRA adapter 'late' cannot be found" in gone.stderr
    wrong = command(server, "load", "late")
    assert wrong.returncode == 2
    assert "'late' is no NAME=PATH" in wrong.stderr


def test_a_command_waits_for_the_download_of_an_adapter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds: list[float] = []

    def ask(*given: Any) -> str:
        seconds.append(given[-1])
        return "done"

    monkeypatch.setattr(lora, "ask", ask)
    flags = {"model": None, "load_inplace": False, "url": None, "admin_key_file": None, "debug": False}
    for adapter in ("a=/adapters/a", "a=org/a"):
        lora.load(adapter=adapter, **flags)
    assert seconds[0] == ANSWER_SECONDS < 3600 < seconds[1]
    assert capsys.readouterr().out == "done\n" * 2


def test_what_cannot_be_loaded_is_rejected(server: Server, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_demo_adapter(tmp_path / "large", 1, rank=128)
    for name, config in (
        ("long", '{"peft_type": "LORA"}' + " " * (1 << 21)), ("deep", '{"x": ' + "[" * 10_001), ("list", "[]"),
        ("merged", json.dumps({"peft_type": ["x"] * 100_000})),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(config)
    for name, path, status, message in (
        ("a", "songs", 400, "lora_path='songs' is not absolute"),
        ("a", tmp_path / "none", 404, "does not exist"),
        ("a", tmp_path / "empty", 400, "has no adapter_config.json"),
        ("a", tmp_path / ("a" * 300), 400, "cannot be looked at"),
        ("a", tmp_path / "large", 400, "has rank 128, and max_lora_rank is 64"),
        ("a", tmp_path / "long", 400, "has more than 2097152 bytes; it is not the config of an adapter"),
        ("a", tmp_path / "deep", 400, "cannot be read: maximum recursion depth exceeded"),
        ("a", tmp_path / "list", 400, "cannot be read: Expected `object`, got `array`"),
        ("a", tmp_path / "merged", 400, 'has peft_type \'["x", "x", '),
        ("a/../b", folder / "songs", 400, "is no name of an adapter"),
        (server.model, folder / "songs", 400, "is the name of a model"),
        ("", folder / "songs", 400, "lora_name"),
        ("a" * 257, folder / "songs", 400, "lora_name"),
    ):
        rejected = load(server, name, path)
        assert rejected.status == status, (path, rejected.body)
        assert message in rejected.error["message"]
    assert server.request(LOAD, {"lora_name": "a"}).error["message"] == "lora_path is missing; it is required"


def test_paths_outside_the_allowed_folders_are_rejected_alike(server: Server, folder: Path, tmp_path: Path) -> None:
    """Whether or not something is there, and however they lead out."""
    (tmp_path / "out").symlink_to("/")
    (tmp_path / "in").symlink_to(folder / "songs")
    for path in ("/", "/none", "/etc/passwd", "/etc/none", f"{tmp_path}/../../../..", f"{tmp_path}/out/none", "/\0"):
        rejected = load(server, "a", path)
        assert (rejected.status, rejected.error["code"]) == (403, "not_allowed"), path
        assert rejected.error["message"] == (
            f"lora_path={path!r} is in no folder from which adapters may be loaded; give another one, or the name of "
            "an adapter at the hub, or start the server with --allowed-lora-folders"
        )
    assert load(server, "a", tmp_path / "in").status == 200
    assert server.request("/v1/models/a").json()["root"] == f"{folder}/songs"
    assert server.request(UNLOAD, {"lora_name": "a"}).status == 200


def test_a_damaged_adapter_fails_its_requests_only(server: Server, tmp_path: Path) -> None:
    folder = write_demo_adapter(tmp_path / "damaged", 1)
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    assert load(server, "damaged", folder).status == 200
    failed = server.request("/v1/completions", {"model": "damaged", "prompt": PROMPT, **FIXED})
    assert failed.status == 400
    assert "can't be used" in failed.error["message"]
    assert text(server, "tales")
    assert server.request(UNLOAD, {"lora_name": "damaged"}).status == 200


def test_loading_is_for_administrators_if_there_are_any(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "admins").write_text("admin\n")
    (tmp_path / "users").write_text("user\n")
    keys = ("--admin-key-file", str(tmp_path / "admins"))
    flags = ("--enable-lora", "--allowed-lora-folders", str(folder), *keys, "--api-key-file", str(tmp_path / "users"))
    user = {"Authorization": "Bearer user"}
    with Server.start("--num-pages", "64", *flags) as server:
        body = {"lora_name": "tales", "lora_path": f"{folder}/tales"}
        assert server.request(LOAD, body, headers=user).status == 403
        assert server.request(LOAD, body | {"lora_path": "/etc"}, headers=ADMIN).error["code"] == "not_allowed"
        assert command(server, "load", f"tales={folder}/tales").returncode == 1
        assert command(server, "load", f"tales={folder}/tales", *keys).returncode == 0
        asked = {"model": "tales", "prompt": PROMPT, **FIXED}
        assert server.request("/v1/completions", asked, headers=user).status == 200
        assert server.request("/v1/completions", asked, headers=ADMIN).status == 401
        assert "tales" in command(server, "list", *keys).stdout
        assert server.request(UNLOAD, {"lora_name": "tales"}, headers=user).status == 403
        assert server.request(UNLOAD, {"lora_name": "tales"}, headers=ADMIN).status == 200


def test_a_server_loads_none_unless_it_is_told_so(folder: Path) -> None:
    """Not even in front of an engine that takes any, which another has started: only its administrators may."""
    with Server.start("--num-pages", "64", "--enable-lora") as server:
        rejected = load(server, "tales", folder / "tales")
        assert rejected.status == 403
        assert "--allow-runtime-lora" in rejected.error["message"]
        with LLM(engine_address=server.engine_address) as llm:
            for name in ("tales", "songs"):
                llm.reload(lora_modules=[f"{name}={folder}/{name}"])
                wait_for_names(server, [name])
                assert text(server, name) != text(server, None)
        assert server.request("/v1/completions", {"model": "tales", "prompt": PROMPT}).status == 404


@pytest.mark.parametrize(
    ("given", "flags", "message"),
    [
        (["quire-demo"], [], "'quire-demo' is the same as a name of the model, 'quire-demo'"),
        (["tales", "tales:latest"], ["--idle-timeout", "9"], "'tales:latest' is the same as another adapter, 'tales'"),
    ],
)
def test_names_that_clients_cannot_tell_apart_end_the_start(
    folder: Path, given: list[str], flags: list[str], message: str
) -> None:
    words = quire_command("serve", "--port", "0", "--num-pages", "64", *flags)
    modules = [word for name in given for word in ("--lora-modules", f"{name}={folder}/tales")]
    ended = subprocess.run([*words, *modules], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in " ".join(ended.stderr.replace("│", " ").split())


def test_a_second_server_has_the_names_of_the_engine(server: Server) -> None:
    with Server.start("--engine-address", server.engine_address) as second:
        assert names(second)[1:4] == ["tales", "same", "songs"]
        assert text(second, "songs") == text(server, "songs")
        assert load(second, "late", "/adapters").status == 403


def test_a_sleeping_model_is_loaded_for_its_adapter(folder: Path) -> None:
    flags = ("--idle-timeout", "0.01", "--lora-modules", f"tales={folder}/tales")
    with Server.start("--num-pages", "64", *flags) as server:

        def state() -> str:
            return str(server.request("/v1/models").json()["data"][0]["status"]["value"])

        assert [text(server, "tales") for _ in range(2)] == [text(server, "tales")] * 2
        assert text(server, None) != text(server, "tales")
        wait_until(lambda: state() == "sleeping", "the model does not sleep")  # before the server's end is checked
