"""The corpus: its files, what it covers, and the three ways a case can end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from validation.core.types import HarnessError
from validation.ordering import corpus_build
from validation.ordering.corpus_cases import ARCHITECTURES, CORPUS, Moved, load_cases, order_holds
from validation.ordering.corpus_graphs import load_graph_cases
from validation.ordering.corpus_run import State, compare, run_corpus
from validation.ordering.model import RULES

CASES = load_cases()
# One of each kind: moved by ptxas, by NVVM, latent, warp roles, mailbox, proxy, near misses; and all three front ends.
SAMPLE = (
    "nc_pinned_by_barrier", "nc_sunk_below_release", "nc_straight", "wait_in_one_role", "early_exit", "tma_before_wait", "tma_of_weight",
    "generic_write_fenced", "descriptor_fenced", "mbarrier_handover", "acquire_poll", "flag_relaxed_poll", "guarded_wait",
    "pointer_through_shared", "restrict_pinned", "coherent_pinned", "wait_compiled_out", "pure_load_spin", "effect_load_spin",
    "pure_weight_spin",
)  # fmt: skip


def test_size_and_balance() -> None:
    own = [case for case in CASES if case.family != "twins"]
    assert len(own) >= 60
    assert sum(case.true_negative for case in own) / len(own) >= 0.5
    assert {case.family for case in CASES} == {"ptx", "cuda", "cutedsl", "twins"}


def test_faults_of_the_catalogue_have_analogues() -> None:
    covered = {fault for case in CASES for fault in case.faults} | {fault for case in load_graph_cases(CORPUS) for fault in case.faults}
    assert {"F01", "F02", "F03", "F04", "F05", "F06", "F07", "F08", "F16", "F26"} <= covered


def test_every_rule_of_binaries_is_expected_somewhere() -> None:
    expected = {item.rule for case in CASES for item in case.expect} | {rule for case in CASES for rule in case.lint}
    assert set(RULES) - expected == {"MO012", "MO015"}  # graphs and records


def test_sample_is_as_expected_on_hopper() -> None:
    report = run_corpus(("sm_90a",), names=SAMPLE, jobs=1)
    assert [(r.case, r.missing, r.unexpected, r.note) for r in report.bad] == []
    assert {result.case for result in report.results} >= set(SAMPLE)
    assert report.instructions > 500


def test_wait_compiled_out_depends_on_the_architecture() -> None:
    case = next(case for case in CASES if case.name == "wait_compiled_out")
    assert case.expected("sm_90a") == {("MO005", "")}
    assert case.expected("sm_100a") == frozenset()


def corpus_of(tmp_path: Path, *names: str) -> Path:
    root = tmp_path / "corpus"
    for family in ("ptx", "twins"):
        (root / family).mkdir(parents=True)
        for path in (CORPUS / family).iterdir():
            if path.stem in names:
                shutil.copy(path, root / family / path.name)
    return root


def test_a_compiler_that_no_longer_moves_is_named_and_the_twin_judges(tmp_path: Path) -> None:
    root = corpus_of(tmp_path, "nc_pinned_by_barrier", "twin_load_before_wait")
    source = root / "ptx" / "nc_pinned_by_barrier.ptx"
    text = source.read_text()
    assert "ld.global.nc.f32" in text
    source.write_text(text.replace("ld.global.nc.f32", "ld.global.f32"))  # what a compiler that stopped moving it would leave
    report = run_corpus(("sm_90a",), root=root, cache=tmp_path / "cache", jobs=1)
    states = {result.case: result.state for result in report.results}
    assert states == {"nc_pinned_by_barrier": State.NO_LONGER_MOVES, "twin_load_before_wait": State.OK}

    twin = root / "twins" / "twin_load_before_wait.toml"
    twin.write_text(twin.read_text().replace('x = "input"', 'x = "weight"'))  # the twin loses its finding
    report = run_corpus(("sm_90a",), root=root, cache=tmp_path / "cache", jobs=1)
    assert {result.state for result in report.results} == {State.FAILED}


def test_a_blind_audit_fails(tmp_path: Path) -> None:
    root = corpus_of(tmp_path, "load_before_wait", "prefetch_of_weight")
    for name, old, new in (("load_before_wait", 'x = "input"', 'x = "weight"'), ("prefetch_of_weight", 'w = "weight"', 'w = "input"')):
        path = root / "ptx" / f"{name}.toml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    report = run_corpus(("sm_90a",), root=root, cache=tmp_path / "cache", jobs=1)
    by_case = {result.case: result for result in report.results}
    assert by_case["load_before_wait"].missing == (("MO001", "x"),)
    assert by_case["prefetch_of_weight"].unexpected == (("MO008", "w"),)


def test_one_broken_source_does_not_hide_the_others(tmp_path: Path) -> None:
    root = corpus_of(tmp_path, "load_before_wait", "exit_after_wait")
    (root / "ptx" / "exit_after_wait.ptx").write_text(".visible .entry exit_after_wait() { frobnicate; }\n")
    cases = load_cases(root, ["ptx"])
    build = corpus_build.build(cases, ["sm_90a"], cache=tmp_path / "cache", jobs=1)
    assert set(build.errors) == {("exit_after_wait", "sm_90a")}
    assert set(build.built) == {("load_before_wait", "sm_90a")}


def test_build_is_kept_by_content(tmp_path: Path) -> None:
    root = corpus_of(tmp_path, "load_before_wait")
    cases = load_cases(root, ["ptx"])
    assert corpus_build.build(cases, ["sm_90a"], cache=tmp_path, jobs=1).compiled_units == 1
    assert corpus_build.build(cases, ["sm_90a"], cache=tmp_path, jobs=1).compiled_units == 0
    (root / "ptx" / "load_before_wait.ptx").write_text(cases[0].source.read_text() + "// changed\n")
    assert corpus_build.build(load_cases(root, ["ptx"]), ["sm_90a"], cache=tmp_path, jobs=1).compiled_units == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("colour = 'red'\n", "colour"),
        ("[[expect]]\nrule = 'MO999'\n", "MO999"),
        ("[[expect]]\nrule = 'MO001'\nparam = 'nobody'\n", "nobody"),
        ("[moved]\nload = 'LDG'\ntwin = 'x'\n", "load and wait"),
        ("[roles]\n", "got"),
    ],
)
def test_bad_case_files_are_named(tmp_path: Path, change: str, words: str) -> None:
    root = corpus_of(tmp_path, "exit_after_wait")
    path = root / "ptx" / "exit_after_wait.toml"
    text = path.read_text()
    path.write_text(change + text if change.startswith("colour") else text + change)
    with pytest.raises(HarnessError, match=words):
        load_cases(root, ["ptx"])


def test_source_without_expectations_is_an_error(tmp_path: Path) -> None:
    root = corpus_of(tmp_path, "exit_after_wait")
    (root / "ptx" / "exit_after_wait.toml").unlink()
    with pytest.raises(HarnessError, match=r"needs its exit_after_wait\.toml"):
        load_cases(root, ["ptx"])


@pytest.mark.parametrize(
    ("lines", "holds"),
    [
        (["LDG.E.CONSTANT R0", "ACQBULK"], True),
        (["ACQBULK", "LDG.E.CONSTANT R0"], False),
        (["LDG.E.CONSTANT R0"], True),  # the wait is gone
        (["ACQBULK"], False),  # the load is gone: not moved
        ([], False),
    ],
)
def test_text_order(lines: list[str], holds: bool) -> None:
    assert order_holds(lines, Moved(load=r"LDG\.E\.CONSTANT", wait="ACQBULK", twin="t")) is holds


def test_compare() -> None:
    assert compare({("MO001", "x"), ("MO005", "")}, {("MO001", "x"), ("MO005", "anything")}) == ((), ())
    assert compare({("MO001", "x")}, {("MO001", "y")}) == ((("MO001", "x"),), (("MO001", "y"),))
    assert compare({("MO005", "")}, set()) == ((("MO005", ""),), ())


def test_architectures() -> None:
    assert ARCHITECTURES == ("sm_90a", "sm_100a", "sm_103a")
