"""Turns raw GPU records (JSON lines from a machine that has only this checkout) into a published run: chained, closed, bound to digests.

A raw folder holds `*.jsonl` with one JSON object a line, and `digests.json` written there by `python -m validation.freshness.digests`.
Of each object: `case` or `op` names it; `op` (a launch or a folder of ops) binds it to that kernel alone, `ops` to those it ran where it
ran no whole step; `error` or `reasons` says that it did not measure; every number becomes a measurement under its path; the whole object is
kept in `details`.
"""

from __future__ import annotations

import ast
import datetime
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from validation.core import environment, jsonio
from validation.core.settings import PROJECT_ROOT
from validation.core.store import EvidenceStore, read_json
from validation.core.types import Case, Evidence, HarnessError, Measurement, Outcome, Run
from validation.freshness.digests import PACKAGE

DIGESTS_FILE = "digests.json"
UNITS = {
    "us": "us",
    "ms": "ms",
    "s": "s",
    "seconds": "s",
    "bytes": "bytes",
    "tokens": "tokens",
    "share": "share",
    "nats": "nats",
    "count": "count",
}
MAX_MEASUREMENTS = 200


def folder_of_launch(root: Path = PROJECT_ROOT) -> dict[str, str]:
    """Launch name -> folder of `ops`, read from the table in kernels.py without importing it; folders name themselves."""
    tree = ast.parse((root / PACKAGE / "kernels.py").read_text())
    modules = {
        alias.asname or alias.name: str(node.module).rsplit(".", 1)[-1]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{PACKAGE}.ops.")
        for alias in node.names
    }
    found = {name: name for name in modules.values() if (root / PACKAGE / "ops" / name).is_dir()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
                    found[str(key.value)] = modules.get(value.value.id, value.value.id)
    return found


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number below `value` with its dotted path; booleans are no numbers, text is not read."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from numbers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def unit_of(path: str) -> str:
    return UNITS.get(path.rsplit(".", 1)[-1].rsplit("_", 1)[-1], "1")


def evidence_of(line: Mapping[str, Any], stem: str, number: int, digests: Mapping[str, str], launches: Mapping[str, str]) -> Evidence:
    """One raw object as a record (not yet chained)."""
    named = [str(line["op"])] if line.get("op") in launches else [str(name) for name in line.get("ops", ())]
    folders = sorted({launches.get(name, name) for name in named})
    parts = [f"{kind}/{folder}" for folder in folders for kind in ("kernels", "contracts")] or ["kernels", "contracts"]
    missing = [name for name in (*parts, "config", "toolchain") if name not in digests]
    if missing:
        raise HarnessError(f"{DIGESTS_FILE}: got no digest of {missing}, needs all; write it with `python -m validation.freshness.digests`")
    reasons = [str(line["error"])] if line.get("error") else [str(reason) for reason in line.get("reasons", ())]
    body = {key: value for key, value in line.items() if key != "hardware"}
    return Evidence(
        id="",
        run="",
        check=f"published.{stem}",
        case=Case(subject=str(line.get("case") or line.get("op") or stem), params={"n": number}),
        outcome=Outcome.ERROR if reasons else Outcome.MEASURED,
        measurements=() if reasons else tuple(Measurement(name=p, value=v, unit=unit_of(p)) for p, v in numbers(body))[:MAX_MEASUREMENTS],
        fingerprints={name: digests[name] for name in (*parts, "config", "toolchain")},
        reasons=tuple(reasons),
        details=body,
        seconds=float(line.get("seconds") or 0.0),
    )


def import_raw(folder: Path, root: Path, renew: str) -> Path:
    """Make a published run of a raw folder; returns its folder. Raises HarnessError naming the file and line that cannot be used."""
    digests = read_json(folder / DIGESTS_FILE)
    if not isinstance(digests, dict):
        raise HarnessError(f"{DIGESTS_FILE}: got a {type(digests).__name__}, needs one object of digests")
    records: list[Evidence] = []
    hardware: dict[str, Any] = {}
    launches = folder_of_launch()
    for path in sorted(folder.glob("*.jsonl")):
        for number, text in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise ValueError("is no object")
                records.append(evidence_of(line, path.stem, number, digests, launches))
            except (ValueError, TypeError, RecursionError) as error:
                raise HarnessError(f"{path.name}:{number}: got {error}, needs one JSON object a line") from None
            hardware |= line["hardware"] if isinstance(line.get("hardware"), dict) else {}
    if not records:
        raise HarnessError(f"publish: got no record in {folder}, needs *.jsonl with at least one")
    newest = max(path.stat().st_mtime for path in folder.glob("*.jsonl"))
    return _store(records, hardware, digests, newest, root, renew)


def _store(records: list[Evidence], hardware: dict[str, Any], digests: dict[str, str], measured: float, root: Path, renew: str) -> Path:
    commit, dirty = environment.commit_of()
    when = datetime.datetime.fromtimestamp(measured, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    run = Run(
        id="",
        started_utc=when,
        argv=("fasttrack", "publish"),
        commit=commit,
        dirty=dirty,
        profile="gpu",
        config={"digests": digests, "renew": renew, "imported": True, "settings": {"candidate": "specialized"}},
        hardware=hardware,
        versions={},
    )
    stamp = when.replace("-", "").replace(":", "")
    content = jsonio.dumps([run, records], sort_keys=True).encode()
    run = jsonio.decode(Run, {**jsonio.plain(run), "id": f"R-{stamp}-{environment.sha256_hex(content)[:12]}"})
    store = EvidenceStore.create(root, run, {"cases": [], "absent_lanes": []}, durable=False)
    for record in records:
        store.append(record)
    store.close(environment.utc_now())
    return store.run_dir
