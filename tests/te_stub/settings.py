"""Settings of a trainer with TransformerEngine's layers."""

from __future__ import annotations

TE = {"layers": "transformer_engine"}
BFLOAT16 = {"dtype": "bfloat16"}
FP8 = {**BFLOAT16, "fp8": {"format": "hybrid", "recipe": "tensorwise"}}
