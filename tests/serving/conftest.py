"""One specialised nano server for all tests of a worker that only ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.nano_server import Served, served


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with served("--decode-backend", "latency_specialized", "--max-model-len", "4096") as running:
        yield running
