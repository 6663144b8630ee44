"""Resume chooses the checkpoint and the settings, and moves away what came later."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.manifest import Manifest
from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.errors import ConfigError, RecordError
from asyncrl.launch import resume
from asyncrl.launch.resume import Resume, advice, choose, differing, lock, roll_back
from asyncrl.network.addresses import FILE, READY
from tests.fakes import GIVEN, tiny_config


def save(run_dir: Path, version: int, *, rollout: bool = True, **changes: Any) -> Path:
    """A checkpoint of a run with these settings."""
    folder = CheckpointStore(run_dir).make_room(version)
    names = ["trainer.json", *([manifest.ROLLOUT] if rollout else [])]
    for name in names:
        (folder / name).write_bytes(b"{}")
    config = json.loads(tiny_config(**changes).model_dump_json())
    files = manifest.describe(folder, names)
    manifest.commit(folder, Manifest(manifest.FORMAT, version, "run", 0.0, config, files))
    return folder


def chosen(run_dir: Path, what: str | None, **changes: Any) -> Resume | None:
    return choose(tiny_config(resume=what, **changes), run_dir)


def test_newest_whole_checkpoint_is_gone_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(tmp_path, None) is None
    assert chosen(tmp_path, "auto") is None
    old, damaged = save(tmp_path, 4), save(tmp_path, 8)
    (damaged / "trainer.json").write_bytes(b"[]")
    found = chosen(tmp_path, "auto")
    assert found is not None
    assert (found.folder, found.version, found.run_dir) == (old, 4, tmp_path)
    assert "asyncrl: checkpoint 8 is skipped" in capsys.readouterr().err


def test_a_checkpoint_is_named_by_its_folder_or_its_run(tmp_path: Path) -> None:
    save(tmp_path / "a", 4)
    folder = save(tmp_path / "a", 8)
    for named in (tmp_path / "a", folder):
        found = chosen(tmp_path / "b", str(named))
        assert found is not None
        assert found.folder == folder
    with pytest.raises(ConfigError, match=r"resume: got .* It is neither a checkpoint nor a run with a complete one"):
        chosen(tmp_path / "b", str(tmp_path))
    (folder / "trainer.json").unlink()
    with pytest.raises(RecordError, match=r"trainer\.json cannot be read"):  # it was meant, and no other
        chosen(tmp_path / "b", str(folder))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("run.seed", {"run.seed": 1}),
        ("rollout.batch_groups", {"rollout.batch_groups": 4}),
        ("rollout.max_staleness", {"rollout.max_staleness": 3, "rollout.lead": 2}),
        ("rollout.lead", {"rollout.lead": 1}),
        ("eval.questions", {"eval.questions": 7}),
    ],
)
def test_settings_of_the_groups_under_way_must_stay(field: str, changes: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, 4)
    with pytest.raises(ConfigError, match=f"{field}: got .* resume with that"):
        chosen(tmp_path, "auto", **changes)


def test_other_settings_may_change_and_are_told(tmp_path: Path) -> None:
    save(tmp_path, 4)
    config = tiny_config(
        resume="auto", **{"trainer.tensor_parallel": 2, "run.max_steps": 300, "rollout.lead": 2, "engine.count": 3}
    )
    found = choose(config, tmp_path)
    told = resume.changes(config, found)
    assert "trainer.tensor_parallel: 1 -> 2" in told
    assert "run.max_steps: 200 -> 300" in told
    assert not any("engine" in line or "resume" in line for line in told)
    assert resume.changes(config, None) == []


def test_ended_run_has_nothing_to_do_unless_asked_for_more(tmp_path: Path) -> None:
    save(tmp_path, 200)
    found = chosen(tmp_path, "auto")
    assert found is not None
    assert resume.finished(tiny_config(), tmp_path, found) is None  # killed at its very end: its summary is missing
    (tmp_path / "summary.json").write_text(json.dumps({"reason": "run.max_steps 200 reached"}))
    assert resume.finished(tiny_config(), tmp_path, found) == "run.max_steps 200 reached"
    assert resume.finished(tiny_config(**{"run.max_steps": 300}), tmp_path, found) is None


def test_run_that_ended_without_checkpoints_is_not_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(tiny_config().model_dump_json())
    (tmp_path / "summary.json").write_text(json.dumps({"reason": "enough"}))
    assert resume.finished(tiny_config(), tmp_path, None) == "enough"
    assert resume.finished(tiny_config(**{"run.max_steps": 300}), tmp_path, None) is None


def test_folder_with_the_needed_checkpoint_is_not_emptied(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 4)
    found = chosen(tmp_path / "b", str(folder))
    resume.check_apart(tmp_path / "b", found)
    resume.check_apart(tmp_path / "b", None)
    with pytest.raises(ConfigError, match=r"It is inside run.dir: set resume=auto"):
        resume.check_apart(tmp_path / "a", found)


@pytest.mark.parametrize("line", ['{"version": 3, "lo', '{"step": 3}'])
def test_damaged_line_of_the_figures_is_named(line: str, tmp_path: Path) -> None:
    save(tmp_path, 4)
    (tmp_path / "metrics.jsonl").write_text(f'{{"version": 1}}\n{line}\n')
    with pytest.raises(RecordError, match=r"metrics\.jsonl: .*repair"):
        roll_back(tmp_path, chosen(tmp_path, "auto"))


def test_checkpoint_that_was_moved_has_no_steps_before_it(tmp_path: Path) -> None:
    lines(tmp_path / "metrics.jsonl", version=[1, 2])  # of whoever lives there
    moved = save(tmp_path / "a", 4).rename(tmp_path / "moved")
    (tmp_path / "b").mkdir()
    roll_back(tmp_path / "b", chosen(tmp_path / "b", str(moved)))
    assert not (tmp_path / "b/metrics.jsonl").exists()


def test_trainers_checkpoint_alone_holds_no_rollouts(tmp_path: Path) -> None:
    save(tmp_path, 4, rollout=False, **GIVEN)
    with pytest.raises(RecordError, match=r"has no rollout state.* with mode=given"):
        chosen(tmp_path, "auto")


def lines(path: Path, **values: list[int]) -> None:
    ((name, numbers),) = values.items()
    path.write_text("".join(json.dumps({name: number}) + "\n" for number in numbers))


def numbers(path: Path) -> list[int]:
    return [next(iter(json.loads(line).values())) for line in path.read_text().splitlines()]


def test_run_with_damaged_checkpoints_does_not_begin_anew(tmp_path: Path) -> None:
    for version in (4, 8):
        (save(tmp_path, version) / "trainer.json").write_bytes(b"")
    with pytest.raises(RecordError, match="no checkpoint is complete: move them away to start over"):
        chosen(tmp_path, "auto")


def test_damaged_checkpoint_that_was_passed_over_is_kept_aside(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (save(tmp_path, 8) / "trainer.json").write_bytes(b"")
    roll_back(tmp_path, chosen(tmp_path, "auto"))
    assert CheckpointStore(tmp_path).versions() == [4]
    assert (tmp_path / "rolled_back/0000/checkpoint-00000008/manifest.json").exists()


def test_what_came_after_the_checkpoint_is_kept_aside(tmp_path: Path) -> None:
    save(tmp_path, 4)
    later = CheckpointStore(tmp_path).make_room(6)  # cut short
    lines(tmp_path / "metrics.jsonl", version=[1, 2, 3, 4, 5, 6])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"version": 7, "lo')
    lines(tmp_path / "eval.jsonl", version_max=[0, 4, 5])
    for name in ("config.json", "lost.jsonl", READY):
        (tmp_path / name).write_text("{}")
    roll_back(tmp_path, chosen(tmp_path, "auto"))
    assert numbers(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]
    assert numbers(tmp_path / "eval.jsonl") == [0, 4]
    aside = tmp_path / "rolled_back/0000"
    assert numbers(aside / "metrics.jsonl") == [5, 6]
    assert numbers(aside / "eval.jsonl") == [5]
    assert (aside / "lost.jsonl").exists()  # its notes are of engines that are no more
    assert not (tmp_path / READY).exists()
    assert not later.exists()
    shutil.rmtree(CheckpointStore(tmp_path).folder)
    roll_back(tmp_path, None)  # it has no checkpoint: from the beginning
    assert numbers(tmp_path / "metrics.jsonl") == []
    assert numbers(tmp_path / "rolled_back/0001/metrics.jsonl") == [1, 2, 3, 4]
    assert (tmp_path / "config.json").exists()  # by it the folder is known


def test_run_in_a_folder_of_its_own_has_the_steps_before(tmp_path: Path) -> None:
    save(tmp_path / "a", 4)
    lines(tmp_path / "a/metrics.jsonl", version=[1, 2, 3, 4, 5])
    (tmp_path / "b").mkdir()
    roll_back(tmp_path / "b", chosen(tmp_path / "b", str(tmp_path / "a")))
    assert numbers(tmp_path / "b/metrics.jsonl") == [1, 2, 3, 4]
    assert numbers(tmp_path / "a/metrics.jsonl") == [1, 2, 3, 4, 5]
    assert CheckpointStore(tmp_path / "a").versions() == [4]


def test_programs_that_outlived_the_launcher_are_ended(tmp_path: Path) -> None:
    """Environments had started them: the kernel ends only who asked for it."""
    environments = [{**os.environ, "ASYNCRL_RUN_ID": name} for name in ("of-the-life-before", "of-another-run")]
    mine, other = programs = [subprocess.Popen(["sleep", "60"], env=env) for env in environments]
    try:
        (tmp_path / FILE).write_text('{"run_id": "of-the-life-')  # the launcher was killed while it wrote
        roll_back(tmp_path, None)
        assert (mine.poll(), other.poll()) == (None, None)
        (tmp_path / FILE).write_text('{"run_id": "of-the-life-before"}')
        roll_back(tmp_path, None)
        assert mine.wait(60) != 0
        assert other.poll() is None
    finally:
        for program in programs:
            program.kill()
            program.wait()


def test_two_launchers_do_not_share_a_folder(tmp_path: Path) -> None:
    held = lock(tmp_path)
    with pytest.raises(ConfigError, match="A run is already using this folder"):
        lock(tmp_path)
    os.close(held)
    os.close(lock(tmp_path))


def test_changes_that_matter_to_training_are_listed() -> None:
    before = json.loads(tiny_config(**{**GIVEN, "mode": "train"}).model_dump_json())
    changed = {
        "model.path": "/other",
        **GIVEN,
        "engine.count": 2,
        "run.max_steps": 7,
    }
    assert differing(before, tiny_config(**changed)) == [
        "model.path: builtin:tiny -> /other",
        "run.max_steps: 200 -> 7",
    ]


def test_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    arguments = ["experiment=tiny", "run.name=a b", "run.dir=elsewhere", "run.overwrite=true"]
    assert "no checkpoint" in advice(tmp_path, arguments, tiny_config())
    for version in (2, 10):
        save(tmp_path, version)
    text = advice(tmp_path, arguments, tiny_config())
    assert "newest checkpoint is version 10" in text
    assert text.endswith(f"asyncrl-train experiment=tiny 'run.name=a b' run.dir={tmp_path} resume=auto")
