"""Observed roles: the recorder over memory, what a trace says, and the whole capture on a pretend device."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from validation.core.types import HarnessError
from validation.ordering import observe, observed
from validation.ordering.manifest import read_manifest
from validation.ordering.model import Access, AuditResult, Kind, ParamRef, Role, RoleEntry, RoleMap, Severity
from validation.ordering.observe import Range, Recorder
from validation.ordering.observed import HostWrite, Seen, SeenLaunch, Trace, contradictions, observed_roles


def seen(index: int, address: int, size: int = 16, *, changed: bool = False) -> Seen:
    return Seen(index=index, address=address, bytes=size, changed=changed, name=f"n{index}")


def launch(kernel: str, *params: Seen, step: int = 0, order: int = 0, rank: int = 0) -> SeenLaunch:
    return SeenLaunch(step=step, order=order, kernel=kernel, params=params, rank=rank)


def roles(*launches: SeenLaunch, host: tuple[HostWrite, ...] = ()) -> dict[str, dict[int, Role]]:
    found = observed_roles(Trace(launches=launches, host_writes=host, steps=2))
    return {kernel: {index: role.role for index, role in by_index.items()} for kernel, by_index in found.items()}


def test_who_wrote_it_decides_the_role():
    steps = [
        (
            launch("a", seen(0, 0), seen(1, 100), seen(2, 200, changed=True), step=step, order=0),
            launch("b", seen(0, 200), seen(1, 300, changed=True), seen(2, 400), step=step, order=1),
            launch("c", seen(0, 400, changed=True), step=step, order=2),
        )
        for step in (0, 1)
    ]
    found = roles(*steps[0], *steps[1], host=(HostWrite(step=1, address=96, bytes=8),))
    assert found["a"] == {0: Role.WEIGHT, 1: Role.TABLE, 2: Role.OUTPUT}
    assert found["b"] == {0: Role.INPUT, 1: Role.STATE, 2: Role.STATE}  # 300: its own; 400: written later in the step
    assert found["c"] == {0: Role.OUTPUT}


def test_partly_overlapping_memory_counts():
    found = roles(launch("w", seen(0, 100, 64, changed=True)), launch("r", seen(0, 150, 64), seen(1, 164), order=1))
    assert found["r"] == {0: Role.INPUT, 1: Role.WEIGHT}


def test_memory_of_another_rank_is_a_mailbox_and_the_strictest_launch_wins():
    quiet = launch("r", seen(0, 900))
    found = roles(launch("w", seen(0, 100, changed=True), rank=1), launch("r", seen(0, 100), order=1), quiet)
    assert found["r"] == {0: Role.MAILBOX}


def declared(role: Role) -> RoleMap:
    return RoleMap(by_index={(0, 0): RoleEntry(role=role, reason="said so", name="x")})


@pytest.mark.parametrize(
    ("role", "severity"),
    [(Role.WEIGHT, Severity.ERROR), (Role.STATE, Severity.NOTE), (Role.INPUT, None), (Role.MAILBOX, None), (Role.SCALAR, None)],
)
def test_a_role_that_allows_more_than_was_seen_is_reported(role, severity):
    trace = Trace(launches=(launch("w", seen(0, 0, changed=True)), launch("k", seen(0, 0), order=1)), steps=2)
    found = contradictions("k", "sm_90a", declared(role), observed_roles(trace)["k"])
    assert [finding.level for finding in found] == ([severity] if severity else [])
    assert all("written by w in the same step" in finding.message for finding in found)


def test_a_store_the_audit_does_not_know_is_an_error():
    store = Access(pc=0, opcode="STG", kind=Kind.STORE, coherent=True, strength="weak", bases=frozenset({ParamRef(index=0)}))
    result = AuditResult(kernel="k", arch="sm_90a", digest="", path="", accesses=(store,))
    hole = launch("k", seen(0, 0, changed=True), seen(1, 500, changed=True))
    (finding,) = observed.unseen_stores(result, [hole])
    assert (finding.rule, finding.parameter, finding.level) == ("MO013", "n1", Severity.ERROR)
    inside = launch("k", seen(0, 0, 64, changed=True), seen(1, 32, changed=True))  # the same memory under two parameters
    assert observed.unseen_stores(result, [inside]) == []


def test_recorder_sees_views_kernels_and_the_host():
    recorder = Recorder("g")
    weight, wide, own, table = torch.randn(8), torch.zeros(4, 8), torch.zeros(4), torch.zeros(2, dtype=torch.int32)
    for step in range(3):
        table.fill_(step)
        recorder.start_step()
        view = wide[:, 2:4]
        recorder.around([(0, "a", [Range(0, "w", weight), Range(1, "t", table), Range(2, "y", view)])], lambda v=view: v.normal_())
        recorder.around([(0, "b", [Range(0, "y", view), Range(1, "s", own)])], lambda: own.add_(1))
    assert Range(0, "y", wide[:, 2:4]).bytes == (3 * 8 + 2) * 4
    assert len(recorder.host_writes) == 2
    found = observed_roles(Trace(launches=tuple(recorder.launches), host_writes=tuple(recorder.host_writes), steps=3))
    assert [role.role for role in found["a"].values()] == [Role.WEIGHT, Role.TABLE, Role.OUTPUT]
    assert [role.role for role in found["b"].values()] == [Role.INPUT, Role.STATE]


def test_trace_survives_its_file_and_becomes_a_manifest(tmp_path: Path):
    trace = Trace(launches=(launch("k<1>", seen(0, 0), seen(1, 64, changed=True)),), device="pretend", steps=2)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(observed.trace_json(trace)))
    assert observed.read_trace(path) == Trace(**{**vars(trace), "path": str(path)})
    manifest = tmp_path / "roles.toml"
    manifest.write_text(observed.manifest_lines(trace))
    assert [entry.role for entry in read_manifest(manifest).kernels[0].params.values()] == [Role.WEIGHT, Role.STATE]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 2}', '{"schema": 1, "steps": 1, "launches": []}', '{"schema": 1, "launches": [{}]}']
)
def test_a_damaged_trace_is_an_error(tmp_path: Path, text: str):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(HarnessError, match="trace"):
        observed.read_trace(path)


class PretendStream:
    cuda_stream = 0

    def __init__(self, *_: object) -> None:
        return

    def wait_event(self, _: object) -> None:
        return


@pytest.fixture
def pretend_device(monkeypatch: pytest.MonkeyPatch):
    """The GPU path on the CPU: nothing is compiled, and a launch writes noise to what its contract says it writes."""
    from kimi_k3_decode import gpu_step
    from kimi_k3_decode.device.launcher import Kind as ParamKind
    from kimi_k3_decode.device.launcher import Launcher

    contracts: dict[str, object] = {}
    real_spec = gpu_step.kernel_spec

    def spec_of(config, contract):
        spec = real_spec(config, contract)
        contracts[spec.id] = contract
        return spec

    device = SimpleNamespace(multi_processor_count=132)
    for name, value in {
        "is_available": lambda: True, "get_device_properties": lambda _: device, "Stream": PretendStream, "synchronize": lambda *_: None,
        "device": lambda _: contextlib.nullcontext(), "current_stream": lambda *_: PretendStream(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None))
    monkeypatch.setattr(gpu_step, "_handle", lambda stream: stream)
    monkeypatch.setattr(gpu_step, "kernel_spec", spec_of)
    holder: dict[str, object] = {}
    monkeypatch.setattr(Launcher, "prepare", lambda self: setattr(self, "_function", id) or self)

    def run(self, _stream):
        contract = contracts[self.spec.id]
        kinds = {p.name: p.kind for p in self.spec.device_params}
        for where in holder["path"].ranges[id(self)] if holder else ():
            name = where.name.removesuffix(" (re-armed)")
            operand = next((one for one in contract.operands if one.name == name), None)
            polled = kinds[name] is ParamKind.OPERAND and where.name == name and operand is not None and operand.role.value == "mailbox"
            if operand is not None and operand.writes and not polled:
                start = where.tensor.storage_offset() * where.tensor.element_size()
                raw = torch.empty(0, dtype=torch.uint8).set_(where.tensor.untyped_storage(), start, (where.bytes,), (1,))
                raw.random_(0, 255)

    monkeypatch.setattr(Launcher, "run", run)
    real_path = observe.recording_path

    def recording_path(*given, **options):
        holder["path"] = real_path(*given, **options)
        return holder["path"]

    monkeypatch.setattr(observe, "recording_path", recording_path)
    return contracts


@pytest.mark.parametrize("tp", [1, 2])
def test_capture_agrees_with_the_contracts(pretend_device, tp: int):
    from kimi_k3_decode.build import describe
    from kimi_k3_decode.config import NANO
    from kimi_k3_decode.kernels import kernel_spec
    from validation.ordering.own_kernels import OwnKernel

    recorder = observe.record(tp, 2, 1, devices=["cpu"] * tp)
    trace = Trace(launches=tuple(recorder.launches), host_writes=tuple(recorder.host_writes), steps=observe.STEPS)
    assert {launch.rank for launch in trace.launches} == set(range(tp))
    found = observed_roles(trace)
    ops = set()
    for kernel, contract in pretend_device.items():
        table = describe(kernel_spec(NANO, contract))
        own = OwnKernel(
            name=kernel,
            model="nano-k3",
            op=table["op"],
            variant=kernel,
            arch="sm_90a",
            pdl=True,
            cubin=Path(),
            ptx=Path(),
            params=tuple(table["params"]),
        )
        errors = [f for f in contradictions(kernel, "sm_90a", own.roles(), found[kernel]) if f.level is Severity.ERROR]
        assert not errors, [finding.message for finding in errors]
        weights = {index for (index, _), entry in own.roles().by_index.items() if entry.role is Role.WEIGHT}
        assert {index for index in weights if found[kernel][index].role is not Role.WEIGHT} == set()
        lying = own.roles({p["name"]: Role.WEIGHT for p in table["params"]})
        if any(entry.role is Role.INPUT for entry in own.roles().by_index.values()):
            assert [f for f in contradictions(kernel, "sm_90a", lying, found[kernel]) if f.level is Severity.ERROR]
        ops.add(table["op"])
    assert {"kda", "mla_decode", "experts_up", "moe_tail", "attn_res"} <= ops


def test_what_a_gpu_did_agrees_with_the_contracts_and_the_plan():
    """The committed records, as long as they belong to these sources; a test of the comparison itself either way."""
    from kimi_k3_decode.config import NANO, Shard
    from kimi_k3_decode.launches import launch_graph
    from validation.ordering import captured

    launches = launch_graph(NANO, Shard(config=NANO, tp=1, rank=0), 3, 1, step=0)
    planned = captured.plan_edges(launches)
    assert {kind for _, _, kind in planned} == {"full", "programmatic"}
    for graph in captured.committed_graphs():
        assert captured.captured_edges(graph) == planned
        assert len([node for node in graph["nodes"] if node["type"] == "kernel"]) == len(launches)
        dropped = {**graph, "edges": graph["edges"][1:]}
        assert captured.captured_edges(dropped) != planned
    trace = captured.committed_trace()
    if trace is not None:
        assert {role.role for roles in observed_roles(trace).values() for role in roles.values()} == set(observed.PRECEDENCE)
