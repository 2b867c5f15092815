"""The vocabulary of the memory-ordering audit: what is read from a binary, what is asked of it, and what a finding is made of.

    binaries.load_binaries(path) -> Loaded(kernels, ptx, errors)
    audit.audit_kernel(kernel, roles, ptx, launch) -> AuditResult(findings, accesses, waits, notes)
    pool.audit_many(kernels, roles_of, launch_of, ...) -> the same over many files, with workers and a cache by cubin digest

All types are frozen, picklable and hold plain values only, so that results can be cached by cubin digest and sent between workers.
Program counters are byte offsets inside the kernel's code section (instruction index times 16). Lines are 1-based, 0 when unknown.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

INSTRUCTION_BYTES = 16


class Role(enum.StrEnum):
    """What a parameter's memory is to the step; decides when it may be touched."""

    WEIGHT = "weight"  # immutable while the server lives: any time, may be prefetched
    INPUT = "input"  # written by this step: only after the wait
    STATE = "state"  # written by an earlier step: early only when a full edge separates the writer (LaunchFacts.ordered)
    OUTPUT = "output"  # written here: only after the wait, an earlier kernel may still read it
    SCRATCH = "scratch"  # written and read here, reused between launches: as output
    MAILBOX = "mailbox"  # ordered by polled flags, not by the wait
    TABLE = "table"  # host metadata refilled between steps: as state
    SCALAR = "scalar"  # not a pointer
    UNKNOWN = "unknown"


class Kind(enum.StrEnum):
    """How an instruction touches global memory."""

    LOAD = "load"
    STORE = "store"
    ATOMIC = "atomic"  # with or without a returned value
    ASYNC_LOAD = "async_load"  # LDGSTS, bulk copy global -> shared
    ASYNC_STORE = "async_store"  # bulk copy shared -> global
    TMA_LOAD = "tma_load"
    TMA_STORE = "tma_store"
    PREFETCH = "prefetch"


READING = frozenset({Kind.LOAD, Kind.ASYNC_LOAD, Kind.TMA_LOAD, Kind.ATOMIC})
WRITING = frozenset({Kind.STORE, Kind.ASYNC_STORE, Kind.TMA_STORE, Kind.ATOMIC})


class WaitKind(enum.StrEnum):
    GRID = "grid"  # griddepcontrol.wait, ACQBULK
    BARRIER = "barrier"  # bar.sync, BAR.SYNC and cluster barriers
    MBARRIER = "mbarrier"  # try_wait that succeeded
    ACQUIRE = "acquire"  # spin on a polled strong load, on its exit edge
    RELEASE_DEPENDENTS = "release_dependents"  # griddepcontrol.launch_dependents, PREEXIT: not a wait, shown on the timeline
    FENCE = "fence"  # MEMBAR, fence.proxy


class When(enum.StrEnum):
    """Where an access lies relative to the grid wait, over every path that reaches it."""

    BEFORE = "before"  # on every path
    MAYBE_BEFORE = "maybe_before"  # on at least one path
    AFTER = "after"
    NO_WAIT = "no_wait"  # the kernel (or warp role) has no wait
    UNREACHABLE = "unreachable"


class Stage(enum.StrEnum):
    """Who put the access there."""

    PTXAS = "ptxas"
    NVVM = "nvvm"
    SOURCE = "source"
    UNKNOWN = ""  # nothing to compare with


class Severity(enum.StrEnum):
    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


RULES: Mapping[str, tuple[Severity, str]] = {
    "MO001": (Severity.ERROR, "non-weight read may precede its wait"),
    "MO002": (Severity.ERROR, "the compiler moved a non-weight read ahead of its wait"),
    "MO003": (Severity.WARNING, "non-coherent load of a non-weight"),
    "MO004": (Severity.ERROR, "a path exits without the wait in a PDL launch"),
    "MO005": (Severity.ERROR, "PDL launch with no wait at all"),
    "MO006": (Severity.ERROR, "write before the wait"),
    "MO007": (Severity.ERROR, "the wait is in another warp role and no barrier hands it over"),
    "MO008": (Severity.ERROR, "prefetch of something that is not a weight"),
    "MO009": (Severity.ERROR, "mailbox read or published with insufficient strength"),
    "MO010": (Severity.ERROR, "generic-proxy write read by the async proxy with no proxy fence"),
    "MO011": (Severity.ERROR, "dependents released before the last protected access"),
    "MO012": (Severity.ERROR, "launch-graph race"),
    "MO013": (Severity.WARNING, "role unknown or contradictory"),
    "MO014": (Severity.NOTE, "lost prefetch"),
    "MO015": (Severity.WARNING, "toolchain drift"),
    "MO016": (Severity.ERROR, "a wait or load of the source is gone from the binary, or a poll is no poll"),
    "MO017": (Severity.ERROR, "protected read sunk below the release of its buffer"),
    "MO101": (Severity.ERROR, "inline PTX reads memory but is declared free of side effects"),
}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One kernel parameter. `offset` and `size` in bytes, relative to the start of the parameter block."""

    index: int
    offset: int
    size: int
    name: str = ""  # from PTX or a contract; binaries hold no names


@dataclass(frozen=True, kw_only=True, order=True)
class ParamRef:
    """A pointer's origin: byte `offset` within parameter `index`. A plain pointer parameter has offset 0."""

    index: int
    offset: int = 0
    via_table: bool = False  # the pointer was loaded from memory that this parameter points to
    descriptor: bool = False  # the parameter holds (or points to) a TMA descriptor

    def __str__(self) -> str:
        text = f"p{self.index}" + (f"+{self.offset}" if self.offset else "")
        text = f"descriptor({text})" if self.descriptor else text
        return f"*{text}" if self.via_table else text


@dataclass(frozen=True, kw_only=True)
class RoleEntry:
    role: Role
    reason: str
    name: str = ""
    guarded_by: int | None = None  # index of the mailbox parameter whose acquire orders this buffer
    target: Role | None = None  # role of what a pointer *loaded from* this memory points to (None: same as `role`)


@dataclass(frozen=True, kw_only=True)
class RoleMap:
    """Roles of one kernel's parameters. `by_index` keys are (parameter index, byte offset); offset 0 also answers for the whole
    parameter when no entry matches the exact offset. `by_name` is consulted when a parameter carries a name (PTX beside the binary)."""

    by_index: Mapping[tuple[int, int], RoleEntry] = field(default_factory=dict)
    by_name: Mapping[str, RoleEntry] = field(default_factory=dict)
    source: str = ""  # "contract", "manifest FILE", "observed", ...

    def lookup(self, ref: ParamRef, name: str = "") -> RoleEntry | None:
        """The entry for `ref`, or None when nobody gave one. Table targets come back with their target role."""
        entry = self.by_index.get((ref.index, ref.offset)) or self.by_index.get((ref.index, 0)) or self.by_name.get(name)
        if entry is None or not ref.via_table or entry.target is None:
            return entry
        return RoleEntry(role=entry.target, reason=f"loaded from {entry.name or ref}: {entry.reason}", name=entry.name)


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """What the launch says and no binary holds. None means unknown."""

    pdl: bool | None = None  # launched with the programmatic-serialization attribute
    cta_threads: int | None = None  # threads a block; None: taken from .maxntid/.reqntid of the PTX or EIATTR_REQNTID
    ordered: frozenset[int] = frozenset()  # parameters whose last writer is separated by a full edge or event
    has_dependents: bool | None = None  # some later kernel is launched programmatically on this one
    barrier_transitivity: bool = True  # a full-CTA barrier hands the wait of one role to all
    released: frozenset[int] = frozenset()  # parameters that a programmatic dependent touches before its own wait
    guards_true: frozenset[int] = frozenset()  # scalar parameters known to be non-zero at run time (run-time PDL flags)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One SASS instruction. `operands` is nvdisasm's text; `pred` like "@!P0" or ""."""

    pc: int
    opcode: str
    operands: str
    pred: str = ""
    line: int = 0  # source line when line info exists
    file: str = ""

    def __str__(self) -> str:
        return f"/*{self.pc:04x}*/ {self.pred + ' ' if self.pred else ''}{self.opcode} {self.operands}".rstrip()


@dataclass(frozen=True, kw_only=True)
class KernelBinary:
    """One kernel as found in a cubin."""

    name: str
    arch: str  # "sm_90a"
    digest: str  # SHA-256 (hex) of the cubin that holds it
    path: str  # file it came from; "FILE!MEMBER" for extracted members
    parameters: tuple[Parameter, ...]
    param_base: int  # byte offset of the first parameter in c[0x0]
    instructions: tuple[Instruction, ...]
    registers: int = 0
    spill_bytes: int = 0  # local-memory frame, bytes a thread
    shared_bytes: int = 0
    cta_threads: int | None = None  # from EIATTR_REQNTID or MAX_THREADS
    branch_targets: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # indirect branch pc -> targets
    constant_banks: Mapping[int, bytes] = field(default_factory=dict)  # bank -> initial bytes (.nv.constant2 ... )
    relocations: Mapping[int, str] = field(default_factory=dict)  # pc -> symbol whose address the instruction holds
    bank_symbols: Mapping[int, str] = field(default_factory=dict)  # byte offset in c[0x4] -> device variable or function
    one_dimensional: bool = False  # the required block shape has y = z = 1
    code_digest: str = ""  # SHA-256 of the code section: the SASS digest recorded for drift
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PtxInstruction:
    line: int  # 1-based line in the PTX file
    opcode: str  # "ld.global.nc.f32"
    operands: tuple[str, ...]
    pred: str = ""  # "@%p1", "@!%p1"
    label: str = ""  # set, with empty opcode, for a label
    text: str = ""
    source_line: int = 0
    source_file: str = ""


@dataclass(frozen=True, kw_only=True)
class PtxKernel:
    name: str
    target: str  # "sm_90a"
    parameters: tuple[Parameter, ...]
    instructions: tuple[PtxInstruction, ...]
    path: str = ""
    cta_threads: int | None = None
    notes: tuple[str, ...] = ()  # unknown directives and the like


@dataclass(frozen=True, kw_only=True)
class Access:
    """One instruction that touches global memory, with everything the rules need."""

    pc: int  # SASS pc; PTX line when `ptx` is true
    opcode: str
    kind: Kind
    coherent: bool  # False: non-coherent path (LDG.CONSTANT, ld.global.nc)
    strength: str  # "weak" | "relaxed" | "acquire" | "release" | "volatile" | "mmio"
    bases: frozenset[ParamRef] = frozenset()  # every parameter the address can derive from
    symbols: tuple[str, ...] = ()  # device variables it can derive from
    unknown_base: bool = False  # some origin could not be followed; never assumed safe
    when: When = When.AFTER
    waits: frozenset[int] = frozenset()  # pcs of waits passed on every path to it
    guard: str = ""  # predicate that guards both the access and the wait, when that decided it
    warps: str = ""  # warp range(s) that reach it early, e.g. "0-3"; "" = all
    text: str = ""
    line: int = 0
    file: str = ""
    ptx_line: int = 0
    bytes_per_thread: int = 0
    ptx: bool = False


@dataclass(frozen=True, kw_only=True)
class Wait:
    pc: int
    kind: WaitKind
    opcode: str
    guard: str = ""
    bases: frozenset[ParamRef] = frozenset()  # the polled parameter, for acquires
    text: str = ""
    line: int = 0
    file: str = ""
    ptx: bool = False


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One violated rule. Names the instruction, the path on which it runs early, the wait it escapes and the fix."""

    rule: str  # key of RULES
    kernel: str
    arch: str
    message: str
    pc: int = -1  # -1: the whole kernel
    instruction: str = ""  # SASS text
    ptx_line: int = 0
    ptx_text: str = ""
    parameter: str = ""  # name or "p3+16"
    role: Role = Role.UNKNOWN
    role_reason: str = ""
    path_witness: tuple[int, ...] = ()  # pcs from entry to the instruction, block starts and branches only
    wait_pc: int = -1  # the wait it escapes, -1 when there is none
    wait_text: str = ""
    warps: str = ""
    source_file: str = ""
    source_line: int = 0
    fix: str = ""
    stage: Stage = Stage.UNKNOWN
    severity: Severity | None = None  # None: the rule's own
    details: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def level(self) -> Severity:
        return self.severity or RULES[self.rule][0]


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Everything said about one kernel. `complete` is False when part of it could not be read: never report such a kernel as clean."""

    kernel: str
    arch: str
    digest: str
    path: str
    findings: tuple[Finding, ...] = ()
    accesses: tuple[Access, ...] = ()  # in program order: the timeline
    waits: tuple[Wait, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    notes: tuple[str, ...] = ()  # "unknown instruction FOO at 0x120", limits that applied
    unknown_instructions: tuple[str, ...] = ()
    unknown_bases: int = 0  # accesses whose origin could not be followed
    instructions: int = 0
    registers: int = 0
    spill_bytes: int = 0
    code_digest: str = ""
    ptx_compared: bool = False
    complete: bool = True
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FileError:
    """Why one input (or one member of it) could not be audited."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """`load_binaries` result: what could be read, and every file that could not."""

    kernels: tuple[KernelBinary, ...] = ()
    ptx: tuple[PtxKernel, ...] = ()
    errors: tuple[FileError, ...] = ()


LIMITS = (
    "SASS order is issue order; what ACQBULK and BAR guarantee is taken from documentation.",
    "Relaxed and acquire mbarrier try_wait are not distinguishable in SASS.",
    "A base lost through shared memory, dynamically indexed local arrays or integer tricks is reported as unknown, not as clean.",
    "Pointers in the parameter block that are indexed by a run-time number count as the parameter where the array starts.",
    "Unknown calls, lane-level divergence inside a warp role and cluster-wide transitivity are not modelled.",
)
