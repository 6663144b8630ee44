"""asyncrl-train with stub engines (scripts/stub_engine.py) and, unless the workload says otherwise, a trainer that
sleeps (stub_trainer.py).

Everything else is the command's own: launcher, supervisor, watches and restarts, the router, the rollout process, the
fleet and its publishes. `python -m tests.integration.stub_run OVERRIDES`, with a Workload in the environment; `add RUN`
adds stub engines as asyncrl-engines does.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.extensions.join import command as engines
from asyncrl.extensions.plan import pilot as elastic
from asyncrl.launch import main as launcher
from asyncrl.launch import run
from asyncrl.launch.plan import ProcessSpec, plan
from asyncrl.launch.plan import engines as plan_of_engines
from tests.integration.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
PIECE = 4
"""Number of tokens per chunk of a streamed answer."""


def stubbed(*arguments: Any) -> list[ProcessSpec]:
    """Return the plan of a run with stub engines and the stub trainer."""
    workload = Workload.read()
    return [_stubbed(spec, workload) for spec in plan(*arguments)]


def _stubbed(spec: ProcessSpec, workload: Workload) -> ProcessSpec:
    if spec.ends_the_run and spec.name != "rollout" and not workload.loaded:  # the program of a mode is the real one
        return replace(spec, argv=[sys.executable, "-m", "tests.integration.stub_trainer", spec.argv[-1]])
    if not spec.url:
        return spec
    number = spec.name.removeprefix("engine-")
    shape = {name: getattr(workload, name) for name in ("per_token", "per_request", "max_running")}
    stub = [
        str(ROOT / "scripts/stub_engine.py"),
        str(urlsplit(spec.url).port),
        f"--lengths={json.dumps(workload.lengths)}",
        f"--shape={json.dumps(shape)}",
        f"--interval={PIECE}",
        f"--start-after={workload.start_after[int(number)] if number.isdigit() else 0.0}",
        "--growth",
        *map(str, workload.growth),
        *([f"--loaded={workload.loaded}"] if workload.loaded else []),
    ]
    return replace(spec, argv=[sys.executable, *stub])


def stubbed_engines(*arguments: Any, **more: Any) -> list[ProcessSpec]:
    """Return stub engines that join a run."""
    workload = Workload.read()
    return [_stubbed(spec, workload) for spec in plan_of_engines(*arguments, **more)]


if __name__ == "__main__":
    run.plan, engines.engines = stubbed, stubbed_engines
    elastic.COMMAND = [sys.executable, "-m", "tests.integration.stub_run"]
    sys.exit(engines.main() if sys.argv[1:2] == ["add"] else launcher.main())
