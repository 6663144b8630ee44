"""Ministral 3, the text model: a Llama with yarn, whose queries grow with their position.

They do so from original_max_position_embeddings on, where trainers and SGLang differ from transformers: no position
reaches it.
"""

from asyncrl.models.family import Family, Serving
from asyncrl.models.parts import LLAMA, rotary

FAMILY = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    weights=LLAMA,
    serving=Serving(
        head_everywhere=True,
        tied_stages=False,
        longest=lambda hf: rotary(hf).get("original_max_position_embeddings"),
    ),
    tiny={
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.3,
        },
    },
)
