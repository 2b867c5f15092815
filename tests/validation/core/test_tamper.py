"""What counts as a replaced function, and what torch does to itself."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import time, torch
from validation.core import tamper
before = tamper.snapshot()
import torch._dynamo
print(tamper.replaced(before))
time.perf_counter = lambda: 0.0
torch.allclose = lambda *a, **k: True
print(tamper.replaced(before))
"""


def test_torch_wrapping_its_own_function_is_no_tampering_and_a_patched_clock_is():
    """Fault: a check that first imports torch._dynamo was refused as if the candidate had replaced torch.manual_seed."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True)
    first, second = done.stdout.strip().splitlines()
    assert first == "()"
    assert set(eval(second)) == {"time.perf_counter", "torch.allclose"}
