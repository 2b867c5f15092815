"""A sweep: parts measured each in a process of its own, resumed part by part. A part that crashes or hangs is a recorded outcome.

Finished parts lie in `state` as one JSON file each, written beside and renamed. A part that failed is tried again on the next call.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from validation.core import jsonio
from validation.core.settings import PROJECT_ROOT
from validation.core.store import write_atomically
from validation.core.types import HarnessError

CHILD = (
    "import importlib, json, sys; from validation.core import jsonio; spec = json.loads(sys.argv[1]); "
    "module, _, name = spec['function'].partition(':'); value = getattr(importlib.import_module(module), name)(**spec['arguments']); "
    "open(spec['answer'], 'w').write(jsonio.dumps(value))"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One unit of a sweep: `function` is `module:name`, called with JSON arguments, answering a JSON value within `limit_s`."""

    name: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 120.0

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
        return found | _on_ray(left, ray_address, state)
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
    """The same parts as Ray tasks; a lost worker costs its part only."""
    try:
        import ray
    except ImportError:
        raise HarnessError("ray: got no package `ray`, needs it for --ray-address; install it or leave the option out") from None
    ray.init(address=address, ignore_reinit_error=True)
    task = ray.remote(run_one)
    waiting = {part.name: (part, task.remote(part)) for part in parts}
    found = {}
    for name, (part, reference) in waiting.items():
        try:
            outcome = ray.get(reference, timeout=2 * part.limit_s)
        except Exception as error:  # a dead worker, a lost node, a timeout: whatever Ray raises is this part's outcome
            outcome = Outcome(outcome="error", reason=f"{type(error).__name__}: {error}")
        found[name] = _keep(part, outcome, state)
    return found
