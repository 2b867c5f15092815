"""A side of several replicas: one that computes or answers otherwise than the others is found, and named by its number."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from evals.serving.launch import free_port
from tests.serving.test_lane import TOY, run, values

CONFIG = """
profile = "serving"
[baseline]
model = "toy"
dtype = "default"
base_url = [{stock}]
[candidate]
model = "toy"
dtype = "default"
base_url = [{candidate}]
[evals]
suites = ["gsm8k_nano"]
concurrency = [1, 4]
[numerics]
bins = [256, 1024]
window_tokens = 32
text = "chat"
[perf]
waves = 8
prompt_tokens = 64
new_tokens = 8
"""


@contextlib.contextmanager
def toys(*options: tuple[str, ...]) -> Iterator[list[str]]:
    """Addresses of running stand-in servers."""
    ports = [free_port() for _ in options]
    processes = [
        subprocess.Popen([sys.executable, str(TOY), "--port", str(port), *own], stdout=subprocess.DEVNULL)
        for port, own in zip(ports, options, strict=True)
    ]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url in urls:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(f"{url}/health", timeout=5).raise_for_status()
                    break
                time.sleep(0.1)
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.timeout(240)
def test_a_replica_that_is_off_or_slow_is_found_among_good_ones(tmp_path):
    path = ("--path", "specialized")
    with toys(("--seconds", "0.1"), (*path, "--seconds", "0.1"), (*path, "--seconds", "0.16", "--mode", "noisy")) as (stock, good, bad):
        text = CONFIG.format(stock=json.dumps(stock), candidate=f"{json.dumps(good)}, {json.dumps(bad)}")
        closing, records, told = run(tmp_path, text, "numerics,perf")
    assert closing["verdict"] == "fail", told
    for check, measured, limit in (
        ("numerics.serving.decode", "noise_ratio_low", 2.0),
        ("numerics.serving.overall", "noise_ratio_low", 2.0),
        ("perf.serving.request_times", "slowdown_low", 0.03),
    ):
        by_replica: dict[int, list[float]] = {}
        for record in records[check]:
            by_replica.setdefault(record.case.params.get("replica", 1), []).append(values(record)[measured])
        assert sorted(by_replica) == [1, 2], (check, told)
        assert max(by_replica[1]) <= limit < min(by_replica[2]), (check, by_replica)
