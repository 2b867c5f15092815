"""Transfer functions of comparisons and predicate logic, in a form where opposite tests share one symbol."""

from __future__ import annotations

from validation.ordering import opcodes
from validation.ordering.machine import Compiler, Op, sources_of
from validation.ordering.transfers import Operands, apply, assign, destination
from validation.ordering.values import Domain, Value


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
