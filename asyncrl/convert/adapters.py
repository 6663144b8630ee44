"""Conversions of adapters: PEFT folders into the weights of their base model, and from and to checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from asyncrl.convert.bridge import write_hf
from asyncrl.convert.folders import read_config
from asyncrl.errors import WeightsError
from asyncrl.weights.folder import HFFolder
from asyncrl.weights.peft import PeftFolder


def merge(base: Path, adapter: Path, out: Path, *, limit: int) -> None:
    """Write the HF folder of a model with an adapter in its weights. They are computed in float32, one at a time, and
    keep their dtype. `limit` is the size of a file in bytes.

    Raises WeightsError or ConfigError if the adapter is not of this model, or not plain LoRA.
    """
    hf = read_config(base)
    if "quantization_config" in hf:
        raise WeightsError(f"the weights of {base} are quantized: give the model that they were made from")
    with HFFolder(base) as weights, PeftFolder(adapter) as adapters:
        names = weights.names()
        unknown = set(adapters.modules) - {adapters.module_of_weight(name) for name in names}
        if hf.get("tie_word_embeddings"):
            unknown |= {"lm_head"} & set(adapters.modules)  # its weight is also that of the embedding
        if unknown:
            raise WeightsError(
                f"{adapter} changes {min(unknown)}, which {base} does not have by itself: give the model that the "
                "adapter was trained on"
            )

        def merged() -> Iterator[tuple[str, Tensor]]:
            for name in names:
                weight = weights.read(name)
                if adapters.module_of_weight(name):
                    weight = (weight.float() + adapters.delta(name, weight.shape)).to(weight.dtype)
                yield name, weight

        write_hf(out, base, None, ((name, weights.described(name)) for name in names), merged(), limit)
