"""What this folder adds: formats of the frozen base below adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError
from asyncrl.extension import Extension, LaunchHooks
from asyncrl.extensions.lora.bases import OfferedBase
from asyncrl.models.families import family_of

if TYPE_CHECKING:
    from asyncrl.config import Config

BLOCK = 64
"""Numbers of a row of a quantized weight that share one scale, as in QLoRA and bitsandbytes."""
SCALE = 2 / BLOCK
"""Bytes of a number's share of a scale."""
PATH = "asyncrl.extensions.qlora.stored:QuantizedBase"


class QloraLaunch(LaunchHooks):
    """Refuses layers that would cut blocks."""

    def check_model(self, config: Config, model: dict[str, Any], gpus: int) -> Iterator[ConfigError]:
        """Check that the inputs of each layer with a quantized weight are whole blocks on every rank."""
        trainer, lora = config.trainer, config.trainer.lora
        if lora.base not in Qlora.bases:
            return
        if family_of(model).stacks:
            remedy = "The model's files stack the experts, which a stored base has one by one: set none."
            yield ConfigError("trainer.lora.base", lora.base, remedy)
        hidden, heads = model["hidden_size"], model["num_attention_heads"]
        tensor, expert_tensor = trainer.tensor_parallel, trainer.expert_tensor_parallel or trainer.tensor_parallel
        value = model["v_head_dim"] if "kv_lora_rank" in model else model.get("head_dim") or hidden // heads
        for field, degree, projections, inputs in (
            ("tensor_parallel", 1, {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_a_proj"}, hidden),
            ("tensor_parallel", 1, {"q_b_proj"}, model.get("q_lora_rank") or 0),
            ("tensor_parallel", 1, {"kv_b_proj"}, model.get("kv_lora_rank") or 0),
            ("tensor_parallel", tensor, {"o_proj"}, heads * value),
            ("tensor_parallel", tensor, {"down_proj"}, model["intermediate_size"]),
            ("tensor_parallel", tensor, {"down_proj"}, model.get("moe_shared_expert_intermediate_size") or 0),
            ("expert_tensor_parallel", expert_tensor, {"down_proj"}, model.get("moe_ffn_hidden_size") or 0),
        ):
            names = sorted(projections if lora.targets == "all" else projections & {*lora.targets})
            if names and inputs // degree % BLOCK:
                remedy = (
                    f"Blocks have {BLOCK} numbers, but each of {degree} ranks has {inputs // degree} inputs of "
                    f"{', '.join(names)}: lower trainer.{field}, leave them out of trainer.lora.targets, or set none."
                )
                yield ConfigError("trainer.lora.base", lora.base, remedy)


class Qlora(Extension):
    """trainer.lora.base=nf4 and int8."""

    bases = {"int8": OfferedBase(PATH, 1 + SCALE), "nf4": OfferedBase(PATH, 0.5 + SCALE)}  # noqa: RUF012

    def launch(self) -> QloraLaunch:
        """Return the checks."""
        return QloraLaunch()


Own = Qlora
