"""Runs one suite on both paths of a session, scores it with lm-eval and judges it, adding repeats until the gate decides.

    result = run_suite("gsm8k_nano", session, policy, SuitePlan(limit=200))

Repeats are topped up under alpha spending (`evals.stats.sequential`), so looking more than once does not loosen the gate. Everything that
was generated stays in the session's records; a second call continues where a killed one stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lm_eval
import numpy as np
import pandas as pd
from lm_eval.defaults import DEFAULT_OTHER_SEED

from evals.gate import SuiteGate, judge_suite
from evals.generation import PATHS, PairedSession, Request
from evals.lm import ChatTemplate, RecordedLM, quiet_lm_eval
from evals.pairing import ANSWER_COLUMNS, PairedAnswers, pair_answers
from evals.policy import SuitePolicy
from evals.records import Reply, ReplyKey, digest
from evals.stats.paired import paired_difference
from evals.stats.sequential import Monitor
from evals.tasks.loading import BY_REPEAT, RepeatedTask, load_task
from validation.core.types import HarnessError, Status


@dataclass(frozen=True, kw_only=True)
class SuitePlan:
    """How much of a suite is run. `limit` rows are taken evenly over the file (which is ordered by difficulty), all when None."""

    limit: int | None = None
    repeats: int | None = None  # of the first look; the task's own number when None
    max_repeats: int | None = None  # budget of the top-up; the first look only when None

    def __post_init__(self) -> None:
        problems = [
            f"{name} {value}" for name in ("limit", "repeats", "max_repeats") if (value := getattr(self, name)) is not None and value < 1
        ]
        if problems:
            raise HarnessError(f"suite plan: got {', '.join(problems)}, needs positive numbers")


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """The verdict, lm-eval's own aggregate scores of both sides, and the pairs behind them."""

    gate: SuiteGate
    reported: Mapping[str, Mapping[str, float]]  # path -> "metric,filter" -> score as lm-eval prints it
    pairs: PairedAnswers
    seconds: float  # generation, both paths


def selection(total: int, limit: int | None) -> list[int]:
    """Row numbers, ascending and evenly spread, of `limit` out of `total` rows."""
    if limit is None or limit >= total:
        return list(range(total))
    return sorted({int(i) for i in np.floor((np.arange(limit) + 0.5) * total / limit)})


def run_suite(
    suite: str, session: PairedSession, policy: SuitePolicy, plan: SuitePlan | None = None, template: ChatTemplate | None = None
) -> SuiteResult:
    """Generate (or take from the records), score and judge one suite. Raises HarnessError for missing data or broken requests."""
    plan = plan or SuitePlan()
    repeats = plan.repeats
    monitor: Monitor | None = None
    while True:
        task = load_task(suite, repeats)
        repeats = int(task.config.repeats)
        result = _look(task, session, policy, plan.limit, template)
        budget = max(plan.max_repeats or repeats, repeats)
        if budget == repeats and monitor is None:
            return result  # a single look: the fixed test
        se = _standard_error(result.pairs)
        if math.isnan(se):
            return result  # fewer than two answered pairs: more repeats of the same failure decide nothing, and the gate says not_proven
        monitor = (monitor or Monitor.for_margin(policy.delta, policy.alpha, policy.power)).add(se, last=repeats >= budget)
        gate = judge_suite(result.pairs, policy, monitor)
        result = SuiteResult(gate=gate, reported=result.reported, pairs=result.pairs, seconds=result.seconds)
        if gate.status is not Status.NOT_PROVEN or monitor.exhausted:
            return result
        repeats = min(2 * repeats, budget)


def _standard_error(pairs: PairedAnswers) -> float:
    """Of the paired difference; NaN with fewer than two answered pairs."""
    return paired_difference(pairs.stock, pairs.candidate, pairs.clusters).se_adjusted


def _look(task: RepeatedTask, session: PairedSession, policy: SuitePolicy, limit: int | None, template: ChatTemplate | None) -> SuiteResult:
    suite = task.task_name
    rows = selection(len(task.eval_docs), limit)
    tables, reported, seconds = {}, {}, 0.0
    for path in PATHS:
        lm = RecordedLM(session, path, items={suite: rows}, template=template)
        outcome = _evaluate(lm, task, rows, template is not None)
        scores = _scores_by_request(task, lm, outcome["samples"][suite])
        _record_scores(session, path, scores)
        replies = {request: lm.reply(request) for request in lm.asked[suite]}
        tables[path] = answers_table(session, path, replies, scores, task)
        reported[path] = {k: float(v) for k, v in outcome["results"][suite].items() if "," in k and isinstance(v, (int, float))}
        seconds += sum(reply.seconds for reply in replies.values())
    pairs = pair_answers(suite, tables["stock"], tables["candidate"])
    return SuiteResult(gate=judge_suite(pairs, policy), reported=reported, pairs=pairs, seconds=seconds)


def _evaluate(lm: RecordedLM, task: RepeatedTask, rows: Sequence[int], chat: bool) -> dict[str, Any]:
    """lm-eval's own loop: `simple_evaluate` without its survey of the machine, which lists packages by subprocess for seconds each time.

    Its response cache is never used: the keys hold no model.
    """
    suite = task.task_name
    if task.config.num_fewshot is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)  # both sides see the same examples
    with quiet_lm_eval():
        outcome = lm_eval.evaluate(
            lm=lm,
            task_dict={"tasks": {suite: task}},
            samples={suite: list(rows)},
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=chat,
        )
    if outcome is None or not outcome["samples"].get(suite):
        raise HarnessError(f"suite {suite}: got no samples from lm-eval, needs at least one; check the data file")
    return dict(outcome)


def _scores_by_request(task: RepeatedTask, lm: RecordedLM, samples: Sequence[Mapping[str, Any]]) -> dict[Request, dict[str, float | None]]:
    """Every metric of every repeat. A failed reply, or a metric that is NaN, has the score None."""
    by_place = {(request.item, request.repeat): request for request in lm.asked[task.task_name]}
    scores: dict[Request, dict[str, float | None]] = {request: {} for request in by_place.values()}
    for sample in samples:
        item = f"{int(sample['doc_id']):05d}"
        for name in sample["metrics"]:
            if not name.endswith(BY_REPEAT):
                continue
            for repeat, value in enumerate(sample[name]):
                request = by_place[item, repeat]
                failed = lm.reply(request).text is None or math.isnan(value)
                scores[request][f"{name.removesuffix(BY_REPEAT)},{sample['filter']}"] = None if failed else float(value)
    return scores


def _record_scores(session: PairedSession, path: str, scores: Mapping[Request, Mapping[str, float | None]]) -> None:
    keyed: dict[ReplyKey, Mapping[str, float | None]] = {
        request.key(path, session.fingerprints[path]): metrics for request, metrics in scores.items()
    }
    session.records.add_scores(keyed)


def answers_table(
    session: PairedSession,
    path: str,
    replies: Mapping[Request, Reply],
    scores: Mapping[Request, Mapping[str, float | None]],
    task: RepeatedTask,
) -> pd.DataFrame:
    """One side's answers with the columns `pair_answers` needs; `prompt_hash` covers prompt, stop strings, limit, temperature and seed."""
    metric = ",".join(task.primary)
    docs = task.eval_docs
    rows = []
    for request, reply in replies.items():
        score = scores[request].get(metric)
        doc = docs[int(request.item)]
        rows.append(
            {
                "item": request.item,
                "repeat": request.repeat,
                "cluster": str(doc.get("cluster", request.item)),
                "level": str(doc.get("level", "")),
                "prompt_hash": digest(reply.key.prompt_hash + reply.key.params_hash),
                "score": float("nan") if score is None else score,
                "tokens": len(reply.token_ids),
                "truncated": reply.truncated,
                "text": reply.text or "",
                "finish_reason": reply.finish_reason,
                "path_share": float(reply.extra.get("path_share", float("nan"))),
            }
        )
    return pd.DataFrame(rows, columns=[*ANSWER_COLUMNS, "level", "finish_reason", "path_share"])
