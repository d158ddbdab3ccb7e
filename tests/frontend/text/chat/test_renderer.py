"""Chat templates are rendered in processes of their own, and none of them can hang or exhaust this one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_watch import wait_until

from quire.frontend.engine_args import DEMO_MODEL
from quire.frontend.errors import ChatTemplateError
from quire.frontend.text.chat.renderer import MAX_PROCESSES, TemplateRenderer
from quire.frontend.text.chat.template_files import TemplateSource, find_template

HELLO = [{"role": "user", "content": "Hello"}]
ECHO = "{{ bos_token }}{{ messages[0].content }}"
SLOW = "{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}" + ECHO
LOOP = (
    "{% for i in range(9999) %}{% for j in range(9999) %}{% if messages[0].content == i %}x{% endif %}{% endfor %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


def template(source: str) -> TemplateSource:
    return TemplateSource(source, {"bos_token": "<s>"})


def children() -> list[int]:
    """Return the ids of the processes that render."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"render_process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("default", "chat_template.jinja"),
        ("default", "tokenizer_config.json"),
        ("default", "chat_template.json"),
        ("rag", "additional_chat_templates/rag.jinja"),
    ],
)
def test_the_error_of_a_broken_template_names_its_file(
    renderer: TemplateRenderer, tmp_path: Path, name: str, file: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    broken = "{% if %}"
    (tmp_path / file).write_text(json.dumps({"chat_template": broken}) if file.endswith("json") else broken)
    words = re.escape(f"repair it in {tmp_path / file}, or give another one with --chat-template")
    with pytest.raises(ChatTemplateError, match=rf"^the chat template has an error in line 1: .*; {words}$"):
        renderer.render(find_template(tmp_path, name), HELLO)
    with pytest.raises(ChatTemplateError, match=r"^the chat template has an error in line 1: [^;]*$"):
        renderer.render(find_template(tmp_path, source=broken), HELLO)


def test_a_conversation_is_rendered_with_its_options(renderer: TemplateRenderer) -> None:
    source = template(
        "{{ bos_token }}{{ messages[0].content }}{{ tools[0].n }}{{ template }}{{ add_generation_prompt }}"
    )
    options: dict[str, Any] = {"add_generation_prompt": False, "tools": [OrderedDict(n=2**60)], "template": "t"}
    assert renderer.render(source, [OrderedDict(HELLO[0])], **options) == f"<s>Hello{2**60}tFalse"
    assert renderer.render(template(ECHO), [{"role": "user", "content": "日" * 2_000_000}]) == "<s>" + "日" * 2_000_000


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (LOOP, "did not end within 2 s of CPU time"),
        ("{{ 10 ** (10 ** 9) }}", "did not end within 2 s of CPU time"),
        (
            "{% macro f(n) %}{% if n %}{% if f(n - 1) or f(n - 1) %}{% endif %}{% endif %}{% endmacro %}{{ f(60) }}",
            "did not end within 2 s of CPU time",
        ),
        ("{{ 'x' * 10 ** 10 }}", "MemoryError|runs out of memory"),
        ("{{ 'x' * 7 * 10 ** 7 }}", "writes 70000000 characters"),
        ("{% if %}", "error in line 1"),
        ("{{ raise_exception('roles must alternate') }}", "rejects the messages: roles must alternate"),
    ],
    ids=["loops", "power", "macros", "memory", "size", "syntax", "rejection"],
)  # fmt: skip
def test_a_template_without_bounds_is_an_error(renderer: TemplateRenderer, source: str, what: str) -> None:
    with pytest.raises(ChatTemplateError, match=what):
        renderer.render(template(source), HELLO)
    assert renderer.render(template(ECHO), HELLO) == "<s>Hello"


def test_others_are_rendered_while_a_template_loops(renderer: TemplateRenderer) -> None:
    errors: list[ChatTemplateError] = []

    def loop() -> None:
        with pytest.raises(ChatTemplateError) as error:
            renderer.render(template(LOOP), HELLO)
        errors.append(error.value)

    threads = [threading.Thread(target=loop) for _ in range(MAX_PROCESSES - 1)]
    for thread in threads:
        thread.start()
    assert renderer.render(template(ECHO), HELLO) == "<s>Hello"
    assert not errors
    for thread in threads:
        thread.join()
    assert len(errors) == len(threads)
    assert len(children()) <= MAX_PROCESSES


def test_a_process_that_was_killed_is_replaced(renderer: TemplateRenderer) -> None:
    assert renderer.render(template(ECHO), HELLO) == "<s>Hello"
    for pid in children():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not children(), "a process survives SIGKILL")
    assert renderer.render(template(ECHO), HELLO) == "<s>Hello"


def test_a_rendering_whose_process_is_killed_is_done_again() -> None:
    renderer = TemplateRenderer()
    before = set(children())
    with ThreadPoolExecutor(1) as pool, contextlib.closing(renderer):
        text = pool.submit(renderer.render, template(SLOW), HELLO)
        wait_until(lambda: set(children()) > before, "no process starts")
        for pid in set(children()) - before:
            os.kill(pid, signal.SIGKILL)
        assert text.result() == "<s>Hello"


def test_no_process_stays_after_the_renderer_is_closed() -> None:
    before = set(children())
    renderer = TemplateRenderer()
    assert renderer.render(template(ECHO), HELLO) == "<s>Hello"
    assert set(children()) > before
    renderer.close()
    wait_until(lambda: set(children()) <= before, "a process stays")


@pytest.mark.parametrize("size", [5, 1_000_000])
def test_a_process_that_is_stopped_goes_on(size: int) -> None:
    """Also where more is sent than its socket holds."""
    before, renderer = set(children()), TemplateRenderer()
    with contextlib.closing(renderer):
        assert renderer.render(template(ECHO), HELLO) == "<s>Hello"
        for pid in set(children()) - before:
            os.kill(pid, signal.SIGSTOP)
        assert renderer.render(template(ECHO), [{"role": "user", "content": "x" * size}]) == "<s>" + "x" * size


def test_what_is_rendered_ends_with_the_renderer() -> None:
    before, renderer = set(children()), TemplateRenderer()
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(renderer.render, template(LOOP), HELLO)
        wait_until(lambda: set(children()) > before, "no process starts")
        renderer.close()
        with pytest.raises(ChatTemplateError, match="the client was closed"):
            text.result()
    assert set(children()) <= before


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": object()}], [{"role": "user", "content": "\ud800"}], object()]
)
def test_what_is_not_plain_data_is_rejected(renderer: TemplateRenderer, messages: Any) -> None:
    with pytest.raises(ChatTemplateError, match="the messages, tools or variables of the chat template"):
        renderer.render(template(ECHO), messages)


def test_templates_of_a_folder(renderer: TemplateRenderer, tmp_path: Path) -> None:
    def rendered(*arguments: str) -> str:
        return renderer.render(find_template(tmp_path, *arguments), HELLO)

    with pytest.raises(ChatTemplateError, match=r"no chat template .*give a prompt instead of messages"):
        find_template(tmp_path)
    config = {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": {"content": "<s>"}}))
    assert rendered() == "A"
    assert rendered("tool_use") == "B"
    assert rendered("default", "{{ bos_token }}") == "<s>"
    with pytest.raises(ChatTemplateError, match="no chat template named 'rag'; it has default, tool_use"):
        find_template(tmp_path, "rag")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert rendered() == "Hello"


def test_the_demo_model_has_one(renderer: TemplateRenderer) -> None:
    text = renderer.render(find_template(DEMO_MODEL), [{"role": "user", "content": " Tell me a tale "}])
    assert "Tell me a tale" in text
    with pytest.raises(ChatTemplateError, match="role must be"):
        renderer.render(find_template(DEMO_MODEL), [{"role": "narrator", "content": "x"}])
