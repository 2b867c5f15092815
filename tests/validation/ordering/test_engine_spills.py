"""Pointers that ptxas spills - to the stack, or to shared memory under `enable_smem_spilling` - keep their parameters."""

from __future__ import annotations

import pytest

from validation.ordering.audit import audit_kernel
from validation.ordering.binaries import load_binaries
from validation.ordering.model import LaunchFacts, Role, RoleEntry, RoleMap
from validation.ordering.tools import run_tool

POINTERS, VALUES = 8, 64


def crowded(arch: str, bounds: str, pragma: str) -> str:
    """Eight pointers that each load moves on, and 64 live accumulators: far more than 40 registers hold."""
    params = ", ".join(f".param .u64 p{i}" for i in range(POINTERS))
    lines = [f".version 8.8\n.target {arch}\n.address_size 64\n.visible .entry k({params}, .param .u32 n)\n{bounds}\n{{\n{pragma}"]
    lines.append(".reg .pred %p<4>; .reg .b32 %r<20>; .reg .b64 %rd<40>; .reg .f32 %f<200>; mov.u32 %r1,%tid.x; mul.wide.u32 %rd30,%r1,4;")
    lines += [f"ld.param.u64 %rd{i},[p{i}]; add.s64 %rd{i},%rd{i},%rd30;" for i in range(POINTERS)]
    lines.append("ld.param.u32 %r2,[n]; mul.wide.s32 %rd31,%r2,4;")
    lines += [f"ld.volatile.global.f32 %f{i},[%rd{i % POINTERS}+{4 * i}];" for i in range(VALUES)]
    lines.append("griddepcontrol.wait; mov.u32 %r3,0; LOOP:")
    lines += [f"add.s64 %rd{i},%rd{i},%rd31;" for i in range(POINTERS)]
    for i in range(VALUES):
        lines.append(
            f"ld.volatile.global.f32 %f{100 + i},[%rd{(i + 3) % POINTERS}+{8 * i}];"
            f" fma.rn.f32 %f{i},%f{i},%f{(i + 7) % VALUES},%f{100 + i};"
        )
    lines.append("add.u32 %r3,%r3,1; setp.lt.u32 %p1,%r3,%r2; @%p1 bra LOOP;")
    lines += [f"st.global.f32 [%rd{i % POINTERS}+{4 * i}],%f{i};" for i in range(VALUES)]
    return "\n".join([*lines, "ret; }"])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("bounds", "pragma", "loads"),
    [(".maxnreg 40", "", "LDL"), (".maxntid 256,1,1 .minnctapersm 6", '.pragma "enable_smem_spilling";', "LDS")],
    ids=["stack", "shared"],
)
def test_spilled_pointers_keep_their_parameters(tmp_path, arch, bounds, pragma, loads):
    (tmp_path / "k.ptx").write_text(crowded(arch, bounds, pragma))
    run_tool("ptxas", f"-arch={arch}", "-o", str(tmp_path / "k.cubin"), str(tmp_path / "k.ptx"))
    (kernel,) = load_binaries(tmp_path / "k.cubin").kernels
    assert sum(i.opcode.startswith(loads) for i in kernel.instructions) > 10, "ptxas spilled nothing: the test proves nothing"
    roles = {(i, 0): RoleEntry(role=Role.INPUT if i % 2 else Role.SCRATCH, reason="test") for i in range(POINTERS)}
    result = audit_kernel(kernel, RoleMap(by_index=roles), None, LaunchFacts(pdl=True))
    assert result.unknown_bases == 0
    for access in result.accesses:
        assert len(access.bases) == 1, access.text
    used = [next(iter(access.bases)).index for access in result.accesses]
    assert {index: used.count(index) for index in range(POINTERS)} == dict.fromkeys(range(POINTERS), 3 * VALUES // POINTERS)
    assert sorted(finding.parameter for finding in result.findings) == [f"p{i}" for i in range(POINTERS)]
