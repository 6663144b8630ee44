"""Settings of engines whose weights are quantized (engine.quantization)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.config.rules import Rule, require
from asyncrl.errors import ConfigError
from asyncrl.parallel import EngineParallel

if TYPE_CHECKING:
    from asyncrl.config import Config

Quantization = Literal["none", "fp8", "int8", "fp8_simulated", "int8_simulated"]
BLOCK = 128
"""Rows and columns of a block of fp8, which has one scale."""
FIELD = "engine.quantization"


def check_quantization(config: Config) -> None:
    """Refuse settings that do not fit quantized engines. Raises ConfigError."""
    engine = config.engine
    if engine.quantization == "none":
        return
    simulated = "" if not engine.holds_codes else f", or {FIELD}={engine.quantization}_simulated"
    rules: list[Rule] = [
        (
            FIELD,
            config.mode == "rollout_only",
            "mode=rollout_only has no trainer, which quantizes: set none.",
        ),
        (
            "engine.dtype",
            engine.holds_codes and engine.dtype not in ("auto", "bfloat16"),
            f"SGLang multiplies quantized weights in bfloat16: set bfloat16{simulated}.",
        ),
        (
            "engine.urls",
            engine.holds_codes and bool(engine.urls),
            f"Engines that were started elsewhere hold no codes: remove them{simulated}.",
        ),
        *(
            (
                f"engine.server_args.{name}",
                name in ("load_format", "json_model_override_args"),
                f"{FIELD} sets it: remove one of the two.",
            )
            for name in engine.server_args
        ),
    ]
    require(config, rules)


def check_codes(config: Config, model: dict[str, Any], *, gpu: bool, sees: bool) -> None:
    """Refuse models and machines whose engines cannot hold quantized weights. `model` holds the fields of config.json
    and of Megatron's arguments, `gpu` says where the engines run, and `sees` whether the model has a vision tower.
    Raises ConfigError."""
    engine, kind = config.engine, config.engine.quantization
    if not engine.holds_codes:
        return
    instead = f"set {kind}_simulated, which has the same values in engine.dtype"
    if not gpu:
        raise ConfigError(FIELD, kind, f"SGLang's kernels for it need a GPU, and these engines run on CPUs: {instead}.")
    if sees:
        raise ConfigError(FIELD, kind, f"Engines would quantize the vision tower, too: {instead}.")
    unit = BLOCK if kind == "fp8" else 16
    for what, size in _parts(model, engine.parallel):
        if size % unit:
            remedy = f"A rank of an engine has {size} {what}, which is no multiple of {unit}: lower "
            raise ConfigError(FIELD, kind, f"{remedy}engine.tensor_parallel, or {instead}.")


def _parts(model: dict[str, Any], shape: EngineParallel) -> Iterator[tuple[str, int]]:
    """Yield the sizes of the parts that a rank has of each linear layer: blocks must not cross the shards, nor the
    parts of a fused layer (SGLang's `validate_block_quant_shapes`)."""
    hidden, heads, ranks = model["hidden_size"], model["num_attention_heads"], shape.attention
    yield "features of the model", hidden
    if "kv_lora_rank" in model:
        rope, nope, value = (model[f"{name}_head_dim"] for name in ("qk_rope", "qk_nope", "v"))
        if model.get("q_lora_rank"):
            yield "latent queries", model["q_lora_rank"]
        yield "latent keys and values", model["kv_lora_rank"]
        yield "features of queries", heads * (nope + rope) // ranks
        yield "features of keys and values", heads * (nope + value) // ranks
        yield "features of attention", heads * value // ranks
    else:
        each = model.get("head_dim") or hidden // heads
        yield "features of queries", heads * each // ranks
        yield "features of keys", max(1, (model.get("num_key_value_heads") or heads) // ranks) * each
    for what, name, ranks in (
        ("features of an MLP", "intermediate_size", shape.tp),
        ("features of the shared experts", "moe_shared_expert_intermediate_size", shape.tp),
        ("features of a routed expert", "moe_ffn_hidden_size", shape.per_expert),
    ):
        if model.get(name):
            yield what, model[name] // ranks
