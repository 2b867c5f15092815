"""SmolLM2-135M-Instruct from a Q4_1 GGUF file to a Hugging Face folder that vLLM serves.

Usage: python convert_smollm2.py FILE.gguf FOLDER, with gguf, numpy, safetensors and tokenizers installed. Model: HuggingFaceTB, Apache-2.0.
The weights are the dequantised ones, stored in FP32: a BF16 server rounds them, an FP32 server does not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKEN = 3  # token type of special tokens in GGUF
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in TOP:
        return TOP[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER[part]}.{kind}"


def halves_first(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the rotary pairs of a head next to each other; Hugging Face keeps the first halves together, then the second ones."""
    size = rows.shape[0] // heads
    return rows.reshape(heads, size // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def tensors(reader: gguf.GGUFReader, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    """All weights, dequantised, float32."""
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    made = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        made[hf_name(tensor.name)] = np.ascontiguousarray(halves_first(values, heads[part]) if part in heads else values)
    return made


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE with single digits, as the model was trained with."""
    words, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    made.decoder = decoders.ByteLevel()
    special = [word for word, kind in zip(words, types, strict=True) if kind == CONTROL_TOKEN]
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    return made


def config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def convert(source: Path, folder: Path) -> None:
    """Write the folder. config.json comes last: with it the folder is complete."""
    reader = gguf.GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise SystemExit(f"gguf: got architecture {fields['general.architecture']!r}, needs llama")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(reader, fields), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(fields).save(str(folder / "tokenizer.json"))
    words = fields["tokenizer.ggml.tokens"]
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": words[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": words[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": words[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": fields["tokenizer.ggml.eos_token_id"]}))
    (folder / "config.json").write_text(json.dumps(config(fields), indent=1))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
