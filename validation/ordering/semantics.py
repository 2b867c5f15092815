"""Transfer functions of SASS integer, move and predicate instructions: what each does to the abstract values of registers.

Every function takes the compiler, the modifiers, the operands and the list of operations to append to. Arithmetic lives in `Domain`;
here only operand order and register pairs are decided.
"""

from __future__ import annotations

from collections.abc import Callable

from validation.ordering import opcodes
from validation.ordering.machine import TRASH, Compiler, Op, State, packed_halves, sources_of, split_destinations
from validation.ordering.operands import Operand, register_step
from validation.ordering.values import Domain, Value

Operands = tuple[Operand, ...]
Handler = Callable[[Compiler, tuple[str, ...], Operands, list[Op]], None]


def assign(ops: list[Op], target: int, source: int) -> None:
    def op(s: State) -> None:
        s[target] = s[source]

    ops.append(op)


def set_value(ops: list[Op], target: int, value: Value) -> None:
    def op(s: State) -> None:
        s[target] = value

    ops.append(op)


def apply(ops: list[Op], target: int, function: Callable[..., Value], *slots: int) -> None:
    """target = function(slots...), specialised on the number of slots because this is the inner loop of the analysis."""
    if len(slots) == 1:
        a = slots[0]

        def op1(s: State) -> None:
            s[target] = function(s[a])

        ops.append(op1)
    elif len(slots) == 2:
        a, b = slots

        def op2(s: State) -> None:
            s[target] = function(s[a], s[b])

        ops.append(op2)
    elif len(slots) == 3:
        a, b, c = slots

        def op3(s: State) -> None:
            s[target] = function(s[a], s[b], s[c])

        ops.append(op3)
    else:

        def op(s: State) -> None:
            s[target] = function(*[s[slot] for slot in slots])

        ops.append(op)


def clear_predicates(c: Compiler, destinations: list[Operand], ops: list[Op]) -> None:
    for destination in destinations:
        set_value(ops, c.write_register(destination.name), c.domain.data)


def destination(c: Compiler, operand: Operand, step: int = 0) -> int:
    if operand.kind not in ("reg", "pred"):
        return TRASH
    return c.write_register(register_step(operand.name, step) if step else operand.name)


def carry_split(operands: Operands) -> tuple[list[Operand], Operand, list[Operand], list[Operand]]:
    """(result predicates before and after Rd, Rd, sources, trailing predicates) of `OP [P,] Rd, [P, P,] sources, [P, P]`."""
    first, rest = split_destinations(operands)
    target = rest[0]
    second, sources = split_destinations(tuple(rest[1:]))
    values, trailing = sources_of(sources)
    return [*first, *second], target, values, trailing


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


def compare(domain: Domain, how: str, unsigned: bool, a: Value, b: Value) -> Value:
    """A comparison in canonical form (LT and EQ only), so that opposite tests share one symbol."""
    if how in ("T", "F"):
        return domain.one if how == "T" else domain.zero
    if how in ("GE", "NE"):
        return domain.invert(compare(domain, "LT" if how == "GE" else "EQ", unsigned, a, b))
    if how in ("GT", "LE"):
        less = compare(domain, "LT", unsigned, b, a)
        return less if how == "GT" else domain.invert(less)
    if how == "EQ":
        if b.symbol < a.symbol:
            a, b = b, a
        if a is b and a.symbol:
            return domain.one
        for chosen, number in ((a, b.const), (b, a.const)):
            simple = None if number is None else _undo_select(domain, chosen, number)
            if simple is not None:
                return simple
        return domain.opaque("eq", a, b, fold=lambda x, y: int(x == y))
    if unsigned:
        if b.const == 0:
            return domain.zero
        return domain.opaque("ltu", a, b, fold=lambda x, y: int(x < y))
    return domain.opaque("lts", a, b, fold=lambda x, y: int(x - (x >> 31 << 32) < y - (y >> 31 << 32)))


def _undo_select(domain: Domain, chosen: Value, number: int) -> Value | None:
    """(p ? x : y) == number, where x and y are different known numbers, is p or its opposite."""
    node = domain.nodes[chosen.symbol]
    if node[0] != "sel":
        return None
    x, y = domain.nodes[node[2]], domain.nodes[node[3]]
    if x[0] != "const" or y[0] != "const" or x[1] == y[1]:
        return None
    condition = domain.make(None, node[1], 0, chosen.scaled | chosen.add)
    if x[1] == number:
        return condition
    return domain.invert(condition) if y[1] == number else domain.zero


def set_predicate(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op], floating: bool = False) -> None:
    domain = c.domain
    how = next((m.rstrip("U") if floating and m != "NUM" else m for m in modifiers if m.rstrip("U") in opcodes.COMPARISONS), "")
    op_name = next((m for m in modifiers if m in ("AND", "OR", "XOR")), "AND")
    unsigned = "U32" in modifiers or "U64" in modifiers
    wide = "U64" in modifiers or "S64" in modifiers
    exact = how and not floating and "EX" not in modifiers and not wide
    first, second = operands[0], operands[1] if len(operands) > 1 and operands[1].kind == "pred" else None
    values, trailing = sources_of(list(operands[2 if second else 1 :]))
    slots = [c.read(value, ops, step) for value in values[:2] for step in range(2 if wide else 1)]
    combine = c.read(trailing[0], ops) if trailing else c.one
    if not exact and len(trailing) > 1:
        slots.append(c.read(trailing[1], ops))
    result = c.temporary()
    if exact and len(slots) == 2:
        apply(ops, result, lambda x, y: compare(domain, how, unsigned, x, y), *slots)
    else:
        name = "set." + ".".join(modifiers)
        apply(ops, result, lambda *parts: domain.opaque(name, *parts), *slots)
    pairs = [(first, False), *([(second, True)] if second else [])]
    targets = [(destination(c, operand), inverse) for operand, inverse in pairs if operand.name not in ("PT", "UPT")]
    combined = c.temporary()
    assign(ops, combined, combine)  # the first result may overwrite the predicate that the second still reads

    for target, inverse in targets:
        if inverse:
            apply(ops, target, lambda x, q: domain.both(domain.invert(x), q, op_name), result, combined)
        else:
            apply(ops, target, lambda x, q: domain.both(x, q, op_name), result, combined)


def set_predicate_float(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    set_predicate(c, modifiers, operands, ops, floating=True)


def predicate_logic(c: Compiler, modifiers: tuple[str, ...], operands: Operands, ops: list[Op]) -> None:
    domain = c.domain
    predicates = [operand for operand in operands if operand.kind == "pred"]
    luts = [operand.number & 0xFF for operand in operands if operand.kind == "number"] or [0x80]
    targets, sources = predicates[:2], predicates[2:5]
    slots = [c.read(source, ops) for source in sources]
    while len(slots) < 3:
        slots.append(c.one)
    results = []
    for index, target in enumerate(targets):
        if target.name in ("PT", "UPT") or index >= len(luts):
            continue
        temporary = c.temporary()
        lut = luts[index]
        apply(ops, temporary, lambda x, y, z, lut=lut: table(domain, lut, x, y, z), *slots)
        results.append((destination(c, target), temporary))
    for target_slot, temporary in results:
        assign(ops, target_slot, temporary)


def table(domain: Domain, lut: int, *inputs: Value) -> Value:
    """Three-input truth table over predicates, reduced by what is known."""
    distinct = list(dict.fromkeys(value for value in inputs if value.const is None))
    outcomes = []
    for number in range(1 << len(distinct)):
        setting = {value: number >> index & 1 for index, value in enumerate(distinct)}
        bits = [value.const if value.const is not None else setting[value] for value in inputs]
        outcomes.append(lut >> (bits[0] << 2 | bits[1] << 1 | bits[2]) & 1)
    if len(set(outcomes)) == 1:
        return domain.one if outcomes[0] else domain.zero
    for index, value in enumerate(distinct):
        if value.symbol == 0:
            continue
        column = [number >> index & 1 for number in range(1 << len(distinct))]
        if outcomes == column:
            return value
        if outcomes == [1 - bit for bit in column]:
            return domain.invert(value)
    if len(distinct) == 1:  # an unnamed value seen directly or inverted: what it depends on survives, its name does not exist
        return distinct[0]
    return domain.opaque(f"plop{lut}", *inputs)


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
