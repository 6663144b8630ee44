"""Metrics of a run in Prometheus' format, which the rollout process serves at /metrics (ops/README.md).

    histograms, counters    of episodes, tools, batches and publishes, from the timelines (a listener of Timelines)
    gauges                  what the run does now, as in status.json, and the load of the engines
    asyncrl_step_*          the newest record of metrics.jsonl: the field reward/mean is asyncrl_step_reward_mean, and
                            reward/mean/<task> is asyncrl_step_reward_mean_by_task{task="..."}
    asyncrl_eval_*          the newest line of eval.jsonl of each set

Gauges and records are read when Prometheus asks.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncrl.extensions.timelines.reader import durations
from asyncrl.jsonl import Tail
from asyncrl.metrics import fields
from asyncrl.network.addresses import Addresses, metrics_key
from asyncrl.observability.intervals import ENVIRONMENT, TOOL
from asyncrl.observability.timeline import BatchTimeline, GroupTimeline, PublishTimeline, Record

TOKEN = "prometheus.token"
"""File in the run folder with the key of /metrics, for Prometheus. It opens no other route, but those of engines."""
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
"""Upper bounds of the histograms in seconds: an episode takes milliseconds in tests and an hour in practice."""


class Durations:
    """A histogram of seconds. prometheus_client's own takes four times as long to observe a value."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = f"asyncrl_{name}_seconds", text, labels
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, seconds: float, *labels: str) -> None:
        """Count a value."""
        if (counts := self._counts.get(labels)) is None:
            counts = self._counts[labels] = [0] * (len(BUCKETS) + 1)
            self._sums[labels] = 0.0
        counts[bisect_left(BUCKETS, seconds)] += 1
        self._sums[labels] += seconds

    def metric(self) -> Metric:
        """Return the metric with all values so far."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(str, BUCKETS), "+Inf"]
        for labels, counts in self._counts.items():
            family.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), self._sums[labels])
        return family


class PrometheusMetrics(Collector):
    """All metrics of a run."""

    def __init__(self, run_dir: Path, addresses: Addresses, name: str) -> None:
        """Write the key's file, readable by the owner only. `name` is the name of the run."""
        descriptor = os.open(run_dir / TOKEN, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(metrics_key(addresses.api_key))
        self.now: Callable[[], Mapping[str, Any]] = dict
        """Returns the content of status.json."""
        self._info = {"name": name, "run_id": addresses.run_id, "model": addresses.model.name}
        self._steps, self._evaluations, self._warnings = (
            Tail(run_dir / file) for file in ("metrics.jsonl", "eval.jsonl", "warnings.jsonl")
        )
        self._step: dict[str, float] = {}
        self._accuracies: dict[str, dict[str, Any]] = {}
        self._warned = 0
        self._registry = CollectorRegistry()
        self._phases = Durations("episode_phase", "Time that an episode spent in a phase.", "purpose", "phase")
        self._calls = Durations("call", "Time of a call of a tool or an environment.", "kind", "name")
        self._waits = Durations("batch_wait", "Time that the trainer waited for a batch.")
        self._holds = Durations("publish_hold", "Time for which requests were held back for a publish.")
        self._failures: Counter[tuple[str, str]] = Counter()
        self._groups: Counter[tuple[str, str, str]] = Counter()
        self._registry.register(self)

    def __call__(self, record: Record) -> None:
        """Count a record of the timeline."""
        if isinstance(record, GroupTimeline):
            self._groups[record.purpose, record.task, record.outcome] += 1
            for episode in record.episodes:
                for phase, seconds in durations(episode).items():
                    if seconds:
                        self._phases.observe(seconds, record.purpose, phase)
                for one in episode.intervals:
                    if one.phase in (TOOL, ENVIRONMENT):
                        self._calls.observe(one.seconds, one.phase, one.name)
                        if one.outcome:
                            self._failures[one.phase, one.name] += 1
        elif isinstance(record, BatchTimeline):
            self._waits.observe(record.taken - record.asked)
        elif isinstance(record, PublishTimeline):
            self._holds.observe(record.released - record.held)

    def render(self) -> bytes:
        """Return everything as text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what is read at the moment."""
        yield from (one.metric() for one in (self._phases, self._calls, self._waits, self._holds))
        ended = [({"purpose": p, "task": t, "outcome": o}, count) for (p, t, o), count in self._groups.items()]
        yield _counter("groups_ended", "Groups by outcome.", *ended)
        failed = [({"kind": kind, "name": name}, count) for (kind, name), count in self._failures.items()]
        yield _counter("call_failures", "Failed calls.", *failed)
        yield _gauge("run", "Always 1; its labels name the run.", (self._info, 1.0))
        if now := self.now():
            yield from _state(now)
            yield from _engines(now["engines"])
            busy = [({"gpu": str(one["gpu"])}, one["utilization"]) for one in now.get("gpus", [])]
            yield _gauge("gpu_utilization_ratio", "Of the GPUs of the rollout process's machine.", *busy)
            memory = [({"gpu": str(one["gpu"])}, one["memory"]) for one in now.get("gpus", [])]
            yield _gauge("gpu_memory_bytes", "Memory in use on these GPUs.", *memory)
        yield from self._newest()

    def _newest(self) -> Iterator[Metric]:
        """Yield the newest records of the run's files."""
        for record in self._steps():
            self._step = record
        for line in self._evaluations():
            self._accuracies[line["set"]] = line
        self._warned += len(self._warnings())
        yield _counter("warnings", "Lines of warnings.jsonl.", ({}, self._warned))
        by_name: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for field, value in self._step.items():
            name, labels = exposed(field)
            by_name[f"step_{name}"].append((labels, value))
        for line in self._accuracies.values():
            for field, value in line.items():
                if isinstance(value, int | float):
                    by_name[f"eval_{_plain(field)}"].append(({"set": line["set"]}, value))
        for name, values in by_name.items():
            yield _gauge(name, "Newest value (asyncrl/metrics/fields.py).", *values)


def _state(now: Mapping[str, Any]) -> Iterator[Metric]:
    ledger = now["ledger"]
    yield _gauge("version", "Version of the weights that the engines serve.", ({}, now["version"]))
    yield _gauge("holding", "1 while requests are held back because the weights change.", ({}, now["holding"]))
    episodes = [({"phase": phase}, count) for phase, count in now["episodes"].items()]
    yield _gauge("episodes_running", "Running episodes by what they do.", *episodes)
    states = ("running", "ready", "training")
    yield _gauge("groups", "Groups by state.", *(({"state": state}, ledger["groups"][state]) for state in states))
    yield _counter("groups_trained", "Groups that were trained.", ({}, ledger["groups"]["trained"]))
    rejected = [({"reason": reason}, count) for reason, count in ledger["groups"]["rejected"].items()]
    yield _counter("groups_rejected", "Rejected groups by reason.", *rejected)
    for state in ("generated", "trained", "rejected", "discarded"):
        yield _counter(f"tokens_{state}", f"Tokens that were {state}.", ({}, ledger["tokens"][state]))
    retried = [({"cause": cause}, count) for cause, count in ledger["events"]["retried"].items()]
    yield _counter("requests_continued", "Requests that were sent again, by cause.", *retried)


def _engines(engines: list[Mapping[str, Any]]) -> Iterator[Metric]:
    def each(field: str) -> list[tuple[dict[str, str], float]]:
        return [({"engine": one["url"]}, one[field]) for one in engines if one.get(field) is not None]

    up = [({"engine": one["url"]}, float(one["state"] == "serving")) for one in engines]
    yield _gauge("engine_up", "1 if the engine answers.", *up)
    yield _gauge("engine_requests_running", "Requests that the engine processes.", *each("running"))
    yield _gauge("engine_requests_queued", "Requests in the engine's queue.", *each("waiting"))
    yield _gauge("engine_cache_tokens", "Tokens in the KV cache that running requests hold.", *each("used"))
    yield _gauge("engine_cache_capacity_tokens", "Size of the KV cache.", *each("capacity"))
    yield _gauge("engine_tokens_per_second", "Tokens generated per second.", *each("tokens_per_s"))
    yield _gauge("engine_cache_hit_ratio", "Fraction of prompt tokens found in the prefix cache.", *each("cache_hit"))
    yield _counter("engine_preemptions", "Requests retracted because the cache was full.", *each("preemptions"))


Value = tuple[Mapping[str, str], float]


def _gauge(name: str, text: str, *values: Value) -> Metric:
    return _filled(GaugeMetricFamily(f"asyncrl_{name}", text, labels=_labels(values)), values)


def _counter(name: str, text: str, *values: Value) -> Metric:
    return _filled(CounterMetricFamily(f"asyncrl_{name}", text, labels=_labels(values)), values)


def _labels(values: tuple[Value, ...]) -> list[str]:
    return list(values[0][0]) if values else []


def _filled(family: Any, values: tuple[Value, ...]) -> Metric:
    for labels, value in values:
        family.add_metric(list(labels.values()), value)
    return family


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return a pattern for each documented field that has placeholders, and its name here."""
    found = []
    for field in (field for field in fields.of_steps() if "<" in field):
        names = re.findall(r"<(\w+)>", field)
        pattern = re.sub(r"<(\w+)>", r"(?P<\1>.+)", re.escape(field).replace(r"\<", "<").replace(r"\>", ">"))
        plain = _plain(re.sub(r"<\w+>", "", field))
        found.append((re.compile(pattern), f"{plain}_by_{'_and_'.join(names)}"))
    return found


@cache
def exposed(field: str) -> tuple[str, dict[str, str]]:
    """Return name and labels of a field of metrics.jsonl."""
    for pattern, name in _patterns() if field not in _documented() else ():
        if found := pattern.fullmatch(field):
            return name, found.groupdict()
    return _plain(field), {}


@cache
def _documented() -> frozenset[str]:
    """Return the fields without placeholders."""
    return frozenset(field for field in fields.of_steps() if "<" not in field)


def _plain(name: str) -> str:
    return re.sub(r"\W+", "_", name.replace("@", "_at_")).strip("_")
