"""Where a run happened: code, machine, versions. Everything here is recorded, and most of it decides whether a run may be resumed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from validation.core import jsonio
from validation.core.settings import PROJECT_ROOT
from validation.core.store import sha256_hex
from validation.core.types import Run

PACKAGES = (
    "torch", "numpy", "scipy", "statsmodels", "lm-eval", "datasets", "safetensors", "tokenizers", "vllm",
    "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13",
)  # fmt: skip
CODE_FOLDERS = ("kimi_k3_decode", "validation", "evals", "perf", "rfc")
IDENTITY_DIGITS = 12


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def commit_of(root: Path = PROJECT_ROOT) -> tuple[str, bool]:
    """The commit and whether tracked files differ from it; ("unknown", True) outside a checkout."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return "unknown", True
    return commit, bool(_git(root, "status", "--porcelain", "--untracked-files=no"))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def code_digest(root: Path = PROJECT_ROOT) -> str:
    """Digest over every file that can change a measurement, committed or not: sources, data, checkpoints, policy."""
    digest = hashlib.sha256()
    for folder in CODE_FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def hardware() -> dict[str, Any]:
    """CPU, cores, memory; GPUs with driver and clocks where `nvidia-smi` answers."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "gpus": _gpus(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[dict[str, str]]:
    return query_gpus("name", "driver_version", "clocks.max.sm", "clocks.max.mem", "clocks.sm", "memory.total")


def query_gpus(*fields: str) -> list[dict[str, str]]:
    """These properties of each GPU, as `nvidia-smi` words them; nothing where it is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(fields, (cell.strip() for cell in row.split(",")), strict=False)) for row in rows]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def identity_digest(run: Run) -> str:
    """What two runs must share for one to continue the other: code, configuration, machine, versions; not time, argv or clocks."""
    machine = {**run.hardware, "gpus": [_without_current_clock(gpu) for gpu in run.hardware.get("gpus", [])]}
    parts = [run.schema, run.commit, run.dirty, run.profile, run.config, machine, run.versions]
    return sha256_hex(jsonio.dumps(parts, sort_keys=True).encode())[:IDENTITY_DIGITS]


def _without_current_clock(gpu: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in gpu.items() if key != "clocks.sm"}
