"""Checkpoints and config.json: what is written is read back bit for bit; everything wrong is named in one error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_k3_decode.checkpoint import INDEX_FILE, SINGLE_FILE, CheckpointError, load_checkpoint, save_checkpoint, save_sharded
from kimi_k3_decode.config import K3, NANO, Unsupported
from kimi_k3_decode.config_io import config_document, parse_config, read_config, write_config
from kimi_k3_decode.names import tensor_specs
from kimi_k3_decode.weights import load_checkpoint as load_through_weights
from kimi_k3_decode.weights import random_weights

sys.path.insert(0, str(Path(__file__).parent))
from models import TINY

P = "language_model.model."


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(random_weights(TINY, 3), tmp_path)
    return tmp_path


def damage(folder: Path, change) -> None:
    table = load_file(folder / SINGLE_FILE)
    change(table)
    save_file(table, folder / SINGLE_FILE)


def test_a_checkpoint_survives_writing_and_reading(folder, tmp_path_factory):
    weights = random_weights(TINY, 3)
    assert load_checkpoint(folder).digest() == weights.digest()
    assert load_through_weights(folder).digest() == weights.digest()
    assert random_weights(TINY, 4).digest() != weights.digest()
    sharded = tmp_path_factory.mktemp("sharded")
    save_sharded(weights, sharded, 3)
    assert len(list(sharded.glob("model-*.safetensors"))) == 3
    assert load_checkpoint(sharded).digest() == weights.digest()
    assert not list(folder.glob(".*tmp"))


def test_published_layout_of_the_names_and_dtypes(folder):
    table = load_file(folder / SINGLE_FILE)
    assert table[f"{P}layers.0.self_attn.q_conv1d.weight"].shape == (64, 1, 4)
    assert table[f"{P}layers.0.self_attn.A_log"].dtype == torch.float32
    assert table[f"{P}layers.1.block_sparse_moe.gate.e_score_correction_bias"].dtype == torch.float32
    assert table[f"{P}layers.1.mlp_res_proj.weight"].shape == (1, 64)
    assert table[f"{P}layers.1.block_sparse_moe.experts.5.w2.weight_packed"].dtype == torch.uint8
    assert table["language_model.lm_head.weight"].dtype == torch.bfloat16
    assert "draft.markov_head.w1.weight" in table


def test_a_log_and_conv_are_read_in_both_published_forms(folder):
    wanted = load_checkpoint(folder).digest()

    def change(table):
        for layer in TINY.kda_layers:
            name = f"{P}layers.{layer}.self_attn."
            table[f"{name}A_log"] = table[f"{name}A_log"].view(1, 1, -1, 1)
            table[f"{name}k_conv1d.weight"] = table[f"{name}k_conv1d.weight"].squeeze(1).contiguous()

    damage(folder, change)
    assert load_checkpoint(folder).digest() == wanted


def test_every_fault_is_named_in_one_error(folder):
    def change(table):
        del table[f"{P}layers.3.self_attn.q_a_proj.weight"]
        table["extra.weight"] = torch.zeros(2)
        table[f"{P}norm.weight"] = table[f"{P}norm.weight"][:-1].clone()
        table[f"{P}layers.0.self_attn.dt_bias"] = table[f"{P}layers.0.self_attn.dt_bias"].bfloat16()
        table[f"{P}embed_tokens.weight"][1, 2] = torch.nan
        table[f"{P}layers.2.block_sparse_moe.experts.0.w1.weight_scale"][0, 0] = 255

    damage(folder, change)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder)
    reasons = caught.value.reasons
    assert len(reasons) == 6
    for part in ("q_a_proj.weight: missing", "extra.weight: not a tensor", "norm.weight: got bfloat16 [63], needs bfloat16 [64]",
                 "dt_bias: got bfloat16", "embed_tokens.weight: 1 of", "weight_scale: 1 of"):  # fmt: skip
        assert any(part in reason for reason in reasons), part


@pytest.mark.parametrize("cut", [0, 5, 200, -100])
def test_a_truncated_file_is_one_clear_error(folder, cut):
    path = folder / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load_checkpoint(folder)


def test_a_missing_folder_file_or_shard_is_named(folder, tmp_path_factory):
    with pytest.raises(CheckpointError, match="is not a folder"):
        load_checkpoint(folder / "absent")
    sharded = tmp_path_factory.mktemp("sharded")
    save_sharded(random_weights(TINY, 3), sharded, 2)
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002"):
        load_checkpoint(sharded)
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"] = {name: "../elsewhere.safetensors" for name in index["weight_map"]}
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="needs a plain file name"):
        load_checkpoint(sharded)
    (folder / "config.json").write_text("{")
    with pytest.raises(Unsupported, match="is not JSON"):
        load_checkpoint(folder)


def test_a_tensor_the_index_puts_elsewhere_is_named(tmp_path):
    save_sharded(random_weights(TINY, 3), tmp_path, 2)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["draft.norm.weight"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"draft\.norm\.weight: in model-00002"):
        load_checkpoint(tmp_path)


def test_a_shard_is_not_saved_and_not_sharded_again(tmp_path):
    rank = random_weights(TINY, 0).shard(2, 0)
    with pytest.raises(ValueError, match="needs the whole model"):
        save_checkpoint(rank, tmp_path)
    with pytest.raises(Unsupported, match="shard the original"):
        rank.shard(2, 0)


def test_k3_has_the_published_number_of_parameters():
    specs = tensor_specs(K3)
    total = 0
    for name, spec in specs.items():
        if not name.startswith("draft.") and not name.endswith("weight_scale"):
            total += torch.Size(spec.shapes[0]).numel() * (2 if name.endswith("weight_packed") else 1)
    assert round(total / 1e12, 2) == 2.78


# ---- config.json ----
@pytest.mark.parametrize("config", [K3, NANO, TINY], ids=lambda c: c.name)
@pytest.mark.parametrize("nested", [True, False])
def test_config_survives_both_forms(config, nested, tmp_path):
    write_config(config, tmp_path / "config.json", nested=nested)
    assert read_config(tmp_path) == config


def test_layer_lists_are_one_based_in_the_file_and_taps_are_not():
    document = config_document(K3)
    linear = document["text_config"]["linear_attn_config"]
    assert linear["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert len(linear["kda_layers"]) == 69
    assert document["draft_config"]["target_layer_ids"] == [2, 23, 47, 71, 89]


def reasons_of(change) -> tuple[str, ...]:
    document = config_document(TINY)
    change(document, document["text_config"], document["text_config"]["linear_attn_config"])
    with pytest.raises(Unsupported) as caught:
        parse_config(document)
    return caught.value.reasons


def test_every_required_key_has_no_default():
    document = config_document(TINY)
    text = document["text_config"]
    optional = {"tie_word_embeddings", "moe_router_activation_func", "num_expert_group", "topk_group", "moe_layer_freq"}
    for key in text:
        if key not in optional and key != "linear_attn_config":
            assert any(f"text_config.{key}: missing" in r for r in reasons_of(lambda d, t, lin, key=key: t.pop(key))), key
    for key in text["linear_attn_config"]:
        found = reasons_of(lambda d, t, lin, key=key: lin.pop(key))
        assert any(f"linear_attn_config.{key}: missing" in r for r in found), key


def test_all_missing_and_unknown_keys_are_listed_together():
    def change(document, text, linear):
        del linear["gate_lower_bound"], text["moe_renormalize"], text["num_experts"]
        text["gate_softplus"], linear["mystery"], document["strange"] = 1, 2, 3
        document["draft_config"]["odd"] = 4

    reasons = " | ".join(reasons_of(change))
    for part in ("gate_lower_bound: missing", "moe_renormalize: missing", "num_experts: missing", "text_config.gate_softplus: unknown key",
                 "linear_attn_config.mystery: unknown key", "strange: unknown key", "draft_config.odd: unknown key"):  # fmt: skip
        assert part in reasons, part


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "silu"), ("mla_use_nope", False), ("mla_use_output_gate", 1), ("tie_word_embeddings", True), ("num_experts", 6.0),
     ("num_experts", True), ("rms_norm_eps", float("nan")), ("topk_group", 4)],
)  # fmt: skip
def test_values_another_model_would_have_are_refused(key, value):
    assert any(f"text_config.{key}: got" in r for r in reasons_of(lambda d, t, lin: t.update({key: value})))


def test_unknown_keys_pass_only_when_not_strict():
    document = config_document(TINY)
    document["text_config"]["new_key"] = 1
    assert parse_config(document, strict=False) == TINY
