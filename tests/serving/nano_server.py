"""Real `fasttrack serve` processes for tests, and the same engine in this process to compare with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx

from kimi_k3_decode.engine import Engine
from kimi_k3_decode.plan import SPECIALIZED_BACKEND, Deployment, Plan
from kimi_k3_decode.stock import StockPath
from kimi_k3_decode.tokenizer import FileTokenizer
from validation.core.settings import PROJECT_ROOT
from validation.targets.engine import find_candidate, read_checkpoint

CHECKPOINT = PROJECT_ROOT / "kimi_k3_decode" / "checkpoints" / "nano"


@dataclass
class Served:
    """A running server: its address, what it printed when ready, and a client."""

    url: str
    ready: dict[str, Any]
    process: subprocess.Popen[str]
    log: Path
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        reply = self.post("/v1/completions", prompt=prompt, **body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def choice(self, prompt: Any, **body: Any) -> dict[str, Any]:
        return self.complete(prompt, **body)["choices"][0]

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The JSON events of a streamed reply; asserts the closing [DONE]."""
        events = []
        with self.http.stream("POST", path, json={**body, "stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry `labels`."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            key, _, value = line.rpartition(" ")
            if key.split("{")[0] == name and all(f'{label}="{text}"' in key for label, text in labels.items()):
                total += float(value)
        return total

    def stop(self) -> tuple[int, dict[str, Any]]:
        """SIGTERM; the exit code and the closing JSON line."""
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=30)
        lines = out.strip().splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines else {}


@contextlib.contextmanager
def served(*options: str) -> Iterator[Served]:
    """A server on a free port of this machine, stopped at the end whatever happens."""
    command = [sys.executable, "-m", "validation", "serve", "--port", "0", *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("w") as err:
            process = subprocess.Popen(
                command, cwd=PROJECT_ROOT, stdout=subprocess.PIPE, stderr=err, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first, f"the server did not start:\n{log.read_text()[-2000:]}"
            ready = json.loads(first)
            yield Served(url=ready["serving"], ready=ready, process=process, log=log)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@lru_cache(maxsize=1)
def engine() -> Engine:
    """The engine that the servers run, in this process: stock and specialised."""
    weights = read_checkpoint(CHECKPOINT)
    plan = Plan.make(weights.config, Deployment(decode_backend=SPECIALIZED_BACKEND))
    return Engine(StockPath(weights), find_candidate("specialized")(weights), plan, FileTokenizer(CHECKPOINT))


@lru_cache(maxsize=1)
def prompts() -> tuple[str, ...]:
    """Word problems that nano-K3 solves."""
    rows = (PROJECT_ROOT / "evals" / "nano" / "data" / "gsm8k_nano.jsonl").read_text().splitlines()[:8]
    return tuple(json.loads(row)["prompt"] for row in rows)
