"""Transfer functions of SASS integer, move and predicate instructions: what each does to the abstract values of registers.

Every function takes the compiler, the modifiers, the operands and the list of operations to append to. Arithmetic lives in `Domain`;
here only operand order and register pairs are decided.
"""

from __future__ import annotations

from validation.ordering import opcodes
from validation.ordering.machine import Compiler, Op, packed_halves, split_destinations
from validation.ordering.operands import Operand
from validation.ordering.predicates import compare, predicate_logic, set_predicate, set_predicate_float
from validation.ordering.transfers import Handler, Operands, apply, assign, carry_split, clear_predicates, destination, set_value
from validation.ordering.values import Value


def move(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    predicates, target, values, _ = carry_split(operands)
    clear_predicates(c, predicates, ops)
    source = values[0] if values else Operand("other")
    if source.kind == "special":
        special(c, modifiers, (target, source), ops)
        return
    count = opcodes.register_count(modifiers)
    slots = [c.read(source, ops, step) for step in range(count)]
    for step, slot in enumerate(slots):
        assign(ops, destination(c, target, step), slot)


def special(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    target, source = operands[0], operands[-1]
    count = opcodes.register_count(modifiers)
    domain = c.domain
    for step in range(max(count, 2 if source.name == "SRZ" and count == 2 else 1)):
        if source.name == "SRZ":
            value = domain.zero
        elif source.name.startswith("SR_SW"):
            value = domain.source("window", source.name)
        elif source.name.startswith(opcodes.STABLE_SPECIAL) and step == 0:
            value = domain.special(source.name)
        else:
            value = domain.data
        set_value(ops, destination(c, target, step), value)


def add3(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    predicates, target, values, _ = carry_split(operands)
    clear_predicates(c, predicates, ops)
    wide = "64" in modifiers
    results = []
    for step in range(2 if wide else 1):
        results.append([c.read(value, ops, step) for value in values[:3]])
    for step, slots in enumerate(results):
        apply(ops, destination(c, target, step), c.domain.add_values, *slots)


def multiply_add(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    predicates, target, values, _ = carry_split(operands)
    clear_predicates(c, predicates, ops)
    while len(values) < 3:
        values.append(Operand("reg", "RZ"))
    domain = c.domain
    a, b, addend = (c.read(value, ops) for value in values[:3])
    if "HI" in modifiers:
        apply(ops, destination(c, target), lambda x, y, z: domain.wide_high(x, y, z, False), a, b, addend)
        return
    low, high = destination(c, target), destination(c, target, 1)
    if "WIDE" in modifiers:
        upper = c.read(values[2], ops, 1)
        signed = "U32" not in modifiers
        temporary = c.temporary()
        apply(ops, temporary, lambda x, y, z: domain.wide_high(x, y, z, signed), a, b, upper)
        apply(ops, low, lambda x, y, z: domain.add_values(domain.multiply(x, y), z), a, b, addend)
        assign(ops, high, temporary)
        return
    apply(ops, low, lambda x, y, z: domain.add_values(domain.multiply(x, y), z), a, b, addend)


def load_address(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    """LEA Rd = (Ra << s) + Rb; LEA.HI adds the bits shifted out of Rc:Ra to Rb."""
    predicates, target, values, _ = carry_split(operands)
    clear_predicates(c, predicates, ops)
    domain = c.domain
    if len(values) < 3:
        set_value(ops, destination(c, target), domain.data)
        return
    shift = values[-1].number & 31 if values[-1].kind == "number" else None
    a, b = c.read(values[0], ops), c.read(values[1], ops)
    if "HI" in modifiers:
        upper = c.read(values[2], ops) if len(values) > 3 else c.zero
        name = f"leahi{shift}"
        apply(ops, destination(c, target), lambda x, y, z: domain.add_values(y, domain.opaque(name, x, z)), a, b, upper)
    elif shift is None:
        apply(ops, destination(c, target), lambda x, y: domain.add_values(domain.opaque("lea", x), y), a, b)
    else:
        apply(ops, destination(c, target), lambda x, y: domain.add_values(domain.scale(x, shift), y), a, b)


def shift(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    predicates, target, values, _ = carry_split(operands)
    clear_predicates(c, predicates, ops)
    domain = c.domain
    a, by, upper = (c.read(value, ops) for value in (*values, Operand("reg", "RZ"))[:3])
    left, high = "L" in modifiers, "HI" in modifiers
    amount = values[1].number if values[1].kind == "number" else None
    signed = "S32" in modifiers
    if left and not high and amount is not None:
        apply(ops, destination(c, target), lambda x: domain.scale(x, amount), a)
    elif not left and high and values[0].name in ("RZ", "URZ") and amount is not None:
        name = f"{'sar' if signed else 'shr'}{amount & 31}"
        fold = (lambda x: x >> (amount & 31)) if not signed else (lambda x: (x - (x >> 31 << 32)) >> (amount & 31))
        apply(ops, destination(c, target), lambda x: domain.opaque(name, x, fold=fold), upper)
    else:
        name = f"shf{'l' if left else 'r'}{'h' if high else ''}"
        apply(ops, destination(c, target), lambda x, y, z: domain.opaque(name, x, y, z), a, by, upper)


def select(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    domain = c.domain
    target = operands[0]
    condition = c.read(operands[-1], ops)
    count = opcodes.register_count(modifiers)

    def choose(p: Value, x: Value, y: Value) -> Value:
        if p.const is not None:
            return x if p.const else y
        joined = domain.join(x, y)
        if joined.symbol or not (p.symbol and x.symbol and y.symbol):
            return joined
        return domain.make(None, domain.node("sel", p.symbol, x.symbol, y.symbol), joined.add, joined.scaled | p.mask)

    pairs = [(c.read(operands[1], ops, step), c.read(operands[2], ops, step)) for step in range(count)]
    for step, (x, y) in enumerate(pairs):
        apply(ops, destination(c, target, step), choose, condition, x, y)


def shuffle(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    """The same value of another lane: same sources; the same symbol when a fixed lane is read."""
    predicates, target, values, _ = carry_split(operands)
    clear_predicates(c, predicates, ops)
    domain = c.domain
    fixed = "IDX" in modifiers and len(values) > 1 and (values[1].kind == "number" or values[1].name in ("RZ", "URZ"))

    def other(x: Value) -> Value:
        if x.const is not None:
            return x
        symbol = domain.node("shfl", x.symbol) if fixed and x.symbol else 0
        return domain.make(None, symbol, x.add, x.scaled)

    apply(ops, destination(c, target), other, c.read(values[0], ops))


def logic3(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    predicates, target, values, _ = carry_split(operands)
    domain = c.domain
    numbers = [value for value in values[2:] if value.kind == "number"]
    lut = numbers[-1].number & 0xFF if numbers else 0xFE
    if len(values) < 3:
        raise ValueError(f"LOP3: got {len(values)} sources, needs 3")
    slots = [c.read(value, ops) for value in values[:3]]
    result = c.temporary()
    apply(ops, result, lambda x, y, z: domain.logic(lut, x, y, z), *slots)
    if predicates and predicates[0].name not in ("PT", "UPT"):
        apply(ops, destination(c, predicates[0]), lambda x: domain.invert(compare(domain, "EQ", False, x, domain.zero)), result)
    assign(ops, destination(c, target), result)


def integer(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op], name: str = "int") -> None:
    """Any integer operation that the audit does not compute: depends on its sources, is no address of theirs."""
    predicates, rest = split_destinations(operands)
    if not rest:
        clear_predicates(c, predicates, ops)
        return
    target, sources = rest[0], rest[1:]
    more, sources = split_destinations(tuple(sources)) if sources and sources[0].kind == "pred" and len(sources) > 2 else ([], sources)
    clear_predicates(c, [*predicates, *more], ops)
    label = f"{name}.{'.'.join(modifiers)}" + "".join("~" if s.kind == "pred" and s.inverted else "" for s in sources)
    slots = [c.read(source, ops) for source in sources if source.kind in ("reg", "pred", "number", "const")]
    if not slots:
        set_value(ops, destination(c, target), c.domain.data)
        return
    domain = c.domain
    apply(ops, destination(c, target), lambda *parts: domain.opaque(label, *parts), *slots)


def permute(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    if len(operands) == 4 and operands[2].kind == "number" and operands[2].number == 0x3210:
        assign(ops, destination(c, operands[0]), c.read(operands[1], ops))
    else:
        integer(c, modifiers, operands, ops, "prmt")


def half_constant(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    zeros = len(operands) == 5 and all(operand.name == "RZ" for operand in operands[1:3])
    if zeros and all(operand.kind == "number" for operand in operands[3:]):
        set_value(ops, destination(c, operands[0]), c.domain.constant(packed_halves(operands[3], operands[4])))
    else:
        data(c, modifiers, operands, ops)


def data(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    """Floating point and the like: the result takes part in no address."""
    predicates, rest = split_destinations(operands)
    clear_predicates(c, predicates, ops)
    if rest and rest[0].kind == "reg":
        for step in range(opcodes.register_count(modifiers)):
            set_value(ops, destination(c, rest[0], step), c.domain.data)


def ballot(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    """VOTE, MATCH, REDUX: depends on all lanes, so never stable for one of them."""
    for operand in operands:
        if operand.kind in ("reg", "pred") and operand.inverted:
            break
        if operand.kind in ("reg", "pred"):
            set_value(ops, destination(c, operand), c.domain.data)
            if operand.kind == "reg":
                break


def elect(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    """One lane is chosen; the same one each time for the same warp."""
    value = c.domain.make(None, c.domain.node("elect"), 0, 0)
    for operand in operands[:2]:
        set_value(ops, destination(c, operand), value if operand.kind == "pred" else c.domain.data)


def predicates_from_register(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    prefix = "UP" if operands and operands[0].name == "UPR" else "P"
    for index in range(7):
        if f"{prefix}{index}" in c.slots:
            set_value(ops, c.slots[f"{prefix}{index}"], c.domain.data)


def barrier_move(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    """BMOV and BSSY bookkeeping: convergence barriers hold the address where threads meet again."""
    if len(operands) >= 2 and operands[1].kind in ("reg", "number"):
        assign(ops, c.write_register(operands[0].name), c.read(operands[1], ops))


def set_barrier(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    if len(operands) >= 2 and operands[1].kind == "number":
        set_value(ops, c.write_register(operands[0].name), c.domain.constant(operands[1].number))


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("MOV", "UMOV", "MOV32I", "R2UR", "UR2R", "S2UR", "S2R", "CS2R", "CS2UR", "R2URX", "R2UR_"), move),
    **dict.fromkeys(("LDC", "ULDC", "LDCU"), move),
    **dict.fromkeys(("IADD3", "UIADD3", "VIADD", "UVIADD", "IADD", "UIADD", "IADD32I", "IADD2", "UIADD2"), add3),
    **dict.fromkeys(("IMAD", "UIMAD", "IMAD32I"), multiply_add),
    **dict.fromkeys(("LEA", "ULEA"), load_address),
    **dict.fromkeys(("SHF", "USHF"), shift),
    **dict.fromkeys(("SEL", "USEL", "FSEL", "UFSEL"), select),
    "SHFL": shuffle,
    **dict.fromkeys(("LOP3", "ULOP3", "LOP", "ULOP", "LOP32I"), logic3),
    **dict.fromkeys(("PLOP3", "UPLOP3"), predicate_logic),
    **dict.fromkeys(("ISETP", "UISETP"), set_predicate),
    **dict.fromkeys(("FSETP", "DSETP", "HSETP2", "UFSETP"), set_predicate_float),
    **dict.fromkeys(("PRMT", "UPRMT"), permute),
    **dict.fromkeys(("HFMA2",), half_constant),
    **dict.fromkeys(("VOTE", "VOTEU", "MATCH", "REDUX", "UREDUX", "CREDUX"), ballot),
    "ELECT": elect,
    **dict.fromkeys(("R2P", "UR2UP"), predicates_from_register),
    "BMOV": barrier_move,
    "BSSY": set_barrier,
}
