"""Plans name the split that is fastest in the simulation, and settings that a run accepts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from asyncrl.errors import ConfigError
from asyncrl.extensions.plan import inputs, model_splits
from asyncrl.extensions.plan.cli import main
from asyncrl.extensions.plan.report import assumed, findings, overrides, report, uncertainty
from asyncrl.extensions.plan.search import EPISODES, NEAR, Candidate, Choices, Plan, search
from asyncrl.extensions.plan.search import _steps as steps_of
from asyncrl.extensions.plan.simulation import simulate
from asyncrl.launch.placement import imagined, place
from scripts import sizes

NUMBERS: dict[str, Any] = {
    "gpus": 6,
    "batch_groups": 8,
    "group_size": 4,
    "mean": 400,
    "longest": 3000,
    "max_staleness": 4,
    "per_token": 0.012,
    "per_request": 0.0005,
    "max_running": 16,
    "train_rate": 600,
    "train_fixed": 1,
    "pause": 0.5,
}


def planned(**changes: Any) -> Plan:
    given = inputs.parse(NUMBERS | changes)
    return search(inputs.splits(given), given.workload, Choices.up_to(given.max_staleness), few=3, seeds=2)


def test_bound_costs_no_learning_unless_a_higher_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert inputs.parse({name: value for name, value in NUMBERS.items() if name != "max_staleness"}).max_staleness == 2
    words = [f"{name}={value}" for name, value in (NUMBERS | {"max_staleness": 8}).items()]
    assert main([*words, "--simulate", "0"]) == 0
    assert "docs/algorithms.md" in capsys.readouterr().out  # what a higher one costs
    assert main([*words, "max_staleness=2", "--simulate", "0"]) == 0
    assert "docs/algorithms.md" not in capsys.readouterr().out


def test_no_other_split_is_faster_in_the_simulation() -> None:
    given, plan = inputs.parse(NUMBERS), planned()
    for split in inputs.splits(given):
        if not split.colocated:
            found = simulate(given.workload(0), split.setting(4, 4), 16, 10)
            assert 32 / found.step < 1.1 * plan.best.rate
    assert plan.best.staleness <= 4
    assert abs(plan.best.law_error) < 0.15
    assert plan.best.law.binds in plan.best.law.limits
    assert max(plan.more_engine, plan.more_trainer) > 0


def test_batches_during_publishes_are_planned_within_the_bound() -> None:
    long = {"pause": 10.0, "trainers": 1}
    beside, after = planned(**long, overlap=True), planned(**long)
    assert beside.best.rate > 1.1 * after.best.rate
    assert "weights.overlap=true" in overrides(beside.best)
    assert "weights.overlap=true" not in overrides(after.best)
    assert beside.colocated is not None
    assert not beside.colocated.setting.overlap
    assert not beside.best.split.setting(0, 0).overlap


def test_publishing_beside_training_needs_every_bucket(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sizes.MODELS["qwen3_8b"]))
    shape = {"model": str(tmp_path), "gpus": 16, "trainers": 8, "mean": 1500, "longest": 4096}
    stream, full = (
        max(split.memory["trainer"] for split in inputs.splits(inputs.parse(shape | {"overlap": overlap})))
        for overlap in (False, True)
    )
    assert full > stream


def test_equal_answers_are_best_generated_in_turns() -> None:
    equal = {"sigma": 1e-6, "longest": 4000, "gpus": 2, "switch": 0, "pause": 0, "train_fixed": 0, "max_staleness": 1}
    found = planned(**equal, per_request=1e-6, train_rate=1000)
    assert found.synchronous
    assert found.colocated is not None
    whole = ("cluster.gpus=2", "trainer.tensor_parallel=1", "trainer.sequence_parallel=false")
    config = sizes.load("experiment=qwen3_8b", values=[*overrides(found.colocated), *whole])
    place(config, imagined(config, 1, 2))
    assert config.cluster.placement == "colocated"
    assert (config.engine.count, config.trainer.data_parallel) == (2, 2)
    assert not planned(sigma=1.3, switch=15.0).synchronous


def qwen3(folder: Path, **fields: Any) -> inputs.PlanInput:
    (folder / "config.json").write_text(json.dumps(sizes.MODELS["qwen3_8b"]))
    return inputs.parse({"model": str(folder), "gpus": 16, "mean": 1500, "longest": 4096} | fields)


def test_run_in_turns_accepts_the_overrides_of_a_plan(tmp_path: Path) -> None:
    turns = [one for one in inputs.splits(qwen3(tmp_path)) if one.colocated]
    assert {one.engine_gpus for one in turns} == {1, 2, 4, 8}
    for one in turns:
        law = Candidate(one, one.setting(0, 0), None, 64, 8)  # type: ignore[arg-type]
        config = sizes.load("experiment=qwen3_8b", values=overrides(law))
        assert sizes.size(config, sizes.MODELS["qwen3_8b"]).trainer
        assert config.trainer.world_size == config.engine.count * config.engine.tensor_parallel == 16


def test_whole_engines_and_copies_of_the_weights_take_turns() -> None:
    uneven = {"gpus": 14, "engine_gpus": 4, "trainer_gpus": 3, "batch_groups": 64}
    found = [one for one in inputs.splits(inputs.parse(NUMBERS | uneven)) if one.colocated]
    assert [(one.engines, one.trainers) for one in found] == [(3, 12)]
    assert "trainer.data_parallel=4" in found[0].overrides


def test_typed_numbers_start_the_engines_that_were_planned() -> None:
    found = planned(gpus=8, engine_gpus=2, kv_tokens=90_000).best
    config = sizes.load("experiment=qwen3_8b", values=overrides(found))
    engine = config.engine
    assert (engine.count, engine.tensor_parallel) == (found.split.engines, 2)
    assert (engine.max_running_requests, engine.max_total_tokens) == (16, 90_000)
    given = inputs.parse(NUMBERS | {"engine_gpus": 2})
    assert all("engine.tensor_parallel=2" in one.overrides for one in inputs.splits(given))
    kept = inputs.splits(given, ["engine.tensor_parallel"])
    assert not any("engine.tensor_parallel=2" in one.overrides for one in kept)


def test_every_engine_parallelism_is_searched_at_a_price(tmp_path: Path) -> None:
    speeds = {one.engine_gpus: one.shape for one in inputs.splits(qwen3(tmp_path)) if not one.colocated}
    assert list(speeds) == [1, 2, 4, 8]
    weights = [shape.per_token * tensor for tensor, shape in speeds.items()]
    assert weights == sorted(weights)  # seconds of GPUs: more ranks take more
    assert speeds[8].per_token - speeds[1].per_token / 8 == pytest.approx(72 * (3.6e-6 + 14 * 0.47e-6), rel=1e-3)


def test_the_fastest_layout_of_the_trainer_that_fits_is_planned(tmp_path: Path) -> None:
    given = qwen3(tmp_path)
    best = {one.trainers: one for one in inputs.splits(given) if not one.colocated}[8]
    for layout in ([1, 1, 1], [2, 1, 1], [1, 2, 1], [4, 1, 1], [8, 1, 1], [4, 2, 1]):
        try:
            found = inputs.splits(qwen3(tmp_path, layout=layout, trainers=8))
        except ConfigError:
            continue  # it does not fit
        assert found[0].train_rate < 1.06 * best.train_rate
    slow, fast = (inputs.splits(qwen3(tmp_path, layout=one, trainers=8))[0] for one in ([8, 1, 1], [2, 1, 1]))
    assert slow.train_rate < 0.95 * fast.train_rate


def test_model_is_planned_with_fitting_accepted_layouts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sizes.MODELS["qwen3_8b"]))
    given = inputs.parse(
        {"model": str(tmp_path), "gpus": 16, "mean": 1500, "longest": 4096, "prompt": 200, "max_staleness": 2}
    )
    splits = inputs.splits(given)
    assert all(sum(split.memory.values()) <= 2 * model_splits.ROOM * 80e9 for split in splits)
    plan = search(splits, given.workload, Choices.up_to(given.max_staleness), few=0)
    assert plan.best.split.engines * plan.best.split.engine_gpus + plan.best.split.trainers <= 16
    config = sizes.load("experiment=qwen3_8b", values=overrides(plan.best))
    assert config.engine.count == plan.best.split.engines
    assert config.trainer.world_size == plan.best.split.trainers
    assert sizes.size(config, sizes.MODELS["qwen3_8b"]).trainer
    told = report(plan, given)
    assert told["best"]["memory"].keys() == {"trainer", "engine"}
    again = inputs.parse({name: value for name, value in told["input"].items() if value is not None})
    assert inputs.splits(again) == splits  # the plan can be made anew from what is written


def test_a_model_with_experts_accepts_its_plans(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sizes.MODELS["qwen3_30b_a3b"]))
    fields = {"model": str(tmp_path), "gpus": 64, "mean": 1500, "longest": 4096}
    for layout, trainers in (([2, 2, 8], 32), (None, 16)):
        one = inputs.splits(inputs.parse(fields | {"layout": layout, "trainers": trainers}))[0]
        law = Candidate(one, one.setting(2, 1), None, 64, 8)  # type: ignore[arg-type]
        config = sizes.load("experiment=qwen3_30b_a3b", values=overrides(law))
        assert config.trainer.world_size == trainers
        assert sum(sizes.size(config, sizes.MODELS["qwen3_30b_a3b"]).trainer.values()) < sizes.ROOM
        assert any(word.startswith("trainer.expert_parallel=") for word in one.overrides)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpus=8", "longest=20", "model=builtin:tiny"], ["mean: got None", "mean=NUMBER"]),
        (["gpu=b300", "model=nowhere"], ["longest: ", "longest=NUMBER", "gpu: ", "h100, h200, a100", "model: "]),
        (["gpus=0", "mean=10", "longest=20"], ["gpus: got 0", ">= 1"]),
        (["gpus=many", "mean=10", "longest=20"], ["gpus: got 'many'"]),
        (["gpu=h100", "gpus=8", "mean=10", "longest=20"], ["per_token, per_request, train_rate: got None"]),
        (["gpus=8", "mean=.nan", "longest=20"], ["mean: got nan", "float"]),
        (["speed=3"], ["speed: got 3"]),
        (["nowhere.yaml"], ["INPUT: got 'nowhere.yaml'"]),
        (["model=nowhere", "gpus=8", "mean=10", "longest=20"], ["model: got 'nowhere'"]),
        ([f"{name}={value}" for name, value in (NUMBERS | {"gpus": 1}).items()], ["gpus: got 1"]),
        (
            [f"{name}={value}" for name, value in (NUMBERS | {"trainers": 60, "engines": 10, "gpus": 64}).items()],
            ["gpus: got 64", "engines=10, trainers=60", "add GPUs"],
        ),
        (["gpus=8", "mean=10", "longest=20", "gpu=b200"], ["gpu: ", "h100, h200, a100"]),
        (["gpus=8", "mean=10", "longest=20", "layout=4"], ["layout: got 4", "tensor, pipeline and expert"]),
    ],
)
def test_wrong_input_is_named_with_its_remedy(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert [one for one in said if one not in told] == [], told


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"engine_gpus": 3}, ["engine_gpus: got 3", "32 attention heads", "8 key-value heads"]),
        ({"layout": [3, 1, 1]}, ["layout: got 3", "32 attention heads"]),
        ({"layout": [1, 5, 1]}, ["layout", "5", "36 layers"]),
        ({"layout": [1, 1, 2]}, ["layout", "2", "1 experts"]),
        ({"layout": [2, 1, 1], "trainers": 7}, ["trainers: got 7", "layout=[2, 1, 1]"]),
    ],
)
def test_layouts_that_the_model_does_not_have_are_refused(
    field: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        inputs.splits(qwen3(tmp_path, **field))
    assert [one for one in said if one not in str(refused.value)] == [], refused.value


def said(plan: Plan, own_error: float | None = None, **changes: Any) -> str:
    given = inputs.parse(NUMBERS | changes)
    return "\n".join([*findings(plan, given), *uncertainty(plan, own_error), *assumed(plan, given)])


def test_recorded_error_is_the_uncertainty_or_a_warning() -> None:
    plan = planned()
    plain, small, large = said(plan), said(plan, 0.1), said(plan, -0.83)
    assert ("+10%" in small, "-83%" in large) == (True, True)
    assert len(small.splitlines()) == len(large.splitlines()) == len(plain.splitlines()) + 1
    assert said(plan, 0.15).replace("+15%", "+10%") == small
    assert large.replace("-83%", "+10%") != small  # a warning is added


def test_one_seed_has_no_spread_and_no_simulation_is_said() -> None:
    given = inputs.parse(NUMBERS)
    splits, choices = inputs.splits(given), Choices((4,))
    one = search(splits, given.workload, choices, few=1, seeds=1)
    assert report(one, given)["best"]["spread"] is None
    assert "results/plans.md" not in said(one)
    assert "results/plans.md" in said(search(splits, given.workload, choices, few=0))  # what laws alone are worth


def test_changed_inputs_give_a_range_and_better_splits() -> None:
    plan = planned()
    rates = [one.rate for one in plan.changed]
    assert len(rates) == 6
    assert min(rates) < 0.9 * plan.best.law.samples_per_s < 1.1 * plan.best.law.samples_per_s < 1.3 * max(rates)
    for one in plan.changed:
        assert one.better is None or one.better_rate > (1 + NEAR) * one.rate
    better = [one for one in plan.changed if one.better]
    assert better
    lines = said(plan).splitlines()
    for one in better:
        (line,) = [line for line in lines if f"{one.factor} times the {one.name}" in line]
        assert f"{one.better_rate:.3g}" in line


def test_equal_synchronous_run_is_the_plan_and_said_so() -> None:
    plan = planned()
    assert plan.colocated is not None
    best = plan.best

    def against(share: float) -> Plan:
        turns = replace(plan.colocated, simulated=[replace(best.simulated[0], step=best.batch / best.rate / share)])
        return replace(plan, colocated=turns)

    assert against(0.99).synchronous
    assert not against(0.97).synchronous
    near, far = against(0.99), against(0.5)
    assert f"{near.doubt:.0%}: " in said(near)  # the margin
    assert f"{far.doubt:.0%}: " not in said(far)
    assert "2.00 x" in said(far)
    assert " x as fast" not in said(replace(plan, colocated=None))


def test_what_helps_is_the_largest_part_of_a_step() -> None:
    few = {"trainers": 1, "max_staleness": 8}
    for part, numbers in (
        ("trainer GPUs", {"train_rate": 300}),
        ("publish", {"train_fixed": 0, "pause": 30}),
        ("fixed part", {"train_fixed": 40}),
    ):
        first, *_ = findings(planned(**few, **numbers), inputs.parse(NUMBERS))
        assert part in first


def test_gpus_that_are_not_needed_or_not_used_are_said() -> None:
    plan = planned(gpus=40, batch_groups=4)
    assert plan.enough[0] + plan.enough[1] < 20
    assert f"{sum(plan.enough)} GPUs give 98%" in said(plan, gpus=40)
    assert "of 40 GPUs" not in said(plan, gpus=40)
    assert "2 of 42 GPUs" in said(plan, gpus=42)


def test_the_time_to_change_over_that_is_assumed_is_said() -> None:
    plan = planned()
    (line,) = [line for line in said(plan).splitlines() if "switch=" in line]
    assert "15 s" in line
    assert "switch=" not in said(plan, switch=3.0)


def test_what_typed_numbers_do_not_say_is_said() -> None:
    plan = planned()
    copies = [line for told in (said(plan), said(plan, trainer_gpus=4)) for line in told.splitlines() if "copy" in line]
    assert ["trainer_gpus=" in line for line in copies] == [True, True]
    assert ["4 GPUs" in line for line in copies] == [False, True]
    assert "model=" in said(plan)  # from which memory would be known
    assert "kv_tokens" in said(plan)
    assert "kv_tokens" not in said(plan, kv_tokens=1000)


def test_episodes_that_are_cut_off_are_said() -> None:
    short = {"mean": 9000, "longest": 100, "sigma": 0.3}
    (line,) = [line for line in said(planned(**short), **short).splitlines() if "longest=100" in line]
    assert "100%" in line
    assert "100 tokens" in line
    assert "longest=" not in said(planned())


def test_the_work_of_a_plan_is_bounded() -> None:
    with pytest.raises(ConfigError, match=r"batch_groups: got 1000000.* 131072 episodes"):
        inputs.parse(NUMBERS | {"batch_groups": 1_000_000})
    with pytest.raises(ConfigError, match=r"max_staleness: got 1000.*<= 64"):
        inputs.parse(NUMBERS | {"max_staleness": 1000})
    one = planned(max_staleness=1).best
    for bound, groups in ((8, 64), (64, 64), (64, 1024), (8, 10_000)):
        large = replace(one, setting=replace(one.setting, max_staleness=bound), batch_groups=groups)
        steps, warm = steps_of(large)
        assert steps >= 4
        assert (steps + warm) * large.batch <= max(EPISODES, 6 * large.batch)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "--seeds: got 0: at least 1"),
        (["--simulate", "-1"], "--simulate: got -1: at least 0"),
    ],
)
def test_counts_that_mean_nothing_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err


def test_unwritable_files_are_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{name}={value}" for name, value in NUMBERS.items()]
    assert main([*words, "--json", str(tmp_path / "none" / "plan.json")]) == 2
    assert main([*words, "--svg", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "weighing" not in told.err
    assert [one for one in (str(tmp_path / "none" / "plan.json"), str(tmp_path)) if one not in told.err] == []


def test_a_file_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "numbers.yaml").write_bytes(b"gpus: \xff\xfe")
    assert main([str(tmp_path / "numbers.yaml")]) == 2
    assert "FIELD=VALUE" in capsys.readouterr().err


def test_help_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    for name in inputs.PlanInput.__struct_fields__:
        assert re.search(rf"^  .*\b{name}\b", told, re.MULTILINE), name


def test_command_prints_overrides_last_and_writes_both_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = tmp_path / "numbers.yaml"
    numbers.write_text(json.dumps(NUMBERS))
    page, plot = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert main([str(numbers), "max_staleness=2", "--simulate", "0", "--json", str(page), "--svg", str(plot)]) == 0
    told = capsys.readouterr()
    assert "weighing" in told.err
    last = told.out.strip().splitlines()[-1].split()
    found = json.loads(page.read_text())
    assert last == found["overrides"]
    assert found["best"]["max_staleness"] <= 2
    assert found["input"]["per_request"] == found["best"]["speeds"]["per_request"] == NUMBERS["per_request"]
    lines = ElementTree.parse(plot).findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3  # bounds 0, 1 and 2
