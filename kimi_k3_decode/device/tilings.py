"""Schedules of the streaming product, chosen from its shape alone (device/skinny.py says what the fields mean)."""

from __future__ import annotations

from kimi_k3_decode.device.skinny import SHARED_LIMIT_BYTES, STEP_K, Tiling

ROW_TILES = (8, 16, 32, 64)
FEW_ROWS = 2  # up to this many rows x takes little shared memory, which leaves room for two blocks a multiprocessor
X_BYTES = 120 * 1024
MAX_SPLITS = 8
MAX_DEPTH = 8
GOOD_DEPTH = 5
MIN_BLOCKS = 100
MAX_SLICE = 3584  # k of one block, for few tokens
MIN_WARP_SLICE = 192  # k of one warp, below which more rows are better than more slices
MIN_DEPTH = 3
LONG_K = 3584


def row_tile(rows: int) -> int:
    """The token tile that serves `rows` (1..64)."""
    for tile in ROW_TILES:
        if rows <= tile:
            return tile
    raise ValueError(f"rows: got {rows}, needs 1..{ROW_TILES[-1]}; larger steps run stock")


def choose(*, k: int, out_rows: int, rows: int, m_tiles: int = 1) -> Tiling:
    """The schedule of a product of `out_rows` weight rows (with two m-tiles, of each of the two matrices) over `k` inputs for `rows`
    tokens."""
    tile = row_tile(rows)
    x_rows = FEW_ROWS if rows <= FEW_ROWS else tile
    splits = 1
    rows_m = 16 if tile <= 16 else 64
    while 2 * splits <= min(MAX_SPLITS, tile // 2) and k % (2 * splits * STEP_K) == 0:
        blocks = -(-out_rows // rows_m) * splits
        fits = x_rows * (k // splits) * 2 <= X_BYTES and (tile > 16 or k // splits <= MAX_SLICE)
        if fits and (blocks >= MIN_BLOCKS or k // splits < 512):
            break
        splits *= 2
    for warps_m, warps_k in _warps(tile, k // splits, splits, out_rows):
        shape = {"row_tile": tile, "x_rows": x_rows, "k": k, "splits": splits, "warps_m": warps_m, "warps_k": warps_k, "m_tiles": m_tiles}
        longest = min(MAX_DEPTH, max(MIN_DEPTH, 2 * (k // splits // warps_k // STEP_K)))
        # As many blocks a multiprocessor as leave each a ring of GOOD_DEPTH: they hide each other's sums. A long product of few rows has
        # little to hide and wants bytes on their way; and where three fit, some multiprocessors get three and others one.
        most = 2 if x_rows <= FEW_ROWS and m_tiles == 1 and k >= LONG_K else 4
        for blocks_each, least in ((4, GOOD_DEPTH), (3, GOOD_DEPTH), (2, GOOD_DEPTH), (1, MIN_DEPTH)):
            if blocks_each > most:
                continue
            depth = _deepest(SHARED_LIMIT_BYTES // blocks_each - 1024 * (blocks_each > 1), longest, shape)
            if depth >= min(least, longest):
                return Tiling(depth=depth, **shape)
    raise ValueError(f"tiling: got k {k}, rows {rows}, needs a schedule that fits shared memory; raise MAX_SPLITS")


def _warps(tile: int, k_slice: int, splits: int, out_rows: int) -> list[tuple[int, int]]:
    """(warps over rows, warps over k) in order of preference: long slices of k first for few tokens, many rows for many tokens where these
    leave no multiprocessor without a block."""
    if tile > 16:
        pairs = [(8, 1), (4, 2), (2, 4), (4, 1)] if splits > 1 else [(4, 2), (8, 1), (4, 1)]
        if splits > 1:
            pairs.sort(key=lambda pair: -min(MIN_BLOCKS, -(-out_rows // (16 * pair[0])) * splits))
    else:
        pairs = [(1, 8), (2, 4), (4, 2), (8, 1)]
        pairs.sort(key=lambda pair: k_slice // pair[1] < MIN_WARP_SLICE)
    return [(m, k) for m, k in pairs if k_slice % (k * STEP_K) == 0]


def _deepest(budget: int, longest: int, shape: dict[str, int]) -> int:
    """The deepest ring, up to `longest`, within `budget` bytes; 0 when none fits."""
    return next((depth for depth in range(longest, 1, -1) if _bytes(depth=depth, **shape) <= budget), 0)


def _bytes(*, row_tile: int, x_rows: int, k: int, splits: int, warps_m: int, warps_k: int, m_tiles: int, depth: int) -> int:
    """Tiling.shared_bytes without building one, because an oversized Tiling refuses."""
    threads = 32 * warps_m * warps_k
    pitch = -(-(k // splits) // 64) * 64 + 32
    if splits > 1:
        sums = 2 * warps_k * m_tiles * 16 * warps_m * row_tile * 4 + 16
    else:
        sums = warps_k * m_tiles * 16 * warps_m * (row_tile + (8 if row_tile > 8 else 0)) * 4
    return depth * m_tiles * 2 * threads * 16 + x_rows * pitch * 2 + sums
