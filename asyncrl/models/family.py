"""The record of a model family: everything that is particular to one class of transformers, as data without torch.

Each module of models/families has one, as FAMILY, put together from models/parts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

HF = dict[str, Any]
"""A model folder's config.json, with the fields of the text model at the top."""
Arguments = dict[str, Any]
"""Arguments of Megatron's TransformerConfig."""


class Layout(Enum):
    """How trainers and engines divide a weight among ranks (weights/layouts.py, weights/engine_layout.py)."""

    WHOLE = auto()
    """Equal on all ranks of both."""
    COLUMN = auto()
    """Trainers divide the output features; each rank of an engine has all."""
    WHOLE_EMBEDDING = auto()
    """Rows of tokens, which trainers divide; each rank of an engine has all."""
    EMBEDDING = auto()
    """Rows of tokens; an engine divides them as its attention."""
    HEAD = auto()
    """Rows of tokens; an engine divides them over all ranks of the last stage."""
    QKV = auto()
    """Queries, keys and values in one, by heads."""
    QUERY = auto()
    """Output features, by query heads."""
    OUT = auto()
    """Input features, by query heads."""
    GATE_UP = auto()
    """Gate and up in one, by inner features."""
    DOWN = auto()
    """Input features, which are the inner ones of an MLP."""
    FUSED_QKV = auto()
    """As QKV, in one HF tensor too."""
    FUSED_GATE_UP = auto()
    """As GATE_UP, in one HF tensor too."""
    STACKED_GATE_UP = auto()
    """Gate and up of an expert of a stack, which holds them transposed, the columns of gate before those of up."""
    INTERLEAVED_GATE_UP = auto()
    """The same with each column of gate followed by that of up."""
    STACKED_DOWN = auto()
    """The last matrix of an expert of such a stack."""


@dataclass(frozen=True)
class WeightRow:
    """One Megatron parameter, the HF tensors in it, and the engine's parameter with these tensors. `{layer}` and
    `{expert}` are numbers in the whole model, whatever rank holds them."""

    megatron: str
    """Its name under megatron-core's local layer spec."""
    layout: Layout
    hf: tuple[str, ...]
    """Without `{expert}` they are stacks of the weights of all experts."""
    engine: str | None
    """None if engines do not have it. Weights that name the same one are its parts, in order."""
    needs: str = ""
    """The Megatron argument without which a model does not have it; after `not `, with which."""
    layers: str = ""
    """The kind of layers that have it, if not all do: dense, sparse (with experts), or drafts (of multi-token
    prediction, which have all weights of sparse ones, too)."""
    exact: bool = False
    """True if engines keep it in float32."""

    def present(self, arguments: Arguments, kind: str) -> bool:
        """Return whether a model with these arguments has it in a layer of this kind: dense, or sparse (with
        experts)."""
        if self.layers not in ("", kind):
            return False
        return not self.needs or bool(arguments.get(self.needs.removeprefix("not "))) != self.needs.startswith("not ")


@dataclass(frozen=True)
class Tower:
    """What a model of transformers has beside its text model: a tower that encodes images."""

    module: str
    """Its class in the module of the model type."""
    prefix: str
    """Beginning of the names of its tensors in HF folders."""
    reader: str
    """Import path of what returns the ImageReader (images.py) of a model folder; called with the configuration, the
    folder and its config.json."""
    encoder: str
    """Import path of the subclass of Encoder (trainer/encoder.py) that holds it in a trainer."""
    parameters: Callable[[HF], int]
    """Number of its parameters, for estimates of memory."""
    engine: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """An engine's parameters and their HF tensors, by {block}."""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """As `Family.tiny`, of the tower's own config."""


@dataclass(frozen=True)
class Serving:
    """What SGLang 0.5.21 does with models of a family."""

    adapters: bool = False
    """Serves adapters. Those of experts and of latent attention were not tried."""
    replicates: bool = False
    """Can replicate the attention within an engine, instead of dividing its heads over all ranks."""
    head_everywhere: bool = False
    """Every pipeline stage loads the output layer, though only the last one uses it."""
    on_cpu: bool = True
    """Runs on CPUs, too; elsewhere only its weights were tested there."""
    stages: bool = True
    """Has pipeline stages."""
    tied_stages: bool = True
    """Its last pipeline stage has a tied output layer."""
    fuses: bool = True
    """Has a class of its own, which fuses weights. Otherwise SGLang runs transformers' modules, with their parameters
    (TransformersForCausalLM)."""
    longest: Callable[[HF], int | None] = lambda hf: None
    """Positions from which on it, and trainers, compute another function than transformers; None if there are none."""
    reports_experts: bool = True
    """Reports the experts that it chose."""
    fuses_shared_expert: Callable[[HF], bool] = lambda hf: False
    """Whether an engine on a GPU, by default, stores a single shared expert as the last of the routed ones
    (`shared_experts_fusion_disable_reason` of the models)."""
    unsupported: Callable[[HF], Iterable[tuple[str, str]]] = lambda hf: ()
    """Yields (what was found, what is supported) for models that can be trained but not served."""


@dataclass(frozen=True)
class Family:
    """One class of transformers."""

    architecture: str
    """Its name in `architectures` of config.json."""
    model_type: str
    """transformers' name of its configuration; a config.json may have another name for the same (Kimi-K2)."""
    weights: tuple[WeightRow, ...]
    arguments: Callable[[HF], Arguments] = lambda hf: {}
    """Arguments in which its TransformerConfig differs from a plain Llama's. A field that a config.json must have is
    read with `hf[...]`."""
    unsupported: Callable[[HF], Iterable[tuple[str, str]]] = lambda hf: ()
    """Yields (what was found, what is supported) for what only this family refuses."""
    allows: tuple[str, ...] = ()
    """Fields of config.json that may be set, though other families refuse them."""
    adapters: bool = True
    """Whether its linear layers can have adapters: not where HF fuses them."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields that transformers sets where config.json does not, if other families set them otherwise."""
    embedding_scale: Callable[[HF], float] = lambda hf: 1.0
    """Factor of the embeddings of tokens, but not of a tied output layer."""
    local_theta: Callable[[HF], float | None] = lambda hf: None
    """rope_theta of layers with windows, which scale nothing; None if all layers rotate alike."""
    wide_norms: bool = False
    """Norms of queries and keys take all heads as one vector, instead of each head."""
    tower: Tower | None = None
    """None for models that read text alone."""
    serving: Serving = Serving()
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """Small values of the config fields that only this family has, with every optional part."""
    variants: tuple[Mapping[str, Any], ...] = ()
    """Changes of `tiny` that the tests try in addition. Together they hold every tensor that the family may have."""

    def has(self, weight: str) -> bool:
        """Return whether it has a weight whose Megatron name ends so."""
        return any(one.megatron.endswith(weight) for one in self.weights)

    @property
    def stacks(self) -> bool:
        """Return whether its files hold the experts of a layer in one tensor."""
        return any("{expert}" in one.megatron and "{expert}" not in one.hf[0] for one in self.weights)
