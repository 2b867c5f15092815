"""Small cases under NVIDIA's compute-sanitizer: memcheck, racecheck, initcheck and synccheck, one record each.

Errors of host API calls are left out: the kernel compiler asks the driver for entry points that it does not have, and copes. Only this
project's kernels are instrumented, except for initcheck, which must see who wrote what was read.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OURS = ("--kernel-name", "kernel_substring=kimi_k3_decode")
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (?P<errors>\d+) error)|(?:RACECHECK SUMMARY: (?P<hazards>\d+) hazard.*?\((?P<bad>\d+) error)")
LIMIT_S = 240
# One token a request and a full verify of nano on one rank: every kernel of a step, the smallest shapes.
PROGRAM = (sys.executable, "-m", "perf.kernels")
ARGUMENTS = ("check", "--models", "nano-tp1", "--shapes", "1x1,8x8", "--in-process")


def command(tool: str, out: Path) -> list[str]:
    options = ["--tool", tool, "--print-limit", "20", "--error-exitcode", "9"]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    options += [] if tool == "initcheck" else OURS
    return ["compute-sanitizer", *options, *PROGRAM, str(out / f"sanitizer-{tool}"), *ARGUMENTS]


def summary(text: str) -> tuple[int | None, str]:
    """(errors the tool counted, or None when it printed no summary, the summary line)."""
    found = [match for match in SUMMARY.finditer(text)]
    if not found:
        return None, ""
    last = found[-1]
    return int(last["errors"] or last["bad"] or 0), last.group(0)


def record_of(tool: str, returned: int, text: str, seconds: float) -> dict[str, Any]:
    """The record of one tool's run: holds only if the program ran to its end, its checks held and the tool counted nothing."""
    errors, line = summary(text)
    cases = re.findall(r"checked: (\d+) cases, (\d+) failed", text)
    record: dict[str, Any] = {"case": f"compute-sanitizer-{tool}", "seconds": round(seconds, 1), "summary": line}
    if errors is None or not cases:
        tail = text.strip().splitlines()[-6:]
        return {**record, "error": f"no summary; exit code {returned}; " + " | ".join(tail)[:500], "holds": False}
    made, failed = map(int, cases[-1])
    named = sorted({m for m in re.findall(r"in (kernel_cutlass\S{0,60}|void \S{0,60})", text)})
    holds = returned == 0 and errors == 0 and failed == 0 and made > 0
    return {**record, "errors_count": errors, "cases_count": made, "failed_count": failed, "kernels_named": named[:10], "holds": holds,
            "first_lines": [] if holds else [x for x in text.splitlines() if x.startswith("========= ")][:40]}  # fmt: skip


def run(records: Any, out: Path, tools: tuple[str, ...] = TOOLS) -> int:
    """All tools at once, each killed at LIMIT_S; returns how many did not hold."""
    if shutil.which("compute-sanitizer") is None:
        for tool in tools:
            records.add({"case": f"compute-sanitizer-{tool}", "error": "not run: compute-sanitizer is not on the PATH"})
        return len(tools)
    running = []
    for tool in tools:
        log = (out / f"sanitizer-{tool}.log").open("w+")
        process = subprocess.Popen(command(tool, out), stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "2"})
        running.append((tool, process, log, time.perf_counter()))
    failed = 0
    for tool, process, log, begin in running:
        try:
            process.wait(timeout=max(1.0, LIMIT_S - (time.perf_counter() - begin)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.seek(0)
        record = record_of(tool, process.returncode, log.read(), time.perf_counter() - begin)
        log.close()
        records.add(record)
        failed += not record["holds"]
        print({k: v for k, v in record.items() if k != "first_lines"}, *record.get("first_lines", ())[:6], sep="\n", flush=True)
    return failed
