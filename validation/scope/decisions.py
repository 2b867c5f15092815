"""What the path decides at run time: refusals at start-up, the bound of 64 rows, and that every rank decides alike.

These rules are tried, not read: each unsupported setting is asked for, each step shape is decided and executed, and each rank plans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from validation.core.types import Case, Check, Limit, Measurement, Target
from validation.policy import load_policy

if TYPE_CHECKING:
    from kimi_k3_decode.plan import Deployment

CLAIM = "C-SCO-1"

# One entry for each row of the scope table of rfc/0001-kimi-k3.md: what to set, and the field every refusal must name.
UNSUPPORTED_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "architecture": {"architecture": "sm_80"},
    "tensor_parallel": {"tensor_parallel": 4},
    "pipeline_parallel": {"pipeline_parallel": 2},
    "data_parallel": {"data_parallel": 0},
    "expert_parallel": {"expert_parallel": True},
    "decode_context_parallel": {"decode_context_parallel": 2},
    "dual_batch_overlap": {"dual_batch_overlap": True},
    "lora": {"lora": True},
    "sleep_mode": {"sleep_mode": True},
    "graph_mode": {"graph_mode": "piecewise"},
    "conv_state_dtype": {"conv_state_dtype": "float32"},
    "recurrent_state_dtype": {"recurrent_state_dtype": "bfloat16"},
    "kv_cache_dtype": {"kv_cache_dtype": "float16"},
    "expert_quantization": {"expert_quantization": "fp8"},
    "speculation": {"speculation": "eagle", "drafts": 7},
    "drafts": {"speculation": "dspark", "drafts": 8},
    "adaptive_verification": {"adaptive_verification": True},
}
# (name, requests, q, uniform) and where the step must run with seven drafts configured.
STEPS = (
    *((f"decode-{n}", n, 1, True, "specialized") for n in (1, 2, 7, 8, 9, 16, 17, 33, 63, 64)),
    *((f"verify-{n}", n, 8, True, "specialized") for n in (1, 2, 7, 8)),
    *((f"decode-{n}", n, 1, True, "stock") for n in (65, 128)),
    ("verify-9", 9, 8, True, "stock"),
    ("partial-drafts", 4, 5, True, "stock"),
    ("mixed", 4, 1, False, "stock"),
    ("too-many-drafts", 1, 9, True, "stock"),
)


def supported_k3(**changes: Any) -> Deployment:
    from kimi_k3_decode.plan import SPECIALIZED_BACKEND, Deployment

    base = Deployment(architecture="sm_103a", tensor_parallel=8, speculation="dspark", drafts=7, decode_backend=SPECIALIZED_BACKEND)
    return dataclasses.replace(base, **changes)


def refused_reasons(deployment: Deployment) -> tuple[str, ...]:
    """Reasons the plan gives for a K3 deployment; empty when it accepts."""
    from kimi_k3_decode.config import K3, Unsupported
    from kimi_k3_decode.plan import Plan

    try:
        Plan.make(K3, deployment)
    except Unsupported as error:
        return error.reasons
    return ()


class _Decision:
    """What the three checks share."""

    claim = CLAIM
    roles: tuple[str, ...] = ()
    must_kill: tuple[str, ...] = ()


@dataclass(frozen=True)
class RefusalsCheck(_Decision):
    """Each unsupported setting alone, and all of them together, are refused by name; the supported deployment and `auto` are not."""

    id: str = "scope.refusals"

    def cases(self) -> Iterable[Case]:
        return [Case(subject="deployment")]

    def limits(self, case: Case) -> tuple[Limit, ...]:
        why = load_policy().sentence(self.id)
        return (
            Limit(measurement="settings_tried", op=">=", bound=len(UNSUPPORTED_SETTINGS), unit="count", why="every row of the scope table"),
            Limit(measurement="not_refused", op="==", bound=0, unit="count", why=why),
            Limit(measurement="missing_when_combined", op="==", bound=0, unit="count", why="all reasons at once, not the first"),
            Limit(
                measurement="wrongly_refused", op="==", bound=0, unit="count", why="a scope that refuses what it supports is not a scope"
            ),
        )

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        rows, not_refused = [], 0
        combined: dict[str, Any] = {}
        for field, changes in UNSUPPORTED_SETTINGS.items():
            reasons = refused_reasons(supported_k3(**changes))
            named = [reason for reason in reasons if reason.startswith(f"{field}:")]
            not_refused += not named
            combined |= changes
            rows.append([field, str(changes[field]), named[0] if named else "NOT REFUSED"])
        together = refused_reasons(supported_k3(**{**combined, "speculation": "eagle", "drafts": 8}))
        missing = [field for field in UNSUPPORTED_SETTINGS if not any(reason.startswith(f"{field}:") for reason in together)]
        accepted = [supported_k3(), supported_k3(tensor_parallel=16), supported_k3(speculation="none", drafts=0)]
        wrongly = sum(bool(refused_reasons(deployment)) for deployment in accepted)
        table = {"title": "Refusals", "columns": ["setting", "tried", "reason given"], "rows": rows}
        return (
            Measurement(name="settings_tried", value=len(rows), unit="count"),
            Measurement(name="not_refused", value=not_refused, unit="count"),
            Measurement(name="missing_when_combined", value=len(missing), unit="count"),
            Measurement(name="wrongly_refused", value=wrongly, unit="count"),
        ), {"tables": [table]}


@dataclass(frozen=True)
class FallbackCheck(_Decision):
    """Each step shape is decided and executed; the executed launches, not the decision, say which path ran."""

    id: str = "scope.fallback"

    def cases(self) -> Iterable[Case]:
        return [Case(subject="steps")]

    def limits(self, case: Case) -> tuple[Limit, ...]:
        why = load_policy().sentence(self.id)
        return (
            Limit(measurement="steps_executed", op=">=", bound=len(STEPS), unit="count", why="every step shape of the scope table"),
            Limit(measurement="on_the_wrong_path", op="==", bound=0, unit="count", why=why),
            Limit(
                measurement="launches_off_plan",
                op="==",
                bound=0,
                unit="count",
                why="a specialised step runs its plan's launches, all of them",
            ),
            Limit(measurement="without_a_reason", op="==", bound=0, unit="count", why="the reason for stock is recorded per step"),
        )

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from kimi_k3_decode.config import NANO, Shard
        from kimi_k3_decode.plan import SPECIALIZED_BACKEND, Deployment, Plan
        from kimi_k3_decode.step import SpecializedPath, launch_graph
        from kimi_k3_decode.stock import StockPath
        from kimi_k3_decode.weights import random_weights

        weights = random_weights(NANO, seed=case.seed)
        plan = Plan.make(NANO, Deployment(speculation="dspark", drafts=7, decode_backend=SPECIALIZED_BACKEND))
        specialized, stock = SpecializedPath(weights), StockPath(weights)
        rows, wrong, off_plan, unexplained = [], 0, 0, 0
        for name, requests, q, uniform, wanted in STEPS:
            batch, caches = _batch(NANO, requests, q, uniform)
            decision = plan.decide(batch)
            specialized.executed = []
            (specialized if decision.path == "specialized" else stock).step(batch, caches)
            ran = "specialized" if specialized.executed else "stock"
            wrong += ran != wanted or decision.path != wanted
            unexplained += not decision.reason
            if ran == "specialized":
                planned = [launch.id for launch in launch_graph(NANO, Shard(config=NANO), decision.requests * q, q)]
                off_plan += len(set(planned) ^ set(specialized.executed))
            rows.append([name, requests * q, ran, len(specialized.executed), decision.reason])
        table = {"title": "Where each step ran", "columns": ["step", "rows", "path", "specialised launches", "reason"], "rows": rows}
        return (
            Measurement(name="steps_executed", value=len(rows), unit="count"),
            Measurement(name="on_the_wrong_path", value=wrong, unit="count"),
            Measurement(name="launches_off_plan", value=off_plan, unit="count"),
            Measurement(name="without_a_reason", value=unexplained, unit="count"),
        ), {"tables": [table]}


def _batch(config: Any, requests: int, q: int, uniform: bool) -> tuple[Any, Any]:
    """A first step over empty caches for `requests` requests of q tokens each."""
    import torch

    from kimi_k3_decode.cache import Caches

    caches = Caches.allocate(config, n_requests=requests, max_tokens=16, q_max=max(q, 8))
    batch = caches.batch(torch.full((requests, q), 5), [caches.acquire() for _ in range(requests)])
    batch.uniform = uniform
    return batch, caches


@dataclass(frozen=True)
class RankUniformCheck(_Decision):
    """Every rank's plan digest and every rank's decision on every step shape are equal; a rank that differs is found by `agree`."""

    id: str = "scope.rank_uniform"

    def cases(self) -> Iterable[Case]:
        return [Case(subject="ranks", params={"tp": tp}) for tp in (8, 16)]

    def limits(self, case: Case) -> tuple[Limit, ...]:
        why = load_policy().sentence(self.id)
        return (
            Limit(measurement="distinct_digests", op="==", bound=1, unit="count", why=why),
            Limit(measurement="distinct_launch_lists", op="==", bound=1, unit="count", why="ranks run the same launches in the same order"),
            Limit(measurement="odd_rank_noticed", op="==", bound=1, unit="count", why="a rank started differently must stop the start-up"),
        )

    def measure(self, case: Case, targets: Mapping[str, Target]) -> tuple[tuple[Measurement, ...], Mapping[str, Any]]:
        from kimi_k3_decode.config import K3, NANO, Shard, Unsupported
        from kimi_k3_decode.plan import SPECIALIZED_BACKEND, Deployment, Plan, agree
        from kimi_k3_decode.step import launch_graph, plan_digest

        tp = int(case.params["tp"])
        # The digest of a start-up, whose inputs are the same code for every model; nano's graphs are the small ones.
        deployment = Deployment(speculation="dspark", drafts=7, decode_backend=SPECIALIZED_BACKEND)
        digests = [Plan.make(NANO, deployment).digest() for _ in range(2)]
        lists = set()
        for rank in range(tp):
            lists.add(plan_digest(launch_graph(K3, Shard(config=K3, tp=tp, rank=rank), 8, 8)))  # leaves the rank's own number out
        odd = Plan.make(NANO, dataclasses.replace(deployment, kv_cache_dtype="float8_e4m3fn")).digest()
        try:
            agree([*digests, odd])
            noticed = 0
        except Unsupported:
            noticed = 1
        return (
            Measurement(name="distinct_digests", value=len(set(digests)), unit="count"),
            Measurement(name="distinct_launch_lists", value=len(lists), unit="count"),
            Measurement(name="odd_rank_noticed", value=noticed, unit="count"),
        ), {}


def decision_checks() -> list[Check]:
    return [RefusalsCheck(), FallbackCheck(), RankUniformCheck()]
