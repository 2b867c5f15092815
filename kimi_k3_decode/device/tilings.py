"""Schedules of the streaming product, chosen from its shape alone (device/skinny.py says what the fields mean)."""

from __future__ import annotations

from kimi_k3_decode.device.skinny import SHARED_LIMIT_BYTES, STEP_K, Tiling

ROW_TILES = (8, 16, 32, 64)
FEW_ROWS = 2  # up to this many rows x takes little shared memory, which leaves room for two blocks a multiprocessor
X_BYTES = 120 * 1024
HALF_BYTES = SHARED_LIMIT_BYTES // 2 - 1024
MAX_SPLITS = 8
MAX_DEPTH = 16
MIN_BLOCKS = 120
MIN_DEPTH = 3


def row_tile(rows: int) -> int:
    """The token tile that serves `rows` (1..64)."""
    for tile in ROW_TILES:
        if rows <= tile:
            return tile
    raise ValueError(f"rows: got {rows}, needs 1..{ROW_TILES[-1]}; larger steps run stock")


def choose(*, k: int, out_rows: int, rows: int, m_tiles: int = 1) -> Tiling:
    """The schedule of a product of `out_rows` weight rows (with two m-tiles, of each of the two matrices) over `k` inputs for `rows` tokens."""
    tile = row_tile(rows)
    x_rows = FEW_ROWS if rows <= FEW_ROWS else tile
    warps_m = 1 if tile <= 16 else 4
    splits = 1
    while splits < MAX_SPLITS and k % (2 * splits * STEP_K) == 0:
        blocks = -(-out_rows // (16 * warps_m)) * splits
        if x_rows * (k // splits) * 2 <= X_BYTES and (blocks >= MIN_BLOCKS or k // splits < 512):
            break
        splits *= 2
    for warps_k in (n for n in (8 // warps_m, 4, 2, 1) if n * warps_m <= 8 and k % (splits * n * STEP_K) == 0):
        shape = {"row_tile": tile, "x_rows": x_rows, "k": k, "splits": splits, "warps_m": warps_m, "warps_k": warps_k, "m_tiles": m_tiles}
        longest = min(MAX_DEPTH, max(3, 2 * (k // splits // warps_k // STEP_K)))
        half, whole = (_deepest(budget, longest, shape) for budget in (HALF_BYTES, SHARED_LIMIT_BYTES))
        depth = half if 2 * half >= whole else whole
        if depth >= MIN_DEPTH:
            return Tiling(depth=depth, **shape)
    raise ValueError(f"tiling: got k {k}, rows {rows}, needs a schedule that fits shared memory; raise MAX_SPLITS")


def _deepest(budget: int, longest: int, shape: dict[str, int]) -> int:
    """The deepest ring, up to `longest`, within `budget` bytes; 0 when none fits."""
    return next((depth for depth in range(longest, 1, -1) if _bytes(depth=depth, **shape) <= budget), 0)


def _bytes(*, row_tile: int, x_rows: int, k: int, splits: int, warps_m: int, warps_k: int, m_tiles: int, depth: int) -> int:
    """Tiling.shared_bytes without building one, because an oversized Tiling refuses."""
    threads = 32 * warps_m * warps_k
    pitch = -(-(k // splits) // 64) * 64 + 32
    sums = warps_k * m_tiles * 16 * warps_m * (row_tile + (8 if row_tile > 8 else 0)) * 4
    return depth * m_tiles * 2 * threads * 16 + x_rows * pitch * 2 + sums
