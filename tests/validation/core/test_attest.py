"""Attestations: a statement about exactly this run's files, and a signature that only its key verifies."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from validation.core import attest
from validation.core.settings import PROJECT_ROOT
from validation.core.store import EvidenceStore
from validation.core.types import Case, Evidence, HarnessError, Outcome, Run

RUN = Run(
    id="R-20260102T030405Z-0123456789ab",
    started_utc="2026-01-02T03:04:05Z",
    argv=(),
    commit="c" * 40,
    dirty=False,
    profile="embedded",
    config={},
    hardware={},
    versions={},
)


@pytest.fixture
def run_dir(tmp_path):
    store = EvidenceStore.create(tmp_path, RUN, {"cases": []}, durable=False)
    for n in range(3):
        store.append(Evidence(id="", run="", check="c.x", case=Case(subject="s", params={"n": n}), outcome=Outcome.MEASURED))
    store.close("2026-01-02T03:05:00Z")
    return store.run_dir


def keys(folder, name="a", private=None):
    private = private or ed25519.Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    secret, public = folder / f"{name}.pem", folder / f"{name}.pub"
    secret.write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return secret, public


def payload(run_dir):
    return json.loads(base64.b64decode(json.loads((run_dir / attest.ATTESTATION_FILE).read_text())["payload"]))


def test_an_unsigned_statement_names_every_sealed_file(run_dir):
    assert attest.attest(run_dir)["signed_by"] is None
    said = payload(run_dir)
    assert said["_type"] == "https://in-toto.io/Statement/v1"
    assert {s["name"].split("/", 1)[1] for s in said["subject"]} == {"run.json", "plan.json", "evidence.jsonl", "manifest.json"}
    assert said["predicate"]["records"] == 3
    assert attest.check(run_dir) == []


@pytest.mark.parametrize(
    "make", [ed25519.Ed25519PrivateKey.generate, lambda: ec.generate_private_key(ec.SECP256R1())], ids=["ed25519", "ecdsa"]
)
def test_a_signature_verifies_with_its_key_alone(run_dir, tmp_path, make):
    secret, public = keys(tmp_path, private=make())
    _, other = keys(tmp_path, "other")
    assert attest.attest(run_dir, secret)["signed_by"]
    assert attest.check(run_dir, public) == []
    assert "no signature of the key" in attest.check(run_dir, other)[0]


def test_a_statement_without_a_signature_is_not_signed(run_dir, tmp_path):
    _, public = keys(tmp_path)
    assert "is missing" in attest.check(run_dir, public)[0]
    attest.attest(run_dir)
    assert "carries no signature" in attest.check(run_dir, public)[0]


def edit(run_dir, change):
    path = run_dir / attest.ATTESTATION_FILE
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def test_a_changed_payload_is_noticed(run_dir, tmp_path):
    secret, public = keys(tmp_path)
    attest.attest(run_dir, secret)
    said = payload(run_dir)
    said["predicate"]["commit"] = "d" * 40
    edit(run_dir, lambda table: table.update(payload=base64.b64encode(json.dumps(said).encode()).decode()))
    found = attest.check(run_dir, public)
    assert any("no signature" in problem for problem in found)
    assert any("predicate" in problem for problem in found)


def test_a_forged_chain_does_not_carry_the_signature(run_dir, tmp_path):
    """Somebody rewrites the whole folder consistently: `verify` alone is content, the attestation is not."""
    secret, public = keys(tmp_path)
    attest.attest(run_dir, secret)
    envelope = (run_dir / attest.ATTESTATION_FILE).read_text()
    for path in sorted(run_dir.iterdir()):
        path.unlink()
    run_dir.rmdir()
    store = EvidenceStore.create(run_dir.parent, RUN, {"cases": []}, durable=False)
    store.append(Evidence(id="", run="", check="c.x", case=Case(subject="forged"), outcome=Outcome.MEASURED))
    store.close("2026-01-02T03:05:00Z")
    (run_dir / attest.ATTESTATION_FILE).write_text(envelope)
    found = attest.check(run_dir, public)
    assert any("subject is not that of this run" in problem for problem in found)


@pytest.mark.parametrize(
    "table",
    [[], {}, {"payload": "!", "payloadType": attest.PAYLOAD_TYPE, "signatures": []}, {"payload": "", "payloadType": "x", "signatures": []}],
)
def test_what_is_no_envelope_is_an_error(run_dir, table):
    (run_dir / attest.ATTESTATION_FILE).write_text(json.dumps(table))
    with pytest.raises(HarnessError, match="DSSE"):
        attest.check(run_dir)


def test_an_open_or_changed_run_is_not_attested(run_dir, tmp_path):
    path = run_dir / "evidence.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"n":1', b'"n":9'))
    with pytest.raises(HarnessError, match="verifies"):
        attest.attest(run_dir)


def test_a_key_that_is_none_is_an_error(run_dir, tmp_path):
    bad = tmp_path / "bad.pem"
    bad.write_text("no key")
    with pytest.raises(HarnessError, match="private key"):
        attest.attest(run_dir, bad)
    attest.attest(run_dir)
    with pytest.raises(HarnessError, match="public key"):
        attest.check(run_dir, bad)


def test_the_command_signs_and_verifies(run_dir, tmp_path):
    secret, public = keys(tmp_path)
    _, other = keys(tmp_path, "other")

    def call(*more):
        command = [sys.executable, "-m", "validation", "verify", str(run_dir), *map(str, more)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=PROJECT_ROOT)
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    assert call()[0] == 0
    code, body = call("--sign", secret)
    assert code == 0
    assert body["signed_by"]
    assert call("--key", public)[0] == 0
    assert call("--key", other)[0] == 1
    (run_dir / "evidence.jsonl").write_bytes(b"")
    code, body = call("--key", public)
    assert code == 1
    assert body["verdict"] == "changed"
