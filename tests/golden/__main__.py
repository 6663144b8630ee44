"""Compare what this working tree computes with what a commit computes: python -m tests.golden BASE (make golden).

    python -m tests.golden write FILE      writes the values of the tree that it runs in
    python -m tests.golden BASE            writes those of the commit BASE, in a worktree of its own, and of this tree

Every value is text under a name, such as `plan/tiny/cpu/engine-0/argv`. Names and values must be the same, apart from
what changes.toml names. Bits of floating-point sums depend on the machine, so both sides are computed on this one;
those of BASE are kept in .venv/golden.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from hydra.errors import HydraException

from asyncrl import config as configuration
from asyncrl.errors import ConfigError
from asyncrl.extensions.recording import events
from asyncrl.launch.help import further_confs
from asyncrl.launch.main import CONF
from asyncrl.launch.placement import Node, place
from asyncrl.launch.plan import plan
from asyncrl.metrics import fields as metrics
from asyncrl.network.ports import free_port
from asyncrl.rollout.snapshot import Snapshot
from asyncrl.schema import Batch, Completion, Trajectory, encode
from tests.fakes import addresses, completion, compose_values, missing, trajectory
from tests.golden import replay

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".venv/golden"
CHANGES = Path(__file__).with_name("changes.toml")
PORTS = tuple(range(20000, 20400))
MACHINES = {"cpu": [Node("", "127.0.0.1", (), PORTS)]}
MACHINES["gpu"] = [Node(f"n{n}", f"10.0.0.{n}", tuple("01234567"), PORTS, "eth0", 30000) for n in range(64)]
PLANS = {
    "two-engines": ["engine.count=2", "trainer.tensor_parallel=2", "engine.tensor_parallel=2"],
    "teacher": ["teacher=sglang", "teacher.model=/teacher", "+distill.coefficient=1"],
    "judge": ["judge=sglang", "judge.model=/judge"],
    "colocated": ["cluster.placement=colocated", "weights.pause_mode=retract", "rollout.max_staleness=1"],
    "adapters": ["trainer.lora.rank=4", "weights.lora=versions"],
    "processes": ["processes.count=2"],
    "alone": ["mode=rollout_only", "record=true"],
    "replay": ["mode=replay", "replay.from=/runs/a", "replay.schedule=true"],
    "plain": ["cluster.tls=false", "observe.engines=true", "deterministic=true", "rollout.max_staleness=0"],
}
"""Settings on top of experiment=tiny whose processes are planned, in addition to those of every experiment."""
RESOLVED = [f"{part}.dtype=bfloat16" for part in ("trainer", "engine", "teacher", "judge")]
"""What the launcher has chosen before it plans."""


# -- configurations, and processes of a plan -----------------------------------------------------------------


def of_configurations() -> Iterator[tuple[str, Any]]:
    """Yield every field of config.json of every shipped experiment, and every process of its plan."""
    folders = [conf / "experiment" for conf in (CONF, *further_confs())]
    experiments = sorted(file.stem for folder in folders for file in folder.glob("*.yaml"))
    cases = {name: [f"experiment={name}", *missing(name)] for name in experiments}
    cases |= {name: ["experiment=tiny", *settings] for name, settings in PLANS.items()}
    for name, settings in cases.items():
        try:
            config = configuration.load(compose_values(*settings, "run.dir=/runs/r"))
        except (ConfigError, HydraException) as error:  # a setting that is gone
            yield f"config/{name}", f"{type(error).__name__}: {error}"
            continue
        for field, value in _leaves(json.loads(config.model_dump_json())):
            yield f"config/{name}/{field}", value
        resolved = configuration.load(compose_values(*settings, "run.dir=/runs/r", *RESOLVED))
        for machine, nodes in MACHINES.items():
            yield from ((f"plan/{name}/{machine}/{key}", value) for key, value in _processes(resolved, nodes))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else name)
    else:
        yield path, value


def _processes(config: configuration.Config, nodes: list[Node]) -> Iterator[tuple[str, Any]]:
    try:
        placement = place(config, nodes)
        gpus = max(len(node.gpus) for node in nodes)
        models = {role: Path(f"/{role}") for role in ("teacher", "judge")}
        started = replace(addresses(gpus=gpus), **placement.urls(), frozen_models=models, authority="ca")
        specs = plan(config, started, placement, Path("/runs/r"))
    except (ConfigError, ValueError) as error:
        yield "refused", str(error)
        return
    for order, spec in enumerate(specs):
        yield f"{spec.name}/order", order
        for field in fields(spec):
            value = getattr(spec, field.name)
            for name, item in _leaves(value, field.name) if isinstance(value, dict) else [(field.name, value)]:
                yield f"{spec.name}/{name}", item


# -- bytes ---------------------------------------------------------------------------------------------------


def of_bytes() -> Iterator[tuple[str, Any]]:
    """Yield the bytes of a batch, of a recorded one, and of the rollout side of a checkpoint."""
    groups = replay.groups()
    yield "bytes/batch", encode(Batch(4, groups, {"rate": 0.5}, last=False)).hex()
    for number, group in enumerate(groups):
        record = events.packed(group)
        yield f"bytes/record/{number}", encode(record).hex()
        if events.unpacked(record) != group:
            yield f"bytes/record/{number}/differs", True
    yield "bytes/snapshot", encode(_filled(Snapshot)).hex()


def _filled(kind: Any) -> Any:
    """Return an object of this type with something in each of its fields."""
    plain = {int: 3, str: "a", float: 0.5, bool: True, bytes: b"b", msgspec.Raw: msgspec.Raw(b"\xc0"), Any: "any"}
    origin, inner = get_origin(kind), get_args(kind)
    if kind in plain:
        return plain[kind]
    if kind in (Completion, Trajectory):  # they check that their parts fit
        return completion(3, (1, 2)) if kind is Completion else trajectory(1.0)
    if origin is Literal:
        return inner[0]
    if origin is Union or str(origin) == "<class 'types.UnionType'>":
        return _filled(next(one for one in inner if one is not type(None)))
    if origin in (list, set, frozenset):
        return origin([_filled(inner[0])])
    if origin is tuple:
        return tuple(_filled(one) for one in inner if one is not ...)
    if origin is not None:
        return {_filled(inner[0]): _filled(inner[1])}
    if is_dataclass(kind):
        hints, names = get_type_hints(kind), [field.name for field in fields(kind) if field.init]
    else:
        hints, names = get_type_hints(kind), list(kind.__struct_fields__)
    return kind(**{name: _filled(hints[name]) for name in names})


def of_metrics() -> Iterator[tuple[str, Any]]:
    """Yield the names of all metrics."""
    offered = metrics.tables().values() if hasattr(metrics, "tables") else ()  # of extensions, too
    for table in (*vars(metrics).values(), *offered):
        if isinstance(table, dict):
            yield from ((f"metric/{name}", "") for name in table if isinstance(name, str) and "__" not in name)


# -- replay --------------------------------------------------------------------------------------------------


def of_replay() -> Iterator[tuple[str, Any]]:
    """Yield what ranks compute that train the same batches with every algorithm."""
    with tempfile.TemporaryDirectory() as folder:
        replay.prepare(Path(folder))
        for world in replay.LAYOUTS:
            port = free_port("127.0.0.1")
            common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
            env = {**os.environ, **common, "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, "-m", "tests.golden.replay", folder]
            ranks = [
                subprocess.Popen(command, cwd=ROOT, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(world)
            ]
            try:
                codes = [rank.wait(timeout=600) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
            if any(codes):
                raise SystemExit(f"golden: replay with {world} ranks failed")
        for file in sorted(Path(folder).glob("*.json")):
            yield from ((f"replay/{name}", value) for name, value in json.loads(file.read_text()).items())


# -- comparison ----------------------------------------------------------------------------------------------


def write(file: Path) -> None:
    """Write all values of this tree."""
    found: dict[str, str] = {}
    for part in (of_configurations, of_bytes, of_metrics, of_replay):
        for name, value in part():
            text = json.dumps(value, default=str, sort_keys=isinstance(value, dict))
            found[name] = text.replace(sys.executable, "PYTHON").replace(str(ROOT), "ROOT")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=0))


def compare(before: Mapping[str, str], after: Mapping[str, str], changes: Mapping[str, Any]) -> list[str]:
    """Return one line for each difference that `changes` does not name."""
    renamed = changes.get("renamed", {})

    def new(name: str) -> str:
        for old, other in renamed.items():
            name = re.sub(old, other, name)
        return name

    def named(kind: str, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in changes.get(kind, {}))

    before = {new(name): value for name, value in before.items()}
    gone = [f"gone: {name}" for name in before.keys() - after.keys() if not named("removed", name)]
    come = [f"new: {name} = {after[name]}" for name in after.keys() - before.keys() if not named("added", name)]
    shared = [name for name in before.keys() & after.keys() if before[name] != after[name]]
    other = [f"{name}: {before[name]} -> {after[name]}" for name in shared if not named("changed", name)]
    return sorted([*gone, *come, *other])


def values_of(base: str) -> dict[str, str]:
    """Return the values of a commit. If it has no oracle yet, that of this tree is copied into it."""
    commit = subprocess.check_output(["git", "rev-parse", f"{base}^{{commit}}"], cwd=ROOT, text=True).strip()
    oracle = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))))
    file = KEPT / f"{commit[:12]}-{oracle.hexdigest()[:8]}.json"
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "base"
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
            try:
                if not (tree / "tests/golden").exists():
                    (tree / "tests/golden").mkdir()
                    for own in Path(__file__).parent.glob("*.py"):
                        (tree / "tests/golden" / own.name).write_bytes(own.read_bytes())
                _written(tree, file)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    found: dict[str, str] = json.loads(file.read_text())
    return found


def _written(tree: Path, file: Path) -> None:
    path = {**os.environ, "PYTHONPATH": str(tree)}
    subprocess.run([sys.executable, "-m", "tests.golden", "write", str(file)], cwd=tree, env=path, check=True)


def main(base: str) -> int:
    """Compare this tree with a commit. Return 1 for any difference that is not intended."""
    before = values_of(base)
    with tempfile.TemporaryDirectory() as folder:
        _written(ROOT, Path(folder) / "here.json")
        after = json.loads((Path(folder) / "here.json").read_text())
    found = compare(before, after, tomllib.loads(CHANGES.read_text()))
    print(*(line[:400] for line in found), sep="\n")
    print(f"golden: {len(after)} values, {len(found)} differ from {base} in a way that {CHANGES.name} does not name")
    return int(bool(found))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]).absolute())
    else:
        sys.exit(main(sys.argv[1]))
