"""Auditing many kernels: worker processes, and a cache so that what did not change is not analysed again.

A cache entry is one file named by a digest of the code, the PTX, the roles, the launch facts and the engine's own sources; a changed
engine never serves an old answer. Entries that cannot be read are recomputed.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import multiprocessing
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from validation.ordering.audit import audit_kernel
from validation.ordering.model import AuditResult, KernelBinary, LaunchFacts, PtxKernel, RoleMap

BATCH_INSTRUCTIONS = 4000  # small kernels travel to a worker together


@dataclass(frozen=True)
class Job:
    """One kernel with everything its audit depends on."""

    kernel: KernelBinary
    roles: RoleMap
    ptx: PtxKernel | None = None
    launch: LaunchFacts = field(default_factory=LaunchFacts)


# What every answer passes through. All that it imports within the package counts as well.
ROOTS = ("units",)
_IMPORT = re.compile(r"^\s*(?:from validation\.ordering\.(\w+) import|from validation\.ordering import ([\w, ]+))", re.MULTILINE)


def engine_modules() -> tuple[str, ...]:
    """Modules of this package whose change may change an answer."""
    folder, found, waiting = Path(__file__).parent, set[str](), list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name in found or not (folder / f"{name}.py").is_file():
            continue
        found.add(name)
        for one, several in _IMPORT.findall((folder / f"{name}.py").read_text()):
            waiting += [one] if one else [part.split(" as ")[0].strip() for part in several.split(",")]
    return tuple(sorted(found))


@functools.cache
def engine_digest() -> str:
    """Digest of the engine's source files: part of each cache key, so that a changed engine never serves an old answer."""
    digest = hashlib.sha256()
    for name in engine_modules():
        digest.update(f"\0{name}\0".encode() + (Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()


def job_digest(job: Job) -> str:
    """Key of a job: what the answer depends on, and nothing else."""
    digest = hashlib.sha256(engine_digest().encode())
    kernel = job.kernel
    facts = (kernel.name, kernel.arch, kernel.path, kernel.digest, kernel.code_digest, len(kernel.instructions), kernel.parameters)
    if not kernel.code_digest:  # lowered or handmade kernels have no code section to go by
        facts = (*facts, kernel.instructions)  # type: ignore[assignment]
    digest.update(repr(facts).encode())
    digest.update(repr((sorted(job.roles.by_index.items()), sorted(job.roles.by_name.items()), job.roles.source)).encode())
    launch = job.launch
    digest.update(
        repr(
            (
                launch.pdl,
                launch.cta_threads,
                sorted(launch.ordered),
                launch.has_dependents,
                launch.barrier_transitivity,
                sorted(launch.released),
                sorted(launch.guards_true),
            )
        ).encode()
    )
    if job.ptx is not None:
        digest.update(repr((job.ptx.parameters, job.ptx.cta_threads, job.ptx.instructions)).encode())
    return digest.hexdigest()


def audit_job(job: Job) -> AuditResult:
    """`audit_kernel`, with a failure of the engine turned into an incomplete result: one bad kernel must not hide the others."""
    try:
        return audit_kernel(job.kernel, job.roles, job.ptx, job.launch)
    except (RecursionError, MemoryError, ValueError, KeyError, IndexError, TypeError, AttributeError, ZeroDivisionError) as error:
        kernel = job.kernel
        return AuditResult(
            kernel=kernel.name,
            arch=kernel.arch,
            digest=kernel.digest,
            path=kernel.path,
            parameters=kernel.parameters,
            notes=(f"the engine failed on this kernel: {type(error).__name__}: {error}",),
            instructions=len(kernel.instructions),
            code_digest=kernel.code_digest,
            complete=False,
        )


def _audit_batch(jobs: list[Job]) -> list[AuditResult]:
    return [audit_job(job) for job in jobs]


def _read(path: Path) -> AuditResult | None:
    try:
        found = pickle.loads(path.read_bytes())
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError, ValueError):
        return None
    return found if isinstance(found, AuditResult) else None


def _write(path: Path, result: AuditResult) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".entry-")
    with os.fdopen(handle, "wb") as file:
        pickle.dump(result, file, protocol=pickle.HIGHEST_PROTOCOL)
    os.replace(name, path)


def _batches(indices: Iterable[int], jobs: list[Job]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for index in indices:
        batch.append(index)
        size += len(jobs[index].kernel.instructions)
        if size >= BATCH_INSTRUCTIONS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def audit_many(
    jobs: Iterable[Job], workers: int | None = None, cache: str | Path | None = None, progress: Callable[[int, int], None] | None = None
) -> list[AuditResult]:
    """Results in the order of the jobs.

    `workers` processes (default: the cores of this machine, at most 4; 1 means this process). `cache` is a folder that is created when
    needed; results that are not complete are never stored. `progress(done, total)` is called as results come in.
    """
    work = list(jobs)
    results: list[AuditResult | None] = [None] * len(work)
    paths: list[Path | None] = [Path(cache) / f"{job_digest(job)}.pickle" if cache is not None else None for job in work]
    for index, path in enumerate(paths):
        results[index] = _read(path) if path is not None else None
    missing = [index for index, result in enumerate(results) if result is None]
    done = len(work) - len(missing)
    if progress is not None:
        progress(done, len(work))
    for batch, answers in _answers(missing, work, workers or min(4, os.cpu_count() or 1)):
        for index, answer in zip(batch, answers, strict=True):
            results[index] = answer
            path = paths[index]
            if path is not None and answer.complete:
                _write(path, answer)
        done += len(batch)
        if progress is not None:
            progress(done, len(work))
    return [result for result in results if result is not None]


def _answers(missing: list[int], work: list[Job], workers: int) -> Iterator[tuple[list[int], list[AuditResult]]]:
    batches = list(_batches(missing, work))
    if workers <= 1 or len(batches) <= 1:
        for batch in batches:
            yield batch, _audit_batch([work[index] for index in batch])
        return
    # spawn: the parent may hold threads (torch), which do not survive a fork
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(_audit_batch, [work[index] for index in batch]): batch for batch in batches}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()
