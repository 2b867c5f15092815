"""What an operation may touch: operands with roles, exact shapes and types, and the checks every caller gets from them.

Four users read a contract: the kernel's compile specification, host validation before a launch, poisoning and canaries in the schedule
lane, and the memory-ordering audit, which turns roles into rules ("weight" may be read at any time, "input" only after the wait, ...).
A contract is data: two contracts with the same digest promise the same thing.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}


class ContractError(ValueError):
    """Raised when tensors, bindings or protocol steps break a contract. `reasons` holds every violation found, not the first."""

    def __init__(self, what: str, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{what}: {len(self.reasons)} violation(s): " + "; ".join(self.reasons))


class Role(enum.StrEnum):
    """Who writes an operand and when it may be read (see `Operand.readable_before_wait`)."""

    WEIGHT = "weight"  # immutable for the life of the process; read or prefetched at any time
    INPUT = "input"  # written by an earlier launch of this step; only after the grid wait
    STATE = "state"  # read-write over steps, exclusive slots; ordered by the step boundary
    OUTPUT = "output"  # written here, read by a later launch
    SCRATCH = "scratch"  # written and read inside this launch only
    MAILBOX = "mailbox"  # crosses ranks; only by a polled strong load whose value proves readiness
    TABLE = "table"  # host metadata, refilled between steps


class Access(enum.StrEnum):
    """What a launch does to an operand."""

    READ = "read"
    WRITE = "write"
    READ_WRITE = "read_write"


DEFAULT_ACCESS = {
    Role.WEIGHT: Access.READ,
    Role.INPUT: Access.READ,
    Role.TABLE: Access.READ,
    Role.OUTPUT: Access.WRITE,
    Role.SCRATCH: Access.READ_WRITE,
    Role.STATE: Access.READ_WRITE,
}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One dimension: its letter, what it counts, and its size. `size` None means known only at run time (pages, slots, table width)."""

    letter: str
    meaning: str
    size: int | None

    def __str__(self) -> str:
        return f"{self.letter}={'?' if self.size is None else self.size}"


@dataclass(frozen=True, kw_only=True)
class MailboxRule:
    """The protocol of a mailbox operand. `sentinel` is the bit pattern that means "not written yet"; data never equals it.

    `layout` is "slot" (leading axis R, one slot a writer, summed by the reader) or "columns" (each writer owns a column block).
    """

    writer: str
    reader: str
    sentinel: str
    rearmed_by: str
    layout: str


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One argument of a launch. Row-major; the last axis is dense. `align_bytes` holds for the base address and for the stride of each row.

    valid_rows: rows of axis T that hold data; the others are padding whose values (NaN too) must not reach any other row. None: all.
    strided: outer axes may have any stride (a view of a larger buffer, e.g. one rank's heads of a shared cache).
    """

    name: str
    role: Role
    dtype: str
    axes: tuple[Axis, ...]
    align_bytes: int = 16
    valid_rows: int | None = None
    access: Access | None = None
    mailbox: MailboxRule | None = None
    strided: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        reasons = []
        if self.dtype not in DTYPE_BYTES:
            reasons.append(f"{self.name}.dtype: got {self.dtype!r}, needs one of {sorted(DTYPE_BYTES)}")
        if (self.mailbox is None) == (self.role is Role.MAILBOX):
            reasons.append(f"{self.name}.mailbox: got {self.mailbox}, needs a rule exactly when the role is mailbox")
        if self.role is Role.MAILBOX and self.access is None:
            reasons.append(f"{self.name}.access: got None, needs write (publisher) or read_write (consumer that re-arms)")
        default = DEFAULT_ACCESS.get(self.role)
        if self.role in (Role.WEIGHT, Role.INPUT, Role.TABLE, Role.OUTPUT) and self.access not in (None, default):
            reasons.append(f"{self.name}.access: got {self.access}, needs {default} for role {self.role}")
        if any(axis.size is not None and axis.size < 1 for axis in self.axes):
            reasons.append(f"{self.name}.axes: got {self.shape}, needs every size >= 1; leave the operand out instead")
        if reasons:
            raise ContractError("Operand", reasons)
        if self.access is None:
            object.__setattr__(self, "access", default)

    @property
    def shape(self) -> tuple[int | None, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape, all of it known. Raises ContractError naming the axes known only at run time."""
        unknown = [axis.letter for axis in self.axes if axis.size is None]
        if unknown:
            raise ContractError("Operand", [f"{self.name}.sizes: got unknown axes {unknown}, needs fixed ones; take them from the tensor"])
        return tuple(axis.size for axis in self.axes if axis.size is not None)

    @property
    def bytes(self) -> int | None:
        """Size of the whole operand; None when an axis is known only at run time."""
        total = DTYPE_BYTES[self.dtype]
        for axis in self.axes:
            if axis.size is None:
                return None
            total *= axis.size
        return total

    @property
    def reads(self) -> bool:
        return self.access is not Access.WRITE

    @property
    def writes(self) -> bool:
        return self.access is not Access.READ

    @property
    def readable_before_wait(self) -> bool:
        """True only for weights. State and tables need a full edge to their writer, which is a property of the graph, not of a kernel."""
        return self.role is Role.WEIGHT

    def violations(self, tensor: torch.Tensor) -> list[str]:
        """Every way in which `tensor` differs from this operand."""
        found = []
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != self.dtype:
            found.append(f"{self.name}.dtype: got {dtype}, needs {self.dtype}; convert it when it is created")
        got, need = tuple(tensor.shape), self.shape
        if len(got) != len(need) or any(n is not None and g != n for g, n in zip(got, need, strict=False)):
            text = ", ".join(str(axis) for axis in self.axes)
            found.append(f"{self.name}.shape: got {list(got)}, needs [{text}]; check the shard and the row bucket")
            return found
        if self.align_bytes > 1 and tensor.numel() and tensor.data_ptr() % self.align_bytes:
            found.append(
                f"{self.name}.address: got {tensor.data_ptr() % self.align_bytes} mod {self.align_bytes}, needs 0; allocate it aligned"
            )
        if not tensor.numel():
            return found
        if self.strided:
            if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                found.append(f"{self.name}.stride: got {list(tensor.stride())}, needs a dense last axis; do not transpose it")
        elif not tensor.is_contiguous():
            found.append(f"{self.name}.stride: got {list(tensor.stride())}, needs row-major dense; call .contiguous() once at load")
        return found


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Operands of one operation under fixed parameters (shard, rows, mode). Parameters are part of the identity: roles depend on them."""

    op: str
    operands: tuple[Operand, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [operand.name for operand in self.operands]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ContractError(f"Contract {self.op}", [f"operands: got {twice} more than once, needs unique names"])

    def __getitem__(self, name: str) -> Operand:
        for operand in self.operands:
            if operand.name == name:
                return operand
        raise ContractError(f"Contract {self.op}", [f"operand: got {name!r}, needs one of {list(self.names)}"])

    def __contains__(self, name: object) -> bool:
        return name in self.names

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(operand.name for operand in self.operands)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(operand.name for operand in self.operands if operand.reads)

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(operand.name for operand in self.operands if operand.writes)

    def of_role(self, *roles: Role) -> tuple[Operand, ...]:
        return tuple(operand for operand in self.operands if operand.role in roles)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight operands; routed experts count whole (what a step reads depends on the routing)."""
        return sum(operand.bytes or 0 for operand in self.of_role(Role.WEIGHT))

    def with_valid_rows(self, valid_rows: int) -> Contract:
        """The same contract with `valid_rows` real rows in a bucket of `rows`; raises ContractError when they do not fit."""
        rows = self.parameters["rows"]
        if not 1 <= valid_rows <= rows:
            raise ContractError(f"Contract {self.op}", [f"valid_rows: got {valid_rows}, needs 1..{rows}"])
        operands = tuple(replace(o, valid_rows=valid_rows) if any(a.letter == "T" for a in o.axes) else o for o in self.operands)
        return replace(self, operands=operands)

    def digest(self) -> str:
        """SHA-256 (hex) over op, parameters and every field of every operand."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        operands = []
        for operand in self.operands:
            entry: dict[str, Any] = {
                "name": operand.name,
                "role": operand.role.value,
                "dtype": operand.dtype,
                "axes": [[axis.letter, axis.size] for axis in operand.axes],
                "align_bytes": operand.align_bytes,
                "valid_rows": operand.valid_rows,
                "access": operand.access.value if operand.access else None,
                "strided": operand.strided,
            }
            if operand.mailbox is not None:
                entry["mailbox"] = vars(operand.mailbox)
            operands.append(entry)
        return {"op": self.op, "parameters": dict(self.parameters), "operands": operands}

    def validate(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises ContractError listing every violation: missing or unknown names, types, shapes, strides, alignment, overlapping writes."""
        reasons = [f"{name}: got nothing, needs a tensor" for name in self.names if name not in tensors]
        reasons += [f"{name}: got a tensor, needs none; this mode has no such operand" for name in tensors if name not in self]
        known = [operand for operand in self.operands if operand.name in tensors]
        for operand in known:
            reasons += operand.violations(tensors[operand.name])
        reasons += _overlaps(known, tensors)
        if reasons:
            raise ContractError(f"Contract {self.op}", reasons)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one-past-last byte that `tensor` can touch."""
    if not tensor.numel():
        return (0, 0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def _overlaps(operands: list[Operand], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Written operands that share bytes with another operand. Strided views may interleave, so they are left to their buffer's owner."""
    found = []
    for i, first in enumerate(operands):
        for second in operands[i + 1 :]:
            if not (first.writes or second.writes) or first.strided or second.strided:
                continue
            (a, b), (c, d) = _extent(tensors[first.name]), _extent(tensors[second.name])
            if a < d and c < b:
                found.append(f"{first.name} and {second.name}: got overlapping memory, needs separate buffers because one is written")
    return found
