"""The isolation rules on real git histories built here: each leak gives exactly its finding, a clean change gives none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from validation.core.types import HarnessError
from validation.policy import DEFAULT_POLICY, Hook, Interface, Isolation, OptIn, Policy, load_policy
from validation.scope.change import WORKTREE, read_change
from validation.scope.isolation import judge_change, matches

POLICY = Policy(
    name="test",
    digest="0" * 64,
    isolation=Isolation(
        paths=("engine/fast/**",),
        free=("docs/**",),
        packages=("engine.fast",),
        hooks=(Hook(file="engine/model.py", max_added_lines=3),),
    ),
    opt_in=OptIn(name="decode_backend", file="engine/fast/__init__.py", default="auto"),
    interface=Interface(environment=("FAST_DEBUG",)),
    supported={},
    lanes={},
    limits={},
    evidence={},
    mutants={},
)

BASE = {
    "engine/__init__.py": "",
    "engine/model.py": "def step(x):\n    return x\n",
    "engine/server.py": "from engine import model\n",
    "engine/fast/__init__.py": 'decode_backend = "auto"\n',
    "docs/index.md": "hello\n",
}


def git(repository: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run(["git", *identity, "-C", str(repository), *arguments], check=True, capture_output=True)


def write(repository: Path, files: dict[str, str | None]) -> None:
    for name, text in files.items():
        path = repository / name
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "main")
    write(tmp_path, BASE)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "base")
    git(tmp_path, "checkout", "-qb", "change")
    return tmp_path


def found(repository: Path, files: dict[str, str | None], *, commit: bool = True) -> list[tuple[str, str, int]]:
    write(repository, files)
    if commit:
        git(repository, "add", "-A")
        git(repository, "commit", "-qm", "change")
    change = read_change(repository, "main", "HEAD" if commit else WORKTREE)
    return [(f.rule, f.path, f.line) for findings in judge_change(change, POLICY).values() for f in findings]


CLEAN = {
    "engine/fast/kernel.py": "def run(x):\n    return x + 0\n",
    "engine/model.py": "from engine import fast\n\n\ndef step(x):\n    return x\n",
    "docs/index.md": "hello, fast\n",
}


@pytest.mark.parametrize("commit", [True, False])
def test_a_clean_change_has_no_finding(repository: Path, commit: bool) -> None:
    assert found(repository, CLEAN, commit=commit) == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"engine/server.py": "from engine import model\nx = 1\n"}, [("P-ISO-1", "engine/server.py", 0)]),
        ({"engine/server.py": None}, [("P-ISO-1", "engine/server.py", 0)]),
        ({"engine/model.py": "def step(x):\n    return x\n" + "y = 1\n" * 4}, [("P-ISO-1", "engine/model.py", 0)]),
        ({"engine/model.py": ""}, [("P-ISO-1", "engine/model.py", 0)]),
        ({"engine/fast/__init__.py": 'decode_backend = "latency_specialized"\n'}, [("P-OPT-1", "engine/fast/__init__.py", 1)]),
        ({"engine/fast/__init__.py": "\n"}, [("P-OPT-1", "engine/fast/__init__.py", 0)]),
        ({"engine/fast/__init__.py": 'A = "auto"\ndecode_backend = A\n'}, []),
        ({"engine/fast/__init__.py": 'A, B = "auto", "fast"\ndecode_backend: str = A\n'}, []),
        ({"engine/fast/__init__.py": 'A = "fast"\ndecode_backend = A\n'}, [("P-OPT-1", "engine/fast/__init__.py", 2)]),
        ({"engine/fast/__init__.py": 'A = "auto"\nA = "fast"\ndecode_backend = A\n'}, [("P-OPT-1", "engine/fast/__init__.py", 0)]),
        (
            {"engine/fast/a.py": 'import os\nA = os.environ.get("FAST_MODE")\nB = os.getenv("FAST_DEBUG")\n'},
            [("P-OPT-2", "engine/fast/a.py", 2)],
        ),
        ({"engine/fast/a.py": 'parser.add_argument("--fast-mode")\n'}, [("P-OPT-2", "engine/fast/a.py", 1)]),
    ],
)
def test_each_leak_gives_exactly_its_finding(repository: Path, files: dict[str, str | None], expected: list) -> None:
    assert found(repository, files) == expected


@pytest.mark.parametrize(
    "line",
    [
        "import engine.fast.kernel",
        "from engine.fast import kernel",
        "from .fast import kernel",
        "from . import fast",
        'import importlib; importlib.import_module("engine.fast")',
    ],
)
def test_every_way_to_import_the_isolated_package_is_seen(repository: Path, line: str) -> None:
    write(repository, {"engine/helper.py": line + "\n"})
    assert found(repository, {}) == [("P-ISO-1", "engine/helper.py", 0), ("P-ISO-2", "engine/helper.py", 1)]


def test_a_rename_out_of_the_isolated_folder_is_seen_at_its_new_place(repository: Path) -> None:
    text = "".join(f"value_{i} = {i}\n" for i in range(30))
    write(repository, {"engine/fast/table.py": text})
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "table")
    git(repository, "branch", "-f", "main", "HEAD")
    git(repository, "mv", "engine/fast/table.py", "engine/table.py")
    assert found(repository, {}) == [("P-ISO-1", "engine/table.py", 0)]


def test_awkward_names_are_read_right(repository: Path) -> None:
    assert found(repository, {"engine/a b/ü.py": "x = 1\n"}) == [("P-ISO-1", "engine/a b/ü.py", 0)]


def test_only_the_change_counts_not_what_main_did_meanwhile(repository: Path) -> None:
    write(repository, {"engine/fast/kernel.py": "x = 1\n"})
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "change")
    git(repository, "checkout", "-q", "main")
    write(repository, {"engine/server.py": "y = 2\n"})
    git(repository, "commit", "-qam", "elsewhere")
    git(repository, "checkout", "-q", "change")
    assert found(repository, {"docs/more.md": "m\n"}) == []


@pytest.mark.parametrize("base", ["no-such-branch", "--exec=x"])
def test_a_bad_base_is_one_clear_error(repository: Path, base: str) -> None:
    with pytest.raises(HarnessError, match=r"git rev-parse"):
        read_change(repository, base)


def test_not_a_repository_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="not a git repository"):
        read_change(tmp_path, "main")


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("a/b/c.py", "a/**", True),
        ("a/c.py", "a/*/c.py", False),
        ("a/b/c.py", "**/c.py", True),
        ("c.py", "**/c.py", True),
        ("ab", "a?", True),
    ],
)
def test_globs(path: str, pattern: str, expected: bool) -> None:
    assert matches(path, (pattern,)) is expected


def test_the_shipped_policies_load() -> None:
    assert load_policy(DEFAULT_POLICY).limit("numerics", "error_ratio") == 1.5
    assert load_policy(DEFAULT_POLICY.parent / "policies" / "vllm-kimi-k3.toml").isolation.hooks


def test_a_bad_policy_names_every_problem(tmp_path: Path) -> None:
    text = DEFAULT_POLICY.read_text().replace("schema = 1", "schema = 2").replace("[isolation]\n", "[isolation]\nfolders = []\n")
    (tmp_path / "p.toml").write_text(text + "\n[extra]\n")
    with pytest.raises(HarnessError) as error:
        load_policy(tmp_path / "p.toml")
    for part in ("schema: got 2", "[isolation] folders: unknown key", "extra: unknown table"):
        assert part in str(error.value)


def test_a_missing_limit_is_an_error_not_a_pass() -> None:
    with pytest.raises(HarnessError, match=r"limits\.numerics.*nothing"):
        load_policy().limit("numerics", "nothing")
