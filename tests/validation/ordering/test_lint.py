"""MO101 on small sources: what is declared, through how many wrappers, and for whose memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from validation.ordering.corpus_cases import CORPUS, PRELUDE, load_cases
from validation.ordering.lint import lint_paths
from validation.ordering.model import Role

DOOR = """
def load(pointer, *, loc=None, ip=None):
    return llvm.inline_asm(T.f32(), [pointer], "{text}", "{constraints}", has_side_effects={effects})
"""


def lint(tmp_path: Path, text: str, is_weight=lambda function, parameter: False):
    file = tmp_path / "kernel.py"
    file.write_text(text)
    return lint_paths([file], is_weight)


@pytest.mark.parametrize(
    ("text", "constraints", "effects", "expected"),
    [
        ("ld.global.f32 $0, [$1];", "=f,l", "False", 1),
        ("ld.global.f32 $0, [$1];", "=f,l", "True", 1),  # no clobber
        ("ld.global.f32 $0, [$1];", "=f,l,~{memory}", "True", 0),
        ("ld.shared.b32 $0, [$1];", "=r,r", "False", 1),
        ("griddepcontrol.wait;", "", "False", 1),
        ("griddepcontrol.wait;", "~{memory}", "True", 0),
        ("{ .reg .b16 h; ld.global.nc.b16 h, [$1]; mov.b32 $0, {0, h}; }", "=f,l", "False", 1),
        ("ex2.approx.ftz.f32 $0, $1;", "=f,f", "False", 0),
        ("ld.param.u64 $0, [p];", "=l", "False", 0),
        ("mov.u32 $0, %laneid;", "=r", "False", 0),
    ],
)
def test_statement(tmp_path: Path, text: str, constraints: str, effects: str, expected: int) -> None:
    found = lint(tmp_path, DOOR.replace("{text}", text).replace("{constraints}", constraints).replace("{effects}", effects))
    assert len(found.findings) == expected
    assert found.statements == 1


def test_flag_left_out_means_no_side_effects(tmp_path: Path) -> None:
    found = lint(tmp_path, 'def f(p):\n    return llvm.inline_asm(T.f32(), [p], "ld.global.f32 $0, [$1];", "=f,l")\n')
    assert "free of side effects" in found.findings[0].message
    assert found.findings[0].source_line == 2


WRAPPERS = """
def emit(code, outputs, operands, *, memory):
    constraints = ["=f"]
    if memory:
        constraints.append("~{memory}")
    return llvm.inline_asm(outputs, operands, code, ",".join(constraints), has_side_effects=True)

def outer(code, pointer):
    return emit(code, (), (pointer,), memory=False)

def good(pointer):
    return emit("ld.global.f32 $0, [$1];", (), (pointer,), memory=True)

def bad(pointer):
    return emit("ld.global.f32 $0, [$1];", (), (pointer,), memory=False)

def worse(pointer):
    return outer("st.global.f32 [$1], $0;", pointer)

def guarded(x):
    x.require("weight")
    return emit("ld.global.nc.f32 $0, [$1];", (), (x.at(0),), memory=False)

def two_roles(x):
    x.require("weight", "input")
    return emit("ld.global.nc.f32 $0, [$1];", (), (x.at(0),), memory=False)
"""


def test_wrappers_are_followed(tmp_path: Path) -> None:
    found = lint(tmp_path, WRAPPERS)
    assert {finding.kernel for finding in found.findings} == {"bad", "worse", "two_roles"}


KERNEL = """
def load(pointer):
    return llvm.inline_asm(T.f32(), [pointer], "ld.global.f32 $0, [$1];", "=f,l", has_side_effects=False)

def row(matrix, i):
    base = matrix.iterator + i
    return load(base)

@cute.kernel
def k(x: cute.Tensor, w: cute.Tensor, y: cute.Tensor):
    first = w
    y[0] = row(first, 3){more}
"""


def test_weights_are_followed_through_callers(tmp_path: Path) -> None:
    def is_weight(function: str, parameter: str) -> bool:
        return (function, parameter) == ("k", "w")

    assert lint(tmp_path, KERNEL.replace("{more}", ""), is_weight).findings == ()
    assert len(lint(tmp_path, KERNEL.replace("{more}", " + row(x, 3)"), is_weight).findings) == 1
    assert len(lint(tmp_path, KERNEL.replace("{more}", "")).findings) == 1


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00x")
    (tmp_path / "fine.py").write_text("x = 1\n")
    found = lint_paths([tmp_path])
    assert {Path(error.path).name for error in found.errors} == {"broken.py", "binary.py"}
    assert [Path(name).name for name in found.files] == ["fine.py"]


@pytest.mark.parametrize("case", load_cases(families=["cutedsl"]), ids=lambda case: case.name)
def test_corpus(case) -> None:
    weights = {entry.name for entry in case.roles.by_index.values() if entry.role is Role.WEIGHT}
    found = lint_paths([case.source], lambda f, p: f == case.name and p in weights, context=[CORPUS / "cutedsl" / PRELUDE])
    assert [finding.rule for finding in found.findings] == ["MO101"] * case.lint.get("MO101", 0)
