"""The isolation rules (P-ISO, P-OPT): what a change may touch, import, default to and add to the interface.

Every function is pure: a `Change` and a `Policy` in, findings out. They read Python sources by their syntax tree and never import them,
because the change under judgement is untrusted.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath

from validation.policy import Policy
from validation.scope.change import Change


@dataclass(frozen=True, kw_only=True)
class ScopeFinding:
    """One broken rule at one place. `line` is in the new file; 0 where the whole file is meant."""

    rule: str
    path: str
    line: int
    message: str
    fix: str

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else self.path
        return f"{self.rule} {place}: {self.message}; {self.fix}"


@lru_cache(maxsize=256)
def _glob(pattern: str) -> re.Pattern[str]:
    """Git-style globs: `*` and `?` stay inside one folder, `**` crosses folders."""
    out, i = "", 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out, i = out + "(?:.*/)?", i + 3
        elif pattern.startswith("**", i):
            out, i = out + ".*", i + 2
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(pattern[i], re.escape(pattern[i]))
            i += 1
    return re.compile(out)


def matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(_glob(pattern).fullmatch(path) for pattern in patterns)


def isolation(change: Change, policy: Policy) -> tuple[ScopeFinding, ...]:
    """P-ISO-1: files outside the isolated folders, hooks counted in added lines."""
    budget = {hook.file: hook.max_added_lines for hook in policy.isolation.hooks}
    found = []
    for file in change.files:
        for path in dict.fromkeys((file.path, file.old_path)):  # a rename touches both ends
            if matches(path, policy.isolation.paths) or matches(path, policy.isolation.free):
                continue
            if path not in budget:
                message, fix = "changed outside the isolated folders", "move the change inside, or list the file as a hook in the policy"
            elif file.binary or file.removed_lines > len(file.added):
                message, fix = f"a hook may add lines, not remove {file.removed_lines}", "restore the removed lines"
            elif len(file.added) > budget[path]:
                message = f"the hook adds {len(file.added)} lines, the policy allows {budget[path]}"
                fix = "move the logic into the isolated folder"
            else:
                continue
            found.append(ScopeFinding(rule="P-ISO-1", path=path, line=0, message=message, fix=fix))
    return tuple(found)


def _module_name(path: str) -> tuple[str, ...]:
    parts = PurePosixPath(path).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def _imports(path: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in a Python file, relative ones resolved; `importlib.import_module("x")` counts."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = _module_name(path) if PurePosixPath(path).name == "__init__.py" else _module_name(path)[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parent, *([node.module] if node.module else [])])
            yield node.lineno, module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def imports(change: Change, policy: Policy) -> tuple[ScopeFinding, ...]:
    """P-ISO-2: the import graph at the head. Nothing outside reaches in, except a hook; imports that stood at the base count too."""
    hooks = {hook.file for hook in policy.isolation.hooks}
    found: list[ScopeFinding] = []
    for path in change.paths_at("head"):
        if not path.endswith(".py") or matches(path, policy.isolation.paths) or path in hooks:
            continue
        for line, module in _imports(path, change.text_at("head", path) or ""):
            inside = [p for p in policy.isolation.packages if module == p or module.startswith(p + ".")]
            if inside and not any(f.path == path and f.line == line for f in found):
                message = f"imports {module} from outside the isolated folders"
                found.append(ScopeFinding(rule="P-ISO-2", path=path, line=line, message=message, fix="call it through a listed hook"))
    return tuple(found)


def _default_of(name: str, text: str) -> tuple[int, object] | None:
    """(line, value) of the flag's default: an assignment, an annotated field, a keyword argument's default, or a dict entry, spelled as a
    literal or as a constant that the same file assigns once, at its top level."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    constants = _constants(tree)
    for node in ast.walk(tree):
        pairs: list[tuple[object, ast.expr | None]] = []
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs = [(node.target.id, node.value)]
        elif isinstance(node, ast.Assign):
            pairs = [(t.id, node.value) for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            positional = [*node.args.posonlyargs, *node.args.args]
            defaults = node.args.defaults
            pairs = [(a.arg, d) for a, d in zip(positional[len(positional) - len(defaults) :], defaults, strict=True)]
            pairs += [(a.arg, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        elif isinstance(node, ast.Dict):
            pairs = [(k.value, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
        for key, value in pairs:
            if key == name and isinstance(value, ast.Name) and value.id in constants:
                return value.lineno, constants[value.id]
            if key == name and isinstance(value, ast.Constant):
                return value.lineno, value.value
    return None


def _constants(tree: ast.Module) -> dict[str, object]:
    """Names that a file assigns exactly once, to a literal, at its top level."""
    stored = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    found: dict[str, object] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            pairs: list[tuple[ast.expr, ast.expr | None]] = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name) and stored[name.id] == 1 and isinstance(value, ast.Constant):
                    found[name.id] = value.value
    return found


def default(change: Change, policy: Policy) -> tuple[ScopeFinding, ...]:
    """P-OPT-1: the opt-in flag exists at the head and its default is the policy's (and the base's, when it was there)."""
    flag = policy.opt_in
    text = change.text_at("head", flag.file)
    here = _default_of(flag.name, text) if text is not None else None
    if here is None:
        message = f"no literal default of {flag.name!r} found" if text is not None else "the file that spells the opt-in default is missing"
        fix = "spell the default there as a literal, or correct [opt_in] of the policy"
        return (ScopeFinding(rule="P-OPT-1", path=flag.file, line=0, message=message, fix=fix),)
    line, value = here
    if value != flag.default:
        message = f"the default of {flag.name} is {value!r}, the policy requires {flag.default!r}"
        return (
            ScopeFinding(rule="P-OPT-1", path=flag.file, line=line, message=message, fix="the path must be opt-in: restore the default"),
        )
    before = _default_of(flag.name, change.text_at("base", flag.file) or "")
    if before is not None and before[1] != value:
        message = f"the default of {flag.name} changed from {before[1]!r} to {value!r}"
        return (ScopeFinding(rule="P-OPT-1", path=flag.file, line=line, message=message, fix="restore the default"),)
    return ()


_ENVIRONMENT = re.compile(r"""(?:environ(?:\.get)?\s*[\[(]\s*|getenv\s*\(\s*|setdefault\s*\(\s*)['"]([A-Za-z_][A-Za-z0-9_]*)['"]""")
_FLAG = re.compile(r"""add_argument\s*\(\s*['"](--?[A-Za-z][\w-]*)['"]|(?:typer\.Option|click\.option)\s*\([^)]*?['"](--[A-Za-z][\w-]*)""")


def interface(change: Change, policy: Policy) -> tuple[ScopeFinding, ...]:
    """P-OPT-2: environment variables read and command-line flags defined on added lines of product code (not tests)."""
    found = []
    for file in change.files:
        if not file.path.endswith((".py", ".cu", ".cpp", ".h", ".sh")) or matches(file.path, ("tests/**", "**/tests/**", "test/**")):
            continue
        if not _product(file.path, policy):
            continue
        for line, text in file.added:
            for kind, allowed, names in (
                ("environment variable", policy.interface.environment, _ENVIRONMENT.findall(text)),
                ("command-line flag", policy.interface.flags, [a or b for a, b in _FLAG.findall(text)]),
            ):
                for name in names:
                    if name not in allowed:
                        fix = "drop it, or list it under [interface] of the policy with the reason in the RFC"
                        found.append(ScopeFinding(rule="P-OPT-2", path=file.path, line=line, message=f"new {kind} {name}", fix=fix))
    return tuple(found)


def _product(path: str, policy: Policy) -> bool:
    """Product code is the isolated packages and everything outside the isolated folders; the suite's own tools may have flags."""
    inside_package = any(path.startswith(package.replace(".", "/") + "/") for package in policy.isolation.packages)
    return inside_package or not (matches(path, policy.isolation.paths) or matches(path, policy.isolation.free))


RULES = {"scope.isolation": isolation, "scope.imports": imports, "scope.default": default, "scope.interface": interface}


def judge_change(change: Change, policy: Policy) -> dict[str, tuple[ScopeFinding, ...]]:
    """All static scope rules; check name -> findings, empty where the rule holds."""
    return {name: rule(change, policy) for name, rule in RULES.items()}
