"""A kernel compiled once - blocks, operations, accesses - to be analysed many times, once per warp role."""

from __future__ import annotations

from dataclasses import dataclass, field

from validation.ordering import opcodes
from validation.ordering.cfg import Graph, build_graph
from validation.ordering.lift import lift
from validation.ordering.machine import AccessSite, Code, Compiler
from validation.ordering.model import KernelBinary
from validation.ordering.operands import parse_operands
from validation.ordering.resolve import Resolver


@dataclass
class Program:
    """A kernel compiled once, analysed many times (once per role)."""

    kernel: KernelBinary
    compiler: Compiler
    graph: Graph
    codes: list[Code]
    tail: list
    resolver: Resolver
    block_ops: list[list]
    events: list[list[Code]]
    notes: list[str] = field(default_factory=list)


def compile_program(kernel: KernelBinary) -> Program:
    compiler = Compiler(kernel)
    graph = build_graph(kernel)
    sites: dict[int, AccessSite] = {}
    compiler.resolver = Resolver(compiler, sites)
    codes = [lift(compiler, instruction) for instruction in kernel.instructions]
    for instruction in kernel.instructions:  # slots that only terminators use must exist before the list gets its size
        root, _ = opcodes.root_of(instruction.opcode)
        for operand in parse_operands(instruction.operands) if root in ("BRA", "BSYNC", "JMP") else ():
            if operand.kind in ("pred", "reg"):
                compiler.read_register(operand.name)
    sites.update((code.pc, code.site) for code in codes if code.site is not None)
    program = Program(kernel, compiler, graph, codes, [], compiler.resolver, [], [])
    for block in graph.blocks:
        inside = codes[block.first : block.last + 1]
        program.block_ops.append([op for code in inside for op in code.ops])
        program.events.append([code for code in inside if code.event or code.site is not None])
    program.notes.extend(graph.notes)
    program.tail = compiler.tail()
    # Only needed so far; dropping them here leaves no reference cycle, so that everything goes as soon as the kernel is done.
    compiler.lifted.clear()
    compiler.resolver = None
    return program
