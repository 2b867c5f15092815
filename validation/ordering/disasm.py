"""SASS text of kernels, from `nvdisasm`.

The tool takes longer to start than to disassemble a small kernel, so the code sections of many kernels of one architecture are laid
one after another into one raw image and disassembled in one go (`--binary`). Branch targets are printed relative to the image and
are moved back. Where raw mode does not know the architecture, the cubin itself is read (`-json`, else the text form).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from validation.ordering.elf import BinaryError
from validation.ordering.model import INSTRUCTION_BYTES, Instruction
from validation.ordering.tools import ToolError, run_tool

IMAGE_BYTES = 1 << 20  # bounds the memory that one JSON answer takes
_RAW_NAMES = {75: "SM75", 80: "SM80", 86: "SM86", 87: "SM87", 88: "SM88", 89: "SM89", 90: "SM90a", 100: "SM100a", 103: "SM103a"}
_RAW_NAMES |= {107: "SM107a", 110: "SM110a", 120: "SM120a", 121: "SM121a"}
# Instructions whose last immediate is an address in the image.
TARGETED = frozenset({"BRA", "BSSY", "CALL", "JMP", "WARPSYNC", "LEPC", "BRX", "RET", "PRET", "SSY", "PBK"})
_TARGET = re.compile(r"(?:^|,)(-?0x[0-9a-f]+)$")
_TEXT_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")


class IllegalCode(BinaryError):
    """One code section holds what is no instruction of its architecture; `index` is its position in the list given."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def architecture_number(arch: str) -> int:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise BinaryError(f"architecture: got {arch!r}, needs sm_NN")
    return int(match.group(1))


def _rebase(opcode: str, operands: str, base: int) -> str:
    """Moves a branch target from image to section coordinates. BRX and RET print relative displacements and stay."""
    root = opcode.partition(".")[0]
    if base == 0 or root not in TARGETED or root in ("BRX", "RET"):
        return operands
    match = _TARGET.search(operands)
    if match is None:
        return operands
    return f"{operands[: match.start(1)]}{int(match.group(1), 16) - base:#x}"


def parse_json(text: str, what: str) -> list[tuple[str, int, list[tuple[str, str, str]]]]:
    """(function, start, [(predicate, opcode, operands)]) of each function of `nvdisasm -json`. Raises BinaryError."""
    try:
        document = json.loads(text)
        found = []
        for part in document[1:]:
            for function in part if isinstance(part, list) else [part]:
                rows = [
                    (str(row.get("predicate", "")), str(row["opcode"]), str(row.get("operands", "")))
                    for row in function["sass-instructions"]
                ]
                found.append((str(function["function-name"]), int(function["start"]), rows))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BinaryError(f"{what}: got output of nvdisasm that is not its JSON ({type(error).__name__}: {error})") from error
    return found


def parse_text(text: str) -> dict[str, list[tuple[int, str, str, str]]]:
    """{section: [(pc, predicate, opcode, operands)]} of plain `nvdisasm -c`; labels become their addresses."""
    sections: dict[str, list[tuple[int, str, str, str]]] = {}
    labels: dict[str, int] = {}
    waiting: list[str] = []
    current = ""
    for line in text.splitlines():
        if header := re.match(r"^\.text\.(\S+):", line):
            current, waiting = header.group(1), []
            sections[current] = []
        elif label := re.match(r"^\s*(\S+):\s*$", line):
            waiting.append(label.group(1))
        elif current and (row := _TEXT_LINE.match(line)):
            pc = int(row.group(1), 16)
            labels.update((name, pc) for name in waiting)
            waiting = []
            sections[current].append((pc, row.group(2) or "", row.group(3), row.group(4).strip()))

    def resolve(operands: str) -> str:
        named = re.sub(r"`\(([^)]+)\)", lambda m: f"{labels[m.group(1)]:#x}" if m.group(1) in labels else m.group(0), operands)
        return named.replace(", ", ",")

    return {name: [(pc, p, o, resolve(x)) for pc, p, o, x in rows] for name, rows in sections.items()}


def _instructions(rows: Iterable[tuple[str, str, str]], base: int) -> tuple[Instruction, ...]:
    made = []
    for index, (pred, opcode, operands) in enumerate(rows):
        made.append(Instruction(pc=index * INSTRUCTION_BYTES, opcode=opcode, operands=_rebase(opcode, operands, base), pred=pred))
    return tuple(made)


def _batches(codes: list[bytes]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for index, code in enumerate(codes):
        if batch and size + len(code) > IMAGE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += len(code)
    if batch:
        yield batch


def _blame(error: ToolError, batch: list[int], codes: list[bytes]) -> Exception:
    """The same failure with the code section that holds the address nvdisasm complains of, when it names one."""
    match = re.search(r"at address (0x[0-9a-fA-F]+)", str(error))
    if match is None:
        return error
    address = int(match.group(1), 16)
    for index in batch:
        if address < len(codes[index]):
            return IllegalCode(index, f"{error} (at {address:#x} of the kernel)")
        address -= len(codes[index])
    return error


def disassemble_raw(codes: list[bytes], arch: str) -> list[tuple[Instruction, ...]]:
    """Instructions of each code section, all of one architecture, in order.

    Raises IllegalCode when one section cannot be decoded, ToolError when nvdisasm fails otherwise, BinaryError when it does not know the
    architecture or answers with another count.
    """
    number = architecture_number(arch)
    if number not in _RAW_NAMES:
        raise BinaryError(f"architecture: got {arch}, needs one of {', '.join(f'sm_{n}' for n in _RAW_NAMES)}")
    results: list[tuple[Instruction, ...]] = [()] * len(codes)
    for batch in _batches(codes):
        with tempfile.TemporaryDirectory(prefix="ordering-") as folder:
            image = Path(folder) / "image.bin"
            image.write_bytes(b"".join(codes[index] for index in batch))
            try:
                functions = parse_json(run_tool("nvdisasm", "-json", "-b", _RAW_NAMES[number], str(image)), arch)
            except ToolError as error:
                raise _blame(error, batch, codes) from error
        rows = functions[0][2] if functions else []
        expected = sum(len(codes[index]) for index in batch) // INSTRUCTION_BYTES
        if len(rows) != expected:
            raise BinaryError(f"disassembly: got {len(rows)} instructions, needs {expected}; code section damaged or unknown encoding")
        at = 0
        for index in batch:
            count = len(codes[index]) // INSTRUCTION_BYTES
            results[index] = _instructions(rows[at : at + count], at * INSTRUCTION_BYTES)
            at += count
    return results


def disassemble_file(path: Path) -> dict[str, tuple[Instruction, ...]]:
    """{kernel: instructions} from the cubin itself: JSON, or the text form where this nvdisasm has no JSON. Raises as above."""
    try:
        functions = parse_json(run_tool("nvdisasm", "-json", str(path)), str(path))
        return {name: _instructions(rows, 0) for name, _, rows in functions}
    except (BinaryError, ToolError):
        sections = parse_text(run_tool("nvdisasm", "-c", str(path)))
        return {
            name: tuple(Instruction(pc=pc, opcode=opcode, operands=operands, pred=pred) for pc, pred, opcode, operands in rows)
            for name, rows in sections.items()
        }
