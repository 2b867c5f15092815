"""What each SASS opcode is, by its root (the part before the first dot). An opcode in none of these sets is unknown and reported."""

from __future__ import annotations

# Results that cannot be part of an address: floating point, tensor cores, conversions, packed arithmetic.
DATA = frozenset(
    [
        "FADD",
        "FMUL",
        "FFMA",
        "FMNMX",
        "FMNMX3",
        "FSWZADD",
        "FSWZ",
        "FCHK",
        "FSETP_",
        "FRND",
        "MUFU",
        "DADD",
        "DMUL",
        "DFMA",
        "DMNMX",
        "DMMA",
        "HADD2",
        "HMUL2",
        "HFMA2",
        "HMNMX2",
        "HMMA",
        "IMMA",
        "BMMA",
        "QMMA",
        "OMMA",
        "HGMMA",
        "IGMMA",
        "BGMMA",
        "QGMMA",
        "UTCHMMA",
        "UTCIMMA",
        "UTCQMMA",
        "UTCOMMA",
        "UTCMXQMMA",
        "UTCCP",
        "UTCSHIFT",
        "UTCATOMSWS",
        "UTCBAR",
        "UTCPMEM",
        "I2F",
        "I2FP",
        "F2F",
        "F2FP",
        "F2I",
        "F2IP",
        "I2I",
        "I2IP",
        "FADD32I",
        "FMUL32I",
        "FFMA32I",
        "HADD2_32",
        "HMUL2_32I",
        "HFMA2_32I",
        "HADD2_32I",
        "FADD2",
        "FMUL2",
        "FFMA2",
        "FMUL",
        "FSET",
        "DSET",
        "HSET2",
        "IDP",
        "IDP4A",
        "MOVM",
        "LDSM",
        "LDTM",
        "LDT",
        "STTM",
        "LDMATRIX",
        "TEX",
        "TLD",
        "TLD4",
        "TXD",
        "TXQ",
        "TMML",
        "TXA",
        "SULD",
        "FOOTPRINT",
        "AL2P",
        "ALD",
        "IPA",
        "PIXLD",
        "ISBERD",
        "LDTRAM",
        "OUT",
        "R2B",
        "B2R",
        "TMMA",
        "UFADD",
        "UFMUL",
        "UFFMA",
        "UFMNMX",
        "UFRND",
        "UF2F",
        "UF2FP",
        "UI2F",
        "UI2FP",
        "UF2I",
        "UF2IP",
        "UI2I",
        "UI2IP",
        "UMUFU",
        "UFSET",
        "WARPGROUP",
        "FHFMA",
        "FHFMA2",
        "FHADD",
        "FHADD2",
        "UCVT",
        "UFFMA",
        "UFSEL_",
        "HFMA2X",
        "SPMETADATA",
        "GENMETADATA",
        "SPCTX",
        "CREDUX",
        "LDGMC",
        "SCATTER",
        "GATHER",
        "UDADD",
        "UDMUL",
        "UDFMA",
    ]
)
# Integer results that depend on their sources but are no address of theirs.
INTEGER = frozenset(
    [
        "IABS",
        "IMNMX",
        "VIMNMX",
        "VIMNMX3",
        "VIADDMNMX",
        "BMSK",
        "BREV",
        "FLO",
        "POPC",
        "SGXT",
        "VABSDIFF",
        "VABSDIFF4",
        "ICMP",
        "IMUL",
        "IMUL32I",
        "XMAD",
        "PRMT",
        "FLO",
        "UBREV",
        "UFLO",
        "UPOPC",
        "USGXT",
        "UBMSK",
        "UPRMT",
        "UIABS",
        "UVIMNMX",
        "UVIMNMX3",
        "VHMNMX",
        "ISCADD",
        "ISCADD32I",
        "REDUX",
        "UREDUX",
        "MATCH",
        "QSPC",
        "GETLMEMBASE",
        "LEPC",
        "ULEPC",
        "P2R",
        "UP2UR",
        "VOTE",
        "VOTEU",
        "NAMEDBARRIER",
        "GETCRSPTR",
        "B2UR",
        "CS2UR",
        "S2R_",
        "IDE",
        "BFE",
        "BFI",
        "XADD",
        "UCGABAR_GET",
        "CSMTEST",
        "PSETP",
        "SHL",
        "SHR",
        "USHL",
        "USHR",
        "UIMNMX",
        "I2FP_",
        "ICMP",
        "USEL_",
        "VIADD_",
        "IADD2",
    ]
)
# No register result and no effect on order that the audit models.
NO_EFFECT = frozenset(
    [
        "NOP",
        "YIELD",
        "NANOSLEEP",
        "DEPBAR",
        "LDGDEPBAR",
        "ERRBAR",
        "CGAERRBAR",
        "WARPSYNC_",
        "WARPGROUPSET",
        "BPT_",
        "BMOV_",
        "PMTRIG",
        "R2P_",
        "SETCTAID",
        "SETLMEMBASE",
        "VOTE_VTG",
        "USETMAXREG",
        "USETSHMSZ",
        "UTMACMDFLUSH",
        "UTMAREDUCE_",
        "ARRIVES",
        "SETMAXREG",
        "CCTLL",
        "CCTLT",
        "LEPC_",
        "RPCMOV",
        "UNANOSLEEP",
        "UWARPSYNC",
        "UDEPBAR",
        "UTCSYNC",
        "UGETNEXTWORKID",
        "UCLUSTERLAUNCH",
        "ELECTX",
        "BAR_",
        "PREEXIT_",
        "ACQSHMINIT",
        "UTCATOM",
        "NOPX",
        "MEMSET",
        "REGSET",
        "STACKPTR",
        "HINT",
        "PREFETCHC",
        "UVIRTCOUNT",
        "ENDCOLLECTIVE",
        "BREAK",
        "STARTCOLLECTIVE",
        "TTUCCTL",
        "TTUGO",
        "TTUMACROFUSE",
        "TTULD",
        "TTUST",
        "TTUOPEN",
        "TTUCLOSE",
        "WARPGROUP_",
        "UMEMBAR",
        "UCCTL",
        "UREGPRERELEASE",
    ]
)
# Branch-like: ends a block.
BRANCHES = frozenset(
    {"BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU", "EXIT", "CALL", "RET", "KILL", "BSYNC", "ACQBULK", "BAR", "RTT", "UCGABAR_WAIT"}
)
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
