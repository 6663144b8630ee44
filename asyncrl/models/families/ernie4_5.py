"""ERNIE-4.5, dense: a Llama that rotates pairs of neighbours."""

from collections.abc import Iterator

from asyncrl.models.family import HF, Family, Serving
from asyncrl.models.parts import LLAMA


def _unsupported(hf: HF) -> Iterator[tuple[str, str]]:
    if hf.get("use_bias"):
        yield "use_bias=true", "Models with biases are not supported yet, except on queries, keys and values."


FAMILY = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    weights=LLAMA,
    arguments=lambda hf: {"rotary_interleaved": True},
    unsupported=_unsupported,
    serving=Serving(fuses=False, stages=False),
)
