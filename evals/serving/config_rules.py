"""What belongs together in the file, and what contradicts what. Tables come as the fields that were right by themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from evals.serving.config_tables import Complain
from evals.serving.names import NANO_SUITES, REAL_SUITES

LEAST_WAVES = 8


def check_tables(tables: Mapping[str, dict[str, Any]], complain: Complain) -> None:
    for table in ("baseline", "candidate"):
        if table in tables:
            _check_side(tables[table], table, complain)
    if "evals" in tables:
        _check_evals(tables["evals"], complain)
    if "numerics" in tables:
        _check_rising(tables["numerics"].get("bins", ()), ("numerics", "bins"), complain)
    waves = tables.get("perf", {}).get("waves", 0)
    if waves and waves < LEAST_WAVES:
        complain(("perf", "waves"), f"got {waves}, needs at least {LEAST_WAVES} for an interval, or 0 to time no requests")
    if {"baseline", "candidate"} <= tables.keys():
        _check_both(tables, complain)


def _check_side(side: dict[str, Any], table: str, complain: Complain) -> None:
    if side.get("base_url") and side.get("command"):
        complain((table, "command"), "got base_url and command, needs one: a server that runs, or one to start")
    if "base_url" not in side and "command" not in side:
        complain((table,), "got neither base_url nor command, needs one: a server that runs, or one to start")
    for url in side.get("base_url", ()):
        if not _is_address(url):
            complain((table, "base_url"), f"got {url!r}, needs http(s)://host[:port]")
    if len(set(side.get("base_url", ()))) != len(side.get("base_url", ())):
        complain((table, "base_url"), "got one address twice, needs each replica once")
    if "base_url" in side:
        for key in ("env", "port", "cwd"):
            if key in side:
                complain((table, key), "belongs to command, but base_url names a server that runs already")
    if side.get("command") and side.get("log"):
        complain((table, "log"), "belongs to base_url; the log of a started server is kept by itself")
    _check_command(side, table, complain)
    for key in ("proof_log", "proof_metrics", "proof_kernels"):
        try:
            re.compile(side.get(key, ""))
        except re.error as error:
            complain((table, key), f"got {side[key]!r}, needs a regular expression ({error})")
    if bool(side.get("proof_trace")) != bool(side.get("proof_kernels")):
        complain((table, "proof_trace" if side.get("proof_trace") else "proof_kernels"), "needs proof_trace and proof_kernels together")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port  # ValueError above 65535, as for an unclosed [
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not (parts.query or parts.fragment)


def _check_command(side: dict[str, Any], table: str, complain: Complain) -> None:
    command = side.get("command")
    if "command" not in side or "base_url" in side:
        return
    if not command or not all(command) or (len(command) == 1 and " " in command[0]):
        complain(
            (table, "command"),
            f'got {list(command or ())}, needs a list of words, such as ["vllm", "serve", "MODEL", "--port", "{{port}}"]',
        )
        return
    words = [*command, *side.get("env", {}).values()]
    if not side.get("port") and not any("{port}" in word for word in words):
        complain((table, "command"), "got neither {port} in the command nor a port, needs one: the suite must know where to ask")


def _check_evals(evals: dict[str, Any], complain: Complain) -> None:
    suites = evals.get("suites", REAL_SUITES)
    where = ("evals", "suites")
    if len(set(suites)) != len(suites):
        complain(where, f"got {list(suites)}, needs each suite once")
    if set(suites) & set(REAL_SUITES) and set(suites) & set(NANO_SUITES):
        complain(where, "got suites of real models and of nano-K3, needs one kind: no model can do both")
    _check_rising(evals.get("concurrency", ()), ("evals", "concurrency"), complain)
    if evals.get("max_repeats") and evals["max_repeats"] < evals.get("repeats", 0):
        complain(("evals", "max_repeats"), f"got {evals['max_repeats']} below repeats {evals['repeats']}, needs at least as many")
    sampling = evals.get("sampling", "task")
    if sampling != "card":
        for key in ("temperature", "top_p", "top_k"):
            if key in evals:
                complain(("evals", key), f'has no effect with sampling = "{sampling}"; set sampling = "card" or leave it out')
    if sampling == "greedy":
        tables: list[tuple[tuple[str, ...], dict[str, Any]]] = [(("evals",), evals)]
        tables += [(("evals", "per_suite", suite), own) for suite, own in evals.get("per_suite", {}).items()]
        for path, table in tables:
            for key in ("repeats", "max_repeats"):
                if table.get(key, 1) > 1:
                    complain((*path, key), f"got {table[key]} with greedy decoding, needs 1: repeats would be copies")
    for suite in evals.get("data", {}):
        if suite not in suites:
            complain(("evals", "data", suite), f"got a suite that is not asked for, needs one of {list(suites)}")
    for suite, values in evals.get("per_suite", {}).items():
        if suite not in suites:
            complain(("evals", "per_suite", suite), f"got a suite that is not asked for, needs one of {list(suites)}")
        for key in values:
            if key not in ("rows", "repeats", "max_repeats", "max_new_tokens"):
                complain(("evals", "per_suite", suite, key), "got an unknown key, needs rows, repeats, max_repeats or max_new_tokens")


def _check_rising(values: tuple[int, ...], where: tuple[str, ...], complain: Complain) -> None:
    if list(values) != sorted(set(values)):
        complain(where, f"got {list(values)}, needs rising numbers, each once")


def _check_both(tables: Mapping[str, dict[str, Any]], complain: Complain) -> None:
    stock, candidate = tables["baseline"], tables["candidate"]
    shared = set(stock.get("base_url", ())) & set(candidate.get("base_url", ()))
    if shared:
        complain(("candidate", "base_url"), f"got {sorted(shared)} on both sides, needs two deployments")
    together = tables.get("servers", {}).get("together", False)
    if together and stock.get("port") and stock.get("port") == candidate.get("port"):
        complain(("candidate", "port"), f"got {candidate['port']} on both sides, needs two ports when both run together")
    if "accept_differences" in stock:
        complain(("baseline", "accept_differences"), "belongs to [candidate]: it says where the candidate may differ from the baseline")
    perf = tables.get("perf", {})
    if perf.get("bench") and not (perf.get("baseline_cell") and perf.get("candidate_cell")):
        complain(("perf", "bench"), "got no baseline_cell and candidate_cell, needs both: the result does not say what was measured")
    for side in ("baseline", "candidate"):
        if perf.get("bench") and perf.get(f"{side}_result"):
            complain(("perf", f"{side}_result"), "got bench and a result, needs one: a command to run or a file that is there")
        if perf.get(f"{side}_result") and not perf.get(f"{side}_cell"):
            complain(("perf", f"{side}_result"), f"got no {side}_cell, needs one: the file does not say what was measured")
