"""The engine on small kernels whose right answer is known: order, roles of warps, guards, hand-over, mailboxes, proxies."""

from __future__ import annotations

import dataclasses

import pytest

from validation.ordering.model import ParamRef, Role, RoleEntry, Severity, Stage, When


def found(result) -> list[tuple[str, str]]:
    return [(finding.rule, finding.parameter) for finding in result.findings]


@pytest.mark.parametrize(
    ("name", "pdl", "expected"),
    [
        ("clean", True, []),
        ("early_read", True, [("MO001", "x")]),
        ("early_write", True, [("MO006", "y")]),
        ("first_iteration", True, []),
        ("thread_zero_waits", True, []),
        ("role_without_wait", True, [("MO007", "x")]),
        ("early_exit", True, [("MO004", "")]),
        ("table_pointer", True, []),
        ("prefetch_input", True, [("MO008", "x")]),
        ("mbarrier_handover", True, []),
        ("mbarrier_too_early", True, [("MO007", "y")]),
        ("acquire_spin", None, []),
        ("weak_mailbox", None, [("MO009", "flag")]),
        ("unfenced_flag", None, [("MO009", "flag")]),
        ("fenced_flag", None, []),
        ("bulk_unfenced", None, [("MO010", "")]),
        ("bulk_fenced", None, []),
        ("acquire_spin", True, [("MO005", "")]),
    ],
)
def test_each_idiom_gets_its_findings_and_no_other(engine_kernels, name, pdl, expected):
    result = engine_kernels.audit(name, pdl=pdl)
    assert found(result) == expected
    assert result.complete
    assert result.instructions > 0


def test_early_read_is_fully_described(engine_kernels):
    finding = engine_kernels.audit("early_read", pdl=True).findings[0]
    assert "LDG" in finding.instruction
    assert "ACQBULK" in finding.wait_text
    assert finding.pc < finding.wait_pc
    assert finding.path_witness[0] == 0
    assert finding.path_witness[-1] == finding.pc
    assert finding.role is Role.INPUT
    assert finding.role_reason == "test"
    assert finding.fix


def test_weight_read_early_is_clean_until_its_role_changes(engine_kernels):
    assert found(engine_kernels.audit("clean", pdl=True)) == []
    changed = engine_kernels.audit("clean", pdl=True, roles=engine_kernels.roles(w=Role.INPUT))
    assert found(changed) == [("MO001", "w")]


@pytest.mark.parametrize("role", [Role.STATE, Role.TABLE])
def test_state_may_be_early_only_behind_a_full_edge(engine_kernels, role):
    roles = engine_kernels.roles(w=role)
    assert found(engine_kernels.audit("clean", pdl=True, roles=roles)) == [("MO001", "w")]
    assert found(engine_kernels.audit("clean", pdl=True, roles=roles, ordered=frozenset({1}))) == []


def test_parameter_without_a_role_is_reported_never_assumed(engine_kernels):
    roles = engine_kernels.roles()
    known = {place: entry for place, entry in roles.by_index.items() if place != (1, 0)}
    result = engine_kernels.audit("clean", pdl=True, roles=dataclasses.replace(roles, by_index=known))
    assert found(result) == [("MO013", "p1")]


def test_written_weight_is_a_contradiction(engine_kernels):
    assert ("MO013", "y") in found(engine_kernels.audit("clean", pdl=True, roles=engine_kernels.roles(y=Role.WEIGHT)))


def test_plain_launch_needs_no_wait(engine_kernels):
    assert found(engine_kernels.audit("early_read", pdl=False)) == []


def test_run_time_flag_is_named_and_lowers_the_severity(engine_kernels):
    result = engine_kernels.audit("runtime_flag", pdl=True)
    assert {finding.rule for finding in result.findings} == {"MO001", "MO004", "MO006"}
    assert {finding.level for finding in result.findings} == {Severity.WARNING}
    assert all("n turns the wait off" in finding.message for finding in result.findings)
    assert found(engine_kernels.audit("runtime_flag", pdl=True, guards_true=frozenset({4}))) == []


def test_barrier_transitivity_is_a_switch(engine_kernels):
    assert found(engine_kernels.audit("thread_zero_waits", pdl=True)) == []
    strict = found(engine_kernels.audit("thread_zero_waits", pdl=True, barrier_transitivity=False))
    assert ("MO001", "x") in strict or ("MO007", "x") in strict


def test_role_without_wait_names_its_warps(engine_kernels):
    (finding,) = engine_kernels.audit("role_without_wait", pdl=True).findings
    assert finding.warps == "1"


def test_select_between_pointers_is_a_warning_with_both_bases(engine_kernels):
    result = engine_kernels.audit("selected_pointer", pdl=True)
    assert [(f.rule, f.level) for f in result.findings] == [("MO001", Severity.WARNING)]
    assert {str(ref) for ref in result.accesses[0].bases} == {"p0", "p1"}


def test_pointer_from_a_table_takes_the_role_of_its_target(engine_kernels):
    table = RoleEntry(role=Role.TABLE, reason="pointers", name="x", target=Role.WEIGHT)
    result = engine_kernels.audit("table_pointer", pdl=True, roles=engine_kernels.roles(x=table))
    refs = [ref for access in result.accesses for ref in access.bases]
    assert ParamRef(index=0, via_table=True) in refs
    assert all(access.when is When.AFTER for access in result.accesses)


def test_local_array_of_pointers_keeps_both(engine_kernels):
    result = engine_kernels.audit("local_array", pdl=True)
    assert result.unknown_bases == 0
    loads = [access for access in result.accesses if access.kind.value == "load"]
    assert {str(ref) for ref in loads[-1].bases} == {"p0", "p1"}


def test_relaxed_poll_does_not_order_what_it_guards(engine_kernels):
    guarded = RoleEntry(role=Role.INPUT, reason="payload", name="x", guarded_by=3)
    roles = engine_kernels.roles(x=guarded)
    assert found(engine_kernels.audit("acquire_spin", pdl=False, roles=roles)) == []
    assert ("MO001", "x") in found(engine_kernels.audit("relaxed_spin", pdl=False, roles=roles))


def test_release_before_an_access_that_a_dependent_touches(engine_kernels):
    assert found(engine_kernels.audit("released_early", pdl=True)) == []
    assert found(engine_kernels.audit("released_early", pdl=True, released=frozenset({0}))) == [("MO011", "x")]
    assert found(engine_kernels.audit("released_early", pdl=True, released=frozenset({1}))) == []


def test_ptx_with_the_same_order_says_the_compiler_moved_nothing(engine_kernels):
    (finding,) = engine_kernels.audit("early_read", pdl=True, with_ptx=True).findings
    assert finding.rule == "MO001"
    assert finding.stage is not Stage.PTXAS
    assert "ld.volatile.global" in finding.ptx_text


def test_hoisted_poll_in_the_ptx_is_found_even_when_ptxas_drops_the_loop(engine_kernels):
    result = engine_kernels.audit("hoisted_poll", pdl=None, with_ptx=True)
    assert "MO016" in {finding.rule for finding in result.findings}
