"""Contracts: shapes from Shard only, all violations at once, roles decide reads and writes, digests identify."""

from __future__ import annotations

import pytest
import torch

from kimi_k3_decode.config import K3, NANO, ModelConfig, Shard
from kimi_k3_decode.ops.contract import Access, Axis, Contract, ContractError, Operand, Role
from kimi_k3_decode.ops.in_proj.contract import contract as in_proj
from kimi_k3_decode.ops.operands import given, output, state
from kimi_k3_decode.ops.registry import CONTRACTS, ORACLES

EXTRA = {
    "attn_res": {"n_blocks": 2, "writer": "o_proj"},
    "in_proj": {"attention": "kda"},
    "o_proj": {"attention": "mla"},
    "sample": {"top_k": 4},
}


def make(op: str, config: ModelConfig, tp: int, rows: int = 8) -> Contract:
    return CONTRACTS[op](Shard(config=config, tp=tp), rows=rows, **EXTRA.get(op, {}))


def tensors_for(contract: Contract, dynamic: int = 3) -> dict[str, torch.Tensor]:
    return {o.name: torch.zeros([dynamic if n is None else n for n in o.shape], dtype=getattr(torch, o.dtype)) for o in contract.operands}


def test_every_contract_has_an_oracle():
    assert CONTRACTS.keys() == ORACLES.keys()


@pytest.mark.parametrize("op", CONTRACTS)
def test_nano_contract_accepts_exact_tensors_and_rejects_each_single_fault(op):
    contract = make(op, NANO, 2)
    tensors = tensors_for(contract)
    contract.validate(tensors)
    for operand in contract.operands:
        wrong = dict(tensors)
        wrong[operand.name] = torch.zeros([*tensors[operand.name].shape, 2], dtype=tensors[operand.name].dtype)
        with pytest.raises(ContractError) as error:
            contract.validate(wrong)
        assert error.value.reasons[0].startswith(f"{operand.name}.shape")
        with pytest.raises(ContractError, match="needs a tensor"):
            contract.validate({name: tensor for name, tensor in tensors.items() if name != operand.name})


def test_published_shard_sizes():
    """The per-rank sizes that the model notes list for TP8 and TP16."""
    for tp, rows, columns, router, latent, expert in ((8, 6288, 1536, 112, 448, 384), (16, 3216, 768, 56, 224, 192)):
        assert make("in_proj", K3, tp)["weight_PD"].shape == (rows, 7168)
        assert CONTRACTS["o_proj"](Shard(config=K3, tp=tp), rows=1, attention="kda")["weight_DC"].shape == (7168, columns)
        assert make("moe_front", K3, tp)["router_ED"].shape == (router, 7168)
        assert make("moe_front", K3, tp)["latent_down_LD"].shape == (latent, 7168)
        assert make("experts_up", K3, tp)["w1_EIJ"].shape == (896, expert, 3584 // 2)
        assert make("experts_down", K3, tp)["w2_scale_ELG"].shape == (896, 3584, expert // 32)
        assert make("mla_query", K3, tp)["q_b_PC"].shape == (96 // tp * 192, 1536)
        assert make("moe_tail", K3, tp)["latent_up_DL"].shape == (7168 // tp, 3584)


def test_all_violations_are_listed_at_once():
    contract = in_proj(Shard(config=NANO), rows=4, attention="kda")
    good = tensors_for(contract)
    shared = torch.zeros(4 * contract["proj_TP"].shape[1], dtype=torch.bfloat16)
    bad = {
        "x_TD": good["x_TD"].float(),
        "weight_PD": good["weight_PD"].T.contiguous().T,
        "proj_TP": shared[1:].new_zeros(0),
        "stray": torch.zeros(1),
    }
    with pytest.raises(ContractError) as error:
        contract.validate(bad)
    text = "\n".join(error.value.reasons)
    for part in ("x_TD.dtype", "weight_PD.stride", "proj_TP.shape", "stray"):
        assert part in text
    assert len(error.value.reasons) == 4


def test_misaligned_and_overlapping_operands_are_refused():
    contract = in_proj(Shard(config=NANO), rows=1, attention="mla")
    columns, hidden = contract["proj_TP"].shape[1], NANO.hidden_size
    store = torch.zeros(hidden + columns + 64, dtype=torch.bfloat16)
    tensors = {
        "x_TD": store[:hidden].view(1, hidden),
        "weight_PD": torch.zeros(columns, hidden, dtype=torch.bfloat16),
        "proj_TP": store[hidden - 7 : hidden - 7 + columns].view(1, columns),
    }
    with pytest.raises(ContractError) as error:
        contract.validate(tensors)
    text = "\n".join(error.value.reasons)
    assert "proj_TP.address" in text
    assert "overlapping" in text


def test_roles_decide_reads_writes_and_early_reads():
    kda = CONTRACTS["kda"](Shard(config=NANO), rows=8, q=4)
    assert set(kda.writes) == {"conv_SW3C", "state_SHVK", "out_TC"}
    assert "out_TC" not in kda.reads
    assert {o.name for o in kda.operands if o.readable_before_wait} == {o.name for o in kda.of_role(Role.WEIGHT)}
    assert make("o_proj", NANO, 1)["delta_RTD"].access is Access.WRITE
    consumer = make("attn_res", NANO, 2)["delta_RTD"]
    assert consumer.access is Access.READ_WRITE
    assert consumer.mailbox is not None
    assert "o_proj" in consumer.mailbox.writer
    assert CONTRACTS["mla_decode"](Shard(config=NANO), rows=1)["pages_STM"].access is Access.READ


def test_operand_rules_are_checked_together():
    with pytest.raises(ContractError) as error:
        Operand(name="m", role=Role.MAILBOX, dtype="float31", axes=(Axis(letter="T", meaning="rows", size=0),))
    assert len(error.value.reasons) == 4
    with pytest.raises(ContractError, match="more than once"):
        Contract(op="twice", operands=(given("a", T=1), output("a", T=1)))
    with pytest.raises(ContractError, match="needs one of"):
        make("kda", NANO, 1)["nothing"]


def test_digest_depends_on_every_field_and_not_on_identity():
    base = in_proj(Shard(config=NANO), rows=4, attention="kda")
    assert base.digest() == in_proj(Shard(config=NANO), rows=4, attention="kda").digest()
    others = {
        in_proj(Shard(config=NANO), rows=5, attention="kda").digest(),
        in_proj(Shard(config=NANO), rows=4, attention="mla").digest(),
        in_proj(Shard(config=NANO, tp=2), rows=4, attention="kda").digest(),
        in_proj(Shard(config=NANO), rows=4, attention="kda", workspace_splits=2).digest(),
        base.with_valid_rows(3).digest(),
        base.digest(),
    }
    assert len(others) == 6


def test_valid_rows_mark_row_operands_only():
    contract = in_proj(Shard(config=NANO), rows=8, attention="kda").with_valid_rows(5)
    assert contract["x_TD"].valid_rows == 5
    assert contract["weight_PD"].valid_rows is None
    with pytest.raises(ContractError, match=r"1\.\.8"):
        contract.with_valid_rows(9)


def test_strided_state_views_pass_and_transposed_ones_do_not():
    operand = state("state_SHVK", "float32", S=None, H=1, V=4, K=4)
    whole = torch.zeros(3, 2, 4, 4)
    assert operand.violations(whole[:, 1:]) == []
    assert any("stride" in reason for reason in operand.violations(whole[:, 1:].transpose(2, 3)))


def test_rows_must_be_whole_requests():
    with pytest.raises(ContractError, match="multiple of q=3"):
        CONTRACTS["kda"](Shard(config=NANO), rows=8, q=3)
    with pytest.raises(ContractError) as error:
        CONTRACTS["attn_res"](Shard(config=NANO), rows=1, n_blocks=1, delta="some", restart=True, writes_block=True)
    assert len(error.value.reasons) == 2


def test_sizes_are_known_or_named():
    kda = CONTRACTS["kda"](Shard(config=NANO), rows=8, q=4)
    assert kda["out_TC"].sizes == (8, NANO.kda_dim)
    with pytest.raises(ContractError, match=r"unknown axes \['S', 'W'\]"):
        _ = kda["conv_SW3C"].sizes
