"""Peak and measured rates of the GPUs a cell may name. A floor uses peak rates unless a measured rate of the same run is given.

Sources: NVIDIA H200, DGX B200, DGX B300 and GB300 NVL72 datasheets (SXM parts, dense rates without sparsity, NVLink per GPU and
direction = half of the bidirectional figure).
"""

from __future__ import annotations

from dataclasses import dataclass

from kimi_k3_decode.config import Unsupported


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Per-GPU rates. Bytes per second, floating-point operations per second, bytes."""

    name: str
    arch: str
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float
    bf16_flops_per_s: float
    l2_bytes: int
    memory_bytes: int


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="H200",
            arch="sm_90a",
            hbm_bytes_per_s=4.8e12,
            nvlink_bytes_per_s=450e9,
            bf16_flops_per_s=989e12,
            l2_bytes=50 * 1024**2,
            memory_bytes=141 * 10**9,
        ),
        Gpu(
            name="B200",
            arch="sm_100a",
            hbm_bytes_per_s=8.0e12,
            nvlink_bytes_per_s=900e9,
            bf16_flops_per_s=2250e12,
            l2_bytes=126 * 1024**2,
            memory_bytes=180 * 10**9,
        ),
        Gpu(
            name="B300",
            arch="sm_103a",
            hbm_bytes_per_s=8.0e12,
            nvlink_bytes_per_s=900e9,
            bf16_flops_per_s=2250e12,
            l2_bytes=126 * 1024**2,
            memory_bytes=288 * 10**9,
        ),
        Gpu(
            name="GB300",
            arch="sm_103a",
            hbm_bytes_per_s=8.0e12,
            nvlink_bytes_per_s=900e9,
            bf16_flops_per_s=2500e12,
            l2_bytes=126 * 1024**2,
            memory_bytes=288 * 10**9,
        ),
    )
}


def gpu(name: str) -> Gpu:
    """Raises Unsupported for an unknown name, listing the known ones."""
    if name not in GPUS:
        raise Unsupported("GPU", (f"name: got {name!r}, needs one of {', '.join(GPUS)}; add its datasheet rates to perf/hardware.py",))
    return GPUS[name]
