"""PTX lowered to the instruction forms of SASS, so that one analysis answers the same questions about both.

Every PTX instruction becomes one or a few instructions of the shape that `lift` knows; its program counter leads back to the PTX line.
The translation keeps what the audit needs - addresses, conditions, order - and turns arithmetic that can be no address into plain data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from validation.ordering.model import INSTRUCTION_BYTES, Instruction, KernelBinary, PtxInstruction, PtxKernel
from validation.ordering.ptx_registers import Registers

PARAM_BASE = 0x380
BLOCK_POINTER = 0x348
SHARED_STEP = 0x1000
_ADDRESS = re.compile(r"^\[\s*([%\w$.]+)?\s*(?:\+\s*(-?(?:0x)?[0-9a-fA-F]+))?\s*(?:,.*)?\]$", re.DOTALL)
_IMMEDIATE = re.compile(r"^-?(0[xX][0-9a-fA-F]+U?|\d+U?)$")


@dataclass
class Lowered:
    """`kernel` can be analysed like a binary; `lines[i]` is the PTX instruction behind instruction i."""

    kernel: KernelBinary
    sources: list[PtxInstruction]
    notes: list[str] = field(default_factory=list)


class Lowering:
    def __init__(self, ptx: PtxKernel) -> None:
        self.ptx = ptx
        self.registers = Registers(ptx)
        self.rows: list[tuple[str, str, str]] = []  # pred, opcode, operands
        self.sources: list[PtxInstruction] = []
        self.labels: dict[str, int] = {}
        self.branches: list[tuple[int, list[str]]] = []
        self.tables: dict[str, tuple[str, ...]] = {}
        self.shared: dict[str, int] = {}
        self.globals: dict[str, int] = {}
        self.block_addresses: dict[str, tuple[int, bool]] = {}  # register -> (parameter offset, exact)
        self.offsets = {p.name: p.offset for p in ptx.parameters}
        self.unknown: dict[str, int] = {}
        self.current: PtxInstruction | None = None

    # ------------------------------------------------------------------ output
    def emit(self, opcode: str, *operands: str, pred: str | None = None) -> None:
        if self.current is None:
            return
        guard = self.guard(self.current.pred) if pred is None else pred
        self.rows.append((guard, opcode, ",".join(operands)))
        self.sources.append(self.current)

    def guard(self, text: str) -> str:
        if not text:
            return ""
        negative, name = ("!", text[2:]) if text[1] == "!" else ("", text[1:])
        return f"@{negative}{self.registers.predicate(name)}"

    def run(self) -> Lowered:
        instructions = self.ptx.instructions
        for index, instruction in enumerate(instructions):
            if instruction.label:
                self.labels[instruction.label] = len(self.rows)
                following = instructions[index + 1] if index + 1 < len(instructions) else None
                if following is not None and following.opcode == ".branchtargets":
                    self.tables[instruction.label] = following.operands
                continue
            if instruction.opcode.startswith("."):
                continue
            self.current = instruction
            self.lower(instruction)
        if not self.rows or self.rows[-1][1] != "EXIT" or self.rows[-1][0]:
            self.current = instructions[-1] if instructions else PtxInstruction(line=0, opcode="ret", operands=())
            self.emit("EXIT", pred="")
        return self.finish()

    def finish(self) -> Lowered:
        indirect: dict[int, tuple[int, ...]] = {}
        for row, names in self.branches:
            targets = [self.labels[name] * INSTRUCTION_BYTES for name in names if name in self.labels]
            pred, opcode, _ = self.rows[row]
            if opcode == "BRX":
                indirect[row * INSTRUCTION_BYTES] = tuple(targets)
            elif targets:
                self.rows[row] = (pred, opcode, f"{targets[0]:#x}")
        made = tuple(
            Instruction(pc=i * INSTRUCTION_BYTES, opcode=o, operands=x, pred=p, line=source.source_line, file=source.source_file)
            for i, ((p, o, x), source) in enumerate(zip(self.rows, self.sources, strict=True))
        )
        kernel = KernelBinary(
            name=self.ptx.name,
            arch="sm_100",  # the constant-bank layout used here, not the target
            digest="",
            path=self.ptx.path,
            parameters=self.ptx.parameters,
            param_base=PARAM_BASE,
            instructions=made,
            cta_threads=self.ptx.cta_threads,
            branch_targets=indirect,
            bank_symbols={offset: name for name, offset in self.globals.items()},
            one_dimensional=False,
        )
        notes = [f"unknown PTX instruction {opcode} at line {line}" for opcode, line in sorted(self.unknown.items())]
        return Lowered(kernel, self.sources, [*self.ptx.notes, *notes])

    # ------------------------------------------------------------------ operands
    def value(self, text: str, half: int = 0) -> str:
        """A 32-bit source: a register (or its high half), an immediate, or the address of a variable."""
        text = text.strip()
        if text.startswith("-%"):
            return "-" + self.value(text[1:], half)
        if _IMMEDIATE.match(text):
            number = int(text.rstrip("U"), 0) >> (32 * half)
            return f"{number & 0xFFFFFFFF:#x}"
        if text.startswith(("0f", "0F", "0d", "0D")) and len(text) > 2:
            number = int(text[2:], 16) if re.fullmatch(r"[0-9a-fA-F]+", text[2:]) else 0
            return f"{number >> 32 * half & 0xFFFFFFFF:#x}"
        if text.startswith("%") or text in self.registers.known:
            return self.registers.name(text, half)
        if half:
            return "RZ"
        return f"{self.shared.setdefault(text, SHARED_STEP * (len(self.shared) + 1)):#x}"

    def pred(self, text: str) -> str:
        text = text.strip()
        return f"!{self.registers.predicate(text[1:])}" if text.startswith("!") else self.registers.predicate(text)

    def target(self, text: str, half: int = 0) -> str:
        return "RZ" if text.strip() in ("_", "") else self.registers.name(text.strip(), half)

    def address(self, text: str) -> tuple[str, int, str]:
        """(base text, byte offset, kind) of "[base+offset, ...]"."""
        match = _ADDRESS.match(text.strip())
        if match is None:
            return "", 0, "none"
        base, offset = match.group(1) or "", int(match.group(2), 0) if match.group(2) else 0
        if base.startswith("%") or base in self.registers.known:
            return base, offset, "reg"
        return base, offset, "symbol"

    def global_address(self, text: str) -> str:
        base, offset, kind = self.address(text)
        if kind == "reg":
            return f"[{self.registers.name(base)}.64{f'+{offset:#x}' if offset >= 0 else f'+-{-offset:#x}'}]"
        if kind == "symbol" and base:
            self.load_symbol("R2", "R3", base)
            return f"[R2.64+{offset:#x}]"
        return "[R0.64]"

    def shared_address(self, text: str) -> str:
        base, offset, kind = self.address(text)
        if kind == "reg":
            return f"[{self.registers.name(base)}{f'+{offset:#x}' if offset >= 0 else f'+-{-offset:#x}'}]"
        return f"[{int(self.value(base), 16) + offset:#x}]" if base and not base.isdigit() else f"[{offset:#x}]"

    def load_symbol(self, low: str, high: str, name: str) -> None:
        place = self.globals.setdefault(name, 8 * len(self.globals))
        self.emit("MOV", low, f"c[0x4][{place:#x}]")
        self.emit("MOV", high, f"c[0x4][{place + 4:#x}]")

    # ------------------------------------------------------------------ instructions
    def lower(self, i: PtxInstruction) -> None:
        from validation.ordering.ptx_alu import ALU_FORMS, lower_data
        from validation.ordering.ptx_memory import MEMORY_FORMS

        parts = i.opcode.split(".")
        handler: Callable[..., None] | None = CONTROL.get(parts[0]) or MEMORY_FORMS.get(parts[0]) or ALU_FORMS.get(parts[0])
        if handler is None:
            self.unknown.setdefault(i.opcode, i.line)
            lower_data(self, i, parts)
            return
        try:
            handler(self, i, parts)
        except (IndexError, ValueError):  # a malformed operand list: keep its register results unknown, and say so
            self.unknown.setdefault(f"{i.opcode} (operands not understood)", i.line)
            lower_data(self, i, parts)


def _branch(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    if parts[0] == "brx":
        low.branches.append((len(low.rows), list(low.tables.get(i.operands[-1], ()))))
        low.emit("BRX", "R0")
        return
    low.branches.append((len(low.rows), [i.operands[0]]))
    low.emit("BRA", "0x0")


def _leave(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    low.emit("KILL" if parts[0] == "trap" else "EXIT")


def _barrier(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    if "warp" in parts:
        return
    if "cluster" in parts:
        low.emit("UCGABAR_WAIT" if "wait" in parts else "UCGABAR_ARV")
        return
    numbers = [low.value(operand) for operand in i.operands]
    if "arrive" in parts:
        low.emit("BAR.ARV", *numbers)
    elif "red" in parts:
        low.emit("BAR.RED", *numbers[1:2])
    else:
        low.emit("BAR.SYNC", *(numbers[:2] or ["0x0"]))


def _grid(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    low.emit("ACQBULK" if "wait" in parts else "PREEXIT")


def _call(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    low.unknown.setdefault(f"call of {i.operands[0] if len(i.operands) == 1 else ' '.join(i.operands[:2])}", i.line)


CONTROL: dict[str, Callable[[Lowering, PtxInstruction, list[str]], None]] = {
    "bra": _branch,
    "brx": _branch,
    "ret": _leave,
    "exit": _leave,
    "trap": _leave,
    "bar": _barrier,
    "barrier": _barrier,
    "griddepcontrol": _grid,
    "call": _call,
}


def lower_ptx(ptx: PtxKernel) -> Lowered:
    """The lowered form of one entry. Never raises on odd instructions: they are listed in the notes."""
    return Lowering(ptx).run()
