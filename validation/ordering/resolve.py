"""From address registers to kernel parameters.

A parameter is a base of an address when its low word is an addend of the low half and its high word one of the high half. Pointers that
were loaded from memory lead to the parameter whose memory they came from (`via_table`); what leads nowhere is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from validation.ordering.machine import DIRTY_GLOBAL_SHIFT, AccessSite, Compiler, State
from validation.ordering.model import INSTRUCTION_BYTES, ParamRef

Masks = tuple[int, int]


@dataclass(frozen=True)
class Resolved:
    """`space`: "global", "shared" or "local" (generic addresses may be either), "param" for the parameter block itself."""

    bases: frozenset[ParamRef]
    unknown: bool
    space: str = "global"
    symbols: tuple[str, ...] = ()  # device variables


class Resolver:
    def __init__(self, compiler: Compiler, sites: dict[int, AccessSite]) -> None:
        self.compiler, self.domain, self.sites = compiler, compiler.domain, sites
        self.parameters = sorted(compiler.kernel.parameters, key=lambda p: p.offset)
        self.addresses: dict[int, Masks] = {}  # load pc -> what its address was made of, over all visits
        self.polled: dict[int, frozenset[int]] = {}  # strong load pc -> parameters polled
        self.acquire_bits: dict[frozenset[int], int] = {}
        self.ended_polls: set[int] = set()
        self._invalidates: list[int] | None = None
        self._memo: dict[tuple[int, int, bool], Resolved] = {}
        self._dirty: dict[Masks, int] = {}

    # ------------------------------------------------------------------ during the fixpoint
    def masks(self, state: State, site: AccessSite) -> Masks:
        low = high = 0
        for slot in site.low:
            low |= state[slot].add
        for slot in site.high:
            high |= state[slot].add
        if site.descriptor and site.offset:
            low = self.domain.add_values(self.domain.make(None, 0, low, 0), self.domain.constant(site.offset)).add
        return low, high

    def note_address(self, state: State, site: AccessSite) -> None:
        """Remembers what a load's address is made of; for strong loads also which parameters are polled."""
        low, high = self.masks(state, site)
        old = self.addresses.get(site.pc, (0, 0))
        self.addresses[site.pc] = (old[0] | low, old[1] | high)
        if site.strength != "weak":
            found = {ref.index for ref in self.direct(low, high)}
            self.polled[site.pc] = self.polled.get(site.pc, frozenset()) | found

    def acquire_bit(self, bases: frozenset[int]) -> int:
        found = self.acquire_bits.get(bases)
        if found is None:
            found = self.acquire_bits[bases] = 2 << len(self.acquire_bits)
        return found

    def acquires(self, pc: int, graph) -> bool:
        """A polled load is an acquire when the first-level cache is invalidated soon behind it."""
        if self._invalidates is None:
            self._invalidates = [i.pc for i in self.compiler.kernel.instructions if i.opcode.startswith("CCTL.IVALL")]
        return any(pc < other <= pc + 24 * INSTRUCTION_BYTES for other in self._invalidates)

    def dirty_bits(self, low: int, high: int) -> int:
        """MAY bits of the parameters that a store may write: written for the async proxy, and pending for a release."""
        found = self._dirty.get((low, high))
        if found is None:
            found = 0
            for ref in self.direct(low, high):
                found |= 3 << (DIRTY_GLOBAL_SHIFT + 2 * ref.index)
            self._dirty[low, high] = found
        return found

    # ------------------------------------------------------------------ parameters
    def parameter_at(self, offset: int) -> ParamRef | None:
        """The parameter that holds a byte offset of the parameter block."""
        for parameter in self.parameters:
            if parameter.offset <= offset < parameter.offset + parameter.size:
                return ParamRef(index=parameter.index, offset=offset - parameter.offset)
        return None if self.parameters else ParamRef(index=offset // 8, offset=0)

    def direct(self, low: int, high: int) -> list[ParamRef]:
        found = []
        for source in self.domain.listed(low):
            if source[0] == "param" and source[1] % 8 == 0 and high & self.domain.bit(("param", source[1] + 4)):
                ref = self.parameter_at(source[1])
                if ref is not None:
                    found.append(ref)
        return found

    # ------------------------------------------------------------------ afterwards
    def resolve(self, low: int, high: int, descriptor: bool = False, generic: bool = False, depth: int = 0) -> Resolved:
        key = (low, high, descriptor)
        found = self._memo.get(key)
        if found is None:
            found = self._resolve(low, high, descriptor, depth)
            if depth == 0:
                self._memo[key] = found
        return found

    def _resolve(self, low: int, high: int, descriptor: bool, depth: int) -> Resolved:
        bases: set[ParamRef] = set()
        symbols: list[str] = []
        unknown, space = False, "global"
        windows = [source[0] for source in self.domain.listed(high)]
        if windows and all(kind in ("window", "driver") for kind in windows):
            # The high half alone places a generic address in the shared (also another block's) or local window.
            return Resolved(frozenset(), False, "shared" if "window" in windows else "local")
        for source in self.domain.listed(low):
            kind = source[0]
            if kind == "param" and source[1] % 8 == 0 and high & self.domain.bit(("param", source[1] + 4)):
                ref = self.parameter_at(source[1])
                if ref is None:
                    unknown = True
                else:
                    bases.add(ParamRef(index=ref.index, offset=ref.offset, descriptor=descriptor))
            elif kind == "pblock":
                ref = self._block_parameter(source[1])
                if descriptor and ref is not None:
                    bases.add(ParamRef(index=ref.index, offset=ref.offset, descriptor=True))
                elif descriptor:
                    unknown = True
                else:
                    space = "param"
            elif kind == "pdyn":
                ref = self.parameter_at(source[1])
                if ref is None:
                    unknown = True
                else:
                    bases.add(ParamRef(index=ref.index, offset=0, descriptor=descriptor))
            elif kind == "mem":
                below = self._through_table(source[1], source[2], high, depth)
                if below is not None:
                    bases |= {ParamRef(index=r.index, offset=r.offset, via_table=True, descriptor=descriptor) for r in below.bases}
                    unknown |= below.unknown
                    symbols.extend(f"*{symbol}" for symbol in below.symbols)
            elif kind == "bank":
                symbols.append(self.compiler.kernel.bank_symbols.get(source[2], f"c[{source[1]:#x}][{source[2]:#x}]"))
            elif kind == "symbol":
                symbols.append(source[1])
            elif kind in ("driver", "window"):
                space = "local"
            elif kind in ("shared", "local", "unknown"):
                unknown |= bool(high & self.domain.bit(source)) or not high
        if not bases and not symbols and space == "global":
            unknown = True
        return Resolved(frozenset(bases), unknown, space, tuple(dict.fromkeys(symbols)))

    def _block_parameter(self, offset: int | None) -> ParamRef | None:
        """The parameter at an offset from the parameter block's pointer, which points to the first one."""
        return None if offset is None else self.parameter_at(offset)

    def _through_table(self, pc: int, word: int, high: int, depth: int) -> Resolved | None:
        """Bases of the memory that a loaded pointer came from; None when only half of the address came from there."""
        if not high & self.domain.bit(("mem", pc, word + 1)):
            return None
        if depth > 6 or pc not in self.addresses:
            return Resolved(frozenset(), True)
        low_mask, high_mask = self.addresses[pc]
        site = self.sites.get(pc)
        below = self.resolve(low_mask, high_mask, depth=depth + 1) if site is not None else None
        return below if below is not None else Resolved(frozenset(), True)
