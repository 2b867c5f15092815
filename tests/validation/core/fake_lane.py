"""A lane of cases that behave as candidates do on their worst days. Imported by name, in the parent and in workers."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from validation.core.types import Case, Claim, Limit, Measurement
from validation.core.worker import Refused


def _measure(case):
    do = case.params["do"]
    scratch = Path(os.environ["FASTTRACK_SCRATCH"])
    if do == "raise":
        raise RuntimeError("planted")
    if do == "die":
        print("last words", file=sys.stderr, flush=True)
        os._exit(7)
    if do == "segfault":
        os.kill(os.getpid(), 11)
    if do == "hang":
        time.sleep(600)
    if do == "oom":
        hog = [bytearray(64 << 20) for _ in range(1000)]
        return len(hog)
    if do == "refuse":
        raise Refused(("too many rows", "wrong dtype"))
    if do == "nan":
        return float("nan")
    if do == "nothing":
        return None
    if do == "chatty":
        print('{"outcome":"measured"}', flush=True)
    if do == "environment":
        return float(sum(name in os.environ for name in ("SECRET_TOKEN", "HF_TOKEN")))
    if do == "intrude":
        return float(_can_write(Path(case.params["path"])))
    if do == "network":
        return float(_can_connect(case.params["port"]))
    if do == "artifact":
        (scratch / "artifacts" / "table.csv").write_text("a,b\n")
        (scratch / "artifacts" / "link").symlink_to("/etc/passwd")
    if do in ("slow", "stamp"):
        time.sleep(case.params["sleep_s"])
    if do == "scratch":
        with (scratch / "seen").open("a") as handle:
            handle.write("x")
    return 1.0


def _can_write(path):
    try:
        with path.open("a") as handle:
            handle.write("forged\n")
    except OSError:
        return False
    return True


def _can_connect(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


class FakeCheck:
    claim = "C-FAKE"
    roles = ()
    must_kill = ()

    def __init__(self, name, plan):
        self.id = name
        self._plan = plan

    def cases(self):
        return [Case(subject="fake", params=params, seed=seed) for seed, params in enumerate(self._plan)]

    def limits(self, case):
        bound = case.params.get("at_most", 1.0)
        return (Limit(measurement="value", op="<=", bound=bound, unit="1", why="planted"),)

    def measure(self, case, targets):
        began = time.time()
        value = _measure(case)
        details = {"do": case.params["do"], **({"began": began, "ended": time.time()} if case.params["do"] == "stamp" else {})}
        return (() if value is None else (Measurement(name="value", value=value, unit="1"),)), details


def checks():
    """The parent names the cases in FAKE_CASES; a worker only measures what it is given."""
    plans = json.loads(os.environ.get("FAKE_CASES", '{"fake.a": []}'))
    found = [FakeCheck(name, plan) for name, plan in plans.items()]
    names = {check.id for check in found}
    return [*found, *(FakeCheck(name, []) for name in ("fake.a", "fake.b") if name not in names)]


CLAIMS = (Claim(id="C-FAKE", sentence="fake", lane="fake", checks=("fake.a",), required_in=("embedded",), proven_by="nothing"),)
