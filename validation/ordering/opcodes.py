"""What each SASS opcode is, by its root (the part before the first dot). An opcode in none of these sets is unknown and reported."""

from __future__ import annotations

import functools


def words(text: str) -> frozenset[str]:
    """A set of words, spelled as one text."""
    return frozenset(text.split())


# Results that cannot be part of an address: floating point, tensor cores, conversions, packed arithmetic.
DATA = words(
    """FADD FMUL FFMA FMNMX FMNMX3 FSWZADD FCHK FRND MUFU DADD DMUL DFMA DMNMX DMMA HADD2 HMUL2 HFMA2 HMNMX2 HMMA IMMA BMMA
    QMMA OMMA HGMMA IGMMA BGMMA QGMMA UTCHMMA UTCIMMA UTCQMMA UTCOMMA UTCMXQMMA UTCCP UTCSHIFT UTCATOMSWS UTCBAR I2F I2FP
    F2F F2FP F2I F2IP I2I I2IP FADD32I FMUL32I FFMA32I HADD2_32 HMUL2_32I HFMA2_32I HADD2_32I FADD2 FMUL2 FFMA2 FSET DSET
    HSET2 IDP IDP4A MOVM LDSM LDTM LDT STTM TEX TLD TLD4 TXD TXQ TMML TXA SULD FOOTPRINT AL2P ALD IPA PIXLD ISBERD OUT R2B
    B2R UFADD UFMUL UFFMA UFMNMX UFRND UF2F UF2FP UI2F UI2FP UF2I UF2IP UI2I UI2IP UFSET WARPGROUP FHFMA FHADD UCVT
    SPMETADATA GENMETADATA SPCTX CREDUX LDGMC"""
)
# Integer results that depend on their sources but are no address of theirs.
INTEGER = words(
    """IABS IMNMX VIMNMX VIMNMX3 VIADDMNMX BMSK BREV FLO POPC SGXT VABSDIFF VABSDIFF4 ICMP IMUL IMUL32I XMAD PRMT UBREV UFLO
    UPOPC USGXT UBMSK UPRMT UIABS UVIMNMX UVIMNMX3 VHMNMX ISCADD ISCADD32I REDUX UREDUX MATCH QSPC GETLMEMBASE LEPC ULEPC
    P2R UP2UR VOTE VOTEU B2UR CS2UR IDE BFE BFI PSETP SHL SHR USHL USHR UIMNMX"""
)
# No register result and no effect on order that the audit models.
NO_EFFECT = words(
    """NOP YIELD NANOSLEEP DEPBAR LDGDEPBAR ERRBAR CGAERRBAR WARPGROUPSET PMTRIG SETCTAID SETLMEMBASE USETMAXREG USETSHMSZ
    UTMACMDFLUSH ARRIVES CCTLL CCTLT RPCMOV UTCSYNC UGETNEXTWORKID ENDCOLLECTIVE BREAK STARTCOLLECTIVE"""
)
# Branch-like: ends a block.
BRANCHES = words("BRA BRX BRXU JMP JMX JMXU EXIT CALL RET KILL BSYNC ACQBULK BAR RTT UCGABAR_WAIT")
GLOBAL_LOADS = frozenset({"LDG", "LD", "LDGMC"})
GLOBAL_STORES = frozenset({"STG", "ST"})
ATOMICS = frozenset({"ATOMG", "ATOM", "REDG", "RED", "REDGMC", "ATOMGMC"})
SHARED_LOADS = frozenset({"LDS", "ATOMS", "LDSU", "ULDS", "ATOMSM"})
PREFETCHES = frozenset({"UBLKPF", "UTMAPF", "CCTL", "UTMACCTL", "PREFETCH"})
# Asynchronous copies: opcode -> index of the operand that names global memory, by direction found in the modifiers.
TMA_LOADS = frozenset({"UTMALDG", "UTMALDTM"})
TMA_STORES = frozenset({"UTMASTG", "UTMAREDG", "UTMASCT", "UTMAREDUCE"})
BULK = frozenset({"UBLKCP", "UBLKRED"})
# Orders without reading: kept as points of the timeline.
FENCES = frozenset({"MEMBAR", "FENCE", "UFENCE"})
# Special registers that stay the same while a thread runs.
STABLE_SPECIAL = (
    "SR_TID", "SR_CTAID", "SR_NTID", "SR_NCTAID", "SR_LANEID", "SR_CgaCtaId", "SR_CgaSize", "SR_CLUSTER", "SR_GRID", "SR_WARPID",
    "SR_VIRTID", "SR_SW", "SR_LTMASK", "SR_LEMASK", "SR_GTMASK", "SR_GEMASK", "SR_EQMASK", "SR_CTAId", "SR_SMEMSZ", "SR_VIRTCFG",
)  # fmt: skip
COMPARISONS = frozenset({"LT", "EQ", "LE", "GT", "NE", "GE", "T", "F"})


@functools.lru_cache(maxsize=8192)
def root_of(opcode: str) -> tuple[str, tuple[str, ...]]:
    """("LDG", ("E", "CONSTANT")) for "LDG.E.CONSTANT"."""
    head, *modifiers = opcode.split(".")
    return head, tuple(modifiers)


def strength_of(modifiers: tuple[str, ...]) -> str:
    """Memory strength in SASS words; whether a strong load is an acquire is decided by the CCTL.IVALL behind it."""
    if "MMIO" in modifiers:
        return "mmio"
    if "STRONG" in modifiers:
        at = modifiers.index("STRONG")
        return "strong." + (modifiers[at + 1].lower() if at + 1 < len(modifiers) else "gpu")
    return "weak"


def register_count(modifiers: tuple[str, ...]) -> int:
    """32-bit registers that one destination operand covers."""
    for modifier in modifiers:
        if modifier in ("64", "F64", "S64", "U64", "B64"):
            return 2
        if modifier in ("96",):
            return 3
        if modifier in ("128", "256"):  # 256 bits come as two destination operands
            return 4
    return 1
