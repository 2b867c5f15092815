"""Where a key stands in a TOML file. `tomllib` keeps no positions, but it can say whether a piece of text is a whole statement: statements
are found by asking it, so no second reading of the TOML grammar is needed here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

MAX_STATEMENT_LINES = 400


class KeyLines:
    """1-based line of every key of a TOML document that `tomllib` accepts."""

    def __init__(self, text: str) -> None:
        self._line_of: dict[tuple[str, ...], int] = {}
        lines = text.splitlines()
        table: tuple[str, ...] = ()
        start = 0
        while start < len(lines):
            statement, stop = _statement(lines, start)
            if lines[start].lstrip().startswith("["):
                table = _deepest(statement)
                self._note(table, start + 1)
            else:
                for path in _paths(statement):
                    self._note((*table, *path), start + 1)
            start = stop

    def _note(self, path: tuple[str, ...], line: int) -> None:
        for depth in range(1, len(path) + 1):
            self._line_of.setdefault(path[:depth], line)

    def of(self, *path: str) -> int:
        """The line of a key, or of the nearest table around it; 1 for the document itself."""
        while path and path not in self._line_of:
            path = path[:-1]
        return self._line_of.get(path, 1)


def _statement(lines: list[str], start: int) -> tuple[Mapping[str, Any], int]:
    """The statement that begins at line `start`, parsed, and the line after it."""
    for stop in range(start + 1, min(len(lines), start + MAX_STATEMENT_LINES) + 1):
        try:
            return tomllib.loads("\n".join(lines[start:stop])), stop
        except tomllib.TOMLDecodeError:
            continue
    return {}, start + 1


def _paths(table: Mapping[str, Any], before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in table.items():
        found.append((*before, key))
        if isinstance(value, Mapping):
            found += _paths(value, (*before, key))
    return found


def _deepest(table: Any) -> tuple[str, ...]:
    """The path of a header, which parses to one key within the other."""
    path: tuple[str, ...] = ()
    while table:
        inner = table[0] if isinstance(table, list) else table
        if not isinstance(inner, Mapping) or not inner:
            break
        key, table = next(iter(inner.items()))
        path = (*path, key)
    return path
