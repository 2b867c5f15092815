"""Auditing files: which belong together, portions, the cache by content, and that a bad file never hides or passes for a good one."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from validation.ordering import corpus_build, units
from validation.ordering.corpus_cases import load_cases
from validation.ordering.model import KernelBinary, LaunchFacts, Role, RoleEntry, RoleMap
from validation.ordering.units import Answer, Unit, audit_units, units_of


@dataclasses.dataclass(frozen=True)
class Known:
    """Everything about the corpus case's kernel; `x` is what its first parameter is said to be."""

    x: Role = Role.INPUT

    def roles(self, kernel: KernelBinary) -> RoleMap:
        named = [(self.x, "x"), (Role.WEIGHT, "w"), (Role.OUTPUT, "y"), (Role.SCRATCH, "flag"), (Role.SCALAR, "n")]
        return RoleMap(by_index={(i, 0): RoleEntry(role=role, reason="test", name=name) for i, (role, name) in enumerate(named)})

    def launch(self, kernel: KernelBinary) -> LaunchFacts:
        return LaunchFacts(pdl=True)

    def token(self) -> str:
        return repr(self)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (case,) = [case for case in load_cases(families=["ptx"]) if case.name == "load_before_wait"]
    folders = {}
    for arch in ("sm_90a", "sm_100a"):
        found = corpus_build.build([case], [arch], cache=tmp_path_factory.mktemp(arch), jobs=1).built[(case.name, arch)]
        folders[arch] = found
    folder = tmp_path_factory.mktemp("kernels")
    for arch, found in folders.items():
        shutil.copy(found.cubin, folder / f"{arch}.cubin")
        shutil.copy(found.ptx, folder / f"{arch}.ptx")
    return folder


def rules(answer: Answer) -> list[list[str]]:
    return [[finding.rule for finding in result.findings] for result in answer.results]


def test_a_cubin_and_its_ptx_are_one_unit_and_each_kernel_finds_its_own_text(built: Path):
    found = units_of([built], Known())
    assert [[path.name for path in unit.paths] for unit in found] == [["sm_100a.cubin", "sm_100a.ptx"], ["sm_90a.cubin", "sm_90a.ptx"]]
    answers = audit_units(found, workers=1)
    assert [rules(answer) for answer in answers] == [[["MO001"]], [["MO001"]]]
    assert all(result.ptx_compared for answer in answers for result in answer.results)
    assert [answer.results[0].arch for answer in answers] == ["sm_100a", "sm_90a"]
    assert not any(answer.kernels[0].instructions for answer in answers)


def test_ptx_without_a_cubin_of_its_name_keeps_everything_together(built: Path, tmp_path: Path):
    for path in built.iterdir():
        shutil.copy(path, tmp_path / ("all.ptx" if path.name == "sm_90a.ptx" else path.name))
    (unit,) = units_of([tmp_path], Known())
    (answer,) = audit_units([unit], workers=1)
    assert sorted(result.arch for result in answer.results) == ["sm_100a", "sm_90a"]
    assert all(result.ptx_compared for result in answer.results)


def test_workers_and_portions_change_nothing(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for n in range(3):
        for path in built.iterdir():
            shutil.copy(path, tmp_path / f"{n}-{path.name}")
    found = units_of([tmp_path], Known())
    one = audit_units(found, workers=1)
    monkeypatch.setattr(units, "PORTION_BYTES", 1)
    many = audit_units(found, workers=2)
    assert [rules(a) for a in one] == [rules(a) for a in many]
    assert [a.paths for a in one] == [a.paths for a in many]


def test_cache_follows_content_not_place_and_nothing_else(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = tmp_path / "cache"
    first = audit_units(units_of([built], Known()), workers=1, cache=cache)
    moved = tmp_path / "elsewhere"
    shutil.copytree(built, moved)
    real = units.audit_portion
    monkeypatch.setattr(units, "audit_portion", lambda _: pytest.fail("the cache was not used"))
    again = audit_units(units_of([moved], Known()), workers=1, cache=cache)
    assert [rules(a) for a in again] == [rules(a) for a in first]
    assert all(result.path.startswith(str(moved)) for answer in again for result in answer.results)
    monkeypatch.setattr(units, "audit_portion", real)
    as_weight = audit_units(units_of([built], Known(Role.WEIGHT)), workers=1, cache=cache)
    assert [rules(a) for a in as_weight] == [[[]], [[]]]
    for entry in cache.iterdir():
        entry.write_bytes(b"damaged")
    assert [rules(a) for a in audit_units(units_of([built], Known()), workers=1, cache=cache)] == [rules(a) for a in first]


def bad_files(folder: Path, cubin: Path) -> dict[str, str]:
    """{file: a word of the reason it must be given}."""
    data = cubin.read_bytes()
    (folder / "empty.cubin").write_bytes(b"")
    (folder / "short.cubin").write_bytes(data[:200])
    (folder / "truncated.cubin").write_bytes(data[: len(data) // 2])
    foreign = bytearray(data)
    foreign[0x30:0x34] = (52).to_bytes(4, "little")
    (folder / "foreign.cubin").write_bytes(foreign)
    (folder / "text.cubin").write_text("hello")
    (folder / "elf.so").write_bytes(Path("/proc/self/exe").read_bytes()[:4096])
    (folder / "zip.whl").write_bytes(b"PK\x03\x04 no archive")
    return {path.name: "" for path in folder.iterdir()}


def test_bad_files_are_named_and_the_good_one_is_still_audited(built: Path, tmp_path: Path):
    names = bad_files(tmp_path, built / "sm_90a.cubin")
    shutil.copy(built / "sm_90a.cubin", tmp_path / "good.cubin")
    answers = audit_units(units_of([tmp_path], Known()), workers=1, cache=tmp_path / "cache")
    by_name = {Path(answer.paths[0]).name: answer for answer in answers}
    assert rules(by_name["good.cubin"]) == [["MO001"]]
    silent = [name for name in names if not by_name[name].errors and all(result.complete for result in by_name[name].results)]
    assert silent == []
    assert all(error.reason.strip() for name in names for error in by_name[name].errors)
    assert not any(by_name[name].complete for name in names)


def test_a_missing_file_is_an_error_not_a_pass(tmp_path: Path):
    (answer,) = audit_units([Unit((tmp_path / "gone.cubin",), Known())], workers=1, cache=tmp_path)
    assert answer.errors
    assert not answer.complete
