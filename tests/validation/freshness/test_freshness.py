"""Published evidence: fresh while nothing it depends on changed, stale with the reason and the command as soon as something did."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k3_decode import toolchain
from validation.core.settings import PROJECT_ROOT
from validation.core.store import EvidenceStore, read_evidence
from validation.core.types import Case, Evidence, HarnessError, Measurement, Outcome, Run
from validation.core.verify import verify
from validation.freshness import digests, imports, published
from validation.policy import load_policy

NOW = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC)
RUN = Run(
    id="R-20261120T000000Z-0123456789ab",
    started_utc="2026-11-20T00:00:00Z",
    argv=("fasttrack", "run"),
    commit="c" * 40,
    dirty=False,
    profile="gpu",
    config={},
    hardware={"gpus": [{"name": "H200"}]},
    versions={},
)
SOURCES = {
    "config.py": "HIDDEN = 7168\n",
    "launches.py": "from kimi_k3_decode.config import HIDDEN\n",
    "plan.py": "LIMIT = 64\n",
    "kernels.py": "from kimi_k3_decode.ops.kda import launch as kda\nfrom kimi_k3_decode.ops.mla import launch as mla\n",
    "gpu_step.py": "",
    "device/memory.py": "def load(x):\n    return x\n",
    "ops/kda/contract.py": "ROLES = ('weight',)\n",
    "ops/kda/kernel.py": '"""Doc."""\nfrom kimi_k3_decode.device import memory\n\n\ndef run(x):\n    # why\n    return memory.load(x)\n',
    "ops/kda/launch.py": "from kimi_k3_decode.ops.kda.kernel import run as spec\n",
    "ops/kda/oracle.py": "EXACT = True\n",
    "ops/mla/contract.py": "ROLES = ()\n",
    "ops/mla/launch.py": "def query():\n    return 1\n",
}


def test_only_a_reviewed_version_of_a_checkpoint_reader_counts_as_the_measured_one(checkout, monkeypatch):
    """The exemption is by content: code hidden in such a file makes evidence stale like code anywhere else."""
    for name in digests.READERS:
        assert digests._parse(PROJECT_ROOT, PROJECT_ROOT / name, 0, 0)[0] in digests.READERS[name], f"{name}: look at it and list it"
    reader = checkout / "kimi_k3_decode" / "checkpoint.py"
    kernel = checkout / "kimi_k3_decode" / "ops" / "kda" / "kernel.py"
    reader.write_text("def read(path):\n    return path\n")
    kernel.write_text("from kimi_k3_decode.checkpoint import read\n" + kernel.read_text())
    measured = digests.current(checkout)
    own = digests._parse(checkout, reader, 1, 1)[0]
    reader.write_text("def read(path):\n    return str(path)\n")
    assert digests.current(checkout)["kernels/kda"] != measured["kernels/kda"]
    looked_at = digests._parse(checkout, reader, 2, 2)[0]
    monkeypatch.setattr(digests, "READERS", {"kimi_k3_decode/checkpoint.py": (own, looked_at)})
    assert digests.current(checkout) == measured
    reader.write_text("def read(path):\n    import os\n    return os.environ['FAST'] or str(path)\n")
    assert digests.current(checkout)["kernels/kda"] != measured["kernels/kda"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    for name, text in SOURCES.items():
        path = root / "kimi_k3_decode" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "pyproject.toml").write_text('dependencies = ["nvidia-cutlass-dsl[cu13]==4.8.1"]\n')
    return root


def publish(root: Path, checkout: Path, *, run: Run = RUN, ops: tuple[str | None, ...] = ("kda", "mla", None), value: float = 1.0) -> Path:
    store = EvidenceStore.create(root, run, {"cases": []}, durable=False)
    for op in ops:
        store.append(
            Evidence(
                id="",
                run="",
                check=f"perf.{op or 'step'}",
                case=Case(subject=op or "step"),
                outcome=Outcome.MEASURED,
                measurements=(Measurement(name="step_us", value=value, unit="us"),),
                fingerprints=digests.binding(None if op is None else [op], checkout),
            )
        )
    store.close("2026-11-20T00:01:00Z")
    return store.run_dir


def stale(root: Path, checkout: Path, **policy) -> dict[str, tuple[str, ...]]:
    rules = load_policy()
    rules = dataclasses.replace(rules, evidence={**rules.evidence, **policy})
    found = published.freshness(root, rules, now=NOW, checkout=checkout)
    return {cell.check: cell.reasons for cell in found.stale}


def edit(checkout: Path, name: str, text: str) -> None:
    path = checkout / "kimi_k3_decode" / name
    assert path.exists()
    path.write_text(text)


def test_unchanged_code_is_fresh(tmp_path, checkout):
    publish(tmp_path / "p", checkout)
    found = published.freshness(tmp_path / "p", load_policy(), now=NOW, checkout=checkout)
    assert len(found.cells) == 3
    assert found.stale == ()
    assert found.problems == ()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ops/kda/kernel.py", "def run(x):\n    return x\n", {"perf.kda": ("kernels/kda changed",), "perf.step": ("kernels changed",)}),
        ("device/memory.py", "def load(x):\n    return x + 0\n", {"perf.kda": ("kernels/kda changed",), "perf.step": ("kernels changed",)}),
        ("ops/mla/contract.py", "ROLES = (1,)\n", {"perf.mla": ("contracts/mla changed",), "perf.step": ("contracts changed",)}),
        ("config.py", "HIDDEN = 1\n", {c: ("config changed",) for c in ("perf.kda", "perf.mla", "perf.step")}),
        ("gpu_step.py", "X = 1\n", {"perf.step": ("kernels changed",)}),
        ("ops/kda/oracle.py", "EXACT = False\n", {}),
        (
            "ops/kda/kernel.py",
            '"""Other words."""\nfrom kimi_k3_decode.device import memory\n\ndef run(x):\n    return memory.load(x)\n',
            {},
        ),
    ],
    ids=["kernel", "imported", "contract", "config", "step", "oracle", "comment"],
)
def test_a_change_makes_stale_what_depends_on_it_and_nothing_else(tmp_path, checkout, name, text, expected):
    publish(tmp_path / "p", checkout)
    edit(checkout, name, text)
    assert stale(tmp_path / "p", checkout) == expected


@pytest.mark.parametrize("other", ["nvidia-cutlass-dsl 4.9.0 cu13", "nvidia-cutlass-dsl 4.8.1 cu12"])
def test_another_compiler_makes_everything_stale(tmp_path, checkout, monkeypatch, other):
    """Another version, or the same one with the assembler of another CUDA release: its machine code is another."""
    publish(tmp_path / "p", checkout)
    monkeypatch.setattr(toolchain, "identity", lambda root: other)
    assert set(stale(tmp_path / "p", checkout).values()) == {("toolchain changed",)}


def test_a_compiler_that_cannot_be_told_is_an_error_with_its_reason(checkout, monkeypatch):
    def unclear(root: Path) -> str:
        raise toolchain.ToolchainError("compiler: got the libraries of cu12 and cu13")

    monkeypatch.setattr(toolchain, "identity", unclear)
    with pytest.raises(HarnessError, match="got the libraries of cu12 and cu13"):
        digests.current(checkout)


def test_age_and_tampering_make_stale(tmp_path, checkout):
    run_dir = publish(tmp_path / "p", checkout)
    assert "10 days ago" in stale(tmp_path / "p", checkout, max_age_days=9)["perf.kda"][0]
    path = run_dir / "evidence.jsonl"
    path.write_text(path.read_text().replace('"value":1.0', '"value":0.5', 1))
    assert all("does not verify" in reasons[0] for reasons in stale(tmp_path / "p", checkout).values())


def test_a_record_without_digests_is_never_fresh(tmp_path, checkout):
    store = EvidenceStore.create(tmp_path / "p", RUN, {"cases": []}, durable=False)
    store.append(Evidence(id="", run="", check="perf.x", case=Case(subject="x"), outcome=Outcome.MEASURED, fingerprints={"candidate": "a"}))
    store.close("t")
    assert len(stale(tmp_path / "p", checkout)["perf.x"]) == 4
    with pytest.raises(HarnessError, match="no digests"):
        published.publish(store.run_dir, tmp_path / "q")


def test_the_newest_record_of_a_cell_counts_and_renews_it(tmp_path, checkout):
    publish(tmp_path / "p", checkout, ops=("kda",))
    edit(checkout, "ops/kda/kernel.py", "def run(x):\n    return x\n")
    found = published.freshness(tmp_path / "p", load_policy(), now=NOW, checkout=checkout)
    assert found.renew == ("make validate PROFILE=gpu LANES=perf && fasttrack publish",)
    assert "1 of 1 published cells are stale" in found.problems[0]
    later = dataclasses.replace(RUN, id="R-20261121T000000Z-0123456789ab", started_utc="2026-11-21T00:00:00Z")
    publish(tmp_path / "p", checkout, run=later, ops=("kda",))
    assert stale(tmp_path / "p", checkout) == {}


def test_required_patterns(tmp_path, checkout):
    publish(tmp_path / "p", checkout, ops=("kda",))
    rules = load_policy()
    rules = dataclasses.replace(rules, evidence={**rules.evidence, "required": ["perf.mla", "schedule.*"]})
    edit(checkout, "ops/kda/kernel.py", "X = 1\n")
    found = published.freshness(tmp_path / "p", rules, now=NOW, checkout=checkout)
    assert len(found.stale) == 1  # stale, but nobody requires it
    assert found.problems == ("no published evidence of perf.mla", "no published evidence of schedule.*")


def test_nothing_published_is_said_and_proves_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "validation", "status", "--published", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "Nothing published" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["problems"] == ["nothing published"]


def test_publishing_copies_a_closed_run_once(tmp_path, checkout, monkeypatch):
    run_dir = publish(tmp_path / "runs", checkout)
    (run_dir / "verdict.json").write_text("{}")
    made = published.publish(run_dir, tmp_path / "p")
    assert verify(made).intact
    assert not (made / "verdict.json").exists()
    with pytest.raises(HarnessError, match="exists"):
        published.publish(run_dir, tmp_path / "p")
    shutil.rmtree(tmp_path / "p")
    with (run_dir / "evidence.jsonl").open("a") as handle:
        handle.write("{}\n")
    with pytest.raises(HarnessError, match="unreadable"):
        published.publish(run_dir, tmp_path / "p")
    assert not (tmp_path / "p").exists() or list((tmp_path / "p").iterdir()) == []


def test_raw_records_become_a_verified_run_bound_to_their_kernel(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "digests.json").write_text(json.dumps(digests.current()))
    lines = [
        {
            "op": "mla_query",
            "case": "k3-tp8-r1",
            "errors": {"q_TD": {"kernel": 0.1, "reference": 0.2}},
            "seconds": 1.5,
            "hardware": {"gpu": "H200"},
        },
        {"op": "kda", "case": "k3-tp8-r1", "error": "RuntimeError: planted"},
        {"case": "nano step", "median_us": 12.5, "holds": True, "ops": ["mla_query", "kda"]},
    ]
    (raw / "check.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = imports.import_raw(raw, tmp_path / "p", "python -m perf.kernels OUT check")
    assert verify(made).intact
    first, second, third = read_evidence(made)
    assert {m.name: m.unit for m in first.measurements} == {"errors.q_TD.kernel": "1", "errors.q_TD.reference": "1", "seconds": "s"}
    assert "kernels/mla" in first.fingerprints
    assert second.outcome is Outcome.ERROR
    assert [(m.name, m.value, m.unit) for m in third.measurements] == [("median_us", 12.5, "us")]
    assert {name for name in third.fingerprints if "/" in name} == {f"{k}/{op}" for k in ("kernels", "contracts") for op in ("kda", "mla")}
    assert "kernels" not in third.fingerprints
    found = published.freshness(tmp_path / "p", load_policy())
    assert found.stale == ()
    assert {cell.gpu for cell in found.cells} == {"H200"}
    assert {cell.renew for cell in found.cells} == {"python -m perf.kernels OUT check"}


@pytest.mark.parametrize("line", ["", "[]", "{", '{"case": NaN', "[" * 100_000])
def test_raw_records_that_are_no_objects_are_named(tmp_path, line):
    (tmp_path / "digests.json").write_text(json.dumps(digests.current()))
    (tmp_path / "check.jsonl").write_text(line + "\n")
    with pytest.raises(HarnessError, match=r"check\.jsonl:1"):
        imports.import_raw(tmp_path, tmp_path / "p", "x")
    assert not (tmp_path / "p").exists()


def test_every_launch_of_this_project_has_a_folder_with_digests():
    folders = set(imports.folder_of_launch().values())
    parts = digests.current()
    assert folders
    assert all(f"kernels/{name}" in parts and f"contracts/{name}" in parts for name in folders)
    assert len(set(parts.values())) == len(parts)
    assert (PROJECT_ROOT / "reports" / "published" / "README.md").exists()
