"""Reads `rfc/policy.toml`: the limits and rules of a fast-track change, as frozen dataclasses. Unknown keys are errors.

`Policy.digest` is the SHA-256 of the file's bytes; every verdict carries it, so that a verdict says which policy judged it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from validation.core.types import HarnessError

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_POLICY = REPOSITORY / "rfc" / "policy.toml"


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A file outside the isolated folders that may call into them, and how many lines it may add."""

    file: str
    max_added_lines: int


@dataclass(frozen=True, kw_only=True)
class Isolation:
    paths: tuple[str, ...]  # git-style globs; ** crosses folders
    free: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    hooks: tuple[Hook, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OptIn:
    name: str
    file: str
    default: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Interface:
    environment: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rule:
    id: str
    sentence: str
    check: str
    test: str


@dataclass(frozen=True, kw_only=True)
class Policy:
    """`supported`, `lanes`, `limits`, `evidence` and `mutants` stay plain tables: the lanes that read them know their keys."""

    name: str
    digest: str
    isolation: Isolation
    opt_in: OptIn
    interface: Interface
    supported: Mapping[str, Any]
    lanes: Mapping[str, tuple[str, ...]]
    limits: Mapping[str, Mapping[str, Any]]
    evidence: Mapping[str, Any]
    mutants: Mapping[str, Any]
    rules: tuple[Rule, ...] = field(default_factory=tuple)

    def limit(self, lane: str, key: str) -> float:
        """A number of `[limits.<lane>]`.

        Raises:
            HarnessError: the policy has no such limit; a missing limit never means "no limit".
        """
        try:
            return float(self.limits[lane][key])
        except (KeyError, TypeError, ValueError):
            raise HarnessError(f"policy {self.name}: [limits.{lane}] has no number {key!r}; add it to the policy file") from None

    def sentence(self, check: str) -> str:
        """The sentence of the rule that a check measures. Raises HarnessError when no rule names it."""
        found = next((rule.sentence for rule in self.rules if rule.check == check), None)
        if found is None:
            raise HarnessError(f"policy {self.name}: got no rule with the check {check!r}, needs one; add it to the policy file")
        return found


_TOP = {"schema", "name", "isolation", "opt_in", "interface", "supported", "lanes", "limits", "evidence", "mutants", "rule"}


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda value: isinstance(value, str), "a text"),
    "int": (lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0, "a whole number"),
    "tuple[str, ...]": (lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value), "a list of texts"),
}
_TABLES = ("isolation", "opt_in", "interface", "supported", "lanes", "limits", "evidence", "mutants")


def _shape_problems(table: Mapping[str, Any]) -> list[str]:
    """What is no table, or no list of tables, where one is needed."""
    found = [f"[{key}]: got {table[key]!r}, needs a table" for key in _TABLES if not isinstance(table.get(key, {}), dict)]
    inside = table.get("isolation")
    lists = [("rule", table.get("rule", [])), ("isolation.hooks", inside.get("hooks", []) if isinstance(inside, dict) else [])]
    found += [
        f"[{name}]: got {value!r}, needs a list of tables"
        for name, value in lists
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value)
    ]
    for key, kind, words in (("lanes", list, "a list of texts"), ("limits", dict, "a table")):
        part = table.get(key)
        if isinstance(part, dict):
            found += [f"[{key}] {name}: got {value!r}, needs {words}" for name, value in part.items() if not isinstance(value, kind)]
    return found


def _build(cls: type, table: Mapping[str, Any], where: str, problems: list[str]) -> Any:
    for f in dataclasses.fields(cls):
        fits, words = _KINDS.get(str(f.type), (lambda value: True, ""))
        if f.name in table and not fits(table[f.name]):
            problems.append(f"[{where}] {f.name}: got {table[f.name]!r}, needs {words}")
    known = {f.name for f in dataclasses.fields(cls)}
    missing = {
        f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    } - set(table)
    problems += [f"[{where}] {key}: unknown key, needs one of {', '.join(sorted(known))}" for key in sorted(set(table) - known)]
    problems += [f"[{where}] {key}: missing" for key in sorted(missing)]
    if missing:
        return None
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in table.items() if key in known})


def load_policy(path: Path = DEFAULT_POLICY) -> Policy:
    """Parse a policy file.

    Raises:
        HarnessError: the file is missing, is not TOML, or holds unknown or missing keys; the message lists all of them.
    """
    try:
        raw = path.read_bytes()
        table = tomllib.loads(raw.decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise HarnessError(f"policy {path}: got {error}, needs a readable TOML file; see rfc/policy.toml for the form") from None
    problems = _shape_problems(table)
    if problems:
        raise HarnessError(f"policy {path}: {len(problems)} problem(s): " + "; ".join(problems))
    problems = [f"{key}: unknown table, needs one of {', '.join(sorted(_TOP))}" for key in sorted(set(table) - _TOP)]
    for key in ("name", "isolation", "opt_in"):
        if key not in table:
            problems.append(f"{key}: missing")
    if table.get("schema") != 1:
        problems.append(f"schema: got {table.get('schema')!r}, needs 1")
    isolation = dict(table.get("isolation", {}))
    hooks = tuple(_build(Hook, hook, "isolation.hooks", problems) for hook in isolation.pop("hooks", []))
    parts = {
        "isolation": _build(Isolation, isolation, "isolation", problems),
        "opt_in": _build(OptIn, table.get("opt_in", {}), "opt_in", problems),
        "interface": _build(Interface, table.get("interface", {}), "interface", problems),
        "rules": tuple(_build(Rule, rule, "rule", problems) for rule in table.get("rule", [])),
    }
    identifiers = [rule.id for rule in parts["rules"] if rule is not None]
    problems += [f"[rule] {name}: defined twice" for name in sorted({i for i in identifiers if identifiers.count(i) > 1})]
    if problems:
        raise HarnessError(f"policy {path}: {len(problems)} problem(s): " + "; ".join(problems))
    parts["isolation"] = dataclasses.replace(parts["isolation"], hooks=hooks)
    return Policy(
        name=str(table["name"]),
        digest=hashlib.sha256(raw).hexdigest(),
        supported=table.get("supported", {}),
        lanes={lane: tuple(names) for lane, names in table.get("lanes", {}).items()},
        limits=table.get("limits", {}),
        evidence=table.get("evidence", {}),
        mutants=table.get("mutants", {}),
        **parts,
    )
