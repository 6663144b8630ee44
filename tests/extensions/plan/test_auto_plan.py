"""plan.apply=auto chooses what a run accepts on its machines, keeps what the command line says, and stays as it is
when the run is resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.extensions.cpu.probe import Rates
from asyncrl.extensions.plan import auto_plan
from asyncrl.extensions.plan.auto_plan import Devices, RunPlan, applied, devices_of, kept, make, recorded
from asyncrl.extensions.plan.cli import main
from asyncrl.extensions.plan.extension import PlanHooks, Plans
from asyncrl.extensions.plan.summary import plan_figures, planned_line
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.machine import Gpu, MachineFacts
from asyncrl.launch.placement import Node, imagined, place
from asyncrl.launch.prepare import Preparation
from asyncrl.models import catalog
from scripts import sizes
from tests.fakes import tiny_config

pytest.importorskip("asyncrl.extensions.slurm")  # the plans here are of its jobs

H100, H200 = ("NVIDIA H100 80GB HBM3", 81_559), ("NVIDIA H200", 143_771)
SPEEDS = {"bfloat16": 1e9, "float32": 5e10}


def machines(count: int, gpus: int, kind: tuple[str, int] = H100) -> Devices:
    names = tuple(str(number) for number in range(gpus))
    nodes = [Node(f"n{number}", f"10.0.0.{number}", names, ()) for number in range(count)]
    found = tuple(Gpu(number, kind[0], kind[1] << 20, f"GPU-{number}") for number in range(gpus))
    return devices_of(nodes, [MachineFacts(node.name, gpus=found) for node in nodes])


def cores(count: int) -> Devices:
    return Devices(rates=Rates("host", "a CPU", SPEEDS, SPEEDS, count, 2.0))


class Unprobed(Cluster):
    """This machine, about which nothing is asked."""

    def probe(self, config: Config) -> None:
        pass


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(sizes.MODELS["qwen3_8b"]))
    (tmp_path / "questions.jsonl").write_text('{"prompt": "How many legs have two cats?", "answer": "8"}\n' * 8)
    return tmp_path


def on_gpus(model: Path, devices: Devices, *arguments: str) -> tuple[RunPlan, Config]:
    base = ("rollout.max_staleness=2", "rollout.batch_groups=64", "rollout.max_new_tokens=2048", *arguments)
    config = sizes.load("experiment=qwen3_8b", values=(*base, f"task.train_file={model / 'questions.jsonl'}"))
    made = make(config, base, model, sizes.MODELS["qwen3_8b"], devices)
    return made, applied(config, made.overrides, kept(base))


def on_cpus(devices: Devices, *arguments: str) -> tuple[RunPlan, Config]:
    folder = catalog.resolve("builtin:tiny")
    config = applied(tiny_config(), arguments, ())
    made = make(config, arguments, folder, json.loads((folder / "config.json").read_text()), devices)
    return made, applied(config, made.overrides, kept(arguments))


@pytest.fixture(autouse=True)
def laws_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation is tested with the planner."""
    monkeypatch.setattr(auto_plan, "FEW", 0)


def test_a_plan_for_gpus_stands_on_the_machines_and_uses_them(model: Path) -> None:
    made, config = on_gpus(model, machines(2, 8))
    place(config, imagined(config, 2, 8))
    used = config.engine.count * config.engine.tensor_parallel + config.trainer.world_size
    assert 14 <= used <= 16
    assert config.rollout.effective_lead <= config.rollout.max_staleness == 2
    assert made.devices == "16 h100 GPUs"
    assert made.prediction["samples_per_s"] > 0
    assert "law binds" in made.lines()[1]


def test_the_command_line_is_obeyed(model: Path) -> None:
    words = ("engine.count=3", "rollout.lead=1", "rollout.max_running_groups=40", "trainer.tensor_parallel=4")
    made, config = on_gpus(model, machines(2, 8), *words)
    assert (config.engine.count, config.rollout.lead, config.rollout.max_running_groups) == (3, 1, 40)
    assert config.trainer.tensor_parallel == 4
    assert config.trainer.data_parallel >= 2
    assert {"engine.count", "rollout.lead", "trainer.tensor_parallel"} <= set(made.kept)
    assert not set(made.kept) & {word.partition("=")[0] for word in made.overrides}
    made, config = on_gpus(model, machines(2, 8), "trainer.data_parallel=3")
    assert made.prediction["trainer_gpus"] == config.trainer.world_size
    assert config.trainer.data_parallel == 3


def test_a_faster_gpu_is_recognized_and_generates_more(model: Path) -> None:
    (slow, _), (fast, _) = on_gpus(model, machines(1, 8)), on_gpus(model, machines(1, 8, H200))
    assert fast.devices == "8 h200 GPUs"
    assert fast.prediction["limits"]["engines"] != slow.prediction["limits"]["engines"]


def test_processes_take_the_place_of_gpus_on_a_cpu() -> None:
    made, config = on_cpus(cores(2))
    assert (config.engine.count, config.trainer.world_size) == (1, 1)
    assert made.devices == "2 cores (a CPU)"
    _, config = on_cpus(cores(16))
    assert config.engine.count + config.trainer.world_size == 15  # one core is left to the rollout process
    assert made.input["switch"] == 0  # nothing is moved out of GPUs
    assert made.synchronous
    assert not any(word.startswith("engine.max") for word in made.overrides)
    _, config = on_cpus(cores(2), "engine.count=3")
    assert (config.engine.count, config.trainer.world_size) == (3, 1)


def test_slow_cores_are_planned_with_their_own_speed() -> None:
    fast, slow = Rates("h", "c", SPEEDS, SPEEDS, 2, 2.0), Rates("h", "c", SPEEDS, SPEEDS, 2, 1.0)
    rates = [on_cpus(Devices(rates=one))[0].prediction["samples_per_s"] for one in (fast, slow)]
    assert rates[0] > rates[1]  # two processes on one core's arithmetic units


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (
            {"cluster.placement": "colocated", "rollout.max_staleness": 1, "weights.pause_mode": "drain"},
            "cluster.placement",
        ),
        ({"engine.urls": ["http://127.0.0.1:1"], "engine.count": 0}, "engine.urls"),
        ({"trainer.context_parallel": 2}, "trainer.context_parallel"),
    ],
)
def test_what_is_not_planned_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field}: .*does not plan this"):
        make(tiny_config(**change), (), Path(), {}, cores(2))


def test_unknown_gpus_and_impossible_settings_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"NVIDIA L4.*known are h100"):
        machines(1, 8, ("NVIDIA L4", 23_034))
    with pytest.raises(ConfigError, match=r"On 8 h100 GPUs: gpus: .*fits in no layout beside engines with engines=7"):
        on_gpus(model, machines(1, 8), "engine.count=7", "engine.tensor_parallel=1")
    with pytest.raises(ConfigError, match=r"No split of 8 h100 GPUs .*obeys .*trainer\.data_parallel"):
        on_gpus(model, machines(1, 8), "engine.count=2", "trainer.data_parallel=7")


def test_a_command_line_sets_fields_and_not_groups() -> None:
    words = ["experiment=tiny", "engine=sglang", "+engine.count=2", "rollout={lead: 1}", "++trainer.data_parallel=1"]
    running = {"rollout.lead", "rollout.max_running_groups"}
    assert kept(words) == {"engine.count", "trainer.data_parallel", *running}
    assert kept(["trainer.tensor_parallel=2"]) == set(auto_plan.LAYOUT)


@pytest.mark.parametrize("where", ["auto", "run", "checkpoint"])
def test_a_resumed_run_has_the_plan_of_its_origin(where: str, tmp_path: Path) -> None:
    made = RunPlan("2 cores", ["engine.count=1", "rollout.lead=1"], {"samples_per_s": 3.0})
    made.write(tmp_path)
    (checkpoint := tmp_path / "checkpoints" / "00000004").mkdir(parents=True)
    named = {"auto": "auto", "run": str(tmp_path), "checkpoint": str(checkpoint)}[where]
    assert recorded(tiny_config(resume=named), tmp_path) == made
    assert recorded(tiny_config(), tmp_path) is None


def test_summary_compares_the_run_with_its_plan() -> None:
    row = {"samples_per_s": 12.0, "trainer_busy": 0.5, "staleness_mean": 2.0}
    summary: dict[str, Any] = {
        "steps": 10,
        "samples_per_s": 10.0,
        "tokens/generated": 400,
        "tokens_per_s/generated": 10.0,  # 40 seconds
        "share/trainer_idle": 0.5,
        "pause/mean": 0.4,  # 4 of them
        "staleness/histogram": {"1": 1, "2": 3},
    }
    found = plan_figures({"prediction": row}, summary, overlap=False)
    assert found.keys() == {name for name in Plans.summary_metrics if name.startswith("plan/")}
    assert found["plan/error/samples_per_s"] == pytest.approx(0.2)
    assert found["plan/error/trainer_busy"] == pytest.approx(0.1)
    assert found["plan/error/staleness"] == pytest.approx(0.25)
    beside = plan_figures({"prediction": row}, summary, overlap=True)
    assert beside["plan/error/trainer_busy"] == pytest.approx(0.0)
    line = planned_line(summary | found)
    assert line == ("predicted 12 samples/s, measured 10 (+20%); trainer busy 50%, 40%; staleness 2.0, 1.8")


def test_a_synchronous_run_that_is_nearly_as_fast_is_named() -> None:
    row = {"samples_per_s": 10.0, "trainer_busy": 0.5, "staleness_mean": 1.0, "binds": "order"}
    assert "cluster.placement=colocated, synchronous: 9.9" in RunPlan("", [], row, 9.9).lines()[1]
    assert "colocated" not in RunPlan("", [], row, 9.7).lines()[1]


def test_a_file_of_asyncrl_plan_is_used_kept_and_compared(tmp_path: Path) -> None:
    page = tmp_path / "mine.json"
    words = "gpus=3 engine_gpus=1 batch_groups=4 group_size=2 mean=8 longest=16 max_staleness=1 per_token=0.01"
    more = "per_request=0.001 train_rate=500 max_running=8 kv_tokens=4096"
    assert main([*words.split(), *more.split(), "--simulate", "0", "--json", str(page)]) == 0
    made = auto_plan.of_file(str(page))
    assert made.overrides == json.loads(page.read_text())["overrides"]
    mine = auto_plan.of_file(str(page), ["rollout.batch_groups=5"])
    assert mine.kept == ["rollout.batch_groups"]
    config = applied(tiny_config(), mine.overrides, kept(["rollout.batch_groups=5"], mine.overrides))
    assert config.engine.count + config.trainer.world_size == 3
    assert (config.rollout.max_staleness, config.engine.max_running_requests) == (1, 8)
    assert config.rollout.batch_groups == tiny_config().rollout.batch_groups  # the command line's
    assert "law binds" in made.lines()[1]
    made.write(tmp_path)
    again = recorded(tiny_config(resume=str(tmp_path)), tmp_path)
    assert again == made


@pytest.mark.parametrize(
    "word",
    [
        "agent=mine:Agent",
        "task.reward=mine:reward",
        "engine.count={a: b}",
        "model.path=/x",
    ],
)
def test_foreign_plan_sets_only_what_plans_choose(word: str, tmp_path: Path) -> None:
    """Neither the file of plan.apply nor the one beside a checkpoint."""
    page = tmp_path / "theirs.json"
    row = {"samples_per_s": 1.0}
    plan = {"input": {"gpus": 1}, "synchronous_is_better": False, "best": row, "colocated": None}
    page.write_text(json.dumps({**plan, "overrides": ["engine.count=1", word]}))
    name = word.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"plan\.apply: got .*it sets {re.escape(name)}"):
        auto_plan.of_file(str(page))
    RunPlan("1 GPU", ["engine.count=1", word], row).write(tmp_path)
    with pytest.raises(ConfigError, match=rf"resume: got .*plan\.json .*it sets {re.escape(name)}"):
        recorded(tiny_config(resume=str(tmp_path)), tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"input": {"gpus": 1}}'])
def test_a_file_that_holds_no_plan_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"plan\.apply: got .*Set auto, or name a file that asyncrl-plan --json wrote"
    ):
        auto_plan.of_file(str(tmp_path / "plan.json"))


def test_run_gets_the_planned_settings_and_keeps_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"samples_per_s": 2.0, "trainer_busy": 0.5, "staleness_mean": 1.0, "binds": "engine"}
    chosen, plan = tiny_config(**{"rollout.batch_groups": 3}), RunPlan("1 GPU", ["rollout.batch_groups=3"], row)
    monkeypatch.setattr(auto_plan, "plan_run", lambda preparation, source: (chosen, plan))
    monkeypatch.setattr(PlanHooks, "_estimate", lambda self, prepared: None)
    page = tmp_path / "plan.json"
    page.touch()
    config = tiny_config(**{"plan.apply": str(page)})
    prepared = Preparation(config, tmp_path, Unprobed(config))
    prepared.plan()
    assert prepared.config is chosen
    assert [line for line in prepared.notes() if line in plan.lines()] == plan.lines()
    prepared.begins()
    assert json.loads(page.read_text())["overrides"] == ["rollout.batch_groups=3"]


def test_job_is_planned_and_placed_when_it_starts(tmp_path: Path) -> None:
    for source, placed in (("auto", False), (None, True)):
        config = tiny_config(**{"plan.apply": source})
        cluster = Unprobed(config)
        cluster.here, cluster.nodes = False, imagined(config, 1, 0)
        prepared = Preparation(config, tmp_path, cluster)
        prepared.plan()
        assert prepared.config is config
        prepared.place()
        assert prepared.is_placed is placed
