"""asyncrl-train: compose -> validate -> plan -> supervise."""

from __future__ import annotations

import difflib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import asyncrl
from asyncrl import config as configuration
from asyncrl.addresses import PAUSED, STOP, STOPPED, Addresses
from asyncrl.config import Config
from asyncrl.engine.registry import Registry
from asyncrl.errors import AsyncRLError, ConfigError, ProcessDied
from asyncrl.launch import forecast, precision, reference, resume
from asyncrl.launch.attached import attached_dtype, check_attached, run_key
from asyncrl.launch.checks import check_devices, check_files, check_model
from asyncrl.launch.machine import count_gpus, this_node
from asyncrl.launch.placement import Node, place, ports_wanted
from asyncrl.launch.plan import ProcessSpec, plan
from asyncrl.launch.preflight.findings import failed, rendered
from asyncrl.launch.preflight.run import preflight, require
from asyncrl.launch.processes import Paused, Stopped, Supervisor
from asyncrl.launch.replay import check_recording, differences
from asyncrl.launch.restarts import restart_policy
from asyncrl.launch.slurm.job import Job
from asyncrl.launch.slurm.submit import submit
from asyncrl.launch.teacher import check_teacher
from asyncrl.metrics.console import Console

STARTED_AT = time.time()
CHECK = "--check"
AT_ONCE = {"logs", "slurm", resume.LOCK}
"""What a launcher makes first: one that was killed at once leaves these alone."""
PACKAGE = Path(asyncrl.__file__).parent
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"  # in a wheel, or in a checkout


def main() -> None:
    """The command. Exits with 0 when done, 1 when a run failed, 2 for a wrong setting, 128 + n after signal n."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(reference.render(CONF))
        return
    checking = CHECK in sys.argv
    sys.argv = [word for word in sys.argv if word != CHECK]  # the rest is Hydra's
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra's errors come to us, which name field, value and remedy
    composed: list[tuple[DictConfig, list[str]]] = []

    def keep(one: DictConfig) -> None:
        composed.append((one, list(HydraConfig.get().overrides.task)))

    try:
        hydra.main(version_base=None, config_path=str(CONF), config_name="train")(keep)()
        if composed:  # empty when Hydra only printed (--cfg, completion)
            loaded = [(_loaded(one), arguments) for one, arguments in composed]
            if checking:
                sys.exit(check(loaded))
            start(loaded)
    except ConfigError as error:
        _fail(2, f"wrong setting\n{error}")
    except (HydraException, OmegaConfBaseException) as error:
        _fail(2, f"wrong setting\n{_first_line(error)}. {_spelling(str(error))}")
    except AsyncRLError as error:
        _fail(1, str(error))
    except Paused as paused:
        _fail(PAUSED, f"{paused}\nwith checkpoint.every and resume=auto the same command goes on")
    except Stopped as stopped:
        _fail(128 + stopped.number, f"stopped by {stopped}")
    except KeyboardInterrupt:  # before the supervisor's handlers stand
        _fail(128 + signal.SIGINT, "stopped by SIGINT")


def check(composed: list[tuple[Config, list[str]]]) -> int:
    """--check: print what would be wrong with these runs, and start nothing. Returns 1 if one would fail, else 0."""
    wrong = 0
    for folder, (config, _) in zip(_folders(composed), composed, strict=True):
        job = Job.found(config.cluster) if config.cluster.launcher == "slurm" else None
        findings = preflight(config, folder, job.probed(config) if job else None)
        print(rendered(findings), flush=True)
        wrong |= failed(findings)
    return int(wrong)


def _folders(composed: list[tuple[Config, list[str]]]) -> list[Path]:
    """Of the runs; several have a number each."""
    folders = [Path(config.run.dir).expanduser().absolute() for config, _ in composed]
    return [folder / str(number) for number, folder in enumerate(folders)] if len(folders) > 1 else folders


def start(composed: list[tuple[Config, list[str]]]) -> None:
    """What the command is about: a run, several one after the other (--multirun), or a job of either."""
    signal.signal(signal.SIGUSR1, _not_begun)  # until the supervisor's handlers stand
    first, folders = composed[0][0], _folders(composed)
    if first.cluster.launcher == "slurm" and not Job.here():
        runs = [(folder, arguments) for folder, (_, arguments) in zip(folders, composed, strict=True)]
        print(f"asyncrl: {submit(first, runs)}")
        return
    began = STARTED_AT
    for folder, (config, _) in zip(folders, composed, strict=True):
        launch(config, folder, began)
        began = time.time()


def _not_begun(number: int, _: object) -> None:
    raise Paused("was asked to stop before it had begun")


def _loaded(composed: DictConfig) -> Config:
    values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    check_resume(values, composed)
    return configuration.load(values)


def check_resume(values: dict[str, Any], composed: DictConfig) -> None:
    """A folder that is named after the moment is another one when the command is given again."""
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    if values.get("resume") == "auto" and "${now:" in str(unresolved["run"]["dir"]):
        remedy = "run.dir is a new folder each time: set run.dir=FOLDER, which the same command finds again."
        raise ConfigError("resume", "auto", remedy)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _spelling(message: str) -> str:
    """The nearest field to the one that Hydra did not find, and where all are listed."""
    quoted = re.search(r"'([\w.]+)'", message)
    near = difflib.get_close_matches(quoted[1], reference.field_names(), n=1) if quoted else []
    return (f"Did you mean {near[0]}? " if near else "") + "asyncrl-train --help lists every field and group."


def _fail(code: int, message: str) -> None:
    print(f"asyncrl-train: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def launch(config: Config, run_dir: Path, began: float) -> None:
    """Run one configuration to its end, on this machine or on those of the job; `began`: the moment of the command."""
    from asyncrl.models import catalog

    job = Job.found(config.cluster) if config.cluster.launcher == "slurm" else None
    if job:
        job = job.probed(config)
    else:
        check_devices(config, count_gpus(config.cluster.gpus))
    key = run_key(config)
    if config.cluster.preflight:
        require(config, run_dir, job)
    else:
        check_files(config)
        check_recording(config)
        check_attached(config, key)
    model = catalog.resolve(config.model.path)
    check_model(config, _model_config(model))
    teacher = catalog.resolve(config.teacher.model, "teacher.model") if config.teacher.model else None
    if teacher:
        check_teacher(config, model, teacher)
    judge = catalog.resolve(config.judge.model, "judge.model") if config.judge.model else None
    origin = resume.choose(config, run_dir)
    nodes = job.nodes if job else [_this_node(config)]
    placement = place(config, nodes)
    gpus = max(len(node.gpus) for node in nodes)
    configs = {part: _model_config(path) for part, path in _models(model, teacher, judge)}
    before = origin.manifest.config if origin else precision.recorded(config, run_dir)
    attached = attached_dtype(config, key)
    chosen = precision.resolve(config, configs, placement, gpus, job=job, before=before, attached=attached)
    config = chosen.config
    expected = forecast.forecast(config, model, configs["trainer"], chosen)
    goes_on = config.resume == "auto" and (run_dir / "config.json").is_file()
    if not goes_on:
        resume.check_apart(run_dir, origin)
        prepare_run_dir(run_dir, overwrite=config.run.overwrite)  # last: a refused run must not empty a folder
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    held = resume.lock(run_dir)
    if goes_on and (reason := resume.finished(config, run_dir, origin)):
        print(f"asyncrl: {run_dir} is done: {reason}")
        os.close(held)
        return
    if goes_on or origin:
        resume.roll_back(run_dir, origin)
    for mark in (STOP, STOPPED):
        (run_dir / mark).unlink(missing_ok=True)
    (run_dir / "config.json").write_text(config.model_dump_json(indent=2) + "\n")
    forecast.write(run_dir, chosen, expected)
    urls = placement.urls()
    addresses = Addresses(
        run_id=secrets.token_hex(8),
        api_key=key,
        model=model,
        gpus=gpus,
        started_at=began,
        teacher=teacher,
        judge=judge,
        resume=origin.folder if origin else None,
        attached=tuple(config.engine.urls) if config.mode != "replay" else (),
        trainers=tuple(sorted({seat.node.address for seat in placement.trainers})),
        **{**urls, "teachers": tuple(config.teacher.urls) or urls["teachers"]},
    )
    addresses.write(run_dir)
    specs = plan(config, addresses, placement, run_dir)
    if job:
        mounts = [folder for folder in (run_dir, model, teacher, judge) if folder]
        specs = job.steps(specs, run_dir, addresses.run_id, mounts, Registry(run_dir).file_of_run, job.requeued())
    console = Console(config, run_dir)
    console.opening(
        [*differences(config), *resume.changes(config, origin)],
        str(origin.folder) if origin else None,
        notes=forecast.lines(chosen, expected),
    )
    try:
        supervise(config, run_dir, addresses, specs, job, console)
    except ProcessDied as error:
        if not (config.cluster.requeues and resume.made_progress(run_dir, origin)):
            raise
        raise Paused(str(error)) from None  # a fault that comes again at once is no machine's
    finally:
        if job:
            job.end_steps(addresses.run_id)
        os.close(held)
    console.closing()


def _model_config(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def _models(model: Path, teacher: Path | None, judge: Path | None) -> list[tuple[str, Path]]:
    """Which part of the run computes with which model folder."""
    parts = [("trainer", model), ("engine", model), ("teacher", teacher), ("judge", judge)]
    return [(part, folder) for part, folder in parts if folder]


def supervise(
    config: Config, run_dir: Path, addresses: Addresses, specs: list[ProcessSpec], job: Job | None, console: Console
) -> None:
    """From the first process to the last. Raises as Supervisor.run does."""
    policy = restart_policy(run_dir, addresses, specs, job.has if job else None)
    registry = Registry(run_dir)
    registry.clear()
    facts = {"run_id": addresses.run_id, "host": socket.gethostname(), "job": job.id if job else ""}
    lease = registry.lease_of_run(**facts)
    lease.renew()  # before anything is started that would miss it

    def each_poll() -> None:
        lease.renew()
        console.follow()

    try:
        Supervisor(specs, run_dir, addresses.run_id, config.cluster.stop_grace, policy).run(each_poll)
    finally:
        lease.end()


def _this_node(config: Config) -> Node:
    cluster = config.cluster
    return this_node(cluster.host, cluster.interface, count_gpus(cluster.gpus), ports_wanted(config))


def prepare_run_dir(run_dir: Path, *, overwrite: bool) -> None:
    """A run never writes into another's folder, and never empties one that is not a run's."""
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError("run.dir", str(run_dir), "This is a file: name a folder.")
    if not run_dir.exists() or {path.name for path in run_dir.iterdir()} <= AT_ONCE:
        return
    if not overwrite:
        raise ConfigError(
            "run.dir", str(run_dir), "The folder is not empty: choose another, or set run.overwrite=true."
        )
    if not (run_dir / "config.json").is_file():
        raise ConfigError(
            "run.overwrite",
            True,
            f"{run_dir} holds no config.json of a run: empty it yourself if that is meant.",
        )
    os.close(resume.lock(run_dir))  # a run may be at work in it
    shutil.rmtree(run_dir)


if __name__ == "__main__":
    main()
