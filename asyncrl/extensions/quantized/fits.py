"""What does not fit quantized engines: settings, models, and generations of GPUs (read in SGLang 0.5.21's source)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError
from asyncrl.models.families import family_of
from asyncrl.parallel import EngineParallel

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.extensions.quantized.extension import QuantizedSettings

BLOCK = 128
"""Rows and columns of a block of fp8, which has one scale."""
FIELD = "quantized.format"
OWN = ("load_format", "json_model_override_args")
"""Arguments of SGLang that engines with codes are started with."""
AMPERE = ("A100", "A800", "A10", "A16", "A30", "A40", "RTX A", "RTX 30")
BLACKWELL = ("B100", "B200", "B300", "GB10", "RTX 50", "RTX PRO")
"""Parts of the names of GPUs."""


def settings(own: QuantizedSettings, config: Config) -> Iterator[ConfigError]:
    """Yield the settings that do not fit."""
    engine, kind = config.engine, own.format
    if kind != "none" and not config.trains:
        yield ConfigError(FIELD, kind, f"mode={config.mode} has no trainer, which quantizes: set none.")
    if not own.holds_codes:
        return
    instead = f"{FIELD}={kind}_simulated"
    if config.weight_loader:
        remedy = (
            f"Transports with loaders of their own were not tried with codes of 8 bits: set auto or disk, or {instead}."
        )
        yield ConfigError("weights.transport", config.weights.transport, remedy)
    if engine.dtype not in ("auto", "bfloat16"):
        remedy = f"SGLang multiplies quantized weights in bfloat16: set bfloat16, or {instead}."
        yield ConfigError("engine.dtype", engine.dtype, remedy)
    if engine.urls:
        remedy = f"Engines that were started elsewhere hold no codes: remove them, or {instead}."
        yield ConfigError("engine.urls", engine.urls, remedy)
    if config.keeps_versions or (config.agents.need_versions and config.mode == "train"):
        otherwise = "remove agents.roles" if config.agents.need_versions else "set weights.lora=merged"
        remedy = f"Adapters on quantized weights were not tried (weights.lora=versions): set {kind}_simulated, or "
        yield ConfigError(FIELD, kind, f"{remedy}{otherwise}.")
    for name in (one for one in OWN if one in engine.server_args):
        remedy = f"{FIELD} sets it: remove one of the two."
        yield ConfigError(f"engine.server_args.{name}", engine.server_args[name], remedy)


def model(kind: str, fields: dict[str, Any], shape: EngineParallel, *, gpu: bool) -> Iterator[ConfigError]:
    """Yield why engines cannot hold codes of a model. `fields` are those of config.json and of Megatron's arguments,
    `gpu` says where the engines run."""
    instead = f"set {kind}_simulated, which has the same values in engine.dtype"
    if not gpu:
        remedy = f"SGLang's kernels for it need a GPU, and these engines run on CPUs: {instead}."
        yield ConfigError(FIELD, kind, remedy)
    if not family_of(fields).serving.fuses:
        yield ConfigError(FIELD, kind, f"SGLang has no class of its own for this model: {instead}.")
    if "vision_config" in fields:
        yield ConfigError(FIELD, kind, f"Engines would quantize the vision tower, too: {instead}.")
    unit = BLOCK if kind == "fp8" else 16
    for what, size in _parts(fields, shape):
        if size % unit:
            remedy = f"A rank of an engine has {size} {what}, which is no multiple of {unit}: lower "
            yield ConfigError(FIELD, kind, f"{remedy}engine.tensor_parallel, or {instead}.")


def gpu(kind: str, name: str, arguments: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield why engines on this GPU cannot load a second version, or die at their start."""
    ampere, blackwell = (any(part in name for part in of) for of in (AMPERE, BLACKWELL))
    if kind == "fp8" and ampere:
        why = f"SGLang rewrites fp8 weights on {name} into Marlin's layout, and no later version could be loaded"
        yield ConfigError(FIELD, kind, f"{why}: set int8, or fp8_simulated.")
    if kind == "fp8" and blackwell and arguments.get("fp8_gemm_backend") != "triton":
        why = f"SGLang rewrites the scales of fp8 weights for DeepGEMM on {name}, and no later version could be loaded"
        remedy = f"set +engine.server_args.fp8_gemm_backend=triton, or {FIELD}=fp8_simulated."
        yield ConfigError(FIELD, kind, f"{why}: {remedy}")
    if kind == "int8" and blackwell:
        yield ConfigError(FIELD, kind, f"SGLang's kernels for int8 do not run on {name}: set fp8, or int8_simulated.")


def _parts(fields: dict[str, Any], shape: EngineParallel) -> Iterator[tuple[str, int]]:
    """Yield the sizes of the parts that a rank has of each linear layer: blocks must not cross the shards, nor the
    parts of a fused layer (SGLang's `validate_block_quant_shapes`)."""
    hidden, heads, ranks = fields["hidden_size"], fields["num_attention_heads"], shape.attention
    yield "features of the model", hidden
    if "kv_lora_rank" in fields:
        rope, nope, value = (fields[f"{name}_head_dim"] for name in ("qk_rope", "qk_nope", "v"))
        if fields.get("q_lora_rank"):
            yield "latent queries", fields["q_lora_rank"]
        yield "latent keys and values", fields["kv_lora_rank"]
        yield "features of queries", heads * (nope + rope) // ranks
        yield "features of keys and values", heads * (nope + value) // ranks
        yield "features of attention", heads * value // ranks
    else:
        each = fields.get("head_dim") or hidden // heads
        yield "features of queries", heads * each // ranks
        yield "features of keys", max(1, (fields.get("num_key_value_heads") or heads) // ranks) * each
    for what, name, ranks in (
        ("features of an MLP", "intermediate_size", shape.tp),
        ("features of the shared experts", "moe_shared_expert_intermediate_size", shape.tp),
        ("features of a routed expert", "moe_ffn_hidden_size", shape.per_expert),
    ):
        if fields.get(name):
            yield what, fields[name] // ranks
