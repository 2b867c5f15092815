"""Faults in the plan, the message protocol, the launch graph and the decisions: planted by replacing one function of the real code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from validation.mutants.model import ACCEPTANCE, GRAPH, SCHEDULE, SCOPE, Mutant, patched


# ---- messages between ranks ----
def _publish_without_canonical() -> AbstractContextManager[None]:
    """NaN is published with the bits it has; one pattern of them means "not arrived yet"."""
    from kimi_k3_decode import comm

    return patched((comm, "canonical", lambda data: data.clone()))


def _rearm_dropped() -> AbstractContextManager[None]:
    """The consumer leaves the other parity as it is."""
    from kimi_k3_decode.comm import Mailbox

    def consume(self: Any, reader: int, parity: int) -> Any:
        return self.buffers[reader][parity]

    return patched((Mailbox, "consume", consume))


def _one_box_parity() -> AbstractContextManager[None]:
    """Every message of a mailbox goes through the same buffer."""
    from kimi_k3_decode.launches import _Builder

    return patched((_Builder, "mailbox", lambda self, name, message: f"mailbox.{name}.0"))


def _parity_baked() -> AbstractContextManager[None]:
    """The parity of the step in which a graph was captured is replayed in every step."""
    from kimi_k3_decode.step import SpecializedPath

    real = SpecializedPath._graphs_of
    return patched((SpecializedPath, "_graphs_of", lambda self, rows, q, step, forced: real(self, rows, q, 0, forced)))


# ---- the order of launches ----
def _reordered(change: Callable[[list[Any]], list[Any]]) -> Callable[..., list[Any]]:
    from kimi_k3_decode import launches

    real = launches.launch_graph
    return lambda *arguments, **options: change(real(*arguments, **options))


def _moved_before(op: str, target_op: str) -> Callable[[], AbstractContextManager[None]]:
    """In every layer, `op` is issued just before `target_op` although it comes after it."""

    def plant() -> AbstractContextManager[None]:
        from kimi_k3_decode import step

        def change(graph: list[Any]) -> list[Any]:
            for launch in [x for x in graph if x.op == op]:
                before = next((x for x in graph if x.op == target_op and x.layer == launch.layer), None)
                if before is not None:
                    graph.remove(launch)
                    graph.insert(graph.index(before), launch)
            return graph

        return patched((step, "launch_graph", _reordered(change)))

    return plant


def _edge_dropped(op: str) -> Callable[[], AbstractContextManager[None]]:
    """The event that joins the two streams at `op` is not there."""

    def plant() -> AbstractContextManager[None]:
        from kimi_k3_decode import launches

        def change(graph: list[Any]) -> list[Any]:
            return [replace(launch, waits_on=()) if launch.op == op else launch for launch in graph]

        return patched((launches, "launch_graph", _reordered(change)))

    return plant


def _full_edge_lost() -> AbstractContextManager[None]:
    """The step's first launch is programmatic too, so it may start while the host still refills the tables."""
    from validation.ordering import graph_inputs

    real = graph_inputs.from_plan

    def from_plan(plans: Sequence[Any], **options: Any) -> Any:
        graph = real(plans, **options)
        kind = next(edge.kind for edge in graph.edges if edge.kind.value == "programmatic")
        from validation.ordering.graph_order import Waits

        edges = tuple(replace(edge, kind=kind) if edge.target.startswith("embedding") else edge for edge in graph.edges)
        nodes = tuple(replace(node, waits=Waits.NONE) if node.op == "embedding" else node for node in graph.nodes)
        return replace(graph, edges=edges, nodes=nodes)

    return patched((graph_inputs, "from_plan", from_plan))


def _wait_missing(op: str) -> Callable[[], AbstractContextManager[None]]:
    """`op` is launched programmatically and its code never waits."""

    def plant() -> AbstractContextManager[None]:
        from validation.ordering import graph_inputs
        from validation.ordering.graph_order import Waits

        real = graph_inputs.from_plan
        return patched((graph_inputs, "from_plan", lambda plans, **options: real(plans, waits={op: Waits.NONE})))

    return plant


def _prefetch_of_inputs() -> AbstractContextManager[None]:
    """The side stream pulls whatever a launch reads, not only weights."""
    from kimi_k3_decode import prefetch
    from kimi_k3_decode.ops.contract import Role

    def ranges(launch: Any, operands: Any = None) -> tuple[Any, ...]:
        wanted = launch.contract.of_role(Role.WEIGHT, Role.INPUT)
        return tuple(
            prefetch.Range(launch=launch.id, operand=o.name, buffer=launch.bindings[o.name][0], begin_bytes=0, size_bytes=o.bytes)
            for o in wanted
            if o.bytes
        )

    return patched((prefetch, "weight_ranges", ranges))


# ---- decisions ----
def _predicate_dropped() -> AbstractContextManager[None]:
    from kimi_k3_decode.plan import Deployment

    real = Deployment._predicates
    return patched((Deployment, "_predicates", lambda self, config: [p for p in real(self, config) if p[0] != "lora"]))


def _first_reason_only() -> AbstractContextManager[None]:
    from kimi_k3_decode.plan import Deployment

    real = Deployment.unsupported
    return patched((Deployment, "unsupported", lambda self, config: real(self, config)[:1]))


def _never_runs() -> AbstractContextManager[None]:
    from kimi_k3_decode.plan import STOCK, Decision, Plan

    return patched((Plan, "decide", lambda self, batch: Decision(path=STOCK, reason="not today")))


def _ranks_not_compared() -> AbstractContextManager[None]:
    from kimi_k3_decode import plan

    return patched((plan, "agree", lambda digests: None))


# ---- acceptance ----
def _al_off_by_one() -> AbstractContextManager[None]:
    """The anchor is counted as an accepted draft."""
    from kimi_k3_decode.dspark import AcceptanceCount

    real = AcceptanceCount.add
    return patched((AcceptanceCount, "add", lambda self, accepted: real(self, [n + 1 for n in accepted])))


def _row_zero_dropped() -> AbstractContextManager[None]:
    """Draft t is judged by the row after its own, so the anchor's row decides nothing."""
    import torch

    from kimi_k3_decode import dspark

    def verify(logits_BQV: torch.Tensor, drafts_BN: torch.Tensor) -> Any:
        best_BQ = dspark.lowest_argmax(logits_BQV)
        accepted_B = (best_BQ[:, 1:] == drafts_BN).long().cumprod(1).sum(1)
        return dspark.Verified(accepted_B=accepted_B, next_B=best_BQ.gather(1, accepted_B.unsqueeze(1)).squeeze(1))

    return patched((dspark, "verify_greedy", verify))


def _synthetic_too_long() -> AbstractContextManager[None]:
    """Synthetic acceptance accepts one draft more than asked for whenever there is one."""
    from kimi_k3_decode.dspark import SyntheticAcceptance

    real = SyntheticAcceptance.accepted
    return patched((SyntheticAcceptance, "accepted", lambda self, request, step: min(real(self, request, step) + 1, self.n_drafts)))


def _m(identity: str, fault: str, kind: str, sentence: str, claim: str, killed_by: str, plant: Any, also: tuple[str, ...] = ()) -> Mutant:
    return Mutant(id=identity, fault=fault, kind=kind, sentence=sentence, claim=claim, killed_by=killed_by, plant=plant, also=also)


SCHED = "C-SCHED-1"


def mutants() -> list[Mutant]:
    graph, also = "schedule.graph", ("schedule.graph", "schedule.messages", "numerics.state_layout")
    return [
        _m("publish_without_canonical", "F09", SCHEDULE, "NaN published with the sentinel's bits", SCHED, "schedule.messages",
           _publish_without_canonical, ("numerics.nonfinite", "numerics.state_layout")),
        _m("rearm_dropped", "F09", SCHEDULE, "mailboxes are not re-armed", SCHED, "schedule.messages", _rearm_dropped,
           ("schedule.ranks", "numerics.state_layout")),
        _m("one_box_parity", "F08", SCHEDULE, "every message uses the same buffer", SCHED, "schedule.ranks", _one_box_parity, also),
        _m("parity_baked", "F07", SCHEDULE, "the parity is baked into the graph", SCHED, "schedule.replay", _parity_baked, also),
        _m("tail_before_shared", "F05", SCHEDULE, "the sum is taken before the side stream wrote its part", SCHED, "schedule.poison",
           _moved_before("moe_tail", "shared_down"), ("schedule.graph", "numerics.state_layout")),
        _m("shared_before_boundary", "F06", SCHEDULE, "the side stream overtakes the boundary that makes its input", "C-NUM-1",
           "numerics.state_layout", _moved_before("shared_up", "o_proj"), ("schedule.graph", "schedule.poison", "numerics.verify")),
        _m("prefetch_of_inputs", "F26", SCHEDULE, "activations are prefetched", SCHED, "schedule.prefetch", _prefetch_of_inputs,
           ("numerics.state_layout",)),
        _m("edge_to_shared_dropped", "F06", GRAPH, "no event from the boundary to the side stream", SCHED, graph,
           _edge_dropped("shared_up"), ("schedule.poison", "numerics.state_layout")),
        _m("edge_to_tail_dropped", "F08", GRAPH, "no event from the side stream back", SCHED, graph, _edge_dropped("latent_reduce"),
           ("schedule.poison", "numerics.state_layout")),
        _m("kda_never_waits", "F03", GRAPH, "programmatic launch, no wait in the code", SCHED, graph, _wait_missing("kda"),
           ("schedule.poison", "numerics.state_layout")),
        _m("first_launch_early", "F05", GRAPH, "the step starts while tables are refilled", SCHED, graph, _full_edge_lost,
           ("schedule.poison", "numerics.state_layout")),
        _m("predicate_dropped", "scope", SCOPE, "LoRA is no longer refused", "C-SCO-1", "scope.refusals", _predicate_dropped),
        _m("first_reason_only", "scope", SCOPE, "only the first reason is given", "C-SCO-1", "scope.refusals", _first_reason_only),
        _m("never_runs", "F18", SCOPE, "every step is decided stock", "C-SCO-1", "scope.fallback", _never_runs),
        _m("ranks_not_compared", "F10", SCOPE, "ranks that decide differently start anyway", "C-SCO-1", "scope.rank_uniform",
           _ranks_not_compared),
        _m("al_off_by_one", "F19", ACCEPTANCE, "the anchor counts as accepted", SCHED, "schedule.acceptance", _al_off_by_one),
        _m("row_zero_dropped", "F19", ACCEPTANCE, "drafts judged by the row after theirs", SCHED, "schedule.acceptance",
           _row_zero_dropped),
        _m("synthetic_too_long", "F19", ACCEPTANCE, "synthetic acceptance one draft too long", SCHED, "schedule.acceptance",
           _synthetic_too_long),
    ]  # fmt: skip
