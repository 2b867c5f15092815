"""Lowering of PTX arithmetic, moves and predicates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from validation.ordering.model import PtxInstruction
from validation.ordering.opcodes import words

if TYPE_CHECKING:
    from validation.ordering.ptx_lower import Lowering

WIDE_TYPES = frozenset({"b64", "u64", "s64", "f64"})
FLOAT_TYPES = frozenset(["f16", "f32", "f64", "f16x2", "bf16", "bf16x2", "tf32", "e4m3x2", "e5m2x2", "f32x2"])
LUTS = {"and": 0xC0, "or": 0xFC, "xor": 0x3C}
SPECIALS = {
    "tid": "SR_TID",
    "ctaid": "SR_CTAID",
    "ntid": "SR_NTID",
    "nctaid": "SR_NCTAID",
    "laneid": "SR_LANEID",
    "warpid": "SR_WARPID",
    "cluster_ctarank": "SR_CgaCtaId",
    "cluster_ctaid": "SR_CLUSTER_CTAID",
    "clusterid": "SR_CLUSTERID",
    "lanemask_lt": "SR_LTMASK",
}
OTHER_SPECIALS = words(
    """smid nsmid gridid clock clock64 clock_hi globaltimer globaltimer_lo globaltimer_hi dynamic_smem_size total_smem_size
    is_explicit_cluster cluster_nctaid cluster_nctarank nclusterid lanemask_eq lanemask_le lanemask_gt lanemask_ge nwarpid
    pm0 pm1 envreg0 reserved_smem_offset_begin aggr_smem_size current_graph_exec"""
)
COMPARE = {"lo": "LT", "ls": "LE", "hi": "GT", "hs": "GE", "equ": "EQ", "neu": "NE", "ltu": "LT", "leu": "LE", "gtu": "GT", "geu": "GE"}


def is_wide(parts: list[str]) -> bool:
    return parts[-1] in WIDE_TYPES


def vector(text: str) -> list[str]:
    """Elements of "{a, b}" (or the single operand)."""
    text = text.strip()
    return [part.strip() for part in text[1:-1].split(",")] if text.startswith("{") else [text]


def results(text: str) -> tuple[str, str]:
    """("%r1", "%p1") of a result pair "%r1|%p1"."""
    first, _, second = text.partition("|")
    return first.strip(), second.strip()


def lower_data(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    """A result that can be no address: floating point, packed and matrix arithmetic, anything unknown."""
    if not i.operands:
        return
    first, second = results(i.operands[0])
    for name in vector(first):
        if name.startswith("%p") or (parts[-1] == "pred"):
            low.emit("VOTE.ANY", low.registers.predicate(name))
        elif name.startswith("%") or name in low.registers.known:
            low.emit("FADD.64", low.target(name))
    if second:
        low.emit("VOTE.ANY", low.registers.predicate(second))


def move(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    target, source = i.operands[0], i.operands[1]
    if parts[-1] == "pred":
        low.emit("PLOP3.LUT", low.pred(target), "PT", *_predicate_source(low, source), "PT", "PT", "0x80", "0x0")
        return
    if target.startswith("{") or source.startswith("{"):
        _pack(low, target, source, parts)
        return
    name = source.lstrip("%").split(".")
    if source.startswith("%") and (name[0] in SPECIALS or name[0] in OTHER_SPECIALS):
        letter = f".{name[1].upper()}" if len(name) > 1 else ""
        low.emit("S2R", low.target(target), SPECIALS.get(name[0], f"SR_{name[0].upper()}") + letter)
        low.emit("MOV", low.target(target, 1), "RZ")
        return
    if source in low.offsets:
        low.block_addresses[target] = (low.offsets[source], True)
        low.emit("MOV.64", low.target(target), "c[0x0][0x348]")
        low.emit("IADD3", low.target(target), low.target(target), f"{low.offsets[source]:#x}", "RZ")
        return
    if source in low.block_addresses:
        low.block_addresses[target] = low.block_addresses[source]
    if is_wide(parts) and not source.startswith(("%", "0", "-")) and not source[:1].isdigit() and source not in low.registers.known:
        if source.startswith("__local_depot"):
            low.emit("MOV", low.target(target), "c[0x0][0x28]")
            low.emit("MOV", low.target(target, 1), "RZ")
        else:
            low.load_symbol(low.target(target), low.target(target, 1), source)
        return
    low.emit("MOV", low.target(target), low.value(source))
    if is_wide(parts):
        low.emit("MOV", low.target(target, 1), low.value(source, 1))


def _predicate_source(low: Lowering, text: str) -> list[str]:
    return [("PT" if text.strip() == "1" else "!PT") if text.strip() in ("0", "1", "-1") else low.pred(text)]


def _pack(low: Lowering, target: str, source: str, parts: list[str]) -> None:
    targets, sources = vector(target), vector(source)
    if len(targets) == 1 and len(sources) == 2 and is_wide(parts):
        low.emit("MOV", "R4", low.value(sources[0]))
        low.emit("MOV", low.target(targets[0], 1), low.value(sources[1]))
        low.emit("MOV", low.target(targets[0]), "R4")
    elif len(targets) == 2 and len(sources) == 1 and is_wide(parts):
        low.emit("MOV", "R4", low.value(sources[0], 1))
        low.emit("MOV", low.target(targets[0]), low.value(sources[0]))
        low.emit("MOV", low.target(targets[1]), "R4")
    else:  # halves of words: data
        for name in targets:
            if name != "_":
                low.emit("FADD.64", low.target(name))


def convert(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    kinds = [part for part in parts if (part[:1] in "busf" and part[1:2].isdigit()) or part in FLOAT_TYPES]
    to, source = (kinds[-2], kinds[-1]) if len(kinds) >= 2 else ("b32", "b32")
    if parts[0] == "cvta":
        low.emit("MOV.64", low.target(i.operands[0]), low.value(i.operands[1]))
        if i.operands[1] in low.block_addresses:
            low.block_addresses[i.operands[0]] = low.block_addresses[i.operands[1]]
        if not i.operands[1].startswith("%") and i.operands[1] not in low.registers.known:
            move(low, i, ["mov", "b64"])
        return
    if to in FLOAT_TYPES or source in FLOAT_TYPES:
        lower_data(low, i, [*parts[:-1], to])
    elif to in WIDE_TYPES and source in WIDE_TYPES:
        low.emit("MOV.64", low.target(i.operands[0]), low.value(i.operands[1]))
    elif to in WIDE_TYPES:
        low.emit(
            "IMAD.WIDE" if source.startswith("s") else "IMAD.WIDE.U32", low.target(i.operands[0]), low.value(i.operands[1]), "0x1", "RZ"
        )
    elif to[1:] == "32":
        low.emit("MOV", low.target(i.operands[0]), low.value(i.operands[1]))
    else:
        low.emit("POPC", low.target(i.operands[0]), low.value(i.operands[1]))


def add(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    if parts[-1] in FLOAT_TYPES:
        lower_data(low, i, parts)
        return
    a, b = i.operands[1], i.operands[2]
    if parts[0] == "sub":
        b = f"-{b}" if b.startswith("%") or b in low.registers.known else str(-int(b.rstrip("U"), 0))
    _track_block(low, i.operands[0], a, b)
    if not is_wide(parts):
        low.emit("IADD3", low.target(i.operands[0]), low.value(a), low.value(b), "RZ")
        return
    low.emit("IADD3", "R4", low.value(a), low.value(b), "RZ")
    low.emit("IADD3.X", low.target(i.operands[0], 1), low.value(a, 1), low.value(b, 1), "RZ")
    low.emit("MOV", low.target(i.operands[0]), "R4")


def _track_block(low: Lowering, target: str, a: str, b: str) -> None:
    for base, other in ((a, b), (b, a)):
        if base in low.block_addresses:
            offset, exact = low.block_addresses[base]
            number = other.lstrip("-")
            constant = number[:1].isdigit()
            low.block_addresses[target] = (offset + int(other, 0), exact) if constant else (offset, False)


def multiply(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    if parts[-1] in FLOAT_TYPES:
        lower_data(low, i, parts)
        return
    target, a, b = i.operands[0], low.value(i.operands[1]), low.value(i.operands[2])
    addend = i.operands[3] if len(i.operands) > 3 else None
    if "wide" in parts:
        wide = "IMAD.WIDE" if parts[-1].startswith("s") else "IMAD.WIDE.U32"
        low.emit(wide, low.target(target), a, b, low.value(addend) if addend and addend.startswith("%") else "RZ")
    elif is_wide(parts):
        low.emit("IMAD.HI", "R4", a, b, low.value(addend, 1) if addend else "RZ")
        low.emit("IMAD", low.target(target), a, b, low.value(addend) if addend else "RZ")
        low.emit("MOV", low.target(target, 1), "R4")
    elif "hi" in parts:
        low.emit("POPC", low.target(target), a, b)
    else:
        low.emit("IMAD", low.target(target), a, b, low.value(addend) if addend else "RZ")


def shift(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    target, a, by = i.operands[0], i.operands[1], low.value(i.operands[2])
    left = parts[0] == "shl"
    if not is_wide(parts):
        if left:
            low.emit("SHF.L.U32", low.target(target), low.value(a), by, "RZ")
        else:
            kind = "SHF.R.S32.HI" if parts[-1].startswith("s") else "SHF.R.U32.HI"
            low.emit(kind, low.target(target), "RZ", by, low.value(a))
        return
    low.emit("SHF.R.U64" if not left else "SHF.L.U64.HI", "R4", low.value(a), by, low.value(a, 1))
    if left:
        low.emit("SHF.L.U32", low.target(target), low.value(a), by, "RZ")
        low.emit("MOV", low.target(target, 1), "R4")
    else:
        low.emit("SHF.R.U32.HI", low.target(target, 1), "RZ", by, low.value(a, 1))
        low.emit("MOV", low.target(target), "R4")


def logic(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    lut = LUTS.get(parts[0], 0x0F)
    if parts[-1] == "pred":
        sources = [part for text in i.operands[1:] for part in _predicate_source(low, text)]
        table = f"{LUTS.get(parts[0], 0x0F):#x}"
        sources = [*sources, *["PT"] * (3 - len(sources))]
        low.emit("PLOP3.LUT", low.pred(i.operands[0]), "PT", *sources, table, "0x0")
        return
    second = i.operands[2] if len(i.operands) > 2 else "0"
    halves = (0, 1) if is_wide(parts) else (0,)
    names = ["R4", "R5"]
    for half in halves:
        low.emit("LOP3.LUT", names[half], low.value(i.operands[1], half), low.value(second, half), "RZ", f"{lut:#x}", "!PT")
    for half in halves:
        low.emit("MOV", low.target(i.operands[0], half), names[half])


def lop3(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    target, _ = results(i.operands[0])
    sources = [low.value(text) for text in i.operands[1:4]]
    low.emit("LOP3.LUT", low.target(target), *sources, low.value(i.operands[4]), "!PT")


def select(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    condition = low.pred(i.operands[3])
    halves = (0, 1) if is_wide(parts) else (0,)
    names = ["R4", "R5"]
    for half in halves:
        low.emit("SEL", names[half], low.value(i.operands[1], half), low.value(i.operands[2], half), condition)
    for half in halves:
        low.emit("MOV", low.target(i.operands[0], half), names[half])


def compare(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    first, second = results(i.operands[0])
    how = COMPARE.get(parts[1], parts[1].upper())
    kind = parts[-1]
    combine = next((part.upper() for part in parts[2:-1] if part in ("and", "or", "xor")), "AND")
    last = low.pred(i.operands[3]) if len(i.operands) > 3 else "PT"
    two = [low.pred(first) if first != "_" else "PT", low.pred(second) if second and second != "_" else "PT"]
    if kind in FLOAT_TYPES:
        low.emit(f"FSETP.{how}.{combine}", *two, low.value(i.operands[1]), low.value(i.operands[2]), last)
    elif kind in WIDE_TYPES:
        low.emit(f"ISETP.{how}.U64.{combine}", *two, low.value(i.operands[1]), low.value(i.operands[2]), last)
    else:
        unsigned = ".U32" if kind.startswith("u") or parts[1] in ("lo", "ls", "hi", "hs") else ""
        low.emit(f"ISETP.{how}{unsigned}.{combine}", *two, low.value(i.operands[1]), low.value(i.operands[2]), last)


def shuffle(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    target, second = results(i.operands[0])
    low.emit(f"SHFL.{parts[2].upper()}", "PT", low.target(target), low.value(i.operands[1]), low.value(i.operands[2]), "0x1f")
    if second and second != "_":
        low.emit("VOTE.ANY", low.pred(second))


def elect(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    target, predicate = results(i.operands[0])
    low.emit("ELECT", low.pred(predicate), low.target(target), "PT")


def integer(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    if any(part in FLOAT_TYPES for part in parts[1:]):
        lower_data(low, i, parts)
        return
    target, second = results(i.operands[0])
    sources = [low.value(text) for text in i.operands[1:] if not text.startswith("{")]
    low.emit("POPC" if parts[0] not in ("min", "max") else f"VIMNMX.{parts[-1].upper()}", low.target(target), *sources,
             *(["PT" if parts[0] == "min" else "!PT"] if parts[0] in ("min", "max") else []))  # fmt: skip
    if is_wide(parts):
        low.emit("POPC", low.target(target, 1), *sources)
    if second:
        low.emit("VOTE.ANY", low.pred(second))


def nothing(low: Lowering, i: PtxInstruction, parts: list[str]) -> None:
    """No register result and no effect on order."""


ALU_FORMS = {
    "mov": move,
    "cvta": convert,
    "cvt": convert,
    **dict.fromkeys(("add", "sub", "addc", "subc"), add),
    **dict.fromkeys(("mul", "mad", "madc", "mul24", "mad24"), multiply),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("and", "or", "xor", "not"), logic),
    "lop3": lop3,
    "selp": select,
    "setp": compare,
    "shfl": shuffle,
    "elect": elect,
    **dict.fromkeys(
        words(
            """popc clz bfind brev bfe bfi prmt min max abs neg rem div shf sad fns dp2a dp4a cnot slct bmsk szext mapa getctarank
            isspacep"""
        ),
        integer,
    ),
    **dict.fromkeys(
        words(
            """fma rcp sqrt rsqrt sin cos lg2 ex2 tanh copysign testp set vote activemask match redux mma ldmatrix movmatrix tex tld4
            wmma vadd vsub vmax vmin vset vabsdiff tcgen05_ld createpolicy istypep clusterlaunchcontrol alloca add_ suld"""
        ),
        lower_data,
    ),
    **dict.fromkeys(words("""nanosleep pmevent setmaxnreg brkpt stacksave stackrestore discard applypriority"""), nothing),
}
