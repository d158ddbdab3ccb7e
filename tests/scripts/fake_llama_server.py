"""Fake llama-server: answers /health and /completion on the UNIX socket of --host."""

from __future__ import annotations

import json
import socketserver
import sys
import time
from http.server import BaseHTTPRequestHandler

TOKEN_SECONDS = 0.001  # as test_bench_model.py expects


class FakeLlamaHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"status": "ok"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["ignore_eos"]
        assert not request["cache_prompt"]
        assert request["stream"]
        self.send_response(200)
        self.end_headers()
        most = request["n_predict"]
        for number in range(1, most + 1):
            time.sleep(TOKEN_SECONDS)
            if number % 3 or number == most:  # the third token is half a character
                self._send({"tokens_predicted": number, "stop": False})
        self._send({"tokens_predicted": most, "stop": True})

    def _send(self, event: dict[str, object]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _answer(self, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "client"


if __name__ == "__main__":
    if "--version" in sys.argv:
        sys.exit("version: 4242 (0a1b2c3d)\nbuilt with gcc 12 for x86_64")
    print("system_info: n_threads = 1 | CPU : AVX2 = 1 | AVX512 = 0 | FMA = 1 |", flush=True)
    with socketserver.ThreadingUnixStreamServer(sys.argv[sys.argv.index("--host") + 1], FakeLlamaHandler) as server:
        server.serve_forever()
