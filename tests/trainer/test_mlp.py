"""The gated activation and its gradient are autograd's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asyncrl.platforms import here

here().prepare_trainer()

from asyncrl.trainer.mlp import CACHED_ROWS, swiglu  # noqa: E402


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
