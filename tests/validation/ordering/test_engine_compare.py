"""PTX against SASS: moved, merged, deleted and sunk accesses, and the registers of the lowering."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from validation.ordering.audit import audit_kernel
from validation.ordering.binaries import load_binaries
from validation.ordering.engine import analyse
from validation.ordering.model import LaunchFacts, Role, RoleEntry, RoleMap, Stage
from validation.ordering.ptx import PtxError, parse_ptx
from validation.ordering.ptx_lower import lower_ptx
from validation.ordering.tools import run_tool

HEAD = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p_x, .param .u64 p_w, .param .u64 p_y, .param .u64 p_flag, .param .u32 p_n)
.reqntid 128,1,1
{ .reg .pred %p<9>; .reg .b32 %r<40>; .reg .b64 %rd<40>; .reg .f32 %f<40>; .shared .align 16 .b8 sm[2048];
 ld.param.u64 %rd1,[p_x]; ld.param.u64 %rd2,[p_w]; ld.param.u64 %rd3,[p_y]; ld.param.u64 %rd4,[p_flag]; ld.param.u32 %r9,[p_n];
 mov.u32 %r1,%tid.x; mul.wide.u32 %rd5,%r1,4; add.s64 %rd6,%rd1,%rd5; add.s64 %rd7,%rd2,%rd5; add.s64 %rd8,%rd3,%rd5;
 mov.u32 %r2,sm; mad.lo.s32 %r3,%r1,4,%r2;
"""
ROLES = RoleMap(
    by_index={
        (index, 0): RoleEntry(role=role, reason="test", name=name)
        for index, (name, role) in enumerate(
            [("x", Role.INPUT), ("w", Role.WEIGHT), ("y", Role.OUTPUT), ("flag", Role.MAILBOX), ("n", Role.SCALAR)]
        )
    }
)
# An early shared store and barrier pin the wait in place, so that ptxas is free to schedule around it.
PINNED = (
    "ld.global.f32 %f2,[%rd7]; st.shared.f32 [%r3],%f2; bar.sync 1; griddepcontrol.wait; {load} ld.shared.f32 %f5,[%r3+4];"
    " add.f32 %f3,%f1,%f5; st.global.f32 [%rd8],%f3; ret; }}"
)


def audit(tmp_path: Path, body: str, ptx_body: str | None = None, **launch):
    (tmp_path / "k.ptx").write_text(HEAD + body)
    run_tool("ptxas", "-arch=sm_90a", "-o", str(tmp_path / "k.cubin"), str(tmp_path / "k.ptx"))
    (kernel,) = load_binaries(tmp_path / "k.cubin").kernels
    (ptx,) = parse_ptx(HEAD + (ptx_body or body))
    return audit_kernel(kernel, ROLES, ptx, LaunchFacts(**launch))


def test_noncoherent_load_that_ptxas_moves_is_its_fault(tmp_path):
    result = audit(tmp_path, PINNED.format(load="ld.global.nc.f32 %f1,[%rd6];"), pdl=True)
    rules = {(f.rule, f.parameter, f.stage) for f in result.findings}
    assert ("MO002", "x", Stage.PTXAS) in rules, "this ptxas no longer moves the load: see the twins of the corpus"
    assert ("MO003", "x", Stage.UNKNOWN) in rules
    moved = next(f for f in result.findings if f.rule == "MO002")
    assert "ld.global.nc.f32" in moved.ptx_text
    assert moved.ptx_line > 0


def test_coherent_load_stays(tmp_path):
    assert audit(tmp_path, PINNED.format(load="ld.global.f32 %f1,[%rd6];"), pdl=True).findings == ()


def test_noncoherent_load_across_a_barrier(tmp_path):
    result = audit(tmp_path, "bar.sync 0; ld.global.nc.f32 %f1,[%rd6]; st.global.f32 [%rd8],%f1; ret; }")
    assert [(f.rule, f.parameter) for f in result.findings] == [("MO002", "x")]


def test_deleted_wait(tmp_path):
    binary = "ld.global.f32 %f1,[%rd6]; st.global.f32 [%rd8],%f1; ret; }"
    result = audit(tmp_path, binary, "griddepcontrol.wait; " + binary, pdl=True)
    assert {f.rule for f in result.findings} == {"MO005", "MO016"}


def test_merged_loads(tmp_path):
    binary = "ld.volatile.global.f32 %f1,[%rd6]; griddepcontrol.wait; st.global.f32 [%rd8],%f1; ret; }"
    twice = "ld.volatile.global.f32 %f1,[%rd6]; griddepcontrol.wait; ld.volatile.global.f32 %f2,[%rd6]; st.global.f32 [%rd8],%f2; ret; }"
    rules = {f.rule for f in audit(tmp_path, binary, twice, pdl=True).findings}
    assert "MO016" in rules


def test_lost_prefetch_is_a_note(tmp_path):
    wait, weight = "griddepcontrol.wait; ", "ld.volatile.global.f32 %f2,[%rd7]; "
    rest = "ld.global.f32 %f1,[%rd6]; add.f32 %f1,%f1,%f2; st.global.f32 [%rd8],%f1; ret; }"
    late, early = wait + weight + rest, weight + wait + rest
    (finding,) = audit(tmp_path, late, early, pdl=True).findings
    assert (finding.rule, finding.parameter, finding.level.value) == ("MO014", "w", "note")


def test_sunk_read(tmp_path):
    after = "bar.sync 0; ld.volatile.global.u32 %r5,[%rd7]; ld.global.nc.f32 %f1,[%rd6]; bar.sync 1; st.global.f32 [%rd8],%f1; ret; }"
    before = "ld.global.nc.f32 %f1,[%rd6]; bar.sync 0; bar.sync 1; st.global.f32 [%rd8],%f1; ret; }"
    (tmp_path / "k.ptx").write_text(HEAD + after)
    run_tool("ptxas", "-arch=sm_90a", "-O0", "-o", str(tmp_path / "k.cubin"), str(tmp_path / "k.ptx"))
    (kernel,) = load_binaries(tmp_path / "k.cubin").kernels
    result = audit_kernel(kernel, ROLES, parse_ptx(HEAD + before)[0], LaunchFacts(pdl=False))
    assert "MO017" in {f.rule for f in result.findings}


def test_front_end_move_is_told_by_source_lines(tmp_path):
    body = (
        ".loc 1 30 0\n ld.volatile.global.f32 %f1,[%rd6];\n.loc 1 20 0\n griddepcontrol.wait;\n"
        '.loc 1 40 0\n st.global.f32 [%rd8],%f1; ret; }\n.file 1 "kernel.py"\n'
    )
    moved = next(f for f in audit(tmp_path, body, pdl=True).findings if f.parameter == "x")
    assert (moved.rule, moved.stage) == ("MO002", Stage.NVVM)
    in_source = next(f for f in audit(tmp_path, body.replace(".loc 1 30", ".loc 1 10"), pdl=True).findings if f.parameter == "x")
    assert (in_source.rule, in_source.stage) == ("MO001", Stage.SOURCE)


def lowered(body: str):
    result = lower_ptx(parse_ptx(HEAD + body)[0])
    return result, analyse(result.kernel, LaunchFacts())


@pytest.mark.parametrize(
    ("body", "bases"),
    [
        ("ld.global.f32 %f1,[%rd6+16]; ret; }", {"p0"}),
        ("{ .reg .b64 %t; add.s64 %t,%rd2,%rd5; ld.global.v4.f32 {%f1,%f2,%f3,%f4},[%t]; } ret; }", {"p1"}),
        ("ld.global.u64 %rd10,[%rd6]; ld.global.f32 %f1,[%rd10+8]; ret; }", {"p0", "*p0"}),
        ("shl.b64 %rd10,%rd5,2; sub.s64 %rd11,%rd6,%rd10; ld.global.f32 %f1,[%rd11]; ret; }", {"p0"}),
        ("mov.b64 {%r4,%r5},%rd6; mov.b64 %rd10,{%r4,%r5}; ld.f32 %f1,[%rd10]; ret; }", {"p0"}),
        ("and.b64 %rd10,%rd6,-16; ld.global.f32 %f1,[%rd10]; ret; }", {"p0"}),
        ("setp.eq.u32 %p1,%r9,0; selp.b64 %rd10,%rd6,%rd7,%p1; ld.global.f32 %f1,[%rd10]; ret; }", {"p0", "p1"}),
        ("atom.global.add.u32 %r4,[%rd4],1; ret; }", {"p3"}),
        ("cvta.to.global.u64 %rd10,%rd1; ld.global.f32 %f1,[%rd10]; ret; }", {"p0"}),
    ],
)
def test_bases_in_ptx(body, bases):
    _, analysis = lowered(body)
    seen = {str(ref) for record in analysis.records if record.site for ref in record.resolved.bases}
    assert seen == bases
    assert not any(record.resolved.unknown for record in analysis.records if record.site)


def test_unknown_ptx_is_noted_and_the_rest_still_read():
    result, analysis = lowered("frobnicate.b32 %r5,%r1; .wibble 3; ld.global.f32 %f1,[%rd6]; ret; }")
    assert any("frobnicate" in note for note in result.notes)
    assert any(".wibble" in note for note in result.notes)
    assert [str(ref) for record in analysis.records if record.site for ref in record.resolved.bases] == ["p0"]


def test_label_in_front_of_a_scope():
    result, analysis = lowered(
        "bra AGAIN; AGAIN:\n{ .reg .pred q; setp.ne.u32 q,%r9,0; @q bra DONE; }\nDONE: ld.global.f32 %f1,[%rd6]; ret; }"
    )
    assert result.notes == []
    assert [str(ref) for record in analysis.records if record.site for ref in record.resolved.bases] == ["p0"]


@pytest.mark.parametrize("text", ["", "hello", ".version 8.8\n.target sm_90a\n.visible .entry k() { ret;", "\x00\x01"])
def test_not_ptx_or_truncated(text):
    with pytest.raises(PtxError):
        parse_ptx(text)


def test_parameters_have_the_layout_of_the_binary(tmp_path):
    text = (
        HEAD.replace(".param .u32 p_n", ".param .u32 p_n, .param .align 64 .b8 p_map[128], .param .u64 .ptr .global .align 4 p_last")
        + "ret; }"
    )
    (tmp_path / "k.ptx").write_text(text)
    run_tool("ptxas", "-arch=sm_90a", "-o", str(tmp_path / "k.cubin"), str(tmp_path / "k.ptx"))
    (kernel,) = load_binaries(tmp_path / "k.cubin").kernels
    (ptx,) = parse_ptx(text)
    assert [p.name for p in ptx.parameters][-2:] == ["p_map", "p_last"]
    assert [p.size for p in ptx.parameters] == [p.size for p in kernel.parameters]
    assert [dataclasses.replace(p, name="") for p in ptx.parameters][:5] == list(kernel.parameters)[:5]
