"""Sinks of step records besides metrics.jsonl: TensorBoard, Weights & Biases and MLflow.

Each sink has a thread of its own, which imports the package, sends what is queued, and ends with the run. The trainer
only appends to the queue.

waits for     the disk or a server, in the sink's thread; the end of the run, at most CLOSE_SECONDS
on a failure  the sink warns once, and tries again with the next step; what does not fit in the queue is dropped
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl import jsonl
from asyncrl.config import Config
from asyncrl.config.secret_values import secrets
from asyncrl.errors import visible
from asyncrl.extensions.sinks.extension import SinkSettings
from asyncrl.jsonl import Tail
from asyncrl.schema import Batch

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Figures = Mapping[str, Any]
WAITING = 100
"""Number of steps that a sink may be behind."""
CLOSE_SECONDS = 10.0
MOST_CHARACTERS = 8_000
"""Longest prompt or answer that a table holds."""
IDS = "sinks.json"
"""File in the run folder with the names of the run in the sinks, under which a resumed run goes on."""


@dataclass(frozen=True)
class EpisodeText:
    """A sampled episode as the tables show it."""

    step: int
    uid: str
    task: str
    reward: float
    staleness: int
    tokens: int
    prompt: str
    answer: str


class Sink(Protocol):
    """Receiver of metrics. Any exception of a call is reported."""

    def write(self, step: int, figures: Figures) -> None:
        """Send metrics of a step."""
        ...

    def show(self, step: int, episodes: Sequence[EpisodeText]) -> None:
        """Send the texts of episodes."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class TensorBoard:
    """Sink that writes TensorBoard event files to tb/."""

    def __init__(self, folder: Path, first: int | None = None) -> None:
        """Open the event files. `first` is the step that a resumed run continues with; recorded events from that step
        on are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=10, purge_step=first)

    def write(self, step: int, figures: Figures) -> None:
        """Write each metric as a scalar."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def show(self, step: int, episodes: Sequence[EpisodeText]) -> None:
        """Write the episodes as a text, indented so that Markdown shows it as it is."""
        lines = [f"{name}: {value}" for one in episodes for name, value in asdict(one).items()]
        self._writer.add_text("episodes", "\n".join("    " + part for one in lines for part in one.splitlines()), step)

    def close(self) -> None:
        """Close the event files."""
        self._writer.close()


class Wandb:
    """Sink for Weights & Biases."""

    def __init__(self, config: Config, arguments: Mapping[str, Any], run_dir: Path, run: str) -> None:
        """Begin or resume the run with these arguments of wandb.init. The package is imported here, because it takes
        seconds."""
        import wandb

        given = dict(arguments)
        common: dict[str, Any] = {"project": "asyncrl", "name": config.run.name, "resume": "allow"}
        common |= {"config": json.loads(config.model_dump_json())}
        settings = wandb.Settings(console="off", disable_git=True, silent=True)
        if key := given.pop("api_key", None):
            settings.api_key = str.__str__(key)
        own: dict[str, Any] = {"id": run, "dir": str(run_dir), "settings": settings}
        self._table = wandb.Table
        self._run = wandb.init(**(common | own | given))
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: Figures) -> None:
        """Log the metrics; the step is one of them, because evaluations arrive late."""
        self._run.log({**figures, "step": step})

    def show(self, step: int, episodes: Sequence[EpisodeText]) -> None:
        """Log the episodes as a table."""
        rows = [asdict(one) for one in episodes]
        table = self._table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"episodes": table, "step": step})

    def close(self) -> None:
        """Wait until everything is sent."""
        self._run.finish()


class MLflow:
    """Sink for MLflow."""

    def __init__(
        self, config: Config, given: Mapping[str, Any], run_dir: Path, known: Callable[[Callable[[], str]], str]
    ) -> None:
        """Begin or resume the run with these settings. `known` returns the id of an earlier start, or what the function
        makes."""
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without it, MLflow refuses to write to a folder
        from mlflow import MlflowClient

        uri = given.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or (run_dir / "mlruns").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        name = str(given.get("experiment", "asyncrl"))
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        create = partial(self._client.create_run, experiment, run_name=config.run.name)
        self._run = known(lambda: create().info.run_id)
        self._client.log_text(self._run, config.model_dump_json(indent=2), "config.json")

    def write(self, step: int, figures: Figures) -> None:
        """Log the metrics in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        names = {name: name.replace("/", ".").replace("@", "_at_") for name in figures}  # "loss" is no folder
        metrics = [Metric(names[name], float(value), now, step) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def show(self, step: int, episodes: Sequence[EpisodeText]) -> None:
        """Log the episodes as a file."""
        text = json.dumps([asdict(one) for one in episodes], indent=2)
        self._client.log_text(self._run, text, f"episodes/{step:06d}.json")

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class BackgroundSink:
    """A sink in a thread of its own."""

    def __init__(self, name: str, build: Callable[[], Sink], warn: Callable[[str, int], None]) -> None:
        """`build` is called in the thread; `warn` receives a text and a step."""
        self._name, self._build, self._warn = name, build, warn
        self._queue: Queue[Callable[[Sink], None] | None] = Queue(WAITING)
        self._told, self._step, self.failures = False, 0, 0
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, send: Callable[[Sink], None]) -> None:
        """Queue a call for the sink. It is dropped if the sink is too far behind."""
        self._step = step
        try:
            self._queue.put_nowait(send)
        except Full:
            self._failed(f"it is {WAITING} calls behind")

    def close(self, deadline: float) -> bool:
        """Wait until everything is sent, at most until `deadline` on the monotonic clock. Return whether it was."""
        try:
            self._queue.put(None, timeout=max(0.0, deadline - time.monotonic()))
        except Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        sink: Sink | None = None
        ended = False
        while not ended:
            send = self._queue.get()
            ended = send is None
            try:
                if sink is None and send:
                    sink = self._build()
                if sink:
                    send(sink) if send else sink.close()
            except Exception as error:  # noqa: BLE001  packages raise anything, and no sink may end a run
                self._failed(f"{type(error).__name__}: {error}")

    def _failed(self, why: str) -> None:
        self.failures += 1
        if not self._told:
            self._told = True
            self._warn(f"sinks.names={self._name} failed, and is tried again at each step: {why}", self._step)


class Sinks:
    """All sinks of a run."""

    def __init__(
        self,
        config: Config,
        settings: SinkSettings,
        run_dir: Path,
        model: Path,
        warn: Callable[[str, int], None],
        first: int | None = None,
    ) -> None:
        """Start them. `model` is the folder with the tokenizer; `first` is the step with which a resumed run goes
        on."""
        self._episodes, self._model, self._run_dir = settings.episodes, model, run_dir
        self._evaluations = Tail(run_dir / "eval.jsonl", new=first is not None)
        self._tokenizer: Tokenizer | None = None
        builds: dict[str, Callable[[], Sink]] = {
            "tensorboard": lambda: TensorBoard(run_dir / "tb", first),
            "wandb": lambda: Wandb(config, settings.wandb, run_dir, self._known("wandb", _new_id)),
            "mlflow": lambda: MLflow(config, settings.mlflow, run_dir, partial(self._known, "mlflow")),
        }
        self._lock = threading.Lock()
        keys = [str.__str__(key) for _, key in secrets(settings)]

        def tell(text: str, step: int) -> None:
            for key in keys:
                text = text.replace(key, "***")  # an address with a password may stand in an exception
            warn(text, step)

        self._sinks = [BackgroundSink(name, builds[name], tell) for name in dict.fromkeys(settings.names)]

    def write(self, record: Figures, batch: Batch) -> None:
        """Queue the record of a step, a few episodes of its batch, and the evaluations since the last call."""
        step, lines = int(record["step"]), self._evaluations()
        sampled = _sampled(batch, step, self._episodes)

        def send(sink: Sink) -> None:
            sink.write(step, record)
            _write_evaluations(sink, lines)
            if sampled:
                sink.show(step, [self._text(one) for one in sampled])

        for one in self._sinks:
            one.put(step, send)

    def close(self) -> bool:
        """Send what is left, for at most CLOSE_SECONDS. Return whether every sink has ended."""
        deadline, lines = time.monotonic() + CLOSE_SECONDS, self._evaluations()
        for one in self._sinks:
            one.put(0, lambda sink: _write_evaluations(sink, lines))
        ended = [one.close(deadline) for one in self._sinks]
        return all(ended)

    def _text(self, one: _SampledEpisode) -> EpisodeText:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(self._model / "tokenizer.json"))
        texts = (visible(self._tokenizer.decode(ids, skip_special_tokens=False)) for ids in (one.prompt, one.answer))
        return EpisodeText(*one.figures, *(text[:MOST_CHARACTERS] for text in texts))

    def _known(self, name: str, make: Callable[[], str]) -> str:
        """Return the id of the run in a sink: the one of an earlier start, or a new one, which is kept."""
        path = self._run_dir / IDS
        with self._lock:
            ids = json.loads(path.read_text()) if path.exists() else {}
            if name not in ids:
                ids[name] = make()
                jsonl.replace(path, ids)
            return str(ids[name])


@dataclass(frozen=True)
class _SampledEpisode:
    """An episode whose tokens the sinks' threads decode."""

    figures: tuple[int, str, str, float, int, int]
    prompt: list[int]
    answer: list[int]


def _sampled(batch: Batch, step: int, count: int) -> list[_SampledEpisode]:
    """Return some episodes of a batch. They are copied, because a queue of batches would take too much memory."""
    places = [(group, index) for group in batch.groups for index in range(len(group.trajectories))]
    found = []
    for group, index in random.Random(step).sample(places, min(count, len(places))):
        one = group.trajectories[index]
        figures = (step, group.uid, group.task, one.total, group.staleness(batch.version)[index], one.num_tokens)
        answer = [token for turn in one.turns for token in (*turn.observation, *turn.completion.token_ids)]
        found.append(_SampledEpisode(figures, group.prompt_ids, answer))
    return found


def _write_evaluations(sink: Sink, lines: Sequence[Figures]) -> None:
    """Send the numbers of lines of eval.jsonl, under the names of their sets."""
    for line in lines:
        figures = {f"eval/{line['set']}/{name}": one for name, one in line.items() if isinstance(one, int | float)}
        sink.write(int(line["version_max"]), figures)


def _new_id() -> str:
    return uuid.uuid4().hex
