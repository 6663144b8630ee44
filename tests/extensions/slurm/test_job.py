"""The launcher in a job: which machines it has, and how its processes become steps. Without Slurm."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError, LaunchError
from asyncrl.extensions.slurm import job as module
from asyncrl.extensions.slurm import probe
from asyncrl.extensions.slurm.job import SlurmJob
from asyncrl.extensions.slurm.probe import MARK, heard
from asyncrl.extensions.slurm.task import SlurmTask
from asyncrl.launch.machine import Gpu, this_machine
from asyncrl.launch.placement import imagined, place, ports_wanted
from asyncrl.launch.plan import ProcessSpec, plan
from asyncrl.network.addresses import NODE
from asyncrl.network.ports import REPLICA_PORTS
from asyncrl.progress import begin_file, end_file
from tests.extensions.slurm.lab import slurm_config
from tests.fakes import addresses

output_of = module._output  # the real one


@pytest.fixture(autouse=True)
def hostnames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that `scontrol show hostnames` would spell out."""
    monkeypatch.setattr(module, "_output", lambda *argv: "\n".join(argv[-1].split(",")))


def of(number: str, *groups: list[str], **changes: Any) -> SlurmJob:
    """Return a job with these machines, by component."""
    lists = {f"SLURM_JOB_NODELIST_HET_GROUP_{place}": ",".join(names) for place, names in enumerate(groups)}
    env = {"SLURM_JOB_ID": number, "SLURM_HET_SIZE": str(len(groups)), **lists}
    return SlurmJob(slurm_config(**changes), env)


def made(
    nodes: int, gpus: int = 0, groups: list[list[str]] | None = None, **changes: Any
) -> tuple[SlurmJob, list[ProcessSpec]]:
    config = slurm_config(**changes)
    machines = imagined(config, nodes, gpus)
    return of("17", *(groups or [[node.name for node in machines]]), **changes), plan(
        config, addresses(config.engine.count, gpus), place(config, machines), Path("/runs/r")
    )


def steps(tmp_path: Path, *arguments: Any, **changes: Any) -> dict[str, ProcessSpec]:
    job, specs = made(*arguments, **changes)
    return {
        spec.name: spec
        for spec in job.steps(
            specs, tmp_path, "0123456789", [Path("/models/m")], tmp_path / "a.lease", ["scancel", "17"]
        )
    }


def options(spec: ProcessSpec) -> dict[str, str]:
    found = (word.removeprefix("--").partition("=") for word in spec.argv if word.startswith("--"))
    return {name: value for name, _, value in found}


def test_machines_are_those_of_the_environment_by_component() -> None:
    config, plain = slurm_config(), {"SLURM_JOB_ID": "3", "SLURM_JOB_NODELIST": "a,b"}
    assert not SlurmJob(config, {}).here
    job = SlurmJob(config, plain)
    assert (job.here, job.job, job.groups) == (True, "3", [["a", "b"]])
    assert of("3", ["c"], ["a", "b"]).groups == [["c"], ["a", "b"]]
    with pytest.raises(ConfigError, match=r"cluster\.nodes"):
        SlurmJob(slurm_config(**{"cluster.nodes": 3}), plain)


def test_what_machines_tell_is_heard_between_other_lines() -> None:
    node = {"name": "a", "address": "10.0.0.1", "gpus": ["0"], "ports": [1, 2], "interface": "ib0"}
    facts = replace(this_machine("a", {"torch": "2.13.0"}), gpus=(Gpu(0, "H100", 80 << 30, "GPU-0"),))
    answer, problem = json.dumps({"node": node, "machine": asdict(facts)}), json.dumps({"problem": "b: no ib0"})
    (((found, machine),), problems) = heard(f"module loaded\n{MARK}{answer}\n{MARK}{problem}\n")
    assert machine == facts
    assert (found.name, found.gpus, found.ports, found.interface) == ("a", ("0",), (1, 2), "ib0")
    assert problems == ["b: no ib0"]


def test_machine_tells_its_own_name_address_and_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An argument of `-` asks the machine to find the value itself."""
    monkeypatch.setenv(NODE, "node7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    def told(*words: str) -> tuple[int, str]:
        return probe.main(*words), capsys.readouterr().out  # type: ignore[call-arg]

    code, output = told("127.0.0.1", "-", "-", "2", "3")
    ((node, machine),), problems = heard(output)
    assert (code, problems, node.name, machine.name) == (0, [], "node7", "node7")
    assert (node.address, node.gpus, len(node.ports)) == ("127.0.0.1", ("3", "5"), 2)
    assert not {node.block, node.block + 1, node.block + 2} & {0, *node.ports}
    ((node, _),), _ = heard(told("-", "lo", "1", "1", "0")[1])
    assert (node.address, node.interface, node.gpus, node.block) == ("127.0.0.1", "lo", ("3",), 0)
    code, output = told("-", "nosuch0", "0", "1", "0")
    nodes, (problem,) = heard(output)
    assert (code, nodes, problem.startswith("node7: cluster.interface")) == (1, [], True)


def test_unfit_machine_is_named_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_started", lambda argv: argv)
    monkeypatch.setattr(module, "_finished", lambda argv, seconds: f'{MARK}{{"problem": "node2: no ib0"}}')
    with pytest.raises(LaunchError, match=r"^node2: no ib0$"):
        of("3", ["node1", "node2"]).probe(slurm_config())


def test_machines_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_started", lambda argv: argv)
    monkeypatch.setattr(module, "_finished", lambda argv, seconds: "srun: error: node2: launch failed")
    job = of("3", ["node1", "node2"])
    with pytest.raises(LaunchError, match=r"no answer from \['node1', 'node2'\](.|\n)*launch failed"):
        job.probe(slurm_config())


def answered(*names: str) -> str:
    """Return what machines with these names print."""
    nodes = [{"name": name, "address": name, "gpus": [], "ports": [1], "interface": ""} for name in names]
    told = [{"node": node, "machine": asdict(this_machine(str(node["name"]), {}))} for node in nodes]
    return "".join(f"{MARK}{json.dumps(one)}\n" for one in told)


def test_machines_stand_in_the_order_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(module, "_started", asked.append)
    monkeypatch.setattr(module, "_finished", lambda argv, seconds: answered("a", "c", "b"))
    config, job = slurm_config(), of("3", ["b", "c", "a"])
    job.probe(config)
    assert [node.name for node in job.nodes] == [machine.name for machine in job.machines] == ["b", "c", "a"]
    assert asked[0][-2:] == [str(ports_wanted(config) + 2), "0"]  # the preflight's are beside those of the run
    job.probe(slurm_config(**{"engine.tensor_parallel": 2, "engine.data_parallel": 2}))
    assert asked[1][-1] == str(REPLICA_PORTS)


def test_program_runs_once_on_each_or_the_named_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_started", lambda argv: argv)
    monkeypatch.setattr(module, "_finished", lambda argv, seconds: argv)
    job = of("3", ["c"], ["a", "b"])

    def sruns(**chosen: Any) -> list[dict[str, str]]:
        argvs: list[Any] = job.everywhere(["program"], 1.0, **chosen)
        found = [{name: value for name, _, value in (w[2:].partition("=") for w in argv)} for argv in argvs]
        return [{name: one.get(name, "") for name in ("het-group", "nodes", "ntasks", "nodelist")} for one in found]

    assert sruns() == [
        {"het-group": "0", "nodes": "1", "ntasks": "1", "nodelist": ""},
        {"het-group": "1", "nodes": "2", "ntasks": "2", "nodelist": ""},
    ]
    assert sruns(nodes=["b"]) == [{"het-group": "1", "nodes": "1", "ntasks": "1", "nodelist": "b"}]


def test_srun_has_the_jobs_environment_and_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment excludes what Slurm sets for the batch step only."""
    waits = "trap 'echo ended; exit' TERM\nwhile :; do sleep 0.02; done"
    (tmp_path / "srun").write_text(f"#!/bin/bash\nenv\n[ $SLURM_JOB_ID = 4 ] || exit 0\n{waits}\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_NTASKS", "7")
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    job = of("3", ["a"], **{"slurm.start_timeout": 0.5})
    (output,) = job.everywhere(["program"], 30.0)
    assert "SLURM_JOB_ID=3" in output
    assert "SLURM_NTASKS" not in output
    monkeypatch.setenv("SLURM_JOB_ID", "4")
    (output,) = job.everywhere(["program"], 0.5)
    assert output.endswith("ended\n")


def test_a_command_of_slurm_that_fails_is_told_as_it_was_given() -> None:
    with pytest.raises(LaunchError, match="ls /nowhere: exit code 2: ls: cannot access"):
        output_of("ls", "/nowhere")
    with pytest.raises(LaunchError, match="nosuchprogram: "):
        output_of("nosuchprogram")


def test_machine_is_the_jobs_until_slurm_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    job, answers = of("3", ["a", "b"]), {"squeue": "a\n", "scontrol": "a\n"}
    monkeypatch.setattr(module, "_output", lambda *argv: answers[argv[0]])
    assert (job.has("a"), job.has("b")) == (True, False)
    answers["squeue"] = "\n"  # it says nothing of the job
    assert job.has("b")

    def fails(*argv: str) -> str:
        raise LaunchError("squeue: timed out")

    monkeypatch.setattr(module, "_output", fails)
    assert job.has("b")


def test_steps_that_a_launcher_left_are_ended_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    job = of("3", ["a"])
    listed, ended = "3.0 asyncrl-01234567\n 3.1 asyncrl-89abcdef\n3.batch batch\n", list[tuple[str, ...]]()
    monkeypatch.setattr(module, "_output", lambda *argv: listed if argv[0] == "squeue" else ended.append(argv) or "")
    job.end_steps("0123456789")
    assert ended == [("scancel", "--signal=KILL", "3.0")]


def test_what_a_former_launcher_noted_of_its_steps_is_forgotten(tmp_path: Path) -> None:
    notes = begin_file(tmp_path, "engine-0"), end_file(tmp_path, "trainer-0")
    for note in notes:
        note.parent.mkdir(exist_ok=True)
        note.touch()
    steps(tmp_path, 2)
    assert not any(note.exists() for note in notes)


def test_every_process_is_a_step_and_trainers_are_one(tmp_path: Path) -> None:
    found = steps(tmp_path, 4, **{"trainer.data_parallel": 4, "engine.count": 2, "checkpoint.every": 5})
    assert found["trainer"].restarts > 0
    assert list(found) == ["engine-0", "engine-1", "router", "rollout", "trainer"]
    assert all(spec.step and spec.argv[0] == "srun" for spec in found.values())
    assert {name: options(found[name])["nodelist"] for name in ("engine-0", "engine-1", "rollout")} == {
        "engine-0": "node2",
        "engine-1": "node3",
        "rollout": "node0",
    }
    trainer = options(found["trainer"])
    assert (trainer["nodelist"], trainer["nodes"], trainer["ntasks"], trainer["ntasks-per-node"]) == (
        *("node0,node1", "2", "4", "2"),
    )
    assert trainer["distribution"] == "block"  # so ranks stand where placement has them
    assert all({"overlap", "overcommit", "kill-on-bad-exit"} <= options(spec).keys() for spec in found.values())
    assert trainer["output"] == f"{tmp_path}/logs/trainer-%t.log"
    assert found["trainer"].ends_the_run
    assert (found["engine-0"].stop_signal, found["rollout"].stop_signal) == (signal.SIGTERM, signal.SIGUSR1)
    assert options(found["rollout"])["job-name"] == "asyncrl-01234567"


def test_ranks_share_what_is_common_and_keep_their_own(tmp_path: Path) -> None:
    steps(tmp_path, 2, 2, **{"trainer.data_parallel": 4, "engine.device": "cpu", "cluster.trainer_nodes": 2})
    task = SlurmTask.read(tmp_path / "slurm" / "steps" / "trainer")
    assert (task.argv[0], task.argv[-3:]) == (sys.executable, ["-m", "asyncrl.trainer", "/runs/r"])
    assert task.env["WORLD_SIZE"] == "4"
    assert task.env["MASTER_ADDR"] == "node0"
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["ASYNCRL_HOST"]) for rank in task.ranks] == [
        ("0", "0", "node0"),
        ("1", "1", "node0"),
        ("2", "0", "node1"),
        ("3", "1", "node1"),
    ]


def test_keys_stand_in_files_of_the_owner_and_on_no_command_line(tmp_path: Path) -> None:
    found = steps(tmp_path, 2)
    for name in ("rollout", "trainer", "engine-0"):
        file = tmp_path / "slurm" / "steps" / name
        assert "key0" in file.read_text()
        assert file.stat().st_mode & 0o077 == 0
    assert not any("key0" in word for spec in found.values() for word in spec.argv)


def test_steps_name_their_component_where_there_are_several(tmp_path: Path) -> None:
    found = steps(tmp_path, 3, 2, [["node0"], ["node1", "node2"]], **{"cluster.cpu_nodes": 1})
    assert {name: options(spec)["het-group"] for name, spec in found.items()} == {
        "engine-0": "1",
        "router": "0",
        "rollout": "0",
        "trainer": "1",
    }


@pytest.mark.parametrize("kind", ["pyxis", "apptainer"])
def test_containers_have_their_python_and_the_runs_folders(tmp_path: Path, kind: str) -> None:
    container = {"kind": kind, "image": "us/asyncrl", "mounts": ["/data:/data"], "python": "/opt/python"}
    changes = {f"slurm.container.{name}": value for name, value in container.items()}
    found = steps(tmp_path, 1, **changes)["engine-0"]
    file = str(tmp_path / "slurm" / "steps" / "engine-0")
    assert found.argv[-4:] == ["/opt/python", "-m", "asyncrl.extensions.slurm.task", file]
    assert SlurmTask.read(Path(file)).argv[0] == "/opt/python"
    line = " ".join(found.argv)
    folders = [f"{Path.cwd()}:{Path.cwd()}", "/models/m:/models/m", "/data:/data"]
    if kind == "pyxis":
        assert options(found)["container-image"] == "us/asyncrl"
        assert options(found)["container-mounts"].split(",") == folders
    else:
        assert "apptainer exec --nv" in line
        assert all(f"--bind {folder}" in line for folder in folders)
        assert "us/asyncrl /opt/python" in line


def test_further_options_of_srun_are_passed_on(tmp_path: Path) -> None:
    found = steps(tmp_path, 1, **{"slurm.srun": ["--mpi=none"]})
    assert all("--mpi=none" in spec.argv for spec in found.values())


def test_tasks_watch_the_launcher_and_know_what_to_do_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(tmp_path, 2)
    tasks = [SlurmTask.read(file) for file in (tmp_path / "slurm" / "steps").iterdir()]
    assert len(tasks) >= 3
    for task in tasks:
        assert (task.lease, task.lost_timeout) == (str(tmp_path / "a.lease"), 180.0)
        assert task.orphaned == ["scancel", "17"]
    job, _ = made(1, **{"slurm.requeues": 2, "checkpoint.every": 5})
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert job.restart() == ["scontrol", "requeue", "17"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert job.restart() == ["scancel", "17"]
