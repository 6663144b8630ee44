"""The preflight of a run: all checks, ordered so that each failure explains later ones: settings, model,
machines, and what extensions check.

A job that has not been submitted has no machines yet: placeholders stand in for them, and checks that need the machines
are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from asyncrl.config import on_gpu
from asyncrl.errors import LaunchError
from asyncrl.launch import precision
from asyncrl.launch.checks.findings import Finding, error, failed, ok, refused, rendered, warning
from asyncrl.launch.checks.model import check_model
from asyncrl.launch.checks.model_files import check_model_files, read_model
from asyncrl.launch.leftovers import SHARED
from asyncrl.launch.machine import allow_files
from asyncrl.launch.prepare import Preparation
from asyncrl.launch.run_folder import SHARED_REMEDY, full


def preflight(prepared: Preparation) -> list[Finding]:
    """Take the steps of the preparation, and run all checks that are possible before anything is started."""
    return list(dict.fromkeys(_all(prepared)))  # several steps may build the tasks and be refused alike


def require(prepared: Preparation) -> None:
    """Run and print the preflight. Raises LaunchError if the run would fail."""
    findings = preflight(prepared)
    print(rendered(findings), flush=True)
    if failed(findings):
        names = ", ".join(dict.fromkeys(one.field for one in findings if one.level == "error"))
        raise LaunchError(f"Preflight failed: {names} (cluster.preflight)")


def _all(prepared: Preparation) -> Iterator[Finding]:
    yield from refused(prepared.files, "task")
    yield from refused(prepared.plan, "extensions")
    yield from refused(prepared.place, "cluster")
    config = prepared.config
    if prepared.cluster.here:
        yield from refused(allow_files, "ulimit -n")
        yield from (error(str(SHARED), problem, f"Or {SHARED_REMEDY}.") for problem in full([SHARED]))
    for role in prepared.roles:
        yield from _model(prepared, role)
    yield from refused(prepared.choose_checkpoint, "resume")
    prepared.chosen = precision.Precision(prepared.resolved(precision.assumed(config, prepared.gpus)))
    if prepared.is_placed:
        yield from _precision(prepared)
        if not prepared.cluster.here:
            text = f"a job of {len(prepared.cluster.nodes)} machine(s): its machines are checked when it starts"
            yield ok("cluster.launcher", text)
    for hooks in prepared.hooks:
        yield from refused(partial(hooks.refuse, prepared), "extensions")
        yield from hooks.preflight(prepared)


def _precision(prepared: Preparation) -> Iterator[Finding]:
    """Report the number format of each part."""
    config = prepared.config
    if prepared.cluster.here:
        yield from refused(prepared.precision, "trainer.dtype")
    for part in () if prepared.cluster.here else ("trainer", "engine"):
        section = getattr(config, part)
        if section.dtype == precision.AUTO:
            later = "auto: decided by the job's machines when it starts"
            yield ok(f"{part}.dtype", "bfloat16, auto: it runs on GPUs" if on_gpu(section, prepared.gpus) else later)
    for choice in prepared.chosen.choices:
        text = f"{choice.dtype}, {choice.why}"
        yield warning(choice.field, text, choice.remedy) if choice.remedy else ok(choice.field, text)


# -- models ------------------------------------------------------------------------------------------


def _model(prepared: Preparation, role: str) -> Iterator[Finding]:
    """Check a model folder. Those of models that are not trained are only checked if this run starts them."""
    field = "model.path" if role == "model" else f"{role}.model"
    yield from refused(partial(prepared.find, role), field)
    if role not in prepared.folders:
        return
    if role != "model" and not getattr(prepared.config, role).started:
        yield from refused(partial(prepared.read, role), field)
        return
    folder = prepared.folders[role]
    files = read_model(folder, field)
    yield from check_model_files(folder, files, field)
    if files.problems:
        return
    hf = prepared.read(role)
    if role == "model":
        problems = refused(partial(check_model, prepared.config, hf, prepared.gpus), field)
        yield from problems
        if problems:
            return
    prepared.weights[role] = files.weights
