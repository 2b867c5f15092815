"""Measures what concerns the servers themselves: identity, path, health."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evals.serving.counters import Growth, acceptance_of, acceptance_tables
from evals.serving.identity import compare, refusals
from evals.serving.launch import StartFailed
from evals.serving.names import IDENTITY_FIELDS, SIDES
from evals.serving.path_proof import probe, proof_table, shown_by_stock, signs_of
from evals.serving.targets import Link, Live
from validation.core.types import Measurement
from validation.core.worker import Refused

Found = tuple[tuple[Measurement, ...], Mapping[str, Any]]
LOG_ARTIFACT_BYTES = 4 << 20


def _count(name: str, value: float) -> Measurement:
    return Measurement(name=name, value=float(value), unit="count")


def measure_identity(targets: Mapping[str, Any]) -> Found:
    """Facts of both sides beside each other. Raises Refused where they differ in what the file does not accept."""
    link: Link = targets["stock"].link
    facts = link.facts()
    accepted = link.config.candidate.accept_differences
    comparison = compare(facts["stock"], facts["candidate"], accepted)
    for difference in comparison.differences:
        link.say(f"serving: {difference.words}{' (accepted)' if difference.accepted else ''}")
    if comparison.refused:
        raise Refused(refusals(comparison))
    compared = [f for f in IDENTITY_FIELDS if facts["stock"].get(f) and facts["candidate"].get(f)]
    measured = [_count("unaccepted_differences", 0), _count("accepted_differences", len(comparison.differences))]
    measured += [_count("facts_compared", len(compared)), _count("facts_not_told", len(comparison.open_facts))]
    if not comparison.open_facts:  # else the question is open: nobody says whether the sides are alike
        measured.append(Measurement(name="all_facts_told", value=1.0, unit="1"))
    rows = [
        [f, facts["stock"].get(f, "") or "not told", facts["candidate"].get(f, "") or "not told", _word(f, comparison)]
        for f in IDENTITY_FIELDS
    ]
    table = {"title": "The two servers", "columns": ["fact", "stock", "candidate", ""], "rows": rows}
    told = [f"{fact} is not told by both servers; say it in [baseline] and [candidate]" for fact in comparison.open_facts]
    return tuple(measured), {"tables": [{**table, "note": "; ".join(told)}], "reasons": told}


def _word(fact: str, comparison: Any) -> str:
    if fact in comparison.open_facts:
        return "open"
    return "differs, accepted" if any(d.fact == fact for d in comparison.differences) else "same"


def measure_path(concurrency: int, targets: Mapping[str, Any]) -> Found:
    """Signs of the candidate's path on both sides. Raises Refused where nothing was to be looked for, or nothing was found."""
    link: Link = targets["stock"].link
    link.require_alike()
    wanted = link.config.candidate
    if not (wanted.proof_log or wanted.proof_metrics or wanted.proof_kernels):
        raise Refused(
            ("path: got no proof_log, proof_metrics or proof_kernels in [candidate], needs one: nothing shows which path decodes",)
        )
    # The candidate first: where the sides take turns, it is the one that the suites left up.
    grown = {role: _probed(link, role, concurrency) for role in reversed(SIDES)}
    logs = {role: told["log"] for role, told in link.state().items()}
    signs = {role: signs_of(link.config.side(role), Path(logs[role]) if logs[role] else None, grown[role], wanted) for role in SIDES}
    _keep_logs({role: Path(log) for role, log in logs.items() if log})
    rows = [sign.row(role) for role in ("candidate", "stock") for sign in signs[role]]
    found = sum(sign.count for sign in signs["candidate"])
    if not found:
        raise Refused(tuple(f"path: {sign.way}: {sign.reason or 'nothing found'} ({sign.where})" for sign in signs["candidate"]))
    details: dict[str, Any] = {"tables": [proof_table(rows)], "acceptance": _acceptance(grown)}
    details["tables"] += acceptance_tables(details["acceptance"])
    measured = [_count("signs_of_the_path", found), _count("ways_that_found_it", sum(s.count > 0 for s in signs["candidate"]))]
    shared = shown_by_stock(signs["candidate"], signs["stock"])
    if shared is not None:
        measured.append(_count("signs_on_stock", shared))
    measured += [
        Measurement(name=f"acceptance_length_{role}", value=told["length"], unit="tokens") for role, told in details["acceptance"].items()
    ]
    return tuple(measured), details


# Probes of this worker by side, start and concurrency: with one set of GPUs each side is visited once for all of them.
_PROBES: dict[tuple[str, int], Growth | str] = {}


def _probed(link: Link, role: str, concurrency: int) -> Growth | str:
    if (role, concurrency) not in _PROBES:
        try:
            live: Live = link.up(role)
        except StartFailed as error:
            raise Refused((str(error),)) from error
        for one in sorted({*link.config.evals.concurrency, concurrency}):
            _PROBES[role, one] = probe(live.base_urls, link.config.side(role), one)
    return _PROBES[role, concurrency]


def _acceptance(grown: Mapping[str, Growth | str]) -> dict[str, Any]:
    found = {role: acceptance_of(one) for role, one in grown.items() if isinstance(one, Growth)}
    return {role: told.plain() for role, told in found.items() if told is not None}


def _keep_logs(logs: Mapping[str, Path]) -> None:
    """The beginning of each log, where start-up says what was built, as an artifact of the run."""
    scratch = os.environ.get("FASTTRACK_SCRATCH")
    for role, log in logs.items():
        if scratch and log.is_file():
            folder = Path(scratch) / "artifacts"
            folder.mkdir(parents=True, exist_ok=True)
            with log.open("rb") as source, (folder / f"{role}.log").open("wb") as kept:
                shutil.copyfileobj(_Head(source, LOG_ARTIFACT_BYTES), kept)


class _Head:
    """The first bytes of a file, for `copyfileobj`."""

    def __init__(self, file: Any, left: int) -> None:
        self._file, self._left = file, left

    def read(self, size: int = -1) -> bytes:
        block: bytes = self._file.read(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(block)
        return block


def measure_health(targets: Mapping[str, Any]) -> Found:
    """Deaths and failed starts so far in this run, and whether each side has answered."""
    state = targets["stock"].link.state()
    answered = sum(bool(told["facts"]) for told in state.values())
    deaths = {role: len(state[role]["deaths"]) for role in SIDES}
    # What never answered has not shown that it stays up: open, not violated.
    both = answered == len(SIDES)
    measured = [_count("sides_that_answered" if both else "sides_answering", answered)]
    if both or deaths["candidate"]:
        measured.append(_count("candidate_deaths", deaths["candidate"]))
    measured += [_count(f"{role}_starts", state[role]["starts"]) for role in SIDES]
    measured += [_count(f"{role}_failed_starts", len(state[role]["failed_starts"])) for role in SIDES]
    # A stock server that dies says nothing about the candidate: open, not violated.
    measured.append(_count("stock_deaths" if both and not deaths["stock"] else "deaths_of_stock", deaths["stock"]))
    rows = [[role, kind, words] for role in SIDES for kind in ("deaths", "failed_starts") for words in state[role][kind]]
    table = {"title": "What happened to the servers", "columns": ["side", "what", "how"], "rows": rows}
    return tuple(measured), {"tables": [table] if rows else []}
