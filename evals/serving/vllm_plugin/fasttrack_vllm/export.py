"""A checkpoint of `kimi_k3_decode` as a folder that vLLM loads through this plug-in: `python -m fasttrack_vllm.export CHECKPOINT FOLDER`.

vLLM has a Kimi K3 of its own for GPUs, which takes the model type `kimi_k3`; this folder has another type, so that the two never mix. Its
config.json is flat, and the folder stays a checkpoint that `kimi_k3_decode` reads.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from fasttrack_vllm.register import ARCHITECTURE, MODEL_TYPE


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """The model's keys at the top, under this plug-in's type."""
    outer = {key: value for key, value in config.items() if key not in ("text_config", "draft_config")}
    made = outer | config.get("text_config", {})
    if "draft_config" in config:
        made["draft_config"] = config["draft_config"]
    return made | {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], "torch_dtype": "bfloat16"}


def export(checkpoint: Path, folder: Path) -> None:
    """Write the folder; config.json comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copyfile(checkpoint / name, folder / name)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1))
    (folder / "config.json").write_text(json.dumps(flat(json.loads((checkpoint / "config.json").read_text())), indent=1))


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
