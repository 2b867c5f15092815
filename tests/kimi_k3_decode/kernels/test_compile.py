"""Compiling ahead of time: one trace for all architectures, binaries kept by what they are made from, a table that lets no spill pass."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from kimi_k3_decode import build, toolchain
from kimi_k3_decode import compile as table
from kimi_k3_decode.config import K3, Shard
from kimi_k3_decode.cubin import sections
from kimi_k3_decode.kernels import SPECS, kernel_spec
from kimi_k3_decode.ops.registry import CONTRACTS
from tests.kimi_k3_decode.kernels import lists

NANO_LIST = "tests.kimi_k3_decode.kernels.lists:nano"


@pytest.mark.parametrize("op", ["attn_res", "experts_up"])
def test_one_trace_gives_what_each_architecture_gives_alone(op, tmp_path) -> None:
    """Cubin and PTX to the byte: that a trace is shared must not show in any binary."""
    spec, _ = next(lists.nano(op))
    together = build.build(spec, build.ARCHITECTURES, tmp_path)
    assert [row.arch for row, _, _ in together] == list(build.ARCHITECTURES)
    assert together[0][0].sass_sha256 != together[1][0].sass_sha256
    for row, cubin, ptx in together:
        assert f".target {row.arch}" in ptx
        assert any(name.startswith(".text.") for name in sections(cubin))
        (alone,) = build.build(spec, [row.arch], tmp_path)
        assert alone == (row, cubin, ptx)


def test_an_edit_of_one_operation_makes_only_its_binaries_again(tmp_path, monkeypatch) -> None:
    package = shutil.copytree(
        build.PACKAGE, tmp_path / build.PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "*.json", "checkpoints")
    )
    monkeypatch.setattr(build, "PACKAGE", package)
    digest = build.sources_of.__wrapped__  # without its cache

    def digests() -> dict[str, str]:
        build._imports.cache_clear()
        return {op: digest(op) for op in SPECS}

    def changed_by(name: str) -> set[str]:
        path, before = package / name, digests()
        path.write_text(path.read_text() + "\nEDITED = 1\n")
        after = digests()
        return {op for op in SPECS if before[op] != after[op]}

    assert changed_by("ops/kda/kernel.py") == {"kda"}
    assert changed_by("ops/route/contract.py") == {"route"}
    assert changed_by("ops/kda/oracle.py") == set()
    assert changed_by("launches.py") == set()
    assert changed_by("device/memory.py") == set(SPECS)
    assert changed_by("build.py") == set(SPECS)
    build._imports.cache_clear()


def test_another_flavour_of_the_compiler_has_other_names(monkeypatch) -> None:
    spec = kernel_spec(K3, CONTRACTS["embedding"](Shard(config=K3, tp=8), rows=1))
    name = build.name_of(spec, "sm_90a")
    assert name.startswith("embedding-sm_90a-")
    monkeypatch.setattr(toolchain, "identity", lambda: "nvidia-cutlass-dsl 4.8.1 cu12")
    monkeypatch.setattr(build, "sources_of", build.sources_of.__wrapped__)
    assert build.name_of(spec, "sm_90a") != name


def test_binaries_are_kept_and_may_come_from_elsewhere(tmp_path) -> None:
    """A second call compiles nothing, nor does one that is given another machine's folder; a damaged entry is made again."""
    first = build.produce(NANO_LIST, "route,kda", ["sm_90a", "sm_100a"], [tmp_path / "a"], jobs=2)
    assert (first.compiled, first.errors) == (4, {})
    assert {(entry.op, entry.row.arch) for entry in first.entries} == {
        (op, arch) for op in ("route", "kda") for arch in ("sm_90a", "sm_100a")
    }
    assert all(entry.facts["model"] == "nano-k3" and entry.cubin.read_bytes()[:4] == b"\x7fELF" for entry in first.entries)
    assert all(f".target {entry.row.arch}" in entry.ptx.read_text() for entry in first.entries)
    assert all(param["kind"] for entry in first.entries for param in entry.params)
    assert build.produce(NANO_LIST, "route,kda", ["sm_90a", "sm_100a"], [tmp_path / "a"]).compiled == 0
    copied = shutil.copytree(tmp_path / "a", tmp_path / "b", ignore=shutil.ignore_patterns("index-*"))
    second = build.produce(NANO_LIST, "route,kda", ["sm_90a", "sm_100a"], [tmp_path / "c", copied], jobs=1)
    assert second.compiled == 0
    assert [entry.row for entry in second.entries] == [entry.row for entry in first.entries]
    next(copied.glob("kda-*.ptx")).unlink()
    again = build.produce(NANO_LIST, "route,kda", ["sm_90a", "sm_100a"], [tmp_path / "c", copied], jobs=1)
    assert again.compiled == 1
    assert [entry.row for entry in again.entries] == [entry.row for entry in first.entries]


def test_a_variant_that_does_not_compile_is_named_and_the_others_are_made(tmp_path, monkeypatch, capsys) -> None:
    broken = NANO_LIST.replace("nano", "one_broken")
    made = build.produce(broken, "", ["sm_90a"], [tmp_path], jobs=1)
    assert [entry.op for entry in made.entries] == ["route"]
    assert made.errors == {"route[broken] sm_90a": "ValueError: tile: got 3, needs a power of two"}
    monkeypatch.setattr(table, "VARIANTS", broken)
    monkeypatch.setattr(table, "TABLE", tmp_path / "table.json")
    assert table.main(["--arch", "sm_90a", "--cache", str(tmp_path), "--write"]) == 3
    assert "route[broken] sm_90a: ValueError: tile: got 3" in capsys.readouterr().err
    assert not (tmp_path / "table.json").exists()


def test_the_table_is_written_compared_and_replaced_in_part(tmp_path, monkeypatch, capsys) -> None:
    """`--write` end to end on real kernels, then what a reader of the table sees."""
    path = tmp_path / "table.json"
    monkeypatch.setattr(table, "VARIANTS", NANO_LIST)
    monkeypatch.setattr(table, "TABLE", path)
    arguments = ["--jobs", "1", "--cache", str(tmp_path / "cache")]

    def run(*more: str) -> tuple[int, dict]:
        code = table.main([*arguments, *more])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    assert run("route", "kda", "--write") == (0, {"kernels": 6, "added": 6, "gone": 0, "changed": 0, "spills": 0})
    written = json.loads(path.read_text())
    assert written["compiler"] == toolchain.identity()
    assert [(row["kernel"].partition("[")[0], row["arch"]) for row in written["kernels"]] == [
        (op, arch) for op in ("kda", "route") for arch in sorted(build.ARCHITECTURES)
    ]
    assert run("route", "kda") == (0, {"kernels": 6, "added": 0, "gone": 0, "changed": 0, "spills": 0})
    for row in written["kernels"]:
        row["sass_sha256"] = "0" * 64
    path.write_text(json.dumps(written))
    assert run("kda")[1]["changed"] == 3
    assert run("kda", "--arch", "sm_90a", "--write")[1] == {"kernels": 1, "added": 0, "gone": 0, "changed": 1, "spills": 0}
    after = json.loads(path.read_text())["kernels"]
    assert len(after) == 6
    assert [row["kernel"].partition("[")[0] + row["arch"] for row in after if row["sass_sha256"] != "0" * 64] == ["kdasm_90a"]


def row(kernel: str, digest: str = "1", stack_bytes: int = 0) -> build.Built:
    return build.Built(kernel=kernel, arch="sm_90a", sass_sha256=digest, registers=8, stack_bytes=stack_bytes, shared_bytes=0)


def test_a_stack_byte_fails_even_where_the_table_has_it(tmp_path, monkeypatch, capsys) -> None:
    path = tmp_path / "table.json"
    spilling = row("k[b]", stack_bytes=8)
    table.write_table([spilling], path)
    assert table.compare([spilling], path)["spills"] == ["k[b] sm_90a: 8 bytes"]
    monkeypatch.setattr(table, "TABLE", path)
    monkeypatch.setattr(table, "run", lambda *_: [spilling])
    assert table.main([]) == 1
    assert "spills: k[b] sm_90a: 8 bytes" in capsys.readouterr().err
    monkeypatch.setattr(table, "run", lambda *_: [row("k[b]")])
    assert table.main([]) == 0


def test_another_compiler_is_refused_before_anything_is_compiled(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(toolchain, "flavour", lambda folder: "cu12")
    assert table.main(["route", "--cache", str(tmp_path / "cache")]) == 3
    assert "got cu12, needs the libraries of cu13" in capsys.readouterr().err
    assert not Path(tmp_path / "cache").exists()
