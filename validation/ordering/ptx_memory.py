"""Lowering of PTX memory operations, asynchronous copies, fences and mbarriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from validation.ordering.model import PtxInstruction
from validation.ordering.ptx_alu import WIDE_TYPES, lower_data, results, vector

if TYPE_CHECKING:
    from validation.ordering.ptx_lower import Lowering

SPACES = ("global", "shared", "local", "const", "param")


def space_of(parts: list[str]) -> str:
    for part in parts:
        head = part.partition("::")[0]
        if head in SPACES:
            return head
    return "generic"


def strength_of(parts: list[str]) -> str:
    """SASS words for the strength: "", ".STRONG.GPU", ".STRONG.SYS", ".MMIO.SYS"."""
    if "mmio" in parts:
        return ".MMIO.SYS"
    if "volatile" in parts:
        return ".STRONG.SYS"
    if any(part in ("relaxed", "acquire", "release", "acq_rel") for part in parts):
        scope = next((part for part in parts if part in ("cta", "cluster", "gpu", "sys")), "gpu")
        return f".STRONG.{'SM' if scope in ('cta', 'cluster') else scope.upper()}"
    return ""


def load(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    space = space_of(parts)
    targets = vector(i.operands[0])
    wide = ".64" if parts[-1] in WIDE_TYPES else (".128" if parts[-1] == "b128" else "")
    if space == "param":
        _load_parameter(low, i, targets, wide)
    elif space == "const":
        for target in targets:
            low.emit("FADD.64", low.target(target))
    elif space == "shared":
        step = 8 if wide else 4
        base, offset, kind = low.address(i.operands[1])
        for index, target in enumerate(targets):
            text = f"[{base}+{offset + step * index}]" if kind != "none" else i.operands[1]
            low.emit(f"LDS{wide}", low.target(target), low.shared_address(text))
    elif space == "local":
        for target in targets:
            low.emit(f"LDL{wide}", low.target(target), low.shared_address(i.operands[1]))
    else:
        constant = ".CONSTANT" if "nc" in parts or parts[0] == "ldu" else ""
        root = {"global": "LDG", "generic": "LD"}[space]
        if parts[0] == "multimem":
            root = "LDGMC"
        low.emit(f"{root}.E{wide}{strength_of(parts)}{constant}", *[low.target(t) for t in targets], _described(low, i.operands[1]))
        if "acquire" in parts:
            low.emit("CCTL.IVALL")


def _described(low: Lowering, text: str) -> str:
    return "desc[UR0]" + low.global_address(text)


def _load_parameter(low: Lowering, i: PtxInstruction, targets: list[str], wide: str) -> None:
    from validation.ordering.ptx_lower import PARAM_BASE

    base, offset, kind = low.address(i.operands[1])
    step = 8 if wide else 4
    if kind == "symbol" and base in low.offsets:
        for index, target in enumerate(targets):
            low.emit(f"MOV{wide}", low.target(target), f"c[0x0][{PARAM_BASE + low.offsets[base] + offset + step * index:#x}]")
    elif base in low.block_addresses:
        start, exact = low.block_addresses[base]
        index_text = "" if exact else f"{low.registers.name(base)}+"
        for index, target in enumerate(targets):
            low.emit(f"MOV{wide}", low.target(target), f"c[0x0][{index_text}{PARAM_BASE + start + offset + step * index:#x}]")
    elif kind == "reg":  # a place in the parameter block that was computed, e.g. selected
        for index, target in enumerate(targets):
            low.emit(f"MOV{wide}", low.target(target), f"c[0x0][{low.registers.name(base)}+{PARAM_BASE + offset + step * index:#x}]")
    else:  # a call's return value
        for target in targets:
            low.emit("FADD.64", low.target(target))


def store(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    space = space_of(parts)
    values = vector(i.operands[1])
    wide = ".64" if parts[-1] in WIDE_TYPES else ""
    if space == "param":
        return
    if space == "shared" or "async" in parts:
        root = "STAS" if "async" in parts else "STS"
        base, offset, kind = low.address(i.operands[0])
        step = 8 if wide else 4
        for index, value in enumerate(values):
            text = f"[{base}+{offset + step * index}]" if kind != "none" else i.operands[0]
            low.emit(f"{root}{wide}", low.shared_address(text), low.value(value))
    elif space == "local":
        for value in values:
            low.emit(f"STL{wide}", low.shared_address(i.operands[0]), low.value(value))
    else:
        if "release" in parts:
            low.emit("MEMBAR.ALL.GPU")
        root = {"global": "STG", "generic": "ST"}.get(space, "STG")
        low.emit(f"{root}.E{wide}{strength_of(parts)}", _described(low, i.operands[0]), low.value(values[0]))


def atomic(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    space = space_of(parts)
    returning = parts[0] == "atom"
    where = i.operands[1] if returning else i.operands[0]
    if parts[0] == "multimem":
        if "ld_reduce" in parts:
            load(low, i, parts)
            return
        returning, where = False, i.operands[0]
        if "st" in parts:
            store(low, i, parts)
            return
    if space == "shared":
        low.emit("ATOMS", low.target(i.operands[0]) if returning else "RZ", low.shared_address(where))
        return
    if "release" in parts or "acq_rel" in parts:
        low.emit("MEMBAR.ALL.GPU")
    scope = strength_of(parts) or ".STRONG.GPU"
    generic = space == "generic" and parts[0] != "multimem"
    if returning:
        wide = ".64" if parts[-1] in WIDE_TYPES else ""
        low.emit(f"{'ATOM' if generic else 'ATOMG'}.E{wide}{scope}", "PT", low.target(vector(i.operands[0])[0]), _described(low, where))
    else:
        low.emit(f"{'RED' if generic else 'REDG'}.E{scope}", _described(low, where))
    if "acquire" in parts or "acq_rel" in parts:
        low.emit("CCTL.IVALL")


def copy(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    """cp.async*, cp.reduce.async*: direction by the order of the two spaces."""
    if "commit_group" in parts or "wait_group" in parts or "wait_all" in parts:
        low.emit("DEPBAR")
        return
    if "mbarrier" in parts:
        low.emit("SYNCS.ARRIVE.TRANS64", "RZ", low.shared_address(i.operands[0]))
        return
    if "bulk" not in parts:
        low.emit("LDGSTS.E", low.shared_address(i.operands[0]), _described(low, i.operands[1]))
        return
    spaces = [part.partition("::")[0] for part in parts if part.partition("::")[0] in ("global", "shared")]
    if "prefetch" in parts:
        low.emit("UTMAPF" if "tensor" in parts else "UBLKPF.L2", *(["[RZ]"] if "tensor" in parts else []), _pair(low, i.operands[0]))
    elif spaces[0] == "shared" and "global" in spaces:
        low.emit("MOV", "R6", _shared_value(low, i.operands[0]))
        bars = [operand for operand in i.operands[2:] if operand.startswith("[")]
        low.emit("MOV", "R7", _shared_value(low, bars[0]) if bars else "RZ")
        low.emit("UTMALDG" if "tensor" in parts else "UBLKCP.S.G", "[R6]", _pair(low, i.operands[1]))
    elif spaces[0] == "global":
        reduce = parts[1] == "reduce"
        if "tensor" in parts:
            low.emit("UTMAREDG" if reduce else "UTMASTG", "[RZ]", _pair(low, i.operands[0]))
        else:
            low.emit("UBLKRED.G.S" if reduce else "UBLKCP.G.S", _pair(low, i.operands[0]), "[RZ]")


def _pair(low: Lowering, text: str) -> str:
    """ "[%rd1, {..}]" as an address whose register names a pair."""
    return low.global_address(text)


def _shared_value(low: Lowering, text: str) -> str:
    base, offset, kind = low.address(text)
    if kind == "reg" and offset:
        low.emit("IADD3", "R5", low.registers.name(base), f"{offset & 0xFFFFFFFF:#x}", "RZ")
        return "R5"
    if kind == "reg":
        return low.registers.name(base)
    return f"{int(low.value(base), 16) + offset:#x}" if base and not base[:1].isdigit() else f"{offset:#x}"


def prefetch(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    if "tensormap" in parts:
        low.emit("UTMACCTL.PF", _pair(low, i.operands[0]))
    elif space_of(parts) in ("global", "generic"):
        low.emit("CCTL.E.PF2", _pair(low, i.operands[0]))


def fence(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    if "proxy" in parts:
        if any(part.startswith("async") for part in parts):
            low.emit("FENCE.VIEW.ASYNC")
        return
    if "mbarrier_init" in parts:
        return
    scope = next((part for part in parts if part in ("cta", "cluster", "gpu", "sys", "gl")), "gpu")
    low.emit(f"MEMBAR.ALL.{'CTA' if scope in ('cta', 'cluster') else 'GPU'}")
    if scope not in ("cta", "cluster"):
        low.emit("CCTL.IVALL")


def mbarrier(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    if parts[1] in ("try_wait", "test_wait"):
        phase = low.value(i.operands[2]) if len(i.operands) > 2 else "RZ"
        low.emit("SYNCS.PHASECHK.TRANS64.TRYWAIT", low.pred(i.operands[0]), low.shared_address(i.operands[1]), phase)
    elif parts[1].startswith(("arrive", "complete_tx")):
        where = next(operand for operand in i.operands if operand.startswith("["))
        if not i.operands[0].startswith("["):
            target, _ = results(i.operands[0])
            if target != "_":
                low.emit("FADD.64", low.target(target))
        low.emit("SYNCS.ARRIVE.TRANS64", "RZ", low.shared_address(where))
    elif parts[1] == "init":
        low.emit("SYNCS.EXCH.64", "RZ", low.shared_address(i.operands[0]), "RZ")


def tensor(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    """wgmma and tcgen05: what reads shared memory through the async proxy, and commits that arrive at an mbarrier."""
    if "mma_async" in parts or "mma" in parts:
        if not i.operands[0].startswith("["):
            lower_data(low, i, ["wgmma", "f32"])
        low.emit("HGMMA", "RZ", "gdesc[UR0]")
    elif "commit" in parts and i.operands:
        where = next((operand for operand in i.operands if operand.startswith("[")), "")
        if where:
            low.emit("SYNCS.ARRIVE.TRANS64", "RZ", low.shared_address(where))
    elif "ld" in parts:
        lower_data(low, i, parts)


MEMORY_FORMS = {
    **dict.fromkeys(("ld", "ldu"), load),
    "st": store,
    **dict.fromkeys(("atom", "red", "multimem"), atomic),
    "cp": copy,
    **dict.fromkeys(("prefetch", "prefetchu"), prefetch),
    **dict.fromkeys(("fence", "membar"), fence),
    "mbarrier": mbarrier,
    **dict.fromkeys(("wgmma", "tcgen05"), tensor),
    "tensormap": lambda low, i, parts: None,
    "stmatrix": lambda low, i, parts: low.emit("STSM", low.shared_address(i.operands[0]), low.value(vector(i.operands[1])[0])),
}
