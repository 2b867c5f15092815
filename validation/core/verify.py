"""Has anyone touched this evidence? Finds edited, dropped, reordered, doubled and foreign records, and files that differ from the manifest.

The chain proves order and completeness against accident and careless editing; somebody who rewrites the whole folder can forge a new chain,
which is what a signature over the manifest is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from validation.core import jsonio
from validation.core.store import (
    ARTIFACTS_FOLDER,
    EVIDENCE_FILE,
    MANIFEST_FILE,
    PLAN_FILE,
    RUN_FILE,
    decode_record,
    file_sha256,
    genesis,
    id_of_line,
    read_json,
    read_run,
    sha256_hex,
)
from validation.core.types import HarnessError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with a run folder. `kind`: edited | broken_chain | foreign | doubled | dropped | torn | unreadable | manifest."""

    kind: str
    where: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    run: str
    closed: bool
    n_records: int
    problems: tuple[Problem, ...]

    @property
    def intact(self) -> bool:
        return not self.problems


def verify(run_dir: Path) -> Verification:
    """Check every record and file of a run folder. Raises HarnessError only when there is no run to check."""
    if not run_dir.is_dir():
        raise HarnessError(f"run: got {run_dir}, needs a run folder; `list` shows what there is")
    problems: list[Problem] = []
    run = read_run(run_dir)
    if run.id != run_dir.name:
        problems.append(Problem(kind="foreign", where=RUN_FILE, message=f"says {run.id}, the folder is called {run_dir.name}"))
    n_records, head = _verify_lines(run_dir, run.id, problems)
    closed = (run_dir / MANIFEST_FILE).exists()
    if closed:
        _verify_manifest(run_dir, run.id, n_records, head, problems)
    return Verification(run=run.id, closed=closed, n_records=n_records, problems=tuple(problems))


def _verify_lines(run_dir: Path, run_id: str, problems: list[Problem]) -> tuple[int, str]:
    head = genesis(run_dir)
    seen: set[Any] = set()
    n_records = 0
    with (run_dir / EVIDENCE_FILE).open("rb") as handle:
        for n_records, raw in enumerate(handle, start=1):
            where = f"{EVIDENCE_FILE}:{n_records}"
            line = raw.rstrip(b"\n")
            if not raw.endswith(b"\n"):
                problems.append(Problem(kind="torn", where=where, message="the last line has no end; resuming the run repairs it"))
            problems += _verify_line(line, where, run_id, head, seen)
            head = sha256_hex(line)
    return n_records, head


def _verify_line(line: bytes, where: str, run_id: str, head: str, seen: set[Any]) -> list[Problem]:
    try:
        # The bytes are hashed as they are, so the cheap parse is enough; the full decode only words the errors.
        record = jsonio.loads(line)
        identity, run, previous = record["id"], record["run"], record["previous"]
        case = record["case"]
        key = (record["check"], case["subject"], jsonio.dumps(case["params"]), case["seed"], record["rank"])
        hash(key)
    except (HarnessError, KeyError, TypeError):
        return [Problem(kind="unreadable", where=where, message=_why_unreadable(line, where))]
    found = []
    if identity != id_of_line(line):
        found.append(Problem(kind="edited", where=where, message=f"carries the id {identity}, its content gives {id_of_line(line)}"))
    if run != run_id:
        found.append(Problem(kind="foreign", where=where, message=f"belongs to {run}"))
    if previous != head:
        found.append(Problem(kind="broken_chain", where=where, message=f"{identity} does not follow the record before it"))
    if key in seen:
        found.append(Problem(kind="doubled", where=where, message=f"{key[0]} measured the same case before"))
    seen.add(key)
    return found


def _why_unreadable(line: bytes, where: str) -> str:
    try:
        decode_record(line, where)
    except HarnessError as error:
        return str(error)
    return "is no record of this suite"


def _verify_manifest(run_dir: Path, run_id: str, n_records: int, head: str, problems: list[Problem]) -> None:
    manifest = read_json(run_dir / MANIFEST_FILE)
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        problems.append(Problem(kind="manifest", where=MANIFEST_FILE, message="has no table of files"))
        return
    if manifest.get("run") != run_id:
        problems.append(Problem(kind="manifest", where=MANIFEST_FILE, message=f"belongs to {manifest.get('run')}"))
    if manifest.get("records") != n_records:
        message = f"counts {manifest.get('records')} records, the file holds {n_records}"
        problems.append(Problem(kind="dropped", where=MANIFEST_FILE, message=message))
    elif manifest.get("head") != head:
        problems.append(Problem(kind="edited", where=MANIFEST_FILE, message="the last record is not the one the run closed with"))
    for name, digest in manifest["files"].items():
        path = run_dir / name
        inside = path.resolve().is_relative_to(run_dir.resolve())
        if not inside or not path.is_file():
            problems.append(Problem(kind="dropped", where=name, message="is missing"))
        elif file_sha256(path) != digest:
            problems.append(Problem(kind="edited", where=name, message="differs from the manifest"))
    expected = {RUN_FILE, PLAN_FILE, EVIDENCE_FILE} - set(manifest["files"])
    present = {p.relative_to(run_dir).as_posix() for p in (run_dir / ARTIFACTS_FOLDER).rglob("*") if p.is_file()}
    added = sorted(present - set(manifest["files"]))
    problems += [Problem(kind="manifest", where=name, message="is not covered by the manifest") for name in sorted(expected)]
    problems += [Problem(kind="foreign", where=name, message="was added after the run") for name in added]
