"""An HF config as Megatron arguments, and what of it is not supported, by the records of models/families."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.models.families import family_of, known_families
from asyncrl.models.family import HF, Arguments, Family
from asyncrl.models.parts import rotary

WHOLE = ("architectures", "model_type", "tie_word_embeddings", "dtype")
"""Fields that describe the whole model if both it and its text model have them."""


def flat(hf: HF) -> HF:
    """Return a config with the fields of the text model at the top, in either layout: transformers 5 writes them into
    `text_config`, and some published folders have them at the top already. Fields that it leaves out have the family's
    defaults."""
    text = hf.get("text_config") or {}
    own = {name: value for name, value in hf.items() if name != "text_config" and (name in WHOLE or name not in text)}
    family = known_families().get((hf.get("architectures") or [""])[0])
    return {**(family.defaults if family else {}), **text, **own}


def megatron_arguments(hf: HF) -> Arguments:
    """Return the arguments in which this model's TransformerConfig differs from a plain Llama's. Raises ConfigError if
    a field is missing."""
    try:
        return family_of(hf).arguments(hf)
    except KeyError as error:
        raise ConfigError(
            "model.path", f"no {error.args[0]}", "config.json lacks this field: copy the file again."
        ) from None


def rope_axes(hf: HF) -> list[int] | None:
    """Return which position (0 time, 1 height, 2 width) turns each rotated pair of a head; None for text models, whose
    tokens have one position."""
    section = rotary(hf).get("mrope_section")
    if not section or not rotary(hf).get("mrope_interleaved"):
        return [axis for axis, pairs in enumerate(section) for _ in range(pairs)] if section else None
    return [pair % 3 if pair < 3 * section[pair % 3] else 0 for pair in range(sum(section))]


INTERN = "SGLang 0.5.21 takes its images beside texts, not beside token ids, and rounds their pixels to bfloat16"
CHUNKS = (
    "its layers attend within chunks of 8192 positions, or without rotation and with queries that grow with their "
    "position, and the trainer's packs know windows alone"
)
LACKS = {
    "Ernie4_5_MoeForCausalLM": "a bias chooses experts beside a softmax, and Megatron-core 0.16.1 has such a bias "
    "beside sigmoids alone",
    "MiniMaxM2ForCausalLM": "SGLang 0.5.21 computes its norm over all heads together on GPUs alone, and transformers "
    "5.12.1 ignores its rotary_dim, so that there was nothing to compare a trainer with",
    **dict.fromkeys(
        ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"),
        "it normalizes queries and keys after their rotation, and Megatron's layers do it before",
    ),
    "Llama4ForCausalLM": CHUNKS,
    "Llama4ForConditionalGeneration": CHUNKS,
    "InternVLChatModel": INTERN,
    "InternVLForConditionalGeneration": INTERN,
    "Gemma3ForConditionalGeneration": "tokens of an image attend to each other in both directions, which the trainer's "
    "packs do not",
}
"""Why some families have no record."""


# --- limits -------------------------------------------------------------------------------------------------


def check_architecture(hf: HF) -> None:
    """Raise ConfigError for models that trainer/model.py and weights/mapping.py do not support; `hf` is the folder's
    config.json."""
    name = (hf.get("architectures") or ["none named"])[0]
    if why := LACKS.get(name):
        remedy = f"It is not supported, because {why}. Supported architectures: {sorted(known_families())}."
        raise ConfigError("model.path", name, remedy)
    family = family_of(hf)
    codes = hf.get("quantization_config")
    if codes and (codes.get("quant_method"), codes.get("weight_block_size")) not in READ:
        remedy = "Of quantized weights, FP8 in blocks of 128 x 128 and MXFP4 are read: convert to bfloat16 first."
        raise ConfigError("model.path", "quantization_config", remedy)
    for found, supported in _unsupported(family, hf):
        raise ConfigError("model.path", found, f"{supported} Choose another model (docs/models.md).")


def _unsupported(family: Family, hf: HF) -> Iterator[tuple[str, str]]:
    """Yield (what was found, what is supported) for everything in a config that would change the logits relative to
    HF's."""
    for field in ("attention_bias", "attention_out_bias", "mlp_bias", "use_bias"):
        if hf.get(field) and field not in family.allows:
            yield f"{field}=true", "Models with biases are not supported yet, except on queries, keys and values."
    if hf.get("hidden_act", "silu") != "silu":
        yield f"hidden_act={hf['hidden_act']}", "Only gated MLPs with silu are supported so far."
    windowed = hf.get("sliding_window") is not None and hf.get("use_sliding_window", True)
    if windowed and "sliding_window" not in family.allows:
        yield f"sliding_window={hf['sliding_window']}", "Sliding-window attention is not supported yet."
    if not hf.get("rope_interleave", True):
        yield "rope_interleave=false", "Latent attention is supported with interleaved rotary dimensions only."
    yield from family.unsupported(hf)
    yield from _unsupported_rope(rotary(hf), family)
    yield from _unsupported_routing(hf, megatron_arguments(hf))


READ = (("fp8", [128, 128]), ("mxfp4", None))
"""Kinds of quantized weights that weights/folder.py reads, with the size of their blocks where it is named."""


def _unsupported_rope(found: dict[str, Any], family: Family) -> Iterator[tuple[str, str]]:
    kind = found["rope_type"]
    if kind not in ("default", "linear", "llama3", "yarn"):
        yield f"rope_type={kind}", "Supported rotary embeddings: default, linear, llama3, yarn."
    if kind == "yarn" and not unscaled(found) and not ("attention_factor" in family.allows and _scaled_as_usual(found)):
        yield "rope_type=yarn", "Supported with attention_factor=1.0, or with equal mscale and mscale_all_dim."


def unscaled(found: dict[str, Any]) -> bool:
    """Return whether yarn leaves sines and cosines as they are. transformers scales them by attention_factor, or by a
    factor of mscale and mscale_all_dim, which is 1 in DeepSeek's models."""
    mscale = found.get("mscale")
    return found.get("attention_factor") == 1.0 or bool(mscale and mscale == found.get("mscale_all_dim"))


def _scaled_as_usual(found: dict[str, Any]) -> bool:
    """Return whether yarn scales sines and cosines by what follows from its factor (arXiv 2309.00071, equation 22)."""
    usual = 0.1 * math.log(found["factor"]) + 1.0
    named = found.get("attention_factor")
    return "mscale" not in found and "mscale_all_dim" not in found and (named is None or math.isclose(named, usual))


def _unsupported_routing(hf: HF, arguments: Arguments) -> Iterator[tuple[str, str]]:
    chosen, function = arguments.get("moe_router_topk"), arguments.get("moe_router_score_function")
    if function == "softmax" and chosen == 1 and not arguments["moe_router_pre_softmax"]:
        yield "num_experts_per_tok=1", "The share of one expert is always 1 when normalized: it cannot be trained."
    if function == "sigmoid":
        if not hf.get("norm_topk_prob", True):
            yield "norm_topk_prob=false", "Sigmoid routers are supported with normalized shares only."
        open_groups = arguments["moe_router_group_topk"]
        if open_groups and hf["num_experts_per_tok"] // open_groups != 2:
            yield (
                f"num_experts_per_tok={chosen}, topk_group={open_groups}",
                "Groups are ranked by their two best experts; Megatron ranks by num_experts_per_tok // topk_group.",
            )
        for field, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            if hf.get(field, supported) != supported:
                yield f"{field}={hf[field]}", f"Supported: {supported}."
