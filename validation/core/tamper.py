"""Notices a candidate that replaced what it is measured with: clocks, torch's own functions, or the suite's.

Taken before any code of the candidate is imported, compared after each case. It sees replaced callables of modules and methods of classes,
and Python functions whose code was exchanged in place. It cannot see everything a process can do to itself; what it must never do is let a
patched clock or comparison pass unnoticed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# Modules whose callables decide what is measured. Those of the suite are watched as far as they are loaded.
WATCHED = ("time", "math", "json", "hashlib", "torch", "torch.cuda", "torch.linalg", "torch.nn.functional", "numpy", "statistics")
CLASSES = (("torch", "Tensor"), ("torch.cuda", "Event"), ("torch.cuda", "CUDAGraph"))
SUITE = ("validation.", "evals.", "perf.")
# torch._dynamo wraps this one when something first imports it; inputs are drawn from generators with their own seeds.
REPLACED_BY_TORCH = ("torch.manual_seed",)
MAX_NAMED = 5

Snapshot = dict[str, tuple[int, int]]


def snapshot() -> Snapshot:
    """Identity of every watched callable that is loaded now, by dotted name."""
    return {name: (id(value), id(getattr(value, "__code__", None))) for name, value in _callables()}


def _callables() -> Iterator[tuple[str, Any]]:
    # Candidates live in modules of their own; the mutants are candidates too.
    names = [n for n in sys.modules if n in WATCHED or (n.startswith(SUITE) and not n.startswith("validation.mutants"))]
    for name in sorted(names):
        module = sys.modules.get(name)
        if isinstance(module, ModuleType):
            yield from ((f"{name}.{key}", value) for key, value in list(vars(module).items()) if callable(value))
    for name, kind in CLASSES:
        found = getattr(sys.modules.get(name), kind, None)
        if found is not None:
            yield from ((f"{name}.{kind}.{key}", value) for key, value in list(vars(found).items()) if callable(value))


def replaced(before: Snapshot) -> tuple[str, ...]:
    """Names that meant something else at the snapshot, the first few; names that came since are no replacement."""
    now = snapshot()
    changed = (name for name, identity in before.items() if name in now and now[name] != identity)
    return tuple(name for name in changed if name not in REPLACED_BY_TORCH)[:MAX_NAMED]
