"""`load_binaries`: kernels out of cubins, fat binaries, objects, shared libraries, wheels and folders of them, with the PTX beside them.

Each input that cannot be read becomes a `FileError` with the reason; the others are read all the same. Nothing is skipped in silence.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from validation.ordering.disasm import IllegalCode, disassemble_file, disassemble_raw
from validation.ordering.elf import MAX_FILE_BYTES, BinaryError, Cubin, KernelSection, is_cubin, is_elf, read_cubin
from validation.ordering.lines import Lines, read_lines
from validation.ordering.model import FileError, Instruction, KernelBinary, Loaded, PtxKernel
from validation.ordering.ptx import PtxError, parse_ptx
from validation.ordering.tools import ToolError, run_tool

FATBIN_MAGIC = b"\x50\xed\x55\xba"
LIBRARY_SUFFIXES = (".so", ".o", ".a", ".fatbin", ".exe", ".dll")
READ_SUFFIXES = (".cubin", ".ptx", ".whl", *LIBRARY_SUFFIXES)


class _Found:
    """Collects the result across members."""

    def __init__(self) -> None:
        self.cubins: list[tuple[str, Cubin]] = []
        self.ptx: list[PtxKernel] = []
        self.errors: list[FileError] = []

    def error(self, path: str, reason: object) -> None:
        self.errors.append(FileError(path=path, reason=str(reason)))


def load_binaries(path: str | Path | Iterable[str | Path], arch: str | None = None) -> Loaded:
    """Every kernel under a path (file, folder, or several of either), optionally of one architecture only ("sm_90a").

    Recognised by content: cubin, PTX, fat binary, ELF host object or library (through cuobjdump), wheel (zip of those). Errors are per
    file; an input that holds no device code at all is one of them.
    """
    found = _Found()
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    for one in paths:
        _collect(Path(one), str(one), found, arch, explicit=True)
    kernels = _to_kernels(found, arch)
    return Loaded(kernels=tuple(kernels), ptx=tuple(found.ptx), errors=tuple(found.errors))


def _collect(path: Path, label: str, found: _Found, arch: str | None, explicit: bool) -> None:
    try:
        if path.is_dir():
            members = sorted(p for p in path.rglob("*") if p.is_file() and (p.suffix in READ_SUFFIXES or ".so." in p.name))
            if not members and explicit:
                found.error(label, f"folder: got no file with one of {', '.join(READ_SUFFIXES)}; nothing to audit")
            for member in members:
                _collect(member, str(member), found, arch, explicit=False)
            return
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BinaryError(f"file size: got {path.stat().st_size} bytes, needs at most {MAX_FILE_BYTES}; extract the cubins first")
        _collect_file(path, label, path.read_bytes(), found, arch)
    except (OSError, BinaryError, ToolError, PtxError, zipfile.BadZipFile, RuntimeError) as error:
        found.error(label, error)


def _collect_file(path: Path, label: str, data: bytes, found: _Found, arch: str | None) -> None:
    if is_cubin(data):
        found.cubins.append((label, read_cubin(data)))
    elif data[:4] == b"PK\x03\x04":
        _collect_wheel(path, label, found, arch)
    elif is_elf(data) or data[:4] == FATBIN_MAGIC or data[:8] == b"!<arch>\n":
        _extract(path, label, found, arch)
    elif b".version" in data[:65536] and b".target" in data[:65536]:
        found.ptx.extend(parse_ptx(data.decode("utf-8", "replace"), label))
    else:
        raise BinaryError(f"file type: got {data[:8]!r}, needs a cubin, PTX, fat binary, ELF library or wheel; not CUDA code")


def _collect_wheel(path: Path, label: str, found: _Found, arch: str | None) -> None:
    any_member = False
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(prefix="ordering-") as folder:
        for info in archive.infolist():
            if info.is_dir() or not (Path(info.filename).suffix in READ_SUFFIXES or ".so." in info.filename):
                continue
            if info.file_size > MAX_FILE_BYTES:
                found.error(f"{label}!{info.filename}", f"member size: got {info.file_size}, needs at most {MAX_FILE_BYTES} bytes")
                continue
            any_member = True
            target = Path(folder) / f"member{Path(info.filename).suffix}"
            target.write_bytes(archive.read(info))
            _collect(target, f"{label}!{info.filename}", found, arch, explicit=False)
    if not any_member:
        raise BinaryError("wheel: got no library or cubin inside, needs one; nothing to audit")


def _extract(path: Path, label: str, found: _Found, arch: str | None) -> None:
    """Embedded cubins and PTX by cuobjdump. A host library without device code is an error, not a pass."""
    before = len(found.cubins) + len(found.ptx)
    with tempfile.TemporaryDirectory(prefix="ordering-") as folder:
        options = ["-arch", arch] if arch else []
        for kind in ("-xelf", "-xptx"):
            try:
                run_tool("cuobjdump", *options, kind, "all", str(path.resolve()), cwd=folder)
            except ToolError as error:
                if "does not contain" not in str(error):
                    found.error(label, error)
        for member in sorted(Path(folder).iterdir()):
            inner = f"{label}!{member.name}"
            try:
                _collect_file(member, inner, member.read_bytes(), found, arch)
            except (BinaryError, PtxError) as error:
                found.error(inner, error)
    if len(found.cubins) + len(found.ptx) == before:
        raise BinaryError(f"library: got no device code{f' for {arch}' if arch else ''}, needs some; nothing to audit")


def _to_kernels(found: _Found, arch: str | None) -> list[KernelBinary]:
    """Disassembles all collected cubins, in batches of one architecture; a batch that fails is retried kernel by kernel."""
    work: dict[str, list[tuple[str, Cubin, KernelSection, Lines]]] = {}
    for label, cubin in found.cubins:
        if arch is not None and cubin.arch.rstrip("af") != arch.rstrip("af"):
            found.error(label, f"architecture: got {cubin.arch}, needs {arch}; not audited")
            continue
        if not cubin.kernels:
            found.error(label, "cubin: got no code section, needs at least one kernel; nothing to audit")
        lines = read_lines(cubin)
        work.setdefault(cubin.arch, []).extend((label, cubin, kernel, lines) for kernel in cubin.kernels)
    kernels = []
    for architecture, items in sorted(work.items()):
        for item, instructions in zip(items, _disassemble(architecture, items, found), strict=True):
            if instructions:
                kernels.append(_kernel(*item, instructions))
    return kernels


def _disassemble(arch: str, items: list[tuple[str, Cubin, KernelSection, Lines]], found: _Found) -> list[tuple[Instruction, ...]]:
    try:
        return disassemble_raw([kernel.code for _, _, kernel, _ in items], arch)
    except IllegalCode as error:
        label, _, kernel, _ = items[error.index]
        found.error(f"{label}#{kernel.name}", error)
        rest = _disassemble(arch, items[: error.index] + items[error.index + 1 :], found) if len(items) > 1 else []
        return [*rest[: error.index], (), *rest[error.index :]]
    except (BinaryError, ToolError) as error:
        if len(items) > 1:
            half = len(items) // 2
            return _disassemble(arch, items[:half], found) + _disassemble(arch, items[half:], found)
        label, cubin, kernel, _ = items[0]
        try:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(cubin.data)
                file.flush()
                return [disassemble_file(Path(file.name))[kernel.name]]
        except (BinaryError, ToolError, KeyError):
            found.error(f"{label}#{kernel.name}", error)
            return [()]


def _kernel(label: str, cubin: Cubin, section: KernelSection, lines: Lines, instructions: tuple[Instruction, ...]) -> KernelBinary:
    notes = list(section.notes)
    if not section.is_entry:
        notes.append("device function without an entry: its parameters are registers, so bases are unknown")
    return KernelBinary(
        name=section.name,
        arch=cubin.arch,
        digest=cubin.digest,
        path=label,
        parameters=section.parameters,
        param_base=section.param_base,
        instructions=_with_lines(instructions, lines.get(section.name, [])),
        registers=section.registers,
        spill_bytes=section.frame_bytes,
        shared_bytes=section.shared_bytes,
        cta_threads=section.max_threads,
        branch_targets=section.branch_targets,
        constant_banks=section.banks,
        relocations=section.relocations,
        bank_symbols=section.bank_symbols,
        one_dimensional=section.block is not None and section.block[1:] == (1, 1),
        code_digest=hashlib.sha256(section.code).hexdigest(),
        notes=tuple(notes),
    )


def _with_lines(instructions: tuple[Instruction, ...], rows: list[tuple[int, str, int]]) -> tuple[Instruction, ...]:
    if not rows:
        return instructions
    starts = [row[0] for row in rows]
    made = []
    for instruction in instructions:
        at = bisect_right(starts, instruction.pc) - 1
        made.append(replace(instruction, file=rows[at][1], line=rows[at][2]) if at >= 0 else instruction)
    return tuple(made)
