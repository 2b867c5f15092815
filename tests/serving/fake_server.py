"""A server to start: a process tree with a helper in a session of its own, that can fail in the ways servers fail.

python fake_server.py PORT MODE     MODE: good | slow | crash | oom | hang | deaf | stubborn | html | dies
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HELPER = "import time\nwhile True: time.sleep(1)"


class Handler(BaseHTTPRequestHandler):
    mode = "good"

    def do_GET(self) -> None:
        bodies: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": "toy", "max_model_len": 128}]},
            "/version": {"version": "1.0"},
        }
        data = b"<html></html>" if self.mode == "html" else json.dumps(bodies.get(self.path)).encode()
        self.send_response(200 if self.path in bodies else 404)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        import os

        if self.mode == "dies":
            print("engine core died", flush=True)
            os._exit(9)
        self.do_GET()

    def log_message(self, *parts: Any) -> None: ...


def main(port: int, mode: str) -> None:
    helper = subprocess.Popen([sys.executable, "-c", HELPER], start_new_session=True)
    print(f"helper {helper.pid}", flush=True)
    if mode == "crash":
        sys.exit("ValueError: this option needs that one")
    if mode == "oom":
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", flush=True)
        sys.exit(1)
    if mode == "hang":
        time.sleep(600)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "slow":
        time.sleep(0.6)
    Handler.mode = mode
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
