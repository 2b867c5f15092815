"""From the trained parameters to the shipped folder, under the published names, and back."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from evals.nano import network
from kimi_k3_decode import mxfp4
from kimi_k3_decode.config import ModelConfig

MODEL_PREFIX = "language_model.model."
HEAD_NAME = "language_model.lm_head.weight"


def checkpoint_tensors(
    params: network.Parameters, biases: torch.Tensor, draft: network.Parameters, config: ModelConfig
) -> dict[str, torch.Tensor]:
    """Published name -> tensor (CPU, contiguous): bf16, float32 where the format says so, MXFP4 codes and scales for experts."""
    ready = {name: value.detach().cpu() for name, value in network.prepare(params, torch.bfloat16).items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in ready.items():
        if name == "lm_head.weight":
            tensors[HEAD_NAME] = value
        elif name in network.EXPERTS:
            tensors |= _packed_experts(name.removeprefix("experts."), value, config)
        else:
            tensors[MODEL_PREFIX + name] = value
    for index, bias in enumerate(biases.detach().float().cpu()):
        layer = index + config.n_dense_layers
        tensors[f"{MODEL_PREFIX}layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"] = bias
    tensors |= {name: value.detach().bfloat16().cpu() for name, value in draft.items()}
    return {name: value.contiguous() for name, value in tensors.items()}


def _packed_experts(kind: str, stacked: torch.Tensor, config: ModelConfig) -> dict[str, torch.Tensor]:
    codes, scales = mxfp4.pack(stacked)
    if not torch.equal(mxfp4.unpack(codes, scales, torch.float32), stacked.float()):
        raise ValueError(f"experts {kind}: got values outside MXFP4, needs exact ones; quantise before packing")
    tensors = {}
    for index in range(stacked.shape[0]):
        for expert in range(config.n_experts):
            name = f"{MODEL_PREFIX}layers.{index + config.n_dense_layers}.block_sparse_moe.experts.{expert}.{kind}"
            tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"] = codes[index, expert], scales[index, expert]
    return tensors


def trained_parameters(
    tensors: dict[str, torch.Tensor], config: ModelConfig
) -> tuple[network.Parameters, torch.Tensor, network.Parameters]:
    """The inverse of `checkpoint_tensors`: float32 parameters, router biases [n_moe, E], and the drafter's float32 parameters.

    The masters come back rounded: what the checkpoint holds is all there is.
    """
    params: network.Parameters = {}
    for name in network.parameter_shapes(config):
        if name in network.EXPERTS:
            params[name] = _unpacked_experts(tensors, name.removeprefix("experts."), config)
        else:
            params[name] = tensors[HEAD_NAME if name == "lm_head.weight" else MODEL_PREFIX + name].float()
    moe_layers = range(config.n_dense_layers, config.n_layers)
    biases = torch.stack([tensors[f"{MODEL_PREFIX}layers.{n}.block_sparse_moe.gate.e_score_correction_bias"] for n in moe_layers])
    return params, biases.float(), {name: value.float() for name, value in tensors.items() if name.startswith("draft.")}


def _unpacked_experts(tensors: dict[str, torch.Tensor], kind: str, config: ModelConfig) -> torch.Tensor:
    layers = []
    for n in range(config.n_dense_layers, config.n_layers):
        names = [f"{MODEL_PREFIX}layers.{n}.block_sparse_moe.experts.{expert}.{kind}" for expert in range(config.n_experts)]
        codes = torch.stack([tensors[f"{name}.weight_packed"] for name in names])
        scales = torch.stack([tensors[f"{name}.weight_scale"] for name in names])
        layers.append(mxfp4.unpack(codes, scales, torch.float32))
    return torch.stack(layers)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> str:
    """Write a safetensors file at once and return its SHA-256."""
    temporary = path.with_suffix(".tmp")
    save_file({name: value.clone() for name, value in sorted(tensors.items())}, str(temporary), metadata={"format": "pt"})
    os.replace(temporary, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def append_json(path: Path, record: dict[str, object]) -> None:
    with path.open("a") as log:
        log.write(json.dumps(record) + "\n")
