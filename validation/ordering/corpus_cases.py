"""The corpus: small kernels of ours, each with the findings that the audit must report for it, and no other.

A case is a source (`ptx/NAME.ptx`, `cuda/NAME.cu` or `cutedsl/NAME.py`) with `NAME.toml` beside it:

    title, pattern, faults, note        what it shows, which rows of the fault catalogue it stands for
    [launch]  pdl, ordered, has_dependents, guards_true, released     launch facts; parameters by name
    [roles]   NAME = "role"             in parameter order
    [targets] NAME = "role"             role of what a pointer loaded from NAME points to
    [guards]  NAME = "FLAG"             the mailbox whose acquire (or release) orders NAME
    [[expect]] rule, param, arch        a finding ("*NAME": what NAME's pointers point to); `arch` limits it to some architectures
    [[lint]]   rule, count              findings of the source lint
    ptx_of    NAME                      (twins) audit this binary against the PTX of that case, where the order is right
    [moved]   load, wait, twin, arch    the compiler must put `load` before `wait` in the binary (regular expressions over SASS lines);
              text instead of both      an expression over the whole text, for what is no order of two lines (a deleted wait, a self-branch)

When a newer compiler no longer moves the load, the case is judged by its twin: a hand-written kernel whose binary has the moved order.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from validation.core.types import HarnessError
from validation.ordering.model import RULES, LaunchFacts, Role, RoleEntry, RoleMap

CORPUS = Path(__file__).parent / "corpus"
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
SUFFIXES = {"ptx": ".ptx", "cuda": ".cu", "cutedsl": ".py", "twins": ".ptx"}
FAMILIES = tuple(SUFFIXES)
PRELUDE = "prelude.py"  # shared by the CuTe DSL cases, no case itself

_KEYS = {
    "": {"title", "ptx_of", "pattern", "faults", "note", "launch", "roles", "targets", "guards", "expect", "lint", "moved"},
    "launch": {"pdl", "ordered", "has_dependents", "guards_true", "released"},
    "expect": {"rule", "param", "arch"},
    "lint": {"rule", "count"},
    "moved": {"load", "wait", "text", "twin", "arch"},
}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One finding that must be reported; `param` "" matches findings about the whole kernel."""

    rule: str
    param: str = ""
    archs: tuple[str, ...] = ARCHITECTURES


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What the compiler is known to produce: the first SASS line matching `load` stands above the first matching `wait`, or `text`."""

    twin: str
    load: str = ""
    wait: str = ""
    text: str = ""
    archs: tuple[str, ...] = ARCHITECTURES


@dataclass(frozen=True, kw_only=True)
class CorpusCase:
    name: str
    family: str
    title: str
    source: Path
    params: tuple[str, ...]
    roles: RoleMap
    launch: LaunchFacts
    expect: tuple[Expected, ...] = ()
    lint: Mapping[str, int] = field(default_factory=dict)
    moved: Moved | None = None
    pattern: str = ""
    faults: tuple[str, ...] = ()
    note: str = ""
    ptx_of: str = ""

    def expected(self, arch: str) -> frozenset[tuple[str, str]]:
        """(rule, parameter name or "") pairs for one architecture."""
        return frozenset((item.rule, item.param) for item in self.expect if arch in item.archs)

    @property
    def true_negative(self) -> bool:
        """True when nothing may be reported about the binary, on any architecture."""
        return not self.expect


def load_cases(root: Path = CORPUS, families: Iterable[str] = FAMILIES) -> tuple[CorpusCase, ...]:
    """Every case below `root`, sorted by family and name. Raises HarnessError naming everything wrong in any of the files."""
    cases: list[CorpusCase] = []
    reasons: list[str] = []
    for family in families:
        folder = root / family
        for path in sorted(folder.glob("*.toml")):
            try:
                cases.append(_read_case(path, family))
            except (ValueError, OSError) as error:
                reasons.append(f"{path.relative_to(root)}: {error}")
        sources = {path.stem for path in folder.glob(f"*{SUFFIXES[family]}") if path.name != PRELUDE}
        reasons += [f"{family}/{name}: got a source, needs its {name}.toml" for name in sorted(sources - {case.name for case in cases})]
    names = [case.name for case in cases]
    reasons += [f"{name}: got the name twice, needs unique names" for name in sorted({n for n in names if names.count(n) > 1})]
    twins = {case.name for case in cases if case.family == "twins"}
    if "twins" in tuple(families):
        reasons += [
            f"{case.name}: got the twin {case.moved.twin}, needs one of {sorted(twins)}"
            for case in cases
            if case.moved is not None and case.moved.twin not in twins
        ]
    if reasons:
        raise HarnessError("corpus: " + "; ".join(reasons))
    return tuple(cases)


def _read_case(path: Path, family: str) -> CorpusCase:
    table = tomllib.loads(path.read_text())
    unknown = [key for key in table if key not in _KEYS[""]]
    for section in ("launch", "expect", "lint", "moved"):
        rows = table.get(section, [])
        for row in rows if isinstance(rows, list) else [rows]:
            unknown += [f"{section}.{key}" for key in row if key not in _KEYS[section]]
    if unknown:
        raise ValueError(f"got the unknown keys {unknown}, needs some of {sorted(_KEYS[''])}")
    source = path.with_suffix(SUFFIXES[family])
    if not source.is_file():
        raise ValueError(f"got no source {source.name}, needs one beside it")
    params = tuple(table["roles"])
    expect = tuple(
        Expected(rule=row["rule"], param=row.get("param", ""), archs=tuple(row.get("arch", ARCHITECTURES)))
        for row in table.get("expect", ())
    )
    strange = [item.rule for item in expect if item.rule not in RULES] + [
        i.param for i in expect if i.param and i.param.lstrip("*") not in params
    ]
    if strange:
        raise ValueError(f"got the expectations {strange}, needs rules of the registry and parameters of [roles]")
    return CorpusCase(
        name=path.stem,
        family=family,
        title=table["title"],
        source=source,
        params=params,
        roles=_roles(table, params),
        launch=_launch(table.get("launch", {}), params),
        expect=expect,
        lint={row["rule"]: row["count"] for row in table.get("lint", ())},
        moved=_moved(table.get("moved")),
        pattern=table.get("pattern", ""),
        faults=tuple(table.get("faults", ())),
        note=table.get("note", ""),
        ptx_of=table.get("ptx_of", ""),
    )


def _roles(table: Mapping[str, Any], params: tuple[str, ...]) -> RoleMap:
    targets = table.get("targets", {})
    entries = {}
    for index, name in enumerate(params):
        target = Role(targets[name]) if name in targets else None
        guard = params.index(table["guards"][name]) if name in table.get("guards", {}) else None
        entries[(index, 0)] = RoleEntry(role=Role(table["roles"][name]), reason="corpus case", name=name, target=target, guarded_by=guard)
    return RoleMap(by_index=entries, source="corpus")


def _launch(table: Mapping[str, Any], params: tuple[str, ...]) -> LaunchFacts:
    def indices(key: str) -> frozenset[int]:
        return frozenset(params.index(name) for name in table.get(key, ()))

    return LaunchFacts(
        pdl=table.get("pdl"),
        has_dependents=table.get("has_dependents"),
        ordered=indices("ordered"),
        released=indices("released"),
        guards_true=indices("guards_true"),
    )


def _moved(table: Mapping[str, Any] | None) -> Moved | None:
    if table is None:
        return None
    patterns = {key: table[key] for key in ("load", "wait", "text") if key in table}
    if set(patterns) not in ({"load", "wait"}, {"text"}):
        raise ValueError(f"moved: got {sorted(patterns)}, needs load and wait, or text alone")
    for pattern in patterns.values():
        re.compile(pattern)
    return Moved(twin=table["twin"], archs=tuple(table.get("arch", ARCHITECTURES)), **patterns)


def order_holds(sass: Iterable[str], moved: Moved) -> bool:
    """True when the first line matching `load` stands above the first line matching `wait`: plain text order, no engine involved.

    A `load` that matches nothing is not "moved"; a `wait` that matches nothing (deleted) counts as moved.
    """
    lines = list(sass)
    if moved.text:
        return re.search(moved.text, "\n".join(lines), re.DOTALL) is not None
    first_load = next((number for number, line in enumerate(lines) if re.search(moved.load, line)), None)
    first_wait = next((number for number, line in enumerate(lines) if re.search(moved.wait, line)), None)
    return first_load is not None and (first_wait is None or first_load < first_wait)
