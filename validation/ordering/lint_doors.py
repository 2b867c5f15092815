"""Reads CuTe DSL source for its inline-PTX doors: functions through which PTX text enters a kernel, and what each call declares.

A door is `llvm.inline_asm`, or any function whose parameters flow into a door's text, effect flag or memory clobber (`asm(code, ...,
effects=...)`, `emit(code, outputs, operands, memory=...)`). Doors are found to a fixpoint over all files given, by function name.
Nothing is executed or imported: only the syntax tree is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CLOBBER = "~{memory}"
HOLE = "?"  # stands for whatever an f-string inserts
WEIGHT_ROLE = "weight"


@dataclass(frozen=True)
class Value:
    """A constant, a parameter of the enclosing function, or unknown (both None)."""

    constant: str | bool | None = None
    parameter: str = ""


UNKNOWN = Value()


@dataclass(frozen=True)
class Door:
    """How a call of `name` says its text, whether it has side effects and whether it clobbers memory."""

    name: str
    parameters: tuple[str, ...]
    text: Value
    effects: Value
    clobber: Value
    defaults: Mapping[str, Value] = field(default_factory=dict)


INLINE_ASM = Door(
    name="inline_asm",
    parameters=("res", "operands_", "asm_string", "constraints"),
    text=Value(parameter="asm_string"),
    effects=Value(parameter="has_side_effects"),
    clobber=Value(parameter="constraints"),
    defaults={"has_side_effects": Value(constant=False)},  # llvm.inline_asm without the flag is free of side effects
)


@dataclass(frozen=True, eq=False)
class Function:
    """One function of a file. `qualname` is unique in its file; methods drop `self` from their parameters."""

    name: str
    qualname: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    path: Path
    parameters: tuple[str, ...]
    pointers: frozenset[str]  # parameters annotated as tensors or pointers
    kernel: bool
    guarded: frozenset[str]  # names on which `.require("weight")` is called: a role guard at trace time


@dataclass(frozen=True, eq=False)
class Site:
    """A call of a door, with what it declares as seen from the enclosing function (None: module level)."""

    call: ast.Call
    function: Function | None
    path: Path
    text: Value
    effects: Value
    clobber: Value


class Source:
    """One parsed file. Raises SyntaxError and UnicodeDecodeError as Python does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        self.constants = _module_constants(self.tree)
        self.functions = list(_functions(self.tree, path, self.constants))

    def calls(self) -> Iterator[tuple[ast.Call, Function | None]]:
        """Every call with the innermost function around it."""
        owners: dict[int, Function] = {}
        for function in self.functions:  # outer functions come first, inner ones overwrite
            for node in ast.walk(function.node):
                owners[id(node)] = function
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield node, owners.get(id(node))


def called_name(call: ast.Call) -> str:
    """`f` of `f(...)` and of `a.b.f(...)`; "" for anything else."""
    target = call.func
    if isinstance(target, ast.Attribute):
        return target.attr
    return target.id if isinstance(target, ast.Name) else ""


def argument(call: ast.Call, parameters: tuple[str, ...], wanted: str) -> ast.expr | None:
    """The expression a call passes for parameter `wanted`, None when it passes none or unpacks its arguments."""
    for keyword in call.keywords:
        if keyword.arg == wanted:
            return keyword.value
    if wanted in parameters and not any(isinstance(item, ast.Starred) for item in call.args):
        position = parameters.index(wanted)
        if position < len(call.args):
            return call.args[position]
    return None


def find_sites(sources: Iterable[Source]) -> list[Site]:
    """Every call of every door in these files, wrappers resolved to a fixpoint."""
    files = list(sources)
    doors = {INLINE_ASM.name: INLINE_ASM}
    while True:
        sites = [site for source in files for site in _sites(source, doors)]
        grown = dict(doors)
        for site in sites:
            door = _door_of(site)
            if door is not None and door.name not in grown:
                grown[door.name] = door
        if len(grown) == len(doors):
            return sites
        doors = grown


def _sites(source: Source, doors: Mapping[str, Door]) -> Iterator[Site]:
    for call, function in source.calls():
        door = doors.get(called_name(call))
        if door is None or (function is not None and function.name == door.name):
            continue
        text = _resolve(door.text, door, call, function, source)
        effects = _resolve(door.effects, door, call, function, source)
        clobber = _resolve(door.clobber, door, call, function, source)
        if isinstance(clobber.constant, str):
            clobber = Value(constant=CLOBBER in clobber.constant)
        elif door is INLINE_ASM and not clobber.parameter:
            clobber = _clobber(function)
        yield Site(call=call, function=function, path=source.path, text=text, effects=effects, clobber=clobber)


def _resolve(value: Value, door: Door, call: ast.Call, function: Function | None, source: Source) -> Value:
    if not value.parameter:
        return value
    given = argument(call, door.parameters, value.parameter)
    if given is None:
        return door.defaults.get(value.parameter, UNKNOWN)
    return evaluate(given, function, source.constants)


def _clobber(function: Function | None) -> Value:
    """Whether a constraint string built in this function holds the memory clobber; follows one `if parameter:` around it."""
    if function is None:
        return UNKNOWN
    for guard, body in _guards(function.node):
        if _mentions_clobber(body):
            return Value(parameter=guard) if guard in function.parameters else UNKNOWN
    return Value(constant=_mentions_clobber([function.node]))


def _guards(node: ast.AST) -> Iterator[tuple[str, list[ast.AST]]]:
    for item in ast.walk(node):
        if isinstance(item, ast.If) and isinstance(item.test, ast.Name):
            yield item.test.id, list(item.body)
        elif isinstance(item, ast.IfExp) and isinstance(item.test, ast.Name):
            yield item.test.id, [item.body]


def _mentions_clobber(nodes: Iterable[ast.AST]) -> bool:
    return any(
        isinstance(item, ast.Constant) and isinstance(item.value, str) and CLOBBER in item.value
        for node in nodes
        for item in ast.walk(node)
    )


def _door_of(site: Site) -> Door | None:
    """The wrapper this call makes of its function, when a parameter of it decides anything."""
    function = site.function
    if function is None or not any(value.parameter for value in (site.text, site.effects, site.clobber)):
        return None
    arguments = function.node.args
    defaults: dict[str, Value] = {}
    positional = [*arguments.posonlyargs, *arguments.args]
    for name, default in zip(reversed(positional), reversed(arguments.defaults), strict=False):
        defaults[name.arg] = evaluate(default, None, {})
    for name, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if given is not None:
            defaults[name.arg] = evaluate(given, None, {})
    return Door(
        name=function.name, parameters=function.parameters, text=site.text, effects=site.effects, clobber=site.clobber, defaults=defaults
    )


def evaluate(node: ast.expr, function: Function | None, constants: Mapping[str, ast.expr]) -> Value:
    """Fold an expression to a constant or a parameter. Local names assigned once are followed."""
    text = fold_text(node, function, constants)
    if text is not None:
        return Value(constant=text)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return Value(constant=node.value)
    if isinstance(node, ast.Name):
        if function is not None and node.id in function.parameters:
            return Value(parameter=node.id)
        if node.id in constants:
            return evaluate(constants[node.id], None, {})
    return UNKNOWN


def fold_text(node: ast.expr, function: Function | None, constants: Mapping[str, ast.expr]) -> str | None:
    """The string an expression builds, with HOLE for inserted values; None when it is no string or wholly unknown."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = fold_text(node.left, function, constants), fold_text(node.right, function, constants)
        return None if left is None and right is None else (left or HOLE) + (right or HOLE)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return fold_text(node.left, function, constants)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("format", "replace", "strip"):
        return fold_text(node.func.value, function, constants)
    if isinstance(node, ast.Name):
        given = _local(node.id, function) if function is not None else None
        given = given if given is not None else constants.get(node.id)
        return None if given is None or given is node else fold_text(given, None, constants)
    return None


def _local(name: str, function: Function) -> ast.expr | None:
    found = [
        item.value
        for item in ast.walk(function.node)
        if isinstance(item, ast.Assign) and any(isinstance(target, ast.Name) and target.id == name for target in item.targets)
    ]
    return found[0] if len(found) == 1 else None


def _module_constants(tree: ast.Module) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for item in tree.body:
        if isinstance(item, ast.Assign) and len(item.targets) == 1 and isinstance(item.targets[0], ast.Name):
            found[item.targets[0].id] = item.value
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
            found[item.target.id] = item.value
    return found


def _functions(tree: ast.AST, path: Path, constants: Mapping[str, ast.expr], prefix: str = "") -> Iterator[Function]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            qualname = f"{prefix}{node.name}"
            yield _function(node, qualname, path, constants)
            yield from _functions(node, path, constants, f"{qualname}.")
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, path, constants, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, path, constants, prefix)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, qualname: str, path: Path, constants: Mapping[str, ast.expr]) -> Function:
    names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    if names and names[0].arg in ("self", "cls"):
        names = names[1:]
    pointers = {item.arg for item in names if item.annotation is not None and _is_pointer(ast.unparse(item.annotation))}
    decorators = {ast.unparse(item).partition("(")[0].rpartition(".")[2] for item in node.decorator_list}
    guarded = set()
    for item in ast.walk(node):
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute) and item.func.attr == "require":
            roles = [evaluate(given, None, constants).constant for given in item.args]
            if roles == [WEIGHT_ROLE] and isinstance(item.func.value, ast.Name):
                guarded.add(item.func.value.id)
    return Function(
        name=node.name, qualname=qualname, node=node, path=path, parameters=tuple(item.arg for item in names),
        pointers=frozenset(pointers), kernel="kernel" in decorators, guarded=frozenset(guarded),
    )  # fmt: skip


def _is_pointer(annotation: str) -> bool:
    return any(word in annotation for word in ("Tensor", "Pointer", "Global", "CopyAtom"))
