"""Tells vLLM about the model class (entry point `vllm.general_plugins`); runs in every process of a server, and loads nothing heavy."""

from __future__ import annotations

MODEL_TYPE, ARCHITECTURE = "fasttrack_k3", "FasttrackK3ForCausalLM"


def register() -> None:
    """Register the configuration and the class by name; a second call changes nothing."""
    from transformers import AutoConfig, PretrainedConfig
    from vllm import ModelRegistry

    class FasttrackK3Config(PretrainedConfig):
        """The keys of the checkpoint's flat config.json, as they are."""

        model_type = MODEL_TYPE

    AutoConfig.register(MODEL_TYPE, FasttrackK3Config, exist_ok=True)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"fasttrack_vllm.model:{ARCHITECTURE}")
