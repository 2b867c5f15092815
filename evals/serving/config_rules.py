"""What belongs together in the file, and what contradicts what. Tables come as the fields that were right by themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from evals.serving.config_tables import Complain
from evals.serving.names import NANO_SUITES, REAL_SUITES
from validation.core.settings import PROJECT_ROOT
from validation.core.types import HarnessError
from validation.policy import load_policy

LEAST_WAVES = 8


def check_tables(tables: Mapping[str, dict[str, Any]], complain: Complain) -> None:
    for table in ("baseline", "candidate"):
        if table in tables:
            _check_side(tables[table], table, complain)
    if "evals" in tables:
        _check_evals(tables["evals"], complain)
    if "numerics" in tables:
        _check_numerics(tables["numerics"], complain)
    _check_perf(tables.get("perf", {}), complain)
    _check_margins(tables.get("gate", {}).get("margin", {}), complain)
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
        elif "@" in urlsplit(url).netloc:
            complain((table, "base_url"), "got an address with a user or key in it, needs none in a file; set api_key_env")
    if len(_servers(side)) != len(side.get("base_url", ())):
        complain((table, "base_url"), "got one address twice, needs each replica once")
    if "base_url" in side:
        for key in ("env", "port", "cwd"):
            if key in side:
                complain((table, key), "belongs to command, but base_url names a server that runs already")
    if side.get("command") and side.get("log"):
        complain((table, "log"), "belongs to base_url; the log of a started server is kept by itself")
    _check_command(side, table, complain)
    _check_path(side, "tokenizer", table, complain)
    _check_path(side, "cwd", table, complain)
    for key in ("proof_log", "proof_metrics", "proof_kernels"):
        try:
            re.compile(side.get(key, ""))
        except re.error as error:
            complain((table, key), f"got {side[key]!r}, needs a regular expression ({error})")
    if bool(side.get("proof_trace")) != bool(side.get("proof_kernels")):
        complain((table, "proof_trace" if side.get("proof_trace") else "proof_kernels"), "needs proof_trace and proof_kernels together")


def _check_path(values: Mapping[str, Any], key: str, table: str, complain: Complain) -> None:
    """What is named must be there before servers are started, which may take an hour."""
    if values.get(key) and not (PROJECT_ROOT / values[key]).exists():
        complain((table, key), f"got {values[key]!r}, which is not there, needs a path from the project's folder or a whole one")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port  # ValueError above 65535, as for an unclosed [
    except ValueError:
        return False
    plain = bool(parts.hostname) and not re.search(r"\s", url)
    return parts.scheme in ("http", "https") and plain and port != 0 and not (parts.query or parts.fragment)


def _servers(side: Mapping[str, Any]) -> set[str]:
    """Its addresses as the client asks them: host names know no capitals, and /v1 is the same server."""
    return {url.lower().rstrip("/").removesuffix("/v1").rstrip("/") for url in side.get("base_url", ())}


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
            elif values[key] < 0:
                complain(("evals", "per_suite", suite, key), f"got {values[key]}, needs at least 0")
        most, first = (values.get(key, evals.get(key, 0)) for key in ("max_repeats", "repeats"))
        if values.keys() & {"repeats", "max_repeats"} and 0 < most < first:
            complain(("evals", "per_suite", suite), f"got max_repeats {most} below repeats {first}, needs at least as many")


def _check_rising(values: tuple[int, ...], where: tuple[str, ...], complain: Complain) -> None:
    if list(values) != sorted(set(values)):
        complain(where, f"got {list(values)}, needs rising numbers, each once")


def _check_both(tables: Mapping[str, dict[str, Any]], complain: Complain) -> None:
    stock, candidate = tables["baseline"], tables["candidate"]
    shared = _servers(stock) & _servers(candidate)
    if shared:
        complain(("candidate", "base_url"), f"got {sorted(shared)} on both sides, needs two deployments")
    together = tables.get("servers", {}).get("together", False)
    if together and stock.get("port") and stock.get("port") == candidate.get("port"):
        complain(("candidate", "port"), f"got {candidate['port']} on both sides, needs two ports when both run together")
    if "accept_differences" in stock:
        complain(("baseline", "accept_differences"), "belongs to [candidate]: it says where the candidate may differ from the baseline")


def _check_numerics(numerics: dict[str, Any], complain: Complain) -> None:
    if numerics.get("text") != "chat":
        _check_path(numerics, "text", "numerics", complain)
    bins, window = numerics.get("bins", ()), numerics.get("window_tokens", 0)
    _check_rising(bins, ("numerics", "bins"), complain)
    # Stock's second pass begins a window earlier.
    if bins and window and bins[0] < 2 * window + 2:
        complain(
            ("numerics", "window_tokens"), f"got {window} in a context of {bins[0]}, needs contexts of at least {2 * window + 2} tokens"
        )


def _check_perf(perf: dict[str, Any], complain: Complain) -> None:
    waves = perf.get("waves", 0)
    if waves and waves < LEAST_WAVES:
        complain(("perf", "waves"), f"got {waves}, needs at least {LEAST_WAVES} for an interval, or 0 to time no requests")
    if perf.get("bench") and not (perf.get("baseline_cell") and perf.get("candidate_cell")):
        complain(("perf", "bench"), "got no baseline_cell and candidate_cell, needs both: the result does not say what was measured")
    given = [side for side in ("baseline", "candidate") if perf.get(f"{side}_result")]
    for side in ("baseline", "candidate"):
        result, cell = f"{side}_result", f"{side}_cell"
        _check_path(perf, result, "perf", complain)
        if perf.get("bench") and perf.get(result):
            complain(("perf", result), "got bench and a result, needs one: a command to run or a file that is there")
        if perf.get(result) and not perf.get(cell):
            complain(("perf", result), f"got no {cell}, needs one: the file does not say what was measured")
        if perf.get(cell):
            from perf.servers import parse_cell  # brings torch, which a file without cells does not need

            try:
                parse_cell(perf[cell])
            except HarnessError as error:
                complain(("perf", cell), str(error).removeprefix("cell: "))
    if len(given) == 1:
        complain(("perf", f"{given[0]}_result"), "got the result of one side, needs those of both")


def _check_margins(margins: Mapping[str, float], complain: Complain) -> None:
    allowed = load_policy().limits["evals"]["margin"]
    for suite, margin in margins.items():
        if suite not in allowed:
            complain(("gate", "margin", suite), f"got an unknown suite, needs one of {sorted(allowed)}")
        elif not 0 < margin <= allowed[suite]:
            complain(("gate", "margin", suite), f"got {margin}, needs a number above 0 and at most the policy's {allowed[suite]}")
