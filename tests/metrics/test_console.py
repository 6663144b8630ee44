"""Tests of the console, and of the rule that ends a run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.extension import Extension, LaunchHooks
from asyncrl.trainer.stop import StopRule
from tests.fakes import tiny_config, tiny_values
from tests.metrics.screen import Screen, append, lacks, record


def test_opening_says_what_starts_and_where_it_writes(tmp_path: Path) -> None:
    screen = Screen(tmp_path, **{"rollout.max_staleness": 4, "rollout.lead": 1})
    screen.console.opening()
    text = screen.text()
    assert (
        lacks(text, "builtin:tiny", "copy3", "1 engine", "TP 1", "PP 1", "DP 1", "lead 1", "≤ 4", str(tmp_path)) == []
    )


def test_what_models_wrote_does_not_steer_the_terminal(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    said = "\x1b]0;title\x07\x9b2J [red]no markup[/] \u202e\r\n"
    append(tmp_path / "warnings.jsonl", json.dumps({"version": 1, "warning": said}) + "\n")
    screen.console.follow()
    text = screen.text()
    assert r"\x1b]0;title\x07\x9b2J [red]no markup[/] \u202e\r" in text
    assert not set("\x1b\x07\x9b\u202e\r") & set(text)


@pytest.mark.parametrize("terminal", ["", "dumb"])
def test_line_shows_progress_reward_times_rate_and_what_is_left(terminal: str, tmp_path: Path) -> None:
    screen = Screen(tmp_path, terminal=terminal)
    screen.console.opening()
    screen.text()
    append(tmp_path / "metrics.jsonl", record(1) + record(2))
    screen.console.follow()
    first, second = screen.text().splitlines()
    assert lacks(first, "1/200", "reward 0.500", "0.5≤2", "2.0s", "wait 0.5", "train 0.5", "publish 0.5") == []
    assert lacks(first, "32 samples/s", "6:38") == []  # 199 steps of 2 s
    assert "6:36" in second
    assert "bad" not in first


def test_line_of_a_step_on_what_no_engine_wrote_has_no_gap(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    values = json.loads(record(1))
    append(tmp_path / "metrics.jsonl", json.dumps({n: v for n, v in values.items() if "gap" not in n}) + "\n")
    screen.console.follow()
    assert lacks(screen.text(), "loss +0.5000", "gap") == ["gap"]


def test_line_counts_rejections_since_the_last_by_reason(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    rejected = {"groups/rejected/reward_error": 2.0, "groups/rejected/zero_signal": 1.0}
    append(tmp_path / "metrics.jsonl", record(1, **rejected))
    append(tmp_path / "metrics.jsonl", record(2, **rejected))
    append(tmp_path / "metrics.jsonl", record(3, **{**rejected, "groups/rejected/zero_signal": 4.0}))
    screen.console.follow()
    first, second, third = screen.text().splitlines()
    assert lacks(first, "2 reward_error", "1 zero_signal") == []
    assert lacks(second, "reward_error", "zero_signal") == ["reward_error", "zero_signal"]
    assert "3 zero_signal" in third
    assert "reward_error" not in third


def test_warning_that_repeats_is_shown_once_with_its_count(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    for number in range(3):
        line = {"version": number, "warning": f"g0000000{number}a0000 failed: reward_error: KeyError: 'x'"}
        append(tmp_path / "warnings.jsonl", json.dumps(line) + "\n")
    append(tmp_path / "warnings.jsonl", json.dumps({"version": 3, "warning": "another"}) + "\n")
    for step, share in enumerate((0.5, 0.1), 1):
        append(tmp_path / "metrics.jsonl", record(step, **{"completion/truncated": share}))
    screen.console.follow()
    assert screen.text().count("\n") == 4
    screen.console.end()
    repeated = screen.text()
    assert lacks(repeated, "3 times", "g00000000a0000 failed: reward_error: KeyError: 'x'") == []
    assert repeated.count("\n") == 1
    summary = {"ledger": {"groups": {"rejected": {"reward_error": 3}}}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    screen.console.closing()
    table = screen.text()
    assert re.search(r"groups rejected, reward_error +3\b", table)
    assert re.search(r"warnings +4 of 2 kinds", table)
    assert re.search(r"completions truncated +30%, in the last step 10%", table)


def test_start_says_what_it_waits_for_at_each_change(tmp_path: Path) -> None:
    screen, status = Screen(tmp_path), tmp_path / "status.json"
    waits = ["engine 0 to load weights, 1 s", "engine 0 to load weights, 2 s", "the router to find it healthy, 3 s"]
    for wait in waits:
        status.write_text(json.dumps({"waiting_for": wait}))
        screen.console.follow()
    first, second = screen.text().splitlines()
    assert first.endswith(waits[0])
    assert second.endswith(waits[2])
    os.utime(status, (0, 0))  # too old to say anything
    screen.console.follow()
    assert screen.text() == ""
    append(tmp_path / "metrics.jsonl", record(1))
    screen.console.follow()
    status.write_text(json.dumps({"waiting_for": "groups"}))
    screen.console.follow()
    assert "groups\n" not in screen.text()


@pytest.mark.parametrize("terminal", ["", "xterm"])
def test_late_step_says_what_it_waits_for_at_doubling_intervals(terminal: str, tmp_path: Path) -> None:
    screen, wait = Screen(tmp_path, terminal=terminal), "step 3 needs 4 ready groups, but has 11"
    screen.console.opening()
    status, state = tmp_path / "status.json", {"episodes": {}, "ledger": {"groups": {"running": 4, "ready": 11}}}
    status.write_text(json.dumps({**state, "holding": False, "waiting_for": wait, "engines": []}))
    append(tmp_path / "metrics.jsonl", record(1, **{"time/step": 600.0}) + record(2, **{"time/step": 7.0}) + record(3))
    screen.console.follow()
    screen.text()
    said = []
    for _ in range(300):
        screen.now += 1.0
        screen.console.follow()
        said += re.findall(r"(\d+) s since the last step; (.*?) *\r?\n", screen.text())
    assert said == [("70", wait), ("140", wait), ("280", wait)]  # ten times the usual step
    os.utime(status, (0, 0))  # the rollout process hangs
    screen.now += 600.0
    screen.console.follow()
    assert "does not write status.json" in screen.text()
    append(tmp_path / "metrics.jsonl", record(200))  # the last one: what comes is the end
    screen.console.follow()
    screen.now += 6000.0
    screen.console.follow()
    assert "since the last step" not in screen.text()


def test_bad_step_is_shown(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    append(tmp_path / "metrics.jsonl", record(1, **{"step/bad": 1.0}))
    screen.console.follow()
    assert "bad step" in screen.text()


def test_lines_are_shown_once_and_only_when_they_are_whole(tmp_path: Path) -> None:
    screen, file = Screen(tmp_path), tmp_path / "metrics.jsonl"
    screen.console.follow()  # nothing is there yet
    line = record(1)
    append(file, line[:20])
    screen.console.follow()
    assert screen.text() == ""
    append(file, line[20:] + record(2)[:-1])
    screen.console.follow()
    assert screen.text().count("/200") == 1
    append(file, "\n")
    screen.console.follow()
    assert "2/200" in screen.text()
    screen.console.follow()
    assert screen.text() == ""


def test_evaluation_names_the_version_that_answered(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    line = {"set": "copy3", "version_min": 0, "version_max": 0, "accuracy": 0.25, "questions": 100}
    line |= {"failed": 0, "skipped": 0}
    append(tmp_path / "eval.jsonl", json.dumps(line) + "\n")
    screen.console.follow()
    text = screen.text()
    assert lacks(text, "version 0", "0.250", "100 questions") == []
    assert lacks(text, "pass@", "failed", "skipped") == ["pass@", "failed", "skipped"]
    line |= {"version_max": 2, "failed": 1, "skipped": 3, "pass@1": 0.25, "pass@2": 0.5}
    append(tmp_path / "eval.jsonl", json.dumps(line) + "\n")
    screen.console.follow()
    text = screen.text()
    assert (
        lacks(text, "0..2", "0.250", "100 questions", "pass@2 0.500", "1 answers failed", "3 evaluations skipped") == []
    )
    assert "pass@1" not in text  # it is the accuracy


def test_tasks_and_sets_are_named_where_there_are_several(tmp_path: Path) -> None:
    task = tiny_values()["task"]
    screen = Screen(tmp_path, tasks={"sort": task, "sum": task}, **{"eval.sets": {"hard": task}})
    screen.console.opening()
    assert "sort, sum" in screen.text()
    line = {"set": "hard", "version_min": 4, "version_max": 4, "accuracy": 0.25, "questions": 10, "failed": 0}
    append(tmp_path / "eval.jsonl", json.dumps(line | {"skipped": 0}) + "\n")
    screen.console.follow()
    assert lacks(screen.text(), "hard, version 4", "0.250", "10 questions") == []


def test_closing_shows_the_summary_without_the_ledger(tmp_path: Path) -> None:
    screen = Screen(tmp_path)
    summary = {"reason": "run.max_steps 3 reached", "reward/last": 1.23456, "ledger": {"issued": 9}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    screen.console.closing()
    text = screen.text()
    assert "run.max_steps 3 reached" in text
    assert "1.235" in text
    assert "issued" not in text


def test_console_that_is_turned_off_prints_nothing(tmp_path: Path) -> None:
    screen = Screen(tmp_path, **{"metrics.console": False})
    append(tmp_path / "metrics.jsonl", record(1))
    (tmp_path / "summary.json").write_text("{}")
    screen.console.opening()
    screen.console.follow()
    screen.console.closing()
    assert screen.text() == ""


@pytest.mark.parametrize("name", ["a[bold]b", "run[/]", "[red]"])
def test_names_are_printed_as_they_are(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name.replace("/", "_")
    screen = Screen(folder, **{"run.name": name})
    screen.console.opening()
    text = screen.text()
    assert name in text
    assert str(folder) in text


class Offering(Extension):
    """Has a command that shows a run."""

    def launch(self) -> LaunchHooks:
        class Hooks(LaunchHooks):
            def offers(self, config: Config, run_dir: Path) -> Iterator[tuple[str, str]]:
                yield "a view", f"own-command {run_dir}"

        return Hooks()


def test_finished_run_says_where_to_look_next(tmp_path: Path) -> None:
    screen = Screen(tmp_path, extensions={"offering": f"{__name__}:Offering"})
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "hf").mkdir()
    screen.console.closing()
    text = screen.text()
    assert f"a view             own-command {tmp_path}\n" in text
    assert f"trained model      {tmp_path}/hf\n" in text


# --- stopping -----------------------------------------------------------------------------------------------


def stops(rewards: list[float], **changes: Any) -> tuple[int, str]:
    """The step at which the rule ends a run of 10 generated tokens a step, and its reason."""
    rule = StopRule(tiny_config(**{f"run.{name}": value for name, value in changes.items()}).run)
    for step, reward in enumerate(rewards, start=1):
        if reason := rule.reason({"step": step, "reward/mean": reward, "tokens/generated": 10.0}):
            return step, reason
    raise AssertionError("the run never ends")


def test_run_ends_after_its_steps() -> None:
    step, reason = stops([0.0] * 9, max_steps=4)
    assert step == 4
    assert "run.max_steps 4" in reason


def test_run_ends_once_its_tokens_are_spent() -> None:
    step, reason = stops([0.0] * 9, token_budget=25)
    assert step == 3
    assert lacks(reason, "30 ", "run.token_budget 25") == []


def test_replay_ends_with_its_recording() -> None:
    rule = StopRule(tiny_config(**{"run.max_steps": 2}).run, end=4)
    reasons = [rule.reason({"step": step, "reward/mean": 1.0, "tokens/generated": 10.0}) for step in range(1, 6)]
    assert [reason is not None for reason in reasons] == [False, False, False, True, False]
    assert "max_steps" not in str(reasons[3])


def test_run_ends_at_its_mean_reward_over_a_window() -> None:
    rewards = [9.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    step, reason = stops(rewards, reward_target=1.0, reward_window=3)
    assert step == 3
    assert lacks(reason, "3.000", "run.reward_target 1.0") == []
    step, reason = stops([0.0, *rewards[1:]], reward_target=1.0, reward_window=3)
    assert step == 6
    assert "1.333" in reason


def test_high_reward_before_a_full_window_ends_nothing() -> None:
    assert stops([5.0, 5.0, 0.0, 0.0, 0.0, 0.0], reward_target=4.0, reward_window=3, max_steps=6)[0] == 6


def test_first_reason_wins() -> None:
    _, reason = stops([1.0], reward_target=0.5, reward_window=1, token_budget=1, max_steps=1)
    assert reason.startswith("reward")
