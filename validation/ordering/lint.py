"""MO101: inline PTX in CuTe DSL source that touches memory but does not say so.

The compiler believes what an inline-PTX statement declares. Free of side effects means that two equal statements become one (the earlier),
that a loop-invariant one is hoisted above a poll and that an unused one, a wait for instance, is deleted. Without a memory clobber the
statement is no barrier to the loads around it. Both are right for static weights only.

A statement counts as a weight read when every tensor or pointer its address derives from has the role weight (by the manifest or the
operand contracts), followed through local names and through the callers of helper functions, or when the helper itself refuses other
roles while the kernel is traced (`operand.require("weight")`).
"""

from __future__ import annotations

import ast
import enum
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from validation.ordering.lint_doors import Function, Site, Source, called_name, find_sites
from validation.ordering.model import FileError, Finding

READS = re.compile(
    r"(?<![\w.%])(?:ldu?\.(?!param|const)|ldmatrix|atom\.|red\.|multimem\.|cp\.async|cp\.reduce|prefetchu?\.|prefetch\b|wmma\.load|tcgen05\.(?:ld|cp))"
)
ORDERS = re.compile(
    r"(?<![\w.%])(?:griddepcontrol|bar\.|barrier\.|mbarrier\.|fence|membar|st\.|stmatrix|wgmma\.(?:fence|wait|commit)|tcgen05\.(?:wait|fence|commit|st))"
)
STATEMENT = re.compile(r"[a-z][\w.:]*")

IsWeight = Callable[[str, str], bool]


@dataclass(frozen=True, kw_only=True)
class LintResult:
    """Findings, the files read, and every file that could not be."""

    findings: tuple[Finding, ...]
    files: tuple[str, ...]
    errors: tuple[FileError, ...] = ()
    statements: int = 0  # inline-PTX statements judged


def no_weights(function: str, parameter: str) -> bool:
    """The strictest `IsWeight`: nothing is known to be a weight."""
    return False


def lint_paths(paths: Iterable[Path], is_weight: IsWeight = no_weights, context: Iterable[Path] = ()) -> LintResult:
    """Lint Python files and the Python files below folders. `is_weight(function name, parameter name)` tells the roles.

    `context` files are read for the helpers they define but not judged.
    """
    judged, errors = _read(_python_files(paths))
    others, _ = _read(path for path in _python_files(context) if path.resolve() not in {source.path.resolve() for source in judged})
    sources = [*judged, *others]
    callers = _Callers(sources, is_weight)
    own = {source.path for source in judged}
    sites = [site for site in find_sites(sources) if site.path in own]
    findings = [finding for site in sites if (finding := _judge(site, callers)) is not None]
    stated = sum(isinstance(site.text.constant, str) for site in sites)
    return LintResult(
        findings=tuple(sorted(findings, key=lambda f: (f.source_file, f.source_line))),
        files=tuple(str(source.path) for source in judged),
        errors=tuple(errors),
        statements=stated,
    )


def _python_files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(item for item in path.rglob("*.py") if not any(part.startswith(".") for part in item.relative_to(path).parts))
        else:
            yield path


def _read(paths: Iterable[Path]) -> tuple[list[Source], list[FileError]]:
    sources, errors = [], []
    for path in paths:
        try:
            sources.append(Source(path))
        except (OSError, SyntaxError, ValueError, RecursionError) as error:
            errors.append(FileError(path=str(path), reason=f"source: got {type(error).__name__}: {error}, needs readable Python"))
    return sources, errors


def _judge(site: Site, callers: _Callers) -> Finding | None:
    text = site.text.constant
    if not isinstance(text, str):
        return None  # a wrapper: its callers are judged
    orders = ORDERS.search(text)
    reads = READS.search(text)
    if orders is None and reads is None:
        return None
    if site.effects.parameter or site.clobber.parameter:
        return None  # decided by the caller, which is a site of its own
    statement = _statement(text, orders or reads)
    if site.effects.constant is not True:
        known = (
            "is declared free of side effects" if site.effects.constant is False else "has an effect flag that cannot be read from source"
        )
        if orders is None and callers.weights_only(site):
            return None
        verb = "orders or writes memory" if orders else "reads memory"
        return _finding(site, statement, f"inline PTX `{statement}` {verb} but {known}", "declare side effects and add the memory clobber")
    if site.clobber.constant is True or (orders is None and callers.weights_only(site)):
        return None
    return _finding(
        site, statement, f"inline PTX `{statement}` touches memory without a memory clobber", 'add "~{memory}" to the constraints'
    )


def _statement(text: str, match: re.Match[str] | None) -> str:
    found = STATEMENT.match(text, match.start() if match else 0)
    return found.group(0).rstrip(".") if found else text.strip()[:40]


def _finding(site: Site, statement: str, message: str, fix: str) -> Finding:
    text = site.text.constant
    return Finding(
        rule="MO101",
        kernel=site.function.qualname if site.function else "",
        arch="",
        message=message,
        ptx_text=text.strip() if isinstance(text, str) else statement,
        source_file=str(site.path),
        source_line=site.call.lineno,
        fix=f"{fix}; only a static weight may go without",
    )


class _Callers:
    """Answers whether an address can only come from weights, through local names and callers."""

    def __init__(self, sources: Iterable[Source], is_weight: IsWeight) -> None:
        self._is_weight = is_weight
        self._calls: dict[str, list[tuple[ast.Call, Function | None]]] = {}
        for source in sources:
            for call, function in source.calls():
                self._calls.setdefault(called_name(call), []).append((call, function))

    def weights_only(self, site: Site) -> bool:
        """True when every pointer that the statement's operands derive from is a weight."""
        if site.function is None:
            return False
        # A door's operands are wherever the address is; with one statement a helper, its parameters that reach the call tell enough.
        return self._origin([*site.call.args, *(k.value for k in site.call.keywords)], site.function, frozenset()) is _Origin.WEIGHT

    def _origin(self, nodes: Iterable[ast.expr], function: Function, seen: frozenset[str]) -> _Origin:
        roots = _roots(nodes, function) - {"loc", "ip"}
        if roots & function.guarded:
            return _Origin.WEIGHT
        pointers = {name for name in roots if name in function.pointers or self._is_weight(function.name, name)}
        if not pointers and not function.kernel:
            pointers = roots  # a helper that annotates nothing: its callers tell pointers from indices
        found = {
            _Origin.WEIGHT if self._is_weight(function.name, name) else self._passed(function, name, seen) for name in sorted(pointers)
        }
        return _worst(found)

    def _passed(self, function: Function, parameter: str, seen: frozenset[str]) -> _Origin:
        """What the callers pass for a parameter; nothing is known of a kernel's own parameter or of an uncalled helper."""
        key = f"{function.path}:{function.qualname}:{parameter}"
        calls = [(call, caller) for call, caller in self._calls.get(function.name, ()) if caller is not None and caller is not function]
        if function.kernel or key in seen or not calls:
            return _Origin.OTHER
        found = set()
        for call, caller in calls:
            given = _given(call, function, parameter)
            if caller is not None:
                found.add(_Origin.OTHER if given is None else self._origin([given], caller, seen | {key}))
        return _worst(found)


class _Origin(enum.Enum):
    NO_POINTER = 0  # constants and indices
    WEIGHT = 1
    OTHER = 2


def _worst(found: set[_Origin]) -> _Origin:
    return max(found, key=lambda origin: origin.value, default=_Origin.NO_POINTER)


def _given(call: ast.Call, function: Function, parameter: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == parameter:
            return keyword.value
    position = function.parameters.index(parameter) if parameter in function.parameters else -1
    if 0 <= position < len(call.args) and not any(isinstance(item, ast.Starred) for item in call.args):
        return call.args[position]
    return None


def _roots(nodes: Iterable[ast.expr], function: Function) -> set[str]:
    """The parameters (and guarded names) that these expressions are computed from, through local assignments."""
    assigned: dict[str, list[ast.expr]] = {}
    for item in ast.walk(function.node):
        if isinstance(item, ast.Assign):
            for target in item.targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        assigned.setdefault(part.id, []).append(item.value)
        elif isinstance(item, ast.AnnAssign | ast.AugAssign) and isinstance(item.target, ast.Name) and item.value is not None:
            assigned.setdefault(item.target.id, []).append(item.value)
    found: set[str] = set()
    visited: set[str] = set()
    pending = [name.id for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name)]
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        if name in function.parameters:
            found.add(name)
        pending += [item.id for value in assigned.get(name, ()) for item in ast.walk(value) if isinstance(item, ast.Name)]
    return found
