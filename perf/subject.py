"""The child side of adversarial timing: loads one subject, answers requests over a socket, knows no reference and no limit.

A subject is `module:factory`; `factory(config)` returns `run(inputs) -> outputs`, both mappings of names to NumPy arrays. Messages are
a JSON header (names, dtypes, shapes, and the child's own clock reading) followed by raw array bytes: the parent never unpickles what an
untrusted process wrote.
"""

from __future__ import annotations

import importlib
import json
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

_HEAD = struct.Struct("<Q")
MAX_BYTES = 1 << 31

Arrays = Mapping[str, np.ndarray]


def send(channel: socket.socket, body: Mapping[str, Any], arrays: Arrays) -> None:
    """One message. Arrays are materialised and copied here, inside whatever is being timed."""
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    table = [[name, array.dtype.str, list(array.shape)] for name, array in kept.items()]
    header = json.dumps({**body, "arrays": table}).encode()
    channel.sendall(_HEAD.pack(len(header)) + header + b"".join(array.tobytes() for array in kept.values()))


def receive(channel: socket.socket) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The next message. Raises ValueError when it is malformed or too large, EOFError when the other side is gone."""
    (size,) = _HEAD.unpack(_exactly(channel, _HEAD.size))
    if size > MAX_BYTES:
        raise ValueError(f"message: got a header of {size} bytes, needs at most {MAX_BYTES}")
    body = json.loads(_exactly(channel, size))
    arrays, total = {}, 0
    for name, dtype, shape in body.pop("arrays"):
        kind = np.dtype(dtype)
        if kind.hasobject or any(n < 0 for n in shape):
            raise ValueError(f"array {name}: got dtype {dtype} and shape {shape}, needs plain numbers")
        n_bytes = kind.itemsize * int(np.prod(shape, dtype=object) if shape else 1)
        total += n_bytes
        if total > MAX_BYTES:
            raise ValueError(f"array {name}: got {n_bytes} bytes, needs less than {MAX_BYTES} in all")
        arrays[str(name)] = np.frombuffer(_exactly(channel, n_bytes), dtype=kind).reshape(shape)
    return body, arrays


def _exactly(channel: socket.socket, n_bytes: int) -> bytes:
    parts = []
    while n_bytes:
        part = channel.recv(min(n_bytes, 1 << 20))
        if not part:
            raise EOFError("the other side closed the channel")
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


def main(arguments: list[str]) -> int:
    """`python -m perf.subject FD MODULE:FACTORY CONFIG_JSON`."""
    channel = socket.socket(fileno=int(arguments[0]))
    module, _, factory = arguments[1].partition(":")
    run = getattr(importlib.import_module(module), factory)(json.loads(arguments[2]))
    send(channel, {"ready": True}, {})
    while True:
        try:
            _, inputs = receive(channel)
        except EOFError:
            return 0
        began = time.perf_counter()
        writable = {name: array.copy() for name, array in inputs.items()}
        outputs = run(writable)
        changed = [name for name, array in inputs.items() if not np.array_equal(array, writable[name], equal_nan=array.dtype.kind == "f")]
        materialised = {name: np.array(output) for name, output in outputs.items()}
        send(channel, {"own_us": 1e6 * (time.perf_counter() - began), "changed_inputs": changed}, materialised)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
