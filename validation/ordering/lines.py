"""Source lines of instructions, from a cubin's DWARF line tables (version 2 to 5), when it was built with line info.

Two tables exist: `.debug_line` leads to the source, `.nv_debug_line_sass` to lines of the PTX. Opcodes that only NVIDIA uses (inlining)
are skipped by their length; a damaged table gives no lines rather than an error, because lines only decorate findings.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from validation.ordering.elf import Cubin, _body, _relocations

Lines = dict[str, list[tuple[int, str, int]]]  # kernel -> [(pc, file, line)], ascending


@dataclass
class _Reader:
    data: bytes
    at: int = 0

    def unsigned(self, size: int) -> int:
        value = int.from_bytes(self.data[self.at : self.at + size], "little")
        if self.at + size > len(self.data):
            raise IndexError(self.at)
        self.at += size
        return value

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.unsigned(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def sleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.unsigned(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - (1 << shift) if byte & 64 else value

    def text(self) -> str:
        end = self.data.index(b"\0", self.at)
        found = self.data[self.at : end].decode("utf-8", "replace")
        self.at = end + 1
        return found


def read_lines(cubin: Cubin, table: str = ".debug_line") -> Lines:
    by_name = {section.name: section for section in cubin.sections}
    if table not in by_name:
        return {}
    found: Lines = {}
    try:
        body = _body(cubin.data, by_name[table])
        patches = dict(_relocations(table, cubin.data, by_name, cubin.symbols))
        at = 0
        while at + 10 < len(body):
            length = struct.unpack_from("<I", body, at)[0]
            _unit(body[: at + 4 + length], at, patches, found)
            at += 4 + length
    except (IndexError, ValueError, struct.error, OverflowError):
        pass
    names = {kernel.name for kernel in cubin.kernels}
    return {name: sorted(rows) for name, rows in found.items() if name in names}


def _unit(body: bytes, start: int, patches: dict[int, str], found: Lines) -> None:
    reader = _Reader(body, start + 4)
    version = reader.unsigned(2)
    if version > 4:
        return
    header_length = reader.unsigned(4)
    program = reader.at + header_length
    minimum = reader.unsigned(1)
    if version >= 4:
        reader.unsigned(1)
    reader.unsigned(1)
    line_base = struct.unpack("b", bytes([reader.unsigned(1)]))[0]
    line_range, opcode_base = reader.unsigned(1), reader.unsigned(1)
    lengths = [reader.unsigned(1) for _ in range(opcode_base - 1)]
    folders = [""]
    while reader.data[reader.at]:
        folders.append(reader.text())
    reader.at += 1
    files = [""]
    while reader.at < program and reader.data[reader.at]:
        name = reader.text()
        folder, _, _ = reader.uleb(), reader.uleb(), reader.uleb()
        files.append(f"{folders[folder]}/{name}" if 0 < folder < len(folders) and not name.startswith("/") else name)
    reader.at = program
    _program(reader, minimum, line_base, line_range or 1, opcode_base, lengths, files, patches, found)


def _program(
    reader: _Reader, minimum: int, line_base: int, line_range: int, opcode_base: int, lengths: list[int], files: list[str],
    patches: dict[int, str], found: Lines,
) -> None:  # fmt: skip
    """Runs the line program; see DWARF 4, section 6.2."""
    address, file, line, symbol = 0, 1, 1, ""

    def emit() -> None:
        if symbol:
            found.setdefault(symbol, []).append((address, files[file] if 0 < file < len(files) else "", line))

    while reader.at < len(reader.data):
        opcode = reader.unsigned(1)
        if opcode >= opcode_base:
            address += (opcode - opcode_base) // line_range * minimum
            line += line_base + (opcode - opcode_base) % line_range
            emit()
        elif opcode == 0:
            size = reader.uleb()
            end = reader.at + size
            code = reader.unsigned(1)
            if code == 1:
                address, file, line, symbol = 0, 1, 1, ""
            elif code == 2:
                symbol = patches.get(reader.at, symbol)
                address = reader.unsigned(size - 1)
            reader.at = end
        elif opcode == 1:
            emit()
        elif opcode == 2:
            address += reader.uleb() * minimum
        elif opcode == 3:
            line += reader.sleb()
        elif opcode == 4:
            file = reader.uleb()
        elif opcode == 8:
            address += (255 - opcode_base) // line_range * minimum
        elif opcode == 9:
            address += reader.unsigned(2)
        else:
            for _ in range(lengths[opcode - 1]):
                reader.uleb()
