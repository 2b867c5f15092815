"""The matrix as Markdown that fits a pull request, and as the tables that a report shows. A multiplier stands beside its conditions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perf.matrix import AcceptanceKind, CellResult

if TYPE_CHECKING:
    from perf.build import Matrix

CONTEXT_SHOWN = 8192
Rows = list[list[Any]]


def table(title: str, columns: Sequence[str], rows: Rows, note: str = "") -> dict[str, Any]:
    return {"title": title, "columns": list(columns), "rows": rows, "note": note}


def _short(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}g}" if abs(value) < 1e4 else f"{value:,.0f}"


def conditions_text(result: CellResult) -> str:
    """Everything a multiplier depends on, in one line."""
    known, cell = result.conditions, result.cell
    versions = ", ".join(f"{k} {v}" for k, v in dict(known.get("versions", {})).items())
    accepted = (
        "acceptance not applied" if result.acceptance is AcceptanceKind.NONE else f"AL {cell.acceptance_length:g} {result.acceptance.value}"
    )
    speculation = "no speculation" if cell.q == 1 else f"{cell.q - 1} drafts, {accepted}"
    prefill = "prefill mixed in" if cell.mixed_prefill else "prefill not counted"
    sides = f"{known.get('gpus')} GPU on both sides"
    return "; ".join(
        [
            str(known.get("hardware")),
            sides,
            f"batch {cell.requests}",
            speculation,
            prefill,
            str(known.get("date")),
            versions or "no versions",
        ]
    )


def tables(matrix: Matrix) -> list[dict[str, Any]]:
    """Every table of the page, in order."""
    from perf import rank_steps

    return [
        _sources(matrix),
        _layers(matrix),
        _unpublishable(matrix),
        *_projections(matrix),
        *_launch_fits(matrix),
        *_published(matrix),
        *rank_steps.tables(matrix.rank_steps, matrix.assumptions),
        _refused(matrix),
        *_servers(matrix),
        *_engine(matrix),
    ]


def _sources(matrix: Matrix) -> dict[str, Any]:
    from perf.build import counts

    rows: Rows = [[name, n] for name, n in counts(matrix).items()]
    return table(
        "Cells by outcome and source", ("outcome (source)", "cells"), rows, "Nothing is mixed: each row of the CSV names its source."
    )


def _layers(matrix: Matrix) -> dict[str, Any]:
    from perf.build import speed_ups

    ratios = speed_ups(matrix.layers.results)
    stock = {r.cell.id.replace("-auto", "-latency_specialized"): r for r in matrix.layers.results if r.cell.backend == "auto"}
    rows: Rows = []
    for r in matrix.layers.results:
        if r.outcome != "measured" or r.cell.backend == "auto":
            continue
        ratio, refused = ratios.get(r.cell.id, (None, ()))
        other = stock.get(r.cell.id)
        shown = "–" if ratio is None or refused else f"{ratio:.2f}x"
        spread = f"{_short(r.step_low_us)}–{_short(r.step_high_us)}"
        rows.append(
            [
                r.cell.tp,
                r.cell.rows,
                r.cell.q,
                _short(other.step_us if other else None),
                _short(r.step_us),
                spread,
                shown,
                _short(r.floor_us),
                _short(r.fraction_of_floor, 2),
                conditions_text(r),
                r.evidence,
            ]
        )
    columns = ("TP", "rows", "q", "stock, us", "ours, us", "quartiles", "speed-up", "floor, us", "floor share", "conditions", "evidence")
    first = next((r for r in matrix.layers.results if r.outcome == "measured"), None)
    what = f"{first.conditions['what']}. Stock leaves out {first.conditions['stock_excludes']}." if first else "None may be shown."
    return table("Measured: one KDA + MoE layer, one rank's share (gpu_timer)", columns, rows, what + " Not a step of the model.")


def _unpublishable(matrix: Matrix) -> dict[str, Any]:
    bad = [r for r in matrix.layers.results if r.outcome != "measured"]
    rows: Rows = [[r.cell.id, r.outcome, "; ".join(r.reasons), r.evidence] for r in bad]
    note = "A speed without a passing correctness record of the same kernels is not shown."
    return table("Timed, but not shown", ("cell", "outcome", "reasons", "evidence"), rows, note)


def _projections(matrix: Matrix) -> list[dict[str, Any]]:
    from perf.build import speed_ups

    ratios = speed_ups(matrix.steps)
    made = []
    for gpu, tp in dict.fromkeys((r.cell.gpu, r.cell.tp) for r in matrix.steps if r.step_us):
        rows: Rows = []
        for r in matrix.steps:
            c = r.cell
            if (c.gpu, c.tp, c.context_tokens, c.backend) != (gpu, tp, CONTEXT_SHOWN, "latency_specialized") or not r.step_us:
                continue
            if c.q == 8 and c.acceptance_length not in (1.0, 4.0, 6.0, 8.0):
                continue
            label = f"AL {c.acceptance_length:g} applied" if c.q > 1 else "off"
            mark = " (extrapolated)" if r.conditions["extrapolated"] else ""
            rows.append(
                [
                    f"{c.rows}{mark}",
                    c.requests,
                    label,
                    f"{_short(r.step_low_us)}–{_short(r.step_us)}",
                    _short(r.draft_us),
                    _short(r.tokens_per_s_per_user),
                    _short(r.tokens_per_s),
                    f"{ratios[c.id][0]:.2f}x",
                    _short(r.floor_us),
                ]
            )
        columns = (
            "rows",
            "batch",
            "speculation",
            "step, us (low–shown)",
            "draft, us",
            "tok/s a user",
            "tok/s",
            "over projected stock",
            "floor, us",
        )
        what = f"decode alone, {CONTEXT_SHOWN} cached tokens a request, {tp} {gpu} on both sides"
        note = f"Projection, not a measurement: {what}. {_basis(matrix)}"
        made.append(table(f"PROJECTION: {gpu}, TP{tp}", columns, rows, note))
    return made


def _basis(matrix: Matrix) -> str:
    parts = []
    for backend, a in matrix.assumptions.items():
        parts.append(
            f"{backend}: {a.fraction_of_experts:.2f} of the memory rate for routed experts, {a.fraction_of_floor:.2f} for all other bytes, "
            f"{a.launch_us:.2f} us and {a.row_us:.3f} us a row for each launch, fitted to {len(a.evidence)} records on {a.measured_on} "
            f"(worst fit {a.fit_error:.0%}; {', '.join(a.evidence)}); "
            f"{a.exchanges_a_layer} exchanges a layer add {a.exchange_us:g} us each: {a.exchange_source}."
        )
    return " ".join(parts)


def _launch_fits(matrix: Matrix) -> list[dict[str, Any]]:
    """What each launch of the fused layer costs, where that was measured."""
    made = []
    for a in matrix.assumptions.values():
        if a.fits is None:
            continue
        rows: Rows = [
            [
                fit.op,
                _short(fit.fixed_us, 3),
                _short(fit.row_us, 2),
                _short(1 / fit.slowness, 2) if fit.slowness else "no bytes show",
                fit.points,
                f"{fit.error:.0%}",
            ]
            for fit in a.fits.by_op.values()
        ]
        columns = ("launch", "fixed, us", "us a row", "fraction of the memory rate", "points", "worst fit")
        overlap = ", ".join(f"{n} rows {share:.2f}" for n, share in a.fits.overlap.items())
        note = (
            f"Fitted to launches measured alone on {a.measured_on} ({', '.join(a.fits.evidence)}); projections rest on whole layers. "
            f"A layer over the sum of its launches: {overlap}."
        )
        made.append(table("Fraction of the memory rate by launch", columns, rows, note))
    return made


def _published(matrix: Matrix) -> list[dict[str, Any]]:
    from perf.build import projection_errors, speed_up_errors

    found = projection_errors(matrix.assumptions)
    rows: Rows = [
        [
            e["conditions"],
            e["cell"],
            _short(e["published_us"]),
            _short(e["projected_us"]),
            f"{e['error']:+.0%}",
            _short(e["projected_low_us"]),
            f"{e['low_error']:+.0%}",
            " + ".join(_short(e[part]) for part in ("memory_us", "latency_us", "exchange_us")),
            ", ".join(e["evidence"]),
        ]
        for e in found
    ]
    note = matrix.no_projection or (
        "Numbers published by others, of their kernels; a projection is of ours, so its error holds the difference between the two. "
        "Low: if the latencies measured on Hopper shrank as memory time does. What was published of a layer and of a step does not agree: "
        "93 layers of that timeline are 64 % above that step. The error is what a projection of this table is worth."
    )
    columns = ("conditions", "cell", "published, us", "projected, us", "error", "low, us", "error of low",
               "memory + latency + exchanges, us", "rests on")  # fmt: skip
    made = [table("Projection against published numbers", columns, rows, note)]
    ratios: Rows = [
        [e["conditions"], f"{e['published']:.2f}x", f"{e['projected']:.2f}x", f"{e['error']:+.0%}"] for e in speed_up_errors(found)
    ]
    if ratios:
        names = ("conditions, both sides", "published speed-up", "projected speed-up", "error")
        made.append(table("Projected speed-up against the published one", names, ratios, "Errors that both sides share cancel here."))
    return made


def _refused(matrix: Matrix) -> dict[str, Any]:
    found = Counter(
        (r.cell.gpu, r.cell.tp, r.cell.requests, r.cell.q, "; ".join(r.reasons)) for r in matrix.steps if r.outcome == "refused"
    )
    rows: Rows = [[*key[:4], n, key[4]] for key, n in found.items()]
    note = "Cells outside the scope; such steps run stock. Each one is a row of the CSV."
    return table("Refused", ("GPU", "TP", "batch", "q", "cells", "reason"), rows, note)


def _engine(matrix: Matrix) -> list[dict[str, Any]]:
    rows: Rows = []
    for row in matrix.engine_rows:
        ratio = f"{row['speed_up']:.2f} ({row['speed_up_low']:.2f}–{row['speed_up_high']:.2f})" if "speed_up" in row else "–"
        worst = max((row["stock_worst_error"], row["candidate_worst_error"]), key=lambda e: (e != e, e))
        rows.append(
            [
                row["candidate"],
                row["requests"],
                row["q"],
                _short(row["stock_us"]),
                _short(row["candidate_us"]),
                ratio,
                row.get("decision", row["outcome"]),
                _short(worst, 2),
                "; ".join(row["reasons"]),
            ]
        )
    columns = ("candidate", "batch", "q", "stock, us", "candidate, us", "stock over candidate", "decision", "worst row error", "objections")
    note = (
        "cpu_engine: the nano model on this machine's processor, contract execution. It tests the machinery and says nothing about a GPU."
    )
    made = [table("The nano engine on the CPU", columns, rows, note)] if rows else []
    if matrix.acceptance:
        a = matrix.acceptance
        names = ("acceptance", "mean length", "verify steps", "items", "drafts", "problem")
        rows = [[a["acceptance"], _short(a["mean_length"]), a["verify_steps"], a["items"], a["drafts"], a["problem"] or "none"]]
        made.append(table("Acceptance length of the real drafter (nano, word problems)", names, rows, "Measured, not applied."))
    made += [workload_table(found) for found in matrix.workloads]
    return made


def workload_table(found: Mapping[str, Any]) -> dict[str, Any]:
    """Mixed prefill and the agentic trace on the nano engine, both sides; a multiplier beside all that it depends on."""
    rows: Rows = []
    for name in ("mixed_prefill", "agentic"):
        row = found.get(name)
        if row is None:
            continue
        told = (("speed_up", "end to end"), ("decode_speed_up", "decode alone"))
        ratios = [f"{row[key]:.2f} ({row[f'{key}_low']:.2f}–{row[f'{key}_high']:.2f}) {what}" for key, what in told if key in row]
        ratio = "; ".join(ratios) or "–"
        settings = _workload_settings(row)
        evidence = found.get("evidence", "this run")
        for side in ("stock", "candidate"):
            values = row["sides"].get(side, {})
            rates = [_short(values.get(k)) for k in ("decode_alone_tokens_per_s", "end_to_end_tokens_per_s", "p90_tokens_per_s_per_user")]
            rows.append([name, side, *rates, ratio if side == "candidate" else "", settings, "; ".join(row["reasons"]) or "none", evidence])
    known = found["conditions"]
    versions = ", ".join(f"{k} {v}" for k, v in dict(known["versions"]).items())
    note = (
        f"cpu_engine: the nano model by contract execution, candidate {found['candidate']}; {known['hardware']}, both sides alike; "
        f"{known['date']}; {versions}. Each side in a process of its own, fresh inputs, every timed reply checked. Decode alone is the "
        "time of the requests that only decode. P90: nine turns in ten reach this rate for their user, waiting and prefill counted."
    )
    columns = ("workload", "side", "decode alone, tok/s", "end to end, tok/s", "P90 interactivity, tok/s a user", "stock over candidate",
               "settings", "objections", "evidence")  # fmt: skip
    title = "Workloads beside pure decode" + (
        "" if "agentic" in found else f": a prompt of {found['mixed_prefill']['prompt_tokens']} tokens"
    )
    return table(title, columns, rows, note)


def _workload_settings(row: Mapping[str, Any]) -> str:
    shape = (
        f"prompts of {row['prompt_tokens']}" if "prompt_tokens" in row else f"{row['turns']} turns, {row['tool_tokens']} tool tokens each"
    )
    return f"{row['users']} users, {shape}, {row['decoded_tokens']} tokens decoded, no speculation, prefill counted, {row['pairs']} pairs"


def _servers(matrix: Matrix) -> list[dict[str, Any]]:
    """Results of servers as they were given, beside their conditions."""
    rows: Rows = [
        [
            r.cell.id,
            r.outcome,
            _short(r.step_us),
            _short(r.tokens_per_s_per_user),
            _short(r.conditions.get("p90_tokens_per_s_per_user")),
            _short(r.conditions.get("end_to_end_tokens_per_s")),
            conditions_text(r),
            "; ".join(r.reasons) or "none",
            r.evidence,
        ]
        for r in matrix.servers
    ]
    columns = (
        "cell",
        "outcome",
        "step, us",
        "tok/s a user",
        "P90 interactivity, tok/s a user",
        "end to end, tok/s",
        "conditions",
        "reasons",
        "file",
    )
    note = (
        "`vllm bench` JSON. A step is the median time per output token times the acceptance length; end to end counts prefill and waiting."
    )
    return [table("Servers", columns, rows, note)] if rows else []


def page(matrix: Matrix) -> str:
    """The page; ends with a newline."""
    lines = ["# Speed matrix", ""]
    for made in tables(matrix):
        lines += [f"## {made['title']}", ""] + ([made["note"], ""] if made["note"] else [])
        if made["rows"]:
            lines.append("| " + " | ".join(map(str, made["columns"])) + " |")
            lines.append("|" + " --- |" * len(made["columns"]))
            lines += ["| " + " | ".join(str(item).replace("|", "\\|") for item in row) + " |" for row in made["rows"]]
        else:
            lines.append("None.")
        lines.append("")
    return "\n".join(lines)
