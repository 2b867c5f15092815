"""What the card did while something was timed: clocks, power, temperature, memory errors, and whether it slowed itself down.

Read through NVML. A measurement during which the card was throttled is discarded and taken again; a record says how often.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean the card ran slower than its clocks allow (NVML documentation).
THROTTLES = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal, software", 0x40: "thermal, hardware", 0x80: "power brake"}


@dataclass
class Watch:
    """Samples of one measurement. `throttled` names every reason seen; empty means none."""

    samples: list[dict[str, float]] = field(default_factory=list)
    throttled: set[str] = field(default_factory=set)
    ecc_errors_count: int | None = None  # uncorrected since the driver loaded; None: not told

    def summary(self) -> dict[str, Any]:
        """For a record: medians and extremes of the samples."""
        found: dict[str, Any] = {"samples_count": len(self.samples), "throttled": sorted(self.throttled)}
        for name in self.samples[0] if self.samples else ():
            values = [sample[name] for sample in self.samples]
            found[name] = {"median": statistics.median(values), "low": min(values), "high": max(values)}
        if self.ecc_errors_count is not None:
            found["ecc_uncorrected_count"] = self.ecc_errors_count
        return found


class Card:
    """NVML's view of the current CUDA device. Raises RuntimeError where NVML cannot be used: times without conditions are not recorded."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise RuntimeError("conditions: got no pynvml, needs nvidia-ml-py; install it") from error
        import torch

        pynvml.nvmlInit()
        self.nvml = pynvml
        # By its UUID: NVML numbers all cards of the host, CUDA those that this process may see.
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        self.driver = str(pynvml.nvmlSystemGetDriverVersion())

    def sample(self, watch: Watch) -> None:
        n = self.nvml
        reasons = n.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
        watch.samples.append(
            {
                "sm_clock_mhz": float(n.nvmlDeviceGetClockInfo(self.handle, n.NVML_CLOCK_SM)),
                "memory_clock_mhz": float(n.nvmlDeviceGetClockInfo(self.handle, n.NVML_CLOCK_MEM)),
                "power_w": n.nvmlDeviceGetPowerUsage(self.handle) / 1000,
                "temperature_c": float(n.nvmlDeviceGetTemperature(self.handle, n.NVML_TEMPERATURE_GPU)),
            }
        )
        watch.throttled |= {why for bit, why in THROTTLES.items() if reasons & bit}

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Samples at both ends; whoever times adds more in between with `sample`."""
        watch = Watch()
        self.sample(watch)
        try:
            yield watch
        finally:
            self.sample(watch)
            try:
                n = self.nvml
                kinds = n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
                watch.ecc_errors_count = int(n.nvmlDeviceGetTotalEccErrors(self.handle, *kinds))
            except self.nvml.NVMLError:
                pass
