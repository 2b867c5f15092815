"""Places for PTX's many virtual registers: those that are never alive together share one, so that the analysis carries few values."""

from __future__ import annotations

import heapq
import re

from validation.ordering.model import PtxKernel
from validation.ordering.opcodes import words

_NAME = re.compile(r"%[A-Za-z_][\w$]*(?:\.s\d+)?|(?<![\w%.$])[A-Za-z_$][\w$]*\.s\d+")
SPECIAL = words("""tid ntid ctaid nctaid laneid warpid smid clock clock64 globaltimer cluster_ctarank cluster_ctaid clusterid""")
FIRST_REGISTER = 16  # R0..R15 are scratch for the lowering; R1 would be taken for the stack pointer


class Registers:
    """Maps register names to slots: pairs for values, single ones for predicates."""

    def __init__(self, ptx: PtxKernel) -> None:
        self.known: set[str] = set()
        self._predicates: dict[str, int] = {}
        intervals = self._intervals(ptx)
        self._places = _allocate(intervals)

    def name(self, register: str, half: int = 0) -> str:
        place = self._places.get(register)
        if place is None:
            place = self._places[register] = len(set(self._places.values())) + 1
        return f"R{FIRST_REGISTER + 2 * place + half}"

    def predicate(self, register: str) -> str:
        if register not in self._predicates:
            place = self._places.get(register)
            self._predicates[register] = place if place is not None else 100000 + len(self._predicates)
        return f"P{self._predicates[register]}"

    def _intervals(self, ptx: PtxKernel) -> dict[str, list[int]]:
        """First and last position of each register, stretched over every loop it lives across or is carried around."""
        intervals: dict[str, list[int]] = {}
        first_is_read: dict[str, bool] = {}
        labels: dict[str, int] = {}
        loops: list[tuple[int, int]] = []
        for position, instruction in enumerate(ptx.instructions):
            if instruction.label:
                labels[instruction.label] = position
                continue
            root = instruction.opcode.partition(".")[0]
            for operand in instruction.operands if root in ("bra", "brx") else ():
                if operand in labels:
                    loops.append((labels[operand], position))
            text = [instruction.pred, *instruction.operands]
            for order, part in enumerate(text):
                for name in _NAME.findall(part):
                    if not name.startswith("%"):
                        self.known.add(name)
                    if name not in intervals:
                        intervals[name] = [position, position]
                        first_is_read[name] = order != 1 or root in ("st", "red", "setp_", "bra")
                    intervals[name][1] = position
        loops.sort(key=lambda loop: loop[1] - loop[0])
        for _ in range(2):
            for start, end in loops:
                for name, interval in intervals.items():
                    if interval[1] < start or interval[0] > end:
                        continue
                    if interval[0] < start:
                        interval[1] = max(interval[1], end)
                    elif first_is_read[name] or interval[1] > end:
                        interval[0], interval[1] = min(interval[0], start), max(interval[1], end)
        return intervals


def _allocate(intervals: dict[str, list[int]]) -> dict[str, int]:
    """Linear scan: a place is reused once its register is dead."""
    places: dict[str, int] = {}
    free: list[int] = []
    active: list[tuple[int, int]] = []  # (end, place)
    count = 0
    for name, (start, end) in sorted(intervals.items(), key=lambda item: item[1][0]):
        while active and active[0][0] < start:
            heapq.heappush(free, heapq.heappop(active)[1])
        if free:
            place = heapq.heappop(free)
        else:
            place, count = count, count + 1
        places[name] = place
        heapq.heappush(active, (end, place))
    return places
