"""Attestation: an in-toto Statement (v1) about a run's manifest, in a DSSE envelope that may be signed.

The statement names every sealed file of the run with its SHA-256 and, as predicate, what was measured and how it was judged. A signature
binds it to somebody's key, which is what a chain alone cannot do: whoever can rewrite a whole folder can also forge a new chain.

    attestation.json   the envelope, beside the manifest: payload type application/vnd.in-toto+json, signatures (possibly none)

Keys are PEM files: a PKCS#8 private key to sign (Ed25519, ECDSA or RSA), its SubjectPublicKeyInfo to verify. Envelope and keys are the work
of securesystemslib (the `sign` extra); an unsigned statement needs neither.
Sources: in-toto attestation framework v1 (Statement, ResourceDescriptor) and DSSE v1 (pre-authentication encoding).
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from validation.core import jsonio
from validation.core.store import MANIFEST_FILE, file_sha256, read_json, read_run, write_atomically
from validation.core.types import HarnessError
from validation.core.verify import verify

ATTESTATION_FILE = "attestation.json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:fasttrack:run:v1"
MAX_BYTES = 64 << 20


def statement(run_dir: Path) -> dict[str, Any]:
    """The in-toto Statement of a closed, intact run. Raises HarnessError naming what is wrong with the run."""
    result = verify(run_dir)
    if not result.intact or not result.closed:
        problems = "; ".join(f"{p.kind} {p.where}: {p.message}" for p in result.problems[:5]) or "it is not closed"
        raise HarnessError(f"attest: got {run_dir.name} ({problems}), needs a closed run that verifies")
    run, manifest = read_run(run_dir), read_json(run_dir / MANIFEST_FILE)
    files = {MANIFEST_FILE: file_sha256(run_dir / MANIFEST_FILE), **manifest["files"]}
    verdict = run_dir / "verdict.json"
    judged = read_json(verdict) if verdict.exists() else {}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": f"{run.id}/{name}", "digest": {"sha256": digest}} for name, digest in sorted(files.items())],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "run": run.id,
            "started_utc": run.started_utc,
            "closed_utc": manifest["closed_utc"],
            "commit": run.commit,
            "dirty": run.dirty,
            "code_sha256": run.config.get("code_sha256"),
            "profile": run.profile,
            "records": manifest["records"],
            "head": manifest["head"],
            "verdict": judged.get("status") if isinstance(judged, dict) else None,
            "policy_digest": judged.get("policy_digest") if isinstance(judged, dict) else None,
        },
    }


def attest(run_dir: Path, key: Path | None = None) -> dict[str, Any]:
    """Write attestation.json, signed when a private key is given; returns {"signed_by": key id or None, ...}. Raises HarnessError."""
    payload = jsonio.dumps(statement(run_dir), sort_keys=True).encode()
    if key is None:
        envelope: dict[str, Any] = {"payload": base64.b64encode(payload).decode(), "payloadType": PAYLOAD_TYPE, "signatures": []}
        signer_id = None
    else:
        signer = _signer(key)
        dsse = _library().dsse.Envelope(payload, PAYLOAD_TYPE, {})
        signer_id = dsse.sign(signer).keyid
        envelope = dsse.to_dict()
    write_atomically(run_dir / ATTESTATION_FILE, json.dumps(envelope, indent=1).encode() + b"\n")
    return {"attestation": str(run_dir / ATTESTATION_FILE), "signed_by": signer_id}


def check(run_dir: Path, key: Path | None = None) -> list[str]:
    """Every problem of a run's attestation: a signature that the key did not make, or a statement about other files.

    Without a key only the statement is compared; a missing attestation is a problem when a key is given. Raises HarnessError when the file
    is no envelope or the key no public key.
    """
    path = run_dir / ATTESTATION_FILE
    if not path.exists():
        return [] if key is None else [f"{ATTESTATION_FILE}: is missing, so nobody signed this run"]
    if path.stat().st_size > MAX_BYTES:
        raise HarnessError(f"{ATTESTATION_FILE}: got {path.stat().st_size} bytes, needs at most {MAX_BYTES}")
    envelope, payload = _envelope(read_json(path))
    problems = [] if key is None else _signature_problems(envelope, key)
    said = jsonio.loads(payload)
    if not isinstance(said, dict) or said.get("_type") != STATEMENT_TYPE or said.get("predicateType") != PREDICATE_TYPE:
        return [*problems, f"{ATTESTATION_FILE}: its payload is no statement of this suite"]
    try:
        now = statement(run_dir)
    except HarnessError as error:
        return [*problems, str(error)]
    # The verdict can be made again under another policy; the statement is about the evidence.
    for name in ("verdict", "policy_digest"):
        now["predicate"].pop(name)
        if isinstance(said.get("predicate"), dict):
            said["predicate"].pop(name, None)
    differing = sorted(name for name in now if said.get(name) != now[name])
    return problems + [f"{ATTESTATION_FILE}: its {name} is not that of this run" for name in differing]


def _envelope(table: Any) -> tuple[dict[str, Any], bytes]:
    try:
        if table["payloadType"] != PAYLOAD_TYPE:
            raise ValueError(f"payload type {table['payloadType']!r}")
        signatures = table["signatures"]
        if not isinstance(signatures, list) or not all(isinstance(s, dict) and {"keyid", "sig"} <= s.keys() for s in signatures):
            raise ValueError("signatures without keyid and sig")
        return table, base64.b64decode(table["payload"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise HarnessError(f"{ATTESTATION_FILE}: got {type(error).__name__}: {error}, needs a DSSE envelope of {PAYLOAD_TYPE}") from None


def _signature_problems(envelope: dict[str, Any], key: Path) -> list[str]:
    library = _library()
    public = _public_key(key)
    if not envelope["signatures"]:
        return [f"{ATTESTATION_FILE}: carries no signature"]
    try:
        copy = json.loads(json.dumps(envelope))  # the library rewrites what it reads
        library.dsse.Envelope.from_dict(copy).verify([public], 1)
    except (library.exceptions.VerificationError, library.exceptions.Error, KeyError, TypeError, ValueError) as error:
        return [f"{ATTESTATION_FILE}: no signature of the key {public.keyid[:12]} fits ({type(error).__name__})"]
    return []


def _library() -> Any:
    try:
        import cryptography  # noqa: F401  (securesystemslib signs through it)
        import securesystemslib.dsse
        import securesystemslib.exceptions
        import securesystemslib.signer
    except ImportError as error:
        raise HarnessError(f"attest: got {error}, needs the `sign` extra; install it with `pip install '.[sign]'`") from None
    return securesystemslib


def _signer(path: Path) -> Any:
    library = _library()
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return library.signer.CryptoSigner(load_pem_private_key(path.read_bytes(), password=None))
    except Exception as error:
        raise HarnessError(
            f"attest: got {type(error).__name__}: {error} for the key {path}, needs an unencrypted PKCS#8 PEM private key"
        ) from None


def _public_key(path: Path) -> Any:
    library = _library()
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        return library.signer.SSlibKey.from_crypto(load_pem_public_key(path.read_bytes()))
    except Exception as error:
        raise HarnessError(f"verify: got {type(error).__name__}: {error} for the key {path}, needs a PEM public key") from None
