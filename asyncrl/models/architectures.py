"""The model architectures that the trainer can build, told from an HF config without torch."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import ConfigError

# TransformerConfig arguments that differ between them
ARCHITECTURES: dict[str, dict[str, bool]] = {
    "LlamaForCausalLM": {"qk_layernorm": False},
    "Qwen3ForCausalLM": {"qk_layernorm": True},
}


def check_architecture(hf: dict[str, Any]) -> None:
    """Refuse what trainer/model.py and weights/names.py do not cover; `hf` is the model folder's config.json."""
    name = (hf.get("architectures") or ["none named"])[0]
    if name not in ARCHITECTURES:
        raise ConfigError("model.path", name, f"Supported architectures: {sorted(ARCHITECTURES)}.")
    for unsupported in ("attention_bias", "mlp_bias"):
        if hf.get(unsupported):
            raise ConfigError("model.path", f"{unsupported}=true", "Models with biases are not supported yet.")
    if rope(hf).get("rope_type", "default") != "default":
        raise ConfigError("model.path", rope(hf), "Only plain rotary embeddings are supported yet.")


def rope(hf: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling."""
    return hf.get("rope_parameters") or {"rope_theta": hf.get("rope_theta", 10000.0), **(hf.get("rope_scaling") or {})}
