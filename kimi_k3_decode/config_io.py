"""Hugging Face style config.json <-> ModelConfig. Nothing that changes the mathematics has a default: several of these keys default to
*off* in readers, and an absent `gate_lower_bound` would silently mean another gate.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kimi_k3_decode.config import DraftConfig, ModelConfig, Unsupported

# key -> (ModelConfig field, type). All are required.
TEXT_KEYS: dict[str, tuple[str, type]] = {
    "num_hidden_layers": ("n_layers", int),
    "hidden_size": ("hidden_size", int),
    "vocab_size": ("vocab_size", int),
    "rms_norm_eps": ("rms_norm_eps", float),
    "bos_token_id": ("bos_token_id", int),
    "eos_token_id": ("eos_token_id", int),
    "pad_token_id": ("pad_token_id", int),
    "max_position_embeddings": ("max_position_embeddings", int),
    "num_attention_heads": ("mla_heads", int),
    "q_lora_rank": ("q_lora_rank", int),
    "kv_lora_rank": ("kv_lora_rank", int),
    "qk_nope_head_dim": ("qk_nope_head_dim", int),
    "qk_rope_head_dim": ("qk_rope_head_dim", int),
    "v_head_dim": ("v_head_dim", int),
    "first_k_dense_replace": ("n_dense_layers", int),
    "intermediate_size": ("dense_intermediate_size", int),
    "num_experts": ("n_experts", int),
    "num_experts_per_token": ("n_experts_per_token", int),
    "num_shared_experts": ("n_shared_experts", int),
    "moe_intermediate_size": ("moe_intermediate_size", int),
    "routed_expert_hidden_size": ("moe_latent_size", int),
    "routed_scaling_factor": ("routed_scaling_factor", float),
    "activation_situ_beta": ("situ_beta", float),
    "activation_situ_linear_beta": ("situ_linear_beta", float),
    "attn_res_block_size": ("attn_res_block_size", int),
}
LINEAR_KEYS: dict[str, tuple[str, type]] = {
    "head_dim": ("kda_head_dim", int),
    "num_heads": ("kda_heads", int),
    "short_conv_kernel_size": ("conv_width", int),
    "gate_lower_bound": ("gate_lower_bound", float),
}
# Switches that must stand there with this value: the implementation has no other form. All are required.
TEXT_SWITCHES: dict[str, Any] = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_renormalize": True,
}
LINEAR_SWITCHES: dict[str, Any] = {"use_full_rank_gate": True}
# May stand there, and then must have this value.
OPTIONAL_SWITCHES: dict[str, Any] = {
    "tie_word_embeddings": False,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
}
# May stand there and say nothing about the mathematics this package computes.
# fmt: off
INERT_KEYS = frozenset((
    "architectures", "auto_map", "draft_config", "dtype", "initializer_range", "model_type", "name", "num_key_value_heads",
    "quantization_config", "text_config", "torch_dtype", "transformers_version", "use_cache", "use_grouped_topk",
))
OUTER_KEYS = frozenset((*INERT_KEYS, "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"))
# fmt: on
LISTS = {"kda_layers": "kda_layers", "full_attn_layers": "mla_layers"}


class _Reader:
    """Takes keys out of one mapping and remembers everything that is wrong."""

    def __init__(self, mapping: Mapping[str, Any], where: str, reasons: list[str]) -> None:
        self.mapping, self.where, self.reasons = mapping, where, reasons

    def number(self, key: str, kind: type) -> Any:
        value = self.mapping.get(key)
        if key not in self.mapping:
            self.reasons.append(f"{self.where}{key}: missing, needs {'an integer' if kind is int else 'a number'}; there is no default")
        elif isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)) or not math.isfinite(value):
            self.reasons.append(f"{self.where}{key}: got {value!r}, needs {'an integer' if kind is int else 'a number'}")
        else:
            return kind(value)
        return None

    def layers(self, key: str) -> tuple[int, ...] | None:
        """A 1-based list, returned 0-based."""
        value = self.mapping.get(key)
        if key not in self.mapping:
            self.reasons.append(f"{self.where}{key}: missing, needs a list of 1-based layer numbers")
        elif not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) or i < 1 for i in value):
            self.reasons.append(f"{self.where}{key}: got {value!r}, needs a list of 1-based layer numbers")
        else:
            return tuple(i - 1 for i in value)
        return None

    def switches(self, wanted: Mapping[str, Any], *, required: bool) -> None:
        for key, value in wanted.items():
            if key not in self.mapping:
                if required:
                    self.reasons.append(f"{self.where}{key}: missing, needs {json.dumps(value)}; there is no default")
            elif self.mapping[key] != value or type(self.mapping[key]) is not type(value):
                self.reasons.append(f"{self.where}{key}: got {json.dumps(self.mapping[key])}, needs {json.dumps(value)}")

    def unknown(self, known: set[str]) -> None:
        self.reasons.extend(f"{self.where}{key}: unknown key" for key in self.mapping if key not in known)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise Unsupported(f"config {path}", (f"cannot be read ({error.strerror or error})",)) from error
    except (ValueError, RecursionError) as error:
        raise Unsupported(f"config {path}", (f"is not JSON ({error})",)) from error
    if not isinstance(document, dict):
        raise Unsupported(f"config {path}", (f"got a {type(document).__name__}, needs an object",))
    return document


def _object(mapping: Mapping[str, Any], key: str, reasons: list[str]) -> Mapping[str, Any] | None:
    value = mapping.get(key)
    if isinstance(value, dict):
        return value
    if key in mapping:
        reasons.append(f"{key}: got {type(value).__name__}, needs an object")
    return None


def _read_draft(document: Mapping[str, Any], reasons: list[str], strict: bool) -> DraftConfig | None:
    mapping = _object(document, "draft_config", reasons)
    if mapping is None:
        return None
    reader = _Reader(mapping, "draft_config.", reasons)
    values: dict[str, Any] = {}
    for field in fields(DraftConfig):
        if field.name == "target_layer_ids":
            ids = mapping.get("target_layer_ids")
            if isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
                values[field.name] = tuple(ids)  # 0-based, as published
            else:
                reasons.append(f"draft_config.target_layer_ids: got {ids!r}, needs a list of 0-based layer numbers")
        else:
            values[field.name] = reader.number(field.name, float if field.name == "rope_theta" else int)
    if strict:
        reader.unknown({field.name for field in fields(DraftConfig)})
    return None if None in values.values() or "target_layer_ids" not in values else DraftConfig(**values)


def parse_config(document: Mapping[str, Any], what: str = "config", *, strict: bool = True) -> ModelConfig:
    """ModelConfig of a parsed config.json, `text_config` nested or flat.

    Raises Unsupported naming every missing, mistyped or unsupported key, and, when `strict`, every unknown one.
    """
    reasons: list[str] = []
    nested = _object(document, "text_config", reasons)
    text = document if nested is None else nested
    reader = _Reader(text, "" if nested is None else "text_config.", reasons)
    values = {field: reader.number(key, kind) for key, (field, kind) in TEXT_KEYS.items()}
    reader.switches(TEXT_SWITCHES, required=True)
    reader.switches(OPTIONAL_SWITCHES, required=False)
    known = {*TEXT_KEYS, *TEXT_SWITCHES, *OPTIONAL_SWITCHES, *INERT_KEYS, "linear_attn_config"}
    linear = _Reader(_object(text, "linear_attn_config", reasons) or {}, f"{reader.where}linear_attn_config.", reasons)
    values |= {field: linear.number(key, kind) for key, (field, kind) in LINEAR_KEYS.items()}
    values |= {field: linear.layers(key) for key, field in LISTS.items()}
    linear.switches(LINEAR_SWITCHES, required=True)
    draft = _read_draft(document, reasons, strict)
    if strict:
        reader.unknown(known)
        linear.unknown({*LINEAR_KEYS, *LISTS, *LINEAR_SWITCHES})
        if nested is not None:  # beside a nested text_config the outer object holds no model keys
            _Reader(document, "", reasons).unknown(set(OUTER_KEYS))
    if not reasons:
        config = ModelConfig(name=str(document.get("name", document.get("model_type", "kimi-k3"))), draft=draft, **values)
        reasons += config.unsupported()
    if reasons:
        raise Unsupported(what, tuple(reasons))
    return config


def read_config(path: str | Path, *, strict: bool = True) -> ModelConfig:
    """Read config.json (a file, or the folder that holds it). Raises Unsupported with every reason; see `parse_config`."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    return parse_config(_read_json(path), f"config {path}", strict=strict)


def config_document(config: ModelConfig, *, nested: bool = True) -> dict[str, Any]:
    """The config.json content of `config`: lists 1-based, every switch spelled out."""
    text: dict[str, Any] = {key: getattr(config, field) for key, (field, _) in TEXT_KEYS.items()}
    text |= TEXT_SWITCHES | OPTIONAL_SWITCHES
    text["linear_attn_config"] = (
        {key: getattr(config, field) for key, (field, _) in LINEAR_KEYS.items()}
        | LINEAR_SWITCHES
        | {key: [layer + 1 for layer in getattr(config, field)] for key, field in LISTS.items()}
    )
    outer: dict[str, Any] = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "name": config.name}
    if config.draft is not None:
        outer["draft_config"] = asdict(config.draft) | {"target_layer_ids": list(config.draft.target_layer_ids)}
    return outer | {"text_config": text} if nested else outer | text


def write_config(config: ModelConfig, path: str | Path, *, nested: bool = True) -> None:
    """Write config.json through a temporary file. Raises OSError when the disk refuses."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(config_document(config, nested=nested), indent=2) + "\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
