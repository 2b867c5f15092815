"""`fasttrack audit` as a person and as CI see it: exit codes, the closing line, formats, the starter manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from validation.core.types import HarnessError
from validation.ordering import cli, corpus_build, crosscheck
from validation.ordering.binaries import load_binaries
from validation.ordering.corpus_cases import CORPUS, load_cases
from validation.ordering.model import AuditResult, Parameter, Role, RoleEntry, RoleMap
from validation.ordering.own_kernels import OwnKernel

MANIFEST = """
[[kernel]]
name = "*"
launch = {{ pdl = true }}
[kernel.params]
p0 = {{ role = "{x}", reason = "activations of this step", name = "x" }}
p1 = {{ role = "weight", reason = "static", name = "w" }}
p2 = {{ role = "output", reason = "written here", name = "y" }}
p3 = {{ role = "scratch", reason = "unused", name = "flag" }}
p4 = {{ role = "scalar" }}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with one compiled case each."""
    cases = {case.name: case for case in load_cases(families=["ptx"]) if case.name in ("load_before_wait", "exit_after_wait")}
    folders = {}
    for name, case in cases.items():
        cache = tmp_path_factory.mktemp(name)
        found = corpus_build.build([case], ["sm_90a"], cache=cache, jobs=1).built[(name, "sm_90a")]
        folders[name] = found.cubin.parent
    return folders


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "audit.toml"
    path.write_text(MANIFEST.format(x="input"))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict, str]:
    code = cli.app([str(item) for item in (*arguments, "--jobs", 1)], standalone_mode=False)
    out = capsys.readouterr().out
    return code, json.loads(out.strip().splitlines()[-1]), out


def test_findings_fail(capsys, built, manifest: Path) -> None:
    code, last, out = run(capsys, built["load_before_wait"], "-m", manifest)
    assert (code, last["verdict"], last["findings"]) == (1, "fail", 1)
    assert "MO001" in out
    assert "ACQBULK" in out


def test_clean_passes(capsys, built, manifest: Path) -> None:
    code, last, _ = run(capsys, built["exit_after_wait"], "-m", manifest)
    assert (code, last["verdict"]) == (0, "pass")


def test_without_roles_nothing_is_proven(capsys, built) -> None:
    code, last, _ = run(capsys, built["load_before_wait"])
    assert (code, last["verdict"]) == (2, "not_proven")


def test_the_same_load_of_a_weight_is_clean(capsys, built, tmp_path: Path) -> None:
    path = tmp_path / "weights.toml"
    path.write_text(MANIFEST.format(x="weight"))
    assert run(capsys, built["load_before_wait"], "-m", path)[0] == 0


@pytest.mark.parametrize("output_format", ["text", "json", "sarif"])
def test_quiet_still_says_why_it_fails(capsys, built, manifest: Path, tmp_path: Path, output_format: str) -> None:
    document = tmp_path / "report"
    code, last, _ = run(capsys, built["load_before_wait"], "-m", manifest, "-q", "-f", output_format, "-o", document)
    assert code == 1
    assert "MO001 x 1" in last["reason"]
    broken = tmp_path / "broken.cubin"
    broken.write_bytes(b"nothing")
    code, last, _ = run(capsys, broken, "-q", "-f", output_format, "-o", document)
    assert code == 2
    assert "broken.cubin" in last["reason"]
    assert "not CUDA code" in last["reason"]


def test_quiet_json_on_standard_output_says_why_on_standard_error(built, manifest: Path, capsys) -> None:
    assert (
        cli.app([str(x) for x in (built["load_before_wait"], "-m", manifest, "-q", "-f", "json", "--jobs", 1)], standalone_mode=False) == 1
    )
    assert "fail: MO001 x 1" in capsys.readouterr().err


def trace_of(folder: Path, kernel: str, *, written: bool) -> Path:
    """A trace in which an earlier kernel writes what p0 points to, or nobody does."""
    params = [{"index": i, "address": 4096 * (i + 1), "bytes": 256, "changed": i == 2} for i in range(4)]
    launches = [
        {"step": step, "order": order, "kernel": name, "params": rows}
        for step in (0, 1)
        for order, (name, rows) in enumerate([("producer", [{**params[0], "changed": written}]), (kernel, params)])
    ]
    path = folder / "trace.json"
    path.write_text(json.dumps({"schema": 1, "device": "pretend", "steps": 2, "launches": launches}))
    return path


@pytest.mark.parametrize("written", [False, True])
def test_observed_roles_stand_in_for_a_manifest(capsys, built, tmp_path: Path, written: bool) -> None:
    kernel = load_binaries(built["load_before_wait"]).kernels[0].name
    code, last, out = run(capsys, built["load_before_wait"], "--observed", trace_of(tmp_path, kernel, written=written))
    assert (code, last["findings"]) == ((1, 1) if written else (0, 0))
    assert ("MO001" in out) == ("written by producer in the same step" in out) == written


def test_starter_manifest_takes_observed_roles(capsys, built, tmp_path: Path) -> None:
    kernel = load_binaries(built["load_before_wait"]).kernels[0].name
    _, _, out = run(capsys, built["load_before_wait"], "--init", "--observed", trace_of(tmp_path, kernel, written=True))
    assert 'role = "input", reason = "observed over 2 steps: written by producer in the same step"' in out


def test_suppressed_finding_passes_and_is_shown(capsys, built, manifest: Path) -> None:
    manifest.write_text(manifest.read_text() + "[[suppress]]\nrule = 'MO001'\nkernel = 'load_*'\nreason = 'known'\nexpires = 2999-01-01\n")
    code, _, out = run(capsys, built["load_before_wait"], "-m", manifest)
    assert code == 0
    assert "suppressed" in out
    assert "known" in out


def test_json_and_sarif_documents(capsys, built, manifest: Path, tmp_path: Path) -> None:
    code, document, _ = run(capsys, built["load_before_wait"], "-m", manifest, "-f", "json")
    assert (code, document["verdict"]) == (1, "fail")
    assert document["findings"][0]["rule"] == "MO001"
    target = tmp_path / "out.sarif"
    code, last, _ = run(capsys, built["load_before_wait"], "-m", manifest, "-f", "sarif", "-o", target)
    assert (code, last["report"]) == (1, str(target))
    assert json.loads(target.read_text())["version"] == "2.1.0"


@pytest.mark.parametrize("options", [["-f", "json"], ["--init"]])
def test_an_output_that_is_a_folder_is_an_error_and_leaves_nothing(capsys, built, tmp_path: Path, options: list[str]) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(HarnessError, match="is a folder"):
        run(capsys, built["load_before_wait"], *options, "-o", target)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_starter_manifest(capsys, built, tmp_path: Path) -> None:
    target = tmp_path / "starter.toml"
    assert run(capsys, built["load_before_wait"], "--init", "-o", target)[0] == 0
    text = target.read_text()
    assert "load before the wait" in text
    assert 'name = "x"' in text  # from the PTX beside the binary
    assert run(capsys, built["load_before_wait"], "-m", target)[0] == 2  # nothing decided yet


def test_hostile_input_is_named_and_the_rest_is_audited(capsys, built, manifest: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.cubin"
    bad.write_bytes(b"\x7fELF" + b"\x00" * 20)
    code, last, out = run(capsys, built["exit_after_wait"], bad, "-m", manifest)
    assert (code, last["verdict"], last["kernels"]) == (2, "not_proven", 1)
    assert "bad.cubin" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/file"], "exist"),
        (["--format", "yaml"], "format"),
        (["--scope", "everything"], "scope"),
        (["--init"], "init"),
        (["--explain", "MO999"], "MO999"),
        (["--arch", "sm_75"], "sm_75"),
    ],
)
def test_wrong_use_is_an_error(arguments: list[str], words: str) -> None:
    with pytest.raises(HarnessError, match=words):
        cli.app(arguments, standalone_mode=False)


def test_explain(capsys) -> None:
    code, last, out = run(capsys, "--explain", "mo003")
    assert (code, last["rule"]) == (0, "MO003")
    assert "How to fix" in out


def test_launch_graph_file(capsys) -> None:
    code, _, out = run(capsys, "-g", CORPUS / "graph" / "overtaking_after_early_exit.toml")
    assert code == 1
    assert "order lost here" in out
    assert run(capsys, "-g", CORPUS / "graph" / "chain_that_waits.toml")[0] == 0


def test_sources_are_linted(capsys, tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text('def f(p):\n    return llvm.inline_asm(T.f32(), [p], "ld.global.f32 $0, [$1];", "=f,l")\n')
    code, _, out = run(capsys, tmp_path)
    assert code == 1
    assert "MO101" in out


# ---- roles of our own kernels ----
def own(kind: str, role: str, count: int = 1) -> dict:
    return {"name": f"{kind}_{role}", "kind": kind, "role": role, "bytes": 8, "count": count}


def test_roles_follow_the_flattened_parameters() -> None:
    params = (own("operand", "input"), own("boxes", "mailbox", 2), own("absent", "output"), own("int32", ""), own("operand", "weight"))
    kernel = OwnKernel(
        name="n", model="m", op="o", variant="o[v]", arch="sm_90a", pdl=True, cubin=Path("c"), ptx=Path("p"), params=params
    )  # fmt: skip
    roles = [kernel.roles().by_index[(index, 0)].role for index in range(6)]
    assert roles == [Role.INPUT, Role.MAILBOX, Role.MAILBOX, Role.UNKNOWN, Role.SCALAR, Role.WEIGHT]
    changed = kernel.roles({"operand_weight": Role.INPUT}).by_index[(5, 0)]
    assert changed.role is Role.INPUT


def test_a_mailbox_nobody_touches_is_reported() -> None:
    roles = RoleMap(by_index={(0, 0): RoleEntry(role=Role.MAILBOX, reason="r", name="box")})
    result = AuditResult(kernel="k", arch="sm_90a", digest="", path="", parameters=(Parameter(index=0, offset=0, size=8),))
    assert [f.rule for f in crosscheck.unpolled_mailboxes(result, roles)] == ["MO016"]
