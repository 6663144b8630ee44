"""TransformerEngine's layers compute and train what Megatron's local ones do: gradients, updates, names, checkpoints.

TransformerEngine's Python modules are real; its kernels are those of stand_in.py. Real ranks communicate over gloo.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.models.tiny import write_random_model
from tests.fakes import tiny_values
from tests.integration import checkpoints
from tests.integration import families as all_families
from tests.integration.ranks import run_ranks
from tests.integration.updates import LAYOUTS, Outcome, drawn_groups, launch, write_models
from tests.te_stub.settings import BFLOAT16, FP8, TE

LOCAL = {"layers": "local"}
MODELS = ("qwen3-untied", "qwen3-moe", "deepseek")


# --- one pass -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a folder with a model of every family, and a function that runs all of them in a layout."""
    for layout, (options, models) in all_families.LAYOUTS.items():
        all_families.LAYOUTS[layout] = options, [name for name in models if name not in all_families.WITHOUT_ETP]
    made = all_families.written(tmp_path_factory.mktemp("families"))

    @cache
    def run(layout: str) -> None:
        all_families.launch(made, layout, TE)

    return made, run


CASES = [case for case in all_families.CASES if case[1] not in all_families.WITHOUT_ETP]  # they have local layers


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_logits_and_gradients_are_those_of_transformers(layout: str, name: str, families: Any) -> None:
    made, run = families
    run(layout)
    all_families.check(made, layout, name)


def test_the_stand_in_is_called_for_every_kind_of_layer(families: Any) -> None:
    """Otherwise these tests would compare the local layers with themselves. Both specs have the same parameters."""
    made, run = families
    run("single")
    calls = run_ranks("tests.te_stub.ranks:layers", made, world=1)[0]
    calls = {name: set(called) - {"get_num_cublas_streams"} for name, called in calls.items()}  # asked once
    products = {"generic_gemm", "rmsnorm_fwd", "rmsnorm_bwd"}
    grouped = {"te_general_grouped_gemm"}
    rotary = {"fused_rope_forward", "fused_rope_backward"}
    assert calls["qwen3"] == products | rotary
    assert calls["qwen3_moe"] == products | rotary | grouped
    assert calls["deepseek_v3"] == products | grouped


# --- updates --------------------------------------------------------------------------------------------------------

FIGURES = ("loss", "grad_norm", "entropy", "logprob_gap/mean", "logprob_gap/max", "tokens/trained")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("layouts"))


@cache
def updated(folder: Path, layout: str, **settings: Any) -> dict[str, Outcome]:
    name = "-".join([layout, *map(str, settings.values())])
    models = [model for model in MODELS if (layout, model) in CASES]
    return launch(folder, name, models, {**LAYOUTS[layout], **settings})


CASES = [
    *((layout, "qwen3-untied") for layout in ("single", "tp2", "tp2-sp", "pp2", "dp2", "cp2")),
    *((layout, "qwen3-moe") for layout in ("single", "tp2-sp-etp1", "pp2", "ep2", "tp2-sp-ep2", "etp2-ep2")),
    *((layout, "deepseek") for layout in ("single", "tp2-sp-ep2", "pp2-vpp2-ep2")),
]


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_two_updates_are_those_of_the_local_layers(folder: Path, layout: str, model: str) -> None:
    """The tolerances are those of test_trainer.py between layouts. Both sides publish the same names."""
    mine, my_weights = updated(folder, layout, **TE)[model]
    theirs, their_weights = updated(folder, layout, **LOCAL)[model]
    for one, other in zip(mine, theirs, strict=True):
        for name in FIGURES:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=2e-6), name
    assert my_weights.keys() == their_weights.keys()
    for name, tensor in my_weights.items():
        torch.testing.assert_close(tensor, their_weights[name], rtol=0, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}")


@pytest.mark.parametrize("layout", ["single", "dp2", "ep2", "tp2-sp-ep2"])
def test_two_updates_in_parts_are_those_of_whole_batches(folder: Path, layout: str) -> None:
    for model, (mine, my_weights) in updated(folder, layout, **TE, batch_parts=3).items():
        theirs, their_weights = updated(folder, layout, **TE)[model]
        for one, other in zip(mine, theirs, strict=True):
            for name in FIGURES:
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=2e-6), (model, name)
        for name, tensor in my_weights.items():
            torch.testing.assert_close(tensor, their_weights[name], rtol=0, atol=1e-5, msg=f"{model} {name}")


@pytest.mark.parametrize(("layout", "model"), [("single", m) for m in MODELS] + [("tp2-sp-ep2", m) for m in MODELS[1:]])
def test_updates_in_bfloat16_are_those_of_the_local_layers(folder: Path, layout: str, model: str) -> None:
    mine, my_weights = updated(folder, layout, **TE, **BFLOAT16)[model]
    theirs, their_weights = updated(folder, layout, **LOCAL, **BFLOAT16)[model]
    for one, other in zip(mine, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.02, abs=1e-3)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)
    assert my_weights.keys() == their_weights.keys()
    for name, tensor in my_weights.items():
        torch.testing.assert_close(tensor, their_weights[name], rtol=2e-2, atol=1e-3)


ADAPTERS = {"lora": {**tiny_values()["trainer"]["lora"], "rank": 4}}


@pytest.mark.parametrize(
    ("layout", "models"), [("single", MODELS), ("tp2-sp", MODELS[:1]), ("tp2-sp-ep2", MODELS[1:]), ("pp2", MODELS[:2])]
)
def test_two_updates_of_adapters_are_those_of_the_local_layers(
    folder: Path,
    layout: str,
    models: tuple[str, ...],
) -> None:
    """Adapters read what the norm before their layer gives, which TransformerEngine would keep to itself."""
    mine = launch(folder, "adapted-te", list(models), {**LAYOUTS[layout], **ADAPTERS, **TE})
    theirs = launch(folder, "adapted", list(models), {**LAYOUTS[layout], **ADAPTERS, **LOCAL})
    for model in models:
        (figures, weights), (others, other_weights) = mine[model], theirs[model]
        for one, other in zip(figures, others, strict=True):
            assert one["grad_norm"] > 0
            for name in FIGURES:
                assert one[name] == pytest.approx(other[name], rel=1e-4, abs=2e-6), name
        assert weights.keys() == other_weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, other_weights[name], rtol=0, atol=1e-5, msg=name)


WIDE = {"vocab": 257, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96, "layers": 2, "tied": False}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write models whose matrices FP8 products can share between two ranks."""
    made = tmp_path_factory.mktemp("wide")
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for arch, fields in (("qwen3", {}), ("qwen3_moe", {**experts, "norm_topk_prob": True})):
        write_random_model(made / arch / "model", arch, **WIDE, seed=1, dtype="float32", fields=fields)
        groups = msgspec.msgpack.encode(drawn_groups(seed=3))
        (made / arch / "groups.msgpack").write_bytes(groups)
    return made


@pytest.mark.parametrize(
    ("layout", "models"),
    [("single", ["qwen3", "qwen3_moe"]), ("tp2-sp", ["qwen3"]), ("cp2", ["qwen3"]), ("tp2-sp-ep2", ["qwen3_moe"])],
)
@pytest.mark.parametrize("trained", [{}, ADAPTERS], ids=["whole", "adapters"])
def test_updates_in_fp8_are_near_those_in_bfloat16(
    wide: Path, layout: str, models: list[str], trained: dict[str, Any]
) -> None:
    """Weights stay in bfloat16, and every product has rows that FP8 can sum: the stand-in refuses others."""
    mine = launch(wide, "fp8", models, {**LAYOUTS[layout], **TE, **FP8, **trained})
    theirs = launch(wide, "bfloat16", models, {**LAYOUTS[layout], **TE, **BFLOAT16, **trained})
    for model in models:
        (figures, weights), (others, other_weights) = mine[model], theirs[model]
        assert figures[0]["grad_norm"] != others[0]["grad_norm"]
        for one, other in zip(figures, others, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=0.03)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.04)
        assert weights.keys() == other_weights.keys()
        for name, tensor in weights.items():
            assert tensor.dtype == other_weights[name].dtype
            torch.testing.assert_close(tensor, other_weights[name], rtol=0, atol=4e-3)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("qwen3-untied", ["single", "tp2-sp", "dp2"]),
        ("qwen3-moe", ["single", "tp2-sp-ep2", "ep2"]),
        ("deepseek", ["single", "tp2-sp-ep2", "pp2-vpp2-ep2"]),
    ],
)
def test_checkpoint_of_one_kind_loads_into_the_other_bitwise(
    folder: Path,
    model: str,
    layouts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first link trains with local layers and writes a checkpoint. The others load that of the link before, with
    the other kind of layers, write it again, and train the same step."""
    monkeypatch.setitem(checkpoints.ALGO, model, {})
    kinds = [LOCAL, TE, LOCAL, TE]
    links = [
        checkpoints.launch(folder, model, number, {**LAYOUTS[layout], **kind})
        for number, (layout, kind) in enumerate(zip([*layouts, "single"], kinds, strict=True))
    ]
    contents = [
        checkpoints.written(CheckpointStore(folder / model / f"link-{number}").path(checkpoints.VERSION))
        for number in range(4)
    ]
    assert any(tensor.abs().sum() > 0 for key, tensor in contents[0].items() if "/optimizer.exp_avg." in key)
    for again in contents[1:]:
        assert again.keys() == contents[0].keys()
        assert [key for key, tensor in contents[0].items() if not torch.equal(tensor, again[key])] == []
    for figures, weights in links[1:]:
        for name in ("loss", "grad_norm"):
            assert figures[0][name] == pytest.approx(links[0][0][0][name], rel=2e-4, abs=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, links[0][1][name], rtol=0, atol=1e-5)
