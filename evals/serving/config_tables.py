"""One table of the file as fields of a frozen dataclass: types, ranges, unknown keys. What is wrong is complained about, all at once."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MOST_NUMBER = 1e15  # whole numbers up to it are exact everywhere, and no time or count comes near it
Complain = Callable[[tuple[str, ...], str], None]  # where (table, key, ...), what


def needs(*, least: float | None = None, most: float | None = None, choices: tuple[Any, ...] = (), some: bool = False) -> dict[str, Any]:
    """Metadata of a field: what each of its values must be, and whether there must be one."""
    return {"least": least, "most": most, "choices": choices, "some": some}


def build(kind: Any, value: Mapping[str, Any], where: tuple[str, ...], complain: Complain) -> dict[str, Any]:
    """The fields that are right; the others are complained about."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    made = {}
    for key, item in value.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"needs one of {sorted(fields)}"
            complain((*where, key), f"got an unknown key; {hint}")
            continue
        try:
            made[key] = _convert(hints[key], item)
        except TypeError as error:
            complain((*where, key), str(error))
            continue
        for problem in _out_of_range(made[key], fields[key].metadata):
            complain((*where, key), problem)
    for f in fields.values():
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in value:
            complain(where, f"got no {f.name}, needs one")
    return made


def _convert(hint: Any, item: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert(next(a for a in arguments if a is not type(None)), item)
    if origin is tuple:
        if arguments[0] is str and isinstance(item, str):
            return (item,)
        if not isinstance(item, list):
            raise TypeError(f"got {item!r}, needs a list")
        return tuple(_convert(arguments[0], part) for part in item)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(item, Mapping):
            raise TypeError(f"got {item!r}, needs a table")
        return {key: _convert(arguments[1], part) for key, part in item.items()}
    if hint is float and type(item) is int:
        return float(item)
    if type(item) is not hint:
        words = {str: "text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
        raise TypeError(f"got {item!r}, needs {words.get(hint, hint)}")
    return item


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    else:
        yield value


def _out_of_range(value: Any, needs: Mapping[str, Any]) -> list[str]:
    found = [f"got {'an empty list' if isinstance(value, tuple) else repr(value)}, needs some"] if needs.get("some") and not value else []
    for item in _leaves(value):
        if isinstance(item, int | float) and not abs(item) <= MOST_NUMBER:
            found.append(f"got {item}, needs a number up to {MOST_NUMBER:g}")
            continue
        if isinstance(item, str) and "\0" in item:
            found.append(f"got {item!r}, needs text without NUL")
            continue
        if needs.get("choices") and item not in needs["choices"]:
            found.append(f"got {item!r}, needs one of {list(needs['choices'])}")
        if needs.get("least") is not None and not item >= needs["least"]:
            found.append(f"got {item}, needs at least {needs['least']}")
        if needs.get("most") is not None and not item <= needs["most"]:
            found.append(f"got {item}, needs at most {needs['most']}")
    return found
