"""The control-flow graph of one kernel: basic blocks, their static successors, loops, and the order in which to visit them."""

from __future__ import annotations

from dataclasses import dataclass, field

from validation.ordering import opcodes
from validation.ordering.model import INSTRUCTION_BYTES, KernelBinary
from validation.ordering.operands import parse_operands


@dataclass(slots=True)
class Block:
    """Instructions first..last (indices, inclusive). `kind` is the root opcode that ends it, "" for plain fall-through."""

    index: int
    first: int
    last: int
    kind: str = ""
    successors: list[int] = field(default_factory=list)  # every block that may follow, for loops and order only
    loops: frozenset[int] = frozenset()  # headers of the loops it lies in


@dataclass(slots=True)
class Graph:
    blocks: list[Block]
    block_at: dict[int, int]  # pc of a first instruction -> block index
    order: list[int]  # rank of each block in reverse postorder
    loops: dict[int, frozenset[int]]  # header -> blocks
    back_edges: set[tuple[int, int]]
    notes: list[str]

    def block_of_pc(self, pc: int) -> int:
        """Block that contains an instruction."""
        return self._owner[pc // INSTRUCTION_BYTES]

    _owner: list[int] = field(default_factory=list)


def target_of(operands: str) -> int | None:
    """Branch target in the operand text: its last plain number."""
    for operand in reversed(parse_operands(operands)):
        if operand.kind == "number":
            return operand.number
    return None


def splits_after(root: str, modifiers: tuple[str, ...]) -> bool:
    """Whether a block ends behind this instruction."""
    if root == "BAR":
        return "SYNC" in modifiers or "RED" in modifiers
    if root == "BPT":
        return "TRAP" in modifiers
    return root in opcodes.BRANCHES or (root in ("WARPSYNC",) and "COLLECTIVE" in modifiers)


def build_graph(kernel: KernelBinary) -> Graph:
    """Blocks and edges. Targets outside the section or off an instruction boundary become notes, never errors."""
    instructions = kernel.instructions
    count = len(instructions)
    leaders = {0}
    notes: list[str] = []
    targets: dict[int, list[int]] = {}
    for index, instruction in enumerate(instructions):
        root, modifiers = opcodes.root_of(instruction.opcode)
        if not (splits_after(root, modifiers) or root == "BSSY"):
            continue
        if root != "BSSY":
            leaders.add(index + 1)
        found = _targets(kernel, index, root, notes)
        targets[index] = found
        leaders.update(found)
    starts = sorted(leader for leader in leaders if 0 <= leader < count)
    blocks = []
    for number, first in enumerate(starts):
        last = (starts[number + 1] if number + 1 < len(starts) else count) - 1
        root, modifiers = opcodes.root_of(instructions[last].opcode)
        blocks.append(Block(number, first, last, root if splits_after(root, modifiers) else ""))
    block_at = {instructions[block.first].pc: block.index for block in blocks}
    by_first = {block.first: block.index for block in blocks}
    barriers = _barrier_targets(kernel, targets)
    for block in blocks:
        _connect(block, kernel, targets.get(block.last, []), barriers, by_first, count)
    graph = Graph(blocks, block_at, _reverse_postorder(blocks), {}, set(), notes)
    graph._owner = [block.index for block in blocks for _ in range(block.first, block.last + 1)]
    _find_loops(graph)
    return graph


def _targets(kernel: KernelBinary, index: int, root: str, notes: list[str]) -> list[int]:
    instruction = kernel.instructions[index]
    if root in ("BRX", "BRXU", "JMX"):
        found = list(kernel.branch_targets.get(instruction.pc, ()))
        if not found:
            notes.append(f"indirect branch without known targets at {instruction.pc:#x}")
    elif root in ("BRA", "JMP", "CALL", "BSSY", "WARPSYNC"):
        target = target_of(instruction.operands)
        found = [] if target is None else [target]
    else:
        found = []
    inside = []
    for target in found:
        if target % INSTRUCTION_BYTES == 0 and 0 <= target < len(kernel.instructions) * INSTRUCTION_BYTES:
            inside.append(target // INSTRUCTION_BYTES)
        elif root != "CALL":
            notes.append(f"branch target {target:#x} outside the code at {instruction.pc:#x}")
    return inside


def _barrier_targets(kernel: KernelBinary, targets: dict[int, list[int]]) -> dict[str, list[int]]:
    """Convergence barrier register -> every place where its threads may meet."""
    found: dict[str, list[int]] = {}
    for index, where in targets.items():
        instruction = kernel.instructions[index]
        if instruction.opcode.startswith("BSSY"):
            found.setdefault(instruction.operands.partition(",")[0].strip(), []).extend(where)
    return found


def convergence_register(operands: str) -> str:
    return operands.partition(",")[0].strip()


def _connect(
    block: Block, kernel: KernelBinary, targets: list[int], barriers: dict[str, list[int]], by_first: dict[int, int], count: int
) -> None:
    instruction = kernel.instructions[block.last]
    after = by_first.get(block.last + 1)
    following = [after] if after is not None else []
    jumps = [by_first[target] for target in targets if target in by_first]
    conditional = bool(instruction.pred) or _has_condition(instruction.operands)
    if block.kind in ("EXIT", "KILL", "RET", "RTT", "BPT"):
        block.successors = following if conditional else []
    elif block.kind in ("BRX", "BRXU", "JMX", "JMXU"):
        block.successors = jumps
    elif block.kind in ("BRA", "JMP"):
        block.successors = [*jumps, *(following if conditional or is_divergence_test(instruction.opcode) else [])]
    elif block.kind == "BSYNC":
        meeting = [by_first[t] for t in barriers.get(convergence_register(instruction.operands), []) if t in by_first]
        block.successors = following if after in meeting or not meeting else [*meeting, *(following if conditional else [])]
    else:
        block.successors = [*following, *jumps]


def is_divergence_test(opcode: str) -> bool:
    """BRA.DIV and BRA.CONV branch on whether the warp is converged; both ways are possible."""
    return ".DIV" in opcode or ".CONV" in opcode


def _has_condition(operands: str) -> bool:
    return bool(operands) and parse_operands(operands)[0].kind == "pred"


def _reverse_postorder(blocks: list[Block]) -> list[int]:
    """Rank of each block; unreachable ones come last in address order."""
    rank = [-1] * len(blocks)
    seen = [False] * len(blocks)
    finished: list[int] = []
    for root in range(len(blocks)):
        if seen[root]:
            continue
        part: list[int] = []
        stack = [(root, iter(blocks[root].successors))]
        seen[root] = True
        while stack:
            node, rest = stack[-1]
            following = next((n for n in rest if not seen[n]), None)
            if following is None:
                part.append(node)
                stack.pop()
            else:
                seen[following] = True
                stack.append((following, iter(blocks[following].successors)))
        finished.extend(reversed(part))
    for position, node in enumerate(finished):
        rank[node] = position
    return rank


def _find_loops(graph: Graph) -> None:
    """Natural loops from edges that go backwards in reverse postorder; loops that share a header are one."""
    predecessors: list[list[int]] = [[] for _ in graph.blocks]
    for block in graph.blocks:
        for successor in block.successors:
            predecessors[successor].append(block.index)
    bodies: dict[int, set[int]] = {}
    for block in graph.blocks:
        for header in block.successors:
            if graph.order[header] > graph.order[block.index]:
                continue
            graph.back_edges.add((block.index, header))
            body = bodies.setdefault(header, {header})
            stack = [block.index]
            while stack:
                node = stack.pop()
                # The rank test keeps an irreducible entry from swallowing everything before the header.
                if node not in body and graph.order[node] >= graph.order[header]:
                    body.add(node)
                    stack.extend(predecessors[node])
    graph.loops = {header: frozenset(body) for header, body in bodies.items()}
    inside: dict[int, set[int]] = {}
    for header, blocks in graph.loops.items():
        for member in blocks:
            inside.setdefault(member, set()).add(header)
    for block in graph.blocks:
        block.loops = frozenset(inside.get(block.index, ()))
