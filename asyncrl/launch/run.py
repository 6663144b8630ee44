"""Implementation of `asyncrl-train` after composition: validates the settings, and checks, submits or supervises the
runs."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from asyncrl import lookup
from asyncrl.config import Config
from asyncrl.engine.registry import Registry
from asyncrl.errors import LaunchError, Paused, ProcessDied, Stopped
from asyncrl.jsonl import replace_text
from asyncrl.launch import resume, run_folder
from asyncrl.launch.checks.findings import failed, rendered
from asyncrl.launch.checks.run import preflight, require
from asyncrl.launch.cluster import cluster_of
from asyncrl.launch.machine import allow_files
from asyncrl.launch.plan import ProcessSpec, plan
from asyncrl.launch.prepare import Preparation
from asyncrl.launch.processes import Supervisor
from asyncrl.launch.restarts import restart_policy
from asyncrl.launch.stalls import Stalls
from asyncrl.metrics.console import Console
from asyncrl.network.addresses import END, STOP, STOPPED, TRAINING, Addresses
from asyncrl.network.tls import Authority


def check(composed: list[tuple[Config, list[str]]]) -> int:
    """Implement --check: print the problems of these runs without starting anything. Return 1 if one would fail, else
    0."""
    wrong = 0
    for folder, (config, arguments) in zip(_folders(composed), composed, strict=True):
        prepared = Preparation(config, folder, cluster_of(config), arguments)
        findings = preflight(prepared)
        findings += [one for hooks in prepared.hooks for one in hooks.examine(prepared)]
        findings = list(dict.fromkeys(findings))
        print(rendered(findings), flush=True)
        wrong |= failed(findings)
    return int(wrong)


def _folders(composed: list[tuple[Config, list[str]]]) -> list[Path]:
    """Return the folders of the runs; several runs get numbered subfolders."""
    folders = [Path(config.run.dir).expanduser().absolute() for config, _ in composed]
    return [folder / str(number) for number, folder in enumerate(folders)] if len(folders) > 1 else folders


def start(composed: list[tuple[Config, list[str]]], began: float) -> None:
    """Run one configuration, or several sequentially (--multirun), or submit them as a job. `began` is the time of the
    command."""
    signal.signal(signal.SIGUSR1, _not_begun)  # until the supervisor installs its handlers
    first, folders = composed[0][0], _folders(composed)
    allow_files()
    cluster = cluster_of(first)
    if not cluster.here:
        runs = [(folder, arguments) for folder, (_, arguments) in zip(folders, composed, strict=True)]
        print(f"asyncrl: {cluster.submit(runs)}")
        return
    sweep: list[tuple[str, Path]] = []
    try:
        for folder, (config, arguments) in zip(folders, composed, strict=True):
            if len(composed) > 1:
                sweep.append((differing(composed, arguments), folder))
                print(f"asyncrl: run {len(sweep)} of {len(composed)}: {sweep[-1][0]}", flush=True)
            _launch(config, folder, began, arguments)
            began = time.time()
    finally:
        if sweep:
            print(sweep_table(sweep), flush=True)


def _launch(config: Config, folder: Path, began: float, arguments: Sequence[str]) -> None:
    """Run one configuration. Raises LaunchError for a folder that is full, gone, or may not be written."""
    try:
        launch(config, folder, began, arguments)
    except OSError as error:
        if (cause := run_folder.explained(error, folder)) is None:
            raise
        raise LaunchError(cause) from error


def differing(composed: Sequence[tuple[Config, list[str]]], arguments: Sequence[str]) -> str:
    """Return those arguments of a run that not every run of the sweep has."""
    return " ".join(one for one in arguments if not all(one in others for _, others in composed))


def sweep_table(sweep: Sequence[tuple[str, Path]]) -> str:
    """Return one line for each run of a sweep: what differs, and what came of it."""
    names = ("steps", "reward/last", "accuracy/after", "samples_per_s")
    lines = [["run", "settings", *names]]
    for number, (differs, folder) in enumerate(sweep):
        file = folder / "summary.json"
        summary = json.loads(file.read_text()) if file.exists() else {}
        lines.append([str(number), differs, *(_short(summary.get(name)) for name in names)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _short(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _not_begun(number: int, _: object) -> None:
    raise Paused("the run was asked to stop before it started")


def launch(config: Config, run_dir: Path, began: float, arguments: Sequence[str] = ()) -> None:
    """Run one configuration to its end, on this machine or on those of the job. `began` is the time of the command, and
    `arguments` are its settings."""
    prepared = Preparation(config, run_dir, cluster_of(config), arguments)
    if config.cluster.preflight:
        require(prepared)
    else:
        prepared.all()
    notes = prepared.notes()  # may refuse the run, too
    config, origin = prepared.chosen.config, prepared.origin
    with _folder_of(prepared) as work_is_left:
        if not work_is_left:
            return
        prepared.begins()
        addresses = _addresses(prepared, began)
        specs = plan(config, addresses, prepared.placement, run_dir)
        stalls = _stalls(config, run_dir, specs)
        specs = _on_machines(prepared, addresses, specs)
        console = Console(config, run_dir)
        resumed = str(origin.folder) if origin else None
        console.opening(resume.changes(config, origin), resumed, notes=notes)
        try:
            supervise(prepared, addresses, specs, console, stalls)
        except (Exception, KeyboardInterrupt, Paused, Stopped) as error:  # every one is raised again
            ended = _ended(prepared, error)
            run_folder.record_end(run_dir, ended)
            if ended is not error:
                raise ended from None
            raise
        finally:
            try:
                console.end()
            finally:  # also where the terminal is gone
                prepared.cluster.end_steps(addresses.run_id)
    console.closing()


@contextmanager
def _folder_of(prepared: Preparation) -> Iterator[bool]:
    """Take the folder of the run, roll it back if the run is resumed, and hold its lock. Yields whether there is
    anything left to do in it. Raises ConfigError if it may not be used."""
    config, run_dir, origin = prepared.chosen.config, prepared.run_dir, prepared.origin
    goes_on = config.resume == "auto" and run_folder.is_run(run_dir) and (run_dir / "config.json").is_file()
    if not goes_on:
        resume.check_apart(run_dir, origin)
        run_folder.prepare(config, run_dir)  # last, because a refused run must not empty a folder
    run_folder.take(run_dir)
    held = resume.lock(run_dir)
    try:
        if goes_on and (reason := resume.finished(config, run_dir, origin)):
            print(f"asyncrl: the run in {run_dir} is complete: {reason}")
            yield False
            return
        if goes_on or origin:
            resume.roll_back(run_dir, origin)
        for mark in (STOP, STOPPED, TRAINING, END):
            (run_dir / mark).unlink(missing_ok=True)
        replace_text(run_dir / "config.json", config.model_dump_json(indent=2) + "\n")  # others may be reading it
        run_folder.record_overrides(config, run_dir, prepared.arguments)
        yield True
    finally:
        os.close(held)


def _addresses(prepared: Preparation, began: float) -> Addresses:
    """Return where the processes of the run find each other, its key and its models, and write it to the run folder."""
    config, placement, origin = prepared.chosen.config, prepared.placement, prepared.origin
    urls = placement.urls()
    for role, section in config.frozen.items():
        urls["frozen"][role] = tuple(section.elsewhere) or urls["frozen"].get(role, ())
    authority = Authority.create(prepared.run_dir) if config.cluster.tls else None
    if authority:
        authority.sign(placement.listening())
    addresses = Addresses(
        run_id=secrets.token_hex(8),
        api_key=prepared.key,
        model=prepared.folders["model"],
        gpus=prepared.gpus,
        started_at=began,
        frozen_models={role: prepared.folders[role] for role in config.frozen if role in prepared.folders},
        resume=origin.folder if origin else None,
        authority=authority.certificate if authority else "",
        attached=tuple(config.engine.urls) if config.generates else (),
        extensions=lookup.shared(config, placement),
        trainers=tuple(sorted({seat.node.address for seat in placement.trainers})),
        **urls,
    )
    addresses.write(prepared.run_dir)
    return addresses


def _stalls(config: Config, run_dir: Path, specs: Sequence[ProcessSpec]) -> Stalls | None:
    """Return the watch over processes that report their progress; None without cluster.stall_timeout."""
    reporting = [spec.name for spec in specs if spec.reports]
    return Stalls(run_dir, reporting, config.cluster.stall_timeout) if config.cluster.stall_timeout else None


def _on_machines(prepared: Preparation, addresses: Addresses, specs: Sequence[ProcessSpec]) -> list[ProcessSpec]:
    """Return the processes as this machine starts them, on the machines of the run."""
    cluster, run_dir = prepared.cluster, prepared.run_dir
    mounts = [run_dir, *prepared.folders.values()]
    lease = Registry(run_dir).file_of_run
    return cluster.steps(specs, run_dir, addresses.run_id, mounts, lease, cluster.restart())


def _ended(prepared: Preparation, error: BaseException) -> BaseException:
    """Return how a run ended that this error ended. A job whose process died is paused, to be started again, if the run
    has made progress: without progress it is no machine failure."""
    run_dir = prepared.run_dir
    if isinstance(error, ProcessDied) and prepared.cluster.requeues and resume.made_progress(run_dir, prepared.origin):
        return Paused(str(error))
    if isinstance(error, Stopped):
        error.advice = resume.advice(run_dir, prepared.arguments, prepared.config)
    return error


def _restarted(config: Config, run_dir: Path, name: str, how: str, died: float) -> None:
    """Record the restart of a process that died at this time."""
    from asyncrl.observability.timeline import LAUNCHER, Phases  # slow, and rarely needed

    phases = Phases(config, run_dir, LAUNCHER, lambda text: print(f"asyncrl: {text}", file=sys.stderr, flush=True))
    phases("restart", -1, died, time.time(), process=name, how=how)
    phases.close()


def supervise(
    prepared: Preparation, addresses: Addresses, specs: list[ProcessSpec], console: Console, stalls: Stalls | None
) -> None:
    """Start the processes and supervise them until all have ended. Raises the same errors as Supervisor.run."""
    config, run_dir, cluster = prepared.chosen.config, prepared.run_dir, prepared.cluster
    facts = config, run_dir, addresses, prepared.placement, cluster
    pilots = [pilot for pilot in (hooks.pilot(*facts) for hooks in prepared.hooks) if pilot]
    policy = restart_policy(run_dir, addresses, specs, cluster.has, restarted=partial(_restarted, config, run_dir))
    registry = Registry(run_dir)
    registry.clear()
    lease = registry.lease_of_run(run_id=addresses.run_id, host=socket.gethostname(), job=cluster.job)
    lease.renew()  # before any process starts that would miss it

    def each_poll() -> None:
        lease.renew()
        console.follow([line for pilot in pilots for line in pilot.each_poll()])

    try:
        Supervisor(specs, run_dir, addresses.run_id, config.cluster.stop_grace, policy, stalls=stalls).run(each_poll)
    finally:
        lease.end()
        for pilot in pilots:
            pilot.end()
