"""From instructions to compiled code: memory accesses, waits and everything that `semantics` does not cover."""

from __future__ import annotations

from collections.abc import Callable

from validation.ordering import opcodes
from validation.ordering.machine import (
    ASSUME,
    DEPTH,
    DIRTY_MASK,
    DIRTY_SHARED,
    DIRTY_TILE,
    FIRST,
    MAY,
    MEMORY,
    MUST,
    OVERLAY,
    PENDING_MASK,
    RELEASE,
    RELEASED,
    AccessSite,
    Code,
    Compiler,
    Op,
    State,
    bump,
    guard_of,
    parse,
)
from validation.ordering.model import Instruction, Kind
from validation.ordering.operands import Operand, register_step
from validation.ordering.semantics import HANDLERS, data, integer
from validation.ordering.slots import load_slot, store_slot
from validation.ordering.transfers import clear_predicates, destination, set_value
from validation.ordering.values import Value

SILENT = opcodes.NO_EFFECT | opcodes.BRANCHES
PLACELESS = frozenset(HANDLERS) | opcodes.INTEGER | opcodes.DATA
ROW_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "96": 12, "128": 16, "256": 32}


def lift(c: Compiler, instruction: Instruction) -> Code:
    """Compiles one instruction; opcodes never seen are recorded in `c.unknown` and taint what they write."""
    text = (instruction.pred, instruction.opcode, instruction.operands)
    known = c.lifted.get(text)
    if known is not None and instruction.pc not in c.kernel.relocations:
        return Code(instruction.pc, known.ops, guard=known.guard, guard_sense=known.guard_sense)
    code = _lift(c, instruction)
    # What does not name its place is the same wherever it stands.
    if (
        code.site is None
        and not code.event
        and instruction.opcode.partition(".")[0] in PLACELESS
        and instruction.pc not in c.kernel.relocations
    ):
        c.lifted[text] = code
    return code


def _lift(c: Compiler, instruction: Instruction) -> Code:
    root, modifiers, operands = parse(instruction)
    code = Code(instruction.pc)
    code.guard, code.guard_sense = guard_of(c, instruction)
    ops: list[Op] = []
    c.written.clear()
    try:
        _dispatch(c, code, root, modifiers, operands, ops)
    except (IndexError, ValueError, KeyError, AttributeError, TypeError):  # operands of a shape that nvdisasm never prints
        ops.clear()
        code.site, code.event = None, ""
        unknown(c, code, f"{root} (operands not understood)", operands, ops)
    if root == "PREEXIT":
        code.event = "release"
    track(c, code, ops)
    if instruction.pc in c.kernel.relocations and root in ("MOV", "UMOV", "MOV32I", "IADD3", "UIADD3", "IMAD"):
        relocated(c, instruction.pc, ops)
    code.ops = guarded(c, code, ops)
    forget_overlay(c, code.ops)
    if code.site is not None:
        code.site.guard, code.site.guard_sense = code.guard, code.guard_sense
    return code


def relocated(c: Compiler, pc: int, ops: list[Op]) -> None:
    """The linker patches an address into this instruction: its result is that device variable."""
    value = c.domain.source("symbol", c.kernel.relocations[pc])
    for slot in sorted({slot for slot in c.written if slot >= FIRST}):
        set_value(ops, slot, value)


def _dispatch(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    if root in HANDLERS:
        HANDLERS[root](c, modifiers, operands, ops)
    elif root in MEMORY_HANDLERS:
        MEMORY_HANDLERS[root](c, code, root, modifiers, operands, ops)
    elif root in opcodes.INTEGER:
        integer(c, modifiers, operands, ops, root)
    elif root in opcodes.DATA:
        data(c, modifiers, operands, ops)
    elif root not in SILENT:
        unknown(c, code, root, operands, ops)


def track(c: Compiler, code: Code, ops: list[Op]) -> None:
    """Adds what the order state must remember of an instruction: addresses of loads, pending writes, fences."""
    site, resolver = code.site, c.resolver
    if site is not None and site.kind in (Kind.LOAD, Kind.ATOMIC):

        def note(s: State) -> None:
            resolver.note_address(s, site)

        ops.insert(0, note)  # before the load overwrites its own address register
    if site is not None and site.kind in (Kind.STORE, Kind.ATOMIC):
        keep = ~0 if site.strength == "weak" else ~PENDING_MASK

        def dirty(s: State) -> None:
            s[MAY] |= resolver.dirty_bits(*resolver.masks(s, site)) & keep

        ops.append(dirty)
    sets = {"release": RELEASED, "shared_store": DIRTY_SHARED, "shared_tile": DIRTY_SHARED | DIRTY_TILE}.get(code.event, 0)
    clears = {"membar": PENDING_MASK, "proxy_fence": DIRTY_MASK | DIRTY_SHARED | DIRTY_TILE}.get(code.event, 0)
    released = code.event == "membar"
    if sets or clears:

        def change(s: State) -> None:
            s[MAY] = s[MAY] & ~clears | sets
            if released:
                bump(s, RELEASE)

        ops.append(change)


def guarded(c: Compiler, code: Code, ops: list[Op]) -> list[Op]:
    """Under a predicate that may be false, results join with what was there before; what they are when it is true stays in OVERLAY."""
    if code.guard is None or not ops:
        return ops
    if code.guard == c.one:
        return ops if code.guard_sense else []
    guard, sense, join = code.guard, int(code.guard_sense), c.domain.join
    written = sorted({slot for slot in c.written if slot >= FIRST})
    place = (guard, sense)

    def op(s: State) -> None:
        known = s[guard].const
        if known is None:
            order = s[:OVERLAY]
            before = [s[slot] for slot in written]
            view = overlaid(s, guard, bool(sense))
            for one in ops:
                one(s)
            restore(s, [pair for pair in view if pair[0] not in written])
            values = dict(s[OVERLAY].get(place, ()))
            for slot, old in zip(written, before, strict=True):
                new = s[slot]
                s[slot] = joined = join(old, new)
                values[slot] = (joined, new)
            s[OVERLAY] = {**s[OVERLAY], place: values}
            _weaken(s, order, join)
        elif known == sense:
            for one in ops:
                one(s)

    return [op]


def _weaken(s: State, before: State, join: Callable[[Value, Value], Value]) -> None:
    """Order effects of an instruction that may not have run: joined with the state before it."""
    s[MUST] &= before[MUST]
    s[MAY] |= before[MAY]
    if s[DEPTH] is not before[DEPTH]:
        s[DEPTH] = tuple(map(min, s[DEPTH], before[DEPTH]))
    if s[MEMORY] is not before[MEMORY]:
        old = before[MEMORY]
        s[MEMORY] = {place: join(old[place], value) if place in old else value for place, value in s[MEMORY].items()}


def overlaid(s: State, guard: int, sense: bool) -> list[tuple[int, Value]]:
    """Puts in what registers are when the predicate has that value; returns what to `restore`."""
    changed = []
    for slot, (joined, value) in s[OVERLAY].get((guard, int(sense)), {}).items():
        if s[slot] is joined:
            changed.append((slot, joined))
            s[slot] = value
    return changed


def restore(s: State, pairs: list[tuple[int, Value]]) -> None:
    for slot, value in pairs:
        s[slot] = value


def forget_overlay(c: Compiler, ops: list[Op]) -> None:
    """A written predicate makes what was known under its old value useless."""
    predicates = {slot for slot in c.written if slot in c.predicate_slots}
    if not predicates:
        return

    def op(s: State) -> None:
        if s[OVERLAY]:
            s[OVERLAY] = {place: values for place, values in s[OVERLAY].items() if place[0] not in predicates}

    ops.append(op)


def unknown(c: Compiler, code: Code, root: str, operands: tuple[Operand, ...], ops: list[Op]) -> None:
    c.unknown.setdefault(root, []).append(code.pc)
    value = c.domain.source("unknown", code.pc)
    for operand in operands[:1]:
        if operand.kind == "reg":
            for step in range(4):
                set_value(ops, destination(c, operand, step), value)
        elif operand.kind == "pred":
            set_value(ops, destination(c, operand), c.domain.data)
    addresses = [operand for operand in operands if operand.kind == "addr" and operand.space in ("desc", "")]
    if any(operand.space == "desc" for operand in addresses):
        site(c, code, Kind.LOAD, addresses[-1], ("E",), "weak")


def site(c: Compiler, code: Code, kind: Kind, operand: Operand, modifiers: tuple[str, ...], strength: str) -> AccessSite:
    low, high, offset = c.address(operand, modifiers, "E" in modifiers)
    byte_count = next((ROW_BYTES[m] for m in reversed(modifiers) if m in ROW_BYTES), 4)
    code.site = AccessSite(code.pc, kind, "CONSTANT" not in modifiers, strength, low, high, offset, byte_count)
    return code.site


def global_load(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    addresses = [operand for operand in operands if operand.kind == "addr"]
    targets = [operand for operand in operands[: operands.index(addresses[0])] if operand.kind == "reg"] if addresses else []
    predicates = [operand for operand in operands[:1] if operand.kind == "pred"]
    clear_predicates(c, predicates, ops)
    if not addresses:
        unknown(c, code, root, operands, ops)
        return
    strength = opcodes.strength_of(modifiers)
    kind = Kind.ATOMIC if root in opcodes.ATOMICS else Kind.LOAD
    where = site(c, code, kind, addresses[0], modifiers, strength)
    where.generic = root in ("LD", "ATOM", "RED")
    count, mask, word = opcodes.register_count(modifiers), 0, 0
    for target in targets:
        for step in range(count):
            value = c.domain.source("mem", code.pc, word)
            mask |= value.add
            set_value(ops, destination(c, target, step), value)
            word += 1
    if strength != "weak" and targets:
        c.strong_loads[code.pc] = mask


def global_store(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    addresses = [operand for operand in operands if operand.kind == "addr"]
    if not addresses:
        unknown(c, code, root, operands, ops)
        return
    where = site(c, code, Kind.STORE, addresses[0], modifiers, opcodes.strength_of(modifiers))
    where.generic = root == "ST"
    code.event = "store"


def async_copy(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    """LDGSTS [shared], desc[..][global]."""
    addresses = [operand for operand in operands if operand.kind == "addr"]
    if len(addresses) < 2:
        unknown(c, code, root, operands, ops)
        return
    site(c, code, Kind.ASYNC_LOAD, addresses[-1], modifiers, "weak")


def bulk_copy(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    """UBLKCP.S.G [dst:mbarrier], [global], size; UBLKCP.G.S [global], [shared], size; UBLKRED as the latter."""
    addresses = [operand for operand in operands if operand.kind == "addr"]
    letters = [m for m in modifiers if m in ("S", "G", "T", "C")]
    if len(addresses) < 2 or "G" not in letters:
        if "G" in letters or not addresses:
            unknown(c, code, root, operands, ops)
        return  # shared to shared of another block in the cluster
    load = letters[-1] == "G"
    kind = Kind.ASYNC_LOAD if load else Kind.ASYNC_STORE
    where = site(c, code, kind, addresses[1 if load else 0], ("E", *modifiers), "weak")
    if load and addresses[0].terms:
        where.mbarrier = c.read_register(register_step(addresses[0].terms[0].name, 1))
    code.event = "" if load else "async_store"


def tma(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    """UTMALDG.nD [coordinates], [descriptor]: the second address is the descriptor's."""
    addresses = [operand for operand in operands if operand.kind == "addr"]
    if len(addresses) < 2:
        unknown(c, code, root, operands, ops)
        return
    load = root in opcodes.TMA_LOADS
    where = site(c, code, Kind.TMA_LOAD if load else Kind.TMA_STORE, addresses[1], ("E",), "weak")
    where.descriptor = True
    if load and addresses[0].terms:
        where.mbarrier = c.read_register(register_step(addresses[0].terms[0].name, 1))
    code.event = "" if load else "async_store"


def prefetch(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    addresses = [operand for operand in operands if operand.kind == "addr"]
    if root == "CCTL" and not any(m.startswith("PF") for m in modifiers):
        code.event = "invalidate" if "IVALL" in modifiers else ""
        return
    if root == "UTMACCTL":  # the descriptor itself, not what it points to; IV is the acquire of fence.proxy.tensormap
        code.event = "proxy_fence" if "IV" in modifiers else ""
        return
    if not addresses:
        unknown(c, code, root, operands, ops)
        return
    where = site(c, code, Kind.PREFETCH, addresses[-1], ("E", *modifiers), "weak")
    where.descriptor = root == "UTMAPF"


def fence(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    if root == "MEMBAR":
        code.event = "membar" if {"GPU", "SYS", "VC"} & set(modifiers) else ""
    elif "ASYNC" in modifiers or root == "UFENCE":
        code.event = "proxy_fence"


def mbarrier(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    """SYNCS: try_wait names its result by program counter; a new try forgets what was assumed of the last."""
    predicates = [operand for operand in operands[:1] if operand.kind == "pred"]
    targets = [operand for operand in operands[:1] if operand.kind == "reg"]
    addresses = [operand for operand in operands if operand.kind == "addr"]
    low, _, code.event_offset = c.address(addresses[0], modifiers, False) if addresses else ((), (), 0)
    if "PHASECHK" in modifiers:
        symbol = c.domain.node("mbar", code.pc)
        bit = c.mbar_bits[code.pc] = c.domain.bit(("mbar", code.pc))
        value = c.domain.make(None, symbol, 0, bit)

        phase = [operand for operand in operands if operand.kind in ("reg", "number")]
        phase_slot, first_phase, pc = c.read(phase[-1], ops) if phase else c.zero, c.first_phase, code.pc

        def forget(s: State) -> None:
            if pc not in first_phase:
                first_phase[pc] = s[phase_slot].const
            if s[ASSUME]:
                s[ASSUME] = s[ASSUME] - {symbol, -symbol}

        ops.append(forget)
        for operand in predicates:
            set_value(ops, destination(c, operand), value)
        code.event, code.event_slots = "try_wait", low[:1]
        return
    for operand in targets:
        for step in range(2):
            set_value(ops, destination(c, operand, step), c.domain.data)
    clear_predicates(c, predicates, ops)
    if "ARRIVE" in modifiers:
        code.event, code.event_slots = "arrive", low[:1]


def shared_load(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    addresses = [operand for operand in operands if operand.kind == "addr"]
    targets = [operand for operand in operands[:2] if operand.kind == "reg"]
    clear_predicates(c, [operand for operand in operands[:1] if operand.kind == "pred"], ops)
    if not targets:
        return
    if root != "LDS" or not addresses:
        value = c.domain.source("shared", code.pc)
        for step in range(opcodes.register_count(modifiers)):
            set_value(ops, destination(c, targets[0], step), value)
        return
    load_slot(c, "S", code.pc, modifiers, targets[0], addresses[0], ops)


def shared_store(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    addresses = [operand for operand in operands if operand.kind == "addr"]
    values = [operand for operand in operands if operand.kind in ("reg", "number", "const")]
    if root == "STS" and addresses and values:
        store_slot(c, "S", modifiers, values[-1], addresses[0], ops)
    code.event = "shared_tile" if root == "STSM" or {"64", "128"} & set(modifiers) else "shared_store"


def local_load(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    addresses = [operand for operand in operands if operand.kind == "addr"]
    if addresses and operands[0].kind == "reg":
        load_slot(c, "L", code.pc, modifiers, operands[0], addresses[0], ops)


def local_store(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    addresses = [operand for operand in operands if operand.kind == "addr"]
    if addresses and operands[-1].kind in ("reg", "number", "const"):
        store_slot(c, "L", modifiers, operands[-1], addresses[0], ops)


def tensor_read(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    """Matrix instructions that read shared memory through the async proxy."""
    data(c, modifiers, operands, ops)
    code.event = "async_read" if any(operand.kind == "other" and "gdesc" in operand.name for operand in operands) else ""
    if any(operand.space == "gdesc" for operand in operands):
        code.event = "async_read"
    if root == "UTCBAR":
        code.event, code.event_slots = "arrive", ()


def warp_sync(c: Compiler, code: Code, root: str, modifiers: tuple[str, ...], operands: tuple[Operand, ...], ops: list[Op]) -> None:
    return


MEMORY_HANDLERS = {
    **dict.fromkeys((*opcodes.GLOBAL_LOADS, *opcodes.ATOMICS), global_load),
    **dict.fromkeys(opcodes.GLOBAL_STORES, global_store),
    "LDGSTS": async_copy,
    **dict.fromkeys(opcodes.BULK, bulk_copy),
    **dict.fromkeys((*opcodes.TMA_LOADS, *opcodes.TMA_STORES), tma),
    **dict.fromkeys(opcodes.PREFETCHES, prefetch),
    **dict.fromkeys(opcodes.FENCES, fence),
    "SYNCS": mbarrier,
    **dict.fromkeys(opcodes.SHARED_LOADS, shared_load),
    **dict.fromkeys(("STS", "STAS", "REDS", "REDAS", "STSM", "UBLKST", "USTS"), shared_store),
    "LDL": local_load,
    "STL": local_store,
    **dict.fromkeys(("HGMMA", "IGMMA", "BGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA", "UTCBAR"), tensor_read),
    **dict.fromkeys(("WARPSYNC", "BPT", "WARPGROUP", "UCGABAR_ARV", "PREEXIT"), warp_sync),
}
