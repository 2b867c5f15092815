"""Kernels of the engine's tests: assembled once, disassembled once, audited with the same roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from validation.ordering.audit import audit_kernel
from validation.ordering.binaries import load_binaries
from validation.ordering.model import AuditResult, KernelBinary, LaunchFacts, PtxKernel, Role, RoleEntry, RoleMap
from validation.ordering.ptx import parse_ptx
from validation.ordering.tools import ToolError, find_tool, run_tool

SOURCE = Path(__file__).with_name("engine_kernels.ptx")
ENGINE_ROLES = (("x", Role.INPUT), ("w", Role.WEIGHT), ("y", Role.OUTPUT), ("flag", Role.MAILBOX), ("n", Role.SCALAR))


class EngineKernels:
    """`audit(name)` of one kernel of `engine_kernels.ptx`, in one architecture."""

    def __init__(self, arch: str, kernels: dict[str, KernelBinary], ptx: dict[str, PtxKernel], cubin: Path) -> None:
        self.arch, self.kernels, self.ptx, self.cubin = arch, kernels, ptx, cubin

    @staticmethod
    def roles(**changes: Role | RoleEntry) -> RoleMap:
        entries = {}
        for index, (name, role) in enumerate(ENGINE_ROLES):
            given = changes.get(name, role)
            entries[index, 0] = given if isinstance(given, RoleEntry) else RoleEntry(role=given, reason="test", name=name)
        return RoleMap(by_index=entries)

    def audit(self, name: str, *, roles: RoleMap | None = None, with_ptx: bool = False, **launch: object) -> AuditResult:
        facts = LaunchFacts(**launch)  # type: ignore[arg-type]
        return audit_kernel(self.kernels[name], roles or self.roles(), self.ptx[name] if with_ptx else None, facts)


@pytest.fixture(scope="session", params=["sm_90a", "sm_100a"])
def engine_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineKernels:
    try:
        find_tool("ptxas")
        find_tool("nvdisasm")
    except ToolError as error:
        pytest.skip(str(error))
    arch = request.param
    folder = tmp_path_factory.mktemp(f"engine-{arch}")
    text = SOURCE.read_text().replace("sm_90a", arch)
    (folder / "k.ptx").write_text(text)
    run_tool("ptxas", f"-arch={arch}", "-o", str(folder / "k.cubin"), str(folder / "k.ptx"))
    loaded = load_binaries(folder / "k.cubin")
    assert not loaded.errors
    return EngineKernels(arch, {k.name: k for k in loaded.kernels}, {p.name: p for p in parse_ptx(text)}, folder / "k.cubin")
