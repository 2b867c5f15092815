"""Runs planned cases in isolated workers and turns whatever happens into one evidence record each.

A worker serves a whole lane; when it crashes, hangs or runs out of memory, that case becomes an `error` record and the next case gets a
fresh worker. Records are written by the parent only. Lanes run side by side, each in a thread that waits for its worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from validation.core import jsonio, sandbox
from validation.core.registry import PlannedCase
from validation.core.settings import GIB, PROJECT_ROOT, Settings
from validation.core.store import EvidenceStore
from validation.core.types import Evidence, HarnessError, Measurement, Outcome

START_LIMIT_S = 120.0
ANSWER_LIMIT_BYTES = 256 << 20
LOG_TAIL_LINES = 15
DEATH_WAIT_S = 5.0


def physical_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _keys(settings: Settings) -> dict[str, str]:
    """The variables that hold the keys of servers, named in the settings: nothing else of the environment is passed on."""
    sides = [settings.serving.get(side, {}) for side in ("baseline", "candidate")]
    names = [str(side["api_key_env"]) for side in sides if side.get("api_key_env")]
    return {name: os.environ[name] for name in names if name in os.environ}


class WorkerDied(Exception):
    """The worker gave no answer; `reason` says why in words."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class WorkerProcess:
    """One isolated child with its own process group. `ask` is strictly one request, one answer."""

    def __init__(self, settings: Settings, scratch: Path, memory_bytes: int) -> None:
        self.scratch = scratch
        (scratch / "artifacts").mkdir(parents=True, exist_ok=True)
        self._log = scratch / "worker.log"
        self._buffer = bytearray()
        read_fd, write_fd = os.pipe()
        setup = {
            "scratch": str(scratch),
            # Drivers reserve host memory far beyond what is used, so outside the embedded profile the machine is the limit.
            "memory_bytes": memory_bytes if settings.profile == "embedded" else max(memory_bytes, physical_memory_bytes()),
            "network": settings.profile != "embedded",
            "answer_fd": write_fd,
            "settings": jsonio.plain(settings),
        }
        python_path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH", "")]))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "validation.core.worker", json.dumps(setup)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=scratch,
                env={**sandbox.worker_environment(scratch, python_path, os.environ), **_keys(settings)},
                pass_fds=(write_fd,),
                start_new_session=True,
            )
        os.close(write_fd)
        self._read_fd = read_fd
        try:
            self.isolation = tuple(self._answer(START_LIMIT_S).get("isolation", ()))
        except WorkerDied as death:
            raise HarnessError(f"worker: got {death.reason} at its start, needs a working Python environment; run `make setup`") from death

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Raises WorkerDied when the worker crashes, or does not answer in time (it is then stopped)."""
        assert self._process.stdin is not None  # opened as a pipe above
        token = secrets.token_hex(16)
        try:
            self._process.stdin.write(jsonio.dumps({**request, "token": token}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerDied(self._post_mortem("was gone before the case", ended=True)) from error
        answer = self._answer(limit_s)
        if answer.pop("token", None) != token or self._buffer:
            raise WorkerDied(self._post_mortem("sent an answer that nobody asked for"))
        return answer

    def _answer(self, limit_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._read_fd, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.stop()
                    raise WorkerDied(f"time limit: no answer within {limit_s:g} s; the worker was stopped")
                block = os.read(self._read_fd, 1 << 20)
                if not block or len(self._buffer) > ANSWER_LIMIT_BYTES:
                    raise WorkerDied(self._post_mortem("died" if not block else "sent an answer that is too long", ended=not block))
                self._buffer += block
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        try:
            answer = jsonio.loads(line)
        except HarnessError as error:
            raise WorkerDied(self._post_mortem("sent an answer that is not JSON")) from error
        if not isinstance(answer, dict):
            raise WorkerDied(self._post_mortem("sent an answer that is no object"))
        return answer

    def _post_mortem(self, what: str, *, ended: bool = False) -> str:
        if ended:  # by itself: let the process tell how
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(DEATH_WAIT_S)
        self.stop()
        code = self._process.returncode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        tail = self.log_tail()
        return f"the worker {what} ({how})" + (f"; its last words: {tail}" if tail else "")

    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return " | ".join(self._log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:])
        return ""

    def kill(self) -> None:
        """End the worker's whole process group; safe from another thread. The thread that waits for an answer then sees the end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End the worker's whole process group, wait for it and close the pipes; only from the thread that uses the worker."""
        if self._read_fd >= 0:
            self.kill()
            self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self._read_fd >= 0:
            os.close(self._read_fd)
            self._read_fd = -1


class Progress:
    """What a run tells while it works. This one is silent; `validation.core.progress` has the ones that speak."""

    def lane_started(self, lane: str, done: int, total: int) -> None: ...

    def case_started(self, lane: str, case: PlannedCase) -> None: ...

    def recorded(self, lane: str, record: Evidence) -> None: ...


class Runner:
    """Measures the planned cases that `store` does not hold yet. Raises HarnessError (nothing more is measured then)."""

    def __init__(self, settings: Settings, store: EvidenceStore, scratch: Path, progress: Progress) -> None:
        self._settings = settings
        self._store = store
        self._scratch = scratch
        self._progress = progress
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._workers: set[WorkerProcess] = set()
        self.isolation: tuple[str, ...] = ()

    def run(self, planned: Sequence[PlannedCase]) -> None:
        """Measure lane by lane, `jobs` lanes at a time. On an interrupt the workers are stopped and KeyboardInterrupt goes on."""
        lanes: dict[str, list[PlannedCase]] = {}
        for item in planned:
            lanes.setdefault(item.lane, []).append(item)
        # On a GPU or a server one lane at a time: a neighbour would show in every timing, and ask for the other side's server.
        jobs = 1 if self._settings.profile in ("gpu", "serving") else max(1, min(self._settings.jobs, len(lanes)))
        # The kernel's limit counts what is reserved, touched or not, so each worker gets all of it; what is used together is less.
        memory_bytes = int(self._settings.memory_gib * GIB)
        with ThreadPoolExecutor(max_workers=jobs) as pool:
            futures = [pool.submit(self._run_lane, lane, items, memory_bytes) for lane, items in lanes.items()]
            try:
                finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in finished:
                    future.result()
            except BaseException:
                self._stop_everything()
                raise

    def _stop_everything(self) -> None:
        self._stopping.set()
        with self._lock:
            for worker in self._workers:
                worker.kill()

    def _run_lane(self, lane: str, planned: Sequence[PlannedCase], memory_bytes: int) -> None:
        left = [item for item in planned if (item.check, item.case.id, 0) not in self._store.keys]
        self._progress.lane_started(lane, len(planned) - len(left), len(planned))
        worker: WorkerProcess | None = None
        try:
            for item in left:
                if self._stopping.is_set():
                    return
                self._progress.case_started(lane, item)
                worker, answer = self._measure(worker, item, memory_bytes)
                if self._stopping.is_set():
                    return
                self._record(item, answer)
        except BaseException:
            self._stopping.set()  # a fatal error in one lane ends the others after the case at hand
            raise
        finally:
            if worker is not None:
                self._retire(worker)

    def _measure(self, worker: WorkerProcess | None, item: PlannedCase, memory_bytes: int) -> tuple[WorkerProcess | None, dict[str, Any]]:
        """One case; returns the worker to go on with (None: it died) and the answer."""
        request = {"op": "measure", "lane": item.lane, "module": item.module, "check": item.check, "case": item.case}
        started = time.monotonic()
        try:
            if worker is None:
                worker = self._start(item.lane, memory_bytes)
            answer = worker.ask(request, item.time_limit_s)
            if answer.pop("retire", False):
                self._retire(worker)
                return None, answer
            return worker, answer
        except WorkerDied as death:
            if worker is not None:
                self._retire(worker)
            return None, {"outcome": Outcome.ERROR, "reasons": [death.reason], "seconds": time.monotonic() - started}

    def _start(self, lane: str, memory_bytes: int) -> WorkerProcess:
        worker = WorkerProcess(self._settings, self._scratch / lane, memory_bytes)
        with self._lock:
            self._workers.add(worker)
            self.isolation = worker.isolation
            if self._stopping.is_set():  # the interrupt came while it was starting
                worker.kill()
        return worker

    def _retire(self, worker: WorkerProcess) -> None:
        worker.stop()
        with self._lock:
            self._workers.discard(worker)

    def _record(self, item: PlannedCase, answer: dict[str, Any]) -> None:
        if "harness_error" in answer:
            raise HarnessError(str(answer["harness_error"]))
        record = evidence_from_answer(item, answer)
        with self._lock:
            artifacts = self._collect_artifacts(item)
            record = self._store.append(dataclasses.replace(record, artifacts=artifacts))
            self._progress.recorded(item.lane, record)

    def _collect_artifacts(self, item: PlannedCase) -> dict[str, str]:
        """Move what the worker left into the run; only regular files, never links, count."""
        folder = self._scratch / item.lane / "artifacts"
        found = {}
        for path in sorted(folder.rglob("*")):
            if stat.S_ISREG(path.lstat().st_mode):
                name = f"{item.check}/{item.case.id}/{path.relative_to(folder).as_posix()}"
                relative, digest = self._store.add_artifact(path, name)
                found[relative] = digest
        if found:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        return found


def evidence_from_answer(item: PlannedCase, answer: dict[str, Any]) -> Evidence:
    """A record (not yet chained) from a worker's answer. An answer of the wrong form, which only hostile code sends, is an error record."""
    try:
        return Evidence(
            id="",
            run="",
            check=item.check,
            case=item.case,
            outcome=jsonio.decode(Outcome, answer.get("outcome"), "outcome"),
            measurements=jsonio.decode(tuple[Measurement, ...], answer.get("measurements", []), "measurements"),
            fingerprints=jsonio.decode(dict[str, str], answer.get("fingerprints", {}), "fingerprints"),
            reasons=jsonio.decode(tuple[str, ...], answer.get("reasons", []), "reasons"),
            details=jsonio.decode(dict[str, Any], answer.get("details", {}), "details"),
            seconds=jsonio.decode(float, answer.get("seconds", 0.0), "seconds"),
        )
    except HarnessError as error:
        reasons = (f"the worker's answer has the wrong form: {error}",)
        return Evidence(id="", run="", check=item.check, case=item.case, outcome=Outcome.ERROR, reasons=reasons)


def ask_fingerprints(
    settings: Settings, scratch: Path, roles: Sequence[str], progress: Callable[[str], None]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Load the targets once in a worker, before a run folder exists: a broken checkpoint ends here. Raises HarnessError.

    Returns role -> fingerprint, and how workers are isolated on this machine. A candidate that cannot be built keeps the run going: its
    fingerprint says so, and its cases become refused or error records.
    """
    found: dict[str, str] = {}
    worker = WorkerProcess(settings, scratch, int(settings.memory_gib * GIB))
    isolation = worker.isolation
    try:
        # The candidate comes last: where it takes the worker down, the others have been loaded.
        for role in sorted(roles, key=lambda name: (name == "candidate", name)):
            progress(f"loading {role}")
            answer = worker.ask({"op": "fingerprints", "roles": [role]}, START_LIMIT_S)
            if "harness_error" in answer:
                raise HarnessError(str(answer["harness_error"]))
            reasons = "; ".join(map(str, answer.get("reasons", ["no answer"])))
            if "fingerprints" not in answer and role != "candidate":
                raise HarnessError(f"{role}: got {reasons}, needs a target that loads")
            found |= answer.get("fingerprints", {role: f"none: {reasons}"})
    except WorkerDied as death:
        if role != "candidate":
            raise HarnessError(f"{role}: got {death.reason} while loading, needs a target that loads") from death
        found[role] = f"none: {death.reason}"
    finally:
        worker.stop()
    return found, isolation
