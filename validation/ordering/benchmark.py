"""`python -m validation.ordering.benchmark OUT.json`: how fast the audit is, and how much memory it takes, on the project's own kernels.

Reads what `make audit` compiled. Measures one core (processor seconds of reading, disassembling and auditing, PTX included), growth with
the size of a kernel, a folder of 400 kernels end to end with workers and an empty cache, and the same again with a full one. The record
says on what machine, beside how much other work, and with which sources; figures elsewhere in the documentation are copied from it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from validation.core.types import HarnessError
from validation.ordering.audit import audit_kernel
from validation.ordering.binaries import load_binaries
from validation.ordering.corpus_build import toolchain, writable_cache
from validation.ordering.driver import OwnFacts
from validation.ordering.model import KernelBinary, LaunchFacts, PtxKernel, Role, RoleEntry, RoleMap
from validation.ordering.own_kernels import OwnKernel, build_own
from validation.ordering.pool import engine_digest
from validation.ordering.ptx import parse_ptx
from validation.ordering.tools import run_tool
from validation.ordering.units import Answer, Unit, audit_units

RECORD = Path(__file__).parent / "measured.json"
KERNELS = 400
ONE_CORE_KERNELS = 60
SIZES = (400, 2500, 5000, 17000)  # of the generated kernel: about 500 to 20,000 instructions
STRESS_ROLES = RoleMap(
    by_index={(i, 0): RoleEntry(role=role, reason="made up") for i, role in enumerate([Role.INPUT, Role.WEIGHT, Role.OUTPUT, Role.SCALAR])}
)


def stress_ptx(size: int) -> str:
    """A kernel of about 1.2 * `size` instructions: branches, loops, gathers and shared stores, ending in a grid wait."""
    parts = [
        ".version 8.8\n.target sm_90a\n.address_size 64",
        ".visible .entry k(.param .u64 p_x, .param .u64 p_w, .param .u64 p_y, .param .u32 p_n)",
        ".reqntid 256,1,1\n{ .reg .pred %p<20>; .reg .b32 %r<200>; .reg .b64 %rd<60>; .reg .f32 %f<200>; .shared .align 128 .b8 sm[4096];",
        "ld.param.u64 %rd1,[p_x]; ld.param.u64 %rd2,[p_w]; ld.param.u64 %rd3,[p_y]; ld.param.u32 %r50,[p_n];",
        "mov.u32 %r1,%tid.x; mov.u32 %r2,%ctaid.x; mad.lo.s32 %r3,%r2,256,%r1; mov.f32 %f9,0f00000000;",
    ]
    for i in range(size // 18 + 1):
        barrier = " bar.sync 0;" if i % 16 == 7 else ""
        parts.append(
            f"mul.wide.s32 %rd5,%r3,4; add.s64 %rd6,%rd2,%rd5; ld.global.f32 %f1,[%rd6+{i * 4}]; and.b32 %r4,%r1,{1 << i % 8};"
            f" setp.eq.s32 %p1,%r4,0; @%p1 bra C{i}; ld.global.u32 %r5,[%rd6+{i * 8}]; mul.wide.u32 %rd7,%r5,4; add.s64 %rd8,%rd2,%rd7;"
            f" ld.global.f32 %f2,[%rd8]; fma.rn.f32 %f9,%f1,%f2,%f9; st.shared.f32 [sm+{i * 4 % 4096}],%f9; C{i}: mov.u32 %r6,0;"
            f" D{i}: add.s32 %r3,%r3,{i + 1}; mul.wide.s32 %rd9,%r3,4; add.s64 %rd10,%rd2,%rd9; ld.global.f32 %f3,[%rd10];"
            f" fma.rn.f32 %f9,%f3,%f9,%f9; add.s32 %r6,%r6,1; setp.lt.s32 %p2,%r6,%r50; @%p2 bra D{i};{barrier}"
        )
    parts.append(
        "griddepcontrol.wait; mul.wide.s32 %rd5,%r3,4; add.s64 %rd6,%rd1,%rd5; ld.global.f32 %f1,[%rd6]; add.f32 %f9,%f9,%f1;"
        " add.s64 %rd8,%rd3,%rd5; st.global.f32 [%rd8],%f9; ret; }"
    )
    return "\n".join(parts)


def assemble(folder: Path, size: int) -> tuple[KernelBinary, PtxKernel]:
    """The stress kernel as a binary and as PTX."""
    text = stress_ptx(size)
    (folder / "k.ptx").write_text(text)
    run_tool("ptxas", "-arch=sm_90a", "-O1", "-o", str(folder / "k.cubin"), str(folder / "k.ptx"))
    return load_binaries(folder / "k.cubin").kernels[0], parse_ptx(text)[0]


# ---- measuring ----
def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """(result, {"wall_s", "cpu_s"}) with the processor time of child processes that ended."""
    started, before = time.perf_counter(), os.times()
    result = work()
    after = os.times()
    spent = sum(after[:4]) - sum(before[:4])
    return result, {"wall_s": round(time.perf_counter() - started, 2), "cpu_s": round(spent, 2)}


def peak_mib(workers: int) -> float:
    """Upper bound of the memory of this process and `workers` children at once: each counted at its own peak."""
    own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round((own + workers * child) / 1024, 1)


def folder_of_kernels(kernels: list[OwnKernel], jobs: int) -> dict[str, Any]:
    """All of them with an empty cache, then again with a full one."""
    units = [Unit((kernel.cubin, kernel.ptx), OwnFacts(kernel)) for kernel in kernels]
    with tempfile.TemporaryDirectory() as cache:
        cold, first = timed(lambda: audit_units(units, workers=jobs, cache=Path(cache)))
        warm, second = timed(lambda: audit_units(units, workers=jobs, cache=Path(cache)))
    instructions = sum(result.instructions for answer in cold for result in answer.results)
    if _findings(cold) != _findings(warm):
        raise HarnessError("benchmark: got other results from the cache, needs the same")
    rate = round(instructions / first["cpu_s"])
    return {
        "kernels": len(kernels),
        "workers": jobs,
        "instructions": instructions,
        "instructions_per_cpu_s": rate,
        "cold": first,
        "warm": second,
    }


def _findings(answers: list[Answer]) -> list[Any]:
    """What was found, without how long it took (kernels with the same code share one entry)."""
    return [(result.path, result.findings, result.accesses) for answer in answers for result in answer.results]


def growth(folder: Path) -> list[dict[str, Any]]:
    """The generated kernel at several sizes: audit alone, with PTX, best of two."""
    rows = []
    for size in SIZES:
        kernel, ptx = assemble(folder, size)
        work = functools.partial(audit_kernel, kernel, STRESS_ROLES, ptx, LaunchFacts(pdl=True))
        best = max(min(timed(work)[1]["cpu_s"] for _ in range(2)), 0.01)
        rows.append({"instructions": len(kernel.instructions), "ptx": len(ptx.instructions), "cpu_s": best})
        rows[-1]["instructions_per_cpu_s"] = round(len(kernel.instructions) / best)
    return rows


def measure(jobs: int = 2) -> dict[str, Any]:
    """The whole record. Raises HarnessError when the kernels are not compiled yet."""
    build = build_own("full", ("sm_90a",), jobs=jobs)
    if build.compiled:
        raise HarnessError(f"benchmark: got {build.compiled} kernels compiled just now, needs them from before; run it again")
    if len(build.kernels) < KERNELS:
        raise HarnessError(f"benchmark: got {len(build.kernels)} kernels, needs {KERNELS}")
    kernels = list(build.kernels)[:KERNELS]
    one = kernels[:: max(1, len(kernels) // ONE_CORE_KERNELS)][:ONE_CORE_KERNELS]
    found: dict[str, Any] = {
        "measured_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()},
        "load_before": [round(x, 2) for x in os.getloadavg()],
        "engine": engine_digest()[:16],
        "toolchain": dict(toolchain()),
    }
    found["one_core"] = folder_of_kernels(one, 1)
    found["folder"] = folder_of_kernels(kernels, jobs)
    found["folder"]["peak_mib"] = peak_mib(jobs)
    with tempfile.TemporaryDirectory() as folder:
        found["growth"] = growth(Path(folder))
    found["load_after"] = [round(x, 2) for x in os.getloadavg()]
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m validation.ordering.benchmark", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=RECORD)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(arguments)
    writable_cache(None)
    found = measure(given.jobs)
    draft = given.out.with_suffix(".tmp")
    draft.write_text(json.dumps(found, indent=1) + "\n")
    draft.replace(given.out)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
