"""Read and write a Hugging Face style folder: config.json and model.safetensors, or an index and its shards.

A folder is accepted whole or refused whole: every missing, extra, mis-shaped, wrongly typed or non-finite tensor is named in one error.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kimi_k3_decode.config import ModelConfig, Unsupported
from kimi_k3_decode.config_io import read_config, write_config
from kimi_k3_decode.mxfp4 import SCALE_NAN
from kimi_k3_decode.names import TensorSpec, from_tensors, tensor_specs, to_tensors
from kimi_k3_decode.weights import ModelWeights

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class CheckpointError(Unsupported):
    """A checkpoint folder that cannot be used; `reasons` names everything wrong with it."""


def load_checkpoint(folder: str | Path, *, strict_config: bool = True) -> ModelWeights:
    """Read and check a checkpoint folder. Raises CheckpointError (tensors, files) or Unsupported (config.json), each with all reasons."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder}", ("folder: is not a folder; give the one that holds config.json",))
    config = read_config(folder / CONFIG_FILE, strict=strict_config)
    reasons: list[str] = []
    tensors = _read_index(folder, reasons) if (folder / INDEX_FILE).exists() else _read_file(folder / SINGLE_FILE, reasons)
    if not reasons:
        reasons += check_tensors(config, tensors)
    if reasons:
        raise CheckpointError(f"checkpoint {folder}", tuple(reasons))
    return from_tensors(config, tensors)


def save_checkpoint(weights: ModelWeights, folder: str | Path) -> None:
    """Write config.json and model.safetensors, each to a temporary name first. Raises OSError when the disk refuses."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(weights.config, folder / CONFIG_FILE)
    temporary = folder / f".{SINGLE_FILE}.{os.getpid()}.tmp"
    try:
        save_file(to_tensors(weights), temporary, metadata={"format": "pt"})
        temporary.replace(folder / SINGLE_FILE)
    except SafetensorError as error:
        raise OSError(f"{folder / SINGLE_FILE}: could not be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def save_sharded(weights: ModelWeights, folder: str | Path, n_files: int) -> None:
    """Write the same checkpoint as an index and `n_files` shards of about equal bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(weights.config, folder / CONFIG_FILE)
    table = to_tensors(weights)
    total = sum(tensor.nbytes for tensor in table.values())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(n_files)]
    done = 0
    for name, tensor in table.items():
        parts[min(done * n_files // max(total, 1), n_files - 1)][name] = tensor
        done += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{n_files:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    temporary = folder / f".{INDEX_FILE}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n")
    temporary.replace(folder / INDEX_FILE)


def check_tensors(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Every reason why `tensors` is not a checkpoint of `config`, by name; empty when it is."""
    specs = tensor_specs(config)
    reasons = [f"{name}: missing, needs {_describe(spec)}" for name, spec in specs.items() if name not in tensors]
    reasons += [f"{name}: not a tensor of this model" for name in tensors if name not in specs]
    for name, tensor in tensors.items():
        if name in specs:
            reasons += _faults(name, tensor, specs[name])
    return reasons


def _describe(spec: TensorSpec) -> str:
    shapes = " or ".join(str(list(shape)) for shape in spec.shapes)
    return f"{str(spec.dtype).removeprefix('torch.')} {shapes}"


def _faults(name: str, tensor: torch.Tensor, spec: TensorSpec) -> list[str]:
    found = []
    if tuple(tensor.shape) not in spec.shapes or tensor.dtype != spec.dtype:
        found.append(f"{name}: got {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, needs {_describe(spec)}")
    if tensor.is_floating_point():
        bad = int((~torch.isfinite(tensor)).sum())
    else:
        bad = int((tensor == SCALE_NAN).sum()) if name.endswith("weight_scale") else 0
    if bad:
        found.append(f"{name}: {bad} of {tensor.numel()} values are NaN or infinite")
    return found


def _read_file(path: Path, reasons: list[str]) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        reasons.append(f"{path.name}: cannot be read ({error}); it is missing, truncated or not safetensors")
        return {}


def _read_index(folder: Path, reasons: list[str]) -> dict[str, torch.Tensor]:
    try:
        weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reasons.append(f"{INDEX_FILE}: cannot be read ({type(error).__name__}: {error}); needs an object with weight_map")
        return {}
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        if Path(file).name != file:
            reasons.append(f"{INDEX_FILE}: got shard {file!r}, needs a plain file name in the folder")
            continue
        shard = _read_file(folder / file, reasons)
        reasons += [f"{name}: in {file} but the index says {weight_map.get(name)}" for name in shard if weight_map.get(name) != file]
        tensors |= shard
    if not reasons:
        reasons += [f"{name}: the index names it in {file}, which lacks it" for name, file in weight_map.items() if name not in tensors]
    return tensors
