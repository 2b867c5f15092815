"""One suite at full size on two deployments: `run_suite` asks both over HTTP, keeps every item, scores through lm-eval and judges.

    result = run_suite(
        "gsm8k",                    # evals.tasks.loading.SUITES
        stock=SuiteSide(role="stock", fingerprint="…", replicas=(Replica(base_url="http://a:8000", model="kimi-k3"),), concurrency=64),
        candidate=SuiteSide(role="candidate", …),
        policy=suite_policy("gsm8k", load_policy(), family=4),
        plan=ServedPlan(chat=True, sampling=Sampling(temperature=1.0, top_p=0.95), max_repeats=8, max_minutes=120.0),
        folder=run_folder / "gsm8k",  # one suite and concurrency a folder; the same folder continues
        shown=None,                   # a Display; None: bars on a terminal, else plain lines
    )
    result.gate                     # evals.gate.SuiteGate: status, reasons and everything measured
    result.pairs                    # evals.pairing.PairedAnswers, for evals.measurements.{measurements_of, details_of}
    result.failures["candidate"]    # replies that failed, by kind
    result.throughput["candidate"]  # evals.serving.executor.Throughput, one a pass: tokens, seconds, in-flight share
    result.report                   # bytes: canonical JSON, the same for any number of workers or endpoints

`SuiteRun` takes the steps apart (`ask` a side, `score`), for one set of GPUs that serves several suites in turn. `SuiteSide.serving` is a
context manager that is entered while a side is asked. In the folder: `stock.jsonl` and `candidate.jsonl` (every item, append-only),
`looks.json`, `throughput.jsonl`, `report.json`.

A reply that the server took and did not give counts as missing: the candidate's as wrong and against it, stock's as no pair. A request that
reached nobody is no pair either. Beyond the policy's share of pairs (`min_paired_share`) the suite is not proven. No item is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from evals.gate import SuiteGate, judge_suite
from evals.generation import PATHS
from evals.lm import quiet_lm_eval
from evals.pairing import PairedAnswers, pair_answers
from evals.policy import SuitePolicy
from evals.run import selection
from evals.serving.answered import Scored, answer_row, failures_of, not_decided, with_prompt_tokens
from evals.serving.asking import Ask, Opens, Reading
from evals.serving.budget import Budget, LookFile
from evals.serving.executor import Executor, Throughput
from evals.serving.http_lm import AskBuilder, RunningScorer, ScoredReply, WindowedTask, ask_windows, score_windows, templates_compiled_once
from evals.serving.items import ItemStore
from evals.serving.merge import plain, report_bytes
from evals.serving.progress import Display, display
from evals.serving.sources import SuiteData, open_data
from evals.serving.workers import open_askers
from evals.serving.writing import Writer
from evals.stats.paired import paired_difference
from evals.stats.sequential import Monitor
from evals.tasks.loading import bring_up, task_config
from validation.core.types import HarnessError, Status

GATED_SUITE = "gpqa_diamond_cot_zeroshot"
SCORE_BATCH = 512


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How both sides decode. `temperature` 0 is greedy; a model card's values otherwise. `top_k` 0: not sent."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def generation(self) -> dict[str, Any]:
        """As lm-eval's generation options."""
        sampled = self.temperature > 0
        return {"do_sample": sampled, "temperature": self.temperature, "top_p": self.top_p if sampled else None}


@dataclass(frozen=True, kw_only=True)
class SuiteSide:
    """One deployment as the suites see it. `fingerprint` identifies what answers; records of another one are never used for it."""

    role: str
    fingerprint: str
    replicas: tuple[Opens, ...]
    concurrency: int = 64
    serving: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # entered while the side is asked

    def __post_init__(self) -> None:
        if self.role not in PATHS or not self.fingerprint or not self.replicas or self.concurrency < 1:
            raise HarnessError(
                f"suite side: got role {self.role!r}, fingerprint {self.fingerprint!r}, {len(self.replicas)} replicas and concurrency "
                f"{self.concurrency}, needs one of {PATHS}, a fingerprint, a replica and a slot"
            )


@dataclass(frozen=True, kw_only=True)
class ServedPlan:
    """What is asked, the same on both sides. None or 0 leave the task's own value."""

    chat: bool = True
    sampling: Sampling | None = None
    max_new_tokens: int = 0
    context_tokens: int = 0  # what the servers hold; 0: unknown
    limit: int | None = None  # rows, spread evenly over the file
    repeats: int | None = None  # of the first look
    max_repeats: int | None = None  # of the top-up; the first look only when None
    max_minutes: float = 0.0
    keep_stop: bool | None = None  # the task's stop strings; default: only without chat, where they end the imitated few-shot text
    reading: Reading = field(default_factory=Reading)
    extra: Mapping[str, Any] = field(default_factory=dict)  # further request fields, e.g. chat_template_kwargs
    base_seed: int = 0
    together: bool = False  # both sides at the same time
    data: SuiteData = field(default_factory=SuiteData)
    workers: int = 1
    ray: str = ""  # address of a Ray cluster, "local", or "": no Ray
    shard: tuple[int, int] = (0, 1)  # this host's part of the rows, for hosts without Ray; merge before judging

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("limit", "repeats", "max_repeats")}
        problems = [f"{name} {value}" for name, value in numbers.items() if value is not None and value < 1]
        if not 0 <= self.shard[0] < self.shard[1]:
            problems.append(f"shard {self.shard}")
        if self.workers < 1 or self.max_minutes < 0 or self.max_new_tokens < 0 or self.context_tokens < 0:
            problems.append(f"workers {self.workers}, minutes {self.max_minutes}, tokens {self.max_new_tokens}, {self.context_tokens}")
        if problems:
            raise HarnessError(f"suite plan: got {', '.join(problems)}, needs positive numbers and a shard such as (0, 4)")

    @property
    def setting(self) -> dict[str, Any]:
        """What decides the answers, for the report: nothing of how they were carried."""
        left_out = ("together", "workers", "ray", "shard", "data", "max_minutes")
        made = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        return {**made, "sampling": self.sampling and asdict(self.sampling), "reading": asdict(self.reading)}


@dataclass(frozen=True, kw_only=True)
class ServedResult:
    """The verdict and what stands behind it. `throughput` lists a side's passes, one a look that asked something."""

    gate: SuiteGate
    pairs: PairedAnswers
    reported: Mapping[str, Mapping[str, float]]  # side -> "metric,filter" -> mean over all replies, a failed one as 0
    failures: Mapping[str, Mapping[str, int]]  # side -> kind -> replies
    throughput: Mapping[str, Sequence[Throughput]]
    looks: int
    complete: bool
    report: bytes
    data_share: float = 1.0  # published rows that the data hold over all published, where that is known to be fewer


def run_suite(
    suite: str,
    *,
    stock: SuiteSide,
    candidate: SuiteSide,
    policy: SuitePolicy,
    plan: ServedPlan,
    folder: Path,
    shown: Display | None = None,
) -> ServedResult:
    """Ask, score and judge one suite; blocking. Everything is kept below `folder`, where the same call continues.

    Raises HarnessError for what no answer can mend: absent data, a prompt without room for its answer, an unwritable folder.
    """
    with quiet_lm_eval(), contextlib.ExitStack() as stack:
        screen = shown if shown is not None else stack.enter_context(display())
        return stack.enter_context(SuiteRun(suite, stock, candidate, policy, plan, folder, screen)).run()


class SuiteRun:
    """One suite of a run, for callers that take the steps apart: `ask` a side while its server is up, `judge` when both are asked."""

    def __init__(
        self, suite: str, stock: SuiteSide, candidate: SuiteSide, policy: SuitePolicy, plan: ServedPlan, folder: Path, shown: Display
    ) -> None:
        self.suite, self.policy, self.plan, self.folder = suite, policy, plan, folder
        self._sides = {"stock": stock, "candidate": candidate}
        self._shown = shown
        self._stack = contextlib.ExitStack()
        self._stores: dict[str, ItemStore] = {}
        self._passes: dict[str, list[Throughput]] = {path: [] for path in PATHS}
        self._data: Mapping[str, Any] | None = None

    def __enter__(self) -> SuiteRun:
        self._stores = {path: self._stack.enter_context(ItemStore(self.folder / f"{path}.jsonl")) for path in PATHS}
        self._stack.enter_context(templates_compiled_once())
        self._looks = LookFile(self.folder / "looks.json")
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    # ---- the loop ----
    def run(self) -> ServedResult:
        """Looks until the gate decides or the budget ends."""
        monitor: Monitor | None = None
        made = 0
        while True:
            repeats = self._looks.next_repeats(self._budget, made)
            self.ask(repeats)
            scored = self.score(repeats)
            se = paired_difference(scored.pairs.stock, scored.pairs.candidate, scored.pairs.clusters).se_adjusted
            if not scored.complete or math.isnan(se):
                return self._result(scored, None, made)  # no look: nothing may be decided from a part of the data
            look = self._looks.settle(self._budget, made, self._seconds())
            made += 1
            if look.last and monitor is None:
                return self._result(scored, None, made)  # a single look: the fixed test
            monitor = (monitor or Monitor.for_margin(self.policy.delta, self.policy.alpha, self.policy.power)).add(se, last=look.last)
            result = self._result(scored, monitor, made)
            if result.gate.status is not Status.NOT_PROVEN or monitor.exhausted:
                return result

    @cached_property
    def _budget(self) -> Budget:
        first = int(self._config(self.plan.repeats)["repeats"])
        return Budget(first=first, max_repeats=max(self.plan.max_repeats or first, first), max_minutes=self.plan.max_minutes)

    def _seconds(self) -> float:
        """Time of asking so far, over all runs in this folder."""
        path = self.folder / "throughput.jsonl"
        passes = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        return math.fsum(one["wall_seconds"] for one in passes)

    # ---- asking ----
    def ask(self, repeats: int, paths: Sequence[str] = PATHS) -> None:
        """Bring the records of `paths` up to `repeats` an item; what failed before is asked again. Servers are up only while needed."""
        for group in [tuple(paths)] if self.plan.together else [(path,) for path in paths]:
            with contextlib.ExitStack() as stack:
                up = group if self._data is None and self.plan.data.needs_server(self.suite) else ()
                for path in up:
                    stack.enter_context(self._sides[path].serving())
                pending = {path: missing for path in group if (missing := sum(1 for _ in self._missing(path, repeats)))}
                for path in pending:
                    if path not in up:
                        stack.enter_context(self._sides[path].serving())
                if pending:
                    self._ask_while_up(pending, repeats)

    def ask_first(self, paths: Sequence[str]) -> bool:
        """Ask `paths` the first look's questions, for servers that take turns; whether every request reached a server."""
        self.ask(self._looks.next_repeats(self._budget, 0), paths)
        return not any(one.stopped for path in paths for one in self._passes[path][-1:])

    def _ask_while_up(self, pending: Mapping[str, int], repeats: int) -> None:
        started = time.monotonic()
        with quiet_lm_eval():
            passes = asyncio.run(self._ask_all(pending, repeats))
        wall = time.monotonic() - started
        with (self.folder / "throughput.jsonl").open("a") as file:
            for path, one in zip(pending, passes, strict=True):
                self._passes[path].append(one)
                entry = {"side": path, "repeats": repeats, "wall_seconds": wall, **asdict(one)}
                file.write(json.dumps(plain(entry)) + "\n")
                wall = 0.0  # both sides together took it once

    async def _ask_all(self, pending: Mapping[str, int], repeats: int) -> list[Throughput]:
        return list(await asyncio.gather(*(self._ask_side(path, repeats, missing) for path, missing in pending.items())))

    async def _ask_side(self, path: str, repeats: int, missing: int) -> Throughput:
        side, store = self._sides[path], self._stores[path]
        task = self._task(repeats)
        total = repeats * sum(self._mine(row) for row in self._rows(task))
        title = f"{self.suite} {path}"
        self._shown.begin(title, total, total - missing)
        score = RunningScorer(self._task(repeats)).score
        with Writer(store, side.fingerprint, path, self.plan.reading, score, self._shown, title) as writer:
            async with open_askers(side.replicas, side.concurrency, self.plan.workers, self.plan.ray) as askers:
                executor = Executor(askers, side.concurrency, writer.take)
                made = await executor.run(ask_windows(task, self._rows(task), self._builder(), self._wanted(path)))
                for asker in askers:
                    await asker.aclose()
        self._shown.end(title)
        return made

    def _wanted(self, path: str) -> Callable[[Ask], bool]:
        store, fingerprint = self._stores[path], self._sides[path].fingerprint
        return lambda ask: self._mine(ask.row) and not store.answered(ask.key(path, fingerprint))

    def _mine(self, row: int) -> bool:
        return row % self.plan.shard[1] == self.plan.shard[0]

    def _missing(self, path: str, repeats: int) -> Iterator[Ask]:
        with quiet_lm_eval():
            task = self._task(repeats)
            for window in ask_windows(task, self._rows(task), self._builder(), self._wanted(path)):
                yield from window

    # ---- tasks ----
    def _config(self, repeats: int | None) -> dict[str, Any]:
        generation = self.plan.sampling.generation if self.plan.sampling is not None else None
        if self.plan.max_new_tokens:
            own = {} if generation is not None else task_config(self.suite)["generation_kwargs"]
            generation = {**own, **(generation or {}), "max_gen_toks": self.plan.max_new_tokens}
        return task_config(self.suite, repeats, generation=generation, data=self.plan.data.for_files(self.suite))

    def _task(self, repeats: int) -> WindowedTask:
        """A task of its own for each user, because a window is open in one place at a time; they share the rows."""
        with quiet_lm_eval():
            given = self._given
            made = bring_up(self.suite, self._config(repeats), lambda config: WindowedTask(config, given))
        assert isinstance(made, WindowedTask)
        return made

    @property
    def _given(self) -> Mapping[str, Any]:
        if self._data is None:
            config = self._config(self.plan.repeats)
            with quiet_lm_eval():
                self._data = open_data(
                    self.suite, self.plan.data, self.plan.context_tokens, config, self.folder, self._sides["stock"].replicas
                )
        return self._data

    def _rows(self, task: WindowedTask) -> list[int]:
        return selection(len(task.all_docs), self.plan.limit)

    def _builder(self) -> AskBuilder:
        keep = self.plan.keep_stop if self.plan.keep_stop is not None else not self.plan.chat
        top_k = {"top_k": self.plan.sampling.top_k} if self.plan.sampling is not None and self.plan.sampling.top_k else {}
        return AskBuilder(
            suite=self.suite,
            chat=self.plan.chat,
            base_seed=self.plan.base_seed,
            context_tokens=self.plan.context_tokens,
            stop=None if keep else (),
            extra={**self.plan.extra, **top_k},
        )

    # ---- judging ----
    def score(self, repeats: int) -> Scored:
        """Score what is recorded of both sides through lm-eval, and pair it."""
        tables, sums = {}, {}
        with quiet_lm_eval():
            for path in PATHS:
                task = self._task(repeats)
                scores = score_windows(task, self._rows(task), self._builder(), self._stores[path], path, self._sides[path].fingerprint)
                tables[path], sums[path] = self._table(path, task, scores)
        for side in PATHS:
            tables[side]["prompt_hash"] = with_prompt_tokens(tables[side], tables["stock"], tables["candidate"])
        return Scored(pairs=pair_answers(self.suite, tables["stock"], tables["candidate"]), tables=tables, reported=sums)

    def _table(self, path: str, task: WindowedTask, scores: Iterator[ScoredReply]) -> tuple[pd.DataFrame, dict[str, float]]:
        metric = ",".join(task.primary)
        rows, sums, batch = [], dict.fromkeys([metric], 0.0), []
        for one in scores:
            rows.append(answer_row(one, metric, gated=self.suite == GATED_SUITE))
            for name, value in one.scores.items():
                sums[name] = sums.get(name, 0.0) + (value or 0.0)
            if one.reply is not None:
                batch.append((one.reply.key, one.scores))
            if len(batch) >= SCORE_BATCH:
                self._stores[path].add_scores(batch)
                batch = []
        self._stores[path].add_scores(batch)
        if not rows:
            raise HarnessError(f"suite {self.suite}: got no rows, needs at least one; check the data file")
        return pd.DataFrame(rows), {name: value / len(rows) for name, value in sums.items()}

    def _result(self, scored: Scored, monitor: Monitor | None, looks: int) -> ServedResult:
        gate = judge_suite(scored.pairs, self.policy, monitor)
        gate = gate if scored.complete else not_decided(gate, scored)
        sides = {path: {"fingerprint": side.fingerprint, "concurrency": side.concurrency} for path, side in self._sides.items()}
        setting = {"plan": self.plan.setting, "sides": sides, "looks": looks}
        result = ServedResult(
            gate=gate,
            pairs=scored.pairs,
            reported=scored.reported,
            failures={path: failures_of(scored.tables[path]) for path in PATHS},
            throughput={path: tuple(passes) for path, passes in self._passes.items()},
            looks=looks,
            complete=scored.complete,
            report=report_bytes(gate, scored.pairs, setting),
            data_share=min(float(getattr(rows, "data_share", 1.0)) for rows in self._given.values()),
        )
        draft = self.folder / f"report.{os.getpid()}.draft"
        draft.write_bytes(result.report)
        draft.replace(self.folder / "report.json")
        return result
