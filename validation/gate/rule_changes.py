"""What a change does to the rules that judge it: the policy, the claims, and the limits beside the checks, against those of the base.

A change that loosens its own rule must not pass by it. Whatever is not provably tighter counts as looser: a bound moved the wrong way or
one whose direction nobody stated, a rule, claim, lane or digest that went, a folder or flag that became allowed, a new number in
`[limits]` (it replaces what a check carries), a limit or a numeric constant of a file with limits that is no longer there as it was.
Everything is read as text or syntax tree; nothing of either side is imported.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from validation.core.types import HarnessError
from validation.scope.change import Change

CLAIMS_FILE = "validation/claims.py"
SUITE_FOLDERS = ("validation/", "evals/", "perf/")
_ABSENT = object()

# How a value of the policy gets looser, by the end of its dotted name. What is not listed may not change at all.
LARGER_IS_LOOSER = (
    "_max", "_ratio", "tolerance", "alpha", "drift_low", "agreement_loss", "one_standard_error", "max_age_days", "max_added_lines",
)  # fmt: skip
SMALLER_IS_LOOSER = ("_min", "power", "controls_survive_seeds")
MORE_IS_LOOSER = ("isolation.paths", "isolation.free", "interface.environment", "interface.flags")
LESS_IS_LOOSER = ("isolation.packages", "lanes.", "evidence.required", "evidence.bound_to")
FREE_TO_ADD = ("rule.", "lanes.")  # a new rule, a new lane
MARGINS = "limits.evals.margin."


@dataclass(frozen=True, kw_only=True)
class RuleChange:
    """One changed rule. `key` names it in an acknowledgement; `loosens` is True unless it is provably as tight as before."""

    key: str
    before: str
    after: str
    loosens: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def rule_changes(change: Change, policy_path: str | None) -> tuple[RuleChange, ...]:
    """Every rule that differs between base and head. `policy_path` is relative to the repository; None: it lies outside, where no change
    of the repository reaches it.

    Raises:
        HarnessError: a policy of either side is no TOML, or a changed source of the suite does not parse.
    """
    found: list[RuleChange] = []
    before, after = (change.text_at(side, policy_path) if policy_path else None for side in ("base", "head"))
    if policy_path is None:
        pass
    elif before is None:
        found.append(RuleChange(key=policy_path, before="not there", after="new: nothing to compare with", loosens=True))
    elif after is None:
        found.append(RuleChange(key=policy_path, before="there", after="removed", loosens=True))
    elif before != after:
        found += _policy_changes(_flat(_toml(before, policy_path)), _flat(_toml(after, policy_path)))
    found += _claim_changes(change.text_at("base", CLAIMS_FILE), change.text_at("head", CLAIMS_FILE))
    for file in change.files:
        if file.old_path.endswith(".py") and file.old_path.startswith(SUITE_FOLDERS):
            found += _code_changes(file.old_path, change.text_at("base", file.old_path), change.text_at("head", file.path))
    return tuple(found)


# ---- the policy ----
def _toml(text: str, where: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise HarnessError(f"policy {where}: got {error}, needs TOML at the base and at the head") from None


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value. Lists of tables go by the id, or the file, of each entry; other lists become tuples."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                identity = item.get("id") or item.get("file") or number
                found |= _flat({k: v for k, v in item.items() if k not in ("id", "file")}, f"{name}.{identity}.")
        else:
            found[name] = tuple(value) if isinstance(value, list) else value
    return found


def _policy_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[RuleChange]:
    for key in sorted({*before, *after}):
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if old != new:
            yield RuleChange(key=key, before=_word(old), after=_word(new), loosens=_looser(key, old, new))


def _word(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(list(value) if isinstance(value, tuple) else value)


def _looser(key: str, old: Any, new: Any) -> bool:
    if key == "name":
        return False
    if old is _ABSENT:
        empty = new in ((), "")
        return not (empty or key.startswith(FREE_TO_ADD))
    if new is _ABSENT:
        return not (old in ((), "") or key.startswith("isolation.hooks."))
    if isinstance(old, tuple) and isinstance(new, tuple):
        more, less = set(new) - set(old), set(old) - set(new)
        return bool(more) if key in MORE_IS_LOOSER else bool(less) if key.startswith(LESS_IS_LOOSER) else True
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in (old, new)):
        return True
    if (key.endswith(LARGER_IS_LOOSER) and not key.startswith("supported.")) or key.startswith(MARGINS):
        return not new <= old
    return not new >= old if key.endswith(SMALLER_IS_LOOSER) else True


# ---- claims ----
def _claim_changes(before: str | None, after: str | None) -> Iterator[RuleChange]:
    """A claim, one of its checks, or a profile that requires it, is gone."""
    old, new = _claims(before), _claims(after)
    for name, parts in old.items():
        if name not in new:
            yield RuleChange(key=f"claim.{name}", before="there", after="removed", loosens=True)
            continue
        for field in ("checks", "required_in"):
            gone = sorted(set(parts[field]) - set(new[name][field]))
            if gone:
                yield RuleChange(key=f"claim.{name}.{field}", before=", ".join(gone), after="removed", loosens=True)


def _claims(text: str | None) -> dict[str, dict[str, tuple[str, ...]]]:
    """id -> checks and profiles of each `Claim(...)` in a file, where they are literals or names of literals in it."""
    if text is None:
        return {}
    tree = _parsed(text, CLAIMS_FILE)
    names = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Claim":
            fields = {k.arg: _literal(names.get(k.value.id) if isinstance(k.value, ast.Name) else k.value) for k in node.keywords}
            if isinstance(fields.get("id"), str):
                found[fields["id"]] = {name: tuple(map(str, fields.get(name) or ())) for name in ("checks", "required_in")}
    return found


def _literal(node: ast.AST | None) -> Any:
    try:
        return ast.literal_eval(node) if isinstance(node, ast.expr) else None
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


# ---- limits beside the checks ----
def _code_changes(path: str, before: str | None, after: str | None) -> Iterator[RuleChange]:
    """Limits, and numeric constants of a file that has limits, that the head no longer holds as they were."""
    if before is None:
        return
    old, new = _limits(path, before), _limits(path, after or "")
    for key, texts in old.items():
        gone = [text for text in texts if text not in new.get(key, ())]
        if gone:
            now = [text for text in new.get(key, ()) if text not in texts]
            looser = len(gone) != 1 or len(now) != 1 or not _as_tight(gone[0], now[0])
            yield RuleChange(key=key, before="; ".join(gone), after="; ".join(now) or "removed", loosens=looser)


_BOUND = re.compile(r"(?P<before>.*\bop='(?P<op><=|<|>=|>)', bound=)(?P<bound>-?[\d.]+(?:e-?\d+)?)(?P<after>,.*|)")


def _as_tight(old: str, new: str) -> bool:
    """True when two texts of a limit differ in a literal bound only, and the new one allows no more."""
    one, two = _BOUND.fullmatch(old), _BOUND.fullmatch(new)
    if one is None or two is None or (one["before"], one["after"]) != (two["before"], two["after"]):
        return False
    was, now = float(one["bound"]), float(two["bound"])
    return now <= was if one["op"] in ("<=", "<") else now >= was


def _limits(path: str, text: str) -> dict[str, tuple[str, ...]]:
    tree = _parsed(text, path)
    makers = {"Limit"} | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(_call_of(inner, {"Limit"}) for inner in ast.walk(node))
    }
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _call_of(node, makers) and node.args + node.keywords:
            where, what = _limit_text(path, node)
            found.setdefault(where, []).append(what)
    if not found:
        return {}
    for statement in tree.body:
        for name, value in _constants(statement):
            found.setdefault(f"{path}:{name}", []).append(repr(value))
    return {key: tuple(dict.fromkeys(texts)) for key, texts in found.items()}


def _call_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _limit_text(path: str, node: ast.Call) -> tuple[str, str]:
    """(key, the call without its explanation): a reworded reason is no other limit."""
    kept = [k for k in node.keywords if k.arg not in ("why", "measurement")]
    first = next((k.value for k in node.keywords if k.arg == "measurement"), node.args[0] if node.args else None)
    name = ast.unparse(first).strip("'\"") if first is not None else "limit"
    numbers = [ast.unparse(a) for a in node.args[1:] if not (isinstance(a, ast.Constant) and isinstance(a.value, str) and " " in a.value)]
    return f"{path}:{name}", ", ".join([*numbers, *(f"{k.arg}={ast.unparse(k.value)}" for k in kept)]) or "there"


def _constants(node: ast.stmt) -> Iterator[tuple[str, float]]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    value = _literal(node.value) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None else None
    for target in targets:
        if isinstance(target, ast.Name) and isinstance(value, int | float) and not isinstance(value, bool):
            yield target.id, value


def _parsed(text: str, path: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise HarnessError(f"gate: got {error} in {path}, needs Python that parses at the base and at the head") from None
