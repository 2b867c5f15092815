"""A sweep: parts measured each in a process of its own, resumed part by part. A part that crashes or hangs is a recorded outcome.

Finished parts lie in `state` as one JSON file each, written beside and renamed. A part that failed is tried again on the next call.

On a Ray cluster each part is one task that asks for its GPUs and is not retried: a lost worker, or a lost node, costs its part only. The
project must be importable where tasks run (the same checkout path on a shared disk, or installed); results come back to the caller, who
alone writes `state`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from validation.core import jsonio
from validation.core.settings import PROJECT_ROOT
from validation.core.store import write_atomically
from validation.core.types import HarnessError

CONNECT_LIMIT_S = 5.0
# A child ends with whoever started it (PR_SET_PDEATHSIG), so that a lost Ray worker leaves nothing running.
CHILD = (
    "import ctypes, importlib, json, sys; ctypes.CDLL(None).prctl(1, 9); from validation.core import jsonio; "
    "spec = json.loads(sys.argv[1]); module, _, name = spec['function'].partition(':'); "
    "value = getattr(importlib.import_module(module), name)(**spec['arguments']); open(spec['answer'], 'w').write(jsonio.dumps(value))"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One unit of a sweep: `function` is `module:name`, called with JSON arguments, answering a JSON value within `limit_s`."""

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 120.0
    gpus: float = 0.0  # of one Ray task; local processes see all there are

    @property
    def key(self) -> str:
        text = json.dumps([self.name, self.function, dict(self.arguments)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    outcome: str  # measured | error
    value: Any = None
    reason: str = ""


def run_one(part: Part) -> Outcome:
    """Run a part in a child process group of its own; past its limit the whole group is killed."""
    with tempfile.TemporaryDirectory(prefix="perf-part-") as scratch:
        answer = Path(scratch) / "answer.json"
        spec = json.dumps({"function": part.function, "arguments": dict(part.arguments), "answer": str(answer)})
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH", "")]))}
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, spec], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, start_new_session=True
        )
        try:
            _, stderr = child.communicate(timeout=part.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return Outcome(outcome="error", reason=f"time limit: no answer within {part.limit_s:g} s; its processes were stopped")
        if child.returncode or not answer.exists():
            last = (stderr or b"").decode(errors="replace").strip().splitlines()[-1:] or ["nothing on stderr"]
            return Outcome(outcome="error", reason=f"exit code {child.returncode}: {last[0]}")
        return Outcome(outcome="measured", value=jsonio.loads(answer.read_bytes()))


def run_parts(
    parts: Sequence[Part], *, state: Path | None = None, processes: int = 1, ray_address: str | None = None
) -> dict[str, Outcome]:
    """Every part by name. Parts finished before, found in `state`, are not measured again.

    Raises:
        HarnessError: two parts of one name, a state folder that cannot be written, or Ray asked for and not there.
    """
    if len({part.name for part in parts}) != len(parts):
        raise HarnessError(f"sweep: got {[part.name for part in parts]}, needs each name once")
    found = {part.name: kept for part in parts if (kept := _kept(part, state)) is not None}
    left = [part for part in parts if part.name not in found]
    if ray_address is not None:
        found |= _on_ray(left, ray_address, state) if left else {}
        return {part.name: found[part.name] for part in parts}
    with ThreadPoolExecutor(max_workers=max(1, processes)) as pool:
        for part, outcome in zip(left, pool.map(lambda p: _keep(p, run_one(p), state), left), strict=True):
            found[part.name] = outcome
    return {part.name: found[part.name] for part in parts}


def _place(part: Part, state: Path) -> Path:
    return state / f"{part.name}-{part.key}.json"


def _kept(part: Part, state: Path | None) -> Outcome | None:
    if state is None or not _place(part, state).exists():
        return None
    try:
        body = jsonio.loads(_place(part, state).read_bytes())
        return Outcome(**body) if body.get("outcome") == "measured" else None
    except (HarnessError, TypeError, AttributeError):
        return None  # a torn file of another program: measure again


def _keep(part: Part, outcome: Outcome, state: Path | None) -> Outcome:
    if state is not None:
        try:
            state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HarnessError(f"sweep: got {error}, needs a writable folder {state}") from error
        write_atomically(_place(part, state), jsonio.dumps(asdict(outcome)).encode() + b"\n")
    return outcome


def _on_ray(parts: Sequence[Part], address: str, state: Path | None) -> dict[str, Outcome]:
    """The same parts as Ray tasks, each kept as soon as it is done. `address` is a cluster's, or "local" for one on this machine.

    Raises:
        HarnessError: Ray is not installed, or there is no cluster at the address.
    """
    try:
        import ray
    except ImportError:
        raise HarnessError("ray: got no package `ray`, needs it for --ray-address; install it or leave the option out") from None
    _refuse_unreachable(address)
    joined = ray.is_initialized()
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises ConnectionError, ValueError, RuntimeError and others, by version
        raise HarnessError(f"ray: got {type(error).__name__}: {error}, needs a running cluster at {address!r} or the word local") from None
    try:
        task = ray.remote(max_retries=0)(run_one)
        waiting = {task.options(name=part.name, num_gpus=part.gpus).remote(part): part for part in parts}
        return {part.name: _keep(part, outcome, state) for part, outcome in _collected(ray, waiting)}
    finally:
        if not joined:
            ray.shutdown()


def _refuse_unreachable(address: str) -> None:
    """Ray itself tries a dead address for minutes. Raises HarnessError for host:port that nothing listens at."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return  # a word of Ray's: local, auto
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_LIMIT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise HarnessError(f"ray: got {error} at {address!r}, needs the host:port of a running cluster, or the word local") from None


def _collected(ray: Any, waiting: dict[Any, Part]) -> Iterator[tuple[Part, Outcome]]:
    """(part, outcome) as tasks end. When no task ends for twice the longest limit, those left are stopped: nothing runs them."""
    left = dict(waiting)
    while left:
        patience_s = 2 * max(part.limit_s for part in left.values())
        done, _ = ray.wait(list(left), num_returns=1, timeout=patience_s)
        for reference in done or list(left):
            part = left.pop(reference)
            try:
                outcome = ray.get(reference, timeout=0 if not done else None)
            except Exception as error:  # a dead worker, a lost node, a timeout: whatever Ray raises is this part's outcome
                outcome = Outcome(outcome="error", reason=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}")
                if not done:
                    ray.cancel(reference, force=True)
            yield part, outcome
