"""Published GPU records as cells of the matrix: one rank's share of a layer, and the time of each launch in it.

A speed is shown only when the run still describes this checkout and every kernel of the layer has a passing correctness record of the same
digest. "The same" is meant of binaries: the schedule picks a kernel by rows, so a record at 8 rows covers every row count that runs that
kernel, and none that runs another. Whether a record passes is computed here from its errors; its own flag is not believed.
"""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_k3_decode.config import K3, Shard, Unsupported
from kimi_k3_decode.launches import layer_plan
from perf.hardware import GPUS, Gpu
from perf.launch_fit import LaunchFits, LaunchPoint, fit_launches
from perf.matrix import Cell, CellResult, Scope, Source
from perf.model import TIMED_LAYER, LayerPoint, cell_floor, step_traffic
from validation.core.store import read_evidence, read_run
from validation.core.types import Evidence, HarnessError, Outcome, Run
from validation.freshness.digests import changed
from validation.freshness.digests import current as digests_now
from validation.freshness.imports import folder_of_launch
from validation.freshness.published import PUBLISHED, freshness, published_runs
from validation.policy import Policy, load_policy

CASE = re.compile(r"k3-tp(?P<tp>\d+)-r(?P<rows>\d+)-q(?P<q>\d+)(?P<again>-again)?$")
STOCK_PROFILE = re.compile(r"k3-tp(?P<tp>\d+)-r(?P<rows>\d+)-stock$")
PROFILE = re.compile(r"k3-tp(?P<tp>\d+)-r(?P<rows>\d+)-alone$")
WORKLOADS = "published.cpu_workloads"
ERROR_FLOOR = 2e-6  # of a relative error, where the BF16 reference is exact
OURS, STOCK = "latency_specialized", "auto"


@dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """One correctness record: which kernel, under which digest, and whether each error is within the policy's ratio."""

    kernel: str
    digest: str
    evidence: str
    passed: bool
    stale: bool


@dataclass(frozen=True, kw_only=True)
class LaunchTimes:
    """Times of each launch of a layer measured alone, in plan order; microseconds."""

    tp: int
    rows: int
    gpu: str
    launches: tuple[tuple[str, tuple[float, ...]], ...]
    evidence: str
    backend: str = OURS


@dataclass(frozen=True, kw_only=True)
class PublishedCells:
    results: tuple[CellResult, ...]
    launches: tuple[LaunchTimes, ...]
    points: Mapping[str, tuple[LayerPoint, ...]]  # backend -> measured layers a projection may rest on
    gpu: str | None  # hardware of the points


def gpu_of(run: Run) -> Gpu:
    """Raises Unsupported when the recorded name is none of the known GPUs."""
    name = str(run.hardware.get("gpu") or (run.hardware.get("gpus") or [{}])[0].get("name", "unknown"))
    for known in sorted(GPUS, key=len, reverse=True):
        if known in name.replace("-", " ").split():
            return GPUS[known]
    raise Unsupported("GPU", (f"name: got {name!r}, needs one of {', '.join(GPUS)}; add its datasheet rates to perf/hardware.py",))


def passes(details: Mapping[str, Any], ratio: float) -> bool:
    """True when there are errors, none is above `ratio` times the BF16 reference's (NaN is), and no promise was broken."""
    errors = details.get("errors")
    if not isinstance(errors, Mapping) or not errors or details.get("broken"):
        return False
    return all(e["kernel"] <= ratio * e["reference"] + ERROR_FLOOR for e in errors.values())


def kernel_checks(records: Iterable[Evidence], stale: Mapping[str, tuple[str, ...]], ratio: float) -> list[KernelCheck]:
    found = []
    for record in records:
        kernel, errors = record.details.get("kernel"), record.details.get("errors")
        if not isinstance(kernel, str) or not errors:
            continue
        digest = next((value for name, value in record.fingerprints.items() if name.startswith("kernels/")), "")
        passed = record.outcome is Outcome.MEASURED and passes(record.details, ratio)
        found.append(KernelCheck(kernel=kernel, digest=digest, evidence=record.id, passed=passed, stale=bool(stale.get(record.id))))
    return found


def kernels_of_layer(tp: int, rows: int, q: int) -> tuple[tuple[str, str], ...]:
    """(launch, id of its kernel) of a KDA + MoE layer of K3, in plan order."""
    from kimi_k3_decode.kernels import kernel_spec

    plan = layer_plan(K3, Shard(config=K3, tp=tp), TIMED_LAYER, rows, q)
    return tuple((launch.op if ".mlp_res" not in launch.id else "mlp_res", kernel_spec(K3, launch.contract).id) for launch in plan)


def correctness_reasons(
    kernels: Sequence[tuple[str, str]], digests: Mapping[str, str], checks: Sequence[KernelCheck]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(ids of the passing records used, reasons why the layer's speed may not be shown) for the digests that were timed."""
    folders = folder_of_launch()
    used, missing, failed = [], [], []
    for kernel, op in {kernel: op for op, kernel in kernels}.items():
        folder = folders.get("attn_res" if op == "mlp_res" else op, op)
        mine = [c for c in checks if c.kernel == kernel and c.digest == digests.get(f"kernels/{folder}") and not c.stale]
        bad = [c for c in mine if not c.passed]
        if bad:
            failed.append(f"{kernel} fails in {bad[0].evidence}")
        elif mine:
            used.append(mine[0].evidence)
        else:
            missing.append(kernel)
    reasons = [f"correctness: {text}" for text in failed]
    if missing:
        named = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        reasons.append(f"correctness: no passing record under the timed digest of {len(missing)} kernel(s): {named}")
    return tuple(dict.fromkeys(used)), tuple(reasons)


@dataclass(frozen=True, kw_only=True)
class Store:
    """Every published record, read and judged once. `stale`: evidence id of the newest record of its case -> why it is stale."""

    runs: tuple[tuple[Run, tuple[Evidence, ...]], ...]
    stale: Mapping[str, tuple[str, ...]]
    checks: tuple[KernelCheck, ...]
    policy: Policy


def read_store(root: Path = PUBLISHED) -> Store:
    """Raises HarnessError when a run cannot be read."""
    policy = load_policy()
    folders = published_runs(root)
    stale = {cell.evidence: cell.reasons for cell in freshness(root, policy).cells} if folders else {}
    runs = tuple((read_run(folder), tuple(read_evidence(folder))) for folder in folders)
    checks = kernel_checks((r for _, records in runs for r in records), stale, policy.limit("numerics", "error_ratio"))
    return Store(runs=runs, stale=stale, checks=tuple(checks), policy=policy)


def read_published(root: Path = PUBLISHED, store: Store | None = None) -> PublishedCells:
    """Everything published about speed, judged against this checkout. Raises HarnessError when a run cannot be read."""
    store = store or read_store(root)
    stale, checks, policy = store.stale, store.checks, store.policy
    today = digests_now()
    results: dict[str, CellResult] = {}
    launches: list[LaunchTimes] = []
    for run, records in store.runs:
        for record in records:
            subject = str(record.details.get("case") or record.case.subject)
            if (match := CASE.fullmatch(subject)) and ("fused_us" in record.details):
                for made in _layer_results(run, record, match, checks, _stale_layer(run, record, stale, today, policy)):
                    results[made.cell.id] = _with_repeat(results.get(made.cell.id), made)
            elif (
                (match := PROFILE.fullmatch(subject))
                and record.details.get("kernels")
                and not _stale_layer(run, record, stale, today, policy)
            ):
                launches += _launch_times(run, record, match, checks)
            elif (match := STOCK_PROFILE.fullmatch(subject)) and isinstance(table := record.details.get("launches_in_order"), list | tuple):
                named = tuple((str(name), tuple(float(us) for us in samples)) for name, samples in table)
                place = (int(match["tp"]), int(match["rows"]))
                launches.append(
                    LaunchTimes(
                        tp=place[0], rows=place[1], gpu=gpu_of(run).name, launches=named, evidence=record.id, backend=STOCK
                    )
                )  # fmt: skip
    kept = tuple(results.values())
    measured = [r for r in kept if r.outcome == "measured"]
    points = {b: tuple(_point(r) for r in measured if r.cell.backend == b and r.cell.q == 1) for b in (OURS, STOCK)}
    return PublishedCells(results=kept, launches=tuple(launches), points=points, gpu=measured[0].cell.gpu if measured else None)


def published_workloads(store: Store) -> tuple[dict[str, Any], ...]:
    """Workloads of the nano engine that take too long for every run, each with its evidence id; a stale one has its reasons and no numbers.
    The newest record of a case counts."""
    found = {}
    for record in (record for _, records in store.runs for record in records):
        told = record.details.get("workload")
        if record.check != WORKLOADS or not isinstance(told, Mapping) or record.id not in store.stale:
            continue
        row = dict(told["mixed_prefill"])
        if store.stale[record.id]:
            row |= {"sides": {}, "reasons": [*row["reasons"], *(f"stale: {reason}" for reason in store.stale[record.id])]}
            row = {name: value for name, value in row.items() if "speed_up" not in name}
        found[str(record.details.get("case"))] = {**told, "mixed_prefill": row, "evidence": record.id}
    return tuple(found.values())


def _stale_layer(
    run: Run, record: Evidence, stale: Mapping[str, tuple[str, ...]], today: Mapping[str, str], policy: Policy
) -> tuple[str, ...]:
    """Why a record of one layer no longer describes this checkout. A layer runs 13 launches and not the executor of a whole step, so it is
    bound to the folders of those launches where the run recorded their digests; the digest of all kernels together also covers the rest.

    A record that freshness does not list was superseded by a newer one of the same case.
    """
    reasons = stale.get(record.id, ("superseded by a newer record of the same case",))
    recorded = run.config.get("digests") or {}
    folders = folder_of_launch()
    names = {folders[launch.op] for launch in layer_plan(K3, Shard(config=K3, tp=8), TIMED_LAYER, 1)}
    finer = [f"{kind}/{name}" for kind in ("kernels", "contracts") for name in sorted(names)]
    if any(name not in recorded for name in finer):
        return reasons
    whole = {f"{kind} changed" for kind in ("kernels", "contracts")}
    bound = {name: str(recorded[name]) for name in (*finer, "config", "toolchain") if name in recorded}
    kinds = tuple(str(kind) for kind in policy.evidence.get("bound_to", ()))
    return tuple(dict.fromkeys([*(r for r in reasons if r not in whole), *changed(bound, today, kinds)]))


def _with_repeat(before: CellResult | None, made: CellResult) -> CellResult:
    """The later record stands; the earlier one is named, with its time when both are shown."""
    if before is None:
        return made
    repeats = [*before.conditions.get("repeats", ()), {"evidence": before.evidence, "step_us": before.step_us}]
    return replace(made, conditions={**made.conditions, "repeats": repeats})


def _layer_results(
    run: Run, record: Evidence, match: re.Match[str], checks: Sequence[KernelCheck], stale: tuple[str, ...]
) -> list[CellResult]:
    tp, rows, q = (int(match[name]) for name in ("tp", "rows", "q"))
    details = record.details
    digests = run.config.get("digests") if isinstance(run.config.get("digests"), Mapping) else {}
    reasons = [f"stale: {reason}" for reason in stale]
    used: tuple[str, ...] = ()
    try:
        gpu = gpu_of(run)
        kernels = kernels_of_layer(tp, rows, q)
        used, missing = correctness_reasons(kernels, digests or {}, checks)
        reasons += missing
    except (Unsupported, ValueError) as error:
        return [_unreadable(record, tp, rows, q, str(error))]
    if details.get("waits_that_ran_out_count") != 0:
        reasons.append(f"waits that ran out: got {details.get('waits_that_ran_out_count')!r}, needs 0")
    launches = {OURS: len(kernels), STOCK: len(details.get("stock_launches", ()))}
    made = []
    for backend, name in ((OURS, "fused"), (STOCK, "stock")):
        if f"{name}_us" not in details:
            continue
        cell = Cell(
            model="kimi-k3",
            gpu=gpu.name,
            tp=tp,
            requests=rows // q,
            q=q,
            context_tokens=0,
            acceptance_length=1.0,
            backend=backend,
            scope=Scope.LAYER,
        )
        shown = not reasons
        # The experts that were really read: looped-back scores repeat, so they are fewer than independent ones would choose.
        distinct = details.get("experts_read_count" if backend == OURS else "stock_experts_read_count")
        made.append(
            CellResult(
                cell=cell,
                source=Source.GPU_TIMER,
                outcome="measured" if shown else "unpublishable",
                step_us=float(details[f"{name}_us"]) if shown else None,
                step_low_us=float(details[f"{name}_low_us"]) if shown else None,
                step_high_us=float(details[f"{name}_high_us"]) if shown else None,
                floor_us=cell_floor(cell, distinct=distinct).hbm_us,
                evidence=record.id,
                correctness=", ".join(used) if shown and backend == OURS else "",
                kernel_digest=_digest_of_all(record.fingerprints),
                reasons=tuple(reasons),
                conditions={**_conditions(run, details, gpu, launches[backend]), "experts_read": distinct},
            )
        )
    return made


def _digest_of_all(fingerprints: Mapping[str, str]) -> str:
    """The digest of all kernels where the record has it, else one over those it names."""
    named = [f"{name} {value}" for name, value in sorted(fingerprints.items()) if name.startswith("kernels/")]
    return fingerprints.get("kernels") or (hashlib.sha256("\n".join(named).encode()).hexdigest() if named else "")


def _conditions(run: Run, details: Mapping[str, Any], gpu: Gpu, launches: int) -> dict[str, Any]:
    versions = {k: str(v) for k, v in run.hardware.items() if k in ("torch", "cuda", "driver")} | dict(run.versions)
    return {
        "hardware": str(run.hardware.get("gpu") or gpu.name),
        "gpus": 1,
        "prefill": "none",
        "speculation": "none",
        "date": run.started_utc[:10],
        "versions": versions,
        "run": run.id,
        "what": str(details.get("what", "")),
        "spread": "first and third quartile of interleaved replays",
        "launches": launches,
        "stock_excludes": str(details.get("stock_excludes", "")),
    }


def _unreadable(record: Evidence, tp: int, rows: int, q: int, why: str) -> CellResult:
    cell = Cell(
        model="kimi-k3",
        gpu="unknown",
        tp=tp,
        requests=max(rows // max(q, 1), 1),
        q=q,
        context_tokens=0,
        acceptance_length=1.0,
        backend=OURS,
        scope=Scope.LAYER,
    )
    return CellResult(cell=cell, source=Source.GPU_TIMER, outcome="error", evidence=record.id, reasons=(why,))


def _point(result: CellResult) -> LayerPoint:
    if result.step_us is None:
        raise HarnessError(f"{result.cell.id}: got no time, needs a measured layer")
    floor = cell_floor(result.cell, distinct=result.conditions.get("experts_read"))
    return LayerPoint(
        hbm_bytes=floor.hbm_bytes,
        launches=int(result.conditions["launches"]),
        step_us=result.step_us,
        rows=result.cell.rows,
        evidence=result.evidence,
        traffic=floor.launches,
    )


def launch_fits(cells: PublishedCells) -> LaunchFits | None:
    """Fits by launch, from the layers measured launch by launch on the GPU of the layers; None where those do not suffice."""
    if cells.gpu is None:
        return None
    found = []
    read = {(r.cell.tp, r.cell.rows): r.conditions.get("experts_read") for r in cells.results if r.cell.backend == OURS and r.cell.q == 1}
    for times in (times for times in cells.launches if (times.gpu, times.backend) == (cells.gpu, OURS)):
        launches = step_traffic("kimi-k3", times.tp, times.rows, 1, 0, Scope.LAYER, read.get((times.tp, times.rows)))
        found += [
            LaunchPoint(op=t.op, hbm_bytes=t.hbm_bytes, rows=times.rows, us=statistics.median(samples), evidence=times.evidence)
            for t, (_, samples) in zip(launches, times.launches, strict=True)
        ]
    layers = [(point.traffic, point.rows, point.step_us) for point in cells.points[OURS]]
    return fit_launches(found, layers, GPUS[cells.gpu].hbm_bytes_per_s)


def _launch_times(run: Run, record: Evidence, match: re.Match[str], checks: Sequence[KernelCheck]) -> list[LaunchTimes]:
    """Names of profiled kernels are cut, so they are told by order: without overlap, kernels first appear in plan order. None is
    returned when a kernel lacks a passing record, or when the counts do not fit the plan."""
    tp, rows = int(match["tp"]), int(match["rows"])
    kernels = kernels_of_layer(tp, rows, 1)
    if correctness_reasons(kernels, run.config.get("digests") or {}, checks)[1]:
        return []
    table = list(record.details["kernels"].items())
    first = list(dict.fromkeys(kernel for _, kernel in kernels))
    if len(table) != len(first):
        return []
    by_kernel = {kernel: tuple(float(x) for x in samples) for kernel, (_, samples) in zip(first, table, strict=True)}
    per_use = {kernel: sum(1 for _, k in kernels if k == kernel) for kernel in first}
    unit = len(by_kernel[first[-1]]) // per_use[first[-1]]
    if any(len(by_kernel[k]) != unit * per_use[k] for k in first):
        return []
    seen: dict[str, int] = {}
    launches = []
    for op, kernel in kernels:
        turn = seen.get(kernel, 0)
        seen[kernel] = turn + 1
        launches.append((op, by_kernel[kernel][turn :: per_use[kernel]]))
    return [LaunchTimes(tp=tp, rows=rows, gpu=gpu_of(run).name, launches=tuple(launches), evidence=record.id)]
