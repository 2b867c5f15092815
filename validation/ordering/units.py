"""Auditing files: each unit (a cubin with the PTX beside it, a library, a wheel) is read, audited and cached on its own.

Workers read the files themselves, in portions large enough that the start of `nvdisasm` does not count, so that neither one process nor
the way between them carries all instructions of a large folder. A cache entry is named by the content of the files, the roles and launch
facts, and the audit's own sources; what was read under another path is served with the new one.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from validation.ordering.binaries import READ_SUFFIXES, load_binaries
from validation.ordering.model import AuditResult, FileError, KernelBinary, LaunchFacts, PtxKernel, RoleMap
from validation.ordering.pool import Job, audit_job, engine_digest

PORTION_BYTES = 3 << 20  # of cubins and libraries read at once


class Facts(Protocol):
    """What a unit's owner knows about its kernels. Must be picklable."""

    def roles(self, kernel: KernelBinary) -> RoleMap: ...

    def launch(self, kernel: KernelBinary) -> LaunchFacts: ...

    def token(self) -> str:
        """Text that differs whenever the facts do: part of the cache key."""
        ...


@dataclass(frozen=True)
class Unit:
    """Files that belong together."""

    paths: tuple[Path, ...]
    facts: Facts
    arch: str | None = None

    def key(self) -> str:
        """Name of the cache entry; empty when a file cannot be read, which the audit then reports."""
        digest = hashlib.sha256(f"{engine_digest()}\0{self.arch}\0{self.facts.token()}".encode())
        try:
            for path in self.paths:
                digest.update(f"\0{path.suffix}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
        except OSError:
            return ""
        return digest.hexdigest()

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths if path.is_file() and path.suffix != ".ptx")


@dataclass
class Answer:
    """What a unit came to. `kernels` carry no instructions any more; `results` belong to them in order."""

    paths: tuple[str, ...]
    kernels: list[KernelBinary] = field(default_factory=list)
    results: list[AuditResult] = field(default_factory=list)
    errors: list[FileError] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not self.errors and all(result.complete for result in self.results)

    def moved_to(self, paths: tuple[str, ...]) -> Answer:
        """The same answer for the same files elsewhere."""
        new = dict(zip(self.paths, paths, strict=True))

        def path(old: str) -> str:
            file, mark, member = old.partition("!")
            return new.get(file, file) + mark + member

        kernels = [replace(kernel, path=path(kernel.path)) for kernel in self.kernels]
        return Answer(paths, kernels, [replace(result, path=path(result.path)) for result in self.results], list(self.errors))


# ---- which files belong together ----
def units_of(paths: Sequence[Path], facts: Facts, arch: str | None = None) -> list[Unit]:
    """One unit a cubin with its PTX, a library or a wheel; everything in one unit when some PTX has no cubin of its name beside it."""
    files: list[Path] = []
    for path in paths:
        inside = (
            sorted(p for p in path.rglob("*") if p.is_file() and (p.suffix in READ_SUFFIXES or ".so." in p.name)) if path.is_dir() else []
        )
        files += inside or [path]
    files = list(dict.fromkeys(files))
    stems = {path.with_suffix("") for path in files if path.suffix == ".cubin"}
    if any(path.suffix == ".ptx" and path.with_suffix("") not in stems for path in files):
        return [Unit(tuple(files), facts, arch)]
    grouped: dict[Path, list[Path]] = {}
    for path in files:
        grouped.setdefault(path.with_suffix("") if path.suffix in (".cubin", ".ptx") else path, []).append(path)
    return [Unit(tuple(group), facts, arch) for group in grouped.values()]


def match_ptx(kernel: KernelBinary, texts: Sequence[PtxKernel]) -> PtxKernel | None:
    """The PTX of a kernel: same name, and the same target where there are several."""
    same = [text for text in texts if text.name == kernel.name and text.target.rstrip("af") == kernel.arch.rstrip("af")]
    if len(same) > 1:
        stem = kernel.path.partition("!")[0].rpartition(".")[0]
        same = [text for text in same if text.path.partition("!")[0].rpartition(".")[0] == stem] or same
    return same[0] if same else None


# ---- the work ----
def audit_units(
    units: Sequence[Unit], *, workers: int = 2, cache: Path | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Answer]:
    """One answer a unit, in order. `cache` is a folder; answers with errors or unfinished analyses are never stored."""
    entries = [cache / f"{key}.pickle" if cache is not None and (key := unit.key()) else None for unit in units]
    answers = [_stored(entry, unit) for entry, unit in zip(entries, units, strict=True)]
    missing = [number for number, answer in enumerate(answers) if answer is None]
    done = len(units) - len(missing)
    for portion, found in _portions(units, missing, workers):
        for number, answer in zip(portion, found, strict=True):
            answers[number] = answer
            entry = entries[number]
            if entry is not None and answer.complete:
                _store(entry, answer)
        done += len(portion)
        if progress is not None:
            progress(done, len(units))
    return [answer for answer in answers if answer is not None]


def _portions(units: Sequence[Unit], missing: Sequence[int], workers: int) -> Iterator[tuple[list[int], list[Answer]]]:
    """Like with like: a portion of one architecture starts `nvdisasm` once."""
    ordered = sorted(missing, key=lambda number: _flavour(units[number]))
    limit = min(PORTION_BYTES, sum(units[number].bytes for number in missing) // max(1, workers) + 1)
    portions: list[list[int]] = []
    size, flavour = limit, b""
    for number in ordered:
        if size >= limit or _flavour(units[number]) != flavour:
            portions.append([])
            size, flavour = 0, _flavour(units[number])
        portions[-1].append(number)
        size += units[number].bytes
    if workers <= 1 or len(portions) <= 1:
        for portion in portions:
            yield portion, audit_portion([units[number] for number in portion])
        return
    # spawn: the parent may hold threads (torch), which do not survive a fork
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(audit_portion, [units[number] for number in portion]): portion for portion in portions}
        for future in concurrent.futures.as_completed(waiting):
            yield waiting[future], future.result()


def _flavour(unit: Unit) -> bytes:
    """The ELF flags of the first file, which name the architecture of a cubin."""
    try:
        with unit.paths[0].open("rb") as file:
            return file.read(0x34)[0x30:]
    except OSError:
        return b""


def audit_portion(units: Sequence[Unit]) -> list[Answer]:
    """Reads all files of some units at once and audits their kernels."""
    answers = [Answer(tuple(map(str, unit.paths))) for unit in units]
    owner = {path: number for number, answer in enumerate(answers) for path in answer.paths}
    texts: list[list[PtxKernel]] = [[] for _ in units]
    for arch in dict.fromkeys(unit.arch for unit in units):
        loaded = load_binaries([path for unit in units if unit.arch == arch for path in unit.paths], arch)
        for error in loaded.errors:
            # A folder without any file is its own unit; what names no file of ours belongs to the first.
            answers[owner.get(_file(error.path), 0)].errors.append(error)
        for text in loaded.ptx:
            texts[owner[_file(text.path)]].append(text)
        for kernel in loaded.kernels:
            number = owner[_file(kernel.path)]
            answers[number].kernels.append(kernel)
    for number, (unit, answer) in enumerate(zip(units, answers, strict=True)):
        for position, kernel in enumerate(answer.kernels):
            job = Job(kernel, unit.facts.roles(kernel), match_ptx(kernel, texts[number]), unit.facts.launch(kernel))
            answer.results.append(audit_job(job))
            answer.kernels[position] = replace(kernel, instructions=(), constant_banks={})
        texts[number] = []
    return answers


def _file(label: str) -> str:
    """The file of "FILE!MEMBER#KERNEL"."""
    file = label.partition("!")[0]
    return file if Path(file).exists() else file.partition("#")[0]


def _stored(entry: Path | None, unit: Unit) -> Answer | None:
    if entry is None:
        return None
    try:
        found = pickle.loads(entry.read_bytes())
        return found.moved_to(tuple(map(str, unit.paths))) if isinstance(found, Answer) else None
    except Exception:  # a damaged entry is computed again, whatever is wrong with it
        return None


def _store(entry: Path, answer: Answer) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=entry.parent, prefix=".entry-", delete=False) as file:
        pickle.dump(answer, file, protocol=pickle.HIGHEST_PROTOCOL)
    os.replace(file.name, entry)
