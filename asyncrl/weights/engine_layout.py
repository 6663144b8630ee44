"""Mapping from HF tensors to the parameters of an SGLang engine, and their split over its ranks.

There is one table per model family, read from SGLang 0.5.21: `load_weights` of sglang/srt/models/*.py, and the weight
loaders of layers/linear.py, layers/vocab_parallel_embedding.py and layers/moe/fused_moe_triton/layer.py. A fused
parameter is the concatenation of its HF tensors, each cut for the rank, so that its bytes are known part by part.

An engine on CPU pads dimensions that are not divisible (configs/update_config.py); one on a GPU replicates key-value
heads and refuses everything else. Of the ranks of a pipeline stage, the consecutive ones of a group hold the same
routed experts, or the same replica of attention (runtime_context.py, derive_spawn_ranks). The input embedding is cut
like attention, and the output layer, like MLPs, over the whole stage. No weights that the engine
quantizes itself, none packed for AMX.
On CPU, several shared experts must have an inner size that needs no padding.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.parallel import EngineParallel
from asyncrl.weights.layouts import dims_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCAB_MULTIPLE = 64
CPU_INNER_MULTIPLE = 32  # multiplied by the ranks of a stage


@dataclass(frozen=True)
class Split:
    """One engine's ranks, and the head counts of its model before padding."""

    shape: EngineParallel
    heads: int
    kv_heads: int
    cpu: bool

    def share(self, length: int, ranks: int, multiple: int = 1) -> int:
        """Return the share of each of `ranks` ranks in a dimension, padded on CPU to `multiple` for each rank of the
        stage. Raises ValueError if it is not divisible."""
        if self.cpu:
            return _up(length, multiple * self.shape.tp) // ranks
        if length % ranks:
            raise ValueError(f"{length} does not divide among {ranks} ranks of an engine")
        return length // ranks

    @property
    def kv_replicas(self) -> int:
        """Number of ranks of a replica of attention that hold the same key-value head."""
        return 1 if self.cpu else max(1, self.shape.attention // self.kv_heads)

    @property
    def kv_heads_here(self) -> int:
        """Key-value heads of a rank."""
        return 1 if self.kv_replicas > 1 else self.share(self.kv_heads, self.shape.attention)

    @property
    def heads_here(self) -> int:
        """Query heads of a rank. Padding preserves the number of queries per key."""
        return (
            self.kv_heads_here * (self.heads // self.kv_heads)
            if self.cpu
            else self.share(self.heads, self.shape.attention)
        )


Cut = Callable[[Tensor, Split, int], Tensor]
"""Maps (full HF tensor, split, rank of the stage) to that rank's part, which is a view if nothing is padded."""


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _slice(tensor: Tensor, dim: int, index: int, size: int) -> Tensor:
    """Return the index-th slice of `size`, with zeros beyond the end of the tensor."""
    start = min(index * size, tensor.shape[dim])
    piece = tensor.narrow(dim, start, min(size, tensor.shape[dim] - start))
    missing = list(piece.shape)
    missing[dim] = size - piece.shape[dim]
    return torch.cat([piece, piece.new_zeros(missing)], dim) if missing[dim] else piece


def _heads(tensor: Tensor, dim: int, total: int, index: int, count: int) -> Tensor:
    """Return the index-th group of `count` heads of `total`."""
    if tensor.shape[dim] % total:
        raise ValueError(f"its dimension {dim} has size {tensor.shape[dim]}, which {total} heads do not divide")
    return _slice(tensor, dim, index, count * (tensor.shape[dim] // total))


def _vocab(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return _rows(tensor, split.shape.tp, rank)


def _embedding(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return _rows(tensor, split.shape.attention, rank % split.shape.attention)


def _rows(tensor: Tensor, ranks: int, index: int) -> Tensor:
    length = tensor.shape[0]
    multiple = VOCAB_MULTIPLE * ranks if _up(length, VOCAB_MULTIPLE) % ranks else VOCAB_MULTIPLE
    return _slice(tensor, 0, index, _up(length, multiple) // ranks)


def _whole(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return tensor


def _query(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return _heads(tensor, 0, split.heads, rank % split.shape.attention, split.heads_here)


def _key(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return _heads(tensor, 0, split.kv_heads, rank % split.shape.attention // split.kv_replicas, split.kv_heads_here)


def _out(tensor: Tensor, split: Split, rank: int) -> Tensor:
    return _heads(tensor, 1, split.heads, rank % split.shape.attention, split.heads_here)


def _inner(dim: int, *, routed: bool = False) -> Cut:
    def cut(tensor: Tensor, split: Split, rank: int) -> Tensor:
        ranks = split.shape.per_expert if routed else split.shape.tp
        return _slice(tensor, dim, rank % ranks, split.share(tensor.shape[dim], ranks, CPU_INNER_MULTIPLE))

    return cut


_inner_rows, _inner_columns = _inner(0), _inner(1)
_expert_rows, _expert_columns = _inner(0, routed=True), _inner(1, routed=True)


@dataclass(frozen=True)
class EngineParameter:
    """One engine parameter: its HF tensors in the order of their bytes. `{layer}` and `{expert}` stand for numbers; the
    parts of a rule with `{expert}` repeat for each expert in turn."""

    engine: str
    parts: tuple[tuple[str, Cut], ...]
    dtype: torch.dtype | None = None
    """The engine's own dtype, if it is not the one that the engine was started with."""

    @property
    def per_expert(self) -> bool:
        """True if the parameter stacks the tensors of all routed experts."""
        return "{expert}" in self.parts[0][0]

    def of_scales(self, suffix: str) -> EngineParameter:
        """Return the rule of the scales of its output channels, [channels, 1]."""
        parts = (
            (name + suffix, _whole if cut in (_out, _inner_columns, _expert_columns) else cut)
            for name, cut in self.parts
        )
        return EngineParameter(self.engine + suffix, tuple(parts), torch.float32)

    @property
    def same_everywhere(self) -> bool:
        """True if all ranks hold the same bytes."""
        return all(cut is _whole for _, cut in self.parts) and not self.per_expert


Table = tuple[EngineParameter, ...]


def _layer(engine: str, *parts: tuple[str, Cut], dtype: torch.dtype | None = None) -> EngineParameter:
    hf = tuple((f"model.layers.{{layer}}.{name}", cut) for name, cut in parts)
    return EngineParameter(f"model.layers.{{layer}}.{engine}", hf, dtype)


def _same(name: str, cut: Cut = _whole) -> EngineParameter:
    return _layer(name, (name, cut))


def _gated(mlp: str) -> Table:
    return (
        _layer(
            f"{mlp}.gate_up_proj.weight",
            (f"{mlp}.gate_proj.weight", _inner_rows),
            (f"{mlp}.up_proj.weight", _inner_rows),
        ),
        _same(f"{mlp}.down_proj.weight", _inner_columns),
    )


def _experts(mlp: str, *, gate: str, up: str, down: str) -> Table:
    return (
        _layer(
            f"{mlp}.experts.w13_weight",
            (f"{mlp}.experts.{{expert}}.{gate}.weight", _expert_rows),
            (f"{mlp}.experts.{{expert}}.{up}.weight", _expert_rows),
        ),
        _layer(f"{mlp}.experts.w2_weight", (f"{mlp}.experts.{{expert}}.{down}.weight", _expert_columns)),
    )


def _qkv(kind: str) -> EngineParameter:
    return _layer(
        f"self_attn.qkv_proj.{kind}",
        (f"self_attn.q_proj.{kind}", _query),
        (f"self_attn.k_proj.{kind}", _key),
        (f"self_attn.v_proj.{kind}", _key),
    )


# --- parts --------------------------------------------------------------------------------------------------

BODY: Table = (
    EngineParameter(EMBEDDING, ((EMBEDDING, _embedding),)),
    EngineParameter("model.norm.weight", (("model.norm.weight", _whole),)),
    EngineParameter(HEAD, ((HEAD, _vocab),)),
    _same("input_layernorm.weight"),
    _same("post_attention_layernorm.weight"),
)
ATTENTION: Table = (_qkv("weight"), _same("self_attn.o_proj.weight", _out))
QKV_BIAS: Table = (_qkv("bias"),)
QK_NORM: Table = (_same("self_attn.q_norm.weight"), _same("self_attn.k_norm.weight"))
LATENT_ATTENTION: Table = (  # DeepSeek's; the query projection is low-rank in some models
    _same("self_attn.q_proj.weight", _query),
    _same("self_attn.q_b_proj.weight", _query),
    _same("self_attn.q_a_layernorm.weight"),
    _same("self_attn.kv_a_layernorm.weight"),
    _same("self_attn.kv_b_proj.weight", _query),
    _same("self_attn.o_proj.weight", _out),
)
LATENT_DOWN: Table = (_same("self_attn.kv_a_proj_with_mqa.weight"),)
LATENT_DOWN_FUSED: Table = (
    _layer(
        "self_attn.fused_qkv_a_proj_with_mqa.weight",
        ("self_attn.q_a_proj.weight", _whole),
        ("self_attn.kv_a_proj_with_mqa.weight", _whole),
    ),
)
MLP: Table = _gated("mlp")
SHARED_EXPERTS: Table = _gated("mlp.shared_experts")
EXPERTS: Table = _experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")
ROUTER: Table = (_same("mlp.gate.weight"),)
ROUTER_FP32: Table = (_layer("mlp.gate.weight", ("mlp.gate.weight", _whole), dtype=torch.float32),)
ROUTER_BIAS: Table = (
    _layer("mlp.gate.e_score_correction_bias", ("mlp.gate.e_score_correction_bias", _whole), dtype=torch.float32),
)

# --- families -----------------------------------------------------------------------------------------------

LLAMA: Table = (*BODY, *ATTENTION, *MLP)
QWEN2: Table = (*LLAMA, *QKV_BIAS)
QWEN3: Table = (*LLAMA, *QK_NORM)
QWEN3_VL: Table = tuple(
    EngineParameter(
        rule.engine, tuple((re.sub(r"^model\.", "model.language_model.", name), cut) for name, cut in rule.parts)
    )
    for rule in QWEN3
)
QWEN3_MOE: Table = (*BODY, *ATTENTION, *QK_NORM, *ROUTER, *EXPERTS)  # SGLang treats every layer as sparse
MIXTRAL: Table = (
    *BODY,
    *ATTENTION,
    _same("block_sparse_moe.gate.weight"),
    *_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
)
GLM4_MOE: Table = (*QWEN3, *QKV_BIAS, *ROUTER_FP32, *ROUTER_BIAS, *EXPERTS, *SHARED_EXPERTS)
DEEPSEEK_V3: Table = (*BODY, *LATENT_ATTENTION, *MLP, *ROUTER, *ROUTER_BIAS, *EXPERTS, *SHARED_EXPERTS)


def _seen(engine: str, *parts: str) -> tuple[EngineParameter, ...]:
    """Return the weight and the bias of a linear layer of a vision tower."""
    return tuple(
        EngineParameter(
            f"visual.{engine}.{kind}", tuple((f"visual.{part}.{kind}", _whole) for part in parts or [engine])
        )
        for kind in ("weight", "bias")
    )


QWEN2_5_VISION: Table = (
    *_seen("blocks.{block}.attn.qkv_proj", "blocks.{block}.attn.qkv"),
    *_seen("blocks.{block}.attn.proj"),
    *_seen("blocks.{block}.mlp.gate_up_proj", "blocks.{block}.mlp.gate_proj", "blocks.{block}.mlp.up_proj"),
    *_seen("blocks.{block}.mlp.down_proj"),
    *_seen("merger.mlp.0"),
    *_seen("merger.mlp.2"),
    *(_seen(name)[0] for name in ("patch_embed.proj", "blocks.{block}.norm1", "blocks.{block}.norm2", "merger.ln_q")),
)
"""A trained vision tower, in an engine without tensor parallelism."""

FAMILIES: dict[str, Table] = {
    "LlamaForCausalLM": LLAMA,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2_5_VLForConditionalGeneration": (*QWEN2, *QWEN2_5_VISION),
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3VLForConditionalGeneration": QWEN3_VL,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "MixtralForCausalLM": MIXTRAL,
    "Glm4MoeForCausalLM": GLM4_MOE,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
}

HEAD_EVERYWHERE = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM")
"""Families of which every pipeline stage loads the output layer, though only the last one uses it."""


def _table(hf: dict[str, Any]) -> Table:
    architecture = (hf.get("architectures") or ["none named"])[0]
    if architecture not in FAMILIES:
        raise WeightsError(
            f"{architecture}: no table of an engine's parameters for this architecture; known: {sorted(FAMILIES)}"
        )
    if architecture == "DeepseekV3ForCausalLM":
        return (*DEEPSEEK_V3, *(LATENT_DOWN if hf.get("q_lora_rank") is None else LATENT_DOWN_FUSED))
    return FAMILIES[architecture]


def _fuses_shared_expert(hf: dict[str, Any]) -> bool:
    """Return whether an engine on a GPU, by default, stores the shared expert as the last of the routed ones
    (`shared_experts_fusion_disable_reason` of both models)."""
    if hf.get("n_shared_experts") != 1:
        return False
    architecture, experts = hf["architectures"][0], hf.get("n_routed_experts")
    return architecture == "Glm4MoeForCausalLM" or (architecture == "DeepseekV3ForCausalLM" and experts == 256)


@dataclass(frozen=True)
class ParameterTarget:
    """Destination of an HF tensor: the engine parameter's full name, its rule, which of its `count` parts the tensor
    is, and the ranks of the engine that have the parameter."""

    parameter: str
    rule: EngineParameter
    index: int
    count: int
    ranks: range


class EngineLayout:
    """The table of one model, looked up by HF name. Raises WeightsError for a family without a table."""

    def __init__(
        self, hf: dict[str, Any], shape: EngineParallel, *, cpu: bool, scales_suffix: str | None = None
    ) -> None:
        """With `scales_suffix`, each weight may have scales of its output channels, whose names end so."""
        dims, table = dims_of(hf), _table(hf)
        self.split = Split(shape, dims.heads, dims.kv_heads, cpu)
        self.tied, self._layers = dims.tied, int(hf.get("num_hidden_layers") or 0)
        self._architecture = hf["architectures"][0]
        self._routed = int(hf.get("n_routed_experts") or hf.get("num_local_experts") or hf.get("num_experts") or 0)
        self._shared_is_routed = not cpu and shape.ep == 1 and _fuses_shared_expert(hf)
        self._experts = self._routed + self._shared_is_routed
        scales = tuple(rule.of_scales(scales_suffix) for rule in table) if scales_suffix else ()
        self._rules = {name: (rule, index) for rule in (*table, *scales) for index, (name, _) in enumerate(rule.parts)}

    def find(self, name: str) -> ParameterTarget:
        """Return the place of an HF tensor. Raises WeightsError if the engine has none."""
        renamed = name.replace(".shared_experts.", f".experts.{self._routed}.") if self._shared_is_routed else name
        general, layer, block, expert = _general(renamed)
        if general not in self._rules or (expert or 0) >= max(self._experts, 1):
            raise WeightsError(f"{name}: an SGLang engine of {self._architecture} has no place for this tensor")
        rule, index = self._rules[general]
        parameter, each = rule.engine.format(layer=layer, block=block), len(rule.parts)
        count = each * (self._experts if rule.per_expert else 1)
        return ParameterTarget(parameter, rule, index + each * (expert or 0), count, self._ranks(name, layer))

    def part(self, target: ParameterTarget, number: int, tensor: Tensor, rank: int) -> Tensor | None:
        """Return what a rank has of one of the parameter's parts; None if it has none of this expert. Raises
        ValueError if the tensor is not divisible."""
        expert, kind = divmod(number, len(target.rule.parts))
        rank %= self.split.shape.tp
        if (
            target.rule.per_expert
            and rank // self.split.shape.per_expert != expert * self.split.shape.ep // self._experts
        ):
            return None
        return target.rule.parts[kind][1](tensor, self.split, rank)

    def _ranks(self, name: str, layer: int | None) -> range:
        """Return the ranks of the stages that have this tensor: those of its layer, of the first or of the last."""
        shape = self.split.shape
        stages = range(shape.pp)
        if layer is not None and shape.pp > 1:
            stages = next(stages[s : s + 1] for s in stages if layer in shape.layers(self._layers, s))
        elif name == EMBEDDING:
            stages = stages[:1]
        elif name != HEAD or self._architecture not in HEAD_EVERYWHERE:
            stages = stages[-1:]
        return range(stages.start * shape.tp, stages.stop * shape.tp)


def _general(name: str) -> tuple[str, int | None, int | None, int | None]:
    """Return a name with placeholders for its numbers, and the numbers of layer, block and expert."""
    numbers: dict[str, int] = {}

    def replaced(found: re.Match[str]) -> str:
        numbers[found[1]] = int(found[2])
        return f".{found[1]}s.{{{found[1]}}}."

    general = re.sub(r"\.(layer|block|expert)s\.(\d+)\.", replaced, name)
    return general, numbers.get("layer"), numbers.get("block"), numbers.get("expert")
