"""SGLang's own arguments (engine.server_args), and those that a run sets itself or cannot do with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from asyncrl.config.rules import Rule, require
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.config import Config

INSTEAD = {
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "tp"), "tensor_parallel"),
    **dict.fromkeys(("ep_size", "expert_parallel_size", "ep"), "expert_parallel"),
    **dict.fromkeys(("dp_size", "data_parallel_size", "dp", "enable_dp_attention"), "data_parallel"),
    **dict.fromkeys(("pp_size", "pipeline_parallel_size", "pp"), "pipeline_parallel"),
    **dict.fromkeys(("enable_hierarchical_cache", "hicache_size"), "hicache"),
    "disaggregation_mode": "prefill_count and engine.decode_count",
    "speculative_algorithm": "speculative",
}
"""Settings in place of SGLang's arguments. Placement, publishes and the other checks follow from them."""
CANNOT_LOAD = {
    "quantization": "set engine.quantization instead.",
    "torchao_config": "set engine.quantization instead.",
    "moe_runner_backend": "remove it (the engines use triton's).",
}
"""Arguments with which SGLang 0.5.21 rewrites weights after it has loaded them, so that no version can follow. Experts
that run on FlashInfer's kernels, its default on Blackwell, are permuted in memory (layers/quantization/unquant.py)."""
CANNOT_VERIFY = (
    *("moe_a2a_backend", "moe_dp_size", "moe_data_parallel_size", "enable_dp_lm_head", "enable_eplb"),
    *("attn_cp_size", "attention_context_parallel_size", "moe_dense_tp_size", "dwdp_size"),
    *("init_expert_location", "ep_num_redundant_experts", "disable_shared_experts_fusion"),
    *("enforce_shared_experts_fusion", "enable_two_batch_overlap", "enable_single_batch_overlap"),
)
"""Arguments with which SGLang cuts or joins weights in other ways than weights/engine_layout.py, so that every engine
would fail the comparison of checksums. SGLang's own loaders cut the tensors of a publish as they cut those of a
folder."""
OFF = (None, False, 0, 1, "0", "1", "none", "trivial", "triton")
"""Values that leave an argument of these at what the project knows."""


def _with_underscores(arguments: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("-", "_"): value for name, value in arguments.items()}
    if len(named) < len(arguments):
        twice = next(name for name in arguments if "-" in name and name.replace("-", "_") in arguments)
        raise ConfigError("server_args", twice, "It is there with underscores, too: remove one of the two.")
    return named


ServerArgs = Annotated[dict[str, Any], AfterValidator(_with_underscores)]
"""Arguments of SGLang by name, with underscores whichever way they were given; true for a bare flag."""


def check_server_args(config: Config) -> None:
    """Refuse arguments of engines for which there are settings, and those with which an engine cannot load or prove new
    weights. Raises ConfigError."""
    require(config, _rules(config))


def _rules(config: Config) -> Iterator[Rule]:
    """Yield each rule as field, whether its value breaks it, and the remedy."""
    for name, value in config.engine.server_args.items():
        field, is_on = f"engine.server_args.{name}", value is True or value not in OFF
        yield field, name in INSTEAD, f"Set engine.{INSTEAD.get(name)} instead."
        if config.mode != "train":
            continue
        why = f"SGLang cannot load new weights with it: {CANNOT_LOAD.get(name)}"
        yield field, name in CANNOT_LOAD and is_on, why
        why = "The engines would answer with random weights until the first publish: remove it."
        yield field, name == "load_format" and value == "dummy", why
        why = "SGLang cuts weights in a way that weights.verify does not know: remove it, or set weights.verify=false."
        yield field, name in CANNOT_VERIFY and is_on and config.weights.verify, why
