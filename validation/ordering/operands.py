"""Operands of SASS instructions, from nvdisasm's text to something a transfer function can read.

Registers become slots of one list: slots from 0 up are registers of the kernel, in order of appearance; negative slots are constants
that live behind them in the same list, so that reading an operand is one index whatever it is.
"""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass

_SPLIT = re.compile(r",(?![^\[]*\])")
# nvdisasm's JSON leaves out the comma before an address that carries no descriptor: "R2[R3+UR4]", "P0[UR6]", "URZ[UR6]".
_MISSING_COMMA = re.compile(r"(^|,)((?:U?R(?:\d+|Z)|U?P(?:\d|T))(?:\.reuse)?)\[")
_TWO_ADDRESSES = re.compile(r"(^|,)(\[[^\]]*\])\[")  # "[UR8][UR12]"
_REGISTER = re.compile(r"^([-~!|+]*)(U?R(?:\d+|Z)|U?P(?:\d+|T)|B\d+|U?PR|SB\d+)((?:\.\w+)*)\|?((?:\.\w+)*)$")
_CONSTANT = re.compile(r"^([-~!|]*)c\[(0x[0-9a-f]+)\]\s*\[([^\]]*)\]\|?((?:\.\w+)*)$")
_NUMBER = re.compile(r"^[-+~]?(0x[0-9a-f]+|\d+)$")
_FLOAT = re.compile(r"^[-+]?(\d+\.?\d*(e[-+]?\d+)?|INF|QNAN|SNAN)\s*$", re.IGNORECASE)
_ADDRESS = re.compile(r"^(?:(desc|gdesc|tmem|idesc|cx|a)(\[[^\]]*\]))?\[([^\]]*)\]((?:\.\w+)*)$")
_TERM = re.compile(r"([-+]?)\s*(U?R(?:\d+|Z)|0x[0-9a-f]+|\d+)((?:\.\w+)*)")


@dataclass(frozen=True, slots=True)
class Term:
    """One register of an address. `wide`: it names a 64-bit pair."""

    name: str
    wide: bool
    narrow: bool  # .U32: zero-extended


@dataclass(frozen=True, slots=True)
class Operand:
    """kind: reg | pred | number | const | addr | special | other.

    `name` is the register ("R4", "UP1"), `negative`/`inverted` its sign and complement (or logical not for predicates);
    `number` the immediate or the constant-bank offset; `bank` the constant bank; `terms` the registers of an address.
    """

    kind: str
    name: str = ""
    negative: bool = False
    inverted: bool = False
    number: int = 0
    bank: int = -1
    terms: tuple[Term, ...] = ()
    space: str = ""  # desc, gdesc, tmem ... in front of an address
    suffix: str = ""


def _terms(text: str) -> tuple[tuple[Term, ...], int]:
    terms, number = [], 0
    for sign, word, suffix in _TERM.findall(text):
        if word[0] in "UR":
            terms.append(Term(word, ".64" in suffix, ".U32" in suffix))
        else:
            number += integer(word) * (-1 if sign == "-" else 1)
    return tuple(terms), number


def integer(text: str) -> int:
    """A number as nvdisasm prints it: hexadecimal with 0x, else decimal; "~" in front is left to the caller."""
    digits = text.lstrip("-+~")
    value = int(digits, 16) if digits[:2].lower() == "0x" else int(digits, 10)
    return -value if text.lstrip("~").startswith("-") else value


def float_bits(text: str) -> int:
    """Bits of a float32 immediate as nvdisasm prints it; 0 when it cannot be read."""
    words = text.strip().upper().replace("QNAN", "NAN").replace("SNAN", "NAN")
    try:
        return int(struct.unpack("<I", struct.pack("<f", float(words)))[0])
    except (ValueError, OverflowError):
        return 0


def half_bits(text: str) -> int:
    try:
        return int(struct.unpack("<H", struct.pack("<e", float(text.strip())))[0])
    except (ValueError, OverflowError):
        return 0


@functools.lru_cache(maxsize=65536)
def parse_operand(text: str) -> Operand:
    text = text.strip()
    if match := _REGISTER.match(text):
        signs, name, suffix, more = match.groups()
        kind = "pred" if name.lstrip("U").startswith("P") else "reg"
        return Operand(kind, name, "-" in signs, "!" in signs or "~" in signs, suffix=(suffix + more).replace(".reuse", ""))
    if match := _CONSTANT.match(text):
        terms, number = _terms(match.group(3))
        signs = match.group(1)
        return Operand("const", "", "-" in signs, "~" in signs or "!" in signs, number, int(match.group(2), 16), terms)
    if _NUMBER.match(text):
        return Operand("number", number=integer(text))
    if match := _ADDRESS.match(text):
        terms, number = _terms(match.group(3))
        return Operand("addr", number=number, terms=terms, space=match.group(1) or "")
    if text.startswith("SR"):
        return Operand("special", text)
    if _FLOAT.match(text):
        return Operand("number", number=float_bits(text), suffix="float", name=text)
    return Operand("other", text)


@functools.lru_cache(maxsize=65536)
def parse_operands(text: str) -> tuple[Operand, ...]:
    """All operands of one instruction, in order."""
    if not text:
        return ()
    text = _TWO_ADDRESSES.sub(r"\1\2,[", _MISSING_COMMA.sub(r"\1\2,[", text))
    return tuple(parse_operand(part) for part in _SPLIT.split(text))


def register_step(name: str, step: int) -> str:
    """The register `step` after `name`; RZ and URZ stay themselves."""
    if name.endswith(("Z", "T")):
        return name
    prefix = name.rstrip("0123456789")
    return f"{prefix}{int(name[len(prefix) :]) + step}"
