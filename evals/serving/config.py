"""`validate.toml` of the serving profile: two sides, what is measured on them, and what decides.

    [servers]    whether both sides run at the same time or one after the other
    [baseline]   the stock side: a running server (`base_url`) or a command that starts one (`command`)
    [candidate]  the same, with the path on; differences that are meant are listed in `accept_differences`
    [evals] [numerics] [perf] [gate]

Other keys at the top of the file are the suite's own settings (`validation.core.settings`). An unknown key, a wrong type, a value out of
range and a contradiction are errors; all of them are reported at once, each with its line.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from validation.core import jsonio
from validation.core.settings import unknown_keys
from validation.core.toml_lines import KeyLines
from validation.core.types import HarnessError

SIDES = ("stock", "candidate")  # the roles; the tables of the file are [baseline] and [candidate]
TABLE_OF = {"stock": "baseline", "candidate": "candidate"}
REAL_SUITES = ("gsm8k", "gpqa_diamond_cot_zeroshot", "aime25", "mrcr")
NANO_SUITES = ("gsm8k_nano", "gpqa_diamond_nano", "aime25_nano", "mrcr_nano")
IDENTITY_FIELDS = (
    "model",
    "revision",
    "dtype",
    "tensor_parallel",
    "quantization",
    "max_model_len",
    "tokenizer",
    "chat_template",
    "version",
)
MAX_FILE_BYTES = 1 << 20
DEFAULT_CANDIDATE = "specialized"


def _needs(*, least: float | None = None, most: float | None = None, choices: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {"least": least, "most": most, "choices": choices}


@dataclass(frozen=True, kw_only=True)
class Side:
    """One deployment. Either `base_url` (running servers, one or several replicas) or `command` (we start, watch and stop it).

    In `command` and `env`, `{port}` becomes the port, `{python}` this interpreter and `{candidate}` the name given on the command line (or
    "specialized"). Times in seconds, `context` in tokens (0: what the server says).
    """

    model: str
    served_name: str = ""  # what requests name; default: `model`
    base_url: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    port: int = field(default=0, metadata=_needs(least=0, most=65535))  # 0: a free one
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""  # default: the project
    log: str = ""  # a running server's own log file, to read the proof from; a started server's log is kept by itself
    startup_timeout_s: float = field(default=1800.0, metadata=_needs(least=1))
    stop_timeout_s: float = field(default=60.0, metadata=_needs(least=0.1))
    api_key_env: str = ""  # the name of the variable that holds the key; the key itself never stands in a file
    tokenizer: str = ""  # folder or file of the tokenizer, where the server has no /tokenize route
    context: int = field(default=0, metadata=_needs(least=0))
    # What an OpenAI-compatible server does not tell; read from `command` where it is given there.
    revision: str = ""
    dtype: str = ""
    quantization: str = ""
    tensor_parallel: int = field(default=0, metadata=_needs(least=0))
    chat_template: str = ""
    speculative: bool | None = None  # default: whether the command asks for it, or the metrics show it
    # Proof that this side's path ran: any one that is found counts.
    proof_log: str = ""  # regular expression for a line of the log
    proof_metrics: str = ""  # regular expression for a metric name with labels whose value grew
    proof_trace: str = ""  # chrome trace (JSON, may be gzip) of a profiler
    proof_kernels: str = ""  # regular expression for a kernel of that trace
    accept_differences: tuple[str, ...] = field(default=(), metadata=_needs(choices=IDENTITY_FIELDS))

    @property
    def name(self) -> str:
        return self.served_name or self.model


@dataclass(frozen=True, kw_only=True)
class EvalsConfig:
    """What is asked. `rows` 0 is the whole suite; `per_suite` overrides rows, repeats, max_repeats or max_new_tokens of one suite."""

    suites: tuple[str, ...] = field(default=REAL_SUITES, metadata=_needs(choices=(*REAL_SUITES, *NANO_SUITES)))
    rows: int = field(default=0, metadata=_needs(least=0))
    repeats: int = field(default=0, metadata=_needs(least=0))  # of the first look; 0: the task's own
    max_repeats: int = field(default=0, metadata=_needs(least=0))  # budget of the top-up; 0: the first look only
    budget_minutes: float = field(default=0.0, metadata=_needs(least=0))  # no new look is begun after this; 0: no limit
    # "task": as each task is decoded (aime25 samples); "greedy": every suite, one repeat; "card": the three values below
    sampling: str = field(default="task", metadata=_needs(choices=("task", "greedy", "card")))
    temperature: float = field(default=1.0, metadata=_needs(least=0, most=2))  # of the model card; used with sampling = "card"
    top_p: float = field(default=0.95, metadata=_needs(least=0, most=1))
    top_k: int = field(default=0, metadata=_needs(least=0))  # 0: not sent
    max_new_tokens: int = field(default=0, metadata=_needs(least=0))  # 0: the task's own
    concurrency: tuple[int, ...] = field(default=(1, 64), metadata=_needs(least=1))
    rows_at_one: int = field(default=0, metadata=_needs(least=0))  # rows at concurrency 1; 0: as many as at the others
    api: str = field(default="chat", metadata=_needs(choices=("chat", "completions")))
    reasoning: str = field(default="none", metadata=_needs(choices=("none", "field", "tags")))  # where the chain of thought is
    reasoning_end: str = "</think>"  # with reasoning = "tags": only what follows is scored
    chat_template_kwargs: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)  # suite -> local file or folder
    mrcr_needles: tuple[int, ...] = field(default=(2, 4, 8), metadata=_needs(least=1))
    mrcr_bins: tuple[int, ...] = field(default=(), metadata=_needs(least=1))  # upper ends in tokens; default: all up to the context
    request_timeout_s: float = field(default=3600.0, metadata=_needs(least=1))
    retries: int = field(default=4, metadata=_needs(least=0))
    ray: str = ""  # "": this process; "local" or an address: workers through Ray
    workers: int = field(default=1, metadata=_needs(least=1))
    per_suite: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """Per-token differences on the decode path. `bins` are context lengths in tokens; `window_tokens` are forced at the end of each."""

    bins: tuple[int, ...] = field(default=(32768, 131072, 524288, 1048576), metadata=_needs(least=16))
    text: str = ""  # long real text; default: the shipped generator, repeated topics up to any length
    window_tokens: int = field(default=64, metadata=_needs(least=4))
    windows: int = field(default=2, metadata=_needs(least=1))  # different texts a bin
    logprobs: int = field(default=20, metadata=_needs(least=1))
    method: str = field(default="auto", metadata=_needs(choices=("auto", "logits_processor", "one_token")))
    neighbours: int = field(default=3, metadata=_needs(least=0))  # other requests in flight in the second batch mix
    restart: bool = True  # stock is started again for its second pass, where we start it
    request_timeout_s: float = field(default=3600.0, metadata=_needs(least=1))


@dataclass(frozen=True, kw_only=True)
class PerfConfig:
    """`bench` runs against each side and writes `vllm bench serve` JSON to `{result}`; `{base_url}`, `{model}`, `{python}` are filled in.

    `*_result` names a file that is there already. The cell says what was measured, e.g. kimi-k3-GB300-tp16-b1-q1-c8192-al1-auto.
    """

    bench: tuple[str, ...] = ()
    timeout_s: float = field(default=3600.0, metadata=_needs(least=1))
    baseline_cell: str = ""
    candidate_cell: str = ""
    baseline_result: str = ""
    candidate_result: str = ""


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """May only be stricter than the policy file, which decides."""

    margin: Mapping[str, float] = field(default_factory=dict)  # suite -> allowed drop, at most the policy's
    noise_factor: float = field(default=2.0, metadata=_needs(least=1.0, most=2.0))  # candidate against the noise floor of stock


@dataclass(frozen=True, kw_only=True)
class ServersConfig:
    """`together`: both sides at the same time. Otherwise one after the other, on one set of GPUs."""

    together: bool = False
    poll_s: float = field(default=1.0, metadata=_needs(least=0.05))


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    baseline: Side
    candidate: Side
    servers: ServersConfig = ServersConfig()
    evals: EvalsConfig = EvalsConfig()
    numerics: NumericsConfig = NumericsConfig()
    perf: PerfConfig = PerfConfig()
    gate: GateConfig = GateConfig()

    def side(self, role: str) -> Side:
        """`role` is "stock" or "candidate"."""
        return self.baseline if role == "stock" else self.candidate


TABLES: Mapping[str, Any] = typing.get_type_hints(ServingConfig)
Complain = Callable[[tuple[str, ...], str], None]


def read_config(path: Path) -> ServingConfig:
    """Read the serving tables of a file; keys outside them are somebody else's. Raises HarnessError with every problem and its line."""
    text = _read(path)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HarnessError(f"config: got {path.name}: {error}, needs TOML; `fasttrack init` writes a commented file") from error
    return parse_config(document, KeyLines(text), path.name)


def resolved(path: Path, candidate: str | None) -> dict[str, Any]:
    """The tables of a file as plain JSON for the run's settings. A candidate named on the command line fills `{candidate}` in the commands.

    Raises HarnessError with every problem, and when a candidate is named that the file has no place for.
    """
    config = read_config(path)
    sides = [config.baseline, config.candidate]
    named = [any("{candidate}" in word for word in (*side.command, *side.env.values())) for side in sides]
    if candidate is not None and not any(named):
        remedy = "leave it out: [candidate] names the server"
        raise HarnessError(f"candidate: got {candidate!r}, needs {{candidate}} in a command of {path.name}; {remedy}")
    made = [_with_candidate(side, candidate or DEFAULT_CANDIDATE) for side in sides]
    plain: dict[str, Any] = jsonio.plain(dataclasses.replace(config, baseline=made[0], candidate=made[1]))
    return plain


def _with_candidate(side: Side, name: str) -> Side:
    command = tuple(word.replace("{candidate}", name) for word in side.command)
    env = {key: value.replace("{candidate}", name) for key, value in side.env.items()}
    return dataclasses.replace(side, command=command, env=env)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise HarnessError(f"config: got {path} with {path.stat().st_size} bytes, needs at most {MAX_FILE_BYTES}")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"config: got {error}, needs a readable file; `fasttrack init` writes one") from error


def parse_config(document: Mapping[str, Any], lines: KeyLines, name: str) -> ServingConfig:
    """The serving tables of a parsed document. Raises HarnessError with every problem and its line."""
    problems: list[tuple[int, str]] = []

    def complain(where: tuple[str, ...], message: str) -> None:
        problems.append((lines.of(*where), f"{_shown(where)}: {message}"))

    problems += unknown_keys(document, lines)
    tables = {}
    for table, kind in TABLES.items():
        value = document.get(table)
        if value is None:
            if table in TABLE_OF.values():
                complain((), f"got no [{table}], needs both [baseline] and [candidate]")
            continue
        if not isinstance(value, Mapping):
            complain((table,), f"got {value!r}, needs a table [{table}]")
            continue
        tables[table] = _build(kind, value, (table,), complain)
    for table in ("baseline", "candidate"):
        if table in tables:
            _check_side(tables[table], table, complain)
    if "evals" in tables:
        _check_evals(tables["evals"], complain)
    if "numerics" in tables:
        _check_rising(tables["numerics"].get("bins", ()), ("numerics", "bins"), complain)
    if {"baseline", "candidate"} <= tables.keys():
        _check_both(tables, complain)
    if problems:
        shown = "\n".join(f"  {name}:{line}: {message}" for line, message in sorted(set(problems)))
        raise HarnessError(f"config: got {len(set(problems))} problem(s), needs a file without any\n{shown}")
    return ServingConfig(**{table: TABLES[table](**values) for table, values in tables.items()})


def _shown(where: tuple[str, ...]) -> str:
    return "file" if not where else f"[{where[0]}]" + (f" {'.'.join(where[1:])}" if len(where) > 1 else "")


# ---- one table ----
def _build(kind: Any, value: Mapping[str, Any], where: tuple[str, ...], complain: Complain) -> dict[str, Any]:
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


def _out_of_range(value: Any, needs: Mapping[str, Any]) -> list[str]:
    found = []
    for item in value if isinstance(value, tuple) else (value,):
        if needs.get("choices") and item not in needs["choices"]:
            found.append(f"got {item!r}, needs one of {list(needs['choices'])}")
        if needs.get("least") is not None and not item >= needs["least"]:
            found.append(f"got {item}, needs at least {needs['least']}")
        if needs.get("most") is not None and not item <= needs["most"]:
            found.append(f"got {item}, needs at most {needs['most']}")
    return found


# ---- what belongs together ----
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
