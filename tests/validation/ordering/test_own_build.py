"""The project's own kernels under the audit: compiled once for table and audit, recorded, compared, refused from another compiler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from kimi_k3_decode import build, toolchain
from validation.core.types import HarnessError
from validation.ordering import cli, drift, own_compile, own_kernels

FEW = "tests.kimi_k3_decode.kernels.lists:few"


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of two kernels and an empty folder of binaries, instead of the project's."""
    monkeypatch.setattr(own_kernels, "VARIANTS", FEW)
    monkeypatch.setattr(build, "CACHE", tmp_path / "kernels")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *more: object) -> tuple[int, dict]:
    arguments = ["--arch", "sm_90a", "--scope", "ops", "--no-corpus", "--jobs", "1", "--format", "json", *map(str, more)]
    code = cli.app(arguments, standalone_mode=False)
    return code, json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def drifted(document: dict) -> list[str]:
    return [finding["kernel"] for finding in document["findings"] if finding["rule"] == "MO015"]


def test_what_is_recorded_is_what_is_compiled_and_a_change_shows(capsys, few) -> None:
    record = few / "recorded.json"
    run(capsys, "--record", "--record-file", record)
    rows, tools = drift.read_record(record)
    assert {name.split()[1].partition("[")[0] for name in rows} == {"route", "kda"}
    assert tools["nvidia-cutlass-dsl"].endswith(f" {toolchain.FLAVOUR}")
    compiled = build.produce(FEW, "ops", ["sm_90a"], [build.CACHE])
    assert compiled.compiled == 0  # the audit left its binaries where the kernel table's are
    assert {row.code_digest for row in rows.values()} == {entry.row.sass_sha256 for entry in compiled.entries}
    assert {row.registers for row in rows.values()} == {entry.row.registers for entry in compiled.entries}
    assert drifted(run(capsys, "--record-file", record)[1]) == []
    table = json.loads(record.read_text())
    changed = next(iter(table["kernels"]))
    table["kernels"][changed]["code_digest"] = "0" * 64
    record.write_text(json.dumps(table))
    assert drifted(run(capsys, "--record-file", record)[1]) == [changed.rpartition("|")[0]]


def test_where_the_project_may_not_be_written_its_binaries_are_still_used(few, monkeypatch) -> None:
    made = own_kernels.build_own("ops", ["sm_90a"])
    assert made.compiled == 2
    monkeypatch.setattr(own_kernels, "may_write", lambda folder: False)
    monkeypatch.setattr(own_kernels, "writable_cache", lambda cache: few / "elsewhere")
    again = own_kernels.build_own("ops", ["sm_90a"])
    assert again.compiled == 0
    assert [kernel.cubin for kernel in again.kernels] == [kernel.cubin for kernel in made.kernels]


def test_another_compiler_is_refused(few, monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "flavour", lambda folder: "cu12")
    with pytest.raises(HarnessError, match="got cu12, needs the libraries of cu13"):
        own_kernels.build_own("ops", ["sm_90a"])


def test_every_variant_has_a_name_of_its_own() -> None:
    """Binaries are kept by variant alone: no two models may share one."""
    ids = [spec.id for scope in ("ends", "deployed") for spec, _ in own_compile.variants(scope)]
    assert len(set(ids)) < len(ids)  # the scopes overlap
    for scope in own_compile.SCOPES:
        ids = [spec.id for spec, _ in own_compile.variants(scope)]
        assert len(set(ids)) == len(ids), scope
