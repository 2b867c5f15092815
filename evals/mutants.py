"""Faults in an evaluation itself: tables of answers, corrupted as real harnesses were, that the gate must not let pass.

The subject is a pair of scripted answer tables over 600 items on which both paths answer alike, apart from the fault; the rule is the real
gate with the policy's limits. A gate that says "not proven" does not pass either, and counts as a kill where a claim is required.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from validation.mutants.model import EVAL, Breach, Mutant, Seen, Trial

if TYPE_CHECKING:
    import pandas as pd

SUITE = "gsm8k_nano"
CHECK = f"evals.gate.{SUITE}"
ITEMS = 600
ACCURACY = 0.8
SEED_FLIPS = 0.02  # share of items that an honest second path answers otherwise, in either direction alike

Change = Callable[["pd.DataFrame", "pd.DataFrame"], tuple["pd.DataFrame", "pd.DataFrame"]]


def _unit(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big") / 2**48


def answers(path: str, seed: int = 0) -> pd.DataFrame:
    """One path's scripted answers with the columns the gate reads."""
    import pandas as pd

    rows = []
    for number in range(ITEMS):
        right = _unit("right", seed, number) < ACCURACY
        if path == "candidate" and _unit("flip", seed, number) < SEED_FLIPS:
            right = _unit("toss", seed, number) < 0.5
        text = f" Step {number}: {number * 17} plus {number % 7}.\n#### {number if right else -number}"
        rows.append(
            {
                "item": f"{number:05d}",
                "repeat": 0,
                "cluster": f"{number:05d}",
                "level": "",
                "prompt_hash": f"p{number}",
                "score": float(right),
                "tokens": len(text),
                "truncated": False,
                "text": text,
                "finish_reason": "stop",
                "path_share": 1.0 if path == "candidate" else float("nan"),
            }
        )
    return pd.DataFrame(rows)


# ---- faults ----
def _honest(stock: pd.DataFrame, candidate: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    return stock, candidate


def _truncated(stock: pd.DataFrame, candidate: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One reply in eight is cut off; those that had their answer early still score."""
    cut = candidate.index % 8 == 0
    candidate.loc[cut, ["truncated", "finish_reason"]] = [True, "length"]
    return stock, candidate


def _first_items(stock: pd.DataFrame, candidate: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Only the first 40 items of the file are asked."""
    return stock.head(40).copy(), candidate.head(40).copy()


def _lost(stock: pd.DataFrame, candidate: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Failed requests are left out of the candidate's table instead of counting as wrong."""
    return stock, candidate[(candidate["score"] == 1.0) | (candidate.index % 4 != 0)].copy()


def _swapped(stock: pd.DataFrame, candidate: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Replies of neighbours in a batch trade places, both of them right answers to another question."""
    for first in range(0, ITEMS, 40):
        pair = [first, first + 1]
        candidate.loc[pair, ["text", "score"]] = stock.loc[pair[::-1], ["text", "score"]].to_numpy()
    return stock, candidate


def _other_cache(stock: pd.DataFrame, candidate: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The candidate's replies come from stock's cache: equal to the letter, and no step of the candidate ran."""
    copied = stock.copy()
    copied["path_share"] = 0.0
    return stock, copied


def _quiet_drop(stock: pd.DataFrame, candidate: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One right answer in twenty becomes wrong: more than the margin, less than the eye sees."""
    drop = (candidate["score"] == 1.0) & (candidate.index % 20 == 3)
    candidate.loc[drop, "score"] = 0.0
    return stock, candidate


def _other_prompts(stock: pd.DataFrame, candidate: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The two sides were asked with different templates."""
    candidate["prompt_hash"] = candidate["prompt_hash"] + "'"
    return stock, candidate


def _longer(stock: pd.DataFrame, candidate: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Replies ramble on after the answer."""
    candidate["tokens"] = (candidate["tokens"] * 1.3).astype(int)
    return stock, candidate


def _trial(change: Change, seed: int = 0) -> Trial:
    def trial(targets: Mapping[str, Any]) -> Seen:
        from evals.gate import judge_suite
        from evals.limits import limits_of
        from evals.measurements import measurements_of
        from evals.pairing import pair_answers
        from evals.policy import suite_policy
        from validation.policy import load_policy

        stock, candidate = change(answers("stock", seed), answers("candidate", seed))
        pairs = pair_answers(SUITE, stock, candidate)
        policy = suite_policy(SUITE, load_policy(), 4)
        gate = judge_suite(pairs, policy)
        found: dict[str, float] = {m.name: m.value for m in measurements_of(gate, pairs)}
        breaches = tuple(
            Breach(check=CHECK, case=SUITE, measurement=limit.measurement, value=found.get(limit.measurement),
                   rule=f"{limit.op} {limit.bound:g} {limit.unit}" + ("" if limit.measurement in found else " (not proven)"))
            for limit in limits_of(policy)
            if limit.measurement not in found or not limit.holds(found[limit.measurement])
        )  # fmt: skip
        return Seen(check=CHECK, cases=1, breaches=breaches)

    return trial


def decode_gate(targets: Mapping[str, Any], rows: int, seed: int) -> Seen:
    """What the gate says after both paths decoded `rows` items of the suite: limits it holds to be violated, not those left unproven.

    With fewer items than the policy asks for, an open question stays open, so this tells only whether the harm is plain to see.
    """
    from evals.checks import open_session, run_case
    from evals.limits import limits_of
    from evals.measurements import measurements_of
    from evals.policy import suite_policy
    from validation.core.types import Case
    from validation.policy import load_policy

    case = Case(subject=SUITE, params={"rows": rows}, seed=seed)
    with open_session(targets, case) as session:
        result = run_case(case, session, targets)
    found = {m.name: m.value for m in measurements_of(result.gate, result.pairs)}
    breaches = tuple(
        Breach(check=CHECK, case=f"{SUITE}-rows{rows}", measurement=limit.measurement, value=found[limit.measurement],
               rule=f"{limit.op} {limit.bound:g} {limit.unit}")
        for limit in limits_of(suite_policy(SUITE, load_policy(), 4))
        if limit.measurement in found and not limit.measurement.startswith("stock_") and not limit.holds(found[limit.measurement])
    )  # fmt: skip
    return Seen(check=CHECK, cases=result.gate.n_items, breaches=breaches)


FAULTS: Mapping[str, tuple[str, str, Change]] = {
    "eval_truncated": ("F24", "answers are cut off", _truncated),
    "eval_first_items": ("F24", "only the first items are asked", _first_items),
    "eval_lost_requests": ("F24", "failed requests are left out", _lost),
    "eval_swapped": ("F24", "answers of two requests trade places", _swapped),
    "eval_other_cache": ("F18", "the candidate answers from stock's cache", _other_cache),
    "eval_quiet_drop": ("F24", "a drop just above the margin", _quiet_drop),
    "eval_other_prompts": ("F24", "the sides were asked differently", _other_prompts),
    "eval_longer": ("F24", "replies ramble on", _longer),
}


def mutants() -> list[Mutant]:
    """The evals' own mutants, and the same tables unharmed as controls."""
    found = [
        Mutant(id=name, fault=fault, kind=EVAL, sentence=sentence, claim="C-EVAL-1", killed_by=CHECK, trial=_trial(change))
        for name, (fault, sentence, change) in FAULTS.items()
    ]
    controls = [
        Mutant(id=f"control_eval_{seed}", fault="-", kind=EVAL, sentence="both paths answer alike", claim="C-EVAL-1", killed_by="",
               control=True, trial=_trial(_honest, seed))
        for seed in range(3)
    ]  # fmt: skip
    return [*found, *controls]
