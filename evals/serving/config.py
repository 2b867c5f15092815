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
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals.serving.config_rules import check_tables
from evals.serving.config_tables import build, needs
from evals.serving.names import IDENTITY_FIELDS, NANO_SUITES, REAL_SUITES, TABLE_OF
from evals.serving.noise_rule import NOISE_FACTOR
from validation.core import jsonio
from validation.core.settings import unknown_keys
from validation.core.toml_lines import KeyLines
from validation.core.types import HarnessError

MAX_FILE_BYTES = 1 << 20
DEFAULT_CANDIDATE = "specialized"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One deployment. Either `base_url` (running servers, one or several replicas) or `command` (we start, watch and stop it).

    In `command` and `env`, `{port}` becomes the port, `{python}` this interpreter and `{candidate}` the name given on the command line (or
    "specialized"). Times in seconds, `context` in tokens (0: what the server says).
    """

    model: str = field(metadata=needs(some=True))
    served_name: str = ""  # what requests name; default: `model`
    base_url: tuple[str, ...] = field(default=(), metadata=needs(some=True))
    command: tuple[str, ...] = ()
    port: int = field(default=0, metadata=needs(least=0, most=65535))  # 0: a free one
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""  # default: the project
    log: str = ""  # a running server's own log file, to read the proof from; a started server's log is kept by itself
    startup_timeout_s: float = field(default=1800.0, metadata=needs(least=1))
    stop_timeout_s: float = field(default=60.0, metadata=needs(least=0.1))
    api_key_env: str = ""  # the name of the variable that holds the key; the key itself never stands in a file
    tokenizer: str = ""  # folder or file of the tokenizer, where the server has no /tokenize route
    context: int = field(default=0, metadata=needs(least=0))
    # What an OpenAI-compatible server does not tell; read from `command` where it is given there.
    revision: str = ""
    dtype: str = ""
    quantization: str = ""
    tensor_parallel: int = field(default=0, metadata=needs(least=0))
    chat_template: str = ""
    speculative: bool | None = None  # default: whether the command asks for it, or the metrics show it
    # Proof that this side's path ran: any one that is found counts.
    proof_log: str = ""  # regular expression for a line of the log
    proof_metrics: str = ""  # regular expression for a metric name with labels whose value grew
    proof_trace: str = ""  # chrome trace (JSON, may be gzip) of a profiler
    proof_kernels: str = ""  # regular expression for a kernel of that trace
    accept_differences: tuple[str, ...] = field(default=(), metadata=needs(choices=IDENTITY_FIELDS))

    @property
    def name(self) -> str:
        return self.served_name or self.model


@dataclass(frozen=True, kw_only=True)
class EvalsConfig:
    """What is asked. `rows` 0 is the whole suite; `per_suite` overrides rows, repeats, max_repeats or max_new_tokens of one suite."""

    suites: tuple[str, ...] = field(default=REAL_SUITES, metadata=needs(choices=(*REAL_SUITES, *NANO_SUITES), some=True))
    rows: int = field(default=0, metadata=needs(least=0))
    repeats: int = field(default=0, metadata=needs(least=0))  # of the first look; 0: the task's own
    max_repeats: int = field(default=0, metadata=needs(least=0))  # budget of the top-up; 0: the first look only
    budget_minutes: float = field(default=0.0, metadata=needs(least=0))  # no new look is begun after this; 0: no limit
    # "task": as each task is decoded (aime25 samples); "greedy": every suite, one repeat; "card": the three values below
    sampling: str = field(default="task", metadata=needs(choices=("task", "greedy", "card")))
    temperature: float = field(default=1.0, metadata=needs(least=0, most=2))  # of the model card; used with sampling = "card"
    top_p: float = field(default=0.95, metadata=needs(least=0, most=1))
    top_k: int = field(default=0, metadata=needs(least=0))  # 0: not sent
    max_new_tokens: int = field(default=0, metadata=needs(least=0))  # 0: the task's own
    concurrency: tuple[int, ...] = field(default=(1, 64), metadata=needs(least=1, some=True))
    rows_at_one: int = field(default=0, metadata=needs(least=0))  # rows at concurrency 1; 0: as many as at the others
    api: str = field(default="chat", metadata=needs(choices=("chat", "completions")))
    reasoning: str = field(default="none", metadata=needs(choices=("none", "field", "tags")))  # where the chain of thought is
    reasoning_end: str = "</think>"  # with reasoning = "tags": only what follows is scored
    chat_template_kwargs: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)  # suite -> local file or folder
    mrcr_needles: tuple[int, ...] = field(default=(2, 4, 8), metadata=needs(choices=(2, 4, 8), some=True))
    mrcr_bins: tuple[int, ...] = field(default=(), metadata=needs(least=1))  # upper ends in tokens; default: all up to the context
    request_timeout_s: float = field(default=3600.0, metadata=needs(least=1))
    retries: int = field(default=4, metadata=needs(least=0))
    ray: str = ""  # "": this process; "local" or an address: workers through Ray
    workers: int = field(default=1, metadata=needs(least=1))
    per_suite: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """Per-token differences on the decode path. `bins` are context lengths in tokens; `window_tokens` are forced at the end of each."""

    bins: tuple[int, ...] = field(default=(32768, 131072, 524288, 1048576), metadata=needs(least=16, some=True))
    text: str = ""  # long real text; default: the shipped generator, repeated topics up to any length
    window_tokens: int = field(default=64, metadata=needs(least=4))
    windows: int = field(default=2, metadata=needs(least=1))  # different texts a bin
    logprobs: int = field(default=20, metadata=needs(least=1))
    method: str = field(default="auto", metadata=needs(choices=("auto", "logits_processor", "one_token")))
    neighbours: int = field(default=3, metadata=needs(least=0))  # other requests in flight in the second batch mix
    restart: bool = True  # stock is started again for its second pass, where we start it
    request_timeout_s: float = field(default=3600.0, metadata=needs(least=1))


@dataclass(frozen=True, kw_only=True)
class PerfConfig:
    """`bench` runs against each side and writes `vllm bench serve` JSON to `{result}`; `{base_url}`, `{model}`, `{python}` are filled in.

    `*_result` names a file that is there already. The cell says what was measured, e.g. kimi-k3-GB300-tp16-b1-q1-c8192-al1-auto.
    The same requests are timed on both sides at each concurrency of [evals] in `waves` (0: not at all), each with a prompt of
    `prompt_tokens` and an answer of `new_tokens`.
    """

    waves: int = 16
    prompt_tokens: int = field(default=512, metadata=needs(least=16))
    new_tokens: int = field(default=64, metadata=needs(least=1))
    bench: tuple[str, ...] = ()
    timeout_s: float = field(default=3600.0, metadata=needs(least=1))
    baseline_cell: str = ""
    candidate_cell: str = ""
    baseline_result: str = ""
    candidate_result: str = ""


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """May only be stricter than the policy file, which decides."""

    margin: Mapping[str, float] = field(default_factory=dict)  # suite -> allowed drop, at most the policy's
    # The candidate's distance from stock over stock's from itself.
    noise_factor: float = field(default=NOISE_FACTOR, metadata=needs(least=1.0, most=NOISE_FACTOR))


@dataclass(frozen=True, kw_only=True)
class ServersConfig:
    """`together`: both sides at the same time. Otherwise one after the other, on one set of GPUs."""

    together: bool = False
    poll_s: float = field(default=1.0, metadata=needs(least=0.05))


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
        tables[table] = build(kind, value, (table,), complain)
    check_tables(tables, complain)
    if problems:
        shown = "\n".join(f"  {name}:{line}: {message}" for line, message in sorted(set(problems)))
        raise HarnessError(f"config: got {len(set(problems))} problem(s), needs a file without any\n{shown}")
    return ServingConfig(**{table: TABLES[table](**values) for table, values in tables.items()})


def _shown(where: tuple[str, ...]) -> str:
    return "file" if not where else f"[{where[0]}]" + (f" {'.'.join(where[1:])}" if len(where) > 1 else "")
