"""Broken checkpoints: one clear error, exit code 3, and no run folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from validation.core.settings import PROJECT_ROOT

NANO = PROJECT_ROOT / "kimi_k3_decode" / "checkpoints" / "nano"


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _header_only(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:40])


def _huge_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + path.read_bytes()[8:])


def _remove(folder):
    (folder / "model.safetensors").unlink()


def _folder_for_a_file(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def _edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def _nan_weight(folder):
    def edit(tensors):
        name = next(name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16)
        tensors[name].view(-1)[3] = torch.nan

    _edit_tensors(folder, edit)


def _lost_tensor(folder):
    _edit_tensors(folder, lambda tensors: tensors.pop(sorted(tensors)[5]))


def _edit_config(folder, edit):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def _unknown_key(folder):
    _edit_config(folder, lambda config: config.get("text_config", config).update(surprising_key=1))


def _no_json(folder):
    (folder / "config.json").write_text("{")


FAULTS = {
    "truncated": (_truncate, "model.safetensors"),
    "header only": (_header_only, "model.safetensors"),
    "huge header": (_huge_header, "model.safetensors"),
    "no file": (_remove, "safetensors"),
    "a folder for a file": (_folder_for_a_file, "safetensors"),
    "NaN weight": (_nan_weight, "NaN"),
    "lost tensor": (_lost_tensor, "missing"),
    "unknown config key": (_unknown_key, "surprising_key"),
    "config is no JSON": (_no_json, "config.json"),
    "no folder": (shutil.rmtree, "checkpoint"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_checkpoint_is_one_error_and_no_run(tmp_path, name):
    fault, words = FAULTS[name]
    folder, runs = tmp_path / "checkpoint", tmp_path / "runs"
    shutil.copytree(NANO, folder, copy_function=_writable_copy)
    fault(folder)
    command = [sys.executable, "-m", "validation", "run", "--lanes", "numerics", "--quiet"]
    command += ["--checkpoint", str(folder), "--runs-dir", str(runs)]
    done = subprocess.run(command, cwd=PROJECT_ROOT, env=dict(os.environ), capture_output=True, text=True, check=False, timeout=120)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 3, done.stderr
    assert answer["verdict"] == "error"
    assert words.lower() in answer["error"].lower()
    assert len(done.stderr.strip().splitlines()) == 1
    assert not runs.exists()


def _writable_copy(source, target):
    shutil.copyfile(source, target)
