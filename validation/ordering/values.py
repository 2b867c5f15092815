"""The abstract value of one 32-bit register, and the arithmetic on it.

A value holds what is known in three ways at once:
- `const`: the number itself, when every path gives the same one;
- `symbol`: a hash-consed expression over things that stay the same while a thread runs (parameters, thread and block ids), so that
  two tests of the same condition are recognised as one and can be evaluated again for one warp;
- `add` and `scaled`: bit masks of sources. A source in `add` is an addend with coefficient one (the low or high word of a pointer can
  be found there), one in `scaled` influences the value in any other way.
Values are interned per kernel: equal values are the same object, so that comparison and memoisation cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WORD = 0xFFFFFFFF
MAX_CHOICES = 8  # constants that one selection is followed to
Source = tuple[Any, ...]
# Sources: ("param", byte offset of a word) | ("pblock", byte offset | None, half) | ("pdyn", byte offset, half) |
# ("bank", bank, byte offset) | ("mem", pc, word) | ("shared", pc) | ("local", pc) | ("mbar", pc) | ("unknown", pc)


class Value:
    """Interned; see the module text. `symbol` 0 means none."""

    __slots__ = ("add", "const", "scaled", "symbol")

    def __init__(self, const: int | None, symbol: int, add: int, scaled: int) -> None:
        self.const = const
        self.symbol = symbol
        self.add = add
        self.scaled = scaled

    @property
    def mask(self) -> int:
        return self.add | self.scaled

    def __repr__(self) -> str:
        return f"Value(const={self.const}, symbol={self.symbol}, add={self.add:#x}, scaled={self.scaled:#x})"


class Domain:
    """All values, sources and symbols of one kernel."""

    def __init__(self) -> None:
        self._values: dict[tuple[int | None, int, int, int], Value] = {}
        self._bits: dict[Source, int] = {}
        self.sources: list[Source] = []
        self.nodes: list[tuple[Any, ...]] = [("none",)]
        self._node_ids: dict[tuple[Any, ...], int] = {}
        self._memo: dict[tuple[Any, ...], Value] = {}
        self._addressable: dict[Value, bool] = {}
        self.bottom = Value(None, 0, 0, 0)  # never written; joins as if absent
        self.data = self.make(None, 0, 0, 0)  # arithmetic result that cannot be part of an address
        self.zero = self.constant(0)
        self.one = self.constant(1)

    # ------------------------------------------------------------------ construction
    def make(self, const: int | None, symbol: int, add: int, scaled: int) -> Value:
        key = (const, symbol, add, scaled)
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = Value(const, symbol, add, scaled)
        return found

    def node(self, *parts: Any) -> int:
        found = self._node_ids.get(parts)
        if found is None:
            found = self._node_ids[parts] = len(self.nodes)
            self.nodes.append(parts)
        return found

    def constant(self, number: int) -> Value:
        number &= WORD
        return self.make(number, self.node("const", number), 0, 0)

    def bit(self, source: Source) -> int:
        found = self._bits.get(source)
        if found is None:
            found = self._bits[source] = 1 << len(self.sources)
            self.sources.append(source)
        return found

    def source(self, *source: Any, symbol: bool = False) -> Value:
        """A fresh value of that source; with `symbol`, one that is stable while the thread runs."""
        return self.make(None, self.node(*source) if symbol else 0, self.bit(source), 0)

    def special(self, name: str) -> Value:
        """A special register that does not change while the thread runs."""
        return self.make(None, self.node("special", name), 0, 0)

    def listed(self, mask: int) -> list[Source]:
        found = []
        while mask:
            low = mask & -mask
            found.append(self.sources[low.bit_length() - 1])
            mask ^= low
        return found

    def possible(self, symbol: int, depth: int = 0) -> frozenset[int]:
        """Every number that a selection between constants can be; empty when it is anything else, or more than a few."""
        node = self.nodes[symbol]
        if node[0] == "const":
            return frozenset((node[1],))
        if node[0] == "sel" and depth < MAX_CHOICES:
            ways = self.possible(node[2], depth + 1), self.possible(node[3], depth + 1)
            return ways[0] | ways[1] if all(ways) and len(ways[0] | ways[1]) <= MAX_CHOICES else frozenset()
        if node[0] == "plus" and depth < MAX_CHOICES:
            return frozenset((number + node[2]) & WORD for number in self.possible(node[1], depth + 1))
        return frozenset()

    def block_offsets(self, value: Value) -> frozenset[int]:
        """Offsets in the parameter block that an address of it can have; empty when anything else takes part."""
        sources = self.listed(value.add)
        known = frozenset(source[1] for source in sources if source[0] == "pblock" and source[2] == 0 and source[1] is not None)
        return known if len(known) == len(sources) <= MAX_CHOICES else frozenset()

    def addressable(self, value: Value) -> bool:
        """Whether a value may be (half of) an address that did not itself come from memory."""
        if not value.add:
            return False
        known = self._addressable.get(value)
        if known is None:
            known = self._addressable[value] = any(source[0] not in ("mem", "shared", "local") for source in self.listed(value.add))
        return known

    # ------------------------------------------------------------------ lattice
    def join(self, a: Value, b: Value) -> Value:
        if a is b or b is self.bottom:
            return a
        if a is self.bottom:
            return b
        key = ("join", a, b)
        found = self._memo.get(key)
        if found is None:
            const = a.const if a.const == b.const else None
            symbol = a.symbol if a.symbol == b.symbol else 0
            found = self._memo[key] = self.make(const, symbol, a.add | b.add, a.scaled | b.scaled)
        return found

    # ------------------------------------------------------------------ arithmetic
    def memo(self, key: tuple[Any, ...], compute: Callable[[], Value]) -> Value:
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = compute()
        return found

    def opaque(self, name: str, *parts: Value, fold: Callable[..., int] | None = None) -> Value:
        """Result that depends on the parts but is no address of theirs. `fold` gives the number when all parts are known."""
        key = ("op", name, *parts)
        found = self._memo.get(key)
        if found is None:
            if fold is not None and all(part.const is not None for part in parts):
                found = self.constant(fold(*(part.const for part in parts)))
            else:
                symbol = self.node(name, *(part.symbol for part in parts)) if parts and all(part.symbol for part in parts) else 0
                mask = 0
                for part in parts:
                    mask |= part.add | part.scaled
                found = self.make(None, symbol, 0, mask)
            self._memo[key] = found
        return found

    def negate_number(self, a: Value) -> Value:
        return self.opaque("neg", a, fold=lambda x: -x)

    def complement(self, a: Value) -> Value:
        return self.opaque("inv", a, fold=lambda x: ~x)

    def add_values(self, *parts: Value) -> Value:
        """Sum with coefficient one each. A constant added to the parameter block's address moves the offset of that source."""
        key = ("add", *parts)
        found = self._memo.get(key)
        if found is not None:
            return found
        known = sum(part.const for part in parts if part.const is not None)
        rest = [part for part in parts if part.const is None]
        if not rest:
            found = self.constant(known)
        elif len(rest) == 1 and known & WORD == 0:
            found = rest[0]
        else:
            add = scaled = 0
            for part in rest:
                add |= part.add
                scaled |= part.scaled
            symbol = self._sum_symbol(rest, known & WORD)
            if known & WORD and add:
                add = self._shift_block(add, known & WORD)
            found = self.make(None, symbol, add, scaled)
        self._memo[key] = found
        return found

    def _sum_symbol(self, rest: list[Value], known: int) -> int:
        """Sums with a constant are kept as ("plus", base, number), nested ones collapsed: two spellings of one address are equal."""
        if not all(part.symbol for part in rest):
            return 0
        base = rest[0].symbol if len(rest) == 1 else self.node("sum", *sorted(part.symbol for part in rest))
        if self.nodes[base][0] == "plus":
            known = (known + self.nodes[base][2]) & WORD
            base = self.nodes[base][1]
        return self.node("plus", base, known) if known else base

    def _shift_block(self, mask: int, known: int) -> int:
        moved = 0
        listed = self.listed(mask)
        blocks = sum(1 for source in listed if source[0] == "pblock")
        for source in listed:
            if source[0] == "pblock" and source[2] == 0:
                offset = None if source[1] is None else (source[1] + known) & WORD
                # A walk over the parameter block must end somewhere: more than a few offsets become "somewhere in it".
                source = ("pblock", offset if blocks <= 4 and offset is not None and offset < 1 << 15 else None, 0)
            moved |= self.bit(source)
        return moved

    def wide_high(self, a: Value, b: Value, c: Value, signed: bool) -> Value:
        """High word of a*b + c:64, c being its high word: c's sources stay addends."""
        key = ("wide", a, b, c, signed)
        found = self._memo.get(key)
        if found is None:
            mask = a.add | a.scaled | b.add | b.scaled
            symbol = self.node("wide", a.symbol, b.symbol, c.symbol, signed) if a.symbol and b.symbol and c.symbol else 0
            found = self._memo[key] = self.make(None, symbol, c.add, c.scaled | (mask & ~c.add))
        return found

    def multiply(self, a: Value, b: Value) -> Value:
        if b.const == 1:
            return a
        if a.const == 1:
            return b
        if a.const == 0 or b.const == 0:
            return self.zero
        return self.opaque("mul", a, b, fold=lambda x, y: x * y)

    def scale(self, a: Value, shift: int) -> Value:
        if shift == 0 or a.const == 0:
            return a
        return self.opaque(f"shl{shift}", a, fold=lambda x: x << shift if shift < 32 else 0)

    def logic(self, lut: int, a: Value, b: Value, c: Value) -> Value:
        """LOP3. OR and XOR of an address keep its sources; AND keeps them only under a mask that keeps the top bit."""
        key = ("lop", lut, a, b, c)
        found = self._memo.get(key)
        if found is None:
            parts = (a, b, c)
            if all(part.const is not None for part in parts):
                found = self.constant(truth_table(lut, *(part.const or 0 for part in parts)))
            else:
                found = self._logic(lut, a, b, c)
            self._memo[key] = found
        return found

    def _logic(self, lut: int, a: Value, b: Value, c: Value) -> Value:
        if c.const == 0:
            if lut & 0x55 == 0x50:  # identity in a whatever b
                return a
            small = next((part for part in (a, b) if part.const is not None), None)
            if lut & 0x55 == 0x40 and small is not None and small.const is not None:
                other = b if small is a else a
                if small.const == WORD:
                    return other
                if not small.const & 0x80000000:
                    return self.opaque("and", other, small)
        parts = [part for part in (a, b, c) if part.const is None]
        add = scaled = 0
        for part in parts:
            add |= part.add
            scaled |= part.scaled
        symbol = self.node("lop", lut, a.symbol, b.symbol, c.symbol) if a.symbol and b.symbol and c.symbol else 0
        return self.make(None, symbol, add, scaled)

    # ------------------------------------------------------------------ predicates (values 0 and 1)
    def invert(self, p: Value) -> Value:
        """Logical not of a predicate."""
        if p.const is not None:
            return self.zero if p.const else self.one
        if not p.symbol:
            return p
        node = self.nodes[p.symbol]
        symbol = node[1] if node[0] == "not" else self.node("not", p.symbol)
        return self.make(None, symbol, p.add, p.scaled)

    def literal(self, symbol: int) -> tuple[int, bool]:
        """(positive symbol, truth) of a predicate's symbol."""
        node = self.nodes[symbol]
        return (node[1], False) if node[0] == "not" else (symbol, True)

    def both(self, p: Value, q: Value, op: str) -> Value:
        """p AND/OR/XOR q."""
        if op == "AND":
            if p.const == 0 or q.const == 0:
                return self.zero
            if p.const == 1:
                return q
            if q.const == 1:
                return p
        elif op == "OR":
            if p.const == 1 or q.const == 1:
                return self.one
            if p.const == 0:
                return q
            if q.const == 0:
                return p
        elif op == "XOR" and 0 in (p.const, q.const):
            return q if p.const == 0 else p
        return self.opaque(f"p{op}", p, q)


def truth_table(lut: int, a: int, b: int, c: int) -> int:
    result = 0
    for index in range(8):
        if lut >> index & 1:
            x = a if index & 4 else ~a
            y = b if index & 2 else ~b
            z = c if index & 1 else ~c
            result |= x & y & z
    return result & WORD
