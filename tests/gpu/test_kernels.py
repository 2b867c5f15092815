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

from kimi_k3_decode.config import NANO, Shard  # noqa: E402 - only with a GPU
from kimi_k3_decode.gpu_step import GpuPath  # noqa: E402
from kimi_k3_decode.random_init import draw_weights  # noqa: E402
from perf.kernels import edges, nano  # noqa: E402
from perf.kernels.__main__ import distinct  # noqa: E402
from perf.kernels.check import check  # noqa: E402


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


@pytest.mark.parametrize("tp", [1, 2])
def test_bits_do_not_depend_on_how_it_is_launched(tp) -> None:
    weights = draw_weights(NANO, 5).to(torch.bfloat16)
    start = nano.started(3, 1)
    digests = set()
    for options in ({}, {"pdl": False}, {"graphs": False}, {}):
        caches = nano.on_device(start, "cuda")
        digests.add(nano.digest(nano.walk(GpuPath(weights, tp, **options), caches, 3, 1), caches))
    assert len(digests) == 1


def test_executed_launches_are_the_plan() -> None:
    from kimi_k3_decode.launches import launch_graph

    path = GpuPath(draw_weights(NANO, 5).to(torch.bfloat16))
    nano.walk(path, nano.on_device(nano.started(1, 1), "cuda"), 1, 1)
    assert path.executed() == [launch.id for launch in launch_graph(NANO, Shard(config=NANO), 1, 1)]
