"""The sentences of the RFC that this suite carries, each with the checks behind it and what would prove it where a profile cannot.

`required_in` names the profiles in which missing evidence is exit code 2. A claim outside its profile's reach is listed as not proven and
changes no exit code. Check names may be patterns: `numerics.op.*` means every check whose id starts so, and at least one.
"""

from __future__ import annotations

from validation.core.types import Claim

ALL = ("embedded", "gpu", "serving")
# Behind two servers there is no oracle and no kernel to look at: C-SERVE-1 and C-SERVE-2 ask instead.
IN_PROCESS = ("embedded", "gpu")

CLAIMS: tuple[Claim, ...] = (
    # ---- scope ----
    Claim(
        id="C-SCO-1",
        sentence="The path is isolated and opt-in, refuses with every reason, on every rank alike, and leaves the rest to stock.",
        lane="scope",
        checks=("scope.*",),
        required_in=ALL,
        proven_by="fasttrack run --lanes scope; on another repository: fasttrack scope --repo DIR --base REV",
    ),
    # ---- ordering ----
    Claim(
        id="C-ORD-1",
        sentence="No load of data written during the step can move ahead of the wait that orders it, in the shipped binaries.",
        lane="ordering",
        checks=("ordering.*",),
        required_in=ALL,
        proven_by="make audit",
    ),
    # ---- numerics ----
    Claim(
        id="C-NUM-1",
        sentence="Each sublayer's error against an FP64 oracle is at most 1.5 times the stock path's own, on the same inputs.",
        lane="numerics",
        checks=(
            "numerics.sublayer",
            "numerics.routing_scale",
            "numerics.padding",
            "numerics.slots",
            "numerics.verify",
            "numerics.row_count",
            "numerics.ties",
            "numerics.nonfinite",
            "numerics.state_layout",
        ),
        required_in=IN_PROCESS,
        proven_by="make numerics",
    ),
    Claim(
        id="C-NUM-2",
        sentence="End to end, routing forced and free, the error against the oracle is at most 1.5 times stock's; no NaN stays hidden.",
        lane="numerics",
        checks=("numerics.end_to_end", "numerics.nonfinite"),
        required_in=IN_PROCESS,
        proven_by="make numerics",
    ),
    Claim(
        id="C-NUM-3",
        sentence="Per token, up to 32 k tokens of real prefill, the path stays as close to the oracle as stock does, without drift.",
        lane="numerics",
        checks=("numerics.long_context", "numerics.long_context_overall"),
        required_in=IN_PROCESS,
        proven_by="make numerics",
    ),
    Claim(
        id="C-NUM-4",
        sentence="The same holds at page, power-of-two and maximum positions up to 1,048,575.",
        lane="numerics",
        checks=("numerics.far_context", "numerics.far_context_overall"),
        required_in=IN_PROCESS,
        proven_by="make numerics",
    ),
    # ---- schedule ----
    Claim(
        id="C-SCHED-1",
        sentence="A step reads only what it or a step before wrote: poison, delays, skewed ranks and replays change no bit.",
        lane="schedule",
        checks=("schedule.*",),
        required_in=IN_PROCESS,
        proven_by="fasttrack run --lanes schedule",
    ),
    # ---- evals ----
    Claim(
        id="C-EVAL-1",
        sentence="On each suite the score is within one standard error of stock's, and no drop above the allowed one is left open.",
        lane="evals",
        checks=("evals.gate.*",),
        required_in=IN_PROCESS,
        proven_by="make evals",
    ),
    # ---- what this profile cannot reach ----
    Claim(
        id="C-KERNEL-1",
        sentence="The kernels themselves, not their contracts, give these results on the GPU, and the new path is what ran.",
        lane="schedule",
        checks=("schedule.gpu.*",),
        required_in=("gpu",),
        proven_by="fasttrack run --profile gpu on a Hopper or Blackwell machine",
    ),
    Claim(
        id="C-SERVE-1",
        sentence="A real server with the path on and off gives the same evals on the full suites, at 1 and at many concurrent requests.",
        lane="evals",
        checks=("evals.serving.*",),
        required_in=("serving",),
        proven_by="fasttrack init, then make validate PROFILE=serving CONFIG=validate.toml",
    ),
    Claim(
        id="C-SERVE-2",
        sentence="Per token on the servers, up to the longest served context, the candidate is as close to stock as stock is to itself.",
        lane="numerics",
        checks=("numerics.serving.*",),
        required_in=("serving",),
        proven_by="fasttrack init, then make validate PROFILE=serving CONFIG=validate.toml",
    ),
    Claim(
        id="C-SERVE-3",
        sentence="No load is answered more slowly than by stock; both servers' speed is measured, no request lost, and in the matrix.",
        lane="perf",
        checks=("perf.serving.*",),
        required_in=(),
        proven_by="the same, with bench in [perf] of validate.toml",
    ),
    Claim(
        id="C-PERF-1",
        sentence="The decode step is faster than the strongest stock configuration in every cell of the matrix, with the spread stated.",
        lane="perf",
        checks=("perf.layer", "perf.rank_step", "perf.step"),
        required_in=("gpu",),
        proven_by="published records of whole steps and of every row count, measured on a Hopper or Blackwell machine",
    ),
    Claim(
        id="C-PERF-2",
        sentence="Every cell of the matrix has a named source or a reason for refusal, and stock timed against stock is no difference.",
        lane="perf",
        checks=("perf.matrix", "perf.self_check", "perf.cpu_engine", "perf.acceptance", "perf.workloads"),
        required_in=("embedded", "gpu"),
        proven_by="make perf",
    ),
    Claim(
        id="C-MUT-1",
        sentence="Every required mutant is killed by the check it names, and the identical controls survive.",
        lane="mutants",
        checks=("mutants.*",),
        required_in=("embedded", "gpu"),
        proven_by="make mutants",
    ),
)
