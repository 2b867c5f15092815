"""How a kernel is described, compiled and launched: parameters in order, each tied to an operand of its contract.

`KernelSpec` is data: the ordering audit reads it to know which kernel parameter is which operand. `Launcher` walks compile -> bind -> run
and refuses any other order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_ptr
from cutlass.cute.typing import AddressSpace

from kimi_k3_decode.ops.contract import Contract, ContractError

if TYPE_CHECKING:
    import torch

HEALTH = "health_N"


class Kind(enum.StrEnum):
    """How a kernel parameter gets its value."""

    OPERAND = "operand"  # address of the operand's buffer
    OTHER = "other"  # address of the mailbox's other parity, which the consumer re-arms
    BOXES = "boxes"  # one address a destination rank
    HEALTH = "health"  # the sticky health word of this rank
    ABSENT = "absent"  # an operand this mode does not have: never dereferenced
    INT32 = "int32"
    INT64 = "int64"
    FLOAT32 = "float32"


POINTERS = (Kind.OPERAND, Kind.OTHER, Kind.BOXES, Kind.HEALTH, Kind.ABSENT)
DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float32": cutlass.Float32,
    "float8_e4m3fn": cutlass.Uint8,
    "uint8": cutlass.Uint8,
    "int32": cutlass.Int32,
}


@dataclass(frozen=True, kw_only=True)
class Param:
    """One parameter of the host function; `on_device` tells whether the kernel gets it too (the rest only shape the launch)."""

    name: str
    kind: Kind
    role: str = ""
    dtype: str = ""
    count: int = 1
    on_device: bool = True

    @property
    def bytes(self) -> int:
        return 8 * self.count if self.kind in POINTERS or self.kind is Kind.INT64 else 4


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One compiled variant. `variant` names everything that is fixed at compile time; `make` builds the kernel object.

    `values(contract_rows..., tensors)` in `scalars` gives each scalar parameter from the launch's tensors and machine.
    """

    op: str
    variant: str
    make: Callable[[], Any]
    params: tuple[Param, ...]
    scalars: Callable[[Mapping[str, Any]], Mapping[str, float]]

    @property
    def id(self) -> str:
        return f"{self.op}[{self.variant}]"

    @property
    def device_params(self) -> tuple[Param, ...]:
        """Parameters of the kernel itself, in order."""
        return tuple(p for p in self.params if p.on_device)


def _argument(param: Param, value: Any) -> Any:
    if param.kind is Kind.INT32:
        return cutlass.Int32(value)
    if param.kind is Kind.INT64:
        return cutlass.Int64(value)
    if param.kind is Kind.FLOAT32:
        return cutlass.Float32(value)
    if param.kind is Kind.BOXES:
        return tuple(_pointer(param, address) for address in value)
    return _pointer(param, value)


def _pointer(param: Param, address: int) -> Any:
    return make_ptr(DTYPES[param.dtype], address, AddressSpace.gmem, assumed_align=4 if param.role == "table" else 16)


def _placeholder(param: Param) -> Any:
    if param.kind is Kind.BOXES:
        return _argument(param, (16,) * param.count)
    return _argument(param, 16 if param.kind in POINTERS else 1)


def placeholders(spec: KernelSpec) -> list[Any]:
    """Arguments of the right types for compiling, the stream last."""
    return [*(_placeholder(p) for p in spec.params), make_fake_stream()]


def compile_spec(spec: KernelSpec) -> Any:
    """Compile one variant for the architecture in CUTE_DSL_ARCH (or of the machine's GPU). No GPU is needed."""
    return cute.compile(spec.make(), *placeholders(spec))


_CACHE: dict[str, Any] = {}


def compiled(spec: KernelSpec) -> Any:
    """The compiled variant, once a process."""
    if spec.id not in _CACHE:
        _CACHE[spec.id] = compile_spec(spec)
    return _CACHE[spec.id]


class Launcher:
    """One launch of one variant with its buffers: `prepare` compiles, `bind` fixes the arguments, `run` launches on a stream."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self._function: Any = None
        self._arguments: list[Any] | None = None
        self._keep: list[Any] = []

    def prepare(self) -> Launcher:
        self._function = compiled(self.spec)
        return self

    def bind(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        others: Mapping[str, torch.Tensor] | None = None,
        boxes: Mapping[str, Sequence[int]] | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> Launcher:
        """tensors: operand -> buffer (and `health_N`); others: consumed mailbox -> its other parity; boxes: published mailbox -> address in
        every rank; scalars: what the tensors do not tell (rows, rank, pdl, processors ...). Raises ContractError naming all that is
        missing."""
        if self._function is None:
            raise ContractError(f"Launcher {self.spec.id}", ["bind: got no compiled kernel, needs prepare() first"])
        given = {"tensors": tensors, **(scalars or {})}
        values = dict(self.spec.scalars(given))
        arguments, reasons = [], []
        for param in self.spec.params:
            try:
                arguments.append(_argument(param, self._value(param, tensors, others or {}, boxes or {}, {**(scalars or {}), **values})))
            except KeyError:
                reasons.append(f"{param.name} ({param.kind.value}): got nothing, needs a value")
        if reasons:
            raise ContractError(f"Launcher {self.spec.id}", reasons)
        self._arguments = arguments
        self._keep = [*tensors.values(), *(others or {}).values()]
        return self

    def _value(self, param: Param, tensors: Any, others: Any, boxes: Any, scalars: Any) -> Any:
        if param.kind is Kind.OPERAND or param.kind is Kind.HEALTH:
            return tensors[param.name].data_ptr()
        if param.kind is Kind.OTHER:
            return others[param.name].data_ptr()
        if param.kind is Kind.BOXES:
            return boxes[param.name]
        if param.kind is Kind.ABSENT:
            return 16
        return scalars[param.name]

    def run(self, stream: Any) -> None:
        """Launch on a `cuda.bindings.driver.CUstream`."""
        if self._arguments is None:
            raise ContractError(f"Launcher {self.spec.id}", ["run: got no arguments, needs bind() first"])
        self._function(*self._arguments, stream)


# ---- how launch.py files write a parameter list ----
def operand(contract: Contract, name: str) -> Param:
    """The operand's buffer; where this mode has no such operand, a pointer that is never used."""
    if name not in contract:
        return Param(name=name, kind=Kind.ABSENT, role="output", dtype="bfloat16")
    return Param(name=name, kind=Kind.OPERAND, role=contract[name].role.value, dtype=contract[name].dtype)


def other(contract: Contract, name: str) -> Param:
    if name not in contract:
        return Param(name=name, kind=Kind.ABSENT, role="mailbox", dtype="float32")
    return Param(name=name, kind=Kind.OTHER, role="mailbox", dtype=contract[name].dtype)


def boxes(contract: Contract, name: str) -> Param:
    return Param(name=name, kind=Kind.BOXES, role="mailbox", dtype=contract[name].dtype, count=contract.parameters["tp"])


def health() -> Param:
    return Param(name=HEALTH, kind=Kind.HEALTH, role="mailbox", dtype="int32")


def int32(name: str, *, on_device: bool = True) -> Param:
    return Param(name=name, kind=Kind.INT32, on_device=on_device)


def int64(name: str) -> Param:
    return Param(name=name, kind=Kind.INT64)


def float32(name: str) -> Param:
    return Param(name=name, kind=Kind.FLOAT32)


ROWS, RANK = int32("rows"), int32("rank")
HOST_ROWS = int32("rows", on_device=False)
BLOCKS, PDL = int32("blocks", on_device=False), int32("pdl", on_device=False)


def no_scalars(given: Mapping[str, Any]) -> Mapping[str, float]:
    return {}


def tiling_name(tiling: Any) -> str:
    """Compile-time identity of a streaming product's schedule."""
    t = tiling
    return f"t{t.row_tile}x{t.x_rows}-k{t.k}-s{t.splits}-w{t.warps_m}x{t.warps_k}-m{t.m_tiles}-d{t.depth}"
