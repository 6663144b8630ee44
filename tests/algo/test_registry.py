"""Algorithms by name and by import path, with their settings checked before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.algo.correction import CORRECTIONS
from asyncrl.algo.loss import LOSSES
from asyncrl.config import load
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch import compose
from asyncrl.launch.main import CONF
from asyncrl.settings import Choice
from asyncrl.trainer.objective import Objective
from tests.algo.tables import make
from tests.fakes import compose_values, tiny_config

OWN = """
from asyncrl.algo.loss import LOSSES, LossTraits


def scaled(logprobs, rows, *, scale: float = 1.0):
    return -scale * rows.advantages * logprobs


@LOSSES.register(LossTraits(corrects=True))
def correcting(logprobs, rows):
    return -rows.advantages * logprobs


def above(table, *, least: float = -1.0):
    return table.keep & (table.advantages > least)


@LOSSES.register(LossTraits(selection=above))
def selecting(logprobs, rows, *, scale: float = 1.0):
    return -scale * rows.advantages * logprobs


def returning(logprobs, rows, *, what: str = ""):
    return {"mean": logprobs.mean(), "column": logprobs[:, None], "some": logprobs[1:], "number": 0.5}.get(what)
"""


@pytest.fixture(autouse=True)
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of a user, which no later test shall find among the built-in ones."""
    monkeypatch.setattr(LOSSES, "_functions", dict(LOSSES._functions))
    (tmp_path / "own_losses.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(compose_values(*overrides))
    return caught.value


def test_settings_of_an_algorithm_are_complete() -> None:
    config = load(compose_values("algo.loss.clip_low=0.1"))
    assert config.model_dump()["algo"]["loss"] == {"name": "ppo", "clip_low": 0.1, "clip_high": 0.28, "dual_clip": None}
    assert load(config.model_dump()) == config


def test_another_algorithm_replaces_the_settings_too() -> None:
    config = load(compose_values("algo.loss.clip_low=0.1", "algo.loss=cispo", "algo.loss.clip_high=1"))
    assert config.algo.loss == Choice(name="cispo", clip_high=1.0)
    assert load(compose_values("algo.loss={name: cispo, clip_high: 0.5}")).algo.loss.settings == {"clip_high": 0.5}
    assert load(compose_values("algo.correction=null")).algo.correction is None


def test_command_line_has_the_settings_of_an_algorithm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["algo.loss=cispo", "algo.loss.clip_high=1", f"run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["asyncrl-train", *words])
    (composed,) = compose.compose(CONF)
    assert composed.values["algo"]["loss"] == {"name": "cispo", "clip_high": 1}


@pytest.mark.parametrize(
    ("override", "field", "remedy"),
    [
        ("algo.loss=gppo", "algo.loss", "ppo, gspo,"),
        ("algo.loss.clip=1", "algo.loss.clip", "ppo has the settings clip_low, clip_high, dual_clip"),
        ("algo.loss.clip_low=-1", "algo.loss.clip_low", "greater than or equal to 0"),
        ("algo.loss.clip_low=abc", "algo.loss.clip_low", "valid number"),
        ("algo.advantage.k=2", "algo.advantage.k", "grpo has the settings none"),
        ("algo.correction=tiss", "algo.correction", "tis, tis_sequence, icepop"),
    ],
)
def test_unknown_name_and_setting_are_refused_by_field(override: str, field: str, remedy: str) -> None:
    error = refusal(override)
    assert error.field == field
    assert remedy in error.remedy


def test_own_loss_has_settings_unseen_by_the_launcher() -> None:
    config = load(compose_values("algo.loss=own_losses:scaled", "algo.loss.scale=3.0"))
    assert "own_losses" not in sys.modules
    loss = LOSSES.find(config.algo.loss)
    rows = make([2], [0.0], advantages=[1.0, -1.0])
    assert loss(torch.tensor([-1.0, -2.0]), rows).tolist() == [3.0, -6.0]
    wrong = Choice(name="own_losses:scaled", scal=1.0)
    with pytest.raises(ConfigError, match=r"algo.loss.scal: got 1.0. own_losses:scaled has the settings scale"):
        LOSSES.find(wrong)
    with pytest.raises(ConfigError, match=r"algo.loss: got 'own_losses:gone'. Must be an import path"):
        LOSSES.find(Choice(name="own_losses:gone"))


def test_settings_of_a_losss_selection_are_those_of_the_loss() -> None:
    loss = LOSSES.find(Choice(name="own_losses:selecting", least=0.0))
    assert loss.settings == {"scale": 1.0, "least": 0.0}
    rows = make([2], [0.0], advantages=[1.0, -0.5])
    assert loss.call(loss.traits.selection, rows).tolist() == [True, False]
    assert loss(torch.tensor([-1.0, -2.0]), rows).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("what", ["mean", "column", "some", "number", "nothing"])
def test_values_of_other_shapes_than_the_tokens_are_refused(what: str) -> None:
    """A mean would be broadcast, and train something else."""
    loss = LOSSES.find(Choice(name="own_losses:returning", what=what))
    rows = make([3], [0.0], advantages=[1.0, -1.0, 0.0])
    with pytest.raises(AsyncRLError, match=r"own_losses:returning must return a tensor .*Size\(\[3\]\), and returned"):
        loss(torch.tensor([-1.0, -2.0, -3.0]), rows)


def test_claims_of_an_own_loss_are_checked_by_the_trainer() -> None:
    config = tiny_config(**{"algo.loss": "own_losses:correcting"})
    with pytest.raises(ConfigError, match=r"algo.correction: got 'tis'. .*already weights this gap"):
        Objective(config.algo, config.rollout)
    other = tiny_config(**{"algo.loss": "own_losses:correcting", "algo.correction": None})
    Objective(other.algo, other.rollout)


def test_settings_are_checked_without_torch() -> None:
    code = "import sys, asyncrl.config; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_every_built_in_algorithm_is_found_with_its_defaults() -> None:
    for registry in (ADVANTAGES, CORRECTIONS, LOSSES):
        for name in registry:
            assert registry.find(registry.completed(Choice(name=name))).function
