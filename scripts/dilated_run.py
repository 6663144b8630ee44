"""A run without computation: the real rollout process and router, with stub engines that take the time of a decode step
(scripts/stub_engine.py) and a trainer that sleeps for the duration of its step.

All parts that determine the order of events are asyncrl's own: buffer, client, service, router, the training loop with
its batch source, the protocol of a publish, and the thread in which it runs with weights.overlap. Only the bytes are
missing: filling the buckets and sending them are pauses of the setting's length.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl import CONF, tasks  # noqa: E402
from asyncrl import config as configuration  # noqa: E402
from asyncrl.agents.template import ChatTemplate  # noqa: E402
from asyncrl.config import Config  # noqa: E402
from asyncrl.engine.fleet import Fleet  # noqa: E402
from asyncrl.engine.router import router_argv  # noqa: E402
from asyncrl.engine.update import Update  # noqa: E402
from asyncrl.extensions.plan.lengths import Lengths  # noqa: E402
from asyncrl.extensions.plan.simulation import Setting, SimulatedEpisode, SimulatedWorkload  # noqa: E402
from asyncrl.launch.machine import this_node  # noqa: E402
from asyncrl.launch.placement import place, ports_wanted  # noqa: E402
from asyncrl.metrics.record import StepLog  # noqa: E402
from asyncrl.models import catalog  # noqa: E402
from asyncrl.network.addresses import Addresses  # noqa: E402
from asyncrl.rollout.parts import load_tokenizer  # noqa: E402
from asyncrl.rollout.prompts import Prompts  # noqa: E402
from asyncrl.schema import Batch, decode_batch  # noqa: E402
from asyncrl.tasks.build import build  # noqa: E402
from asyncrl.trainer.batch_source import RolloutClient  # noqa: E402
from asyncrl.trainer.loop import train  # noqa: E402
from asyncrl.trainer.stop import StopRule  # noqa: E402
from asyncrl.weights.background import Background  # noqa: E402
from asyncrl.weights.publish import Staged, StagedPublisher  # noqa: E402
from scripts.slow_tools import REJECTED, VARIABLE, accepted  # noqa: E402
from scripts.stub_engine import number_of  # noqa: E402

KEY = "bench"
PIECE = 16
"""Number of tokens per chunk of a streamed answer."""


@dataclass(frozen=True)
class Measured:
    """Results after the warm-up. Seconds are those of a step."""

    tokens_per_s: float
    step: float
    staleness_mean: float
    staleness_max: int
    trainer_busy: float
    """Fraction of the time in which the trainer trains or fills buckets."""
    engines_still: float
    """Seconds for which a publish pauses the engines."""
    trainer_still: float
    """Seconds for which the trainer waits for a publish, or fills buckets for it."""
    trainer_waits: float
    """Seconds for which the trainer waits for its batch."""
    in_flight: float
    """Mean number of requests that the engines hold during a publish."""
    crossing: float
    """Fraction of the trained answers that were generated under several versions."""
    repeated: int
    """Number of requests that were continued after an interruption, over the whole run."""
    beside: int
    """Number of batches, over the whole run, whose training began while a version was being published."""


class DilatedRun:
    """Runs of one workload. Each `run` starts all processes again."""

    def __init__(self, lengths: Lengths, batch_groups: int, rejected: float = 0.0) -> None:
        """`rejected` is the fraction of groups that dynamic sampling rejects."""
        self._lengths, self._batch_groups, self._rejected = lengths, batch_groups, rejected
        self._agent = "scripts.slow_tools:SlowTools" if lengths.turns > 1 else "asyncrl.agents.single_turn:SingleTurn"
        self._folder = Path(tempfile.mkdtemp(prefix="dilated-"))
        self._model = self._folder / "model"
        shutil.copytree(catalog.resolve("builtin:tiny"), self._model)
        settings = json.loads((self._model / "config.json").read_text())
        (self._model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 1 << 20}))

    def close(self) -> None:
        """Remove the temporary files."""
        shutil.rmtree(self._folder)

    def workload(self) -> SimulatedWorkload:
        """Return the same groups in the same order, for the simulation."""
        config = self._config(Setting(1, 1.0, 0, in_play=0))
        prompts = Prompts(config, _tasks(config), ChatTemplate(load_tokenizer(self._model, None)), 1 << 20)
        stream = next(iter(prompts.training.values()))
        numbers = [number_of(prompt.token_ids) for prompt in islice(stream, 4096)]
        episodes = self._lengths.episodes()

        def of(number: int) -> list[SimulatedEpisode]:
            return list(episodes(numbers[number]))

        return SimulatedWorkload(
            of,
            self._batch_groups,
            longest=self._lengths.longest,
            accepted=lambda number: accepted(numbers[number], self._rejected),
        )

    def run(self, setting: Setting, steps: int, warm: int, *, fill: float = 0.0) -> Measured:
        """Train `warm` + `steps` batches. `fill` is the part of `setting.train_fixed` in which buckets are filled.
        Raises RuntimeError if a trained answer has not the length of the workload."""
        config = self._config(setting)
        with self._processes(config, setting) as addresses:
            return DilatedTrainer(addresses, config, setting, fill, self._lengths).run(steps, warm)

    def _config(self, setting: Setting) -> Config:
        groups = "auto" if setting.in_play is None else setting.in_play // self._lengths.group_size or "null"
        overrides = [
            "experiment=tiny",
            "task.params.digits=8",
            "eval.questions=0",
            "cluster.tls=false",  # the stub engines speak http
            f"engine.count={setting.engines}",
            "engine.request_timeout=600",
            f"rollout.batch_groups={self._batch_groups}",
            f"rollout.group_size={self._lengths.group_size}",
            f"rollout.max_staleness={setting.max_staleness}",
            f"rollout.lead={'null' if setting.lead is None else setting.lead}",
            f"rollout.spread_siblings={str(setting.spread).lower()}",
            "rollout.accept=scripts.slow_tools:accept",
            f"rollout.max_running_groups={groups}",
            "rollout.coalesce=true",
            f"rollout.max_new_tokens={self._lengths.longest}",
            f"agent={self._agent}",
            f"weights.pause_mode={'drain' if setting.drain else 'in_place'}",
            f"weights.overlap={str(setting.overlap).lower()}",
        ]
        with initialize_config_dir(str(CONF), version_base=None):
            values: Any = OmegaConf.to_container(compose("train", overrides), resolve=True)
        return configuration.load(values)

    @contextmanager
    def _processes(self, config: Config, setting: Setting) -> Iterator[Addresses]:
        placement = place(config, [this_node(config.cluster.host, None, 0, ports_wanted(config))])
        addresses = Addresses(
            run_id="bench",
            api_key=KEY,
            model=self._model,
            gpus=0,
            started_at=time.time(),
            **placement.urls(),
        )
        run_dir = Path(tempfile.mkdtemp(dir=self._folder))
        (run_dir / "config.json").write_text(config.model_dump_json())
        addresses.write(run_dir)
        stub = [
            str(ROOT / "scripts/stub_engine.py"),
            *(str(seats[0].port) for seats in placement.engines),
            f"--lengths={json.dumps(asdict(self._lengths))}",
            f"--shape={json.dumps(_finite(asdict(setting.shape)))}",
            f"--interval={PIECE}",
        ]
        commands = [
            [sys.executable, *stub],
            router_argv(config.engine, addresses.router, placement.router.meeting),
            [sys.executable, "-m", "asyncrl.rollout", str(run_dir)],
        ]
        env = {
            **os.environ,
            "ASYNCRL_API_KEY": KEY,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            VARIABLE: json.dumps(asdict(self._lengths)),
            REJECTED: str(self._rejected),
        }
        with (run_dir / "log").open("w") as log:
            running = [subprocess.Popen(command, env=env, stdout=log, stderr=log) for command in commands]
        try:
            yield addresses
        except Exception as error:
            raise RuntimeError(f"{error}\n{(run_dir / 'log').read_text()[-3000:]}") from error
        finally:
            for process in running:
                process.kill()
                process.wait(30)


def _finite(shape: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in shape.items() if value != float("inf")}


def _tasks(config: Config) -> dict[str, tasks.Task]:
    return {name: build(task) for name, task in config.mixture.items()}


class DilatedTrainer(StagedPublisher):
    """The real training loop around updates that sleep. A publish has the steps of asyncrl/weights/publish.py, but only
    the version's number is sent."""

    stopped = False

    def __init__(self, addresses: Addresses, config: Config, setting: Setting, fill: float, lengths: Lengths) -> None:
        self._setting, self._fill, self._episodes = setting, fill, lengths.episodes()
        self._fleet = Fleet(addresses.engines, addresses.access, 30.0)
        self._update = Update(self._fleet, mode=config.weights.pause_mode)
        self._source = RolloutClient(addresses.rollout, addresses.access, config.rollout.batch_timeout)
        self._run = config.run
        self._tokens = 0  # of the parts of a batch so far
        self._publishing = False
        self._in_flight, self._beside = list[int](), 0

    def run(self, steps: int, warm: int) -> Measured:
        """Train `warm` + `steps` batches, and measure the latter."""
        log, stop = StepLog([], started_at=time.time()), StopRule(self._run, end=warm + steps)
        publisher = Background(self) if self._setting.overlap else self
        batches: Any = self  # which asks the rollout process itself: there is a single rank
        train(self._update_weights, batches, publisher, log, stop, save=lambda version: None)
        publisher.finish()
        retried = self._source.status()["ledger"]["events"]["retried"]
        self._fleet.close()
        self._source._http.close()

        def mean(name: str) -> float:
            return fmean(step[name] for step in log.steps[warm:])

        return Measured(
            mean("tokens/trained") / mean("time/step"),
            mean("time/step"),
            mean("staleness/mean"),
            int(max(step["staleness/max"] for step in log.steps[warm:])),
            (mean("time/train") + self._fill) / mean("time/step"),
            mean("time/pause"),
            mean("time/publish"),
            mean("time/wait_batch"),
            fmean(self._in_flight[warm:]),
            mean("staleness/mixed"),
            sum(retried.values()),
            self._beside,
        )

    def get(self, version: int, part: int = 0) -> Batch:
        """Wait for a part of a batch, as BatchFeed does."""
        return decode_batch(self._source.batch(version, part, self._setting.parts, interrupt=lambda: False))

    def _update_weights(self, batch: Batch) -> dict[str, float]:
        """Sleep for as long as it takes to train a part of a batch."""
        started = time.monotonic()
        self._beside += self._publishing
        for group in batch.groups:
            planned = sorted(episode.tokens for episode in self._episodes(number_of(group.prompt_ids)))
            if sorted(group.lengths) != planned:
                raise RuntimeError(f"group {group.uid} has answers of {sorted(group.lengths)} tokens, not {planned}")
        tokens = sum(group.num_tokens for group in batch.groups)
        fixed = self._setting.train_fixed - self._fill if batch.last else 0.0
        time.sleep(max(0.0, started + tokens / self._setting.train_rate + fixed - time.monotonic()))
        self._tokens += tokens
        if not batch.last:
            return {}
        trained, self._tokens = self._tokens, 0
        return {"tokens/trained": trained}

    def stage(self, version: int) -> Staged:
        """Fill the buckets."""
        time.sleep(self._fill)
        self._publishing = True
        return Staged(version, {"fill": self._fill, "bytes": 0.0, "engines": float(len(self._fleet.serving))})

    def complete(self, staged: Staged) -> dict[str, float]:
        """Pause the engines for as long as the setting says, and let them serve the version."""
        self._source.hold()
        with self._update.paused() as pause:
            held = self._fleet.on_each(lambda url: self._fleet.get(url, "/figures"))
            self._in_flight.append(sum(engine["in_flight"] for engine in held.values()))
            self._update.label(staged.version)  # while the bytes travel, so that the pause is as long as the setting's
            time.sleep(max(0.0, pause.began + self._setting.pause - time.monotonic()))
        self._source.announce(staged.version)
        self._publishing = False
        return {**staged.metrics, "pause": pause.seconds, "verify": 0.0}
