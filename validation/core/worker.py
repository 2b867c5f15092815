"""The isolated process that measures: reads requests, one JSON object a line, and answers each with one line on its own pipe.

Started as `python -m validation.core.worker SETUP`, where SETUP is JSON. Nothing of the candidate is imported before `isolate` has run.
Standard output and error go to a log; the answers have a pipe of their own, so that a printing candidate cannot garble them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kimi_k3_decode.config import Unsupported
from validation.core import jsonio, registry, sandbox, tamper
from validation.core.settings import Settings
from validation.core.types import Case, Check, HarnessError, Measurement, Outcome, Target

FILE_LIMIT_BYTES = 4 << 30
TARGET_PROVIDERS = {"embedded": "validation.targets.engine", "gpu": "validation.targets.engine", "serving": "evals.serving.targets"}


class Targets(Protocol):
    """What a provider module's `open_targets(settings)` returns. `get` may raise HarnessError (bad checkpoint) or Refused."""

    def get(self, role: str) -> Target: ...


class Refused(Exception):
    """A target does not support a case, or a candidate cannot be built for it; `reasons` holds every reason."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


class Tampered(Exception):
    """The candidate changed what measures it; the process is of no more use."""


class Worker:
    """Keeps targets and checks between cases, so that a lane pays for loading them once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._targets: Targets | None = None
        self._checks: dict[tuple[str, str], Check] = {}
        self._untouched: tamper.Snapshot | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Never raises for what a case does; `harness_error` stands for faults of the suite or its inputs."""
        try:
            if request["op"] == "fingerprints":
                return {"fingerprints": {role: self._target(role).fingerprint() for role in request["roles"]}}
            return self._measure(request)
        except Tampered as error:
            return {"outcome": Outcome.ERROR, "reasons": [str(error)], "retire": True}
        except HarnessError as error:
            return {"harness_error": str(error)}
        except (Refused, Unsupported) as refusal:
            return {"outcome": Outcome.REFUSED, "reasons": list(refusal.reasons)}
        except MemoryError as error:
            return {"outcome": Outcome.ERROR, "reasons": [f"out of memory: {error or 'allocation refused'}"]}
        except Exception as error:
            trace = traceback.format_exc(limit=-8)
            print(trace, file=sys.stderr, flush=True)
            return {"outcome": Outcome.ERROR, "reasons": [f"{type(error).__name__}: {error}"], "details": {"traceback": trace}}

    def _target(self, role: str) -> Target:
        if self._targets is None:
            module = importlib.import_module(TARGET_PROVIDERS[self._settings.profile])
            self._targets = module.open_targets(self._settings)
        if role == "candidate" and self._untouched is None:
            self._untouched = tamper.snapshot()  # before its code is imported
        return self._targets.get(role)

    def _measure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        case = jsonio.decode(Case, request["case"], "case")
        check = self._check(request["lane"], request["module"], request["check"])
        known = tamper.snapshot() if "candidate" in check.roles and self._untouched is not None else {}
        self._untouched = {**known, **(self._untouched or {})} if self._untouched is not None else None
        targets = {role: self._target(role) for role in check.roles}
        reasons = [f"{role}: {reason}" for role, target in targets.items() for reason in target.unsupported(case)]
        if reasons:
            raise Refused(tuple(reasons))
        _seed_everything(case.seed)
        started = time.perf_counter()
        measurements, details = check.measure(case, targets)
        seconds = time.perf_counter() - started
        wrong = [repr(m) for m in measurements if not isinstance(m, Measurement)]
        replaced = tamper.replaced(self._untouched) if self._untouched is not None else ()
        if replaced:
            raise Tampered(f"the candidate replaced {', '.join(replaced)}, so nothing measured in this process counts")
        if wrong or not measurements:
            raise TypeError(f"check {check.id}: got {wrong or 'no measurement'}, needs Measurement objects; this is a bug in the lane")
        return {
            "outcome": Outcome.MEASURED,
            "measurements": list(measurements),
            "details": dict(details),
            "fingerprints": {role: target.fingerprint() for role, target in targets.items()},
            "seconds": seconds,
        }

    def _check(self, lane: str, module: str, identity: str) -> Check:
        key = (module, identity)
        if key not in self._checks:
            self._checks[key] = registry.find_check(lane, module, identity)
        return self._checks[key]


def _seed_everything(seed: int) -> None:
    """Checks seed their own generators; this covers what a library draws from global ones."""
    random.seed(seed)
    for name in ("numpy", "torch"):
        module = sys.modules.get(name)
        if module is not None:
            (module.random.seed if name == "numpy" else module.manual_seed)(seed)


def serve(requests: Any, answers: Any, worker: Worker) -> None:
    """Answer until the parent closes its end."""
    for line in requests:
        request = jsonio.loads(line)
        answer = {**worker.answer(request), "token": request["token"]}
        try:
            text = jsonio.dumps(answer)
        except HarnessError as error:  # a check returned something that is no JSON value
            reasons = [f"the check's answer: {error}"]
            text = json.dumps({"outcome": Outcome.ERROR.value, "reasons": reasons, "token": request["token"]})
        answers.write(text + "\n")
        answers.flush()


def main(setup_text: str) -> None:
    setup = json.loads(setup_text)
    scratch = Path(setup["scratch"])
    confined = not setup["network"] and sandbox.confine_children()
    held = sandbox.isolate(scratch=scratch, memory_bytes=setup["memory_bytes"], file_bytes=FILE_LIMIT_BYTES, network=setup["network"])
    held += ["its children end with it"] if confined else []
    settings = jsonio.decode(Settings, setup["settings"], "settings")
    with os.fdopen(setup["answer_fd"], "w", encoding="ascii") as answers:
        answers.write(jsonio.dumps({"isolation": held}) + "\n")
        answers.flush()
        with contextlib.suppress(BrokenPipeError):
            serve(sys.stdin, answers, Worker(settings))


if __name__ == "__main__":
    # By its real name, so that the Refused a lane raises is the Refused caught here.
    importlib.import_module("validation.core.worker").main(sys.argv[1])
