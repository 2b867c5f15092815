"""Launch parameters of attn_res."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import PDL, ROWS, KernelSpec, health, no_scalars, operand, other
from kimi_k3_decode.ops.attn_res.kernel import AttnRes
from kimi_k3_decode.ops.contract import Contract


def spec(config: ModelConfig, contract: Contract) -> KernelSpec:
    p = contract.parameters
    mode = {"has_delta": p["delta"] == "mailbox", "restart": p["restart"], "writes_block": p["writes_block"], "final": p["final"]}
    kernel = AttnRes(config.hidden_size, p["tp"], p["n_blocks"], **mode, eps=config.rms_norm_eps)
    named = "-".join(name for name, on in mode.items() if on)
    return KernelSpec(
        op="attn_res",
        variant=f"d{config.hidden_size}-tp{p['tp']}-n{p['n_blocks']}-{named or 'plain'}",
        make=lambda: kernel,
        params=(
            operand(contract, "prefix_TD"),
            operand(contract, "delta_RTD"),
            other(contract, "delta_RTD"),
            *(operand(contract, name) for name in ("blocks_NTD", "res_score_D", "norm_D", "block_out_TD", "prefix_out_TD", "x_TD")),
            health(),
            ROWS,
            PDL,
        ),
        scalars=no_scalars,
    )
