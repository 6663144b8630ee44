"""Construction of a Megatron GPT that reads packs from an HF config, for every family of models/architectures.py."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from asyncrl.config import TrainerConfig
from asyncrl.models.architectures import check_architecture, flat, megatron_arguments, rope_axes, unscaled
from asyncrl.models.families import family_of
from asyncrl.models.parts import rotary
from asyncrl.trainer import recompute
from asyncrl.trainer.attention import (
    PackedAttention,
    PositionRope,
    frequencies,
    rotate_locally,
    sum_rotary_gradients,
)
from asyncrl.trainer.layers import adapt, transformer_engine_spec
from asyncrl.trainer.mlp import GatedMLP
from asyncrl.weights.layouts import dims_of

# Without TransformerEngine, megatron-core 0.16.1 leaves this name undefined, and its routers read it.
moe_utils.__dict__.setdefault("te_general_gemm", None)

ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
"""Activations of the gate by the name that a family's record gives to Megatron's activation_func."""


def read_hf_config(model: Path) -> dict[str, Any]:
    """Read the model folder's config.json, with the fields of the text model at the top, and check that the
    architecture is supported (as the launcher already has)."""
    hf = flat(json.loads((model / "config.json").read_text()))
    check_architecture(hf)
    return hf


def transformer_config(hf: dict[str, Any], trainer: TrainerConfig, *, separate: bool = False) -> TransformerConfig:
    """Return Megatron's configuration. The features disabled here are CUDA-only fusions or need TransformerEngine. With
    `separate`, each expert has layers of its own."""
    dtype, alltoall = getattr(torch, trainer.dtype), trainer.token_dispatcher == "alltoall"
    family = {"activation_func": "silu", "add_bias_linear": False, **megatron_arguments(hf)}
    te, latent = trainer.layers == "transformer_engine", bool(family.get("multi_latent_attention"))
    if te and latent:
        family["qk_layernorm"] = True  # otherwise the TransformerEngine spec silently omits the two latent norms
    of_family = MLATransformerConfig if latent else TransformerConfig
    dims = dims_of(hf)
    arguments = dict(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=dims.heads,
        num_query_groups=dims.kv_heads,
        kv_channels=dims.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[family.pop("activation_func")],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        virtual_pipeline_model_parallel_size=trainer.virtual_pipeline if trainer.virtual_pipeline > 1 else None,
        num_layers_in_first_pipeline_stage=trainer.split.first,
        num_layers_in_last_pipeline_stage=trainer.split.last,
        account_for_embedding_in_pipeline_split=trainer.split.embedding,
        account_for_loss_in_pipeline_split=trainer.split.loss,
        context_parallel_size=trainer.context_parallel,
        expert_model_parallel_size=trainer.expert_parallel,
        expert_tensor_parallel_size=trainer.expert_tensor_parallel,  # None: equal to tensor_parallel
        sequence_parallel=trainer.sequence_parallel,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,  # gradients are summed over ranks; the loss includes the step's denominator
        moe_token_dispatcher_type="alltoall"
        if alltoall
        else "flex",  # the default forbids variable_seq_lengths, even in dense models
        **({} if alltoall else {"moe_flex_dispatcher_backend": trainer.token_dispatcher}),
        perform_initialization=True,  # turning it off leaves tensor_model_parallel unset, and grad norms wrong under TP
        use_cpu_initialization=False,
        transformer_impl="transformer_engine" if te else "local",
        moe_grouped_gemm=te and "num_moe_experts" in family and not separate,
        gradient_accumulation_fusion=False,  # layers.py turns it on where it needs no Apex
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=te and "num_moe_experts" in family,  # of grouped experts: other MLPs are GatedMLP
        bias_dropout_fusion=False,
        apply_rope_fusion=te and not latent,  # the fused kernel of latent attention takes no positions
        batch_p2p_comm=False,
        overlap_p2p_comm=False,
        **({"fp8": trainer.fp8.format, "fp8_recipe": trainer.fp8.recipe} if trainer.fp8 else {}),
        **recompute.arguments(trainer),
        **family,
    )
    config = of_family(**arguments)
    turned = rotary(hf)
    if "attention_factor" in family_of(hf).allows and turned["rope_type"] == "yarn" and not unscaled(turned):
        config.yarn_rotary_scaling_factor = turned["factor"]  # Megatron then scales sines and cosines
    return config


class HeadNorm(torch.nn.RMSNorm):
    """The norm of queries and keys. Megatron finds it by name, not by a mark, when it sums its gradient over TP."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x. Weights that are centered on zero are what their factors, in float32, have beyond one."""
        if not self.centered:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float() + 1.0, self.eps).to(x.dtype)


class RMSNorm(HeadNorm):
    """The norm of hidden states, marked for sequence parallelism (WrappedTorchNorm does not support it)."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x. The view makes autograd add the two gradients of x, where norms are not fused, before that of
        the residual, as it does where the norm is recomputed: otherwise sums would differ in the last bit."""
        return super().forward(x.view_as(x))


class WideNorm(HeadNorm):
    """The norm of the queries or keys of all heads as one vector. Every rank holds its whole weight, and uses the part
    of its own heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, heads * hidden_size, eps=eps)
        self.heads, self.ranks = heads, config.tensor_model_parallel_size

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [N, 1, heads of this rank, d]. Some ranks have the same heads where there are more of them than
        heads."""
        here, exact = x.shape[-2], x.float()
        squares = reduce_from_tensor_model_parallel_region(exact.square().sum((-2, -1), keepdim=True))
        squares = copy_to_tensor_model_parallel_region(squares)  # the gradient, too, is summed over ranks
        part = parallel_state.get_tensor_model_parallel_rank() * (self.heads // here) // self.ranks
        weight = self.weight.view(self.heads, -1)[part * here : (part + 1) * here]
        assert self.eps is not None
        mean = squares / (self.ranks * here * x.shape[-1])
        return (exact * torch.rsqrt(mean + self.eps) * weight.float()).to(x.dtype)


def _norm_output(linear: Any, config: TransformerConfig) -> None:
    """Norm what a linear layer gives, with what is added to it."""
    linear.post_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
    linear.register_forward_hook(lambda module, _, found: (module.post_layernorm(found[0]), *found[1:]))


class PredictingRows(ColumnParallelLinear):
    """Megatron's output layer, which holds the weight but computes no logits: trainer/head.py does."""

    rows: Tensor

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Select the rows that predict a token: [N (/ tp under sequence parallelism), 1, H] -> [U, 1, H]."""
        if self.config.sequence_parallel:  # the head's gradient is summed over all ranks already
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden.index_select(0, self.rows), None


class ExactBiasRouter(TopKRouter):
    """A router that keeps the expert selection bias in float32 when the model is cast, so that saving the checkpoint
    again gives the same bits."""

    expert_bias: Tensor | None

    def _apply(self, fn: Any, recurse: bool = True) -> ExactBiasRouter:
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None:
            self.expert_bias = before.to(self.weight.device)
        return self


def build_model(
    hf: dict[str, Any],
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    separate: bool = False,
) -> GPTModel:
    """Build this rank's pipeline stage with random weights, or its chunk `vp_stage` under virtual pipelining. With
    `separate`, its linear layers are modules of their own, without norms."""
    te, family = config.transformer_impl == "transformer_engine", family_of(hf)
    norms_after = family.has(".post_layernorm.weight")
    if te:
        spec = transformer_engine_spec(config, vp_stage, separate=separate or norms_after)
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        spec.layer_norm = RMSNorm
    if not te or norms_after:
        for layer in spec.layer_specs:
            _use_own_modules(layer, config, hf)
    stage = {"ignore_virtual": False, "vp_stage": vp_stage}
    model = GPTModel(
        config,
        spec,
        vocab_size=padded_vocab(hf["vocab_size"], config.tensor_model_parallel_size),
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        parallel_output=True,
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        rotary_base=rotary(hf)["rope_theta"],
        rotary_percent=rotary(hf)["partial_rotary_factor"],
        vp_stage=vp_stage,
    )
    axes = rope_axes(hf)
    model.ropes = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.__class__ = PositionRope  # same buffers, another forward
            module.inv_freq = frequencies(hf, module.inv_freq)
            module.axes = None if axes is None else torch.tensor(axes, device=module.inv_freq.device)
        elif isinstance(module, TopKRouter):
            module.__class__ = ExactBiasRouter
        elif type(module) is MLP:
            module.__class__ = GatedMLP
            if config.add_bias_linear and module.linear_fc2.is_expert:
                module.linear_fc2.bias.sequence_parallel = False  # Megatron would add those of other experts
        elif isinstance(module, MLASelfAttention) and not te:
            sum_rotary_gradients(module)
    if norms_after:
        for layer in model.decoder.layers:
            _norm_output(layer.self_attention.linear_proj, config)
            _norm_output(layer.mlp.linear_fc2, config)
    if (theta := family.local_theta(hf)) is not None:
        rotate_locally(model, theta)
    if model.post_process:
        model.output_layer.__class__ = PredictingRows
    if model.pre_process and (scale := family.embedding_scale(hf)) != 1.0:
        factor = torch.tensor(scale, dtype=config.params_dtype).item()  # transformers rounds it, too
        model.embedding.word_embeddings.register_forward_hook(lambda _, __, words: words * factor)
    if te:
        adapt(model)
    return model


def _use_own_modules(layer: ModuleSpec, config: TransformerConfig, hf: dict[str, Any]) -> None:
    """Use attention over packs, and norms that work with sequence parallelism."""
    family, parts, attention = family_of(hf), layer.submodules, layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm if family.has(".input_layernorm.weight") else IdentityOp
    if config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = RMSNorm  # of the whole latent vector, not of a rank's heads
    elif family.wide_norms:
        attention.q_layernorm = ModuleSpec(WideNorm, params={"heads": config.num_attention_heads})
        attention.k_layernorm = ModuleSpec(WideNorm, params={"heads": config.num_query_groups})
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = HeadNorm


def padded_vocab(vocab: int, tp: int) -> int:
    """Round the vocabulary up so that every rank has the same number of columns."""
    return -(-vocab // tp) * tp
