"""All mutants of all kinds, the checks each kind is tried on, and what cannot be expressed on a machine without a GPU.

Mutants of layers above this package (the evals) are found by dotted name, as lanes are.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from validation.core.registry import lane_exists
from validation.core.types import HarnessError
from validation.mutants import binaries, scheduled
from validation.mutants.model import PATH, Mutant
from validation.mutants.paths import PATH_MUTANTS

FAULTS = tuple(f"F{n:02d}" for n in range(1, 27))
UPPER_MODULES = ("evals.mutants", "perf.mutants")
CONTROL_SEEDS = 20
# At least one a lane, cheap, and where a lane has a number as its limit one that lies near it, so that a loosened limit lets it live.
QUICK = (
    "predicate_dropped", "kernel_load_before_wait", "graph_buffer_rewritten_under_reader", "kda_never_waits", "o_proj_coarse",
    "depends_on_rows", "router_ties_high", "last_tile_unwritten", "al_off_by_one", "eval_quiet_drop", "eval_truncated",
    "speed_launch_slower", "speed_length_overstated", "speed_of_a_wrong_kernel", "control_kernel_plain_pinned", "control_identical",
    "control_eval_0", "control_speed_equal",
)  # fmt: skip

# Places, in a check's own list of cases, of those that suffice: one layer of each kind, the shapes that differ, the nearest context.
CHEAP: Mapping[str, tuple[int, ...]] = {
    "numerics.sublayer": (13, 10, 16, 28),  # one verify step of 64 rows: KDA before its norm, KDA, MoE, MLA
    "numerics.state_layout": (0,),
    "numerics.end_to_end": (1,),
    "numerics.long_context": (0,),
    "numerics.long_context_overall": (),
    "numerics.far_context": (0,),
    "numerics.far_context_overall": (),
    "numerics.padding": (0,),
    "numerics.slots": (0, 2),
    "numerics.verify": (0, 3, 7),
    "numerics.row_count": (0, 8, 11),
    "schedule.ranks": (0,),
    "schedule.poison": (0,),
}
# Mutants with which a whole kill table also decodes items of an eval suite: faults of numbers, and faults of order. The latter give right
# answers until a race is lost, so what the evals say of them is the reason for the audit.
DECODED = (
    "kda_state_transposed", "kda_state_bf16", "conv_taps_shifted", "expert_scale_dropped", "router_ties_high", "mla_one_token_short",
    "o_proj_coarse", "edge_to_shared_dropped", "edge_to_tail_dropped", "kda_never_waits", "first_launch_early", "prefetch_of_inputs",
)  # fmt: skip
DECODED_ROWS = 40
# What other checks a wrong path is shown to, after the one that must kill it.
PATH_ALSO = ("numerics.sublayer", "numerics.state_layout", "schedule.poison")
# Places of the sublayer cases in which the fault of an operation can show.
SUBLAYER_OF: Mapping[str, tuple[int, ...]] = {
    "kda": (13, 10), "in_proj": (10,), "route": (16,), "experts_up": (16,), "latent_reduce": (16,), "attn_res": (10,),
    "mla_query": (28,), "mla_decode": (28,), "mla_merge": (28,), "sample": (10,), "o_proj": (10,),
}  # fmt: skip

# Parts of a class that only hardware shows. Each class has a mutant all the same; this says what that mutant does not cover, and so what a
# kernel with the fault planted on a GPU would add. No such kernel is among the mutants: they are contracts, binaries, graphs and tables.
BEYOND_REACH: Mapping[str, str] = {
    "F01": "the audit finds the moved load in the binary; that the race is lost takes a delayed producer beside the kernel on a GPU",
    "F03": "the audit finds the missing wait in the binary and in the graph; the wrong tokens appear only under load on a GPU",
    "F06": "the graph shows the overtaking; it happens when three kernels really overlap on a GPU",
    "F08": "the graph and the protocol show the reuse; it harms when ranks on several GPUs drift apart",
    "F02": "the audit proves the order; that stale data is really read takes two kernels overlapping on a GPU",
    "F09": "a hang of real polls needs a watchdog on a GPU; here a message that cannot become ready is counted",
    "F10": "a real deadlock needs ranks in processes of their own; here the digests that prevent it are compared",
    "F15": "shared-memory races inside a kernel need compute-sanitizer; here the missing fence and the unwritten tile are expressed",
    "F16": "a descriptor freed by the host needs an allocator under load; here the rewrite inside the kernel is expressed",
    "F17": "indices beyond 32 bits are reached by position arithmetic only; no cache of that size fits this machine",
    "F22": "a miscompile cannot be ordered from a compiler; drift of spills, registers and code digest is expressed",
    "F23": "the kernels choose by row count from fixed tables, so the configuration of one bucket is what can go wrong",
}


@cache
def all_mutants() -> Mapping[str, Mutant]:
    """By id, controls included. Raises HarnessError for an id used twice."""
    found: dict[str, Mutant] = {}
    for mutant in (*_paths(), *scheduled.mutants(), *binaries.mutants(), *_upper(), *_controls()):
        if mutant.id in found:
            raise HarnessError(f"mutants: got {mutant.id} twice, needs unique ids")
        found[mutant.id] = mutant
    return found


def _paths() -> Iterator[Mutant]:
    for path in PATH_MUTANTS.values():
        yield Mutant(
            id=path.id,
            fault=path.fault,
            kind=PATH,
            sentence=path.sentence,
            claim=path.claim,
            killed_by=path.killed_by,
            control=path.control,
            candidate=path.id,
            also=PATH_ALSO,
            subset={"numerics.sublayer": tuple(place for op in path.wrap for place in SUBLAYER_OF[op])} if path.wrap else {},
        )


def _upper() -> Iterator[Mutant]:
    for module in UPPER_MODULES:
        if lane_exists(module):
            yield from importlib.import_module(module).mutants()


def _controls() -> Iterator[Mutant]:
    """The stock path as the candidate, on other inputs each time: whatever it breaks is a fault of the suite."""
    also = ("numerics.sublayer", "numerics.state_layout", "numerics.padding", "numerics.ties")
    first = Mutant(
        id="control_stock_00", fault="-", kind=PATH, sentence="stock itself as the candidate", claim="", killed_by="", control=True,
        candidate="stock", also=also, subset={"numerics.sublayer": (13, 16), "numerics.ties": (2,)},
    )  # fmt: skip
    for seed in range(CONTROL_SEEDS):
        more = ("schedule.poison", "schedule.ranks", "schedule.messages", "numerics.end_to_end", "numerics.verify") if seed < 2 else ()
        yield replace(first, id=f"control_stock_{seed:02d}", seed=seed, also=(*also, *more))


def classes(mutants: Mapping[str, Mutant] | None = None) -> dict[str, list[str]]:
    """Fault class -> ids of its mutants."""
    found: dict[str, list[str]] = {fault: [] for fault in FAULTS}
    for mutant in (mutants or all_mutants()).values():
        if mutant.fault in found:
            found[mutant.fault].append(mutant.id)
    return found


def case_places(mutant: Mutant, check: str, n_cases: int) -> list[int]:
    """Places of the cases of a check to run for a mutant; all of them where nobody chose."""
    chosen: Any = mutant.subset.get(check, CHEAP.get(check))
    return [place for place in (range(n_cases) if chosen is None else chosen) if place < n_cases]
