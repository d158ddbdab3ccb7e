"""Models by their names: from a small hub, from the cache, and what is said when neither has them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import huggingface_hub
import pytest
from demo_adapters import write_demo_adapter
from gguf_files import write_gguf
from http_server import Reply, Server
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from patience import PATIENCE
from quire_command import quire_command
from small_hub import COMMIT, SmallHub, files_of, small_hub

from quire.frontend import LLM, AsyncLLM, LoRARequest, SamplingParams
from quire.frontend.adapters import absolute_modules
from quire.frontend.engine_args import EngineArgs, reload_arguments
from quire.frontend.errors import HubError
from quire.frontend.hub import adapters
from quire.frontend.hub.adapters import resolve_adapter
from quire.frontend.hub.cache import all_models
from quire.frontend.hub.gguf_files import choose_gguf, gguf_models
from quire.frontend.hub.names import is_hub_name, name_of
from quire.frontend.hub.resolve import resolve_model
from quire.frontend.requested_adapters import RequestedAdapters

NEEDED = {
    "config.json": b'{"architectures": ["Qwen3ForCausalLM"]}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b'{"model_max_length": 99}',
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "modules.json": b"[]",
    "1_Pooling/config.json": b"{}",
    "2_Dense/model.safetensors": b"dense",
    "model-00001-of-00002.safetensors": b"first" * 1000,
    "model-00002-of-00002.safetensors": b"second" * 1000,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
}
NOT_NEEDED = {
    **dict.fromkeys(("README.md", ".gitattributes", "trainer_state.json", "tiny-Q4_K_M.gguf"), b"x"),
    **dict.fromkeys(("pytorch_model.bin", "consolidated.00.pth", "consolidated.safetensors"), b"x"),
    **dict.fromkeys(
        ("original/params.json", "original/tokenizer.model", "onnx/model.onnx", "2_Dense/pytorch_model.bin"), b"x"
    ),
}
SINGLE = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights" * 1000}
NOWHERE = "http://127.0.0.1:9"


class Place(NamedTuple):
    """A hub and a cache that this process uses."""

    hub: SmallHub
    cache: Path

    def snapshot(self, name: str) -> Path:
        return self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT

    def in_cache(self, name: str) -> set[str]:
        folder = self.snapshot(name)
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A hub with `org/sharded` and `org/single`, and an empty cache."""
    cache = tmp_path / "cache"
    with small_hub(org__sharded={**NEEDED, **NOT_NEEDED}, org__single=dict(SINGLE)) as hub:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        values = {
            "ENDPOINT": hub.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }
        for name, value in values.items():
            monkeypatch.setattr(constants, name, value)
        yield Place(hub, cache)


def failure(*arguments: Any) -> str:
    """Return the message with which a model cannot be had, which is one line."""
    with pytest.raises(HubError) as raised:
        resolve_model(*arguments)
    message = str(raised.value)
    assert message
    assert "\n" not in message
    return message


def test_the_needed_files_are_downloaded_once(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    assert resolve_model("org/sharded") == place.snapshot("org/sharded")
    assert place.in_cache("org/sharded") == set(NEEDED)
    assert {name: (place.snapshot("org/sharded") / name).read_bytes() for name in NEEDED} == NEEDED
    begin, end = capfd.readouterr().err.splitlines()
    assert begin == "quire: downloading org/sharded (11 files of commit 0123456), 11.1 kB"
    assert end.startswith("quire: downloaded org/sharded")
    assert resolve_model("org/sharded", "main") == resolve_model("org/sharded", COMMIT) == place.snapshot("org/sharded")
    assert set(place.hub.downloads.values()) == {1}
    assert capfd.readouterr().err == ""


def test_a_folder_takes_the_place_of_the_cache(place: Place, tmp_path: Path) -> None:
    args = EngineArgs.from_options("org/single", {"download_dir": str(tmp_path / "other")})
    assert Path(args.model).is_relative_to(tmp_path / "other")
    assert (Path(args.model) / "model.safetensors").is_file()
    assert not place.cache.exists()


def test_a_token_is_sent(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve_model("org/single")
    assert "Bearer hf_secret" in place.hub.tokens


@pytest.mark.parametrize("how", ["offline", "unreachable", "overloaded", "no hub"])
def test_without_the_hub_the_cache_is_used(
    place: Place, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    cached = resolve_model("org/single")
    capfd.readouterr()
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif how == "unreachable":
        monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    else:
        status = 503 if how == "overloaded" else 200  # with an answer that is no model
        place.hub.denials.update(dict.fromkeys(("org/single", "org/sharded"), (status, "")))
    assert resolve_model("org/single") == cached
    said = capfd.readouterr().err
    assert said.count("\n") == (how != "offline")
    message = failure("org/sharded")
    reasons = {
        "offline": "HF_HUB_OFFLINE is set",
        "unreachable": f"the hub at {NOWHERE} cannot be reached ([Errno 111] Connection refused)",
        "overloaded": f"the hub at {place.hub.address} answers with status 503",
        "no hub": f"{place.hub.address} does not answer as a hub does",
    }
    assert message.startswith(reasons[how])
    assert f"org/sharded is not in the cache {place.cache}, which has org/single" in message
    (cached / "model.safetensors").unlink()
    assert "model.safetensors of org/single is not in the cache" in failure("org/single")


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (
            404,
            "RepoNotFound",
            "org/single is not a folder here, and http.* has no model of this name, or a private one",
        ),
        (401, "RepoNotFound", "has no model of this name, or a private one"),
        (401, "GatedRepo", "org/single is open only to those who asked for it at http.*/org/single"),
        (403, "GatedRepo", "org/single is open only to those who asked for it"),
        (403, "", "the token in use may not read"),
        (418, "", "refuses to list org/single with status 418"),
    ],
)
def test_a_refusal_says_what_to_do(place: Place, status: int, code: str, words: str) -> None:
    place.hub.denials["org/single"] = (status, code)
    with pytest.raises(HubError, match=words):
        LLM("org/single")
    assert "HF_TOKEN" in failure("org/single") or status == 418


def test_an_unknown_name_or_revision_is_named(place: Place) -> None:
    assert "org/none is not a folder here" in failure("org/none")
    assert "org/single has no revision 'v9'" in failure("org/single", "v9")


def test_a_model_without_safetensors_is_rejected_before_a_download(place: Place) -> None:
    place.hub.models["org/single"] = {"tiny.bin": b"x", "README.md": b"x"}
    message = failure("org/single")
    assert "it lacks config.json and model.safetensors, and has README.md, tiny.bin; choose a model with" in message
    assert message.endswith(", or convert this one with `save_pretrained` of transformers")
    place.hub.models["org/single"] = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
    assert failure("org/single").endswith(
        "; it is an adapter: give the model that it was trained on, and this by --lora-modules"
    )
    place.hub.models["org/single"] = {
        "config.json": b"{}",
        "model.safetensors.index.json": b'{"weight_map": {"a": "b"}}',
    }
    assert "org/single lacks b, which its model.safetensors.index.json names" in failure("org/single")
    place.hub.models["org/single"] = {"a-Q8_0-00001-of-00002.gguf": b"x"}
    message = "lacks a-Q8_0-00002-of-00002.gguf, which its a-Q8_0-00001-of-00002.gguf names"
    assert message in failure("org/single")
    place.hub.models["org/sharded"] |= {"model.safetensors.index.json": b'{"weight_map": {"a": "../../b"}}'}
    assert "names files outside of its folder" in failure("org/sharded")


def test_a_cut_download_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
    place.hub.cuts["model.safetensors"] = [3000, 1000]
    assert (resolve_model("org/single") / "model.safetensors").read_bytes() == SINGLE["model.safetensors"]
    assert place.hub.downloads["model.safetensors"] == 3


def test_a_connection_that_stays_cut_is_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    others = set(NEEDED) - {"model-00002-of-00002.safetensors"}

    def others_arrive(_seconds: float) -> None:
        deadline = time.monotonic() + 30
        while not others <= place.in_cache("org/sharded") and time.monotonic() < deadline:
            threading.Event().wait(0.01)

    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", others_arrive)  # before it tries again
    place.hub.cuts["model-00002-of-00002.safetensors"] = [0] * 100
    message = failure("org/sharded")
    assert message.startswith(f"the download of org/sharded to {place.cache} failed: ")
    assert "try again, it goes on after the files that are complete (" in message
    assert not list(place.cache.rglob("*.incomplete"))
    place.hub.cuts.clear()
    resolve_model("org/sharded")
    assert place.hub.downloads["model-00001-of-00002.safetensors"] == 1
    assert all(place.hub.downloads[name] <= 1 for name in others)


def test_a_wrong_checksum_or_size_is_found(place: Place) -> None:
    content = SINGLE["model.safetensors"]
    place.hub.forged["model.safetensors"] = content[::-1]
    message = failure("org/single")
    assert "model.safetensors of org/single arrived with the checksum " in message
    place.hub.forged["model.safetensors"] = content[:-1]
    assert "failed: Consistency check failed: file should be of size 7000 but has size 6999" in failure("org/single")
    place.hub.forged = {"tokenizer.json": NEEDED["tokenizer.json"].replace(b"{}", b"[]")}
    assert "tokenizer.json of org/sharded arrived with the checksum" in failure("org/sharded")
    place.hub.forged.clear()
    assert (resolve_model("org/single") / "model.safetensors").read_bytes() == content
    assert place.in_cache("org/single") == set(SINGLE)


def test_a_full_disk_is_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _folder: type("Usage", (), {"free": 7000}))
        assert f"org/single takes 7004 bytes more, but 7000 are free in {place.cache}" in failure("org/single")
        assert not place.hub.downloads

    def no_space(*_arguments: object, **_options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_space)
    assert "failed: the disk is full; make room there, or choose another folder" in failure("org/single")


@pytest.mark.parametrize(
    ("model", "is_name"),
    [(name, True) for name in ("Qwen/Qwen3-0.6B", "gpt2", "a/b.c_d", "a/b:Q4_K_M", "a/b:c-q8_0.gguf")]
    + [
        (model, False)
        for model in (
            "",
            "/a/b",
            "./a",
            "../a",
            "~/a",
            "a/b/c",
            "a b",
            "a/",
            "a--b",
            "a/..",
            "a:b",
            "a/b.",
            "a/b:",
            "a/b:c/d",
            "a/b:c:d",
        )
    ],
)
def test_names_are_told_from_paths(model: str, is_name: bool) -> None:
    assert is_hub_name(model) is is_name
    if not is_name and model:
        with pytest.raises(ValueError, match=r"is not a folder, nor a name at the Hugging Face hub"):
            resolve_model(model)


def test_folders_come_before_names(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "single").mkdir(parents=True)
    assert resolve_model("org/single") == tmp_path / "org" / "single"
    with pytest.raises(
        ValueError, match=r"revision='v1' applies to a model given by its name, and org/single is a fol"
    ):
        EngineArgs.from_options("org/single", {"revision": "v1"})
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="model='file' is a file, neither a folder nor a GGUF file"):
        resolve_model("file")
    assert not place.hub.tokens


@pytest.mark.parametrize("name", ["model", "sha256-0123abcd", "tiny:latest", "model.v1.2"])
def test_a_gguf_file_is_known_by_its_first_letters(demo_model: Path, tmp_path: Path, name: str, place: Place) -> None:
    write_gguf(demo_model, tmp_path / "demo.gguf", "Q8_0")
    file = (tmp_path / "demo.gguf").rename(tmp_path / name)
    folder = resolve_model(str(file))
    assert [path.resolve() for path in folder.glob("*.gguf")] == [file]
    assert folder.name == name_of(str(folder)) == name
    with pytest.raises(ValueError, match=f"{name} is a file; leave it out"):
        resolve_model(str(file), "main")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe, neither a folder nor a GGUF file"):
        resolve_model(str(tmp_path / "pipe"))


def test_a_reload_takes_names(place: Place) -> None:
    def reloaded(**options: Any) -> str:
        return str(reload_arguments(options, drain=False, drain_timeout=0).settings["model"])

    assert reloaded(model="org/single", revision=COMMIT) == str(place.snapshot("org/single"))
    assert reloaded(model="/on/another/machine") == "/on/another/machine"
    with pytest.raises(ValueError, match="revision can be set for a model given by its name; give model as well"):
        reload_arguments({"revision": "v1"}, drain=False, drain_timeout=0)


def test_a_cached_model_has_its_name() -> None:
    assert name_of(f"/x/models--org--tiny/snapshots/{COMMIT}") == "org/tiny"
    assert name_of("/x/models--gpt2/snapshots/1") == "gpt2"
    assert name_of("/x/tales/snapshots/1") == "1"


def test_the_library_of_the_hub_is_imported_for_names_only() -> None:
    code = (
        "import sys; import quire.frontend.cli.app, quire.frontend.llm; import quire.frontend.engine_args as args; "
        "args.EngineArgs.from_options(None, {}); sys.exit('huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def quire(place: Place, *arguments: str) -> list[str]:
    return quire_command(*arguments)


def test_ctrl_c_ends_a_download(place: Place) -> None:
    place.hub.gate = threading.Event()
    process = subprocess.Popen(
        quire(place, "engine", "--model", "org/single"),
        env=place.hub.environment(place.cache),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert place.hub.at_gate.wait(PATIENCE)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert stderr.startswith("quire: downloading org/single")
    assert stderr.count("\n") == 1
    assert not list(place.cache.rglob("*.incomplete"))
    assert "model.safetensors" not in place.in_cache("org/single")


def test_a_name_is_served_and_listed(place: Place, demo_model: Path) -> None:
    place.hub.models["org/demo"] = files = files_of(demo_model)
    place.hub.models["org/other"] = {**SINGLE, "config.json": b'{"architectures": ["BertModel"]}'}
    environment = place.hub.environment(place.cache)
    resolve_model("org/other")
    resolve_model("org/sharded")
    (place.snapshot("org/sharded") / "model-00002-of-00002.safetensors").unlink()
    with Server.start("org/demo", environment=environment) as server:
        assert server.model == "org/demo"
        assert server.request("/v1/completions", {"model": "org/demo", "prompt": "x", "max_tokens": 2}).status == 200
        done = subprocess.run(
            quire(place, "models", "--json"), env=environment, capture_output=True, text=True, check=True
        )
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["org/demo", "org/other", "org/sharded"]
    demo = rows["org/demo"]
    assert (demo["revisions"], demo["architecture"], demo["supported"]) == (["main"], "Qwen3ForCausalLM", True)
    assert demo["size_bytes"] == sum(len(files[name]) for name in place.in_cache("org/demo"))
    assert demo["fits"]
    assert 0 < demo["memory_bytes"] < demo["available_bytes"]
    assert "safetensors" in rows["org/other"]["problem"] or "BertModel" in rows["org/other"]["problem"]
    assert not rows["org/other"]["fits"]
    assert rows["org/sharded"]["problem"] == "incomplete: model-00002-of-00002.safetensors missing"


def test_a_truncated_file_of_the_cache_is_downloaded_again(place: Place) -> None:
    weights = resolve_model("org/single") / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(100)
    resolve_model("org/single")
    assert weights.read_bytes() == SINGLE["model.safetensors"]
    assert place.hub.downloads["model.safetensors"] == 2


def test_a_hub_that_is_silent_is_not_waited_for_where_the_cache_has_the_model(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = []

    def model_info(*_arguments: object, timeout: float, **_options: object) -> None:
        timeouts.append(timeout)
        raise HTTPError("timed out")

    cached = resolve_model("org/single")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    assert resolve_model("org/single") == cached
    (cached / "model.safetensors").unlink()
    failure("org/single")
    assert timeouts == [3, constants.HF_HUB_ETAG_TIMEOUT]
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "10")
    (cached / "model.safetensors").write_bytes(b"")
    assert resolve_model("org/single") == cached
    assert timeouts[2:] == [10]


@pytest.mark.parametrize("is_file", [True, False])
def test_a_folder_that_cannot_be_written_to_is_named(place: Place, tmp_path: Path, is_file: bool) -> None:
    (tmp_path / "other").write_text("")
    folder = tmp_path / "other" if is_file else tmp_path / "other" / "below"
    message = failure("org/single", None, str(folder))
    assert str(folder) in message
    assert message.endswith("; choose another folder with download_dir")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "an index that is none": lambda folder: (folder / "model.safetensors.index.json").write_bytes(b"\xff{}"),
    "an index without files": lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
    "an index of other folders": lambda folder: (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../../b"}}'
    ),
    "a config that is none": lambda folder: (folder / "config.json").write_text("["),
    "a link to itself": lambda folder: (folder / "model.safetensors").symlink_to("model.safetensors"),
}


def test_a_damaged_model_does_not_keep_others_from_being_listed_or_used(place: Place) -> None:
    for name, damage in DAMAGES.items():
        folder = place.cache / f"models--org--{name.replace(' ', '-')}" / "snapshots" / COMMIT
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        damage(folder)
    (folder.parent.parent / "refs").mkdir()
    (folder.parent.parent / "refs" / "main").write_bytes(b"\xff\x00")
    resolve_model("org/single")
    environment = place.hub.environment(place.cache) | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(quire(place, "models"), env=environment, capture_output=True, text=True, check=True)
    problems = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[1:])
    assert len(problems) == len(DAMAGES) + 1
    assert "index.json is not a safetensors index" in problems["org/an-index-that-is-none"]
    assert "index.json is not a safetensors index" in problems["org/an-index-without-files"]
    assert "names files outside of its folder" in problems["org/an-index-of-other-folders"]
    assert "model.safetensors missing" in problems["org/a-config-that-is-none"]
    assert "model.safetensors missing" in problems["org/a-link-to-itself"]
    done = subprocess.run(
        quire(place, "info", "--model", "org/an-index-that-is-none", "--revision", COMMIT),
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("quire: HF_HUB_OFFLINE is set, and in the cache ")
    assert "index.json is not a safetensors index; remove it" in done.stderr
    assert done.stderr.count("\n") == 1


QUANTS = [
    "README.md", "tiny-Q8_0.gguf", "tiny-Q4_K_S.gguf", "tiny-q4_k_m.gguf", "tiny-UD-Q4_K_XL.gguf",
    "mmproj-tiny-F16.gguf", "BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf",
    "imatrix_tiny.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("tag", "first"),
    [
        (None, "tiny-q4_k_m.gguf"),
        ("Q4_K_M", "tiny-q4_k_m.gguf"),
        ("q8_0", "tiny-Q8_0.gguf"),
        ("ud-q4_k_xl", "tiny-UD-Q4_K_XL.gguf"),
        ("Q4_K_XL", "tiny-UD-Q4_K_XL.gguf"),
        ("bf16", "BF16/tiny-BF16-00001-of-00002.gguf"),
        ("tiny-Q8_0", "tiny-Q8_0.gguf"),
        ("tiny-q8_0.gguf", "tiny-Q8_0.gguf"),
    ],
)
def test_a_tag_chooses_a_gguf_model(tag: str | None, first: str) -> None:
    assert choose_gguf("org/tiny", gguf_models(QUANTS), tag).files[0] == first


@pytest.mark.parametrize("tag", ["Q4_K", "F16", "Q4", "imatrix_tiny", "00001-of-00002", "8_0"])
def test_a_tag_that_no_file_has_is_answered_with_all(tag: str) -> None:
    with pytest.raises(HubError) as raised:
        choose_gguf("org/tiny", gguf_models(QUANTS), tag)
    found = "BF16, Q4_K_S, UD-Q4_K_XL, Q8_0, q4_k_m"
    expected = f"org/tiny has no GGUF model for the tag {tag}; it has "
    assert str(raised.value).startswith(expected)
    assert sorted(str(raised.value).removeprefix(expected).split(", ")) == sorted(found.split(", "))


def test_several_files_of_a_tag_are_told_apart_by_their_names() -> None:
    models = gguf_models(["a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "b-Q8_0.gguf"])
    with pytest.raises(HubError, match=r"has 2 GGUF models for the tag Q4_K_M; choose one of a-Q4_K_M, b-Q4_K_M$"):
        choose_gguf("org/two", models, None)
    assert choose_gguf("org/two", models, "b-q4_k_m").files == ("b-Q4_K_M.gguf",)
    assert choose_gguf("org/two", models[:1] + models[2:], "Q4_K_M").files == ("a-Q4_K_M.gguf",)
    assert choose_gguf("org/two", gguf_models(["x-Q6_K.gguf", "x-Q5_0.gguf"]), None).files == ("x-Q5_0.gguf",)


def test_a_gguf_file_of_a_name_is_served_and_listed(
    place: Place, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = write_gguf(demo_model, tmp_path / "demo-Q8_0.gguf", "Q8_0")
    write_gguf(demo_model, tmp_path / "demo-BF16.gguf", "BF16", part_tensors=len(tensors) // 2 + 1)
    parts = [f"demo-BF16-0000{number}-of-00002.gguf" for number in (1, 2)]
    files = {name: (tmp_path / name).read_bytes() for name in ("demo-Q8_0.gguf", *parts)}
    place.hub.models["org/demo-GGUF"] = {**files, "README.md": b"x", "mmproj-F16.gguf": b"x"}
    environment = place.hub.environment(place.cache)
    with Server.start("org/demo-GGUF:q8_0", environment=environment) as server:
        assert server.model == "org/demo-GGUF:Q8_0"
    assert place.in_cache("org/demo-GGUF") == {"demo-Q8_0.gguf"}
    folder = resolve_model("org/demo-GGUF:bf16", "main")
    assert sorted(path.name for path in folder.glob("*.gguf")) == parts
    assert set(place.hub.downloads) == {*files}
    (place.snapshot("org/demo-GGUF") / parts[1]).unlink()
    done = subprocess.run(quire(place, "models", "--json"), env=environment, capture_output=True, text=True, check=True)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(rows) == ["org/demo-GGUF:BF16", "org/demo-GGUF:Q8_0"]
    whole = rows["org/demo-GGUF:Q8_0"]
    assert (whole["size_bytes"], whole["architecture"]) == (len(files["demo-Q8_0.gguf"]), "Qwen3ForCausalLM")
    assert whole["supported"]
    assert whole["fits"]
    assert rows["org/demo-GGUF:BF16"]["problem"] == f"incomplete: {parts[1]} missing"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert name_of(str(resolve_model("org/demo-GGUF"))) == "org/demo-GGUF:Q8_0", "the only one whose files are there"
    assert f"{parts[1]} of org/demo-GGUF:BF16 is not in the cache" in failure("org/demo-GGUF:BF16")
    assert "in the cache org/demo-GGUF has no GGUF model for the tag Q6_K; it has " in failure("org/demo-GGUF:Q6_K")


ADAPTER = {"adapter_config.json": b'{"peft_type": "LORA", "r": 8}', "adapter_model.safetensors": b"adapter" * 100}


def test_an_adapter_is_downloaded_without_the_rest(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place.hub.models["org/tales"] = {**ADAPTER, **NOT_NEEDED, "adapter_model.bin": b"x", "tokenizer.json": b"{}"}
    folder = str(place.snapshot("org/tales"))
    assert absolute_modules("tales=org/tales") == (f"tales={folder}",)
    assert place.in_cache("org/tales") == set(ADAPTER)
    assert RequestedAdapters().resolved(LoRARequest("a", 1, "org/tales")) == LoRARequest("a", 1, folder)
    assert set(place.hub.downloads.values()) == {1}
    args = EngineArgs.from_options(None, {"lora_modules": "tales=org/tales", "download_dir": str(tmp_path / "other")})
    assert args.lora_modules[0].startswith(f"tales={tmp_path}/other/")
    assert [model.name for model in all_models(place.cache)] == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_adapter("org/tales") == folder
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set, there is no such folder, and org/none is not in the"):
        resolve_adapter("org/none")
    (tmp_path / "org" / "tales").mkdir(parents=True)
    assert LoRARequest("a", 1, "org/tales").lora_path == str(tmp_path / "org" / "tales")


def test_an_adapter_without_safetensors_is_rejected_before_a_download(place: Place) -> None:
    place.hub.models["org/tales"] = {"adapter_config.json": b"{}", "adapter_model.bin": b"x"}
    with pytest.raises(HubError, match=r"org/tales is not an adapter .*: it lacks adapter_model.safetensors; choose"):
        resolve_adapter("org/tales")
    assert not place.hub.downloads
    assert RequestedAdapters().resolved(LoRARequest("a", 1, "/org/tales")) == LoRARequest("a", 1, "/org/tales")


def test_an_adapter_that_is_too_large_is_rejected_before_a_download(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients may name it. A model may be as large as the disk allows."""
    place.hub.models["org/tales"] = dict(ADAPTER)
    size = sum(map(len, ADAPTER.values()))
    with monkeypatch.context() as patch:
        patch.setattr(adapters, "MAX_BYTES", size - 1)
        with pytest.raises(HubError, match=f"org/tales has {size} bytes, and adapters of the hub may have {size - 1}"):
            resolve_adapter("org/tales")
        place.hub.models["org/single"] = dict(SINGLE)
        assert place.in_cache("org/tales") == set()
        resolve_model("org/single")
    usage = {"total": 100_000, "free": 10_000 + size - 1}
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _folder: SimpleNamespace(**usage))
        with pytest.raises(HubError, match=f"org/tales takes {size} bytes more, and would leave less than 10000 of"):
            resolve_adapter("org/tales")
        usage["free"] += 1
        assert resolve_adapter("org/tales") == str(place.snapshot("org/tales"))
    assert adapters.MAX_BYTES == 8 << 30


def test_a_request_tries_the_hub_again_after_a_failure(place: Place) -> None:
    async def resolve() -> LoRARequest | None:
        return await RequestedAdapters().resolved_meanwhile(LoRARequest("a", 1, "org/later"))

    with pytest.raises(HubError, match="org/later is not a folder here"):
        asyncio.run(resolve())
    place.hub.models["org/later"] = dict(ADAPTER)
    assert asyncio.run(resolve()) == LoRARequest("a", 1, str(place.snapshot("org/later")))


def test_requests_name_adapters_of_the_hub(place: Place, tmp_path: Path) -> None:
    other = str(tmp_path / "other")  # a folder of its own, since this process looks each name up once
    place.hub.models["org/told"] = files_of(write_demo_adapter(tmp_path / "tales", 1))
    tales, params = LoRARequest("tales", 1, "org/told"), SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(enable_lora=True, num_pages=64, download_dir=other) as llm:
        [own] = llm.generate("Once upon a time", params)
        [adapted] = llm.generate("Once upon a time", params, lora_request=tales)
        assert own.outputs[0].token_ids != adapted.outputs[0].token_ids

        async def stream() -> list[list[int]]:
            async with AsyncLLM(engine_address=llm.engine_address) as attached:
                outputs = attached.generate("Once upon a time", params, lora_request=tales, output_kind="final_only")
                vector = (await attached.embed("a fox", lora_request=tales)).outputs.embedding
                assert vector == llm.embed("a fox", lora_request=tales)[0].outputs.embedding
                return [list(output.outputs[0].token_ids) async for output in outputs]

        assert llm.list_loras()["tales"].startswith(other)
        assert not place.cache.exists()
        assert asyncio.run(stream()) == [adapted.outputs[0].token_ids]
    assert place.snapshot("org/told").exists()


def test_an_adapter_of_the_hub_is_loaded_while_a_server_runs(place: Place, tmp_path: Path) -> None:
    for number, name in enumerate(("tales", "songs"), 1):
        place.hub.models[f"org/{name}"] = files_of(write_demo_adapter(tmp_path / name, number))
    flags = ("--num-pages", "64", "--allow-runtime-lora", "--lora-modules", "tales=org/tales")
    with Server.start(
        *flags, "--download-dir", str(place.cache), environment=place.hub.environment(tmp_path / "other")
    ) as server:

        def load(name: str) -> Reply:
            return server.request("/v1/load_lora_adapter", {"lora_name": name, "lora_path": f"org/{name}"})

        assert load("songs").status == 200
        folders = [card["root"] for card in server.request("/v1/models").json()["data"][1:]]
        assert folders == [str(place.snapshot(f"org/{name}")) for name in ("tales", "songs")]
        answers = [
            server.request("/v1/completions", {"prompt": "x", "max_tokens": 8, "temperature": 0, "model": name}).json()
            for name in (server.model, "tales", "songs")
        ]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 3
        none = load("none")
        assert none.status == 404
        assert none.error["message"].startswith("lora_path='org/none': it can't be had from the hub")
        assert str(place.cache) not in none.error["message"]
