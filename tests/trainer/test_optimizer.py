"""An optimizer that starts anew makes the update of a new one, and its step counts are where it reads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.platforms import here

here().prepare_trainer()

from asyncrl.trainer.moments import set_step_count  # noqa: E402
from asyncrl.trainer.optimizer import NetworkOptimizer  # noqa: E402


class AdamWithStepsOfGroups(torch.optim.Optimizer):
    """Adam that counts its steps in the parameter group, as the FusedAdam of Apex and TransformerEngine does."""

    def __init__(self, params: list[torch.Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = (1 - beta ** group["step"] for beta in group["betas"])
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
                square = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["betas"][0])
                square.lerp_(parameter.grad.square(), 1 - group["betas"][1])
                parameter -= group["lr"] * (mean / first) / ((square / second).sqrt() + group["eps"])


def update(optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> torch.Tensor:
    """The change that one step makes."""
    (parameter,) = optimizer.param_groups[0]["params"]
    before, parameter.grad = parameter.detach().clone(), gradient.clone()
    optimizer.step()
    return parameter.detach() - before


@pytest.mark.parametrize("kind", [AdamWithStepsOfGroups, torch.optim.AdamW])
def test_first_update_after_a_reset_is_a_new_optimizers(kind: Any) -> None:
    gradients = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    old, new = (kind([torch.nn.Parameter(torch.zeros(7))], lr=0.1) for _ in range(2))
    for gradient in gradients[1:]:
        update(old, gradient)
    network = NetworkOptimizer.__new__(NetworkOptimizer)
    network._optimizer = SimpleNamespace(optimizer=old, reload_model_params=lambda: None)
    network.start_anew()
    with torch.no_grad():
        old.param_groups[0]["params"][0].zero_()
    assert torch.equal(update(old, gradients[0]), update(new, gradients[0]))
    assert torch.equal(update(old, gradients[1]), update(new, gradients[1]))


@pytest.mark.parametrize("fused", [False, True])
def test_step_counts_are_on_device_only_if_fused(fused: bool) -> None:
    """torch's other implementations read them on the host, which would wait for the device once per parameter."""
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    moment = SimpleNamespace(device=parameter.device, is_cuda=True)
    state: dict[str, Any] = {"exp_avg": moment, "exp_avg_sq": moment}
    set_step_count(optimizer, state, 4, fused=fused)
    assert state["step"].device.type == ("meta" if fused else "cpu")
