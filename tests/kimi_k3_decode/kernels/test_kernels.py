"""Kernels without a GPU: they compile, refuse what their roles forbid, and their tables name what a step launches."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kimi_k3_decode.config import K3, NANO, Shard
from kimi_k3_decode.launches import launch_graph, layer_plan
from kimi_k3_decode.ops.contract import ContractError, Role

cutlass = pytest.importorskip("cutlass")

from kimi_k3_decode import compile as table  # noqa: E402 - needs cutlass
from kimi_k3_decode.device import active, tilings  # noqa: E402
from kimi_k3_decode.device.launcher import HEALTH, Kind, Launcher  # noqa: E402
from kimi_k3_decode.device.memory import Global, RoleError  # noqa: E402
from kimi_k3_decode.device.skinny import SHARED_LIMIT_BYTES, Tiling  # noqa: E402
from kimi_k3_decode.kernels import SPECS, kernel_spec  # noqa: E402
from kimi_k3_decode.ops.registry import CONTRACTS  # noqa: E402
from kimi_k3_decode.ops.route import kernel as route  # noqa: E402

ROOT = Path(__file__).parents[3]
BUCKETS = (1, 2, 3, 8, 16, 32, 64)


def test_every_launch_of_the_plan_has_a_kernel() -> None:
    assert set(SPECS) == set(CONTRACTS)


@pytest.mark.parametrize(("config", "tp"), [(K3, 8), (K3, 16), (NANO, 1), (NANO, 2)], ids=["k3-tp8", "k3-tp16", "nano-tp1", "nano-tp2"])
@pytest.mark.parametrize("rows", BUCKETS)
def test_parameters_follow_the_contract(config, tp, rows) -> None:
    """Each pointer parameter is an operand of the contract, with its role and type, and each operand but scratch is a parameter."""
    shard = Shard(config=config, tp=tp)
    for layer in (0, 3, 4):
        for launch in layer_plan(config, shard, layer, rows):
            spec = kernel_spec(config, launch.contract)
            pointers = [p for p in spec.params if p.kind in (Kind.OPERAND, Kind.BOXES, Kind.OTHER)]
            for p in pointers:
                assert launch.contract[p.name].role.value == p.role
                assert launch.contract[p.name].dtype == p.dtype
            wanted = {o.name for o in launch.contract.operands if o.role is not Role.SCRATCH}
            assert {p.name for p in pointers} == wanted, launch.op
            assert all(p.count == tp for p in spec.params if p.kind is Kind.BOXES)


def test_kernel_ids_tell_variants_apart() -> None:
    """One id, one set of compile-time values: two specs of an id must have the same parameters."""
    seen: dict[str, tuple] = {}
    for config, tp in ((NANO, 1), (NANO, 2)):
        for rows in (1, 8, 64):
            for launch in launch_graph(config, Shard(config=config, tp=tp), rows):
                spec = kernel_spec(config, launch.contract)
                kinds = tuple((p.kind, p.dtype, p.count) for p in spec.params)
                assert seen.setdefault(spec.id, kinds) == kinds


@pytest.mark.parametrize("rows", range(1, 65))
def test_tilings_fit_and_cover(rows) -> None:
    shapes = ((7168, 6288), (7168, 560), (7168, 768), (1536, 7168), (768, 7168), (3584, 896), (4224, 7168), (256, 656), (128, 256))
    for k, out in shapes:
        # Gate and up rows together only ever read the hidden vector.
        for m_tiles in (1, 2) if k in (K3.hidden_size, NANO.hidden_size) else (1,):
            t = tilings.choose(k=k, out_rows=out, rows=rows, m_tiles=m_tiles)
            assert t.shared_bytes <= SHARED_LIMIT_BYTES
            assert t.steps * t.warps_k * t.splits * 32 == k
            assert t.row_tile >= rows
            assert t.x_rows >= min(rows, t.row_tile)


def test_tiling_names_every_reason() -> None:
    with pytest.raises(ValueError, match=r"row_tile.*; x_rows.*; k: got 100"):
        Tiling(row_tile=12, x_rows=99, k=100)


def test_the_work_list_holds_every_routing() -> None:
    """However pairs fall on experts, their entries of at most `tokens` pairs fit into the list."""
    draws = random.Random(7)
    for _ in range(300):
        experts, pairs, tokens = draws.randint(1, 40), draws.randint(1, 200), draws.choice((1, 2, 4, 8))
        counts = [0] * experts
        for _ in range(pairs):
            counts[draws.randrange(experts) if draws.random() < 0.5 else 0] += 1
        assert sum(-(-n // tokens) for n in counts) <= active.entries(experts, pairs, tokens)
    with pytest.raises(ValueError, match="work list: got 5000 experts"):
        active.entries(5000, 16, 4)


@pytest.mark.parametrize(("config", "tp"), [(K3, 8), (K3, 16), (NANO, 1), (NANO, 2)], ids=["k3-tp8", "k3-tp16", "nano-tp1", "nano-tp2"])
def test_two_blocks_of_experts_fit_a_multiprocessor(config, tp) -> None:
    """Two blocks each, but for `experts_down` above 32 rows, which fills a multiprocessor alone."""
    for rows in BUCKETS:
        up = kernel_spec(config, CONTRACTS["experts_up"](Shard(config=config, tp=tp), rows=rows))
        down = kernel_spec(config, CONTRACTS["experts_down"](Shard(config=config, tp=tp), rows=rows))
        each = (228 << 10) // 2 - 1024
        assert up.make().shared_bytes <= each
        assert down.make().shared_bytes <= (each if rows <= 32 else SHARED_LIMIT_BYTES)
        kernel = up.make()
        assert 0 < up.scalars({"processors": 132})["blocks"] <= 132 * kernel.resident
        assert kernel.resident * (kernel.shared_bytes + 1024) <= 228 << 10


def test_a_single_row_has_kernels_of_its_own() -> None:
    """Its choices are the work list: every expert's tiles have a block of their own, and none of the buckets' kernels is used."""
    for tp in (8, 16):
        shard = Shard(config=K3, tp=tp)
        one, two = (kernel_spec(K3, CONTRACTS["experts_up"](shard, rows=rows)) for rows in (1, 2))
        assert one.make().single
        assert not two.make().single
        assert one.scalars({"processors": 132})["blocks"] == K3.n_experts_per_token * shard.expert_intermediate // 16
        one, two = (kernel_spec(K3, CONTRACTS["experts_down"](shard, rows=rows)) for rows in (1, 2))
        assert one.make().single
        assert not two.make().single


def test_sorting_network_of_route_finds_the_best(monkeypatch) -> None:
    """The warps' network on arrays of 32 lanes: the 16 largest keys of eight warps, the lowest ids among equals, in both halves."""
    lanes = np.arange(32)

    def exchanged(mine, other, keep_best):
        better = (other[0] > mine[0]) | ((other[0] == mine[0]) & (other[1] < mine[1]))
        return tuple(np.where(better ^ (keep_best == 0), o, m) for m, o in zip(mine, other, strict=True))

    monkeypatch.setattr(route, "Int32", lambda value: np.asarray(value).astype(np.int64))
    monkeypatch.setattr(route, "shuffle_xor", lambda value, mask: value[lanes ^ mask])
    monkeypatch.setattr(route, "exchanged", exchanged)
    draws = np.random.default_rng(3)
    for highest in (5, 1000, 2**32):  # many ties, some, none
        keys = draws.integers(1, highest, 1024)
        lists = []
        for warp in range(8):
            own = [(keys[warp * 128 + lanes * 4 + j], warp * 128 + lanes * 4 + j) for j in range(4)]
            lists.append(route.merged([route.sorted_halves(pair, lanes) for pair in own], lanes))
        halves = [tuple(np.concatenate([a[i][:16], b[i][:16]]) for i in range(2)) for a, b in zip(lists[::2], lists[1::2], strict=True)]
        key, found = route.merged(halves, lanes)
        expected = np.lexsort((np.arange(1024), -keys))[:16]
        assert found.tolist() == [*expected, *expected]
        assert key.tolist() == keys[found].tolist()


def test_more_rows_than_the_scope_are_refused() -> None:
    with pytest.raises(ValueError, match="rows: got 65"):
        tilings.row_tile(65)


class _Pointer:
    """Enough of a device pointer to build a Global outside a trace."""

    def __init__(self) -> None:
        self.dtype = cutlass.BFloat16


@pytest.mark.parametrize("role", ["input", "state", "table", "mailbox", "output", "scratch"])
def test_fast_loads_refuse_every_role_but_weight(role) -> None:
    from kimi_k3_decode.device import memory as mem

    x = Global.__new__(Global)
    x.name, x.role, x.bytes = "x_TD", role, 2
    early = (mem.load_weight_early_f32, mem.load_weight_early_f32x4, mem.load_weight_early_b64)
    for load in (mem.load_weight_b128, mem.load_weight_b32, *early):
        with pytest.raises(RoleError, match=f"x_TD: got role '{role}'"):
            load(x, 0)
    with pytest.raises(RoleError):
        mem.copy_weight_b128(0, x, 0)


@pytest.mark.parametrize("role", ["weight", "input", "table"])
def test_stores_refuse_what_a_kernel_must_not_write(role) -> None:
    from kimi_k3_decode.device import memory as mem

    x = Global.__new__(Global)
    x.name, x.role, x.bytes = "x_TD", role, 2
    for store, value in ((mem.store_b32, 0), (mem.store_f32, 0), (mem.store_bf16, 0)):
        with pytest.raises(RoleError, match=role):
            store(x, 0, value)


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(RoleError, match="needs one of"):
        Global("x", _Pointer(), "activation")


def test_launcher_refuses_the_wrong_order() -> None:
    contract = layer_plan(NANO, Shard(config=NANO), 4, 1)[1].contract
    launcher = Launcher(kernel_spec(NANO, contract))
    with pytest.raises(ContractError, match="needs prepare"):
        launcher.bind({})
    with pytest.raises(ContractError, match="needs bind"):
        launcher.run(None)


def test_consumers_get_a_health_word() -> None:
    """Whoever polls a mailbox can record that a wait ran out."""
    for launch in launch_graph(NANO, Shard(config=NANO), 1):
        polls = any(o.role is Role.MAILBOX and o.reads for o in launch.contract.operands)
        assert not polls or HEALTH in [p.name for p in kernel_spec(NANO, launch.contract).params]


SAMPLE = """
import json, os, sys, tempfile
from pathlib import Path
from kimi_k3_decode.config import NANO, Shard
from kimi_k3_decode.launches import layer_plan
from kimi_k3_decode.kernels import kernel_spec
from kimi_k3_decode.build import build
rows, scratch = [], Path(tempfile.mkdtemp())
for launch in layer_plan(NANO, Shard(config=NANO), 4, 1):
    if launch.op in ("in_proj", "kda", "route", "attn_res"):
        ((row, cubin, _),) = build(kernel_spec(NANO, launch.contract), [os.environ["CUTE_DSL_ARCH"]], scratch)
        rows.append([row.kernel, row.registers, row.stack_bytes, row.sass_sha256, len(cubin)])
print(json.dumps(rows))
"""


@pytest.mark.parametrize("arch", table.ARCHITECTURES)
def test_kernels_compile_without_a_gpu(arch) -> None:
    """Four of the nano kernels, in a process of their own because the architecture is fixed at import; none spills."""
    env = {**os.environ, "CUTE_DSL_ARCH": arch, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SAMPLE], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=240)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 5  # two boundaries
    for kernel, registers, spilled, _, size in rows:
        assert 0 < registers <= 255, kernel
        assert size > 1000, kernel
        assert spilled == 0, kernel
        if kernel.startswith("kda["):  # two blocks of 512 threads a multiprocessor: one loads its state while the other computes
            assert registers <= 64, kernel


def test_committed_table_names_every_variant() -> None:
    committed = json.loads(table.TABLE.read_text())["kernels"]
    wanted = {spec.id for spec in table.variants()}
    for arch in table.ARCHITECTURES:
        assert {row["kernel"] for row in committed if row["arch"] == arch} == wanted
    assert [row for row in committed if row["stack_bytes"]] == []
    assert all(row["shared_bytes"] <= SHARED_LIMIT_BYTES + 1024 for row in committed)


def test_compare_reports_changes(tmp_path) -> None:
    row = table.Built(kernel="k[a]", arch="sm_90a", sass_sha256="1", registers=8, stack_bytes=0, shared_bytes=0)
    other = table.Built(kernel="k[b]", arch="sm_90a", sass_sha256="2", registers=8, stack_bytes=16, shared_bytes=0)
    path = tmp_path / "table.json"
    table.write_table([row], path)
    changed = table.Built(**{**vars(row), "sass_sha256": "3"})
    found = table.compare([changed, other], path)
    assert found["changed"] == ["k[a] sm_90a"]
    assert found["added"] == ["k[b] sm_90a"]
    assert found["spills"] == ["k[b] sm_90a: 16 bytes"]
    assert found["gone"] == []
    assert table.compare([other], path)["gone"] == ["k[a] sm_90a"]
    table.write_table([other], path)
    assert table.compare([other], path)["spills"] == ["k[b] sm_90a: 16 bytes"]
