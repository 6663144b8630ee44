"""Checkpoints do not depend on the layout that wrote them, and any layout continues from them identically.

Each chain starts with a run in the first layout, which trains, writes a checkpoint and trains once more. Each next
layout loads the checkpoint of the previous one, writes it again, and trains the same step.
"""

from __future__ import annotations

import shutil
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.checkpoints.torch_dist import read_metadata
from asyncrl.config import load
from asyncrl.extensions.convert.cli import main
from asyncrl.extensions.lora.peft_config import adapter_folders
from asyncrl.extensions.lora.weights import adapter_of
from asyncrl.weights.folder import HFFolder
from tests.fakes import compose_values
from tests.integration.checkpoints import ALGO, VERSION, launch, written
from tests.integration.ranks import run_ranks
from tests.integration.updates import LAYOUTS, Outcome, write_models
from tests.weights.models import tensors

pytestmark = pytest.mark.integration

CHAINS: dict[str, list[str]] = {
    "llama-tied": ["single", "pp2-uneven", "tp2-sp-cp2", "dp2", "single"],
    "qwen3-moe": ["ep2", "pp2-vpp2-ep2", "tp2-sp-ep2", "single", "etp2-ep2"],
    "glm4-moe": ["pp2-vpp2-ep2", "tp2-sp-ep2"],
}
CHANGED = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("layouts"))


@cache
def _chain(folder: Path, model: str) -> list[Outcome]:
    return [launch(folder, model, number, LAYOUTS[layout]) for number, layout in enumerate(CHAINS[model])]


@pytest.mark.parametrize("model", CHAINS)
def test_a_checkpoint_is_the_same_whichever_layout_wrote_it(folder: Path, model: str) -> None:
    links = _chain(folder, model)
    first = written(CheckpointStore(folder / model / "link-0").path(VERSION))
    moments = [tensor for key, tensor in first.items() if "/optimizer.exp_avg." in key]
    assert any(tensor.abs().sum() > 0 for tensor in moments)
    assert not any(tensor.isnan().any() for tensor in first.values())
    assert len(first) > 3 * len(moments) - 5  # weights and two moments; some buffers have none
    for number in range(1, len(links)):
        path = CheckpointStore(folder / model / f"link-{number}").path(VERSION)
        again = written(path)
        assert again.keys() == first.keys()
        assert [key for key in first if not torch.equal(first[key], again[key])] == []
        assert (path / "trainer.json").read_bytes() == (
            CheckpointStore(folder / model / "link-0").path(VERSION) / "trainer.json"
        ).read_bytes()
        manifest.verified(path)


@pytest.mark.parametrize("model", CHAINS)
def test_training_goes_on_as_if_nothing_had_happened(folder: Path, model: str) -> None:
    """The same layout continues bit for bit. In another, sums are computed in another order."""
    (figures, weights), *others = _chain(folder, model)
    for layout, (mine, my_weights) in zip(CHAINS[model][1:], others, strict=True):
        same = layout == CHAINS[model][0]
        for name in ("loss", "grad_norm", "lr", "logprob_gap/mean", "sample_reuse/groups", "critic/loss"):
            if name in figures[0]:
                assert mine[0][name] == (
                    figures[0][name] if same else pytest.approx(figures[0][name], rel=2e-4, abs=1e-5)
                ), name
        for name, tensor in my_weights.items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=0 if same else 1e-5)


def test_in_bfloat16_the_masters_go_on(folder: Path) -> None:
    """One rank without a distributed optimizer is followed by two with one, and float32 by bfloat16."""
    half = {"dtype": "bfloat16"}
    settings = [half, {**half, **LAYOUTS["dp2"]}, {**half, **LAYOUTS["tp2"]}, {}]
    model = "qwen3-untied"
    ALGO[model] = {}
    links = [launch(folder, model, number, trainer) for number, trainer in enumerate(settings)]
    contents = [
        written(CheckpointStore(folder / model / f"link-{number}").path(VERSION)) for number in range(len(settings))
    ]
    for again in contents[1:]:
        assert [key for key, tensor in contents[0].items() if not torch.equal(tensor, again[key])] == []
    masters = contents[0]["policy/embedding.word_embeddings.weight"]
    assert masters.dtype == torch.float32
    assert not torch.equal(masters, masters.bfloat16().float())
    for figures, _ in links[1:]:
        assert figures[0]["loss"] == pytest.approx(links[0][0][0]["loss"], rel=0.05, abs=1e-2)


@pytest.mark.parametrize(
    ("model", "layouts", "roles"),
    [
        ("qwen3-untied", ["single", "tp2", "pp2", "dp2"], {"player": {}, "solver": {"adapter": "solver"}}),
        ("qwen3-moe", ["ep2", "tp2-sp-ep2", "single"], {}),
    ],
)
def test_adapter_checkpoint_holds_them_alone_for_any_layout(
    folder: Path,
    model: str,
    layouts: list[str],
    roles: dict[str, Any],
) -> None:
    names = ["policy", "solver"] if roles else ["policy"]

    def link(number: int, trainer: dict[str, Any], name: str = model, chain: str = "lora", **lora: Any) -> Outcome:
        trainer = {"dtype": "float32", **trainer}
        return launch(folder, name, number, trainer, {"rank": 4, "save_merged": True, **lora}, chain, roles)

    steps = [link(number, LAYOUTS[layout])[0][0] for number, layout in enumerate(layouts)]
    paths = [CheckpointStore(folder / model / f"lora-{number}").path(VERSION) for number in range(len(layouts))]
    first, *others = [written(path) for path in paths]
    weights = {key for key in first if "/optimizer." not in key}
    for adapter in names:
        moments = [key for key in first if ".exp_avg." in key and adapter_of(key) == adapter]
        assert len(moments) == len(weights) / len(names)
        assert sum(first[key].abs().sum() for key in moments) > 0
    assert len(first) == 3 * len(weights)
    held = 4 * sum(tensor.numel() for tensor in first.values())
    stored = sum(file.stat().st_size for file in paths[0].glob("policy/*.distcp"))
    chunks = len(read_metadata(paths[0] / "policy").storage_data)
    assert held < stored < held + 2000 * chunks  # torch wraps each of the tiny tensors
    for again in others:
        assert again.keys() == first.keys()
        assert [key for key in first if not torch.equal(first[key], again[key])] == []
    for step in steps[1:]:
        assert step["loss"] == pytest.approx(steps[0]["loss"], rel=2e-4, abs=1e-5)
        assert step["grad_norm"] == pytest.approx(steps[0]["grad_norm"], rel=2e-4, abs=1e-5)

    # its conversion is what a run starts from, and exports again
    base, converted = str(folder / model / "model"), folder / model / "converted"
    assert main(["to-peft", str(paths[-1]), str(converted), "--model", base]) == 0
    whole = ["to-hf", str(paths[-1] / "policy"), str(folder / model / "whole"), "--model", base]
    assert main(whole) == (1 if roles else 0)  # of several adapters one must be chosen
    still = {"optimizer": {"lr": 1e-30}}
    link(0, {**LAYOUTS[layouts[0]], **still}, chain="from", path=str(converted))
    exported = adapter_folders(folder / model / "out-from-0", names)
    by_megatron = adapter_folders(folder / model / "out-from-0-merged", names)
    merged = {name: folder / model / f"merged-{name}" for name in names}
    for name, given in adapter_folders(converted, names).items():
        assert main(["merge", base, str(given), str(merged[name])]) == 0
        check_equal(tensors(exported[name]), tensors(given))
        for key, tensor in tensors(merged[name]).items():
            torch.testing.assert_close(tensors(by_megatron[name])[key], tensor, rtol=0, atol=1e-6)
        if not roles:
            check_equal(tensors(folder / model / "whole"), tensors(merged[name]))
    changed_by = [tensors(path)[CHANGED] for path in (Path(base), *merged.values())]
    assert not any(torch.equal(one, two) for one, two in combinations(changed_by, 2))
    if roles:
        check_peft(Path(base), exported, merged)

    # another base is refused
    other = shutil.copytree(folder / model, folder / f"{model}-other")
    held_by_base = tensors(other / "model")
    held_by_base[CHANGED][0, 0] += 1e-3
    save_file(held_by_base, other / "model/model.safetensors")
    with HFFolder(Path(base)) as one, HFFolder(other / "model") as two:
        assert {manifest.read(path).base for path in paths} == {one.digest()}
        with pytest.raises(AssertionError, match=f"base with the hash {one.digest()}, .* have {two.digest()}"):
            link(1, {}, name=other.name)
    assert main(["to-hf", str(paths[-1]), str(folder / "refused"), "--model", str(other / "model")]) == 1


def check_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Assert that tensors are equal to the bit."""
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def check_peft(base: Path, adapters: dict[str, Path], merged: dict[str, Path]) -> None:
    """Assert that PEFT computes with each adapter what the merged weights compute."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def load(path: Path) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    with torch.no_grad():
        for name, path in adapters.items():
            adapted, whole = PeftModel.from_pretrained(load(base), path), load(merged[name])
            found, wanted = (one(torch.arange(10)[None]).logits for one in (adapted, whole))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_disk_that_is_full_costs_a_checkpoint_and_nothing_else(folder: Path) -> None:
    """All ranks skip the checkpoint, whichever rank's disk is full.

    Earlier checkpoints stay complete, and the next is written.
    """
    raw = compose_values("experiment=tiny", "checkpoint.every=1")
    raw["trainer"].update(LAYOUTS["dp2"])
    (folder / "llama-tied" / "config.json").write_text(load(raw).model_dump_json())
    run_ranks("recovery:full_disk", folder / "llama-tied", world=2)
