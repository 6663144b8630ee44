"""The scripts that are shipped are those that the renderer makes, and bash can read them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError, LaunchError
from asyncrl.extensions.slurm.extension import SlurmSettings
from asyncrl.extensions.slurm.script import Script
from asyncrl.extensions.slurm.submit import script, submit
from asyncrl.launch.main import main
from scripts.render_slurm import FOLDER, rendered
from tests.extensions.slurm.lab import slurm_config
from tests.fakes import compose_values
from tests.forks import forked

NO_GPUS = {"cluster.gpus": 0}


def made(run_dir: Path = Path("runs/r"), *arguments: str, **changes: Any) -> Script:
    return script(slurm_config(**{**NO_GPUS, **changes}), [(run_dir, arguments)])


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_shipped_scripts_are_what_the_renderer_makes_now() -> None:
    """python scripts/render_slurm.py writes them anew."""
    assert {path: path.read_text() for path in FOLDER.iterdir()} == dict(rendered())


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_bash_reads_them(path: Path) -> None:
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0


def test_shipped_scripts_ask_for_the_nodes_that_their_ranks_need() -> None:
    texts = {path.stem: text for path, text in rendered()}
    assert "--nodes=1" in options(texts["one_node"])
    assert "--nodes=4" in options(texts["several_nodes"])  # 16 + 16 GPUs in eights
    assert options(texts["trainer_nodes"]).count("hetjob") == 1
    assert options(texts["sweep"]).count("--array=0-2") == 1
    assert "slurm.container.kind=pyxis" in texts["pyxis"]


def test_options_of_users_are_kept_beside_the_runs() -> None:
    found = options(made(**{"slurm.sbatch": {"partition": "gpu", "exclusive": False, "mem_per_cpu": "4G"}}).text())
    assert {"--partition=gpu", "--mem-per-cpu=4G"} <= set(found)
    assert not any("exclusive" in option for option in found)
    for option in ("nodes", "ntasks_per_node"):
        with pytest.raises(ConfigError, match=rf"slurm.sbatch.{option}"):
            made(**{"slurm.sbatch": {option: 3}}).text()


def test_two_runs_are_an_array_with_a_case_each(tmp_path: Path) -> None:
    runs = [(tmp_path / str(number), [f"run.seed={number}"]) for number in range(2)]
    text = script(slurm_config(**NO_GPUS), runs, tmp_path / "a folder").text()
    assert {"--array=0-1", f"--output={tmp_path}/0/slurm/%A_%a.out", "--open-mode=append"} <= set(options(text))
    assert [f"  {number}) run=(" in text for number in range(3)] == [True, True, False]
    assert f"cd '{tmp_path}/a folder'\n" in text


def test_folder_of_any_name_is_read_by_bash_and_hydra() -> None:
    for text in (made(Path("runs/lr=1,2")).text(), made(Path("runs/lr=1,2")).interactive()):
        assert """'run.dir="runs/lr=1,2"'""" in text


def test_machines_without_gpus_ask_for_none() -> None:
    config = {"cluster.gpus": 4, "cluster.cpu_nodes": 1, "slurm.sbatch": {"gres": "gpu:4", "account": "us"}}
    found = options(made(**config).text())
    head, tail = found[: found.index("hetjob")], found[found.index("hetjob") :]
    assert "--account=us" in head
    assert "--account=us" in tail
    assert not any("gpu" in option for option in head)
    assert {"--gres=gpu:4", "--gpus-per-node=4"} <= set(tail)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"cluster.gpus": None}, "cluster.gpus"),
        ({"cluster.nodes": 1, "cluster.gpus": 1}, "engine.count × engine.tensor_parallel"),
    ],
)
def test_a_job_that_could_not_run_is_not_written(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**changes)
    assert caught.value.field == field


RUN = """import os, signal, sys, time
def on(number, act, seconds=30):
    signal.signal(number, lambda *_: act())
    os.kill(os.getppid(), number)
    time.sleep(seconds)
"""


@pytest.mark.parametrize(
    ("program", "restarts", "code", "asked"),
    [
        ("sys.exit(0)", 0, 0, ""),
        ("sys.exit(3)", 0, 3, ""),
        ("sys.exit(75)", 0, 75, "requeue 17\n"),
        ("sys.exit(75)", 2, 75, ""),  # often enough
        ("on(signal.SIGUSR1, lambda: sys.exit(75))", 0, 75, "requeue 17\n"),
        ("on(signal.SIGTERM, lambda: sys.exit(5))", 0, 5, ""),
        ("on(signal.SIGUSR1, lambda: None, 2)", 0, 0, ""),  # it was asked, and came to its end
    ],
)
def test_script_passes_signals_on_and_requeues(
    tmp_path: Path, program: str, restarts: int, code: int, asked: str
) -> None:
    """Run as Slurm runs it, with a launcher and an scontrol of our own."""
    for name, text in (
        ("launcher", f"#!/bin/sh\nexec '{sys.executable}' {tmp_path}/program\n"),  # its path may have a space
        ("program", f"{RUN}{program}\n"),
        ("scontrol", f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n'),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    config = slurm_config(**NO_GPUS, **{"slurm.requeues": 2, "checkpoint.every": 1})
    job = script(config, [(tmp_path / "run", ["x=1"])], tmp_path, str(tmp_path / "launcher"))
    (tmp_path / "job").write_text(job.text())
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": str(restarts)}
    assert subprocess.run(["bash", str(tmp_path / "job")], env=env, timeout=120, check=False).returncode == code
    assert ((tmp_path / "asked").read_text() if asked else "") == asked


def test_script_is_written_and_nothing_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # where no sbatch is
    config = slurm_config(**NO_GPUS, **{"slurm.submit": False})
    told = submit(config, [(tmp_path / "run", ["experiment=tiny"])])
    path = tmp_path / "run" / "slurm" / "job.sbatch"
    assert str(path) in told
    assert "experiment=tiny" in path.read_text()
    with pytest.raises(ConfigError, match="sbatch was not found"):
        submit(slurm_config(**NO_GPUS), [(tmp_path / "run", [])])
    unreadable = slurm_config(**NO_GPUS, **{"slurm.submit": False, "model.chat_template": "/nowhere"})
    with pytest.raises(ConfigError, match=r"model\.chat_template"):  # before anything waits in a queue
        submit(unreadable, [(tmp_path / "other", [])])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("sbatch", "told"),
    [
        ("echo '17;cluster'", r"submitted job 17; its output: .*/slurm/17_\*\.out, "),
        ("echo 'Invalid account' >&2; exit 1", "sbatch rejected .*job.sbatch: Invalid account"),
        ("exec sleep 60", "sbatch did not answer within 1 s; the script is .*job.sbatch"),
    ],
)
def test_what_slurm_says_of_a_job_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str, told: str
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\ncp $2 {tmp_path}/submitted\n{sbatch}\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hangs = "sleep" in sbatch
    monkeypatch.setattr("asyncrl.extensions.slurm.submit.SBATCH_SECONDS", 1.0 if hangs else 60.0)
    runs = [(tmp_path / "sweep" / str(number), ["x=1"]) for number in range(2)]
    try:
        answer = submit(slurm_config(**NO_GPUS), runs)
    except LaunchError as error:
        answer = str(error)
    assert re.match(told, answer)
    written = (runs[0][0] / "slurm" / "job.sbatch").read_text()
    assert hangs or (tmp_path / "submitted").read_text() == written
    assert all((folder / "slurm").is_dir() for folder, _ in runs)  # where sbatch writes their outputs


def test_sweep_leaves_nothing_outside_of_its_own_folder(tmp_path: Path) -> None:
    slurm = ("cluster=slurm", "cluster.gpus=0", "slurm.submit=false")
    done = forked(main, "--multirun", "experiment=tiny", *slurm, "run.dir=sweep", "run.seed=1,2,3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == {"0", "1", "2", "multirun.yaml"}


def test_command_leaves_no_value_on_the_disk(tmp_path: Path) -> None:
    """The script and the folder of a job contain the setting as the user gave it."""
    program = [sys.executable, "-m", "asyncrl.launch.main", "experiment=tiny", f"run.dir={tmp_path / 'run'}"]
    program += ["cluster=slurm", "cluster.gpus=0", "slurm.submit=false", "+agent_params.key=${oc.env:A_KEY}"]
    program += ["agent=asyncrl_recipes.openai_agent.agent:solve"]
    done = subprocess.run(
        program, env={**os.environ, "A_KEY": "the-value"}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 2), done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "the-value" not in done.stdout + done.stderr + "".join(path.read_text() for path in files)


def test_group_has_every_default_but_asks_whole_machines() -> None:
    composed = compose_values("experiment=tiny", "cluster=slurm")
    assert composed["slurm"].pop("sbatch") == {"exclusive": True, "mem": 0}
    assert composed["slurm"] == SlurmSettings().model_dump(exclude={"sbatch"})
    assert composed["cluster"]["preflight"]  # jobs look by themselves


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"slurm.requeues": 1}, "slurm.requeues"),
        ({"slurm.requeues": 1, "checkpoint.every": 1, "cluster.launcher": "local"}, "slurm.requeues"),
        ({"slurm.container.kind": "pyxis"}, "slurm.container.image"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        slurm_config(**changes)
    assert caught.value.field == field
