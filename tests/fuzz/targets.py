"""Every parser of other people's text, as a function of bytes: it returns, or raises the errors its docstring names, and nothing else.

`tests/fuzz/test_parsers.py` feeds them with hypothesis in every test run; `python -m tests.fuzz NAME` with atheris for as long as wanted.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from kimi_k3_decode.config import Unsupported
from validation.core.types import HarnessError

Target = Callable[[bytes], None]


def _file(data: bytes, name: str, read: Callable[[Path], object], errors: tuple[type[Exception], ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            read(path)
        except errors:
            return


def policy(data: bytes) -> None:
    from validation.policy import load_policy

    _file(data, "policy.toml", load_policy, (HarnessError,))


def settings(data: bytes) -> None:
    from validation.core.settings import load_settings

    _file(data, "validate.toml", lambda path: load_settings(path, {}), (HarnessError,))


def config(data: bytes) -> None:
    from kimi_k3_decode.config_io import read_config

    _file(data, "config.json", read_config, (Unsupported,))


def safetensors_header(data: bytes) -> None:
    """`data` is the header; its length goes in front, as in the format, and a few bytes of body behind."""
    from kimi_k3_decode.checkpoint import CheckpointError, load_checkpoint
    from kimi_k3_decode.config import NANO
    from kimi_k3_decode.config_io import write_config

    with tempfile.TemporaryDirectory() as folder:
        write_config(NANO, Path(folder) / "config.json")
        (Path(folder) / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + b"\0" * 64)
        try:
            load_checkpoint(folder)
        except CheckpointError:
            return
        raise AssertionError("accepted a checkpoint of noise")


def safetensors_index(data: bytes) -> None:
    from kimi_k3_decode.checkpoint import CheckpointError, load_checkpoint
    from kimi_k3_decode.config import NANO
    from kimi_k3_decode.config_io import write_config

    with tempfile.TemporaryDirectory() as folder:
        write_config(NANO, Path(folder) / "config.json")
        (Path(folder) / "model.safetensors.index.json").write_bytes(data)
        try:
            load_checkpoint(folder)
        except CheckpointError:
            return
        raise AssertionError("accepted a checkpoint without weights")


def bench(data: bytes) -> None:
    from perf.bench_json import read_serve

    _file(data, "bench.json", read_serve, (HarnessError,))


def rules(data: bytes) -> None:
    """The two sides of a change to the rules: a policy against the shipped one, and sources with limits and claims."""
    from validation.gate.rule_changes import _claims, _flat, _limits, _policy_changes, _toml
    from validation.policy import DEFAULT_POLICY

    text = data.decode(errors="replace")
    shipped = _flat(_toml(DEFAULT_POLICY.read_text(), "policy"))
    with contextlib.suppress(HarnessError):
        list(map(str, _policy_changes(shipped, _flat(_toml(text, "policy")))))
    for read in (_claims, lambda source: _limits("checks.py", source)):
        with contextlib.suppress(HarnessError):
            read(text)


def diff(data: bytes) -> None:
    from validation.scope.change import _parse

    try:
        _parse(data.decode(errors="surrogateescape"))
    except HarnessError:
        return


def evidence(data: bytes) -> None:
    """One line of evidence.jsonl, read, verified and looked up."""
    from validation.core.store import decode_record
    from validation.core.verify import _verify_line

    line = data.replace(b"\n", b"")
    with contextlib.suppress(HarnessError):
        decode_record(line, "evidence.jsonl:1")
    _verify_line(line, "evidence.jsonl:1", "R-x", "", set())


def run_files(data: bytes) -> None:
    """The same bytes as run.json, plan.json, verdict.json, freshness.json and manifest.json."""
    from reports.view import load_view
    from validation.core.validate import verdict_of
    from validation.core.verify import verify

    with tempfile.TemporaryDirectory() as folder:
        for name in ("run.json", "plan.json", "verdict.json", "freshness.json", "manifest.json"):
            (Path(folder) / name).write_bytes(data)
        (Path(folder) / "evidence.jsonl").write_bytes(b"")
        for read in (verify, load_view, lambda path: verdict_of(path, policy=Path(folder) / "none.toml", claims=())):
            try:
                read(Path(folder))
            except HarnessError:
                continue


def mixed_run(data: bytes) -> None:
    """A sound run with one file replaced, so that reading goes on to the bytes at hand; the first byte says which."""
    from reports.view import load_view
    from validation.core.validate import verdict_of
    from validation.core.verify import verify

    names = ("plan.json", "verdict.json", "freshness.json", "manifest.json", "evidence.jsonl")
    good = {
        "run.json": '{"id":"R-x","started_utc":"","argv":[],"commit":"","dirty":false,"profile":"embedded","config":{"settings":{}},'
        '"hardware":{},"versions":{},"schema":1}',
        "plan.json": '{"cases":[],"absent_lanes":[]}',
        "verdict.json": '{"run":"R-x","status":"pass","claims":[],"policy_digest":"","schema":1}',
        "evidence.jsonl": "",
    }
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "R-x"
        folder.mkdir()
        for name, text in good.items():
            (folder / name).write_text(text)
        (folder / names[(data[0] if data else 0) % len(names)]).write_bytes(data[1:])
        for read in (verify, load_view, lambda path: verdict_of(path, policy=folder / "none.toml", claims=())):
            try:
                read(folder)
            except HarnessError:
                continue


def attestation(data: bytes) -> None:
    from validation.core.attest import ATTESTATION_FILE, check

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ATTESTATION_FILE).write_bytes(data)
        try:
            check(Path(folder))
        except HarnessError:
            return


def raw_records(data: bytes) -> None:
    from validation.freshness.imports import import_raw

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "digests.json").write_text(json.dumps(dict.fromkeys(("kernels", "contracts", "config", "toolchain"), "0")))
        (Path(folder) / "a.jsonl").write_bytes(data)
        try:
            import_raw(Path(folder), Path(folder) / "published", "x")
        except HarnessError:
            return


TARGETS: dict[str, Target] = {
    f.__name__: f
    for f in (
        policy,
        settings,
        config,
        safetensors_header,
        safetensors_index,
        bench,
        rules,
        diff,
        evidence,
        run_files,
        mixed_run,
        attestation,
        raw_records,
    )
}
