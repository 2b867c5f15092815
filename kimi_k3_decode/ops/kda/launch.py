"""Launch parameters of kda."""

from __future__ import annotations

from kimi_k3_decode.config import ModelConfig
from kimi_k3_decode.device.launcher import PDL, KernelSpec, int32, int64, operand
from kimi_k3_decode.ops.contract import Contract
from kimi_k3_decode.ops.kda.kernel import Kda


def spec(config: ModelConfig, contract: Contract) -> KernelSpec:
    q, heads = contract.parameters["q"], contract["a_log_H"].shape[0]
    if config.kda_head_dim != 128 or config.conv_width != 4:
        raise ValueError(f"kda: got head_dim {config.kda_head_dim}, conv_width {config.conv_width}, needs 128 and 4; run stock")
    columns = contract["proj_TP"].shape[1]
    kernel = Kda(heads, columns, q, config.gate_lower_bound)
    names = (
        "proj_TP", "conv_weight_CW", "f_b_CK", "a_log_H", "dt_bias_C", "o_norm_V",
        "slots_BQ", "accepted_B", "conv_SW3C", "state_SHVK", "out_TC",
    )  # fmt: skip

    def scalars(given):
        conv, state = given["tensors"]["conv_SW3C"], given["tensors"]["state_SHVK"]
        return {
            "requests": given["rows"] // q,
            "conv_slot": conv.stride(0),
            "conv_row": conv.stride(1),
            "conv_part": conv.stride(2),
            "state_slot": state.stride(0),
        }

    return KernelSpec(
        op="kda",
        variant=f"h{heads}-p{columns}-q{q}",
        make=lambda: kernel,
        params=(
            *(operand(contract, name) for name in names),
            int32("requests", on_device=False),
            int64("conv_slot"),
            int32("conv_row"),
            int32("conv_part"),
            int64("state_slot"),
            PDL,
        ),
        scalars=scalars,
    )
