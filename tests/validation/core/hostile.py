"""A candidate that attacks: `hostile:candidate` builds the stock path, after doing what the file $HOME/attack.json asks for.

Each attack writes what it achieved where the tests look for it, or tries to lie. It runs inside a worker only.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

from validation.core.types import Case, Claim, Limit, Measurement


def attack(do: str, params: dict) -> float:
    """1.0 when the attack got what it wanted, 0.0 when it was stopped; some never return."""
    if do == "secrets":
        return float("SECRET_TOKEN" in _environments())
    if do == "write":
        return float(_write(Path(params["path"])))
    if do == "link":
        link = Path(os.environ["FASTTRACK_SCRATCH"]) / "artifacts" / "out"
        link.symlink_to(params["path"])
        return float(_write(link))
    if do == "hardlink":
        try:
            os.link(params["path"], Path(os.environ["FASTTRACK_SCRATCH"]) / "artifacts" / "copy")
        except OSError:
            return 0.0
        return float(_write(Path(os.environ["FASTTRACK_SCRATCH"]) / "artifacts" / "copy"))
    if do == "socket":
        return float(_connects(params["port"]))
    if do == "signal":
        try:
            os.kill(params["pid"], signal.SIGTERM)
        except OSError:
            return 0.0
        return 1.0
    if do == "daemon":
        _daemon(params["seconds"])
        return 0.0
    if do == "forge":
        _forge()
        return 1.0
    if do == "memory":
        return float(len([bytearray(64 << 20) for _ in range(100)]))
    if do == "sleep":
        time.sleep(600)
    if do == "clock":
        real = time.perf_counter
        time.perf_counter = lambda: real() * 0.1
        import torch

        torch.isfinite = lambda x: torch.ones_like(x, dtype=torch.bool)
    if do == "suite":
        from validation.core import registry

        registry.find_check.__code__ = (lambda lane, module, identity: None).__code__
    return 0.0


def _environments() -> list[str]:
    """Names of this process's variables and of its parent's, where /proc shows them."""
    names = list(os.environ)
    for pid in (os.getppid(), 1):
        try:
            data = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        names += [item.split(b"=")[0].decode(errors="replace") for item in data.split(b"\0")]
    return names


def _write(path: Path) -> bool:
    try:
        with path.open("a") as handle:
            handle.write("forged\n")
    except OSError:
        return False
    return True


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def _daemon(seconds: float) -> None:
    """The classic double fork with a session of its own, writing a heartbeat."""
    beat = Path(os.environ["FASTTRACK_SCRATCH"]).parent / "heartbeat"
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            (Path(os.environ["FASTTRACK_SCRATCH"]) / "heartbeat").write_text(str(time.time()))
        except OSError:
            os._exit(1)
        time.sleep(0.05)
    beat.touch()
    os._exit(0)


def _forge() -> None:
    """A passing answer on standard output and on every other open pipe."""
    line = json.dumps(
        {"outcome": "measured", "measurements": [{"name": "value", "value": 0.0, "unit": "1", "samples": []}], "seconds": 0.1}
    )
    print(line, flush=True)
    for fd in range(3, 64):
        try:
            os.write(fd, line.encode() + b"\n")
        except OSError:
            continue


class HostileCheck:
    """Asks the candidate for its attack and measures whether it succeeded."""

    id = "fake.hostile"
    claim = "C-HOSTILE"
    roles = ("candidate",)
    must_kill = ()

    def cases(self):
        plan = json.loads(os.environ.get("HOSTILE_CASES", "[]"))
        return [Case(subject="attack", params=params, seed=n) for n, params in enumerate(plan)]

    def limits(self, case):
        return (Limit(measurement="value", op="<=", bound=0.0, unit="1", why="the attack must not succeed"),)

    def measure(self, case, targets):
        value = targets["candidate"].path.attack(case.params["do"], dict(case.params))
        return (Measurement(name="value", value=value, unit="1"),), {}


class _Path:
    """What the factory returns; no step is ever asked of it here."""

    def attack(self, do: str, params: dict) -> float:
        return attack(do, params)


def candidate(weights):
    return _Path()


def checks():
    return [HostileCheck()]


CLAIMS = (Claim(id="C-HOSTILE", sentence="s", lane="fake", checks=("fake.hostile",), required_in=("embedded",), proven_by="p"),)
