"""Each fault of a candidate server is caught by the serving lanes and called by its name. Both sides are nano-K3, one behind the proxy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evals.policy import SuitePolicy
from evals.serving.asking import Replica
from evals.serving.client import Endpoint
from evals.serving.differences import position_errors
from evals.serving.forced import LOGITS_PROCESSOR, ONE_TOKEN, ForcedWindow, NotForced, force_window
from evals.serving.progress import Silent
from evals.serving.suites import ServedPlan, ServedResult, SuiteSide, run_suite
from tests.serving.faulty import faulty
from tests.serving.nano_server import Served, engine, prompts
from validation.core.types import Status

ROWS = 20
SUITE = "gsm8k_nano"


def _side(role: str, url: str, *, timeout_s: float = 120.0, retries: int = 0) -> SuiteSide:
    replica = Replica(base_url=url, model="nano-k3", retries=retries, timeout_s=timeout_s)
    return SuiteSide(role=role, fingerprint=f"of {role}", replicas=(replica,), concurrency=8)


def judged(server: Served, folder: Path, fault: str, *, timeout_s: float = 120.0, retries: int = 0, **options: object) -> ServedResult:
    """The suite on the sound server and on the same one behind a fault."""
    policy = SuitePolicy(suite=SUITE, delta=0.3, floor=0.05, ceiling=0.999)
    with faulty(server.url, "none") as stock, faulty(server.url, fault, **options) as candidate:
        return run_suite(
            SUITE,
            stock=_side("stock", stock.url),
            candidate=_side("candidate", candidate.url, timeout_s=timeout_s, retries=retries),
            policy=policy,
            plan=ServedPlan(chat=False, limit=ROWS),
            folder=folder,
            shown=Silent(),
        )


def test_without_a_fault_the_suite_passes(server: Served, tmp_path: Path) -> None:
    result = judged(server, tmp_path, "none")
    assert result.gate.status is Status.PASS, result.gate.reasons
    assert result.gate.n_items == ROWS
    assert 0.4 < result.gate.stock.mean < 1.0
    assert not result.failures["candidate"]


@pytest.mark.parametrize("fault", ["drop", "cut"])
def test_lost_requests(server: Served, tmp_path: Path, fault: str) -> None:
    result = judged(server, tmp_path, fault, every=5)
    assert result.gate.status is Status.FAIL
    assert result.failures["candidate"] == {"dropped": ROWS // 5}
    assert any(f"{ROWS // 5} replies of the candidate are missing" in reason for reason in result.gate.reasons), result.gate.reasons


@pytest.mark.parametrize("fault", ["truncate", "empty"])
def test_short_answers(server: Served, tmp_path: Path, fault: str) -> None:
    result = judged(server, tmp_path, fault)
    assert result.gate.status is Status.FAIL
    words = "; ".join(result.gate.reasons)
    assert "token" in words, words


@pytest.mark.parametrize(("fault", "options"), [("slow", {"delay_s": 4.0}), ("hang", {})])
def test_late_answers(server: Served, tmp_path: Path, fault: str, options: dict[str, object]) -> None:
    result = judged(server, tmp_path, fault, every=10, timeout_s=1.5, **options)
    assert result.gate.status is Status.FAIL
    assert sum(result.failures["candidate"].values()) == 2
    assert all("time" in kind for kind in result.failures["candidate"]), result.failures


def test_answers_of_other_users(server: Served, tmp_path: Path) -> None:
    result = judged(server, tmp_path, "swap")
    assert result.gate.status is Status.FAIL
    assert any("swap" in reason or "exchanged" in reason for reason in result.gate.reasons), result.gate.reasons


def test_errors_that_pass_are_asked_again_and_errors_that_stay_are_named(server: Served, tmp_path: Path) -> None:
    result = judged(server, tmp_path / "some", "http_500", times=2, retries=3)
    assert result.gate.status is Status.PASS, result.gate.reasons
    result = judged(server, tmp_path / "all", "http_500", times=10**6)
    assert result.gate.status is not Status.PASS
    assert any("500" in kind for kind in result.failures["candidate"]), result.failures


# ---- the decode path, token by token ----
CONTEXT, WINDOW = 48, 24


def window(url: str, method: str) -> ForcedWindow:
    ids = engine().tokenizer.encode(prompts()[0])

    async def force() -> ForcedWindow:
        async with Endpoint(url, model="nano-k3", retries=0) as endpoint:
            return await force_window(endpoint, ids[:CONTEXT], ids[CONTEXT : CONTEXT + WINDOW], method=method, logprobs=20, timeout_s=30)

    return asyncio.run(force())


@pytest.fixture(scope="module")
def sound(server: Served) -> ForcedWindow:
    return window(server.url, LOGITS_PROCESSOR)


def test_without_a_fault_a_window_is_the_same_again(server: Served, sound: ForcedWindow) -> None:
    with faulty(server.url, "none") as proxied:
        again = window(proxied.url, LOGITS_PROCESSOR)
    errors = position_errors(sound.positions, again.positions)
    assert len(errors.rms) == WINDOW - 1
    assert float(errors.rms.max()) < 1e-9


def test_perturbed_logits_are_seen_at_every_token(server: Served, sound: ForcedWindow) -> None:
    with faulty(server.url, "perturb", size=0.5) as proxied:
        errors = position_errors(sound.positions, window(proxied.url, LOGITS_PROCESSOR).positions)
    assert float(errors.rms.min()) > 0.01
    assert float(errors.rms.mean()) > 0.2


def test_nan_is_counted(server: Served, sound: ForcedWindow) -> None:
    with faulty(server.url, "nan") as proxied:
        errors = position_errors(sound.positions, window(proxied.url, LOGITS_PROCESSOR).positions)
    assert errors.non_finite > 0
    assert int(errors.rms.isnan().sum()) == WINDOW // 2


@pytest.mark.parametrize("method", [LOGITS_PROCESSOR, ONE_TOKEN, "auto"])
def test_a_server_that_forces_nothing_is_found_by_its_token_ids(server: Served, method: str) -> None:
    with faulty(server.url, "ignore_forcing") as proxied, pytest.raises(NotForced, match="forced text"):
        window(proxied.url, method)
