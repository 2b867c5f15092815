"""Timing that a candidate cannot talk into a better number: each side in its own process, every reply checked, the clock in the parent.

    stock, candidate, candidate, stock, ...   (ABBA) on fresh inputs each time; the reply's bytes are complete when the clock stops

What is caught, and how: a subject that answers from a cache or replays an old result is wrong on fresh inputs; one that computes lazily
or only the rows it expects to be checked is wrong on the rows drawn here; NaN is never close to anything; work left running after the
reply shows as demand for a processor while the process should be idle; a patched clock saw less time than the processor did; changed
inputs are reported; a subject that behaves during warm-up only is judged on the timed replies. Device-wide settings (persisting L2) are
read before and after by `device_state`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from perf.stats import Interval, median_interval, paired_ratio
from perf.subject import Arrays, receive, send
from validation.core.types import HarnessError

_clock = time.perf_counter  # bound here, before any subject is loaded anywhere
IDLE_WATCH_S = 0.08
IDLE_SHARE_MAX = 0.25  # of the time, while the subject should be waiting
CLOCK_FACTOR_MAX = 2.0  # processor time over the time a child reports; above it its clock does not tell the time
START_LIMIT_S = 120.0

DeviceState = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What both sides are asked: `inputs(seed)` fresh each time, `oracle(inputs)` in high precision, and how close a reply must be.

    `error_limit` bounds ||out - ref|| / ||ref|| per checked row, for each output; rows are the first axis. `requests`: how many belong
    together, such as the turns of a conversation; each of them is then asked of stock first every other time.
    """

    inputs: Callable[[int], Arrays]
    oracle: Callable[[Arrays], Arrays]
    error_limit: float
    rows_checked: int = 4
    requests: int = 1


@dataclass(frozen=True, kw_only=True)
class Side:
    """One subject's timed replies: microseconds seen by the parent, and every reason not to believe them."""

    name: str
    samples_us: tuple[float, ...]
    objections: tuple[str, ...]
    worst_error: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    stock: Side
    candidate: Side
    outcome: str  # measured | refused
    reasons: tuple[str, ...] = field(default_factory=tuple)

    @property
    def speed_up(self) -> Interval:
        """Median of stock over candidate, pair by pair. Raises HarnessError when a side is not to be believed."""
        if self.outcome != "measured":
            raise HarnessError("speed-up: got no trustworthy measurement: " + "; ".join(self.reasons))
        return paired_ratio(self.stock.samples_us, self.candidate.samples_us)


class Subject:
    """A running child. Use as a context manager; leaving kills its whole process group."""

    def __init__(self, name: str, factory: str, config: Mapping[str, Any], *, limit_s: float = 60.0) -> None:
        self.name, self.limit_s = name, limit_s
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "perf.subject", str(theirs.fileno()), factory, json.dumps(config)]
        keep = ("PATH", "HOME", "LANG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
        environment = {key: os.environ[key] for key in keep if key in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)])
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        theirs.close()
        self.channel = ours

    def __enter__(self) -> Subject:
        self.channel.settimeout(START_LIMIT_S)
        try:
            receive(self.channel)
        except (EOFError, ValueError, OSError) as error:
            stderr = self._stop()
            raise HarnessError(
                f"subject {self.name}: got {error or 'no answer'} while it loaded, needs a working factory; {stderr}"
            ) from None
        self.channel.settimeout(self.limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> str:
        with contextlib.suppress(OSError):
            self.channel.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        _, stderr = self.process.communicate()
        lines = (stderr or b"").decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing on stderr"

    def ask(self, inputs: Arrays) -> tuple[float, dict[str, Any], dict[str, np.ndarray]]:
        """(microseconds until the last byte of the reply, the reply's header, outputs). Raises HarnessError when it hangs or dies."""
        began = _clock()
        try:
            send(self.channel, {}, inputs)
            body, outputs = receive(self.channel)
        except (EOFError, ValueError, OSError, KeyError, TypeError) as error:
            raise HarnessError(
                f"subject {self.name}: got {type(error).__name__}: {error}, needs an answer within {self.limit_s} s"
            ) from None
        return 1e6 * (_clock() - began), body, outputs

    def demand_s(self) -> tuple[float, float]:
        """(processor seconds used, seconds spent waiting for a processor) of every living thread in the child's session.

        Waiting counts as demand: on a crowded machine work left running is mostly that. Source: /proc/PID/task/TID/schedstat.
        """
        used = waited = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int(stat.read_text().rsplit(")", 1)[1].split()[3]) != self.process.pid:
                    continue
                for schedstat in stat.parent.glob("task/*/schedstat"):
                    run_ns, wait_ns, _ = schedstat.read_text().split()
                    used, waited = used + int(run_ns), waited + int(wait_ns)
        return 1e-9 * used, 1e-9 * waited

    def idle_share(self) -> float:
        """Share of the time in which some thread ran or wanted to, while no request is open."""
        before, began = sum(self.demand_s()), _clock()
        time.sleep(IDLE_WATCH_S)
        return (sum(self.demand_s()) - before) / (_clock() - began)


def row_errors(outputs: Arrays, reference: Arrays, rows: Sequence[int]) -> dict[str, float]:
    """Relative error per output over `rows`, the largest row; a missing output, another shape or a NaN is infinite."""
    found = {}
    for name, expected in reference.items():
        got = outputs.get(name)
        if got is None or got.shape != expected.shape:
            found[name] = float("inf")
            continue
        worst = 0.0
        for row in rows:
            a, b = np.asarray(got[row], dtype=np.float64), np.asarray(expected[row], dtype=np.float64)
            error = float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))
            worst = error if not error <= worst else worst
        found[name] = float("inf") if worst != worst else worst
    return found


class _Watch:
    """Collects one side's samples and objections."""

    def __init__(self, subject: Subject, workload: Workload, rng: np.random.Generator) -> None:
        self.subject, self.workload, self.rng = subject, workload, rng
        self.samples: list[float] = []
        self.claimed_s = self.used_s = 0.0
        self.objections: dict[str, str] = {}
        self.worst = 0.0

    def timed(self, inputs: Arrays, reference: Arrays) -> None:
        before, _ = self.subject.demand_s()
        microseconds, body, outputs = self.subject.ask(inputs)
        self.used_s += self.subject.demand_s()[0] - before
        self.samples.append(microseconds)
        own = body.get("own_us")
        self.claimed_s += 1e-6 * own if isinstance(own, int | float) and not isinstance(own, bool) else float("nan")
        if body.get("changed_inputs"):
            self.objections["inputs"] = f"it changed its inputs {body['changed_inputs']}"
        n_rows = next(iter(reference.values())).shape[0]
        rows = self.rng.choice(n_rows, size=min(self.workload.rows_checked, n_rows), replace=False)
        for name, error in row_errors(outputs, reference, [int(row) for row in rows]).items():
            self.worst = max(self.worst, error)
            if not error <= self.workload.error_limit:
                self.objections["outputs"] = (
                    f"output {name} was off by {error:.3g} in a timed reply, needs <= {self.workload.error_limit:g}"
                )

    def side(self, idle_shares: Sequence[float]) -> Side:
        idle = float(np.median(idle_shares)) if idle_shares else 0.0
        if idle > IDLE_SHARE_MAX:
            self.objections["background"] = f"it kept {idle:.0%} of a core busy after its replies: work was left running"
        threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
        if not self.used_s <= CLOCK_FACTOR_MAX * threads * self.claimed_s:
            self.objections["clock"] = f"its clock saw {self.claimed_s:.3g} s of {self.used_s:.3g} s of work: the timer was changed"
        return Side(
            name=self.subject.name, samples_us=tuple(self.samples), objections=tuple(self.objections.values()), worst_error=self.worst
        )


def compare(
    stock: Subject,
    candidate: Subject,
    workload: Workload,
    *,
    pairs: int = 20,
    warm_ups: int = 3,
    seed: int = 0,
    device_state: DeviceState | None = None,
) -> Comparison:
    """Time two running subjects against each other on `pairs` fresh inputs, in ABBA order.

    Raises:
        HarnessError: a subject died or hung; the caller records it as an error of its cell.
    """
    rng = np.random.default_rng(seed)
    before = dict(device_state()) if device_state else {}  # before the warm-up, in which a subject may already change it
    for number in range(warm_ups):
        inputs = workload.inputs(int(rng.integers(1 << 62)) + number)
        for subject in (stock, candidate):
            subject.ask(inputs)
    watches = {"stock": _Watch(stock, workload, rng), "candidate": _Watch(candidate, workload, rng)}
    idle: dict[str, list[float]] = {"stock": [], "candidate": []}
    for number in range(pairs):
        inputs = workload.inputs(int(rng.integers(1 << 62)))
        reference = workload.oracle(inputs)
        for name in ("stock", "candidate") if sum(divmod(number, workload.requests)) % 2 == 0 else ("candidate", "stock"):
            watches[name].timed(inputs, reference)
            if number % 5 == 0:
                idle[name].append(watches[name].subject.idle_share())
    after = dict(device_state()) if device_state else {}
    sides = {name: watch.side(idle[name]) for name, watch in watches.items()}
    reasons = [f"{side.name}: {objection}" for side in sides.values() for objection in side.objections]
    reasons += [f"device: {key} went from {before[key]!r} to {after.get(key)!r}" for key in before if before[key] != after.get(key)]
    return Comparison(
        stock=sides["stock"], candidate=sides["candidate"], outcome="refused" if reasons else "measured", reasons=tuple(reasons)
    )


def summary(comparison: Comparison) -> dict[str, Any]:
    """JSON-ready numbers of one comparison; the speed-up is absent when it is refused."""
    made: dict[str, Any] = {"outcome": comparison.outcome, "reasons": list(comparison.reasons)}
    for side in (comparison.stock, comparison.candidate):
        middle = median_interval(side.samples_us)
        made[side.name] = {"median_us": middle.value, "low_us": middle.low, "high_us": middle.high, "worst_error": side.worst_error}
    if comparison.outcome == "measured":
        ratio = comparison.speed_up
        made["speed_up"] = {"value": ratio.value, "low": ratio.low, "high": ratio.high, "pairs": ratio.n}
    return made
