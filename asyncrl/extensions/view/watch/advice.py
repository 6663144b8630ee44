"""Advice about a run: what limits its throughput now, which setting would help, and signs that training goes wrong.

    trainer law        a step takes at least the trainer's own work: time/train + time/publish
    generation law     a step takes at least the engines' work on its tokens
    Little's law       requests in flight are what the staleness bound admits: about kappa * lead * episodes of a batch,
                       where kappa is the mean length of an answer over that of the longest of its group; engines that
                       are not full under it are starved by the bound, and a higher lead than fills them adds staleness

Each rule is a pure function of what was measured. It returns advice with the figures that it stands on, or None.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl import lookup
from asyncrl.extensions.view.watch.anatomy import Straggler

Row = Mapping[str, Any]
WINDOW = 20
"""Number of latest steps that stand for now."""
WAITS = 0.1
"""Share of the time above which a trainer that waits for batches is not what binds."""
OUTSIDE = 0.5
"""Share of the episodes' time outside the engines above which the environment binds."""
INSIDE = ("queued", "prefill", "decode", "retry")
"""Phases of an episode in the engines."""
SAME = 1e-6
"""Difference of rewards below which they count as equal."""
FULL = 0.9
"""Share of the KV cache above which memory binds."""


@dataclass(frozen=True)
class Evidence:
    """What was measured of a run."""

    steps: Sequence[Row] = ()
    """Lines of metrics.jsonl."""
    evaluations: Sequence[Row] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    engines: Sequence[Row] = ()
    """Of status.json."""
    seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Of the latest batches' episodes, by phase and name."""
    stragglers: Sequence[Straggler] = ()
    """Of the latest batches."""
    gpus: int = 0
    """GPUs of a machine; on CPUs, more requests at once hardly raise an engine's throughput."""
    since: int = 0
    """Version from which this launch resumed. Earlier steps had other conditions, and do not count as now."""
    died: str = ""
    """The error of which the run died."""
    log: Sequence[str] = ()
    """Lines of its logs that matter."""

    @property
    def recent(self) -> Sequence[Row]:
        """The latest steps of this launch."""
        return [row for row in self.steps[-WINDOW:] if row["step"] > self.since]

    def mean(self, name: str, steps: Sequence[Row] | None = None) -> float | None:
        """Return the mean of a metric over the latest steps that have it."""
        found = [row[name] for row in (self.recent if steps is None else steps) if name in row]
        return statistics.fmean(found) if found else None

    def share(self, name: str) -> float:
        """Return the share of the latest steps' time: at most 1, though what another process measured may not fall
        into the same steps exactly."""
        total = sum(row.get("time/step", 0.0) for row in self.recent)
        return min(1.0, sum(row.get(name, 0.0) for row in self.recent) / total) if total else 0.0

    def setting(self, name: str, default: Any = None) -> Any:
        """Return a setting by its dotted name."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value


@dataclass(frozen=True)
class Advice:
    """A finding, what to do about it, and the figures that it stands on."""

    rule: str
    level: Literal["info", "warning", "alarm"]
    title: str
    text: str
    settings: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    """Lines of files, which are shown as they are."""


Rule = Callable[[Evidence], Advice | None]


def died(evidence: Evidence) -> Advice | None:
    """Return an alarm with the error of which the run died."""
    if not evidence.died:
        return None
    lines = (*evidence.died.splitlines(), *evidence.log)
    return Advice("died", "alarm", "This run died", "It wrote no summary, and no process of it goes on.", lines=lines)


def binding(evidence: Evidence) -> Advice | None:
    """Return what limits the throughput now."""
    if len(evidence.recent) < 2:
        return None
    figures = {name: evidence.share(f"time/{name}") for name in ("wait_batch", "train", "publish", "engine_busy")}
    if figures["publish"] > max(figures["wait_batch"], figures["train"]):
        return _binds(
            "publishing weights",
            "Publishing takes more time than training and than waiting for batches. Use a faster transport, or larger "
            "batches, so that versions change less often.",
            ("weights.transport", "rollout.batch_groups"),
            figures,
        )
    if figures["wait_batch"] < WAITS:
        return _binds(
            "the trainer",
            "Batches are ready before the trainer asks for them. More trainer ranks shorten the step; so do fewer "
            "engines in favour of the trainer, or less recomputation.",
            ("trainer.data_parallel", "trainer.micro_batch_tokens", "trainer.recompute.granularity"),
            figures,
        )
    return (
        _outside(evidence, figures)
        or _memory(evidence, figures)
        or _bound(evidence, figures)
        or _binds(
            "the engines",
            "The trainer waits for batches, and the engines work all the time on what they can hold. More "
            "engines shorten the step, or fewer trainer ranks in their favour.",
            ("engine.count", "engine.tensor_parallel", "rollout.max_new_tokens"),
            figures,
        )
    )


def _binds(what: str, text: str, settings: tuple[str, ...], figures: Mapping[str, float]) -> Advice:
    return Advice("binding", "info", f"Bound by {what}", text, settings, figures)


def _outside(evidence: Evidence, figures: Mapping[str, float]) -> Advice | None:
    """Environments, tools and rewards: episodes spend most of their time outside the engines."""
    outside: dict[str, float] = {}
    for (phase, name), seconds in evidence.seconds.items():
        if phase in ("tool", "environment", "reward", "agent", "teacher"):
            key = f"{phase} {name}".strip()
            outside[key] = outside.get(key, 0.0) + seconds
    inside = sum(evidence.seconds.get(key, 0.0) for key in evidence.seconds if key[0] in ("prefill", "decode"))
    share = sum(outside.values()) / max(1e-9, inside + sum(outside.values()))
    if share < OUTSIDE:
        return None
    slowest = max(outside, key=lambda key: outside[key])
    figures = {**figures, "outside engines": share, slowest: outside[slowest] / sum(outside.values())}
    return _binds(
        "the environment",
        f"Episodes spend {share:.0%} of their working time outside the engines, most "
        f"of it in {slowest}. More environments at once, or more groups in flight, hide that time.",
        ("task.environments.concurrency", "rollout.max_running_groups", "rollout.lead"),
        figures,
    )


def _memory(evidence: Evidence, figures: Mapping[str, float]) -> Advice | None:
    """The KV cache: requests queue in the engines, or are prefilled again because the cache is full."""
    use, queued = evidence.mean("engines/cache_use") or 0.0, evidence.mean("engines/queued") or 0.0
    use, wasted = min(1.0, use), min(1.0, evidence.mean("engines/prefill_wasted") or 0.0)
    if use < FULL and (use < 0.5 or wasted < 0.1):  # an empty cache is prefilled again for new versions
        return None
    figures = {**figures, "engines/cache_use": use, "engines/queued": queued, "engines/prefill_wasted": wasted}
    return _binds(
        "the engines' memory",
        f"The KV cache is {use:.0%} full and {wasted:.0%} of the engines' time goes "
        "into prefilling tokens again. A larger cache or more engines hold more requests; fewer running groups "
        "waste less.",
        ("engine.max_total_tokens", "engine.count", "rollout.max_running_groups"),
        figures,
    )


def _bound(evidence: Evidence, figures: Mapping[str, float]) -> Advice | None:
    """The staleness bound: it admits fewer requests than the engines could hold."""
    running, busy = evidence.mean("engines/running"), figures["engine_busy"]
    capacity = evidence.setting("engine.max_running_requests", 0) * max(1, evidence.setting("engine.count", 1))
    lead = evidence.setting("rollout.lead") or evidence.setting("rollout.max_staleness", 0)
    size = evidence.setting("rollout.batch_groups", 0) * evidence.setting("rollout.group_size", 0)
    limit, in_play = evidence.mean("concurrency/limit"), evidence.mean("concurrency/in_play")
    if limit is not None and in_play is not None and in_play >= 0.95 * limit:
        return None  # episodes wait for room, not for tickets
    if use := evidence.mean("engines/cache_use"):
        capacity = min(capacity, (running or 0.0) / use)
    if running is None or not capacity or running >= 0.5 * capacity or (busy >= FULL and not evidence.gpus):
        return None
    useful = lead * capacity / max(running, 1.0)
    figures = {**figures, "engines/running": running, "capacity": capacity, "lead": lead, "episodes of a batch": size}
    figures["useful lead"] = useful
    return _binds(
        "the staleness bound",
        f"The engines process {running:.0f} of the {capacity:.0f} requests that they "
        f"could hold, {busy:.0%} of the time, because no more groups are admitted. They would be full at a lead of "
        f"about {useful:.1f}; beyond it only staleness grows.",
        ("rollout.max_staleness", "rollout.lead", "trainer.batch_parts", "rollout.oversample"),
        figures,
    )


def tail(evidence: Evidence) -> Advice | None:
    """Return what batches wait for last, if that costs much of the time."""
    took = {row["step"] - 1: row.get("time/step", 0.0) for row in evidence.recent}  # step n trains batch n - 1
    late = [one for one in evidence.stragglers if one.step in took]
    waited, total = sum(min(one.waited, took[one.step]) for one in late), sum(took[one.step] for one in late)
    if not late or waited < WAITS * total:
        return None
    spent: dict[str, float] = {}
    for one in late:
        key = f"{one.phase} {one.name}".strip()
        spent[key] = spent.get(key, 0.0) + one.seconds
    worst = max(spent, key=lambda key: spent[key])
    share = min(1.0, spent[worst] / max(1e-9, sum(one.total for one in late)))
    inside = worst.partition(" ")[0] in INSIDE
    remedy = "Spare groups or a higher staleness bound" if inside else "A faster one, a deadline, or spare groups"
    return Advice(
        "tail",
        "warning",
        f"Batches wait for {worst}",
        f"The last episodes of {len(late)} batches spent {share:.0%} of their time in {worst}, and the trainer waited "
        f"{waited:.1f} s for these batches, {waited / total:.0%} of its time. {remedy} would shorten the tail; "
        "training in parts would use the time.",
        ("rollout.oversample", "rollout.max_staleness" if inside else "rollout.episode_timeout", "trainer.batch_parts"),
        {"waited": waited, "steps": total, worst: spent[worst], "share of the last episodes": share},
    )


def slow_engine(evidence: Evidence) -> Advice | None:
    """Return an engine that generates less than half as fast as the others for each of its requests."""
    rates = {
        str(one["url"]): one["tokens_per_s"] / one["running"]
        for one in evidence.engines
        if one.get("running") and one.get("tokens_per_s") is not None
    }
    if len(rates) < 2:
        return None
    slowest = min(rates, key=lambda url: rates[url])
    usual = statistics.median(rate for url, rate in rates.items() if url != slowest)
    if rates[slowest] > 0.5 * usual:
        return None
    figures = {"tokens/s of a request": rates[slowest], "of the others": usual}
    return Advice(
        "slow_engine",
        "alarm",
        f"Engine {slowest} is slow",
        f"It generates {rates[slowest]:.1f} tokens/s for each request, the others {usual:.1f}. Look at its "
        "machine: another process, a hot or throttled GPU, a slow network.",
        (),
        figures,
    )


def lost_engine(evidence: Evidence) -> Advice | None:
    """Return the engines that do not answer."""
    silent = [str(one["url"]) for one in evidence.engines if one.get("state") not in (None, "serving")]
    if not silent:
        return None
    figures = {"silent": float(len(silent)), "engines": float(len(evidence.engines))}
    return Advice(
        "lost_engine",
        "warning",
        f"{len(silent)} of {len(evidence.engines)} engines do not serve",
        f"Not serving: {', '.join(silent[:4])}. They may be starting again: see their logs.",
        ("cluster.on_engine_death", "cluster.max_restarts"),
        figures,
    )


def zero_signal(evidence: Evidence) -> Advice | None:
    """Return a warning if most groups have equal rewards, and so teach nothing."""
    signal, reward = evidence.mean("groups/signal"), evidence.mean("reward/mean")
    if signal is None or signal >= 0.5:
        return None
    solved = (reward or 0.0) > 0.5
    figures = {"groups/signal": signal, "reward/mean": reward or 0.0}
    if _constant(evidence):
        return Advice(
            "zero_signal",
            "alarm",
            f"Every answer got the reward {reward or 0.0:.3g}",
            f"All rewards of the latest {len(evidence.recent)} steps are equal, so that nothing is learned. Give the "
            "reward an answer that you know to be right and one that is wrong, and read some episodes. If the reward "
            "is right, no answer of the model makes a difference to it yet: begin with other questions.",
            ("task.reward", "rollout.max_new_tokens", "task.weight"),
            figures,
        )
    of_an_extension = ("curriculum.function",) if "curriculum" in lookup.shipped() else ()
    return Advice(
        "zero_signal",
        "warning",
        f"{1 - signal:.0%} of the groups teach nothing",
        f"All rewards of such a group are equal: most questions are too {'easy' if solved else 'hard'}. "
        "Reject these groups, mix in other tasks, or draw more answers to a question.",
        ("rollout.accept", *of_an_extension, "rollout.group_size", "task.weight"),
        figures,
    )


def length_drift(evidence: Evidence) -> Advice | None:
    """Return a warning if answers have grown much longer while the held-out accuracy has not."""
    if len(evidence.steps) < 2 * WINDOW:
        return None
    first, now = (evidence.mean("completion/length", steps) for steps in (evidence.steps[:WINDOW], evidence.recent))
    cut = evidence.mean("completion/truncated") or 0.0
    if first is None or now is None or now < 1.5 * first or _gained(evidence) > 0.02:
        return None
    figures = {"length at first": first, "length now": now, "completion/truncated": cut, "accuracy": _gained(evidence)}
    return Advice(
        "length_drift",
        "warning",
        f"Answers grew from {first:.0f} to {now:.0f} tokens",
        f"The held-out accuracy did not gain from it; {cut:.0%} of the answers are cut off. Penalize "
        "overlong answers, or average the loss over tokens.",
        ("algo.shaping.overlong_buffer", "algo.shaping.length_penalty", "algo.aggregation"),
        figures,
    )


def reward_hacking(evidence: Evidence) -> Advice | None:
    """Return an alarm if the reward, or a part of it, rises while the held-out accuracy falls."""
    accuracies = [row["accuracy"] for row in _set(evidence)]
    if len(accuracies) < 3 or len(evidence.steps) < 2 * WINDOW:
        return None
    best, last = max(accuracies), accuracies[-1]
    names = [n for n in evidence.steps[-1] if n == "reward/mean" or n.startswith(("reward/part/", "reward/mean/"))]
    at_best = _set(evidence)[accuracies.index(best)]["version_max"]
    then = [row for row in evidence.steps if row["version"] <= at_best][-WINDOW:] or evidence.steps[:WINDOW]
    gains = {name: (evidence.mean(name) or 0.0) - (evidence.mean(name, then) or 0.0) for name in names}
    gained = max(gains, key=lambda name: gains[name], default="")
    if not gained or best - last < 0.03 or gains[gained] < 0.03:
        return None
    figures = {"accuracy at best": best, "accuracy now": last, f"{gained}: gain since": gains[gained]}
    return Advice(
        "reward_hacking",
        "alarm",
        f"{gained} rises while the held-out accuracy falls",
        f"Since version {at_best} it gained {gains[gained]:.3f}, and the accuracy fell from {best:.3f} to "
        f"{last:.3f}. Read episodes with a high reward; keep an earlier checkpoint; hold the "
        "policy closer to its reference.",
        ("task.reward", "algo.kl.coefficient", "algo.trust_region"),
        figures,
    )


def gap(evidence: Evidence) -> Advice | None:
    """Return an alarm if trainer and engines disagree about the probabilities of tokens more than before."""
    first = evidence.mean("logprob_gap/mean", evidence.steps[:WINDOW])
    now, ess = evidence.mean("logprob_gap/mean"), evidence.mean("correction/ess")
    if first is None or now is None:
        return None
    grown = len(evidence.steps) > WINDOW and now > 3 * max(first, 0.02)
    if not grown and (ess is None or ess > 0.5):
        return None
    fresh = evidence.mean("logprob_gap/lag0") or evidence.mean("logprob_gap/lag1")
    figures = {"gap at first": first, "logprob_gap/mean": now, "correction/ess": 1.0 if ess is None else ess}
    numerics = fresh is not None and fresh > 0.7 * now
    if fresh is not None:
        figures["gap of the newest tokens"] = fresh
    return Advice(
        "gap",
        "alarm",
        f"Trainer and engines are {now:.3f} nats apart",
        (
            "Fresh tokens have the gap too, so it is numerics: check number formats and kernels. "
            if numerics
            else "Older tokens have it: lower the staleness bound or the learning rate, or correct for it. "
        )
        + f"At first it was {first:.3f}.",
        ("rollout.max_staleness", "trainer.optimizer.lr", "algo.correction", "engine.dtype"),
        figures,
    )


def bad_steps(evidence: Evidence) -> Advice | None:
    """Return a warning if updates were not applied."""
    skipped, bad = evidence.mean("step/skipped") or 0.0, evidence.mean("step/bad") or 0.0
    if skipped < 0.25 and bad < 0.05:
        return None
    return Advice(
        "bad_steps",
        "warning",
        f"{skipped:.0%} of the latest updates were not applied",
        "No group had a signal, or the gradient was not finite or above its bound.",
        ("trainer.bad_grad_norm", "trainer.optimizer.lr", "rollout.accept"),
        {"step/skipped": skipped, "step/bad": bad},
    )


RULES: tuple[Rule, ...] = (
    died,
    binding,
    tail,
    slow_engine,
    lost_engine,
    reward_hacking,
    gap,
    length_drift,
    zero_signal,
    bad_steps,
)


def advise(evidence: Evidence) -> list[Advice]:
    """Return all advice, the gravest first."""
    found = [advice for rule in RULES if (advice := rule(evidence))]
    return sorted(found, key=lambda one: ("alarm", "warning", "info").index(one.level))


def _constant(evidence: Evidence) -> bool:
    """Return whether all answers of the latest steps had the same reward."""
    spread = [row.get("reward/std", 1.0) for row in evidence.recent]
    means = [row.get("reward/mean", 0.0) for row in evidence.recent]
    return len(means) > 1 and max(spread) < SAME and max(means) - min(means) < SAME


def _set(evidence: Evidence) -> list[Row]:
    """Return the evaluations of the first set."""
    rows = evidence.evaluations
    return [row for row in rows if row["set"] == rows[0]["set"]]


def _gained(evidence: Evidence) -> float:
    """Return how much the held-out accuracy gained since the first evaluation."""
    accuracies = [row["accuracy"] for row in _set(evidence)]
    return accuracies[-1] - accuracies[0] if len(accuracies) > 1 else 0.0
