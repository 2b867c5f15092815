"""attn_res: prefix add in BF16, block write, residual softmax over at most 9 sources, RMSNorm; the consumer of o_proj, moe_tail,
dense_down.

One cluster a row, four columns a thread. Before the wait: the score and norm weights. After: prefix and blocks are read, this thread's
columns of every rank's slot polled, added in rank order, rounded to BF16, and the other parity re-armed.
Sums over the row: (dot, squares) of every source in one exchange, the squares of the mixture in a second. Rounding: delta, prefix, output;
the final boundary also rounds the mixture.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.math import bf16_word_f32x2, exp, maximum, pack_bf16, reciprocal, round_bf16, rsqrt, select
from kimi_k3_decode.device.row import RowCluster
from kimi_k3_decode.device.sync import grid_release, grid_wait
from kimi_k3_decode.ops.moe_tail.kernel import sum_slots


class AttnRes:
    """Fixed: hidden size, ranks, saved blocks, and the boundary's mode (see the contract). Absent operands are passed as null pointers."""

    def __init__(
        self, hidden: int, ranks: int, n_blocks: int, *, has_delta: bool, restart: bool, writes_block: bool, final: bool, eps: float
    ) -> None:
        self.hidden, self.ranks, self.n_blocks = hidden, ranks, n_blocks
        self.has_delta, self.restart, self.writes_block, self.final = has_delta, restart, writes_block, final
        self.eps = eps
        self.row = RowCluster(hidden)

    @cute.jit
    def __call__(
        self,
        prefix_TD: cute.Pointer,
        delta_RTD: cute.Pointer,
        other_RTD: cute.Pointer,
        blocks_NTD: cute.Pointer,
        res_score_D: cute.Pointer,
        norm_D: cute.Pointer,
        block_out_TD: cute.Pointer,
        prefix_out_TD: cute.Pointer,
        x_TD: cute.Pointer,
        health_N: cute.Pointer,
        rows: Int32,
        pdl: Int32,
        stream: Any,
    ):
        self.kernel(
            prefix_TD, delta_RTD, other_RTD, blocks_NTD, res_score_D, norm_D, block_out_TD, prefix_out_TD, x_TD, health_N, rows
        ).launch(**self.row.launch_options(rows, pdl, stream))

    @cute.kernel
    def kernel(
        self,
        prefix_TD: cute.Pointer,
        delta_RTD: cute.Pointer,
        other_RTD: cute.Pointer,
        blocks_NTD: cute.Pointer,
        res_score_D: cute.Pointer,
        norm_D: cute.Pointer,
        block_out_TD: cute.Pointer,
        prefix_out_TD: cute.Pointer,
        x_TD: cute.Pointer,
        health_N: cute.Pointer,
        rows: Int32,
    ):
        prefix = mem.Global("prefix_TD", prefix_TD, "input")
        box = mem.Global("delta_RTD", delta_RTD, "mailbox")
        other = mem.Global("other_RTD", other_RTD, "mailbox")
        blocks = mem.Global("blocks_NTD", blocks_NTD, "input")
        score_weight = mem.Global("res_score_D", res_score_D, "weight")
        norm_weight = mem.Global("norm_D", norm_D, "weight")
        block_out = mem.Global("block_out_TD", block_out_TD, "output")
        prefix_out = mem.Global("prefix_out_TD", prefix_out_TD, "output")
        x = mem.Global("x_TD", x_TD, "output")
        health = mem.Global("health_N", health_N, "mailbox")
        row, column, active = self.row.start()
        at = row * self.hidden + column
        score = mem.load_weight_early_f32x4(score_weight, column)
        norm = [value for word in mem.load_weight_early_b64(norm_weight, column) for value in bf16_word_f32x2(word)]
        grid_wait()
        grid_release()

        # Phase 1: the updated prefix. Idle threads repeat the last columns; they re-arm the same words but store no output.
        current = [Float32(0.0) for _ in range(4)]
        if cutlass.const_expr(not self.restart):
            current = [value for word in mem.load_b64(prefix, at) for value in bf16_word_f32x2(word)]
        saved = [mem.load_b64(blocks, n * rows * self.hidden + at) for n in range(self.n_blocks)]
        if cutlass.const_expr(self.has_delta):
            total = sum_slots(box, other, health, self.ranks, rows * self.hidden, at)
            for i in cutlass.range_constexpr(4):
                delta = round_bf16(total[i])
                current[i] = delta if self.restart else round_bf16(current[i] + delta)
        packed = (pack_bf16(current[0], current[1]), pack_bf16(current[2], current[3]))
        if active:
            if cutlass.const_expr(self.writes_block):
                mem.store_b64(block_out, at, packed)
            elif cutlass.const_expr(self.has_delta):
                mem.store_b64(prefix_out, at, packed)

        # Phase 2: the mixture. With no saved block it is the prefix itself, exactly.
        mixture = current
        if cutlass.const_expr(self.n_blocks > 0):
            mixture = self.mix(saved, active, score, current)
        if cutlass.const_expr(self.final):
            mixture = [round_bf16(value) for value in mixture]

        # Phase 3: the sublayer's norm.
        squares = [value * value for value in mixture]
        (total,) = self.row.sum([self.masked(active, squares[0] + squares[1] + squares[2] + squares[3])], 1)
        factor = rsqrt(total * Float32(1.0 / self.hidden) + Float32(self.eps))
        if active:
            out = [value * factor * weight for value, weight in zip(mixture, norm, strict=True)]
            mem.store_b64(x, at, (pack_bf16(out[0], out[1]), pack_bf16(out[2], out[3])))

    def masked(self, active: Any, value: Any) -> Any:
        """A sum's term, zero in threads without columns (select, not a product: the value may be NaN)."""
        return select(active, value, Float32(0.0))

    def mix(self, saved: Any, active: Any, score: Any, current: Any) -> Any:
        """Softmax-weighted sum of the saved blocks and the prefix: logit = <score, s> rsqrt(mean(s^2) + eps)."""
        sources = [[value for word in words for value in bf16_word_f32x2(word)] for words in saved]
        sources.append(current)
        sums = []
        for source in sources:
            dot = score[0] * source[0] + score[1] * source[1] + score[2] * source[2] + score[3] * source[3]
            square = source[0] * source[0] + source[1] * source[1] + source[2] * source[2] + source[3] * source[3]
            sums += [self.masked(active, dot), self.masked(active, square)]
        totals = self.row.sum(sums, 0)
        logits = []
        for i in range(len(sources)):
            mean = totals[2 * i + 1] * Float32(1.0 / self.hidden)
            logits.append(totals[2 * i] * rsqrt(mean + Float32(self.eps)))
        largest = logits[0]
        for logit in logits[1:]:
            largest = maximum(largest, logit)
        weights = [exp(logit - largest) for logit in logits]
        norm = weights[0]
        for weight in weights[1:]:
            norm = norm + weight
        inverse = reciprocal(norm)
        mixture = []
        for i in range(4):
            value = weights[0] * inverse * sources[0][i]
            for weight, source in zip(weights[1:], sources[1:], strict=True):
                value = value + weight * inverse * source[i]
            mixture.append(value)
        return mixture
