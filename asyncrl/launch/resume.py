"""resume=auto|PATH: choice of the checkpoint, checks of its compatibility, and rollback of the run folder."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl import lookup
from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.manifest import Manifest
from asyncrl.checkpoints.store import FOLDER, CheckpointStore
from asyncrl.config import Config, under_new_names
from asyncrl.errors import ConfigError, RecordError
from asyncrl.jsonl import Tail, replace_text
from asyncrl.launch.compose import argument
from asyncrl.launch.leftovers import sweep
from asyncrl.network.addresses import FILE, LOST, READY

ROLLED_BACK, LOCK, AUTO = "rolled_back", "lock", "auto"
FOLLOWED = {"metrics.jsonl": "version", "eval.jsonl": "version_max"}
"""Files whose lines belong to versions, and the field that holds the version."""
MUST_STAY = ("run.seed", "rollout.batch_groups", "rollout.max_staleness", "rollout.effective_lead", "eval.questions")
"""Settings that must not change, because the groups in flight were admitted, and their prompts drawn, under them."""
OTHER_ANYWAY = (
    "mode",
    "record",
    "resume",
    "checkpoint",
    "run.dir",
    "run.name",
    "run.overwrite",
    "metrics",
    "cluster",
    "engine",
)
"""Settings that say nothing about what is trained."""


@dataclass(frozen=True)
class Resume:
    """A complete checkpoint to resume from."""

    folder: Path
    manifest: Manifest

    @property
    def version(self) -> int:
        """Return its version, which every engine served."""
        return self.manifest.version

    @property
    def run_dir(self) -> Path | None:
        """Return the folder of the run that wrote it; None if the checkpoint was moved."""
        return self.folder.parent.parent if self.folder.parent.name == FOLDER else None


def choose(config: Config, run_dir: Path) -> Resume | None:
    """Return the checkpoint to resume from; None if the run starts fresh. Raises ConfigError if a named one does not
    exist, or does not fit the settings; RecordError if it is damaged, or if none in the run folder is complete."""
    if config.resume is None:
        return None
    if config.resume == AUTO:
        found = CheckpointStore(run_dir).newest(_tell)
        if not found and CheckpointStore(run_dir).versions():
            problem = (
                "no checkpoint is complete: move them away to start over, or resume another run's with resume=PATH"
            )
            raise RecordError(f"{CheckpointStore(run_dir).folder}: {problem}")
    else:
        named = Path(config.resume).expanduser().absolute()
        if (named / manifest.NAME).is_file():
            found = named, manifest.verified(named)
        elif not (found := CheckpointStore(named).newest(_tell)):
            remedy = (
                "It is neither a checkpoint nor a run with a complete one: choose such a folder, or set resume=auto."
            )
            raise ConfigError("resume", config.resume, remedy)
    resume = Resume(*found) if found else None
    if resume:
        _check(config, resume)
    return resume


def origins(config: Config, run_dir: Path) -> list[Path]:
    """Return the folders of which one is that of the run that is resumed: `resume` may name a checkpoint in it."""
    if config.resume is None or config.resume == AUTO:
        return [run_dir] if config.resume else []
    folder = Path(config.resume).expanduser().absolute()
    return [folder, folder.parent.parent]


def _check(config: Config, resume: Resume) -> None:
    """Check that the checkpoint can be resumed with these settings."""
    if not config.generates:
        return
    if manifest.ROLLOUT not in resume.manifest.files:
        mode = resume.manifest.config["mode"]
        raise RecordError(f"{resume.folder} has no rollout state, because no engines ran: resume it with mode={mode}")
    then = Config.model_validate(under_new_names(resume.manifest.config))
    for field in MUST_STAY:
        section, name = field.split(".")
        before, now = (getattr(getattr(one, section), name) for one in (then, config))
        if before != now:
            field = "rollout.lead" if name == "effective_lead" else field
            remedy = f"The checkpoint's unfinished groups were started with {before!r}: resume with that value."
            raise ConfigError(field, now, remedy)
    if missing := sorted(then.mixture.keys() - config.mixture.keys()):
        raise ConfigError(
            "tasks", missing[0], "The checkpoint has unfinished groups of this task: keep it, with a small weight."
        )


def finished(config: Config, run_dir: Path, resume: Resume | None) -> str | None:
    """Return why a run in its own folder is finished: it has ended, and nothing more is requested. None if there is
    work left."""
    summary = run_dir / "summary.json"
    if not summary.exists():
        return None
    if resume is None or resume.version < config.run.max_steps:
        then = resume.manifest.config if resume else json.loads((run_dir / "config.json").read_text())
        if differing(then, config):
            return None
    return str(json.loads(summary.read_text())["reason"])


def advice(run_dir: Path, arguments: Sequence[str], config: Config) -> str:
    """Return what a stopped run goes on from, and the command with which it does."""
    versions = CheckpointStore(run_dir).versions()
    if not versions and not (config.own_mode and config.own_mode.continues):
        return f"; it has no checkpoint{' (checkpoint.every)' if config.trains else ''}, so it starts over"
    kept = [one for one in arguments if not one.startswith(("resume=", "run.dir=", "run.overwrite="))]
    command = shlex.join(["asyncrl-train", *kept, argument("run.dir", str(run_dir)), "resume=auto"])
    newest = f"the newest checkpoint is version {max(versions)}" if versions else "what it has done so far is kept"
    return f"; {newest}. To go on: {command}"


def made_progress(run_dir: Path, origin: Resume | None) -> bool:
    """Return whether the run that has just ended wrote a checkpoint."""
    return max(CheckpointStore(run_dir).versions(), default=-1) > (origin.version if origin else -1)


def check_apart(run_dir: Path, resume: Resume | None) -> None:
    """Refuse to empty a folder that holds the checkpoint to resume from."""
    if resume and run_dir in resume.folder.parents:
        raise ConfigError("resume", str(resume.folder), "It is inside run.dir: set resume=auto, or another run.dir.")


def changes(config: Config, resume: Resume | None) -> list[str]:
    """Return a line "field: before -> now" for each setting that differs from the checkpoint's, or from those of a run
    that this one follows."""
    files = [folder / "config.json" for folder in lookup.followed(config)]
    before = [json.loads(file.read_text()) for file in files if file.is_file()]
    before += [resume.manifest.config] if resume else []
    return [line for one in before for line in differing(one, config)]


def differing(before: dict[str, Any], config: Config) -> list[str]:
    """Return a line "field: before -> now" for each different setting that matters to training."""
    then, now = _flat(under_new_names(before)), _flat(json.loads(config.model_dump_json()))
    others = (*OTHER_ANYWAY, *lookup.apart(config.extensions))
    return [
        f"{name}: {then.get(name)} -> {now.get(name)}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
        and not any(name == other or name.startswith(f"{other}.") for other in others)
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def roll_back(run_dir: Path, resume: Resume | None) -> None:
    """Restore the run folder to its state at the checkpoint, and move everything later aside. A run that resumes in a
    folder of its own gets the lines before the checkpoint. The folder is locked, so nobody is working in it."""
    _end_leftovers(run_dir)
    version = resume.version if resume else -1
    source = resume.run_dir if resume else run_dir
    aside = run_dir / ROLLED_BACK / f"{len(list((run_dir / ROLLED_BACK).glob('*'))):04d}"
    aside.mkdir(parents=True)
    for name, field in FOLLOWED.items():
        lines = Tail(source / name)() if source else []  # only complete lines: the last one may be truncated
        if without := [line for line in lines if not isinstance(line.get(field), int)]:
            raise RecordError(f"{run_dir / name}: a line has no {field}: {str(without[0])[:80]}: repair or delete it")
        kept = [line for line in lines if line[field] <= version]
        if source == run_dir:
            _write(aside / name, [line for line in lines if line[field] > version])
        _write(run_dir / name, kept)
    for name in (LOST, "summary.json"):
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)
    if (run_dir / "config.json").exists():  # a copy: without it the folder has no run to resume
        shutil.copy(run_dir / "config.json", aside)
    (run_dir / READY).unlink(missing_ok=True)
    shutil.rmtree(run_dir / "weights", ignore_errors=True)  # buckets of the disk transport
    for path in CheckpointStore(run_dir).folder.glob("[0-9]*"):
        if int(path.name) > version and (path / manifest.NAME).exists():
            path.rename(aside / f"checkpoint-{path.name}")  # damaged: it was rejected
        elif int(path.name) > version:
            CheckpointStore(run_dir).remove(path)  # incomplete


def _end_leftovers(run_dir: Path) -> None:
    """Kill programs that environments and agents had started, which a killed launcher could not do."""
    with suppress(OSError, ValueError, KeyError):  # there is no such file, or it is truncated
        sweep(json.loads((run_dir / FILE).read_text())["run_id"], ())


def lock(run_dir: Path) -> int:
    """Keep every other launcher out of the folder until this one ends. Raises ConfigError if another one is running
    there."""
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            "run.dir", str(run_dir), "A run is already using this folder: wait for it, or stop it."
        ) from None
    return descriptor


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    if lines or path.exists():
        replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def _tell(text: str) -> None:
    print(f"asyncrl: {text}", file=sys.stderr, flush=True)
