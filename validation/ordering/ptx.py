"""PTX text to instructions of each entry: labels, predicates, scoped registers, source lines.

Directives that this reader does not know are kept as notes of the kernel; text that is no PTX at all raises `PtxError`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from validation.ordering.model import Parameter, PtxInstruction, PtxKernel
from validation.ordering.opcodes import words

MAX_BYTES = 256 << 20
TYPE_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_PIECE = re.compile(r'"(?:[^"\\\n]|\\.)*"|[{};]|[^{};"]+')
_ENTRY = re.compile(r"\.entry\s+([\w$%.]+)")
_FUNCTION = re.compile(r"\.func\b")
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s*(?:\.ptr\s*(?:\.(?:global|shared|const|local)\s*)?(?:\.align\s+(\d+)\s*)?)?([\w$%]+)(?:\s*\[\s*(\d+)\s*\])?"
)
_LABEL = re.compile(r"^([\w$%]+):\s*")
_ONLY_LABELS = re.compile(r"(?:[\w$%]+:\s*)+")
_GUARD = re.compile(r"^@(!?)\s*(%?[\w$]+)\s+")
_REGISTER_NAMES = re.compile(r"\.reg\s+(?:\.v\d\s+)?\.\w+\s+(.*)$", re.DOTALL)
_WORD = re.compile(r"%?[A-Za-z_$][\w$]*")
_KNOWN = words(
    """reg shared local global const param loc pragma version target address_size file section callprototype calltargets
    branchtargets align maxntid reqntid minnctapersm maxnreg maxnctapersm noreturn explicitcluster reqnctapercluster
    maxclusterrank visible weak extern common alias func entry abi_preserve abi_preserve_control attribute
    blocksareclusters"""
)


class PtxError(ValueError):
    """The text is not PTX that can be read; the message says what and where."""


@dataclass
class _Scope:
    names: dict[str, str] = field(default_factory=dict)


def _blank(match: re.Match[str]) -> str:
    return "\n" * match.group(0).count("\n") or " "


def _statements(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, statement, ender) with ender one of "{", "}", ";", ""."""
    line, start = 1, 1
    parts: list[str] = []
    for match in _PIECE.finditer(text):
        piece = match.group(0)
        if piece in ("{", "}", ";"):
            yield start, " ".join(parts), piece
            parts = []
        else:
            if not parts:
                lead = len(piece) - len(piece.lstrip())
                start = line + piece[:lead].count("\n")
                if piece.strip():
                    parts.append(piece.strip())
            else:
                parts.append(piece.strip())
        line += piece.count("\n")
    if any(parts):
        yield start, " ".join(parts), ""


def split_operands(text: str) -> tuple[str, ...]:
    """Splits at commas outside brackets, braces and parentheses."""
    found: list[str] = []
    depth = start = 0
    for index, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth <= 0:
            found.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return tuple([*found, last] if last else found)


def parameters(text: str) -> tuple[Parameter, ...]:
    """Parameters of an entry's list with the offsets that the ABI gives them: each aligned to its own alignment."""
    found: list[Parameter] = []
    offset = 0
    for align, kind, pointee_align, name, count in _PARAM.findall(text):
        del pointee_align
        size = TYPE_BYTES.get(kind[1:], 4) * (int(count) if count else 1)
        alignment = int(align) if align else TYPE_BYTES.get(kind[1:], 4)
        offset = (offset + alignment - 1) // alignment * alignment
        found.append(Parameter(index=len(found), offset=offset, size=size, name=name))
        offset += size
    return tuple(found)


class _Kernel:
    def __init__(self, name: str, target: str, header: str, path: str) -> None:
        self.name, self.target, self.path = name, target, path
        self.parameters = parameters(header)
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", header)
        self.threads = None
        if threads:
            x, y, z = (int(part) if part else 1 for part in threads.groups())
            self.threads = x * y * z
        self.instructions: list[PtxInstruction] = []
        self.scopes = [_Scope()]
        self.scope_count = 0
        self.notes: list[str] = []
        self.source = ("", 0)
        self.pending: tuple[int, str] | None = None  # an instruction whose operand list "{a, b}" is still being read

    def finish(self) -> PtxKernel:
        return PtxKernel(
            name=self.name,
            target=self.target,
            parameters=self.parameters,
            instructions=tuple(self.instructions),
            path=self.path,
            cta_threads=self.threads,
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def rename(self, text: str) -> str:
        if len(self.scopes) == 1:
            return text
        merged: dict[str, str] = {}
        for scope in self.scopes[1:]:
            merged.update(scope.names)
        return _WORD.sub(lambda m: merged.get(m.group(0), m.group(0)), text) if merged else text

    def declare(self, text: str) -> None:
        match = _REGISTER_NAMES.match(text)
        if match is None or len(self.scopes) == 1:
            return
        for part in match.group(1).split(","):
            name = part.strip().partition("<")[0].strip()
            if name:
                self.scopes[-1].names[name] = f"{name}.s{self.scope_count}"

    def statement(self, line: int, text: str) -> None:
        while label := _LABEL.match(text):
            self.instructions.append(PtxInstruction(line=line, opcode="", operands=(), label=self.rename(label.group(1))))
            line += label.group(0).count("\n")
            text = text[label.end() :]
        if not text:
            return
        if text.startswith("."):
            self.directive(text)
            return
        guard = _GUARD.match(text)
        body = text[guard.end() :] if guard else text
        opcode, _, rest = body.partition(" ") if "\t" not in body else re.sub(r"\s+", " ", body).partition(" ")
        pred = f"@{guard.group(1)}{self.rename(guard.group(2))}" if guard else ""
        if not re.fullmatch(r"[a-z_][\w.:]*", opcode):
            self.notes.append(f"unknown statement at line {line}: {text[:60]}")
            return
        self.instructions.append(
            PtxInstruction(
                line=line,
                opcode=opcode,
                operands=split_operands(self.rename(rest)),
                pred=pred,
                text=text,
                source_line=self.source[1],
                source_file=self.source[0],
            )
        )

    def directive(self, text: str) -> None:
        word = re.match(r"\.(\w+)", text)
        name = word.group(1) if word else text[:20]
        if name == "reg":
            self.declare(text)
        elif name == "branchtargets":
            targets = split_operands(self.rename(text.partition(" ")[2]))
            self.instructions.append(PtxInstruction(line=0, opcode=".branchtargets", operands=targets))
        elif name not in _KNOWN:
            self.notes.append(f"unknown directive .{name}")


def _locations(text: str) -> tuple[str, dict[int, tuple[int, int]], dict[int, str]]:
    """Takes `.loc` and `.file` lines out (they end at the line, not at a semicolon): text, {line: (file, line)}, {file: name}."""
    where: dict[int, tuple[int, int]] = {}
    files = {int(number): name for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE)}
    lines = text.split("\n")
    for index, line in enumerate(lines):
        stripped = line.lstrip()
        if stripped.startswith(".loc"):
            outer = re.findall(r"inlined_at\s+(\d+)\s+(\d+)", stripped)
            own = re.match(r"\.loc\s+(\d+)\s+(\d+)", stripped)
            if own:
                pair = outer[-1] if outer else own.groups()
                where[index + 1] = (int(pair[0]), int(pair[1]))
            lines[index] = ""
        elif stripped.startswith((".file", ".version", ".target", ".address_size")):
            lines[index] = ""
    return "\n".join(lines), where, files


def _without_debug_sections(text: str) -> str:
    """`.section .debug_x { ... }` holds bytes, not code."""
    return re.sub(r"\.section\s+\.debug\w+\s*\{[^{}]*\}", _blank, text, flags=re.DOTALL)


def parse_ptx(text: str, path: str = "") -> list[PtxKernel]:
    """Entries of one PTX file. Raises PtxError when there is no `.version`/`.target`, or the braces do not match."""
    if len(text) > MAX_BYTES:
        raise PtxError(f"PTX size: got {len(text)} characters, needs at most {MAX_BYTES}")
    target = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
    if target is None or ".version" not in text:
        raise PtxError("PTX header: got no .version and .target, needs both; not PTX")
    text = _without_debug_sections(_COMMENT.sub(_blank, text))
    text, where, files = _locations(text)
    marks = sorted(where)
    position = 0
    kernels: list[PtxKernel] = []
    current: _Kernel | None = None
    depth = 0
    held: list[str] = []  # pieces of a statement interrupted by a vector operand's braces
    held_line, inside_vector = 0, False
    for line, piece, ender in _statements(text):
        if current is None:
            entry = _ENTRY.search(piece)
            if ender == "{" and entry:
                current, depth, position = _Kernel(entry.group(1), target.group(1), piece, path), 1, 0
            elif ender == "{":
                depth += 1
            elif ender == "}":
                depth = max(0, depth - 1)
            continue
        while position < len(marks) and marks[position] <= line:
            file, number = where[marks[position]]
            current.source = (files.get(file, ""), number)
            position += 1
        if ender == "{" and piece and not held and _ONLY_LABELS.fullmatch(piece):
            current.statement(line, piece)  # a label in front of a scope
            piece = ""
        if ender == "{" and piece:
            held, held_line, inside_vector = [*(held or []), piece, "{"], held_line if held else line, True
        elif ender == "}" and inside_vector:
            held, inside_vector = [*held, piece, "}"], False
        elif ender == "{":
            depth += 1
            current.scope_count += 1
            current.scopes.append(_Scope())
        elif ender == "}":
            if piece or held:
                current.statement(held_line if held else line, " ".join([*held, piece]))
                held = []
            depth -= 1
            if depth == 0:
                kernels.append(current.finish())
                current = None
            else:
                current.scopes.pop()
        else:
            current.statement(held_line if held else line, " ".join([*held, piece]).strip())
            held = []
    if current is not None:
        raise PtxError(f"entry {current.name}: got the end of the file inside its body, needs a closing brace; the file is truncated")
    return kernels
