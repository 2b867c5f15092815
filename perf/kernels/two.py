"""Two ranks on two GPUs over peer memory: nano-K3 and K3-wide layers split in two, beside the same ranks on one GPU and one rank alone.

One process drives both devices; a rank's kernels store into the other device's mailboxes and spin on their own. Bits must be those of two
virtual ranks on one device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kimi_k3_decode.config import NANO
from kimi_k3_decode.gpu_step import GpuPath
from kimi_k3_decode.placement import enable_peers
from kimi_k3_decode.random_init import draw_weights
from kimi_k3_decode.step import SpecializedPath
from perf.kernels.__main__ import QUARTER
from perf.kernels.layer import RankLoop, layers_of
from perf.kernels.speed import times_of
from perf.kernels.timing import Timed, timed
from validation.schedule.gpu_runs import bits, digest, filled_caches, merged, on_device, relative_rms, walk

DEVICES = (torch.device("cuda", 0), torch.device("cuda", 1))
NANO_SHAPES = ((1, 1), (3, 1), (8, 1), (64, 1), (2, 8), (8, 8))
LAYER_SHAPES = ((1, 1), (8, 1), (64, 1), (8, 8))
LAYERS = (4, 5)
PASSES = 20
SEED = 11


def run(records: Any) -> int:
    """Records of everything above; returns how many did not hold. Refused, as a record, where there are not two GPUs with peer access."""
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(*DEVICES):
        records.add({"case": "two-gpus", "error": f"not run: got {torch.cuda.device_count()} GPU, needs two with peer access"})
        return 1
    enable_peers(DEVICES)
    failed = 0
    weights = draw_weights(NANO, SEED).to(torch.bfloat16)
    parts: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for n, q in NANO_SHAPES:
        parts.append((f"two-gpus-nano-tp2-b{n}-q{q}", partial(nano, weights, n, q)))
    for n in (1, 8):
        parts.append((f"two-gpus-nano-steps-b{n}", partial(nano_times, weights, n)))
    for rows, q in LAYER_SHAPES:
        parts.append((f"two-gpus-k3-tp2-r{rows}-q{q}", partial(layer, rows, q)))
    for case, part in parts:
        begin = time.perf_counter()
        try:
            record = part()
        except Exception as error:
            record = {"error": f"{type(error).__name__}: {error}"[:600], "holds": False}
        record = {"case": case, "gpus_count": 2, **record, "seconds": round(time.perf_counter() - begin, 2)}
        records.add(record)
        failed += not record["holds"]
        print({k: v for k, v in record.items() if not k.endswith("samples")}, flush=True)
        torch.cuda.empty_cache()
    return failed


# ---- nano ----
def nano(weights: Any, requests: int, q: int) -> dict[str, Any]:
    """Logits and caches of two GPUs: bits in every way of launching, and of virtual ranks; error beside contract execution's."""
    start = filled_caches(NANO, requests, q, SEED)
    exact = walk(SpecializedPath(weights.to(torch.float64), torch.float64, tp=2), start.fork(torch.float64), q, SEED)
    routing = [dict(output.routing or {}) for output in exact]
    contract = walk(SpecializedPath(weights, tp=2), start.fork(), q, SEED, routing)
    digests = {}
    ways: dict[str, dict[str, Any]] = {"pdl": {}, "no_pdl": {"pdl": False}, "single_launches": {"graphs": False}, "again": {}}
    for name, options in ways.items():
        each = [on_device(start, device) for device in DEVICES]
        digests[name] = digest(walk(GpuPath(weights, 2, devices=DEVICES, **options), each, q, SEED), merged(each))
    virtual = on_device(start, DEVICES[0])
    digests["virtual_ranks"] = digest(walk(GpuPath(weights, 2), virtual, q, SEED), virtual)
    each = [on_device(start, device) for device in DEVICES]
    forced = walk(GpuPath(weights, 2, devices=DEVICES), each, q, SEED, routing)
    errors = [relative_rms([o.logits_BQV for o in outputs], [e.logits_BQV for e in exact]) for outputs in (forced, contract)]
    broken = [] if len(set(digests.values())) == 1 else ["digests differ"]
    broken += [] if errors[0] <= 1.5 * errors[1] else ["error above 1.5 x contract execution's"]
    return {"digests": digests, "kernel_error": errors[0], "contract_error": errors[1], "broken": broken, "holds": not broken}


def nano_times(weights: Any, requests: int, steps: int = 200) -> dict[str, Any]:
    """Wall time of a step on two GPUs and on one, host work included."""
    found: dict[str, Any] = {}
    for name, tp, devices in (("two_gpus", 2, DEVICES), ("one_gpu", 1, DEVICES[:1])):
        path = GpuPath(weights, tp, devices=devices, probes=False)
        each = [on_device(filled_caches(NANO, requests, 1, SEED), device) for device in devices]
        batch, *_ = (one.batch(torch.full((requests, 1), 7), list(range(requests))) for one in each)
        samples = []
        for number in range(steps + 10):
            begin = time.perf_counter()
            path.step(batch, each)
            if number >= 10:
                samples.append(1e6 * (time.perf_counter() - begin))
        found |= times_of(f"{name}_step", timed(samples))
    return {**found, "what": "a whole step of nano, host time included, microseconds", "holds": True}


# ---- K3-wide layers ----
_WEIGHTS: dict[tuple[torch.device, int], dict[str, torch.Tensor]] = {}  # of a rank on a device, kept over all shapes


def loops(rows: int, q: int, devices: Sequence[torch.device], *, pdl: bool) -> list[RankLoop]:
    """Both ranks, connected; rank r on devices[r]."""
    made = []
    for rank, device in enumerate(devices):
        with torch.cuda.device(device):
            weights = _WEIGHTS.setdefault((device, rank), {})
            made.append(RankLoop(QUARTER, layers_of(QUARTER, 2, LAYERS, rows, q, rank), pdl=pdl, shared_weights=weights))
    for loop, device in zip(made, devices, strict=True):
        with torch.cuda.device(device):
            loop.connect(made)
    return made


def load(ranks: Sequence[RankLoop]) -> None:
    """Launch every kernel once by itself over boxes without sentinels, then put all buffers back: loading must not meet a spinner."""
    kept = [{name: tensor.clone() for name, tensor in rank.buffers.items()} for rank in ranks]
    boxes = [box for rank in ranks for name, box in rank.buffers.items() if name.startswith("mailbox.")]
    for rank in ranks:
        with torch.cuda.device(rank.device):
            for bound in rank.bound:
                for box in boxes:
                    box.zero_()
                synchronize()
                rank.issue_one(bound)
                torch.cuda.synchronize()
    for rank, values in zip(ranks, kept, strict=True):
        for name, value in values.items():
            rank.buffers[name].copy_(value)
    synchronize()


def synchronize() -> None:
    for device in DEVICES:
        torch.cuda.synchronize(device)


def graphs_of(ranks: Sequence[RankLoop]) -> list[torch.cuda.CUDAGraph]:
    """One graph a rank, captured on a stream of its own."""
    graphs = []
    for rank in ranks:
        with torch.cuda.device(rank.device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(rank.device)):
                rank.issue()
            graphs.append(graph)
    return graphs


def replay_together(ranks: Sequence[RankLoop], graphs: Sequence[Any], streams: Sequence[Any]) -> None:
    for rank, graph, stream in zip(ranks, graphs, streams, strict=True):
        with torch.cuda.device(rank.device), torch.cuda.stream(stream):
            graph.replay()


def after_passes(ranks: Sequence[RankLoop], passes: int) -> list[dict[str, torch.Tensor]]:
    """Every buffer of each rank behind `passes` replays of all layers."""
    load(ranks)
    graphs = graphs_of(ranks)
    streams = [torch.cuda.Stream(rank.device) for rank in ranks]
    for _ in range(passes):
        replay_together(ranks, graphs, streams)
    synchronize()
    return [{name: tensor.to(DEVICES[0]) for name, tensor in rank.buffers.items()} for rank in ranks]


def layer(rows: int, q: int) -> dict[str, Any]:
    """Two layers as two ranks: bits against virtual ranks, and the time of a layer beside one rank alone."""
    real = loops(rows, q, DEVICES, pdl=True)
    found = after_passes(real, PASSES)
    virtual = loops(rows, q, (DEVICES[0],) * 2, pdl=False)
    wanted = after_passes(virtual, PASSES)
    compared = [(r, name) for r in range(2) for name in found[r] if not name.startswith("table.")]
    wrong = [f"rank {r} {name}" for r, name in compared if not torch.equal(bits(found[r][name]), bits(wanted[r][name]))]
    not_finite = [f"rank {r} {name}" for r, name in compared if name.startswith("prefix.") and not bool(found[r][name].isfinite().all())]
    times = layer_times(real)
    sick = sum(int(rank.health[0]) for rank in (*real, *virtual))
    broken = [*wrong[:8], *not_finite[:8], *(["a wait ran out"] if sick else [])]
    return {
        "what": "a KDA + MoE layer with a quarter of K3's heads and expert widths as two ranks, whose shares are those of TP8 (mean of "
        "layers 4 and 5), microseconds a layer, the slower rank of each replay",
        "passes_count": PASSES,
        "buffers_compared_count": len(compared),
        "waits_that_ran_out_count": sick,
        "broken": broken,
        "holds": not broken,
        **times,
    }


def layer_times(real: Sequence[RankLoop], replays: int = 60) -> dict[str, Any]:
    """Replays of both ranks together, and of rank 0 with its messages looped back, in turns."""
    graphs, streams = graphs_of(real), [torch.cuda.Stream(rank.device) for rank in real]
    with torch.cuda.device(DEVICES[0]):
        alone = RankLoop(QUARTER, real[0].plan, shared_weights=real[0].weights).connect()
        single = graphs_of([alone])[0]
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)] for _ in range(3)]
    for number in range(replays):
        for rank, (device, stream) in enumerate(zip(DEVICES, streams, strict=True)):
            with torch.cuda.device(device):
                events[rank][number][0].record(stream)
        replay_together(real, graphs, streams)
        for rank, (device, stream) in enumerate(zip(DEVICES, streams, strict=True)):
            with torch.cuda.device(device):
                events[rank][number][1].record(stream)
        synchronize()
        with torch.cuda.device(DEVICES[0]), torch.cuda.stream(streams[0]):
            events[2][number][0].record()
            single.replay()
            events[2][number][1].record()
        synchronize()

    def spans(which: int) -> list[float]:
        return [1e3 * begin.elapsed_time(end) / len(LAYERS) for begin, end in events[which][1:]]

    together: Timed = timed([sorted(pair)[-1] for pair in zip(spans(0), spans(1), strict=True)])
    return {**times_of("two_gpus", together), **times_of("rank_alone", timed(spans(2))), "replays_count": replays - 1}
