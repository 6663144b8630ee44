"""Names and shapes of an HF folder's tensors, computed from its config alone, for planning with a model whose files are
not available. Based on transformers' modeling_llama.py, modeling_qwen3.py and modeling_qwen3_moe.py."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.errors import ConfigError
from asyncrl.models.architectures import HF

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
SEEING = {
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
}
"""The text model of each model that reads images, whose tower is not described here (vision.py counts it)."""
Tensor = tuple[str, tuple[int, ...]]
"""Name and shape; for a matrix, [output features, input features]."""


def tensors(hf: HF) -> Iterator[Tensor]:
    """Yield all tensors in the order of the model. Raises ConfigError for a family that this module does not
    describe."""
    family, hidden, vocab = (
        SEEING.get(hf["architectures"][0], hf["architectures"][0]),
        hf["hidden_size"],
        hf["vocab_size"],
    )
    if family not in FAMILIES:
        raise ConfigError(
            "model.path",
            family,
            f"Shapes can be derived only for {', '.join(FAMILIES)}: choose a folder with weight files.",
        )
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(hf["num_hidden_layers"]):
        for name, shape in (*_attention(hf, family), *_mlp(hf, family)):
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if not hf.get("tie_word_embeddings", False):
        yield "lm_head.weight", (vocab, hidden)


def _attention(hf: HF, family: str) -> Iterator[Tensor]:
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    width = hf.get("head_dim") or hidden // heads
    queries, keys = heads * width, hf.get("num_key_value_heads", heads) * width
    yield "input_layernorm.weight", (hidden,)
    for name, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{name}_proj.weight", (rows, hidden)
        if family == "Qwen2ForCausalLM":
            yield f"self_attn.{name}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if family.startswith("Qwen3"):
        yield "self_attn.q_norm.weight", (width,)
        yield "self_attn.k_norm.weight", (width,)


def _mlp(hf: HF, family: str) -> Iterator[Tensor]:
    hidden = hf["hidden_size"]
    yield "post_attention_layernorm.weight", (hidden,)
    if family != "Qwen3MoeForCausalLM":
        yield from _gated("mlp", hidden, hf["intermediate_size"])
        return
    experts = hf.get("num_local_experts") or hf["num_experts"]
    yield "mlp.gate.weight", (experts, hidden)
    for expert in range(experts):
        yield from _gated(f"mlp.experts.{expert}", hidden, hf["moe_intermediate_size"])


def _gated(at: str, hidden: int, inner: int) -> Iterator[Tensor]:
    yield f"{at}.gate_proj.weight", (inner, hidden)
    yield f"{at}.up_proj.weight", (inner, hidden)
    yield f"{at}.down_proj.weight", (hidden, inner)
