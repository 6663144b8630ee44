"""A replay has the recorded run's settings, except for those of its command line, and its vocabulary."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.extension import Extension
from asyncrl.extensions.recording.events import Committed, packed
from asyncrl.extensions.recording.frames import path_of
from asyncrl.extensions.recording.writer import RECORDS, Writer
from asyncrl.extensions.replay.extension import settings_of
from asyncrl.extensions.replay.recorded import check_recording, check_vocabulary
from asyncrl.launch.compose import compose, load
from asyncrl.launch.main import CONF, main
from asyncrl.launch.resume import changes
from asyncrl.models import catalog
from asyncrl.rollout.events import Taken
from asyncrl.settings import Section
from tests.fakes import group, reusing, tiny_config
from tests.forks import forked


def recorded(folder: Path, prompt: list[int] | None = None, **changes: Any) -> Path:
    """Write a run's folder: one batch, and the settings that made it."""
    writer: Writer[Any] = Writer(folder / RECORDS)
    writer.write(Committed(0, packed(group(0, prompt=prompt or [12, 1, 11])), 0))
    writer.write(Taken(0, ["g0"], {}))
    writer.close()
    (folder / "config.json").write_text(tiny_config(**changes).model_dump_json())
    return folder


def replayed(monkeypatch: pytest.MonkeyPatch, source: Path, *arguments: str) -> Config:
    monkeypatch.setattr(sys, "argv", ["asyncrl-train", "mode=replay", f"replay.from={source}", *arguments])
    ((config, _),) = load(compose(CONF))
    return config


def test_settings_are_those_of_the_recorded_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"trainer.optimizer.lr": 0.25, "algo.loss": {"name": "ppo", "clip_low": 0.125}, "run.seed": 7}
    own = {"record": True, "checkpoint.every": 3, "run.dir": "a", "cluster.max_restarts": 99, "timelines.record": False}
    source = recorded(tmp_path, **changes, **own)
    config = replayed(monkeypatch, source)
    assert (config.model.path, config.trainer.optimizer.lr, config.run.seed) == ("builtin:tiny", 0.25, 7)
    assert config.algo.loss.settings["clip_low"] == 0.125
    assert (config.mode, settings_of(config).source) == ("replay", str(source))
    assert (config.record, config.checkpoint.every, config.cluster.max_restarts) == (False, None, 5)
    assert config.timelines.record
    assert config.run.dir != "a"


def test_command_line_overrides_them_also_with_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = {"name": "ppo", "clip_low": 0.125, "clip_high": 0.5}
    source = recorded(tmp_path, **{"algo.loss": loss, "algo.mini_batches": 2, "trainer.optimizer.lr": 0.25})
    config = replayed(monkeypatch, source, "algo.loss=cispo", "run.max_steps=80")
    assert (config.algo.loss.name, config.algo.loss.settings, config.run.max_steps) == (
        "cispo",
        {"clip_high": 0.28},
        80,
    )
    assert config.trainer.optimizer.lr == 0.25
    kept = replayed(monkeypatch, source, "algo.loss.clip_low=0.2").algo.loss.settings
    assert (kept["clip_low"], kept["clip_high"]) == (0.2, 0.5)
    assert replayed(monkeypatch, source, "algo=grpo").algo.mini_batches == 1  # a group: the whole section
    config = replayed(monkeypatch, source, "experiment=tiny")  # sets the rate, not the number of mini-batches
    assert config.trainer.optimizer.lr == tiny_config().trainer.optimizer.lr
    assert config.algo.mini_batches == 2


def test_extensions_have_the_recorded_runs_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = recorded(tmp_path, **reusing(groups=2, reset_every=7))
    assert replayed(monkeypatch, source).sample_reuse.groups == 2
    given = replayed(monkeypatch, source, "+sample_reuse.groups=3").sample_reuse
    assert (given.groups, given.reset_every) == (3, None)  # the whole section


class Elsewhere(Extension):
    """Its settings are not those of training."""

    class Settings(Section):
        seconds: float = 1.0

    trains = False


def test_extensions_that_do_not_train_have_this_runs_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"elsewhere": f"{__name__}:Elsewhere"}
    source = recorded(tmp_path, extensions=found, elsewhere={"seconds": 2.0})
    arguments = [f"+extensions.elsewhere={__name__}:Elsewhere"]
    config = replayed(monkeypatch, source, *arguments)
    assert config.elsewhere.seconds == 1.0
    assert changes(config, None) == []
    assert replayed(monkeypatch, source, *arguments, "+elsewhere.seconds=3.0").elsewhere.seconds == 3.0


def test_damaged_settings_of_the_recorded_run_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = recorded(tmp_path)
    (source / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"replay.from: got .*config.json cannot be read"):
        replayed(monkeypatch, source)


def test_recording_without_the_batches_is_refused(tmp_path: Path) -> None:
    writer: Writer[Any] = Writer(tmp_path / "none" / RECORDS)
    writer.write(Committed(0, packed(group(0)), 0))
    writer.close()
    damaged = recorded(tmp_path / "damaged")
    path_of(damaged / RECORDS, 0).write_bytes(b"something else" * 9)
    for source, remedy in (
        (tmp_path / "none", r"replay\.from: .*holds no batch"),
        (damaged, r"replay\.from: .*cannot be read: .*is not a recording"),
        (recorded(tmp_path / "one"), r"replay\.last: got 3\..*holds batches 0 to 0"),
    ):
        config = tiny_config(mode="replay", **{"replay.from": str(source), "replay.last": 3})
        with pytest.raises(ConfigError, match=remedy):
            check_recording(settings_of(config), replays=True)


def test_recording_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """The command says so before anything starts, whether or not the recorded run's model is still there."""
    source, model = recorded(tmp_path / "a"), tmp_path / "model"
    shutil.copytree(catalog.resolve("builtin:tiny"), model)
    arguments = ("mode=replay", f"replay.from={source}", f"run.dir={tmp_path / 'run'}", "--check")
    assert forked(main, *arguments, cwd=tmp_path).returncode == 0
    assert forked(main, *arguments, f"model.path={model}", cwd=tmp_path).returncode == 0
    tokens = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (model / "tokenizer.json").write_text(json.dumps(tokens))
    done = forked(main, *arguments, f"model.path={model}", cwd=tmp_path)
    assert done.returncode == 1
    told = " ".join(done.stdout.split())
    assert "model.path" in told
    assert "2 token ids differ" in told

    gone = recorded(tmp_path / "b", [12, 999, 11], **{"model.path": "/nowhere"})
    replay = settings_of(tiny_config(mode="replay", **{"replay.from": str(gone)}))
    with pytest.raises(ConfigError, match=r"has token 999, but this model's vocabulary has 24 tokens"):
        check_vocabulary(replay, "/model", model, {"vocab_size": 24})
    check_vocabulary(replay, "/model", model, {"vocab_size": 1000})
