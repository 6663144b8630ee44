"""The gated activation and its gradient are autograd's, and norms those of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from asyncrl.platforms import here

here().prepare_trainer()

from asyncrl.trainer.mlp import CACHED_ROWS, swiglu  # noqa: E402
from asyncrl.trainer.model import HeadNorm  # noqa: E402


@pytest.mark.parametrize("rows", [0, 5, 2 * CACHED_ROWS + 3])
def test_swiglu_has_the_values_and_gradients_of_its_definition(rows: int) -> None:
    x = torch.randn(rows, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    gate, up = plain.chunk(2, -1)
    expected, found = F.silu(gate) * up, swiglu(mine)
    weights = torch.arange(6.0 * rows, dtype=torch.float64).view(rows, 1, 6)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(mine.grad, plain.grad, rtol=0, atol=1e-12)


def test_weights_centered_on_zero_count_in_float32() -> None:
    """One and a weight below its last bit is one in bfloat16."""
    config: Any = SimpleNamespace(params_dtype=torch.bfloat16, layernorm_zero_centered_gamma=True)
    mine, theirs = HeadNorm(config, 64), Gemma3RMSNorm(64, 1e-5)
    weight = torch.full((64,), 2**-9, dtype=torch.bfloat16)
    for norm in (mine, theirs):
        norm.weight.data = weight
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    equal = mine(x) == theirs(x)
    assert equal.float().mean() > 0.99  # sums in another order round a few otherwise
    assert (mine(x) == F.rms_norm(x.float(), (64,), None, 1e-5).bfloat16()).float().mean() < 0.9
