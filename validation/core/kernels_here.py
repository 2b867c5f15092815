"""Whether this machine can run the compiled kernels, and what a run says of them: run here, or compiled and audited only."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from validation.core.environment import query_gpus

CAPABILITIES = ("9.0", "10.0", "10.3")  # of the architectures that the kernels are compiled for: sm_90a, sm_100a, sm_103a


@dataclass(frozen=True, kw_only=True)
class Here:
    """`gpu`: the card that kernels can run on, or "" with the `reason`."""

    gpu: str = ""
    reason: str = ""


@functools.lru_cache(maxsize=1)
def here() -> Here:
    """Asks the driver, and torch only where there is a card the kernels are made for (a second then)."""
    cards = [card for card in query_gpus("name", "compute_cap") if len(card) == 2]
    if not cards:
        return Here(reason="no GPU here")
    name, capability = cards[0]["name"], cards[0]["compute_cap"]
    if capability not in CAPABILITIES:
        return Here(reason=f"{name} has compute capability {capability}, needs one of {', '.join(CAPABILITIES)}")
    import torch

    if not torch.cuda.is_available():
        return Here(reason=f"torch {torch.__version__} cannot use the {name} here, needs a CUDA build of torch")
    return Here(gpu=name)


def profile_here() -> str:
    """The profile of a run that names none: the kernels' own where they can run."""
    return "gpu" if here().gpu else "embedded"


def said(profile: str, lanes: Sequence[str]) -> str:
    """One sentence for the command line and the report; "" where the kernels run elsewhere, in servers."""
    if profile == "serving":
        return ""
    found = here()
    if profile == "gpu":
        return f"kernels: run on {found.gpu}" if found.gpu else f"kernels: cannot run ({found.reason}); their cases are refused"
    done = "compiled and audited, not run" if "ordering" in lanes else "not run"
    return f"kernels: {done} ({found.reason or 'profile embedded was asked for; a GPU is here'})"
