"""A suite's gate as measurements of the run, for the limits of `evals.limits`: what the judge sees.

Two kinds of measurement. *Reported* ones are always there and have no limit. *Deciding* ones carry the limits, and are left out when the
question they answer is open: a limit without its measurement is missing evidence, so the claim becomes `not_proven` instead of failing a
candidate for the suite's own weakness. Applying the limits gives exactly the gate's status (tested).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from evals.gate import FamilyGate, SuiteGate
from evals.pairing import PairedAnswers
from evals.stats.paired import paired_item_differences
from validation.core.types import Measurement

SHOWN_FLIPS = 12
SHOWN_CHARACTERS = 400


def measurements_of(gate: SuiteGate, pairs: PairedAnswers) -> tuple[Measurement, ...]:
    """Reported and deciding measurements of one suite."""
    differences = paired_item_differences(pairs.stock, pairs.candidate)
    samples = tuple(float(d) for d in differences if not math.isnan(d))
    reported = [
        ("score_stock", gate.stock.mean, "share", ()),
        ("score_candidate", gate.candidate.mean, "share", ()),
        ("score_stock_se", gate.stock.se, "share", ()),
        ("score_candidate_se", gate.candidate.se, "share", ()),
        ("difference", gate.difference.mean, "share", samples),
        ("difference_se", gate.difference.se, "share", ()),
        ("difference_se_adjusted", gate.difference.se_adjusted, "share", ()),
        ("one_se_ratio", gate.one_se.ratio, "standard errors", ()),
        ("lower_bound", gate.non_inferiority.lower, "share", ()),
        ("upper_bound", gate.non_inferiority.upper, "share", ()),
        ("p_non_inferiority", gate.non_inferiority.p_value, "1", ()),
        ("p_drop", gate.p_drop, "1", ()),
        ("smallest_detectable_drop", gate.detectable_drop, "share", ()),
        ("truncated_share_stock", gate.truncated_stock, "share", ()),
        ("truncated_share_candidate", gate.truncated_candidate, "share", ()),
        ("items", gate.n_items, "count", ()),
        ("repeats", gate.n_repeats, "count", ()),
        ("looks", gate.looks, "count", ()),
        ("prompts_that_differ", gate.prompts_differ, "count", ()),
    ]
    if gate.mcnemar is not None:
        reported += [("flips_to_wrong", gate.mcnemar.worse, "count", ()), ("flips_to_right", gate.mcnemar.better, "count", ())]
        reported += [("p_mcnemar", gate.mcnemar.p_two_sided, "1", ())]
    made = [Measurement(name=name, value=float(value), unit=unit, samples=values) for name, value, unit, values in reported]
    return (*made, *deciding(gate), *_proof_of_path(pairs))


def _proof_of_path(pairs: PairedAnswers) -> tuple[Measurement, ...]:
    """Mean share of decode rows on the candidate path over its replies; absent where the engine does not say."""
    if "path_share_candidate" not in pairs.table.columns:
        return ()
    shares = pairs.table.loc[pairs.table["outcome"] == "paired", "path_share_candidate"]
    if not len(shares) or shares.isna().any():
        return ()
    return (Measurement(name="path_share", value=float(shares.mean()), unit="share"),)


def deciding(gate: SuiteGate) -> tuple[Measurement, ...]:
    """Values for `limits_of`, without those whose question is open."""
    policy = gate.policy
    if gate.n_items == 0 or math.isnan(gate.difference.se_adjusted):
        candidates: list[tuple[str, float, str, bool]] = []
    else:
        within = policy.floor < gate.stock.mean < policy.ceiling
        cut = gate.truncated_candidate > policy.max_truncated
        candidates = [
            ("one_standard_error", gate.one_se.ratio, "standard errors", gate.one_se.holds or gate.drop_proven),
            ("proven_drop", max(-gate.difference.mean, 0.0) if gate.harmful else 0.0, "share", True),
            ("difference_lower_bound", gate.non_inferiority.lower, "share", gate.non_inferiority.proven or gate.drop_proven),
            ("detectable_drop", gate.detectable_drop, "share", gate.detectable_drop <= policy.delta),
            ("stock_in_range", gate.stock.mean, "share", within),
            ("paired_share", gate.paired_share, "share", gate.paired_share >= policy.min_paired_share),
            ("stock_truncated_share", gate.truncated_stock, "share", gate.truncated_stock <= policy.max_truncated),
            ("truncated_share", gate.truncated_candidate, "share", not cut or gate.cut_off),
            ("token_ratio", gate.token_ratio, "1", not math.isnan(gate.token_ratio)),
        ]
    candidates += [
        ("lost_replies", float(gate.missing_candidate), "count", gate.missing_candidate > 0 or gate.n_items > 0),
        ("swapped_replies", float(gate.swapped), "count", gate.n_items > 0),
    ]
    return tuple(Measurement(name=name, value=value, unit=unit) for name, value, unit, decided in candidates if decided)


def details_of(gate: SuiteGate, pairs: PairedAnswers) -> dict[str, Any]:
    """Tables for the report, and the per-item columns that figures are drawn from."""
    table = pairs.table
    items = {
        "item": table["item"].tolist(),
        "repeat": [int(r) for r in table["repeat"]],
        "level": _column(table, "level_stock"),
        "outcome": table["outcome"].tolist(),
        **{f"score_{side}": _numbers(table[f"score_{side}"]) for side in ("stock", "candidate")},
        **{f"tokens_{side}": _numbers(table[f"tokens_{side}"]) for side in ("stock", "candidate")},
        **{f"finish_{side}": _column(table, f"finish_reason_{side}") for side in ("stock", "candidate")},
    }
    return {
        "status": gate.status.value,
        "reasons": list(gate.reasons),
        "margin": gate.policy.delta,
        "items": items,
        "tables": [_summary(gate), *_by_level(pairs), *_flips(pairs)],
    }


def _column(table: Any, name: str) -> list[str]:
    return [str(v) if v == v else "" for v in table[name]] if name in table.columns else []


def _numbers(values: Any) -> list[float | None]:
    return [None if v != v else float(v) for v in values]


def _percent(share: float, digits: int = 2) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.{digits}f} %"


def _one_se_word(gate: SuiteGate) -> str:
    return "holds" if gate.one_se.holds else "no spread" if math.isnan(gate.one_se.ratio) else "violated"


def _summary(gate: SuiteGate) -> dict[str, Any]:
    flips = f"{gate.mcnemar.worse} / {gate.mcnemar.better}" if gate.mcnemar is not None else "–"
    columns = ["suite", "items x repeats", "stock", "candidate", "difference ± SE", "one SE", "lower bound", "margin", "detectable"]
    columns += ["to wrong / right", "p (drop)", "cut off", "token ratio", "status"]
    row = [
        gate.suite,
        f"{gate.n_items} x {gate.n_repeats}",
        _percent(gate.stock.mean),
        _percent(gate.candidate.mean),
        f"{_percent(gate.difference.mean)} ± {_percent(gate.difference.se)}",
        f"{_percent(gate.one_se.se)} ({_one_se_word(gate)})",
        _percent(gate.non_inferiority.lower),
        _percent(-gate.policy.delta),
        _percent(gate.detectable_drop),
        flips,
        f"{gate.p_drop:.3g}",
        f"{_percent(gate.truncated_stock, 1)} / {_percent(gate.truncated_candidate, 1)}",
        f"{gate.token_ratio:.3f}",
        gate.status.value,
    ]
    note = "; ".join(gate.reasons)
    return {"title": f"{gate.suite}: gate", "columns": columns, "rows": [row], "note": f"{note[:1].upper()}{note[1:]}." if note else ""}


def _by_level(pairs: PairedAnswers) -> list[dict[str, Any]]:
    table = pairs.table[pairs.table["outcome"] == "paired"]
    if "level_stock" not in table.columns or table["level_stock"].nunique() < 2:
        return []
    grouped = table.groupby("level_stock")[["score_stock", "score_candidate"]].agg(["mean", "count"])
    rows = [
        [str(level), int(r[("score_stock", "count")]), _percent(r[("score_stock", "mean")]), _percent(r[("score_candidate", "mean")])]
        for level, r in grouped.iterrows()
    ]
    return [{"title": f"{pairs.suite}: scores by level", "columns": ["level", "replies", "stock", "candidate"], "rows": rows}]


def _flips(pairs: PairedAnswers) -> list[dict[str, Any]]:
    """The replies whose score moved most, side by side."""
    table = pairs.table[pairs.table["outcome"] == "paired"]
    moved = table[table["score_stock"] != table["score_candidate"]]
    order = (moved["score_candidate"] - moved["score_stock"]).sort_values(kind="stable").index[:SHOWN_FLIPS]
    rows = [
        [r["item"], int(r["repeat"]), r["score_stock"], r["score_candidate"], _short(r["text_stock"]), _short(r["text_candidate"])]
        for _, r in moved.loc[order].iterrows()
    ]
    if not rows:
        return []
    columns = ["item", "repeat", "stock", "candidate", "stock's reply", "candidate's reply"]
    return [{"title": f"{pairs.suite}: replies that moved ({len(moved)} in all)", "columns": columns, "rows": rows}]


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"


# ---- all suites together ----


def family_measurements(family: FamilyGate, gates: Sequence[SuiteGate]) -> tuple[Measurement, ...]:
    """Holm-corrected p-values of a drop (samples in the order of the suites) and how many suites dropped."""
    known = [p for p in family.p_drop_holm if not math.isnan(p)]
    made = [
        Measurement(name="suites_with_a_drop", value=float(len(family.dropped)), unit="count"),
        Measurement(name="smallest_holm_p", value=min(known) if known else math.nan, unit="1", samples=family.p_drop_holm),
        Measurement(name="suites", value=float(len(gates)), unit="count"),
    ]
    if len(known) == len(gates) > 0:
        made.append(Measurement(name="suites_not_judged", value=0.0, unit="count"))
    return tuple(made)


def family_details(family: FamilyGate, gates: Sequence[SuiteGate]) -> dict[str, Any]:
    """One table over the suites."""
    columns = ["suite", "difference", "p (drop)", "Holm p", "one SE", "status"]
    rows = [
        [g.suite, _percent(g.difference.mean), f"{g.p_drop:.3g}", f"{p:.3g}", _one_se_word(g), g.status.value]
        for g, p in zip(gates, family.p_drop_holm, strict=True)
    ]
    table = {"title": "All suites", "columns": columns, "rows": rows}
    return {"status": family.status.value, "reasons": list(family.reasons), "tables": [table]}
