"""What a compiled binary says about itself: the digest of its machine code, registers, stack and shared memory, from the ELF alone."""

from __future__ import annotations

import hashlib
import struct

# ELF attributes of `.nv.info` that hold a pair (symbol, value).
EIATTR_FRAME_SIZE, EIATTR_MIN_STACK_SIZE, EIATTR_REGCOUNT = 0x11, 0x12, 0x2F
PAIR_FORMAT = 0x04


def sections(cubin: bytes) -> dict[str, tuple[bytes, int]]:
    """Section name -> (contents, size). Contents are empty for sections that occupy no file space."""
    offset, entry, count, names = (*struct.unpack_from("<Q", cubin, 0x28), *struct.unpack_from("<HHH", cubin, 0x3A))
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * entry) for i in range(count)]
    strings = headers[names][4]
    found = {}
    no_bits = 8
    for name, kind, _, _, start, size, *_ in headers:
        text = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        found[text] = (b"" if kind == no_bits else cubin[start : start + size], size)
    return found


def text_digest(cubin: bytes) -> str:
    """SHA-256 of the machine code: the .text sections of the ELF, in name order."""
    code = {name: contents for name, (contents, _) in sections(cubin).items() if name.startswith(".text.")}
    if not code:
        raise ValueError("cubin: got no .text section, needs at least one kernel")
    return hashlib.sha256(b"".join(code[name] for name in sorted(code))).hexdigest()


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack bytes a thread (spills and local arrays alike) and static shared bytes of the single kernel in `cubin`."""
    found = sections(cubin)
    info = found[".nv.info"][0]
    values: dict[int, int] = {}
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != PAIR_FORMAT:
            continue
        if size == 8:
            values[attribute] = max(values.get(attribute, 0), struct.unpack_from("<II", info, at)[1])
        at += size
    if EIATTR_REGCOUNT not in values:
        raise ValueError(f"cubin: got attributes {sorted(values)}, needs a register count; the ELF format changed")
    stack = max(values.get(EIATTR_FRAME_SIZE, 0), values.get(EIATTR_MIN_STACK_SIZE, 0))
    shared = sum(size for name, (_, size) in found.items() if name.startswith(".nv.shared.") and "reserved" not in name)
    return {"registers": values[EIATTR_REGCOUNT], "stack_bytes": stack, "shared": shared}
