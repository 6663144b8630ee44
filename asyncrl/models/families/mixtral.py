"""Mixtral: a Llama with routed experts in every layer."""

from asyncrl.models.family import Family, Layout, Serving
from asyncrl.models.parts import ATTENTION, BODY, count_of_experts, experts, layer, routed, softmax_router

FAMILY = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    weights=(
        *BODY,
        *ATTENTION,
        layer("mlp.router.weight", Layout.WHOLE, "block_sparse_moe.gate.weight"),
        *routed("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    arguments=lambda hf: {
        **experts(hf, count=count_of_experts(hf), inner=hf["intermediate_size"], dense=()),
        **softmax_router(normalized=True),
    },
    serving=Serving(head_everywhere=True, reports_experts=False),
    tiny={"num_local_experts": 4, "num_experts_per_tok": 2},
)
