"""Every sink receives the metrics, the evaluations and a few episodes, and none of them ends or delays a run."""

from __future__ import annotations

import glob
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config import Config, load
from asyncrl.errors import ConfigError
from asyncrl.extensions.sinks import sinks as module
from asyncrl.extensions.sinks.extension import SinkLaunch
from asyncrl.extensions.sinks.sinks import Sinks
from asyncrl.jsonl import append
from asyncrl.lookup import active, step_listeners
from asyncrl.metrics.fields import STEP
from asyncrl.metrics.record import StepLog
from tests.fakes import Clock, tiny_config, tiny_values
from tests.metrics.steps import GROUPS, stepped

KEY = "0123456789abcdef0123456789abcdef01234567"


class Run:
    """The log of a run with these sinks."""

    def __init__(self, folder: Path, config: Config, first: int | None = None) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel

        self.folder, self.warned, self.clock = folder, list[str](), Clock(50.0)
        Tokenizer(WordLevel({f"word{number}": number for number in range(16)}, "word0")).save(
            str(folder / "tokenizer.json")
        )
        self.sinks = Sinks(config, config.sinks, folder, folder, lambda text, step: self.warned.append(text), first)
        self.log = StepLog([], started_at=time.time(), tasks=("length",), clock=self.clock, listeners=[self.sinks])

    def step(self, version: int) -> dict[str, Any]:
        return stepped(self.log, self.clock, version, GROUPS)


@pytest.mark.filterwarnings("ignore")
def test_each_sink_has_every_figure_the_evaluation_and_the_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("wandb", "mlflow"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'asyncrl[sinks]'")
    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 120.0)
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    wandb = {"project": "p", "mode": "offline", "api_key": {"env": "A_KEY"}}
    config = tiny_config(
        **{"sinks.names": ["tensorboard", "wandb", "mlflow"], "sinks.episodes": 2, "sinks.wandb": wandb}
    )
    run = Run(tmp_path, config)
    first = run.step(1)
    append(tmp_path / "eval.jsonl", {"set": "copy3", "version_max": 1, "accuracy": 0.25, "pass@1": 0.5})
    run.step(2)
    assert run.sinks.close()
    assert run.warned == []
    resumed = Run(tmp_path, config, first=3)
    resumed.step(3)
    assert resumed.sinks.close()
    assert resumed.warned == []
    check_tensorboard(tmp_path, first)
    check_mlflow(tmp_path, first)
    check_wandb(tmp_path, first)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []


def check_tensorboard(folder: Path, first: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == STEP.keys() | {"eval/copy3/accuracy", "eval/copy3/pass@1"} | {
        "eval/copy3/version_max"
    }
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(s, first["reward/mean"]) for s in (1, 2, 3)]
    (text, *_) = events.Tensors("episodes/text_summary")
    assert b"answer: word0 word1" in text.tensor_proto.string_val[0]


def check_mlflow(folder: Path, first: dict[str, Any]) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("asyncrl")
    (run,) = client.search_runs([experiment.experiment_id])  # a resumed run is the same one
    assert run.info.status == "FINISHED"
    assert {name.replace("/", ".") for name in STEP} <= run.data.metrics.keys()
    history = client.get_metric_history(run.info.run_id, "reward.mean")
    assert [(one.step, one.value) for one in history] == [(step, first["reward/mean"]) for step in (1, 2, 3)]
    assert run.data.metrics["eval.copy3.pass_at_1"] == 0.5
    (file,) = folder.glob("mlruns/*/*/artifacts/episodes/000001.json")
    rows = json.loads(file.read_text())
    assert [(row["prompt"], row["step"]) for row in rows] == [("word12 word1 word11", 1)] * 2
    assert all(row["answer"].startswith("word0 word1") for row in rows)


def check_wandb(folder: Path, first: dict[str, Any]) -> None:
    """The values lie in Weights & Biases' own format, whose strings are readable; the table is a file of its own."""
    names = glob.glob(str(folder / "wandb" / "offline-run-*" / "run-*.wandb"))
    assert len({name.rpartition("run-")[2] for name in names}) == 1  # a resumed run is the same one
    content = b"".join(Path(name).read_bytes() for name in names)
    for name in ("reward/mean", "time/step", "eval/copy3/accuracy"):
        assert name.encode() in content
    assert json.dumps(first["reward/mean"]).encode() in content
    tables = [json.loads(path.read_text()) for path in folder.rglob("*.table.json")]
    assert len(tables) == 3
    assert tables[0]["columns"][-2:] == ["prompt", "answer"]
    assert tables[0]["data"][0][-2] == "word12 word1 word11"


def test_sink_that_fails_or_hangs_warns_once_and_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.3)
    monkeypatch.setattr(module, "WAITING", 3)
    monkeypatch.setenv("A_KEY", KEY)

    class Broken:
        def __init__(self, *_: Any) -> None:
            raise OSError(f"No space left on device for {KEY}")

    class Hanging:
        def __init__(self, *_: Any) -> None:
            time.sleep(60)

    monkeypatch.setattr(module, "TensorBoard", Broken)
    monkeypatch.setattr(module, "MLflow", Hanging)
    sinks = {"sinks.names": ["tensorboard", "mlflow"], "sinks.mlflow": {"tracking_uri": {"env": "A_KEY"}}}
    run = Run(tmp_path, tiny_config(**sinks))
    began = time.monotonic()
    run.step(1)
    while not run.warned and time.monotonic() < began + 30:  # TensorBoard's thread
        time.sleep(0.02)
    for version in range(2, 7):
        run.step(version)
    assert not run.sinks.close()
    assert time.monotonic() - began < 50  # MLflow needs longer
    assert sorted(run.warned) == [
        "sinks.names=mlflow failed, and is tried again at each step: it is 3 calls behind",
        "sinks.names=tensorboard failed, and is tried again at each step: OSError: No space left on device for ***",
    ]


def test_settings_of_a_sink_that_is_off_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sinks.wandb.project: got 'mine'. .*add it to sinks.names"):
        tiny_config(**{"sinks.wandb": {"project": "mine"}})


def test_missing_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(**{"sinks.names": ["tensorboard", "wandb"]})
    launch = active(config)["sinks"].launch()
    assert isinstance(launch, SinkLaunch)
    launch.check_packages()
    monkeypatch.setattr("asyncrl.user_code.find_spec", lambda name: None if name == "wandb" else os)
    with pytest.raises(ConfigError, match=r"sinks\.names: got 'wandb'.*pip install 'asyncrl\[sinks\]' or remove it"):
        launch.check_packages()


@pytest.mark.parametrize("way", ["", "key", "mode", "variable", "netrc"])
def test_wandb_without_a_key_is_told_before_the_run(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("asyncrl.extensions.sinks.extension.can_import", lambda name: True)
    if way == "key":
        monkeypatch.setenv("WANDB_API_KEY", KEY)
    elif way == "variable":
        monkeypatch.setenv("WANDB_MODE", "offline")
    elif way == "netrc":
        (tmp_path / "netrc").touch()
    options = {"project": "p", **({"mode": "offline"} if way == "mode" else {})}
    values = tiny_values()
    values["sinks"] = {"names": ["wandb"], "wandb": options}
    found = list(SinkLaunch(load(values).sinks).preflight(None))  # type: ignore[arg-type]
    assert [one.level for one in found] == ([] if way else ["warning"])


def test_key_in_the_settings_is_refused_without_being_shown() -> None:
    values = tiny_values(**{"sinks.wandb": {"api_key": KEY}})
    with pytest.raises(ConfigError, match=r"sinks\.wandb\.api_key") as refused:
        load(values)
    assert KEY not in str(refused.value)


def test_finished_run_says_how_to_see_the_curves(tmp_path: Path) -> None:
    config = tiny_config(**{"sinks.names": ["tensorboard", "mlflow"]})
    offers = list(active(config)["sinks"].launch().offers(config, tmp_path))
    assert offers == [("curves", f"tensorboard --logdir {tmp_path}/tb")], "no server of MLflow's, and no folder"
    (tmp_path / "mlruns").mkdir()
    assert [what for what, _ in active(config)["sinks"].launch().offers(config, tmp_path)] == ["curves", "curves"]


def test_run_without_sinks_has_no_listener(tmp_path: Path) -> None:
    none, some = (tiny_config(**{"sinks.names": names}) for names in ([], ["tensorboard"]))
    found = [step_listeners(config, tmp_path, tmp_path, lambda text, step: None) for config in (none, some)]
    assert [sum(isinstance(one, Sinks) for one in listeners) for listeners in found] == [0, 1]


@pytest.mark.parametrize(("given", "project"), [({"entity": "team"}, "asyncrl"), ({"project": "mine"}, "mine")])
def test_project_has_a_name_beside_other_arguments(
    given: dict[str, str], project: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`+sinks.wandb.entity=team` replaces the default of the whole field."""
    asked: dict[str, Any] = {}
    run = SimpleNamespace(define_metric=lambda *_, **__: None)
    fake = SimpleNamespace(Settings=SimpleNamespace, Table=None, init=lambda **own: asked.update(own) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = tiny_config(**{"sinks.names": ["wandb"], "sinks.wandb": given})
    module.Wandb(config, config.sinks.wandb, tmp_path, "id")
    assert (asked["project"], asked["id"]) == (project, "id")
