"""Each piece of advice appears where its cause was measured, names its figures and real settings, and not otherwise."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.extensions.view.watch import advice
from asyncrl.extensions.view.watch.advice import Advice, Evidence, Rule, advise
from asyncrl.extensions.view.watch.anatomy import Straggler
from asyncrl.launch.help import ALGORITHMS, field_names

CONFIG = {
    "engine": {"max_running_requests": 256, "count": 2},
    "rollout": {"max_staleness": 2, "lead": None, "batch_groups": 16, "group_size": 8},
}
STEP = {
    "time/step": 10.0, "time/wait_batch": 0.5, "time/train": 8.0, "time/publish": 1.0, "time/engine_busy": 10.0,
    "engines/running": 200.0, "engines/queued": 0.0, "engines/cache_use": 0.6, "engines/prefill_wasted": 0.0,
    "groups/signal": 0.8, "reward/mean": 0.5, "completion/length": 100.0, "completion/truncated": 0.1,
    "logprob_gap/mean": 0.01, "logprob_gap/lag0": 0.008, "correction/ess": 0.95, "step/skipped": 0.0,
}  # fmt: skip
WAITING = {"time/wait_batch": 5.0, "time/train": 4.0}


def steps(count: int = 50, **changes: Any) -> list[dict[str, Any]]:
    """Steps of a healthy run in which the trainer binds. The changes hold for the latest window."""
    rows = [{"step": step, "version": step, **STEP} for step in range(1, count + 1)]
    for row in rows[-advice.WINDOW :]:
        row.update(changes)
    return rows


def evidence(**changes: Any) -> Evidence:
    return Evidence(steps(**changes), config=CONFIG)


def evaluations(*accuracies: float) -> list[dict[str, Any]]:
    return [{"set": "s", "version_max": 12 * place, "accuracy": value} for place, value in enumerate(accuracies)]


def found(rule: Rule, facts: Evidence) -> Advice:
    told = rule(facts)
    assert told is not None
    assert told.figures
    return told


def test_a_healthy_run_is_told_what_binds_and_nothing_else() -> None:
    (only,) = advise(replace(evidence(), evaluations=evaluations(0.2, 0.4, 0.5)))
    assert only.title == "Bound by the trainer"
    assert only.figures["train"] == 0.8
    assert advise(Evidence()) == []


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("the trainer", {}),
        ("publishing weights", {"time/publish": 5.0, "time/train": 4.0}),
        ("the engines", {**WAITING, "engines/running": 400.0, "engines/cache_use": 0.8}),
        ("the engines' memory", {**WAITING, "engines/cache_use": 0.95, "engines/queued": 30.0}),
        ("the engines' memory", {**WAITING, "engines/prefill_wasted": 0.3}),
        ("the engines", {**WAITING, "engines/prefill_wasted": 0.3, "engines/cache_use": 0.04}),
        (
            "the staleness bound",
            {**WAITING, "engines/running": 40.0, "engines/cache_use": 0.1, "time/engine_busy": 6.0},
        ),
    ],
)
def test_what_binds_follows_from_the_shares_of_time(what: str, changes: dict[str, float]) -> None:
    assert found(advice.binding, evidence(**changes)).title == f"Bound by {what}"


def test_environment_binds_where_episodes_spend_their_time() -> None:
    seconds = {("decode", ""): 20.0, ("tool", "search"): 70.0, ("tool", "python"): 5.0, ("waiting", ""): 500.0}
    told = found(advice.binding, replace(evidence(**WAITING), seconds=seconds))
    assert told.title == "Bound by the environment"
    assert told.figures["outside engines"] == pytest.approx(75 / 95)
    assert told.figures["tool search"] == pytest.approx(70 / 75)


def test_useful_lead_follows_from_littles_law() -> None:
    """At lead 2, 40 requests run; the cache would hold 400: ten times the lead fills it."""
    changes = {**WAITING, "engines/running": 40.0, "engines/cache_use": 0.1, "time/engine_busy": 6.0}
    assert found(advice.binding, evidence(**changes)).figures["useful lead"] == pytest.approx(20)


def test_busy_engines_on_cpus_are_not_called_starved() -> None:
    changes = {**WAITING, "engines/running": 40.0, "engines/cache_use": 0.1}
    assert found(advice.binding, evidence(**changes)).title == "Bound by the engines"
    assert found(advice.binding, replace(evidence(**changes), gpus=8)).title == "Bound by the staleness bound"


def test_tail_names_the_tool_that_batches_wait_for() -> None:
    late = Straggler("g1", 0, "sum", "tool", "search", 6.0, 8.0, 4.0)
    told = found(advice.tail, replace(evidence(), stragglers=[replace(late, step=step) for step in range(45, 50)]))
    assert told.title == "Batches wait for tool search"
    assert (told.figures["waited"], told.figures["share of the last episodes"]) == (20.0, 0.75)
    assert advice.tail(replace(evidence(), stragglers=[replace(late, waited=0.1, step=49)])) is None


def test_no_share_exceeds_the_whole() -> None:
    """The first batches of a run are waited for long before their step has a line, tools are called at once, and the
    rollout process measures between other moments than the trainer."""
    late = Straggler("g1", 0, "sum", "tool", "search", 30.0, 8.0, 60.0)
    told = found(advice.tail, replace(evidence(), stragglers=[replace(late, step=step) for step in (48, 49, 50, 51)]))
    assert (told.figures["waited"], told.figures["steps"], told.figures["share of the last episodes"]) == (20, 20, 1.0)
    assert re.findall(r"\d+%", told.text) == ["100%", "100%"]
    over = {**WAITING, "engines/running": 40.0, "engines/cache_use": 0.1, "time/engine_busy": 14.0}
    told = found(advice.binding, replace(evidence(**over), gpus=8))
    assert (told.title, told.figures["engine_busy"]) == ("Bound by the staleness bound", 1.0)
    assert "100% of the time" in told.text


def test_now_is_this_launch_alone_after_a_resume() -> None:
    """Before, the engines bound and no update was applied; since, the trainer binds and all are applied."""
    rows = steps(**{**WAITING, "step/skipped": 1.0, "groups/signal": 0.1})
    rows[-3:] = steps()[-3:]
    before = Straggler("g1", 0, "sum", "tool", "search", 6.0, 8.0, 4.0, step=40)
    both = replace(evidence(), steps=rows, stragglers=[before])
    assert {one.rule for one in advise(both)} >= {"tail", "bad_steps", "zero_signal"}
    (only,) = advise(replace(both, since=47))
    assert (only.title, only.figures["train"]) == ("Bound by the trainer", 0.8)
    assert advise(replace(both, since=50)) == []


def test_engine_is_slow_by_requests_and_lost_if_silent() -> None:
    engines = [
        {"url": f"e{n}", "state": "serving", "running": 10 + n, "tokens_per_s": 500.0 + 50 * n} for n in range(3)
    ]
    assert advice.slow_engine(replace(evidence(), engines=engines)) is None
    engines[1]["tokens_per_s"] = 100.0
    assert found(advice.slow_engine, replace(evidence(), engines=engines)).title == "Engine e1 is slow"
    lost = replace(evidence(), engines=[*engines, {"url": "e3", "state": "silent"}])
    assert found(advice.lost_engine, lost).title == "1 of 4 engines do not serve"


def test_zero_signal_says_too_easy_or_too_hard() -> None:
    assert "too hard" in found(advice.zero_signal, evidence(**{"groups/signal": 0.2, "reward/mean": 0.1})).text
    assert "too easy" in found(advice.zero_signal, evidence(**{"groups/signal": 0.2, "reward/mean": 0.9})).text
    assert advice.zero_signal(evidence()) is None


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_constant_rewards_are_not_called_easy_or_hard(reward: float) -> None:
    same = {"groups/signal": 0.0, "reward/mean": reward, "reward/std": 0.0}
    told = found(advice.zero_signal, evidence(**same))
    assert told.title == f"Every answer got the reward {reward:.3g}"
    assert (told.level, "too hard" in told.text, "too easy" in told.text) == ("alarm", False, False)
    spread = evidence(**same | {"reward/std": 0.2})
    assert "teach nothing" in found(advice.zero_signal, spread).title


def test_length_drifts_only_without_a_gain_in_accuracy() -> None:
    longer = evidence(**{"completion/length": 180.0})
    assert "100 to 180" in found(advice.length_drift, replace(longer, evaluations=evaluations(0.5, 0.5))).title
    assert advice.length_drift(replace(longer, evaluations=evaluations(0.5, 0.6))) is None
    assert advice.length_drift(evidence()) is None


def test_hacking_is_a_rising_part_with_falling_accuracy() -> None:
    rows = steps(**{"reward/part/format": 0.9})
    for row in rows:
        row.setdefault("reward/part/format", 0.2)
    facts = replace(evidence(), steps=rows, evaluations=evaluations(0.3, 0.6, 0.5, 0.4))
    told = found(advice.reward_hacking, facts)
    assert told.title.startswith("reward/part/format rises")
    assert (told.figures["accuracy at best"], told.figures["accuracy now"]) == (0.6, 0.4)
    assert advice.reward_hacking(replace(facts, evaluations=evaluations(0.3, 0.4, 0.5, 0.6))) is None
    assert advice.reward_hacking(replace(facts, steps=steps())) is None


def test_gap_is_told_apart_into_numerics_and_staleness() -> None:
    assert "numerics" in found(advice.gap, evidence(**{"logprob_gap/mean": 0.1, "logprob_gap/lag0": 0.09})).text
    assert "Older tokens" in found(advice.gap, evidence(**{"logprob_gap/mean": 0.1})).text
    assert found(advice.gap, evidence(**{"correction/ess": 0.3})).figures["correction/ess"] == pytest.approx(0.3)
    assert advice.gap(evidence(**{"logprob_gap/mean": 0.05})) is None


def test_skipped_updates_are_told() -> None:
    assert "50%" in found(advice.bad_steps, evidence(**{"step/skipped": 0.5})).title


def test_gravest_advice_comes_first_and_all_settings_exist() -> None:
    late = Straggler("g1", 0, "sum", "tool", "search", 6.0, 8.0, 4.0, 49)
    rows = steps(**{"groups/signal": 0.2, "step/skipped": 0.5, "completion/length": 300.0, "correction/ess": 0.1})
    told = advise(Evidence(rows, evaluations(0.6, 0.6, 0.5), CONFIG, stragglers=[late]))
    assert [one.level for one in told] == sorted((one.level for one in told), key=("alarm", "warning", "info").index)
    assert len(told) >= 5
    variants = [{}, WAITING, {**WAITING, "engines/prefill_wasted": 0.3}, {**WAITING, "time/engine_busy": 1.0}]
    named = {name for one in told for name in one.settings}
    named |= {name for changes in variants for one in advise(evidence(**changes)) for name in one.settings}
    assert named - set(field_names()) - set(ALGORITHMS) == set()
