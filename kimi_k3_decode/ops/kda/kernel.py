"""kda: conv + SiLU, L2 norms, F_B and gates, FP32 recurrence, gated RMSNorm; one decode token or a verify of up to 8 tokens a request.

One block per (request, head); a warp owns V / 16 rows of the state S[V, K] in registers, four key channels a lane.
Before the wait: F_B's rows of the head go to shared memory (cp.async), conv weights, gate constants and the norm's weights to registers.
After: slots and accepted (tables), the projections, the conv window and the state; then phases
 0 the state is requested; 1 convolution and SiLU of every token, the new window is stored, F_A and gate are staged; 2 F_B, decay; 3 L2
 norms of q and k; 4 the recurrence, token by token, each state stored in its slot if the slot is > 0; 5 RMSNorm, output gate.
A block barrier separates the phases. A request whose first or read slot is <= 0 is padding: its rows output zeros and nothing else is
written. Everything between the BF16 projections and the output is FP32; the output is rounded once.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kimi_k3_decode.device import memory as mem
from kimi_k3_decode.device.math import bf16_word_f32x2, exp, pack_bf16, rsqrt, sigmoid, silu, warp_sum
from kimi_k3_decode.device.sync import block_sync, grid_release, grid_wait

THREADS = 512
WARPS = THREADS // 32
HEAD = 128  # key and value channels of a head; the mapping of lanes to channels depends on it
TAPS = 4
L2_EPS = 1e-6  # Kimi Linear: x rsqrt(sum x^2 + 1e-6)
NORM_EPS = 1e-5  # of o_norm, a constant of the model


class Kda:
    """Fixed: heads of this rank, columns of the projection, tokens a request, lower bound of the log-decay."""

    def __init__(self, heads: int, proj_columns: int, q: int, lower_bound: float) -> None:
        self.heads, self.proj_columns, self.q, self.lower_bound = heads, proj_columns, q, lower_bound
        self.width = heads * HEAD
        self.f_b_bytes = HEAD * (HEAD + 8) * 2
        # Per token, FP32: q, k, v, decay, F_A, output; then beta.
        self.token_floats = 6 * HEAD
        self.shared_bytes = self.f_b_bytes + q * self.token_floats * 4 + q * 4 * 4
        # At three and four tokens the assembler would rather spill than give up the second block of a multiprocessor.
        self.options = {"min_blocks_per_mp": 1} if q in (3, 4) else {}

    @cute.jit
    def __call__(
        self,
        proj_TP: cute.Pointer,
        conv_weight_CW: cute.Pointer,
        f_b_CK: cute.Pointer,
        a_log_H: cute.Pointer,
        dt_bias_C: cute.Pointer,
        o_norm_V: cute.Pointer,
        slots_BQ: cute.Pointer,
        accepted_B: cute.Pointer,
        conv_SW3C: cute.Pointer,
        state_SHVK: cute.Pointer,
        out_TC: cute.Pointer,
        requests: Int32,
        conv_slot: Int64,
        conv_row: Int32,
        conv_part: Int32,
        state_slot: Int64,
        pdl: Int32,
        stream: Any,
    ):
        self.kernel(
            proj_TP,
            conv_weight_CW,
            f_b_CK,
            a_log_H,
            dt_bias_C,
            o_norm_V,
            slots_BQ,
            accepted_B,
            conv_SW3C,
            state_SHVK,
            out_TC,
            conv_slot,
            conv_row,
            conv_part,
            state_slot,
        ).launch(grid=[self.heads, requests, 1], block=[THREADS, 1, 1], smem=self.shared_bytes, stream=stream, use_pdl=pdl, **self.options)

    @cute.kernel
    def kernel(
        self,
        proj_TP: cute.Pointer,
        conv_weight_CW: cute.Pointer,
        f_b_CK: cute.Pointer,
        a_log_H: cute.Pointer,
        dt_bias_C: cute.Pointer,
        o_norm_V: cute.Pointer,
        slots_BQ: cute.Pointer,
        accepted_B: cute.Pointer,
        conv_SW3C: cute.Pointer,
        state_SHVK: cute.Pointer,
        out_TC: cute.Pointer,
        conv_slot: Int64,
        conv_row: Int32,
        conv_part: Int32,
        state_slot: Int64,
    ):
        """`conv_slot`, `conv_row`, `conv_part`, `state_slot`: strides in elements of the slot, window, q|k|v and slot axes."""
        self.proj = mem.Global("proj_TP", proj_TP, "input")
        self.conv_weight = mem.Global("conv_weight_CW", conv_weight_CW, "weight")
        self.f_b = mem.Global("f_b_CK", f_b_CK, "weight")
        a_log = mem.Global("a_log_H", a_log_H, "weight")
        dt_bias = mem.Global("dt_bias_C", dt_bias_C, "weight")
        o_norm = mem.Global("o_norm_V", o_norm_V, "weight")
        self.slots = mem.Global("slots_BQ", slots_BQ, "table")
        accepted = mem.Global("accepted_B", accepted_B, "table")
        self.conv = mem.Global("conv_SW3C", conv_SW3C, "state")
        self.state = mem.Global("state_SHVK", state_SHVK, "state")
        self.out = mem.Global("out_TC", out_TC, "output")
        self.conv_slot, self.conv_row, self.conv_part, self.state_slot = conv_slot, conv_row, conv_part, state_slot
        self.tid, _, _ = cute.arch.thread_idx()
        self.head, self.request, _ = cute.arch.block_idx()
        self.lane, self.warp = self.tid % 32, self.tid // 32
        self.f_b_at = Int32(cute.arch.get_dyn_smem(cutlass.Int8, alignment=16).toint())
        self.tokens_at = self.f_b_at + self.f_b_bytes
        self.beta_at = self.tokens_at + self.q * self.token_floats * 4

        for i in cutlass.range_constexpr(HEAD * HEAD // 8 // THREADS):
            piece = i * THREADS + self.tid
            channel, k = piece // (HEAD // 8), piece % (HEAD // 8) * 8
            mem.copy_weight_b128(self.f_b_at + (channel * (HEAD + 8) + k) * 2, self.f_b, (self.head * HEAD + channel) * HEAD + k)
        mem.copy_commit()
        channel = self.tid % HEAD
        part = cutlass.min(self.tid // HEAD, Int32(2))
        taps = mem.load_weight_early_f32x4(self.conv_weight, (part * self.width + self.head * HEAD + channel) * TAPS)
        rate = mem.load_weight_early_f32(a_log, self.head)
        bias = mem.load_weight_early_f32(dt_bias, self.head * HEAD + channel)
        norm = mem.load_weight_early_b64(o_norm, self.lane * 4)
        grid_wait()
        grid_release()
        first_slot = mem.load_b32(self.slots, self.request * self.q)
        count = cutlass.max(cutlass.min(mem.load_b32(accepted, self.request), Int32(self.q)), Int32(1))
        read_slot = first_slot
        if cutlass.const_expr(self.q > 1):
            read_slot = mem.load_b32(self.slots, self.request * self.q + count - 1)
        if (Int32(first_slot > 0) & Int32(read_slot > 0)) != 0:
            state = self.load_state(read_slot)
            token = cutlass.min(self.warp, Int32(self.q - 1))
            gate_at = (self.request * self.q + token) * self.proj_columns + 3 * self.width + self.head * HEAD + self.lane * 4
            gate = mem.load_b64(self.proj, gate_at)
            self.convolve(first_slot, count, taps)
            mem.copy_wait(0)
            block_sync()
            self.gates(exp(rate), bias)
            self.normalise()
            block_sync()
            self.recur(state)
            block_sync()
            self.finish(gate, norm)
        else:
            mem.copy_wait(0)
            for i in cutlass.range(self.tid, self.q * HEAD, THREADS):
                at = (self.request * self.q + i // HEAD) * self.width + self.head * HEAD + i % HEAD
                mem.store_bf16(self.out, at, Float32(0.0))

    def at(self, token: Any, array: int, channel: Any) -> Any:
        """Shared address of a per-token array: 0 q, 1 k, 2 v, 3 decay, 4 F_A, 5 output."""
        return self.tokens_at + (token * self.token_floats + array * HEAD + channel) * 4

    @cute.jit
    def convolve(self, slot: Int32, count: Int32, taps: cutlass.Constexpr):
        """Threads 0..383: one channel of q, k or v over all tokens, then the shifted window. Threads 384..511: F_A and beta."""
        channel = self.tid % HEAD
        part = self.tid // HEAD
        first_row = self.request * self.q
        if part < 3:
            column = self.head * HEAD + channel
            base = Int64(slot) * self.conv_slot + Int64(part * self.conv_part + column)
            window = [mem.load_bf16(self.conv, base + Int64((count - 1 + i) * self.conv_row)) for i in range(TAPS - 1)]
            for token in cutlass.range_constexpr(self.q):
                window.append(mem.load_bf16(self.proj, (first_row + token) * self.proj_columns + part * self.width + column))
            for token in cutlass.range_constexpr(self.q):
                total = window[token] * taps[0]
                for i in cutlass.range_constexpr(1, TAPS):
                    total = total + window[token + i] * taps[i]
                mem.shared_store_f32(self.tokens_at + (token * self.token_floats + part * HEAD + channel) * 4, silu(total))
            for i in cutlass.range_constexpr(self.q + TAPS - 2):
                mem.store_bf16(self.conv, base + Int64(i * self.conv_row), window[i + 1])
        else:
            for token in cutlass.range_constexpr(self.q):
                row = (first_row + token) * self.proj_columns + 4 * self.width
                mem.shared_store_f32(self.at(token, 4, channel), mem.load_bf16(self.proj, row + channel))
                if channel == 0:
                    beta = sigmoid(mem.load_bf16(self.proj, row + HEAD + self.head))
                    mem.shared_store_f32(self.beta_at + token * 16, beta)

    @cute.jit
    def gates(self, rate: Float32, bias: Float32):
        """decay = exp(lower_bound sigmoid(exp(A_log) (F_B F_A x + dt_bias))): a thread takes one channel of every fourth token."""
        channel = self.tid % HEAD
        for token in cutlass.range(self.tid // HEAD, self.q, THREADS // HEAD):
            sums = [Float32(0.0)] * 4
            for i in cutlass.range_constexpr(HEAD // 8):
                words = mem.shared_b128(self.f_b_at + (channel * (HEAD + 8) + i * 8) * 2)
                low = mem.shared_f32x4(self.at(token, 4, i * 8))
                high = mem.shared_f32x4(self.at(token, 4, i * 8 + 4))
                factors = (*low, *high)
                for j in cutlass.range_constexpr(4):
                    even, odd = bf16_word_f32x2(words[j])
                    sums[j] = sums[j] + even * factors[2 * j] + odd * factors[2 * j + 1]
            total = (sums[0] + sums[1]) + (sums[2] + sums[3])
            decay = exp(Float32(self.lower_bound) * sigmoid(rate * (total + bias)))
            mem.shared_store_f32(self.at(token, 3, channel), decay)

    @cute.jit
    def normalise(self):
        """A warp per (token, q or k), the last warps first, which have no gates of a single token: L2 norm; q also gets HEAD^-0.5."""
        for job in cutlass.range(WARPS - 1 - self.warp, 2 * self.q, WARPS):
            token = job // 2
            array = job % 2
            at = self.tokens_at + (token * self.token_floats + array * HEAD + self.lane * 4) * 4
            values = mem.shared_f32x4(at)
            total = warp_sum(values[0] * values[0] + values[1] * values[1] + values[2] * values[2] + values[3] * values[3])
            factor = rsqrt(total + Float32(L2_EPS))
            if array == 0:
                factor = factor * Float32(HEAD**-0.5)
            mem.shared_store_f32x2(at, values[0] * factor, values[1] * factor)
            mem.shared_store_f32x2(at + 8, values[2] * factor, values[3] * factor)

    def head_offset(self) -> Any:
        """This lane's first element of the head's state inside a slot."""
        return Int64(self.head * (HEAD * HEAD) + self.warp * (HEAD // WARPS) * HEAD + self.lane * 4)

    def load_state(self, read_slot: Any) -> Any:
        """This warp's rows of S to registers, issued early: nothing but the slot number is needed."""
        state = cute.make_rmem_tensor((HEAD // WARPS * 4,), Float32)
        base = Int64(read_slot) * self.state_slot + self.head_offset()
        for r in range(HEAD // WARPS):
            values = mem.load_f32x4(self.state, base + Int64(r * HEAD))
            for i in range(4):
                state[r * 4 + i] = values[i]
        return state

    @cute.jit
    def recur(self, state: cutlass.Constexpr):
        """S <- exp(g) S; S <- S + beta k (v - k^T S)^T; o = q^T S, this warp's rows of S in registers over all tokens."""
        per_warp = HEAD // WARPS
        head_at = self.head_offset()
        for token in cutlass.range(self.q):
            q = mem.shared_f32x4(self.at(token, 0, self.lane * 4))
            k = mem.shared_f32x4(self.at(token, 1, self.lane * 4))
            decay = mem.shared_f32x4(self.at(token, 3, self.lane * 4))
            beta = mem.shared_f32(self.beta_at + token * 16)
            for r in cutlass.range_constexpr(per_warp):
                row = self.warp * per_warp + r
                s = [state[r * 4 + i] * decay[i] for i in range(4)]
                predicted = warp_sum(s[0] * k[0] + s[1] * k[1] + s[2] * k[2] + s[3] * k[3])
                change = beta * (mem.shared_f32(self.at(token, 2, row)) - predicted)
                s = [s[i] + change * k[i] for i in range(4)]
                for i in cutlass.range_constexpr(4):
                    state[r * 4 + i] = s[i]
                result = warp_sum(s[0] * q[0] + s[1] * q[1] + s[2] * q[2] + s[3] * q[3])
                if self.lane == 0:
                    mem.shared_store_f32(self.at(token, 5, row), result)
            slot = mem.load_b32(self.slots, self.request * self.q + token)
            if slot > 0:
                base = Int64(slot) * self.state_slot + head_at
                for r in cutlass.range_constexpr(per_warp):
                    mem.store_f32x4(self.state, base + Int64(r * HEAD), tuple(state[r * 4 + i] for i in range(4)))

    @cute.jit
    def finish(self, gate: cutlass.Constexpr, norm: cutlass.Constexpr):
        """A warp per token: RMSNorm over V, the shared norm weight, the output gate. `gate` and `norm`: this lane's four, as loaded."""
        if self.warp < self.q:
            channel = self.lane * 4
            o = mem.shared_f32x4(self.at(self.warp, 5, channel))
            total = warp_sum(o[0] * o[0] + o[1] * o[1] + o[2] * o[2] + o[3] * o[3])
            factor = rsqrt(total * Float32(1.0 / HEAD) + Float32(NORM_EPS))
            gates = (*bf16_word_f32x2(gate[0]), *bf16_word_f32x2(gate[1]))
            weights = (*bf16_word_f32x2(norm[0]), *bf16_word_f32x2(norm[1]))
            y = [o[i] * factor * weights[i] * sigmoid(gates[i]) for i in range(4)]
            at = (self.request * self.q + self.warp) * self.width + self.head * HEAD + channel
            mem.store_b64(self.out, at, (pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])))
