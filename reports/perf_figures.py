"""The pictures of the speed lane, drawn from `details["perf"]` of its matrix record. Each says what is measured and what is projected.

Colours are two of Okabe and Ito's palette (2008) and matplotlib's cividis, which reads the same without colour vision and in grey.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

from reports.figures import CANDIDATE, LIMIT, STOCK, WIDTH_INCHES, _finish
from reports.sections import Figure
from validation.core.types import Evidence

_plain = FuncFormatter(lambda value, _: f"{value:,.0f}")
LABEL_GAP = 0.026  # of the axis, between the names of launches
LONGEST_NAME = 28  # of a launch: a library's kernel names run to hundreds of letters
OURS, AUTO = "latency_specialized", "auto"
SIDES = ((AUTO, "stock", STOCK, "o", "-"), (OURS, "candidate", CANDIDATE, "x", "--"))


def perf_figures(records: Sequence[Evidence]) -> tuple[Figure, ...]:
    """Every figure that the newest matrix record carries data for."""
    found = [(r, r.details["perf"]) for r in records if isinstance(r.details.get("perf"), Mapping)]
    if not found:
        return ()
    record, data = found[-1]
    made = [
        *(_heat_map(record, data, gpu, tp) for gpu, tp in _places(data)),
        *(_pareto(record, data, gpu, tp) for gpu, tp in _places(data)),
        *(_timeline(record, data, profile) for profile in data.get("launches", ())),
        _fraction(record, data),
    ]
    return tuple(figure for figure in made if figure is not None)


def _places(data: Mapping[str, Any]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((step["gpu"], step["tp"]) for step in data.get("steps", ()) if step["speed_up"] is not None))


def _basis(data: Mapping[str, Any]) -> str:
    ids = dict.fromkeys(name for one in data.get("basis", {}).values() for name in one["evidence"])
    on = dict.fromkeys(one["measured_on"] for one in data.get("basis", {}).values())
    return f"Rests on layers measured on one {', '.join(on)}: {', '.join(ids)}."


def _heat_map(record: Evidence, data: Mapping[str, Any], gpu: str, tp: int) -> Figure | None:
    """Projected speed-up over stock, rows down, acceptance length across."""
    cells = [s for s in data["steps"] if (s["gpu"], s["tp"]) == (gpu, tp) and s["speed_up"] is not None]
    lengths = sorted({s["al"] for s in cells})
    shapes = sorted({(s["q"], s["rows"]) for s in cells})
    table = {((s["q"], s["rows"]), s["al"]): s["speed_up"] for s in cells}
    grid = [[table.get((shape, al), float("nan")) for al in lengths] for shape in shapes]
    canvas, axis = plt.subplots(figsize=(WIDTH_INCHES, 1.2 + 0.34 * len(shapes)))
    image = axis.imshow(grid, cmap="cividis", aspect="auto")
    low, high = image.get_clim()
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            if value == value:
                dark = value < (low + high) / 2
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axis.set_xticks(range(len(lengths)), [f"{al:g}" for al in lengths])
    axis.set_yticks(
        range(len(shapes)),
        [f"{rows} row{'s' * (rows > 1)}, {'no speculation' if q == 1 else '7 drafts'}" for q, rows in shapes],
        fontsize=8,
    )
    axis.set_xlabel("acceptance length, applied (empty: refused, or not a setting)")
    axis.set_title(f"PROJECTED speed-up over stock, {gpu}, TP{tp}", fontsize=10)
    caption = (
        f"Projection, not a measurement: stock's step plus draft over ours, {tp} {gpu} on both sides, decode alone, "
        f"{data['context_tokens']} cached tokens a request, acceptance applied. The same acceptance length on both "
        f"sides cancels, so that a row has one value; comparing different lengths is refused. {_basis(data)} Evidence {record.id}."
    )
    return _finish(canvas, f"perf-speed-up-{gpu}-tp{tp}", f"Projected speed-up by rows and acceptance length, {gpu} TP{tp}", caption)


def _pareto(record: Evidence, data: Mapping[str, Any], gpu: str, tp: int) -> Figure | None:
    """Tokens per second of a user against all users, both paths, without speculation and at one acceptance length."""
    canvas, axis = plt.subplots(figsize=(WIDTH_INCHES, 3.8))
    drawn = False
    for backend, name, color, marker, style in SIDES:
        for q, al, width, label in ((1, 1.0, 1.5, "no speculation"), (8, 4.0, 0.8, "7 drafts, AL 4 applied")):
            points = sorted(
                (s["user"], s["total"], s["requests"])
                for s in data["steps"]
                if (s["gpu"], s["tp"], s["backend"], s["q"], s["al"]) == (gpu, tp, backend, q, al) and s["user"]
            )
            if points:
                drawn = True
                shown: dict[str, Any] = {"marker": marker, "ls": style, "color": color, "lw": width, "ms": 5}
                axis.plot([p[0] for p in points], [p[1] for p in points], label=f"{name}, {label}", **shown)
    if not drawn:
        plt.close(canvas)
        return None
    axis.set_xscale("log")
    axis.set_yscale("log")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(_plain)
        side.set_minor_formatter(_plain if side is axis.xaxis else NullFormatter())
    axis.tick_params(which="both", labelsize=8)
    axis.set_xlabel("tokens per second of one user")
    axis.set_ylabel("tokens per second in total")
    axis.set_title(f"PROJECTED, {gpu}, TP{tp}", fontsize=10)
    axis.legend(frameon=False, fontsize=8)
    caption = (
        f"Projection, not a measurement: batch 1 to 64 (right to left), {tp} {gpu} on both sides, decode alone, "
        f"{data['context_tokens']} cached tokens a request. {_basis(data)} Evidence {record.id}."
    )
    return _finish(canvas, f"perf-pareto-{gpu}-tp{tp}", f"Projected tokens per second, per user and in total, {gpu} TP{tp}", caption)


def _timeline(record: Evidence, data: Mapping[str, Any], profile: Mapping[str, Any]) -> Figure | None:
    """Stock's layer above ours, and each launch by launch where its launches were timed one by one."""
    place = (profile["tp"], profile["rows"])
    layers = {e["backend"]: e for e in data.get("layers", ()) if (e["tp"], e["rows"], e["q"]) == (*place, 1)}
    if set(layers) != {AUTO, OURS} or profile.get("backend", OURS) != OURS:
        return None
    stock = [p for p in data.get("launches", ()) if (p["tp"], p["rows"], p.get("backend")) == (*place, AUTO)][-1:]
    canvas, axis = plt.subplots(figsize=(WIDTH_INCHES, 4.6 if stock else 3.2))
    alone_us = max(sum(us for _, us in one["launches"]) for one in (profile, *stock))
    reach = max(alone_us * 1.45, layers[AUTO]["us"] * 1.02)
    for y, (backend, name, color, _, _) in zip((2, 1), SIDES, strict=True):
        entry = layers[backend]
        axis.barh(y, entry["us"], height=0.55, color=color, alpha=0.85 if backend == AUTO else 0.6, edgecolor="black", lw=0.5)
        text = f"{name}: {entry['launches']} launches in one graph, {entry['us']:.1f} us"
        axis.text(0.007 * reach, y, text, va="center", fontsize=8, color="white" if backend == AUTO else "black")
    _segments(axis, profile["launches"], 0, CANDIDATE, reach, above=False)
    for one in stock:
        _segments(axis, one["launches"], 3, STOCK, reach, above=True)
    axis.set_yticks([])
    axis.set_ylim(-2.0, 5.6 if stock else 2.5)
    axis.set_xlim(-0.035 * reach, reach)  # room for the first launch's name
    for edge in ("left", "right", "top"):
        axis.spines[edge].set_visible(False)
    axis.set_xlabel("microseconds")
    ratio = layers[AUTO]["us"] / layers[OURS]["us"]
    shape = f"{place[1]} row{'s' * (place[1] > 1)}"
    axis.set_title(f"MEASURED: one KDA + MoE layer, one rank of TP{place[0]}, {shape}: {ratio:.2f}x", fontsize=10)
    told = "Top and bottom: each launch alone" if stock else "Stock's launches were timed together only. Bottom: each launch alone"
    ids = ", ".join(dict.fromkeys([layers[OURS]["evidence"], *(p["evidence"] for p in (*stock, profile)), record.id]))
    caption = (
        f"One rank's share of a layer: {ratio:.2f}x, {layers[OURS]['conditions']}. Stock is without exchanges between ranks; ours include "
        f"their messages, looped back. {told}, without overlap. Evidence {ids}."
    )
    return _finish(canvas, f"perf-layer-tp{place[0]}-r{place[1]}", f"One layer, launch by launch, TP{place[0]}, {shape}", caption)


def _segments(axis: Any, launches: Sequence[tuple[str, float]], y: float, color: str, reach: float, *, above: bool) -> None:
    """Launches one after the other at height `y`, their names above or below; short ones in a row have their names moved apart."""
    at, label_at, side = 0.0, -reach, 1 if above else -1
    for number, (launch, us) in enumerate(launches):
        axis.barh(y, us, left=at, height=0.55, color=color, alpha=0.35 + 0.35 * (number % 2), edgecolor="black", lw=0.5)
        label_at = max(at + us / 2, label_at + LABEL_GAP * reach)
        axis.plot([at + us / 2, label_at], [y + 0.28 * side, y + 0.38 * side], color=LIMIT, lw=0.5)
        shown = {"ha": "left", "va": "bottom"} if above else {"ha": "right", "va": "top"}
        axis.text(label_at, y + 0.4 * side, launch[:LONGEST_NAME], rotation=45, fontsize=7, **shown)
        at += us
    axis.text(max(at + 0.007 * reach, label_at), y, f"{at:.1f} us alone, one after the other", va="center", fontsize=8)


def _fraction(record: Evidence, data: Mapping[str, Any]) -> Figure | None:
    """Share of the memory floor reached by the layers, by rows."""
    layers = [e for e in data.get("layers", ()) if e["floor_us"] and e["q"] == 1]
    if not layers:
        return None
    canvas, axis = plt.subplots(figsize=(WIDTH_INCHES, 3.2))
    for backend, name, color, marker, style in SIDES:
        for tp, width in ((8, 1.6), (16, 0.8)):
            points = sorted((e["rows"], e["floor_us"] / e["us"]) for e in layers if (e["backend"], e["tp"]) == (backend, tp))
            if points:
                shown: dict[str, Any] = {"marker": marker, "ls": style, "color": color, "lw": width}
                axis.plot([p[0] for p in points], [p[1] for p in points], label=f"{name}, TP{tp}", **shown)
    axis.axhline(1, color=LIMIT, lw=1)
    axis.text(1, 0.97, "the floor: every byte once, at the datasheet's rate", fontsize=8, va="top", color=LIMIT)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_ylim(0, 1.05)
    axis.set_xlabel("token rows")
    axis.set_ylabel("floor over measured time")
    axis.legend(frameon=False, fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.9), ncols=2)
    ids = ", ".join(dict.fromkeys(e["evidence"] for e in layers))
    caption = f"MEASURED: one rank's share of a KDA + MoE layer on one {layers[0]['gpu']}, no speculation. Evidence {ids}, {record.id}."
    return _finish(canvas, "perf-fraction-of-floor", "Share of the memory floor by rows", caption)
