"""A chat template that loops without end rejects its own chats, and holds up neither other requests nor the server."""

from __future__ import annotations

import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from demo_copies import model_with_template
from engine_watch import wait_until
from http_server import Server
from patience import PATIENCE
from quire_command import quire_command

LOOPS_IF_ASKED = """\
{% if messages[0].content == 'loop' %}
{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}{% endfor %}{% endfor %}
{% endif %}{{ messages[0].content }}
"""
CHATS = "/v1/chat/completions"


def chat(content: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def test_a_chat_whose_template_loops_is_rejected_while_others_are_answered(tmp_path: Path) -> None:
    model = model_with_template(tmp_path / "model", LOOPS_IF_ASKED)
    with Server.start(str(model)) as server, ThreadPoolExecutor() as threads:
        looping = [threads.submit(server.request, CHATS, chat("loop")) for _ in range(3)]
        others = [server.request(CHATS, chat("hello")), server.request("/v1/completions", {"prompt": "x"})]
        assert [reply.status for reply in others] == [200, 200]
        assert not any(future.done() for future in looping)
        for reply in (future.result() for future in looping):
            assert reply.status == 400
            assert "chat template did not end within 2 s of CPU time" in reply.error["message"]


def test_a_model_whose_template_always_loops_is_served_with_a_warning(tmp_path: Path) -> None:
    model = model_with_template(tmp_path / "model", LOOPS_IF_ASKED.replace("== 'loop'", "!= ''"))
    with Server.start(str(model)) as server:
        assert server.request(CHATS, chat("hello")).status == 400
        assert server.request("/v1/completions", {"prompt": "x"}).status == 200
    assert any("WARNING" in line and "chat template did not end" in line for line in server.log), server.log


def renders(pid: int) -> bool:
    """Return whether a process has one that renders templates."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = (child for task in tasks for child in (task / "children").read_text().split())
    return any(b"render_process" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children)


def test_sigterm_does_not_wait_for_the_template_that_a_start_tries(tmp_path: Path) -> None:
    model = model_with_template(tmp_path / "model", LOOPS_IF_ASKED.replace("== 'loop'", "!= ''"))
    command = quire_command("serve", "--port", "0", "--model", model)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        wait_until(lambda: renders(process.pid), "no template is rendered")
        process.send_signal(signal.SIGTERM)
        log = process.stderr.read()
        assert process.wait(PATIENCE) == 128 + signal.SIGTERM
    assert "did not end" not in log
