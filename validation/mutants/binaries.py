"""Faults in binaries: kernels of the ordering corpus compiled on the spot, a launch graph described in text, and a drifted toolchain.

The kernel is the mutant and the audit is the check: it must report the named rule. Near misses (the same shape, but right) are controls.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from validation.mutants.model import BINARY, GRAPH, TOOLCHAIN, Breach, Mutant, Seen, Trial

ARCH = "sm_90a"
CLAIM = "C-ORD-1"
# corpus case -> (fault, rule that must be reported, sentence)
KERNELS: Mapping[str, tuple[str, str, str]] = {
    "nc_pinned_by_barrier": ("F01", "MO002", "ptxas moves a non-coherent load above the wait"),
    "load_before_wait": ("F01", "MO001", "an activation is loaded before the wait"),
    "wait_in_one_role": ("F02", "MO007", "one warp role waits, the other reads"),
    "no_wait": ("F03", "MO005", "launched programmatically, never waits"),
    "wait_compiled_out": ("F04", "MO005", "the wait is compiled out by an architecture check"),
    "slots_before_wait": ("F05", "MO001", "the slot table is read before the wait"),
    "early_exit": ("F06", "MO004", "a block leaves without the wait"),
    "nc_sunk_below_release": ("F08", "MO017", "a read sinks below the release of its buffer"),
    "flag_relaxed_poll": ("F09", "MO001", "payload read after a relaxed poll of its flag"),
    "poll_without_loop": ("F09", "MO016", "a poll that is no loop"),
    "generic_write_async_read": ("F15", "MO010", "a bulk copy reads a shared stage that no fence made ready"),
    "descriptor_rewritten": ("F16", "MO010", "a TMA descriptor rewritten while in use"),
    "prefetch_of_input": ("F26", "MO008", "an activation is prefetched before the wait"),
}
NEAR_MISSES = ("nc_weight_pinned", "plain_pinned", "wait_in_both_roles", "exit_after_wait", "prefetch_of_weight", "descriptor_fenced")
# graph case -> (fault, kind of race)
GRAPHS: Mapping[str, tuple[str, str]] = {
    "overtaking_after_early_exit": ("F06", "a kernel overtakes its grand-producer"),
    "epoch_as_argument": ("F07", "a flag value baked into the graph"),
    "buffer_rewritten_under_reader": ("F08", "a buffer rewritten under its reader"),
}


def _cache() -> Path | None:
    """Inside a worker only its scratch folder can be written."""
    scratch = os.environ.get("FASTTRACK_SCRATCH")
    return Path(scratch) / "corpus" if scratch else None


def _seen(check: str, case: str, rules: list[str], wanted: str) -> Seen:
    hits = [rule for rule in rules if not wanted or rule == wanted]
    breaches = tuple(
        Breach(check=check, case=case, measurement=rule, value=float(rules.count(rule)), rule="== 0") for rule in dict.fromkeys(hits)
    )
    return Seen(check=check, cases=1, breaches=breaches)


def audit_case(name: str) -> Any:
    """The audit's result on one corpus kernel. Raises HarnessError where no compiler is installed."""
    from validation.core.types import HarnessError
    from validation.ordering.corpus_run import run_corpus

    report = run_corpus((ARCH,), names=(name,), cache=_cache(), jobs=1)
    found = [r for r in report.results if r.case == name and r.result is not None]
    if not found or found[0].result is None:
        notes = "; ".join(r.note for r in report.results if r.case == name)
        raise HarnessError(f"corpus case {name}: got no audited binary ({notes}), needs ptxas and nvcc")
    return found[0].result


def _kernel_trial(name: str, rule: str) -> Trial:
    def trial(targets: Mapping[str, Any]) -> Seen:
        findings = [f.rule for f in audit_case(name).findings if f.level.value != "note"]
        return _seen(f"ordering.{rule}" if rule else "ordering.any", name, findings, rule)

    return trial


def _graph_trial(name: str) -> Trial:
    def trial(targets: Mapping[str, Any]) -> Seen:
        from validation.ordering.corpus_cases import CORPUS
        from validation.ordering.graph_inputs import read_graph
        from validation.ordering.launch_graph import check_graph

        found = [f.rule for f in check_graph(read_graph(CORPUS / "graph" / f"{name}.toml"), name)]
        return _seen("ordering.MO012", name, found, "MO012")

    return trial


def _drift_trial(changes: Mapping[str, Any]) -> Trial:
    """The record was written from this binary; the next toolchain gives the changed one."""

    def trial(targets: Mapping[str, Any]) -> Seen:
        from validation.ordering import drift

        now = audit_case("plain_pinned")
        before = drift.rows_of([now])
        after = replace(now, **{key: value(getattr(now, key)) for key, value in changes.items()})
        found = [f.rule for f in drift.compare([after], before, {"ptxas": "13.4.59"}, {"ptxas": "13.5.0"})]
        return _seen("ordering.MO015", "plain_pinned", found, "MO015")

    return trial


def mutants() -> list[Mutant]:
    kernels = [
        Mutant(id=f"kernel_{name}", fault=fault, kind=BINARY, sentence=sentence, claim=CLAIM, killed_by=f"ordering.{rule}",
               trial=_kernel_trial(name, rule))
        for name, (fault, rule, sentence) in KERNELS.items()
    ]  # fmt: skip
    controls = [
        Mutant(id=f"control_kernel_{name}", fault="-", kind=BINARY, sentence="near miss: right, and looks wrong", claim=CLAIM, killed_by="",
               control=True, trial=_kernel_trial(name, ""))
        for name in NEAR_MISSES
    ]  # fmt: skip
    graphs = [
        Mutant(id=f"graph_{name}", fault=fault, kind=GRAPH, sentence=sentence, claim=CLAIM, killed_by="ordering.MO012",
               trial=_graph_trial(name))
        for name, (fault, sentence) in GRAPHS.items()
    ]  # fmt: skip
    drifts = [
        Mutant(
            id=name, fault="F22", kind=TOOLCHAIN, sentence=sentence, claim=CLAIM, killed_by="ordering.MO015", trial=_drift_trial(changes)
        )
        for name, sentence, changes in (
            ("upgrade_spills", "the new assembler spills registers", {"spill_bytes": lambda n: n + 96}),
            ("upgrade_other_code", "the same source, other instructions", {"code_digest": lambda d: d[::-1]}),
        )
    ]
    return [*kernels, *controls, *graphs, *drifts]
