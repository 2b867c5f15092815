"""Entry point of `fasttrack serve`: loads the web stack only when it is there."""

from __future__ import annotations

import importlib.util

from validation.core.types import HarnessError

NEEDED = ("starlette", "uvicorn", "prometheus_client")


def main(arguments: list[str]) -> int:
    """Serve until stopped. Raises HarnessError with the reason when it cannot."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise HarnessError(f"serve: got no {', '.join(absent)}, needs the extra `serve`; pip install 'kimi-k3-fasttrack[serve]'")
    from evals.serving.server.command import app

    app(args=arguments, prog_name="fasttrack serve", standalone_mode=False)
    return 0
