"""The launch-graph part of the corpus: steps written down as TOML or captured-graph JSON, each with the races that must be found."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from validation.core.types import HarnessError
from validation.ordering.graph_order import Race

Expected = tuple[str, str, str, str]  # kind, buffer, first launch, second launch
BAKED = "baked epoch"


@dataclass(frozen=True, kw_only=True)
class GraphCase:
    name: str
    title: str
    path: Path
    faults: tuple[str, ...]
    expected: frozenset[Expected]

    def races(self, races: Iterable[Race], baked: Iterable[str]) -> frozenset[Expected]:
        """What was found, in the terms of the expectation: without step and rank numbers."""
        found = {(r.kind, _bare(r.first.copy), _bare(r.first.node.id), _bare(r.second.node.id)) for r in races}
        takers = {row for row in self.expected if row[0] == BAKED}
        found |= {(BAKED, name, "", next((row[3] for row in takers if row[1] == name), "")) for name in baked}
        return frozenset(found)


def _bare(name: str) -> str:
    return re.split("[#@]", name)[0]


def load_graph_cases(root: Path) -> tuple[GraphCase, ...]:
    """Every case below `root`/graph, by name. Raises HarnessError for a file without title or expectations."""
    cases = []
    for path in sorted((root / "graph").glob("*")):
        if path.suffix not in (".toml", ".json"):
            continue
        try:
            table = json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
            expected = frozenset((row["kind"], row["buffer"], row["first"], row["second"]) for row in table.get("expect", ()))
            cases.append(
                GraphCase(name=path.stem, title=table["title"], path=path, faults=tuple(table.get("faults", ())), expected=expected)
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HarnessError(f"corpus graph {path.name}: got {type(error).__name__}: {error}, needs title and expect") from error
    return tuple(cases)
