"""Kernels on a GPU: every launch of nano-K3 against its FP64 oracle, the whole model's bits, and virtual ranks."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.gpu
# Virtual ranks spin on each other from streams of one device: they need hardware queues of their own.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("cutlass")

from kimi_k3_decode.config import NANO, Unsupported  # noqa: E402 - only with a GPU
from kimi_k3_decode.gpu_step import GpuPath  # noqa: E402
from kimi_k3_decode.random_init import draw_weights  # noqa: E402
from perf.kernels import edges  # noqa: E402
from perf.kernels.__main__ import distinct  # noqa: E402
from perf.kernels.check import check  # noqa: E402
from perf.kernels.layer import LayerLoop  # noqa: E402
from validation.core.types import Case  # noqa: E402
from validation.schedule import gpu  # noqa: E402


@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1)])
@pytest.mark.parametrize(("rows", "q"), [(1, 1), (3, 1), (8, 8), (64, 1)])
def test_every_launch_against_fp64(tp, rank, rows, q) -> None:
    for launch in distinct(NANO, tp, rank, rows, q):
        outcome = check(NANO, launch.contract, 7 + rows, launch.id, rank=rank)
        assert outcome.errors or outcome.op in ("route",), launch.id
        assert outcome.judged(), outcome


def test_edges_of_nano() -> None:
    for name, config, contract, options in edges.cases():
        if config is NANO:
            assert check(config, contract, 99, name, **options).judged(), (contract.op, name)


def test_nan_rows_stay_alone() -> None:
    for outcome in edges.isolation(NANO, 1, 8):
        assert not outcome.broken, outcome


def holds(check_id: str, **params: int) -> dict[str, float]:
    """Measure one case of the schedule lane on random nano weights; every limit must hold."""
    rule = next(c for c in gpu.gpu_checks() if c.id == check_id)
    case = Case(subject="nano", params=params)
    measurements, _ = rule.measured_by(case, draw_weights(NANO, 5).to(torch.bfloat16))
    values = {m.name: m.value for m in measurements}
    for limit in rule.limits(case):
        assert limit.measurement == "replays" or limit.holds(values[limit.measurement]), (limit, values)
    return values


@pytest.mark.parametrize("tp", [1, 2])
def test_bits_do_not_depend_on_how_it_is_launched(tp) -> None:
    assert holds("schedule.gpu.model", tp=tp, requests=3, q=1)["launches"] > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_replays_give_the_first_bits(tp) -> None:
    assert holds("schedule.gpu.replays", tp=tp, requests=3, q=1, replays=64)["replays"] == 64


def test_sleeping_kernels_give_the_same_bits() -> None:
    holds("schedule.gpu.delays", tp=2, requests=3, q=1)


def test_batches_that_grow_and_shrink_over_used_memory() -> None:
    """Kernels are shared between row counts and loaded before their producers ran: what lies in new buffers must not matter."""
    weights = draw_weights(NANO, 5).to(torch.bfloat16)
    start = gpu.on_device(gpu.filled_caches(NANO, 64, 1, 3), "cuda")
    tokens = torch.arange(64).remainder(120).add(4).view(64, 1)

    def logits(path: GpuPath, requests: int) -> torch.Tensor:
        caches = gpu.on_device(start, "cuda")
        return path.step(caches.batch(tokens[:requests], list(range(requests))), caches).logits_BQV

    path = GpuPath(weights, probes=False)
    for requests in (9, 33, 64, 63, 5):
        garbage = [torch.full((1 << size,), -(1 << 30), dtype=torch.int32, device="cuda") for size in range(8, 24)]
        del garbage
        assert torch.equal(logits(path, requests), logits(GpuPath(weights, probes=False), requests))


def test_ranks_that_cannot_all_be_resident_are_refused() -> None:
    model = gpu.model_of(4, None)
    start = gpu.on_device(gpu.filled_caches(model.config, 64, 1, 0), "cuda")
    with pytest.raises(Unsupported, match="ranks on one device"):
        gpu.walk(GpuPath(model, 4), start, 1, 0)


def test_a_rank_loop_alone_waits_for_nobody() -> None:
    loop = LayerLoop(NANO, 2, (1, 2), 3)
    for _ in range(3):
        loop.issue()
    torch.cuda.synchronize()
    assert int(loop.health[0]) == 0
    assert sorted(loop.chosen_experts()) == [1, 2]
