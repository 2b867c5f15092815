"""Faults in a speed: what the perf lane must not let into a report. Each lies near the limit of the policy that it meets.

A trial here is the lane's own code on a planted subject or on planted times; nothing is timed for its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from validation.mutants.model import TIMING, Breach, Mutant, Seen, Trial

CLAIM = "C-PERF-2"
LAUNCHES_US = {"attn_res": 5.0, "in_proj": 23.0, "kda": 7.0, "o_proj": 8.0, "experts_up": 15.0, "experts_down": 10.0}
SLOWER = 1.05  # of one launch; the policy allows 3 % of a cell
REPLAYS = 40
ASKED_LENGTH, REALISED_LENGTH = 6.0, 5.8
# A kernel whose error is 1.6 times that of the BF16 reference; the policy allows 1.5.
WRONG_ERRORS = {"y": {"kernel": 1.6e-2, "reference": 1.0e-2}}


def _seen(check: str, case: str, reasons: list[str], rule: str) -> Seen:
    breaches = tuple(Breach(check=check, case=case, measurement=reason[:160], value=1.0, rule=rule) for reason in reasons)
    return Seen(check=check, cases=1, breaches=breaches)


def _subject(name: str) -> Trial:
    def trial(targets: Mapping[str, Any]) -> Seen:
        from perf import cheats
        from perf.adversary import Subject, Workload, compare

        work = Workload(inputs=cheats.inputs, oracle=cheats.oracle, error_limit=cheats.ERROR_LIMIT)
        with Subject("stock", "perf.cheats:honest", {}) as stock, Subject("candidate", f"perf.cheats:{name}", {}) as candidate:
            found = compare(stock, candidate, work, pairs=4, warm_ups=2)
        return _seen("perf.cpu_engine", name, list(found.reasons), "objections == 0")

    return trial


def _times(seed: int, slow: str = "") -> dict[str, Any]:
    from perf.compare import Times

    rng = np.random.default_rng(seed)
    return {
        name: Times(samples=tuple(us * (SLOWER if name == slow else 1.0) * rng.lognormal(0, 0.01, REPLAYS)), evidence="planted")
        for name, us in LAUNCHES_US.items()
    }


def _slower(launch: str) -> Trial:
    def trial(targets: Mapping[str, Any]) -> Seen:
        from perf.compare import compare_times
        from validation.policy import load_policy

        found = compare_times(_times(1), _times(2, launch), load_policy().limit("perf", "slowdown_max"))
        return _seen("perf.compare", launch or "equal", [f"{c.cell}: {c.ratio:.3f}" for c in found.slower], f"<= {1 + found.margin:g}")

    return trial


def _length_overstated(targets: Mapping[str, Any]) -> Seen:
    from perf.matrix import realised_acceptance_problem
    from validation.policy import load_policy

    problem = realised_acceptance_problem(ASKED_LENGTH, REALISED_LENGTH, load_policy().limit("perf", "acceptance_length_tolerance"))
    return _seen("perf.acceptance", f"al{ASKED_LENGTH:g}", [problem] if problem else [], "no problem")


def _speed_of_a_wrong_kernel(targets: Mapping[str, Any]) -> Seen:
    from perf.published import KernelCheck, correctness_reasons, passes
    from validation.policy import load_policy

    passed = passes({"errors": WRONG_ERRORS}, load_policy().limit("numerics", "error_ratio"))
    check = KernelCheck(kernel="k", digest="d", evidence="planted", passed=passed, stale=False)
    _, reasons = correctness_reasons([("in_proj", "k")], {"kernels/in_proj": "d"}, [check])
    return _seen("perf.layer", "in_proj", list(reasons), "a passing correctness record")


def mutants() -> list[Mutant]:
    """The lane's mutants and their honest twins."""

    def one(identity: str, fault: str, sentence: str, killed_by: str, trial: Trial) -> Mutant:
        return Mutant(id=identity, fault=fault, kind=TIMING, sentence=sentence, claim=CLAIM, killed_by=killed_by,
                      control=not killed_by, trial=trial)  # fmt: skip

    return [
        one("speed_of_cached_replies", "F18", "the timed subject answers from what it kept", "perf.cpu_engine", _subject("cached")),
        one("speed_launch_slower", "F22", "one launch is 5 % slower than the base", "perf.compare", _slower("kda")),
        one("speed_length_overstated", "F19", "the realised acceptance length is 3 % off", "perf.acceptance", _length_overstated),
        one("speed_of_a_wrong_kernel", "speed", "a time of a kernel that is not correct", "perf.layer", _speed_of_a_wrong_kernel),
        one("control_speed_honest", "-", "an honest subject against itself", "", _subject("honest")),
        one("control_speed_equal", "-", "the same launches timed twice", "", _slower("")),
    ]
