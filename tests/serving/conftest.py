"""One specialised nano server for all tests of a worker that only ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.nano_server import Served, served


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with served("--decode-backend", "latency_specialized", "--max-model-len", "4096") as running:
        yield running


@pytest.fixture(scope="session")
def vllm_cpu() -> None:
    """vLLM's environment and model, installed on first use; the test is skipped with the reason where that cannot be done."""
    from tests.serving.vllm_environment import Unavailable, ready

    try:
        ready()
    except Unavailable as reason:
        pytest.skip(f"vLLM for CPUs is not to be had here: {reason}")
