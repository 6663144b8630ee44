"""Real Megatron on CPU, without engines: the update is a function of the batch, whatever the layout."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file

from asyncrl.config import load
from asyncrl.launch.main import CONF
from asyncrl.models.tiny import write_random_model
from asyncrl.types import Completion, Group, Trajectory, Turn, VersionSpan

pytestmark = pytest.mark.integration

VOCAB = 257  # odd: every tensor-parallel layout pads it
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "unshared": {"share_prompts": False},
    "small-micro-batches": {"micro_batch_tokens": 40},
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2, "micro_batch_tokens": 60},
    "dp2": {"data_parallel": 2},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
MODELS = {"llama-tied": ("llama", True), "qwen3-untied": ("qwen3", False)}


def _groups(seed: int) -> list[Group]:
    """Groups of unequal prompts and answers, some with a tool's words in between, one without signal."""
    draw = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(draw.randint(low, high))]

    def completion(ids: list[int]) -> Completion:
        return Completion(ids, [-draw.random() * 6 for _ in ids], [VersionSpan(0, 0, len(ids))], "stop")

    head = tokens(10, 10)
    groups = []
    for slot in range(5):
        trajectories = []
        for _ in range(3):
            turns = [Turn([], completion(tokens(1, 7)))]
            if draw.random() < 0.4:
                turns.append(Turn(tokens(2, 4), completion(tokens(1, 5))))
            trajectories.append(Trajectory(turns, 0.5 if slot == 2 else draw.random()))
        groups.append(Group(f"g{slot:08d}", slot, head + tokens(3, 9), trajectories))
    return groups


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model and a batch."""
    arch, tied = request.param
    made = tmp_path_factory.mktemp("layouts")
    write_random_model(
        made / "model",
        arch,
        vocab=VOCAB,
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        intermediate=48,
        tied=tied,
        seed=1,
        dtype="float32",
    )
    (made / "groups.msgpack").write_bytes(msgspec.msgpack.encode(_groups(seed=3)))
    return made


def _update(
    folder: Path, name: str, settings: dict[str, Any]
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Figures of two updates, and the weights after them."""
    with initialize_config_dir(str(CONF), version_base=None):
        raw: Any = OmegaConf.to_container(
            compose("train", ["experiment=tiny", "algo.loss=decoupled_ppo"]), resolve=True
        )
    raw["trainer"].update(settings)
    raw["rollout"]["temperature"] = 0.8
    raw["trainer"]["optimizer"]["eps"] = (
        1e-3  # a smooth update: with a tiny eps, Adam's first steps are signs of rounding
    )
    config = load(raw)
    (folder / "config.json").write_text(config.model_dump_json())
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={config.trainer.world_size}",
    ]
    script = Path(__file__).with_name("rank_update.py")
    done = subprocess.run([*command, str(script), str(folder), name], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    files = sorted((folder / f"out-{name}").glob("*.safetensors"))
    weights = {key: tensor for file in files for key, tensor in load_file(file).items()}
    return json.loads((folder / f"figures-{name}.json").read_text()), weights


@pytest.fixture(scope="module")
def single(folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The reference: one rank, shared prompts, one micro-batch."""
    return _update(folder, "single", {})


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_loss_gradient_and_new_weights_do_not_depend_on_the_layout(folder: Path, single: Any, layout: str) -> None:
    figures, weights = _update(folder, layout, LAYOUTS[layout])
    for mine, reference in zip(figures, single[0], strict=True):
        for name in (
            "loss",
            "grad_norm",
            "entropy",
            "logprob_gap/mean",
            "logprob_gap/max",
            "tokens/trained",
            "correction/capped",
        ):
            assert mine[name] == pytest.approx(reference[name], rel=2e-5, abs=2e-6), name
    assert weights.keys() == single[1].keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(
            tensor, single[1][name], rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_bad_step_leaves_the_weights_and_the_schedule_as_they_were(folder: Path) -> None:
    figures, weights = _update(folder, "bad", {"bad_grad_norm": 1e-9, "on_bad_step": "skip"})
    assert [step["step/bad"] for step in figures] == [1.0, 1.0]
    assert figures[0]["grad_norm"] == figures[1]["grad_norm"] > 1e-9
    start = load_file(folder / "model" / "model.safetensors")
    for name, tensor in start.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=0)


def test_the_loss_is_that_of_transformers_and_plain_autograd(folder: Path, single: Any) -> None:
    """An independent implementation: HF's model, one sequence at a time, the formula written out."""
    from transformers import AutoModelForCausalLM

    from asyncrl.algo.samples import build_samples

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    samples = [s for g in build_samples(_groups(3), advantage="grpo", aggregation="token", longest=3) for s in g]
    loss = torch.zeros(())
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.token_ids])
        logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / 0.8
        every = torch.log_softmax(logits, -1)
        chosen = every.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        mask = torch.tensor(sample.mask)
        weight = (chosen.detach() - torch.tensor(sample.logprobs)).exp().clamp(max=2.0)
        entropy = -(every.exp() * every).sum(-1)
        ratio = (chosen - chosen.detach()).exp()
        loss = loss + sample.token_weight * ((-weight * ratio * sample.advantage - 0.01 * entropy) * mask).sum()
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None))
    assert single[0][0]["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert single[0][0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    transformers_loads_the_export = AutoModelForCausalLM.from_pretrained(folder / "out-single", dtype=torch.float32)
    assert transformers_loads_the_export.config.architectures == model.config.architectures
