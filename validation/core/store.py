"""The evidence folder of one run: written once, appended to, closed with a manifest, resumed after any interrupt.

    reports/runs/R-<utc>-<digest>/
        run.json        what ran, on which code and machine (written once)
        plan.json       every planned case with its limits, fixed before the first measurement
        evidence.jsonl  one record a line; record n carries the digest of line n-1, the first one that of run.json and plan.json
        artifacts/      files a check left, each named with its digest in its record
        manifest.json   written at the end: number of records, digest of the last line and of every file

A line is canonical JSON that starts with its id; the id is the digest of the line with an empty id, so that an edited record no longer
carries its own name. Only the parent process writes here; if anything else touches the file, the next append stops the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from validation.core import jsonio
from validation.core.types import Evidence, HarnessError, Run

RUN_FILE = "run.json"
PLAN_FILE = "plan.json"
EVIDENCE_FILE = "evidence.jsonl"
MANIFEST_FILE = "manifest.json"
ARTIFACTS_FOLDER = "artifacts"
ID_DIGITS = 12

Key = tuple[str, str, int]  # check id, case id, rank: what a run measures once


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_sha256(path: Path) -> str:
    """Digest of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def genesis(run_dir: Path) -> str:
    """What the first record's `previous` must be: it ties the records to run.json and plan.json."""
    return sha256_hex((file_sha256(run_dir / RUN_FILE) + file_sha256(run_dir / PLAN_FILE)).encode())


def encode_record(record: Evidence) -> tuple[Evidence, bytes]:
    """The record with its id, and its line without the newline. `id` given is ignored: it follows from the content."""
    body = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    blank = jsonio.dumps({**body, "id": ""}).encode()
    identity = "E-" + sha256_hex(blank)[:ID_DIGITS]
    head = b'{"id":""'
    if not blank.startswith(head):
        raise HarnessError(f"evidence: got a line that starts {blank[:20]!r}, needs {head!r}; the id must be the first field")
    line = b'{"id":"' + identity.encode() + b'"' + blank[len(head) :]
    return dataclasses.replace(record, id=identity), line


def id_of_line(line: bytes) -> str:
    """The id a line should carry, from its bytes alone."""
    cut = len(b'{"id":"E-') + ID_DIGITS
    return "E-" + sha256_hex(b'{"id":"' + line[cut:])[:ID_DIGITS]


def decode_record(line: bytes, where: str) -> Evidence:
    """Raises HarnessError naming `where` when the line is not a record of this suite."""
    try:
        return jsonio.decode(Evidence, jsonio.loads(line), where)
    except HarnessError as error:
        raise HarnessError(f"{where}: {error}") from error


def read_run(run_dir: Path) -> Run:
    return jsonio.decode(Run, read_json(run_dir / RUN_FILE), RUN_FILE)


def read_json(path: Path) -> Any:
    """Raises HarnessError when the file is missing, unreadable or not strict JSON."""
    try:
        return jsonio.loads(path.read_bytes())
    except OSError as error:
        raise HarnessError(f"{path.name}: got {error.strerror or error}, needs a readable file at {path}") from error
    except HarnessError as error:
        raise HarnessError(f"{path}: {error}") from error


def read_evidence(run_dir: Path) -> Iterator[Evidence]:
    """All whole records in order. A torn last line (no newline) is left out; resuming repairs it."""
    path = run_dir / EVIDENCE_FILE
    if not path.exists():
        return
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if line.endswith(b"\n"):
                yield decode_record(line[:-1], f"{EVIDENCE_FILE}:{number}")


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside, sync, rename: a reader sees the old file or the new one. Raises HarnessError and leaves no part file."""
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> HarnessError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free space and run again, it resumes" if full else "make the folder writable and run again"
    return HarnessError(f"{path.name}: got {error.strerror or error} while writing {path}, needs a writable disk with space; {remedy}")


def lock_alone(fd: int, words: str) -> None:
    """An advisory lock on `fd` for one writer over all processes. Where another holds it: closes `fd` and raises HarnessError(words)."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise HarnessError(words) from error


class EvidenceStore:
    """Append-only writer of one run folder. Use `create` or `resume`; both hold an exclusive lock until `close` or `release`."""

    def __init__(self, run_dir: Path, run: Run, *, durable: bool = True) -> None:
        self.run_dir = run_dir
        self.run = run
        self.keys: set[Key] = set()
        self.n_records = 0
        self._durable = durable
        self._head = genesis(run_dir)
        self._fd = self._open_locked()
        self._size_bytes = os.fstat(self._fd).st_size

    # ---- opening ----
    @classmethod
    def create(cls, runs_dir: Path, run: Run, plan: Any, *, durable: bool = True) -> EvidenceStore:
        """Make the folder with run.json and plan.json. On any failure nothing is left behind. Raises HarnessError."""
        run_dir = runs_dir / run.id
        building = runs_dir / f".{run.id}.part"
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            building.mkdir()
            write_atomically(building / RUN_FILE, jsonio.dumps(run, indent=1).encode() + b"\n")
            write_atomically(building / PLAN_FILE, jsonio.dumps(plan).encode() + b"\n")
            (building / EVIDENCE_FILE).touch()
            if run_dir.exists():
                raise HarnessError(f"run: got {run.id} twice, needs a new id; wait a second and run again")
            building.rename(run_dir)
        except OSError as error:
            raise _cannot_write(run_dir, error) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return cls(run_dir, run, durable=durable)

    @classmethod
    def resume(cls, run_dir: Path, *, durable: bool = True) -> EvidenceStore:
        """Open an unfinished run; a torn last line is cut off. Raises HarnessError when the run is closed or a record is not its own."""
        if (run_dir / MANIFEST_FILE).exists():
            raise HarnessError(f"run: got {run_dir.name}, which is closed, needs an unfinished run; start a fresh one")
        store = cls(run_dir, read_run(run_dir), durable=durable)
        try:
            store._replay()
        except BaseException:
            store.release()
            raise
        return store

    def _open_locked(self) -> int:
        path = self.run_dir / EVIDENCE_FILE
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise _cannot_write(path, error) from error
        lock_alone(fd, f"run: got {self.run_dir.name}, in use, needs no other process writing it; wait or use --fresh")
        return fd

    def _replay(self) -> None:
        data = os.pread(self._fd, self._size_bytes, 0) if self._size_bytes else b""
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.ftruncate(self._fd, whole)
            self._size_bytes = whole
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
            where = f"{EVIDENCE_FILE}:{number}"
            record = decode_record(line, where)
            if record.previous != self._head or record.run != self.run.id or record.id != id_of_line(line):
                raise HarnessError(f"{where}: got a record that does not follow the one before, needs an unbroken chain; use --fresh")
            self._advance(record, line)

    # ---- writing ----
    def append(self, record: Evidence) -> Evidence:
        """Write one record, chained to the last; returns it with id, run and previous filled in. Raises HarnessError when it cannot be
        stored whole: what was written of it is taken back, and the records before it stay valid."""
        key = (record.check, record.case.id, record.rank)
        if key in self.keys:
            raise HarnessError(f"evidence: got {'/'.join(map(str, key))} twice, needs each case once a run; this is a bug in a lane")
        record, line = encode_record(dataclasses.replace(record, run=self.run.id, previous=self._head))
        self._write_line(line + b"\n")
        self._advance(record, line)
        return record

    def _write_line(self, data: bytes) -> None:
        path = self.run_dir / EVIDENCE_FILE
        try:
            if os.fstat(self._fd).st_size != self._size_bytes or not path.exists():
                raise HarnessError(f"{EVIDENCE_FILE}: got a file changed from outside, needs this process as its only writer; use --fresh")
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
            if self._durable:
                os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size_bytes)
            raise _cannot_write(path, error) from error
        self._size_bytes += len(data)

    def _advance(self, record: Evidence, line: bytes) -> None:
        self._head = sha256_hex(line)
        self.keys.add((record.check, record.case.id, record.rank))
        self.n_records += 1

    def add_artifact(self, source: Path, name: str) -> tuple[str, str]:
        """Copy a regular file into artifacts/; returns its path inside the run folder and its digest. Raises HarnessError."""
        target = self.run_dir / ARTIFACTS_FOLDER / name
        if not target.resolve().is_relative_to((self.run_dir / ARTIFACTS_FOLDER).resolve()):
            raise HarnessError(f"artifact: got {name!r}, needs a path inside the run folder")
        try:
            data = source.read_bytes()
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(target, error) from error
        write_atomically(target, data)
        return target.relative_to(self.run_dir).as_posix(), sha256_hex(data)

    # ---- closing ----
    def close(self, closed_utc: str) -> Path:
        """Write the manifest and release the run; returns the manifest's path. Raises HarnessError."""
        files = sorted(p for p in self.run_dir.rglob("*") if p.is_file() and _is_sealed(p.relative_to(self.run_dir)))
        manifest = {
            "run": self.run.id,
            "closed_utc": closed_utc,
            "records": self.n_records,
            "head": self._head,
            "files": {p.relative_to(self.run_dir).as_posix(): file_sha256(p) for p in files},
        }
        path = self.run_dir / MANIFEST_FILE
        write_atomically(path, jsonio.dumps(manifest, indent=1).encode() + b"\n")
        self.release()
        return path

    def release(self) -> None:
        """Let go of the file without closing the run: it can be resumed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _is_sealed(path: Path) -> bool:
    """What the manifest covers; verdict and reports are derived and can be made again."""
    return path.as_posix() in (RUN_FILE, PLAN_FILE, EVIDENCE_FILE) or path.parts[0] == ARTIFACTS_FOLDER


def find_record(roots: Iterable[Path], identity: str) -> tuple[Path, Evidence]:
    """Look an evidence id up in all run folders below `roots`. Raises HarnessError when it is nowhere or in two runs."""
    needle = b'{"id":"' + identity.encode() + b'"'
    found = []
    for root in roots:
        for path in sorted(root.rglob(EVIDENCE_FILE)) if root.is_dir() else ():
            with path.open("rb") as handle:
                found += [(path.parent, decode_record(line.rstrip(b"\n"), path.name)) for line in handle if line.startswith(needle)]
    if len(found) != 1:
        where = ", ".join(str(folder) for folder, _ in found) or "no run folder"
        raise HarnessError(f"evidence: got {identity}, found in {where}, needs exactly one record; `list` shows what there is")
    return found[0]
