"""The pictures of a report (matplotlib): colour-blind safe, readable in print, each drawn from records whose ids its caption names.

Colours are two of Okabe and Ito's palette (2008); stock and candidate also differ in marker and line style, so grey print reads too.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Canvas

from reports.sections import Figure
from validation.core.types import Evidence

STOCK, CANDIDATE, LIMIT = "#0072B2", "#D55E00", "#555555"
WIDTH_INCHES = 8.0


def _finish(canvas: Canvas, name: str, title: str, caption: str) -> Figure:
    """SVG and PNG of one canvas. Text stays text in the SVG, so that it can be searched; the date is left out, so that it repeats."""
    canvas.tight_layout()
    svg, png = io.StringIO(), io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        canvas.savefig(svg, format="svg", metadata={"Date": None})
        canvas.savefig(png, format="png", dpi=144)
    plt.close(canvas)
    return Figure(name=name, title=title, caption=caption, svg=svg.getvalue(), png=png.getvalue())


def ids_text(records: Sequence[Evidence]) -> str:
    shown = [record.id for record in records[:12]]
    return "Evidence " + ", ".join(shown) + (f" and {len(records) - 12} more." if len(records) > 12 else ".")


def paired_differences(records: Sequence[Evidence]) -> Figure | None:
    """One row a suite: candidate minus stock, its 95 % interval, one standard error, and the margin of the policy."""
    rows = []
    for record in records:
        values = {m.name: m.value for m in record.measurements}
        if {"difference", "difference_se_adjusted", "lower_bound"} <= values.keys() and np.isfinite(values["difference"]):
            rows.append((record.case.subject, values, float(record.details.get("margin", np.nan))))
    if not rows:
        return None
    canvas, axis = plt.subplots(figsize=(WIDTH_INCHES, 0.9 + 0.55 * len(rows)))
    for place, (_, values, margin) in enumerate(rows):
        center, se = 100 * values["difference"], 100 * values["difference_se_adjusted"]
        axis.plot([center - 1.96 * se, center + 1.96 * se], [place, place], color=CANDIDATE, lw=1.5)
        axis.plot([center - se, center + se], [place, place], color=CANDIDATE, lw=5, alpha=0.6, solid_capstyle="butt")
        axis.plot(center, place, "o", color=CANDIDATE)
        axis.plot([-100 * margin] * 2, [place - 0.3, place + 0.3], color=LIMIT, lw=2)
    axis.axvline(0, color=STOCK, lw=1, ls="--")
    axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_xlabel("candidate minus stock, points (thick: 1 SE, thin: 95 %, bar: margin)")
    caption = f"Paired differences by suite; a suite passes when its interval stays right of its bar. {ids_text(records)}"
    return _finish(canvas, "evals-paired-differences", "Paired differences by suite", caption)


def _per_token(records: Sequence[Evidence]) -> list[tuple[Evidence, dict[str, Any]]]:
    found = [(r, r.details["per_token"]) for r in records if isinstance(r.details.get("per_token"), dict)]
    return [(record, table) for record, table in found if "position" in table]


def error_against_position(records: Sequence[Evidence]) -> Figure | None:
    """RMS error of log-probabilities against position, both paths, per token and per window."""
    tables = _per_token(records)
    if not tables:
        return None
    canvas, axis = plt.subplots(figsize=(WIDTH_INCHES, 3.6))
    for side, color, marker in (("stock", STOCK, "o"), ("candidate", CANDIDATE, "x")):
        centers, levels = [], []
        for _, table in tables:
            errors = np.array([np.nan if e is None else e for e in table.get(f"forced_{side}_rms_nats", [])], dtype=float)
            positions = np.array(table["position"], dtype=float)
            if not len(errors) or len(errors) != len(positions):
                continue
            axis.plot(positions, errors, marker, ms=3, color=color, alpha=0.25, mew=0.7)
            centers.append(float(np.exp(np.log(positions).mean())))
            levels.append(float(np.sqrt(np.nanmean(errors**2))))
        order = np.argsort(centers)  # records come by check, and a line that runs back and forth says nothing
        centers, levels = [centers[i] for i in order], [levels[i] for i in order]
        axis.plot(
            centers, levels, marker=marker, color=color, lw=1.5, ls="-" if side == "stock" else "--", label=f"{side}, RMS of the window"
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g} k" if x >= 1024 else f"{x:g}")
    axis.set_xlabel("position in tokens")
    axis.set_ylabel("error against the FP64 oracle, nats")
    axis.legend(frameon=False)
    caption = f"Error of each decoded token (top 64 log-probabilities, forced routing) against position. {ids_text([r for r, _ in tables])}"
    return _finish(canvas, "numerics-error-against-position", "Error against position", caption)


def flips(records: Sequence[Evidence]) -> Figure | None:
    """The oracle's margin at every token where a path chose another token than the oracle; flips at wide margins are faults."""
    tables = _per_token(records)
    canvas, axis = plt.subplots(figsize=(WIDTH_INCHES, 3.2))
    n_tokens, n_flips = 0, {"stock": 0, "candidate": 0}
    for _, table in tables:
        margins = table.get("oracle_margin_nats", [])
        n_tokens += len(margins)
        for side, color, marker in (("stock", STOCK, "o"), ("candidate", CANDIDATE, "x")):
            agrees = table.get(f"free_{side}_agrees") or table.get(f"forced_{side}_agrees") or []
            chosen = [(p, m) for p, m, same in zip(table["position"], margins, agrees, strict=False) if not same]
            n_flips[side] += len(chosen)
            axis.plot([p for p, _ in chosen], [m for _, m in chosen], marker, color=color, ms=6 if side == "stock" else 5, mfc="none")
    if not n_tokens:
        plt.close(canvas)
        return None
    axis.plot([], [], "o", color=STOCK, mfc="none", label=f"stock, {n_flips['stock']} of {n_tokens} tokens")
    axis.plot([], [], "x", color=CANDIDATE, label=f"candidate, {n_flips['candidate']} of {n_tokens} tokens")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g} k" if x >= 1024 else f"{x:g}")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("position in tokens")
    axis.set_ylabel("oracle's margin, nats")
    axis.legend(frameon=False)
    caption = f"Tokens on which a path's first choice is not the oracle's, by how sure the oracle was. {ids_text([r for r, _ in tables])}"
    return _finish(canvas, "numerics-flips", "Flips and the oracle's margin", caption)
