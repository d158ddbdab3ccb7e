"""A Hugging Face hub on 127.0.0.1 with the requests that `huggingface_hub` makes, and with faults."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@dataclass
class SmallHub:
    """The models of a hub, and its faults.

    `denials`: status and X-Error-Code of all answers about a model. `cuts`: bytes after which the connection of the
    next downloads of a file is cut. `forged`: contents that are sent in place of a file. `gate`: downloads of weights
    wait for it after half of the file.
    """

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    denials: dict[str, tuple[int, str]] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    forged: dict[str, bytes] = field(default_factory=dict)
    gate: threading.Event | None = None
    at_gate: threading.Event = field(default_factory=threading.Event)
    downloads: Counter[str] = field(default_factory=Counter)
    tokens: set[str | None] = field(default_factory=set)
    address: str = ""

    def environment(self, cache: Path) -> dict[str, str]:
        """Return the environment of a program that uses this hub and this cache."""
        return {
            **os.environ,
            "HF_ENDPOINT": self.address,
            "HF_HUB_CACHE": str(cache),
            "HF_HOME": str(cache / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }


@contextmanager
def small_hub(**models: dict[str, bytes]) -> Iterator[SmallHub]:
    """Serve models, `org__name={file: content}`."""
    hub = SmallHub({name.replace("__", "/"): files for name, files in models.items()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        if hub.gate is not None:
            hub.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))


def _checksum(name: str, content: bytes) -> str:
    if _is_large(name):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: SmallHub

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub.tokens.add(self.headers.get("Authorization"))
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("api/models/"):
            name, _, revision = path.removeprefix("api/models/").partition("/revision/")
            self._list(name, revision)
        elif "/resolve/" not in path:  # `huggingface_hub` looks for what else a hub offers
            self._send(404, b"{}", {})
        else:
            name, _, rest = path.partition("/resolve/")
            self._send_file(name, *rest.split("/", 1))

    def _denied(self, name: str, revision: str) -> bool:
        status, code = self.hub.denials.get(name, (404, "RepoNotFound"))
        if name in self.hub.models and name not in self.hub.denials:
            if revision in ("", "main", COMMIT):
                return False
            status, code = 404, "RevisionNotFound"
        self._send(status, b"{}", {"X-Error-Code": code})
        return True

    def _list(self, name: str, revision: str) -> None:
        if self._denied(name, revision):
            return
        siblings = [
            {
                "rfilename": file,
                "size": len(content),
                "blobId": "f" * 40 if _is_large(file) else _checksum(file, content),
                **({"lfs": {"sha256": _checksum(file, content), "size": len(content), "pointerSize": 130}}
                   if _is_large(file) else {}),
            }
            for file, content in self.hub.models[name].items()
        ]  # fmt: skip
        listing = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
        self._send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})

    def _send_file(self, name: str, revision: str, file: str) -> None:
        if self._denied(name, revision):
            return
        content = self.hub.models[name][file]
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{_checksum(file, content)}"',
            "X-Linked-Size": str(len(content)),
            "X-Linked-ETag": f'"{_checksum(file, content)}"',
        }
        if self.command == "HEAD":
            self._send(200, content, headers)
            return
        self.hub.downloads[file] += 1
        content = self.hub.forged.get(file, content)
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._send(206 if begin else 200, content[begin:], headers, file)

    def _send(self, status: int, body: bytes, headers: dict[str, str], file: str = "") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cuts.get(file):
            self.wfile.write(body[: self.hub.cuts[file].pop(0)])
            self.close_connection = True
            return
        half = len(body) // 2 if self.hub.gate is not None and _is_large(file) else len(body)
        self.wfile.write(body[:half])
        if half < len(body):
            self.wfile.flush()
            self.hub.at_gate.set()
            assert self.hub.gate is not None
            self.hub.gate.wait()
            self.wfile.write(body[half:])
