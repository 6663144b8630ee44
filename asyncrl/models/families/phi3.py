"""Phi-4 of 14B: a Llama whose files hold queries, keys and values, and gate and up, in one.

Others of this class are refused: Phi-3 has a sliding window or longrope, and Phi-4-mini has longrope.
"""

from asyncrl.models.family import Family, Layout, Serving
from asyncrl.models.parts import BODY, OUT_PROJECTION, layer

FAMILY = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    weights=(
        *BODY,
        layer("self_attention.linear_qkv.weight", Layout.FUSED_QKV, "self_attn.qkv_proj.weight"),
        *OUT_PROJECTION,
        layer("mlp.linear_fc1.weight", Layout.FUSED_GATE_UP, "mlp.gate_up_proj.weight"),
        layer("mlp.linear_fc2.weight", Layout.DOWN, "mlp.down_proj.weight"),
    ),
    adapters=False,
    serving=Serving(head_everywhere=True, tied_stages=False),
    tiny={"sliding_window": None},
)
