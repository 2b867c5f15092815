"""moe_front: this rank's router rows (FP32 logits) and latent-down rows (rounded to BF16), published as column blocks on every rank.

Grid: clusters of `splits` blocks over tiles of 16 rows, the router's tiles first (device/skinny.py).
Before the wait: weights only. After: x is staged. Stores are relaxed at system scope; an element is its own flag.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.math import select
from kimi_k3_decode.device.skinny import Skinny, Tiling
from kimi_k3_decode.device.sync import publish_bf16x2, publish_f32x2


class MoeFront:
    """Fixed: the tiling, this rank's router and latent rows, and the widths of the two boxes. One m-tile a tile."""

    def __init__(self, tiling: Tiling, router_rows: int, latent_rows: int, experts: int, latent: int) -> None:
        self.core = Skinny(tiling)
        self.router_rows, self.latent_rows, self.experts, self.latent = router_rows, latent_rows, experts, latent
        self.router_tiles = -(-router_rows // tiling.tile_m)
        self.n_tiles = self.router_tiles + -(-latent_rows // tiling.tile_m)

    @cute.jit
    def __call__(
        self,
        x_TD: cute.Pointer,
        router_ED: cute.Pointer,
        latent_down_LD: cute.Pointer,
        logits_boxes: tuple,
        latent_boxes: tuple,
        rank: Int32,
        rows: Int32,
        blocks: Int32,
        pdl: Int32,
        stream: Any,
    ):
        self.kernel(x_TD, router_ED, latent_down_LD, logits_boxes, latent_boxes, rank, rows).launch(
            **self.core.launch_options(blocks, pdl, stream)
        )

    @cute.kernel
    def kernel(
        self,
        x_TD: cute.Pointer,
        router_ED: cute.Pointer,
        latent_down_LD: cute.Pointer,
        logits_boxes: tuple,
        latent_boxes: tuple,
        rank: Int32,
        rows: Int32,
    ):
        x = mem.Global("x_TD", x_TD, "input")
        router = mem.Global("router_ED", router_ED, "weight")
        latent_down = mem.Global("latent_down_LD", latent_down_LD, "weight")
        logits = [mem.Global("logits_TE", box, "mailbox") for box in logits_boxes]
        latents = [mem.Global("latent_box_TL", box, "mailbox") for box in latent_boxes]
        t = self.core.t

        def source(tile, m):
            is_router = Int32(tile < self.router_tiles)
            first = select(is_router, tile, tile - self.router_tiles) * t.tile_m
            last = select(is_router, Int32(self.router_rows - 1), Int32(self.latent_rows - 1))
            return mem.Global.choose(is_router, router, latent_down), first, last

        @cute.jit
        def finish(tile, row, token, values):
            if tile < self.router_tiles:
                expert = tile * t.tile_m + row
                if expert < self.router_rows:
                    publish_f32x2(logits, token * self.experts + rank * self.router_rows + expert, *values[0])
            else:
                column = (tile - self.router_tiles) * t.tile_m + row
                if column < self.latent_rows:
                    publish_bf16x2(latents, token * self.latent + rank * self.latent_rows + column, *values[0])

        self.core.run(x, rows, self.n_tiles, source, finish, None)
