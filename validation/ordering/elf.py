"""A reader for cubin files: the ELF container and NVIDIA's `.nv.info` attributes, with every offset checked.

Attribute numbers and layouts are the ones that `nvdisasm` prints for the same sections (EIATTR_* names below); nothing else is
documented. A malformed file raises `BinaryError`, never anything else.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass, field

from validation.ordering.model import Parameter

MAX_FILE_BYTES = 1 << 30
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELA = struct.Struct("<QQq")
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
EM_CUDA = 190
SHT_NOBITS = 8
STO_CUDA_ENTRY = 0x10

EIATTR_MAX_THREADS = 0x05
EIATTR_PARAM_CBANK = 0x0A
EIATTR_REQNTID = 0x10
EIATTR_FRAME_SIZE = 0x11
EIATTR_KPARAM_INFO = 0x17
EIATTR_REGCOUNT = 0x2F
EIATTR_INDIRECT_BRANCH_TARGETS = 0x34
EIATTR_KPARAM_INFO_V2 = 0x45
# First parameter in c[0x0] when a stripped file has no PARAM_CBANK, by first major architecture number that uses it.
DEFAULT_PARAM_BASE = ((100, 0x380), (90, 0x210), (70, 0x160))


class BinaryError(ValueError):
    """The file cannot be read as what it claims to be; the message says what and where."""


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True)
class Symbol:
    name: str
    section: int
    value: int
    size: int
    kind: int
    other: int


@dataclass
class KernelSection:
    """One `.text.<name>` section and what `.nv.info` says about it."""

    name: str
    code: bytes
    is_entry: bool = True
    parameters: tuple[Parameter, ...] = ()
    param_base: int = 0
    registers: int = 0
    frame_bytes: int = 0
    shared_bytes: int = 0
    block: tuple[int, int, int] | None = None  # required block dimensions
    max_threads: int | None = None
    branch_targets: dict[int, tuple[int, ...]] = field(default_factory=dict)
    banks: dict[int, bytes] = field(default_factory=dict)
    relocations: dict[int, str] = field(default_factory=dict)  # pc -> symbol patched into the instruction
    functions: dict[int, str] = field(default_factory=dict)  # pc -> symbol of a function in this section
    bank_symbols: dict[int, str] = field(default_factory=dict)  # byte offset in constant bank 4 -> symbol
    notes: list[str] = field(default_factory=list)


@dataclass
class Cubin:
    arch: str
    digest: str
    kernels: list[KernelSection]
    sections: list[Section]
    data: bytes
    symbols: list[Symbol]


def is_elf(data: bytes) -> bool:
    return data[:4] == b"\x7fELF"


def is_cubin(data: bytes) -> bool:
    return is_elf(data) and len(data) >= _HEADER.size and struct.unpack_from("<H", data, 18)[0] == EM_CUDA


def _string(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    if offset < 0 or offset >= len(table) or end < 0:
        raise BinaryError(f"ELF string table: got offset {offset}, needs less than {len(table)}; the file is damaged")
    return table[offset:end].decode("utf-8", "replace")


def _slice(data: bytes, offset: int, size: int, what: str) -> bytes:
    if offset < 0 or size < 0 or offset + size > len(data):
        raise BinaryError(f"{what}: got bytes {offset}..{offset + size}, needs an end within {len(data)}; the file is truncated")
    return data[offset : offset + size]


def read_sections(data: bytes) -> list[Section]:
    """Section table of a 64-bit little-endian ELF. Raises BinaryError."""
    if not is_elf(data):
        raise BinaryError(f"file header: got {data[:4]!r}, needs an ELF file; is this a cubin?")
    if len(data) < _HEADER.size or data[4:6] != b"\x02\x01":
        raise BinaryError(f"ELF header: got {len(data)} bytes, class {data[4:6]!r}, needs a complete 64-bit little-endian header")
    header = _HEADER.unpack_from(data, 0)
    table_offset, entry_size, count, names_index = header[6], header[11], header[12], header[13]
    if count and entry_size != _SECTION.size:
        raise BinaryError(f"ELF section entry size: got {entry_size}, needs {_SECTION.size}; the file is damaged")
    table = _slice(data, table_offset, count * _SECTION.size, "ELF section table")
    raw = [_SECTION.unpack_from(table, index * _SECTION.size) for index in range(count)]
    if names_index >= count:
        raise BinaryError(f"ELF section name index: got {names_index}, needs less than {count}; the file is damaged")
    names = _slice(data, raw[names_index][4], raw[names_index][5], "ELF section names")
    return [Section(_string(names, s[0]) if s[0] else "", s[1], s[4], s[5], s[6], s[7]) for s in raw]


def _body(data: bytes, section: Section) -> bytes:
    return b"" if section.kind == SHT_NOBITS else _slice(data, section.offset, section.size, f"section {section.name}")


def _read_symbols(data: bytes, sections: list[Section]) -> list[Symbol]:
    table = next((s for s in sections if s.name == ".symtab"), None)
    if table is None:
        return []
    if table.link >= len(sections):
        raise BinaryError(f".symtab link: got {table.link}, needs less than {len(sections)}; the file is damaged")
    names, body = _body(data, sections[table.link]), _body(data, table)
    found = []
    for offset in range(0, len(body) - _SYMBOL.size + 1, _SYMBOL.size):
        name, info, other, index, value, size = _SYMBOL.unpack_from(body, offset)
        found.append(Symbol(_string(names, name) if name else "", index, value, size, info & 15, other))
    return found


def read_attributes(body: bytes) -> list[tuple[int, bytes]]:
    """(attribute, payload) of an `.nv.info` section. Raises BinaryError when an entry overruns the section."""
    found, at = [], 0
    while at + 4 <= len(body):
        form, attribute, size = struct.unpack_from("<BBH", body, at)
        if form == 4:
            found.append((attribute, _slice(body, at + 4, size, ".nv.info attribute")))
            at += 4 + size
        elif form in (1, 2, 3):
            found.append((attribute, body[at + 2 : at + 4]))
            at += 4
        else:
            raise BinaryError(f".nv.info: got entry format {form} at {at}, needs 1..4; the file is damaged")
    return found


def _parameter(attribute: int, payload: bytes) -> Parameter:
    need = 12
    if len(payload) < need:
        raise BinaryError(f"KPARAM_INFO: got {len(payload)} bytes, needs {need}; the file is damaged")
    ordinal, offset = struct.unpack_from("<HH", payload, 4)
    size = struct.unpack_from("<H", payload, 8)[0] if attribute == EIATTR_KPARAM_INFO_V2 else struct.unpack_from("<I", payload, 8)[0] >> 18
    return Parameter(index=ordinal, offset=offset, size=size)


def _branch_targets(payload: bytes) -> dict[int, tuple[int, ...]]:
    targets: dict[int, tuple[int, ...]] = {}
    at = 0
    while at + 12 <= len(payload):
        branch, _, count = struct.unpack_from("<III", payload, at)
        at += 12
        body = _slice(payload, at, 4 * count, "INDIRECT_BRANCH_TARGETS")
        targets[branch] = struct.unpack(f"<{count}I", body)
        at += 4 * count
    return targets


def _apply_attributes(kernel: KernelSection, attributes: list[tuple[int, bytes]]) -> None:
    parameters: dict[int, Parameter] = {}
    for attribute, payload in attributes:
        if attribute in (EIATTR_KPARAM_INFO, EIATTR_KPARAM_INFO_V2):
            parameter = _parameter(attribute, payload)
            parameters[parameter.index] = parameter
        elif attribute == EIATTR_PARAM_CBANK and len(payload) >= 8:
            kernel.param_base = struct.unpack_from("<H", payload, 4)[0]
        elif attribute == EIATTR_REQNTID and len(payload) >= 12:
            x, y, z = struct.unpack_from("<III", payload, 0)
            kernel.block, kernel.max_threads = (x, y, z), x * y * z
        elif attribute == EIATTR_MAX_THREADS and len(payload) >= 12 and kernel.block is None:
            x, y, z = struct.unpack_from("<III", payload, 0)
            kernel.max_threads = x * y * z
        elif attribute == EIATTR_INDIRECT_BRANCH_TARGETS:
            kernel.branch_targets = _branch_targets(payload)
    kernel.parameters = tuple(parameters[index] for index in sorted(parameters))


def _architecture(data: bytes, sections: list[Section]) -> int:
    flags = struct.unpack_from("<I", data, 48)[0]
    number = (flags >> 8) & 0xFF if data[7] == 65 else flags & 0xFF
    if not 50 <= number <= 255:
        raise BinaryError(f"cubin architecture: got flags {flags:#x}, needs a number in 50..255; not a cubin this reader knows")
    return number


def _suffix(data: bytes, sections: list[Section]) -> str:
    """`a` or `f`: the accelerator bit of the ELF flags (LLVM: EF_CUDA_ACCELERATORS), else the options in the toolkit note."""
    if struct.unpack_from("<I", data, 48)[0] & (0x8 if data[7] == 65 else 0x800):
        return "a"
    for section in sections:
        if section.name == ".note.nv.tkinfo":
            match = re.search(rb"sm_\d+([af]?)", _body(data, section))
            return match.group(1).decode() if match else ""
    return ""


def _fill_kernel(kernel: KernelSection, index: int, data: bytes, sections: list[Section], symbols: list[Symbol], arch: int) -> None:
    by_name = {section.name: section for section in sections}
    info = by_name.get(f".nv.info.{kernel.name}")
    if info is not None:
        _apply_attributes(kernel, read_attributes(_body(data, info)))
    elif kernel.is_entry:
        kernel.notes.append("no .nv.info section: parameter layout unknown (stripped file)")
    if not kernel.param_base:
        kernel.param_base = next((base for first, base in DEFAULT_PARAM_BASE if arch >= first), 0x140)
    shared = by_name.get(f".nv.shared.{kernel.name}")
    kernel.shared_bytes = shared.size if shared else 0
    for section in sections:
        match = re.fullmatch(r"\.nv\.constant(\d+)(?:\.(.+))?", section.name)
        if match and match.group(2) in (None, kernel.name) and match.group(1) != "0":
            kernel.banks[int(match.group(1))] = _body(data, section)
    for symbol in symbols:
        if symbol.section == index and symbol.kind == 2 and symbol.value:
            kernel.functions[symbol.value] = symbol.name
    kernel.relocations = {offset & ~15: name for offset, name in _relocations(f".text.{kernel.name}", data, by_name, symbols)}
    for bank in (".nv.constant4", f".nv.constant4.{kernel.name}"):
        kernel.bank_symbols.update(_relocations(bank, data, by_name, symbols))


def _relocations(target: str, data: bytes, by_name: dict[str, Section], symbols: list[Symbol]) -> list[tuple[int, str]]:
    """(offset, symbol name) of everything the linker patches in one section."""
    found = []
    for prefix, entry in ((".rela", _RELA), (".rel", struct.Struct("<QQ"))):
        section = by_name.get(prefix + target)
        body = _body(data, section) if section is not None else b""
        for at in range(0, len(body) - entry.size + 1, entry.size):
            offset, what = entry.unpack_from(body, at)[:2]
            number = what >> 32
            found.append((offset, symbols[number].name if number < len(symbols) else "?"))
    return found


def read_cubin(data: bytes) -> Cubin:
    """Every kernel of a cubin. Raises BinaryError for anything that is not a well-formed one."""
    if len(data) > MAX_FILE_BYTES:
        raise BinaryError(f"cubin size: got {len(data)} bytes, needs at most {MAX_FILE_BYTES}; split the file")
    sections = read_sections(data)
    if not is_cubin(data):
        raise BinaryError(f"ELF machine: got {struct.unpack_from('<H', data, 18)[0]}, needs {EM_CUDA} (CUDA); not a cubin")
    arch = _architecture(data, sections)
    symbols = _read_symbols(data, sections)
    entries = {symbol.section for symbol in symbols if symbol.kind == 2 and symbol.other & STO_CUDA_ENTRY}
    kernels = []
    for index, section in enumerate(sections):
        if not section.name.startswith(".text.") or section.kind == SHT_NOBITS:
            continue
        kernel = KernelSection(section.name[len(".text.") :], _body(data, section), index in entries or not symbols)
        if len(kernel.code) % 16 or not kernel.code:
            raise BinaryError(f"section {section.name}: got {len(kernel.code)} bytes of code, needs a multiple of 16")
        _fill_kernel(kernel, index, data, sections, symbols, arch)
        kernels.append(kernel)
    _apply_global_info(kernels, data, sections, symbols)
    return Cubin(f"sm_{arch}{_suffix(data, sections)}", hashlib.sha256(data).hexdigest(), kernels, sections, data, symbols)


def _apply_global_info(kernels: list[KernelSection], data: bytes, sections: list[Section], symbols: list[Symbol]) -> None:
    """Register counts and local frames, which `.nv.info` keys by symbol index."""
    info = next((section for section in sections if section.name == ".nv.info"), None)
    by_name = {kernel.name: kernel for kernel in kernels}
    for attribute, payload in read_attributes(_body(data, info)) if info else ():
        if attribute not in (EIATTR_REGCOUNT, EIATTR_FRAME_SIZE) or len(payload) < 8:
            continue
        number, value = struct.unpack_from("<II", payload, 0)
        kernel = by_name.get(symbols[number].name) if number < len(symbols) else None
        if kernel is not None and attribute == EIATTR_REGCOUNT:
            kernel.registers = value
        elif kernel is not None:
            kernel.frame_bytes = value
