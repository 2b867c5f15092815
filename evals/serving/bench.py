"""Runs a bench command against each side, or takes results that are there, and reads both as cells of the matrix.

The command drives one server, because a cell of the matrix is the load of one: of several replicas the first is benched, which the table
says. `perf.serving.request_times` times every replica of the candidate.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evals.serving.config import PerfConfig
from evals.serving.launch import StartFailed
from evals.serving.names import SIDES, TABLE_OF
from evals.serving.targets import ServedTarget
from perf.bench_json import ServeResult, read_serve
from perf.matrix import CellResult
from perf.servers import is_latency, read_cell
from validation.core.settings import PROJECT_ROOT
from validation.core.types import HarnessError, Measurement
from validation.core.worker import Refused

TAIL_CHARACTERS = 600
Found = tuple[tuple[Measurement, ...], Mapping[str, Any]]


def measure_bench(targets: Mapping[str, ServedTarget]) -> Found:
    """Raises Refused where the file asks for no bench, RuntimeError where the command fails."""
    perf = targets["stock"].config.perf
    if not perf.bench and not (perf.baseline_result and perf.candidate_result):
        raise Refused(("bench: got neither bench nor two results in [perf], needs one of them",))
    if perf.bench:
        targets["stock"].link.require_alike()
    files = {role: _result_of(role, perf, targets[role]) for role in SIDES}
    cells = {role: read_cell(getattr(perf, f"{TABLE_OF[role]}_cell"), files[role], listed=False) for role in SIDES}
    served = {role: _served(path) for role, path in files.items()}
    objections = [f"{role}: {reason}" for role, cell in cells.items() for reason in cell.reasons]
    objections += [f"{role}: {words}" for role, one in served.items() if one is not None for words in _lost(one)]
    measured = [
        Measurement(name="objections", value=float(len(objections)), unit="count"),
        *_completed(served),
        *(m for role in SIDES for m in _numbers(role, cells[role], served[role])),
    ]
    times = [cells[role].step_us for role in SIDES]
    if times[0] and times[1]:
        measured.append(Measurement(name="speed_up", value=times[0] / times[1], unit="1"))
    _keep(files, list(cells.values()))
    return tuple(measured), {
        "source": "server",
        "reasons": objections,
        "tables": [{**_table(cells, served, targets), "note": "; ".join(objections)}],
    }


def _result_of(role: str, perf: PerfConfig, target: ServedTarget) -> Path:
    given = getattr(perf, f"{TABLE_OF[role]}_result")
    if given:
        return PROJECT_ROOT / str(given)
    try:
        live = target.up()
    except StartFailed as error:
        raise Refused((str(error),)) from error
    folder = Path(os.environ.get("FASTTRACK_SCRATCH") or tempfile.mkdtemp()) / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / f"{role}.json"
    result.unlink(missing_ok=True)
    places = {"{base_url}": live.base_urls[0], "{model}": target.side.name, "{result}": str(result), "{python}": sys.executable}
    places |= {"{result_dir}": str(folder), "{result_name}": result.name, "{tokenizer}": target.side.tokenizer}
    run_bench([_filled(word, places) for word in perf.bench], perf.timeout_s, role)
    if not result.is_file():
        raise RuntimeError(f"{role}: the bench command wrote no {result.name}, needs {{result}} (or {{result_dir}} and {{result_name}})")
    return result


def _filled(word: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        word = word.replace(place, value)
    return word


def run_bench(command: list[str], timeout_s: float, role: str) -> None:
    """Raises RuntimeError with the end of its output where the command fails or takes too long; its process group is ended then."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=PROJECT_ROOT, start_new_session=True)
    except OSError as error:
        raise RuntimeError(f"{role}: the bench command could not be started: {error}") from error
    try:
        told, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{role}: the bench command took longer than {timeout_s:g} s and was stopped") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        tail = " | ".join(told.decode(errors="replace")[-TAIL_CHARACTERS:].split("\n")).strip() or "it printed nothing"
        raise RuntimeError(f"{role}: the bench command ended with exit code {process.returncode}: {tail}")


def _served(path: Path) -> ServeResult | None:
    """None for a latency file, and for one that `read_cell` has objected to already."""
    try:
        return None if is_latency(path) else read_serve(path)
    except HarnessError:
        return None


def _lost(served: ServeResult) -> list[str]:
    failed = served.raw.get("failed") or 0
    asked = served.raw.get("num_prompts")
    found = [f"{failed} requests failed"] if failed else []
    if isinstance(asked, int) and asked != served.completed:
        found.append(f"{served.completed} of {asked} requests completed")
    return found


def _completed(served: Mapping[str, ServeResult | None]) -> list[Measurement]:
    """Left out where a file does not tell: a latency file holds times only, so how many requests were answered is open."""
    counts = [one.completed for one in served.values() if one is not None]
    return [Measurement(name="completed_requests", value=float(min(counts)), unit="count")] if len(counts) == len(served) else []


def _numbers(role: str, cell: CellResult, served: ServeResult | None) -> list[Measurement]:
    found = [Measurement(name=f"step_{role}", value=cell.step_us, unit="us")] if cell.step_us else []
    if served is None:
        return found
    found += [
        Measurement(name=f"output_tokens_per_s_{role}", value=served.output_tokens_per_s, unit="tokens/s"),
        Measurement(name=f"median_ttft_{role}", value=served.median_ttft_ms, unit="ms"),
        Measurement(name=f"median_tpot_{role}", value=served.median_tpot_ms, unit="ms"),
        Measurement(name=f"median_itl_{role}", value=served.median_itl_ms, unit="ms"),
    ]
    if served.acceptance_length is not None:
        found.append(Measurement(name=f"acceptance_length_{role}", value=served.acceptance_length, unit="tokens"))
    return found


def _table(
    cells: Mapping[str, CellResult], served: Mapping[str, ServeResult | None], targets: Mapping[str, ServedTarget]
) -> dict[str, Any]:
    times = ["output tokens/s", "median TTFT ms", "median TPOT ms", "step us"]
    columns = ["side", "replica", "cell", "source", "requests", *times, "acceptance"]
    rows = []
    for role, cell in cells.items():
        one = served[role]
        told = ["–"] * 4 if one is None else [
            str(one.completed), f"{one.output_tokens_per_s:.1f}", f"{one.median_ttft_ms:.1f}", f"{one.median_tpot_ms:.2f}",
        ]  # fmt: skip
        accepted = "–" if one is None or one.acceptance_length is None else f"{one.acceptance_length:.2f}"
        replica = f"1 of {max(1, len(targets[role].side.base_url))}"
        rows.append([role, replica, cell.cell.id, cell.source.value, *told, f"{cell.step_us:.0f}" if cell.step_us else "–", accepted])
    return {"title": "Both servers under one load", "columns": columns, "rows": rows}


def _keep(files: Mapping[str, Path], cells: list[CellResult]) -> None:
    """The results as they were written, and the matrix with both cells in it."""
    scratch = os.environ.get("FASTTRACK_SCRATCH")
    if not scratch:
        return
    from perf.build import build, write

    folder = Path(scratch) / "artifacts"
    write(build(servers=cells), folder)
    for role, path in files.items():
        (folder / f"{role}.json").write_bytes(path.read_bytes())
