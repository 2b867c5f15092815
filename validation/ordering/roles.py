"""Warp roles: deciding the tests of a kernel for one range of threads.

Kernels that specialise their warps branch on conditions over the thread id. Such a condition is a symbol of `values.Domain`; here it is
evaluated over an interval of thread ids, so that the flow analysis can be run once per role with those branches decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from validation.ordering.values import WORD, Domain, truth_table

Interval = tuple[int, int]
WARP_THREADS = 32
MAX_DEPTH = 60


@dataclass(frozen=True)
class WarpRole:
    """Threads first..last of the block (x dimension); `elected` fixes whether this thread is the one that `elect.sync` picks."""

    name: str
    first: int = 0
    last: int = 1023
    elected: bool | None = None
    assumed: frozenset[int] = field(default_factory=frozenset)  # signed symbols known from the launch


class Evaluator:
    """Truth of predicate symbols for one role; None when the role does not decide it."""

    def __init__(self, domain: Domain, role: WarpRole, nonzero: frozenset[int], one_dimensional: bool, block: Interval | None) -> None:
        self.domain, self.role, self.nonzero = domain, role, nonzero
        self.one_dimensional, self.block = one_dimensional, block
        self._known: dict[int, Interval | None] = {}
        self._depth = 0

    def decide(self, symbol: int) -> bool | None:
        found = self.interval(symbol)
        return None if found is None or found[0] != found[1] else bool(found[0])

    def interval(self, symbol: int) -> Interval | None:
        if symbol in self._known:
            return self._known[symbol]
        if self._depth >= MAX_DEPTH:
            return None  # an expression this deep is arithmetic over data, not a test of the thread id
        self._depth += 1
        found = self._compute(self.domain.nodes[symbol])
        self._depth -= 1
        self._known[symbol] = found
        return found

    def _compute(self, node: tuple) -> Interval | None:
        name = node[0]
        if name == "const":
            return node[1], node[1]
        if name == "special":
            return self._special(node[1])
        if name == "param":
            return (1, WORD) if node[1] in self.nonzero else None
        if name == "elect":
            return None if self.role.elected is None else (int(self.role.elected),) * 2
        parts = node[1:]
        handler = getattr(self, f"_{name}", None)
        if handler is not None:
            return handler(*parts)
        if name.startswith(("shr", "shl", "sar")) and name[3:].isdigit():
            return self._shift(name[:3], int(name[3:]), parts[0])
        if name.startswith("plop"):
            return self._table(int(name[4:]), parts)
        if name.startswith(("VIMNMX", "IMNMX", "UVIMNMX")):
            return self._minimum(name, parts)
        return None

    def _special(self, name: str) -> Interval | None:
        if name == "SR_TID.X":
            return self.role.first, self.role.last
        if name in ("SR_TID.Y", "SR_TID.Z") and self.one_dimensional:
            return 0, 0
        if name == "SR_LANEID":
            return (self.role.first % 32, self.role.last % 32) if self.role.first // 32 == self.role.last // 32 else (0, 31)
        return None

    def _plus(self, base: int, number: int) -> Interval | None:
        a = self.interval(base)
        if a is None:
            return None
        low, high = a[0] + number, a[1] + number
        if low > WORD:
            return low - WORD - 1, high - WORD - 1
        return (low, high) if high <= WORD else None

    def _sum(self, *parts: int) -> Interval | None:
        low = high = 0
        for part in parts:
            a = self.interval(part)
            if a is None:
                return None
            low, high = low + a[0], high + a[1]
        return (low, high) if high <= WORD else None

    def _mul(self, x: int, y: int) -> Interval | None:
        a, b = self.interval(x), self.interval(y)
        if a is None or b is None or a[1] * b[1] > WORD:
            return None
        return a[0] * b[0], a[1] * b[1]

    def _shift(self, name: str, amount: int, part: int) -> Interval | None:
        a = self.interval(part)
        if a is None or (name == "sar" and a[1] > WORD >> 1):
            return None
        if name == "shl":
            return (a[0] << amount, a[1] << amount) if a[1] << amount <= WORD else None
        return a[0] >> amount, a[1] >> amount

    def _and(self, x: int, y: int) -> Interval | None:
        a, b = self.interval(x), self.interval(y)
        if a is None or b is None:
            small = a or b
            return None if small is None else (0, small[1])
        if a[0] == a[1] and b[0] == b[1]:
            return a[0] & b[0], a[0] & b[0]
        for value, mask in ((a, b), (b, a)):
            if mask[0] == mask[1] and mask[0] & (mask[0] + 1) == 0:
                if value[1] <= mask[0]:
                    return value
                if value[0] & ~mask[0] == value[1] & ~mask[0]:  # no wrap inside the range
                    return value[0] & mask[0], value[1] & mask[0]
        return 0, min(a[1], b[1])

    def _lop(self, lut: int, x: int, y: int, z: int) -> Interval | None:
        parts = [self.interval(part) for part in (x, y, z)]
        if any(part is None or part[0] != part[1] for part in parts):
            return self._and(x, y) if lut & 0x55 == 0x40 and parts[2] == (0, 0) else None

        number = truth_table(lut, *(part[0] for part in parts if part))
        return number, number

    def _shfl(self, part: int) -> Interval | None:
        return self.interval(part)

    def _neg(self, part: int) -> Interval | None:
        a = self.interval(part)
        return None if a is None or a[0] != a[1] else (-a[0] & WORD, -a[0] & WORD)

    def _eq(self, x: int, y: int) -> Interval | None:
        a, b = self.interval(x), self.interval(y)
        if a is None or b is None:
            return None
        if a[1] < b[0] or b[1] < a[0]:
            return 0, 0
        return (1, 1) if a[0] == a[1] == b[0] == b[1] else None

    def _ltu(self, x: int, y: int) -> Interval | None:
        a, b = self.interval(x), self.interval(y)
        if a is None or b is None:
            return None
        if a[1] < b[0]:
            return 1, 1
        return (0, 0) if a[0] >= b[1] else None

    def _lts(self, x: int, y: int) -> Interval | None:
        a, b = self._signed(x), self._signed(y)
        if a is None or b is None:
            return None
        if a[1] < b[0]:
            return 1, 1
        return (0, 0) if a[0] >= b[1] else None

    def _signed(self, part: int) -> Interval | None:
        """The same interval read as signed numbers; None when it straddles the sign."""
        a = self.interval(part)
        if a is None or (a[0] <= WORD >> 1 < a[1]):
            return None
        return a if a[1] <= WORD >> 1 else (a[0] - WORD - 1, a[1] - WORD - 1)

    def _not(self, part: int) -> Interval | None:
        a = self.interval(part)
        return None if a is None or a[0] != a[1] else (1 - a[0], 1 - a[0])

    def _pAND(self, x: int, y: int) -> Interval | None:
        a, b = self.interval(x), self.interval(y)
        if (0, 0) in (a, b):
            return 0, 0
        return (1, 1) if a == b == (1, 1) else None

    def _pOR(self, x: int, y: int) -> Interval | None:
        a, b = self.interval(x), self.interval(y)
        if (1, 1) in (a, b):
            return 1, 1
        return (0, 0) if a == b == (0, 0) else None

    def _sel(self, p: int, x: int, y: int) -> Interval | None:
        truth = self.decide(p)
        a, b = self.interval(x), self.interval(y)
        if truth is not None:
            return a if truth else b
        return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))

    def _table(self, lut: int, parts: tuple[int, ...]) -> Interval | None:
        known = [self.decide(part) for part in parts]
        outcomes = set()
        for number in range(8):
            bits = (number >> 2 & 1, number >> 1 & 1, number & 1)
            if all(truth is None or truth == bool(bit) for truth, bit in zip(known, bits, strict=False)):
                outcomes.add(lut >> number & 1)
        return (next(iter(outcomes)),) * 2 if len(outcomes) == 1 else None

    def _minimum(self, name: str, parts: tuple[int, ...]) -> Interval | None:
        """Clamp of a switch value: min when the predicate is PT, max when it is !PT (spelled by a tilde in the name)."""
        a, b = self.interval(parts[0]), self.interval(parts[1])
        if a is None or b is None or a[1] > WORD >> 1 or b[1] > WORD >> 1:
            return None
        return (max(a[0], b[0]), max(a[1], b[1])) if "~" in name else (min(a[0], b[0]), min(a[1], b[1]))


LEAVES = frozenset({"const", "param", "pblock", "driver", "bank", "mbar", "none", "special", "elect"})


def symbols_below(domain: Domain, symbol: int) -> set[int]:
    """A symbol and everything it is made of."""
    seen: set[int] = set()
    stack = [symbol]
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        stack.extend(children(domain, at))
    return seen


def children(domain: Domain, symbol: int) -> list[int]:
    """Symbols that a node is made of directly; numbers it carries (offsets, tables, flags) are not symbols."""
    node = domain.nodes[symbol]
    if node[0] in LEAVES:
        return []
    parts = node[1:]
    if node[0] == "lop":
        parts = node[2:]
    elif node[0] == "plus":
        parts = node[1:2]
    elif node[0] == "wide":
        parts = node[1:4]
    return [part for part in parts if isinstance(part, int) and not isinstance(part, bool)]


def mentions_special(domain: Domain, symbol: int, prefixes: tuple[str, ...]) -> bool:
    """Whether a symbol depends on a special register of one of these names ("elect" stands for elect.sync)."""
    for at in symbols_below(domain, symbol):
        node = domain.nodes[at]
        if (node[0] == "special" and node[1].startswith(prefixes)) or (node[0] == "elect" and "elect" in prefixes):
            return True
    return False


def mentions_thread(domain: Domain, symbol: int) -> bool:
    """Whether a symbol depends on the thread id or on elect.sync."""
    return mentions_special(domain, symbol, ("SR_TID", "SR_LANEID", "SR_WARPID", "elect"))


def parameters_of(domain: Domain, symbol: int) -> frozenset[int] | None:
    """Byte offsets of the parameter words a symbol is made of, or None when anything else takes part."""
    found = set()
    for at in symbols_below(domain, symbol):
        node = domain.nodes[at]
        if node[0] == "param":
            found.add(node[1])
        elif node[0] in LEAVES and node[0] != "const":
            return None
    return frozenset(found)
