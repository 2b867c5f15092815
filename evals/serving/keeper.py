"""Holds one server and everything it starts: `python -m evals.serving.keeper SETUP`, SETUP being JSON (command, cwd, log, status).

The keeper's standard input is a pipe whose other end only the suite holds. When it closes, because the suite stops the server, is
interrupted or is killed outright, the keeper ends the server's whole tree: politely, then by force. Servers start helpers of their own
(engine processes, workers of each rank), maybe in other sessions; as the reaper of its descendants the keeper finds those too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

POLL_S = 0.05
REAP_EVERY_S = 5.0
KILL_WAIT_S = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(setup_text: str) -> int:
    setup: dict[str, Any] = json.loads(setup_text)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the pipe decides, so that Ctrl-C in the terminal leaves the order of things to the suite
    try:
        with open(setup["log"], "ab") as log:
            server = subprocess.Popen(
                setup["command"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=setup["cwd"],
                start_new_session=True,
                preexec_fn=lambda: _child(libc),  # this process has one thread
            )
    except OSError as error:
        _report(setup, {"error": str(error)})
        return 127
    _report(setup, {"pid": server.pid})
    code = _watch(server, float(setup["stop_timeout_s"]))
    _report(setup, {"pid": server.pid, "returncode": code})
    return 0


def _child(libc: ctypes.CDLL) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should even the keeper be killed
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _report(setup: dict[str, Any], state: dict[str, Any]) -> None:
    path = Path(setup["status"])
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(state))
    temporary.replace(path)


def _watch(server: subprocess.Popen[bytes], stop_timeout_s: float) -> int:
    """Until the server ends or the pipe closes; then nothing of it is left. Returns its exit code (negative: a signal)."""
    reaped = time.monotonic()
    while server.poll() is None:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if ready and not os.read(sys.stdin.fileno(), 1):
            _stop(server, stop_timeout_s)
            break
        if time.monotonic() - reaped > REAP_EVERY_S:
            _reap(server.pid)
            reaped = time.monotonic()
    code = server.wait()
    _kill_rest()
    return code


def _stop(server: subprocess.Popen[bytes], stop_timeout_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + stop_timeout_s
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if server.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def _reap(server_pid: int) -> None:
    """Collect adopted descendants that ended; the server itself is left to its own `poll`."""
    for pid in _children(os.getpid()):
        if pid != server_pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _kill_rest() -> None:
    """Every descendant, wherever it hid: children of the dead are ours by now, so a few rounds find all."""
    deadline = time.monotonic() + KILL_WAIT_S
    while (left := _children(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name stands in brackets and may hold anything; state and parent follow the last one.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
