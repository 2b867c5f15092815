"""A strong stock layer: one rank's KDA + latent MoE layer as separately launched library kernels, captured in one CUDA graph.

Products are cuBLAS through torch, the recurrence is fla-core's fused recurrent KDA (conv, gates and norms around it fused as a good stock
path fuses them), the experts a Triton MXFP4 grouped product, the rest one Triton kernel a step. There is no exchange between ranks in it:
the all-reduces that stock pays beside its kernels are left out, in stock's favour.
"""

from __future__ import annotations

from typing import Any

import torch
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from torch.nn.functional import linear

from kimi_k3_decode.config import ModelConfig, Shard
from perf.kernels import triton_ops as ops

Tensors = dict[str, torch.Tensor]
LAUNCHES = (
    "residual", "in_proj (cuBLAS)", "conv", "F_B (cuBLAS)", "fused_recurrent_kda (fla-core)", "gated_norm", "o_proj (cuBLAS)",
    "residual", "router (cuBLAS)", "latent_down (cuBLAS)", "route", "align", "grouped w1 w3", "situ", "grouped w2", "combine",
    "shared gate_up (cuBLAS)", "situ", "shared down (cuBLAS)", "rms_norm", "latent_up (cuBLAS)", "add",
)  # fmt: skip


class StockLayer:
    """Layer `layer` on rank 0 of `tp`, weights by the plan's buffer names (those of a LayerLoop, so both read the same bytes)."""

    def __init__(
        self,
        config: ModelConfig,
        tp: int,
        layer: int,
        rows: int,
        weights: Tensors,
        state: Tensors,
        *,
        q: int = 1,
    ) -> None:
        self.config, self.shard, self.rows, self.q, self.layer = config, Shard(config=config, tp=tp), rows, q, layer
        tag = f"L{layer:02d}"
        self.w = {name.removeprefix(f"{tag}."): t for name, t in weights.items() if name.startswith(f"{tag}.")}
        self.state = state
        d, c, s, k = config.hidden_size, config, self.shard, config.n_experts_per_token
        self.blocks = torch.randn(max(1, c.n_blocks_before_attention(layer)), rows, d, device="cuda").to(torch.bfloat16)
        shapes = {
            "prefix": (rows, d), "x": (rows, d), "x2": (rows, d),
            "conv": (3, rows, s.kda_dim), "beta": (rows, s.kda_heads), "o": (1, rows, s.kda_heads, c.kda_head_dim), "a": (rows, s.kda_dim),
            "weights": (rows, k), "gu": (rows * k, 2 * s.expert_intermediate), "h": (rows * k, s.expert_intermediate),
            "parts": (rows * k, c.moe_latent_size), "latent": (rows, c.moe_latent_size), "normed": (rows, c.moe_latent_size),
            "sh": (rows, s.shared_intermediate),
        }  # fmt: skip
        self.b = {name: torch.empty(shape, dtype=torch.bfloat16, device="cuda") for name, shape in shapes.items()}
        self.b["ids"] = torch.empty(rows, k, dtype=torch.int32, device="cuda")
        self.lists = ops.empty_lists(rows * k, "cuda")
        self.logits = torch.randn(rows, c.n_experts, device="cuda")
        self.delta = torch.randn(rows, d, device="cuda").to(torch.bfloat16)
        self.z = torch.randn(rows, c.moe_latent_size, device="cuda").to(torch.bfloat16)
        self.starts = torch.arange(0, rows + 1, q, device="cuda", dtype=torch.int64)

    def attention(self, prefix: torch.Tensor) -> torch.Tensor:
        c, s, b, w = self.config, self.shard, self.b, self.w
        ops.residual(prefix, self.delta, self.blocks, w["attn_res.res_score_D"], w["attn_res.norm_D"], b["prefix"], b["x"], c.rms_norm_eps)
        proj = linear(b["x"], w["in_proj.weight_PD"])
        taps, window, slots = w["kda.conv_weight_CW"], self.state["conv"], self.state["slots"]
        accepted = self.state["accepted"] if self.q > 1 else None
        if accepted is None:
            ops.conv(proj, taps, window, slots, b["conv"], b["beta"], c.kda_head_dim)
        else:
            ops.conv_verify(proj, taps, window, slots, accepted, b["conv"], b["beta"], c.kda_head_dim)
        width, heads, channels = s.kda_dim, s.kda_heads, c.kda_head_dim
        f = linear(proj[:, 4 * width : 4 * width + channels], w["kda.f_b_CK"])
        q, k, v = b["conv"].view(3, 1, self.rows, heads, channels)
        fused_recurrent_kda_fwd(
            q, k, v, f.view(1, self.rows, heads, channels), b["beta"].unsqueeze(0),
            A_log=w["kda.a_log_H"], dt_bias=w["kda.dt_bias_C"], initial_state=self.state["recurrent"], inplace_final_state=True,
            state_v_first=True, cu_seqlens=self.starts, ssm_state_indices=slots, num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=c.gate_lower_bound, out=b["o"],
        )  # fmt: skip
        ops.gated_norm(b["o"][0], proj, w["kda.o_norm_V"], b["a"], 3 * width, 1e-5)
        return linear(b["a"], w["o_proj.weight_DC"])

    def moe(self, delta: torch.Tensor) -> torch.Tensor:
        c, b, w, k = self.config, self.b, self.w, self.config.n_experts_per_token
        ops.residual(b["prefix"], delta, self.blocks, w["mlp_res.res_score_D"], w["mlp_res.norm_D"], b["x2"], b["x"], c.rms_norm_eps)
        x = b["x"]
        linear(x, w["moe_front.router_ED"])
        linear(x, w["moe_front.latent_down_LD"])
        ops.route(self.logits, w["route.bias_E"], b["ids"], b["weights"])
        ops.align(b["ids"], *self.lists)
        # One product reads w1 and w3, each where it lies: nothing is copied, so that both sides share all weights.
        up_codes, up_scales = ([w[f"experts_up.{part}_{name}"] for part in ("w1", "w3")] for name in ("EIJ", "scale_EIG"))
        ops.grouped(self.z, up_codes, up_scales, b["gu"], self.lists, b["weights"], k, True, False)
        ops.situ(b["gu"], b["h"], c.situ_beta, c.situ_linear_beta)
        down_codes, down_scales = [w["experts_down.w2_ELJ"]], [w["experts_down.w2_scale_ELG"]]
        ops.grouped(b["h"], down_codes, down_scales, b["parts"], self.lists, b["weights"], k, False, True)
        ops.combine(b["parts"], b["latent"], k)
        gate_up = linear(x, w["shared_up.gate_up_ID"])
        ops.situ(gate_up, b["sh"], c.situ_beta, c.situ_linear_beta)
        shared = linear(b["sh"], w["shared_down.down_DI"])
        ops.rms_norm(b["latent"], w["latent_reduce.norm_L"], b["normed"], c.rms_norm_eps)
        rows = linear(b["normed"], w["moe_tail.latent_up_DL"])
        shared[:, : rows.shape[1]] += rows
        return shared

    def experts_read(self) -> int:
        """Distinct experts of the last pass."""
        return int(self.b["ids"].unique().numel())

    def issue(self, prefix: Any = None) -> torch.Tensor:
        return self.moe(self.attention(self.delta if prefix is None else prefix))


def adopt_routing(stock: StockLayer, ids: torch.Tensor) -> None:
    """Make the layer choose the experts `ids` [rows, k]: their logits are far above all others, whatever the bias."""
    stock.logits.fill_(-20.0).scatter_(1, ids.long(), torch.rand(ids.shape, device=ids.device) + 8.0)


def state_for(config: ModelConfig, tp: int, rows: int, q: int = 1) -> Tensors:
    """Conv window, recurrent states (a slot a token), slots and accepted counts of `rows` / `q` requests on one rank."""
    s = Shard(config=config, tp=tp)
    slots = torch.arange(1, rows + 1, device="cuda", dtype=torch.int32)
    return {
        "conv": torch.randn(rows + 1, q + 2, 3 * s.kda_dim, device="cuda").to(torch.bfloat16),
        "recurrent": torch.randn(rows + 1, s.kda_heads, config.kda_head_dim, config.kda_head_dim, device="cuda") * 0.3,
        "slots": slots if q == 1 else slots.view(-1, q),
        "accepted": torch.randint(1, q + 1, (rows // q,), device="cuda", dtype=torch.int32),
    }
