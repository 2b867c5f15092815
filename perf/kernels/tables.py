"""The tables of perf/kernels/README.md out of the published records: `python -m perf.kernels.tables [--write]`.

A table stands between `<!-- NAME -->` and `<!-- end -->`; every row names the record its numbers come from. Without --write the exit code
is 1 when the file says something else than the newest records (seconds, no GPU).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from validation.core.store import read_evidence, write_atomically
from validation.core.types import Evidence, HarnessError
from validation.freshness.published import PUBLISHED, published_runs

README = Path(__file__).with_name("README.md")
BLOCK = re.compile(r"<!-- (?P<name>[a-z]+) -->\n(?P<table>.*?)<!-- end -->", re.DOTALL)
CASE = re.compile(r"k3-(?:step-)?tp(?P<tp>\d+)-r(?P<rows>\d+)-(?:q(?P<q>\d+)(?:-process\d+)?|(?P<launch>\w+))$")
Newest = Mapping[tuple[str, str], Evidence]


def all_records(root: Path = PUBLISHED) -> Iterable[Evidence]:
    """Every published record, oldest run first."""
    return (record for run in published_runs(root) for record in read_evidence(run))


def newest(root: Path = PUBLISHED) -> Newest:
    """(check, case) -> its newest published record that measured something."""
    return {(record.check, record.case.subject): record for record in all_records(root) if record.outcome == "measured"}


def table(header: str, rows: Iterable[str]) -> str:
    """A Markdown table; `header` and every row are cells with " | " between them."""
    lines = [header, " | ".join("---" for _ in header.split(" | ")), *rows]
    return "".join(f"| {line} |\n" for line in lines)


def cases(records: Newest, check: str) -> list[tuple[re.Match[str], Evidence]]:
    """Records of one check with their parsed case, by TP, tokens a request and rows; the plan's order within."""
    found = [(match, record) for (name, case), record in records.items() if name == check and (match := CASE.match(case))]
    return sorted(found, key=lambda pair: (int(pair[0]["tp"]), int(pair[0]["q"] or 1), int(pair[0]["rows"])))


def ratio(record: Evidence, name: str, digits: int = 3) -> str:
    """`value (low–high)`, or a dash where the record has none."""
    value = {part: record.details.get(name + part) for part in ("", "_low", "_high")}
    if None in value.values():
        return "–"
    return f"{value['']:.{digits}f} ({value['_low']:.{digits}f}–{value['_high']:.{digits}f})"


def layers(records: Newest) -> str:
    head = "share | rows | tokens a request | fused | stock | stock / fused (95 %) | times the floor"
    rows = []
    for case, record in cases(records, "published.kernel_layers"):
        d = record.details
        times = f"{d['fused_us']:.1f} | {d['stock_us']:.1f} | {ratio(record, 'speedup', 2)} | {d['over_floor']:.2f}"
        off = " | ".join(ratio(record, f"{name}_over_fused") for name in ("without_pdl", "without_side_stream"))
        rows.append(f"TP{case['tp']} | {case['rows']} | {case['q']} | {times} | {off} | {record.id}")
    return table(head + " | PDL off / on | side stream off / on | evidence", rows)


def steps(records: Newest) -> str:
    rows = []
    for case, record in cases(records, "published.kernel_steps"):
        d = record.details
        stock = f"{d['stock_us'] / 1e3:.2f}" if "stock_us" in d else "–"
        times = f"{d['fused_us'] / 1e3:.2f} | {stock} | {ratio(record, 'speedup', 2)} | {d.get('stock_timed', '–')} | {d['over_floor']:.2f}"
        rows.append(f"{case['rows']} | {case['q']} | {times} | {ratio(record, 'without_pdl_over_fused')} | {record.id}")
    head = "rows | tokens a request | fused | stock | stock / fused (95 %) | stock timed | times the floor | PDL off / on | evidence"
    return table(head, rows)


def placements(records: Newest) -> str:
    found: dict[str, list[Evidence]] = {}
    for case, record in cases(records, "published.kernel_placements"):
        found.setdefault(case["tp"], []).append(record)

    def listed(each: list[Evidence], name: str, digits: int) -> str:
        return ", ".join(f"{record.details[name]:.{digits}f}" for record in each)

    rows = []
    for tp, each in found.items():
        times = f"{listed(each, 'fused_us', 1)} | {listed(each, 'stock_us', 1)} | {listed(each, 'speedup', 2)}"
        rows.append(f"TP{tp} | {times} | {', '.join(record.id for record in each)}")
    return table("share | fused | stock | stock / fused | evidence", rows)


def launches(records: Newest) -> str:
    """One row a launch of one share: microseconds beside its floor, and achieved bytes a second over the copy rate, by row count."""
    found: dict[tuple[str, str], dict[str, Evidence]] = {}
    for case, record in cases(records, "published.kernel_launches"):
        found.setdefault((case["tp"], case["launch"]), {})[case["rows"]] = record
    rows = sorted({int(n) for row in found.values() for n in row})

    def cell(record: Evidence | None) -> str:
        if record is None:
            return "–"
        d = record.details
        return f"{d['launch_us']:.1f} / {d['floor_us']:.1f}, {100 * d['fraction_of_copy_rate']:.0f} % ({record.id})"

    return table(
        "share | launch | " + " | ".join(f"{n} row{'s' * (n > 1)}" for n in rows),
        (f"TP{tp} | {launch} | " + " | ".join(cell(row.get(str(n))) for n in rows) for (tp, launch), row in found.items()),
    )


TABLES: Mapping[str, Callable[[Newest], str]] = {"layers": layers, "steps": steps, "placements": placements, "launches": launches}


def renewed(text: str, records: Newest) -> str:
    """`text` with every table made again. Raises HarnessError for a table that nobody makes or that has no end."""
    names = re.findall(r"<!-- ([a-z]+) -->", text)
    wanted = [name for name in names if name != "end"]
    unknown = [name for name in wanted if name not in TABLES]
    if unknown or len(BLOCK.findall(text)) != len(wanted):
        raise HarnessError(f"tables: got {names} in the text, needs one end behind each of {list(TABLES)}")
    return BLOCK.sub(lambda m: f"<!-- {m['name']} -->\n{TABLES[m['name']](records)}<!-- end -->", text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.kernels.tables", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="renew the file")
    given = parser.parse_args(argv)
    text = README.read_text()
    now = renewed(text, newest())
    if given.write:
        write_atomically(README, now.encode())
        return 0
    if now != text:
        print(
            "tables: perf/kernels/README.md differs from the published records; run python -m perf.kernels.tables --write", file=sys.stderr
        )
    return int(now != text)


if __name__ == "__main__":
    sys.exit(main())
