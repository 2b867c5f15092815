"""What a mutant is, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

PATH, SCHEDULE, GRAPH, BINARY, TOOLCHAIN, SCOPE, EVAL, ACCEPTANCE, TIMING = KINDS = (
    "path", "schedule", "launch-graph", "binary", "toolchain", "scope", "eval", "acceptance", "timing",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Breach:
    """One limit that a mutant did not meet. `value` is None when the measurement was not there (the claim is then not proven)."""

    check: str
    case: str
    measurement: str
    value: float | None
    rule: str  # "<= 1.5"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one check said about a mutant: the cases it measured, and what they broke."""

    check: str
    cases: int
    breaches: tuple[Breach, ...] = ()
    error: str = ""  # the check could not measure; never counts as a kill

    @property
    def killed(self) -> bool:
        return bool(self.breaches)


Trial = Callable[[Mapping[str, Any]], Seen]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A planted fault. Exactly one of these says what is wrong:

    candidate: id of a path mutant that takes the candidate's place; plant: a context in which the real checks run; trial: the mutant's own
    subject (a kernel, a table of answers) under the real rule, for things that are no decode path.
    """

    id: str
    fault: str  # F01..F26; "-" for controls; "scope" and "speed" for broken rules of the policy that are no class of the catalogue
    kind: str
    sentence: str
    claim: str
    killed_by: str  # check id; for binaries "ordering." and the rule
    control: bool = False  # right as it is: every check must let it live
    candidate: str = ""
    plant: Callable[[], AbstractContextManager[None]] = nullcontext
    trial: Trial | None = None
    also: tuple[str, ...] = ()  # further checks to try, to see which other lanes notice
    seed: int = 0
    subset: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # check -> places of the cases to run; default: CHEAP

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in KINDS:
            problems.append(f"kind: got {self.kind!r}, needs one of {KINDS}")
        if self.control == bool(self.killed_by):
            problems.append(f"killed_by: got {self.killed_by!r}, needs a check, and none for a control")
        if problems:
            raise ValueError(f"mutant {self.id}: {'; '.join(problems)}")


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes (owner, name, value) for the time of the context."""
    before = [(owner, name, owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)
