"""One suite at one concurrency on both servers, as measurements of the run; `evals.serving.suites` asks, scores and judges.

With one set of GPUs the first suite asks *all* suites' questions of stock, then all of the candidate, so that a server that takes minutes
to load is loaded once; what the gate then still wants is topped up.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from evals.gate import judge_family
from evals.measurements import details_of, family_details, family_measurements, measurements_of
from evals.policy import SuitePolicy, suite_policy
from evals.serving.asking import Reading, Replica
from evals.serving.checks import suite_cases
from evals.serving.config import EvalsConfig, ServingConfig, Side
from evals.serving.counters import Growth, acceptance_of, acceptance_tables, growth, read_counters
from evals.serving.errors import ServingError
from evals.serving.launch import StartFailed
from evals.serving.mrcr_hub import SUITE as MRCR
from evals.serving.mrcr_hub import MrcrChoice
from evals.serving.names import SIDES
from evals.serving.progress import Lines
from evals.serving.sources import SuiteData
from evals.serving.suites import Sampling, ServedPlan, ServedResult, SuiteRun, SuiteSide
from evals.serving.targets import Link, ServedTarget
from validation.core.settings import PROJECT_ROOT
from validation.core.types import Case, HarnessError, Measurement
from validation.core.worker import Refused
from validation.policy import load_policy

FULL_ROWS = {"gsm8k": 1319, "gpqa_diamond_cot_zeroshot": 198, "aime25": 30}
ATTEMPTS = 4  # a server that died is started again so often; then what is missing stays missing
FAMILY = 4
Found = tuple[tuple[Measurement, ...], Mapping[str, Any]]


def measure_suite(suite: str, case: Case, targets: Mapping[str, Any]) -> Found:
    """Ask, score and judge. Raises Refused where a server or the data cannot be had or the sides are not alike."""
    session = SuiteSession(targets)
    if not session.config.servers.together:
        session.ask_everything_once()
    result = session.run(suite, case)
    return _measurements(suite, case, result, session), _details(result, session)


def measure_family(cases: Mapping[str, Case], targets: Mapping[str, Any]) -> Found:
    """The suites' gates again, from their records, under Holm's correction."""
    session = SuiteSession(targets)
    gates = [session.run(suite, case).gate for suite, case in cases.items()]
    family = judge_family(gates)
    return family_measurements(family, gates), family_details(family, gates)


class SuiteSession:
    """What the suites of one worker share: facts, folders, counters of what was asked."""

    def __init__(self, targets: Mapping[str, Any]) -> None:
        self.targets: Mapping[str, ServedTarget] = targets
        self.link: Link = targets["stock"].link
        self.config: ServingConfig = self.link.config
        self.facts = self.link.require_alike()
        self._folder = Path(os.environ.get("FASTTRACK_SCRATCH") or tempfile.mkdtemp()) / "suites"
        self.grown: dict[str, Growth] = {}
        self.kept: Path | None = None

    # ---- asking ----
    def ask_everything_once(self) -> None:
        """The first look of every planned suite, one side after the other; nothing is asked that is there already."""
        evals = self.config.evals
        for role in ("stock", "candidate"):
            for suite in evals.suites:
                for case in suite_cases(suite, evals):
                    if case.params.get("asked") != 0:
                        self._ask_ahead(suite, case, role)

    def _ask_ahead(self, suite: str, case: Case, role: str) -> None:
        try:
            self._resumed(lambda: self._ask_first(suite, case, role))
        except Refused as refusal:  # recorded where the suite's own check runs
            self.link.say(f"serving: {suite} of {role}: {refusal}")

    def _ask_first(self, suite: str, case: Case, role: str) -> bool:
        with self._open(suite, case) as run:
            return run.ask_first((role,))

    def run(self, suite: str, case: Case) -> ServedResult:
        """The whole of one suite, with its top-up."""
        made: list[ServedResult] = []

        def once() -> bool:
            with self._open(suite, case) as run:
                made.append(run.run())
            return made[-1].complete

        self._resumed(once)
        return made[-1]

    def _resumed(self, ask: Any) -> None:
        """Again while a server that is ours comes back after it died; the records make each attempt ask only for what is missing."""
        for attempt in range(ATTEMPTS):
            try:
                if ask():
                    return
                for role in ("stock", "candidate") if self.config.servers.together else ():
                    self.link.up(role)
            except (StartFailed, HarnessError) as error:  # no server, or no data: this suite's trouble, the others go on
                raise Refused((str(error),)) from error
            self.link.say(f"serving: not every request reached a server; trying what is missing again ({attempt + 1})")

    @contextmanager
    def _open(self, suite: str, case: Case) -> Iterator[SuiteRun]:
        concurrency = int(case.params["concurrency"])
        folder = self._folder / f"{suite}-c{concurrency}"
        self.kept = folder
        sides = {role: self._side(role, concurrency) for role in ("stock", "candidate")}
        plan = plan_of(suite, case, self.config, self.context_tokens(), self.targets["stock"].settings.seed)
        policy = gate_policy(suite, self.config)
        with SuiteRun(suite, sides["stock"], sides["candidate"], policy, plan, folder, Lines(self.link.say)) as run:
            yield run

    def _side(self, role: str, concurrency: int) -> SuiteSide:
        evals, side = self.config.evals, self.config.side(role)
        urls = self.link.state()[role]["base_urls"]
        replicas = tuple(_replica(url, side, evals) for url in urls)
        return SuiteSide(
            role=role,
            fingerprint=self.targets[role].live_fingerprint(self.facts[role]),
            replicas=replicas,
            concurrency=concurrency,
            serving=lambda: self._serving(role),
        )

    @contextmanager
    def _serving(self, role: str) -> Iterator[None]:
        """The side is up inside, and its counters are read before and after."""
        live = self.link.up(role)
        ends = [self.targets[role].endpoint(url, timeout_s=60.0, retries=1) for url in live.base_urls]
        try:
            before = _counters(ends)
            yield
            after = _counters(ends)
            if before is not None and after is not None:
                self.grown[role] = self.grown.get(role, Growth(by_key={})) + growth(before, after)
        finally:
            for end in ends:
                end.close()

    def passes(self) -> list[dict[str, Any]]:
        """Every pass of the suite that was run last, as its folder keeps them; NaN is null there."""
        path = self.kept / "throughput.jsonl" if self.kept is not None else None
        return [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.is_file() else []

    def context_tokens(self) -> int:
        """Tokens that both sides hold; 0 where nobody tells."""
        told = [int(facts["max_model_len"]) for facts in self.facts.values() if facts.get("max_model_len", "").isdigit()]
        return min(told) if len(told) == len(self.facts) else 0


def _replica(url: str, side: Side, evals: EvalsConfig) -> Replica:
    return Replica(base_url=url, model=side.name, api_key_env=side.api_key_env, timeout_s=evals.request_timeout_s, retries=evals.retries)


def _counters(ends: list[Any]) -> dict[str, float] | None:
    """None where the server has no metrics, or is gone: they are beside the point here."""
    try:
        return read_counters(ends)
    except ServingError:
        return None


# ---- from the file to a plan ----
def gate_policy(suite: str, config: ServingConfig) -> SuitePolicy:
    """The policy's gate, with the file's margin where that is stricter. Raises HarnessError where it is not."""
    policy = suite_policy(suite, load_policy(), FAMILY)
    asked = config.gate.margin.get(suite)
    if asked is None:
        return policy
    if not 0 < asked <= policy.delta:
        raise HarnessError(f"[gate] margin of {suite}: got {asked}, needs a number above 0 and at most the policy's {policy.delta}")
    return replace(policy, delta=asked)


def plan_of(suite: str, case: Case, config: ServingConfig, context_tokens: int, seed: int) -> ServedPlan:
    """What the file says about one suite and concurrency."""
    evals = config.evals
    own = evals.per_suite.get(suite, {})
    side = config.baseline
    extra: dict[str, Any] = {"chat_template_kwargs": dict(evals.chat_template_kwargs)} if evals.chat_template_kwargs else {}
    card = Sampling(temperature=evals.temperature, top_p=evals.top_p, top_k=evals.top_k)
    sampled = {"task": None, "greedy": Sampling(), "card": card}[evals.sampling]
    data = PROJECT_ROOT / evals.data[suite] if suite in evals.data else None
    return ServedPlan(
        chat=evals.api == "chat",
        sampling=sampled,
        max_new_tokens=own.get("max_new_tokens", evals.max_new_tokens),
        context_tokens=context_tokens,
        limit=int(case.params.get("rows", 0)) or None,
        repeats=own.get("repeats", evals.repeats) or None,
        max_repeats=own.get("max_repeats", evals.max_repeats) or None,
        max_minutes=evals.budget_minutes,
        reading=Reading(reasoning=evals.reasoning, end=evals.reasoning_end),
        extra=extra,
        base_seed=seed,
        together=config.servers.together,
        data=SuiteData(path=data, mrcr=MrcrChoice(needles=evals.mrcr_needles, bins=evals.mrcr_bins), tokenizer=side.tokenizer),
        workers=evals.workers,
        ray=evals.ray,
    )


# ---- what is recorded ----
def _measurements(suite: str, case: Case, result: ServedResult, session: SuiteSession) -> tuple[Measurement, ...]:
    found = list(measurements_of(result.gate, result.pairs))
    evals, rows = session.config.evals, int(case.params.get("rows", 0))
    whole = suite != MRCR or MrcrChoice(needles=evals.mrcr_needles, bins=evals.mrcr_bins).is_whole(session.context_tokens())
    share = full_share(suite, not rows and whole, len(result.pairs.items), result.data_share)
    # A part of a suite decides nothing about the whole of it: left out, the claim stays open.
    found.append(Measurement(name="full_size" if share >= 1 else "part_of_the_suite", value=share, unit="share"))
    by_side = {side: [one for one in session.passes() if one["side"] == side] for side in SIDES}
    for side, passes in by_side.items():
        if passes:
            for name, key in (("in_flight_share", "in_flight_share"), ("all_in_flight_share", "full_share")):
                value = passes[-1][key]
                found.append(Measurement(name=f"{name}_{side}", value=math.nan if value is None else value, unit="share"))
            again = sum(one["tried_again"] for one in passes)
            found.append(Measurement(name=f"requests_tried_again_{side}", value=float(again), unit="count"))
    for side, grown in session.grown.items():
        told = acceptance_of(grown)
        if told is not None:
            found.append(Measurement(name=f"acceptance_length_{side}", value=told.length, unit="tokens"))
    return tuple(found)


def full_share(suite: str, whole: bool, items: int, data_share: float = 1.0) -> float:
    """Items asked over the items of the whole suite; NaN where only a part was asked and the size of the whole is not known.

    `data_share` below 1 says that the data themselves are a part of what is published: a file cut short is never the whole suite.
    """
    if suite in FULL_ROWS:
        return items / FULL_ROWS[suite]
    if not whole or not items:
        return math.nan
    return data_share


def _details(result: ServedResult, session: SuiteSession) -> dict[str, Any]:
    details = details_of(result.gate, result.pairs)
    details["reported_by_lm_eval"] = {side: dict(scores) for side, scores in result.reported.items()}
    details["failures"] = {side: dict(kinds) for side, kinds in result.failures.items()}
    details["acceptance"] = {side: told.plain() for side, one in session.grown.items() if (told := acceptance_of(one)) is not None}
    details["tables"] += [*_load_tables(session.passes()), *acceptance_tables(details["acceptance"])]
    if result.data_share < 1:
        short = f"The data hold {result.data_share:.3f} of a needle count's published rows: a part, which decides nothing about the whole"
        details["reasons"] = [*details["reasons"], short]
        details["tables"][0] = {**details["tables"][0], "note": f"{details['tables'][0].get('note', '')} {short}.".strip()}
    details["facts"] = {side: dict(facts) for side, facts in session.facts.items()}
    _keep_report(session.kept)
    return details


def _load_tables(passes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was asked, pass by pass: whether the concurrency was held, and what it took."""
    rows = [
        [
            *(one["side"], one["concurrency"], one["answered"] + sum(one["failed"].values()), f"{one['seconds']:.1f}"),
            *(_share(one["in_flight_share"]), _share(one["full_share"]), one["peak_rss_bytes"] >> 20),
        ]
        for one in passes
    ]
    columns = ["side", "concurrency", "requests", "seconds", "mean share of slots in use", "time with all in use", "peak MiB of the client"]
    note = "Shares are as the client sees them, up to the last hand-out; – where there were no more requests than slots."
    return [{"title": "Load", "columns": columns, "rows": rows, "note": note}] if rows else []


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _keep_report(folder: Path | None) -> None:
    """The suite's canonical report and its passes as artifacts of the run."""
    scratch = os.environ.get("FASTTRACK_SCRATCH")
    if scratch and folder is not None:
        kept = Path(scratch) / "artifacts"
        kept.mkdir(parents=True, exist_ok=True)
        for name in ("report.json", "throughput.jsonl", "looks.json"):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, kept / name)
