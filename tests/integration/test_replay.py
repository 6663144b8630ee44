"""A recorded run that is trained again without engines gives the same losses, gradient norms and weights, bit for
bit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from asyncrl.extensions.recording.events import decode
from asyncrl.extensions.recording.frames import Frames, path_of
from asyncrl.extensions.recording.reader import Recording
from asyncrl.extensions.timelines.reader import TimelineReader
from asyncrl.extensions.view.watch.runs import RunFolder
from asyncrl.extensions.view.watch.server import app
from asyncrl.models import catalog
from asyncrl.observability.timeline import ProcessSpan
from asyncrl.rollout.events import PartTaken, Published, Taken
from asyncrl.rollout.parts import load_tokenizer
from asyncrl.schema import encode
from tests.integration.books import trained, weights
from tests.integration.running import finish, lines, nothing_is_left, run, start

pytestmark = pytest.mark.integration

SMALL = ["run.max_steps=6", "eval.questions=8", "rollout.batch_groups=4", "rollout.group_size=8"]
SLACK = ["rollout.max_staleness=4", "rollout.lead=2"]
LAYOUTS = {
    "dp2": ["trainer.data_parallel=2"],
    "dp2-tp2": ["trainer.data_parallel=2", "trainer.tensor_parallel=2"],
    "pp2": ["trainer.pipeline_parallel=2"],
    "cp2": ["trainer.context_parallel=2"],
    "tp2-sp": ["trainer.tensor_parallel=2", "trainer.sequence_parallel=true"],
}
DROPPING = ["rollout.oversample=2", "rollout.accept=asyncrl.rollout.hooks:has_signal", "rollout.over_age=drop"]


def replay(folder: Path, source: Path, *overrides: str) -> list[dict[str, Any]]:
    return run(folder, *SMALL, "mode=replay", f"replay.from={source}", *overrides)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a run."""
    folder = tmp_path_factory.mktemp("recorded") / "live"
    run(folder, *SMALL, *SLACK, "record=true")
    return folder


def test_live_page_shows_every_batch_with_its_episodes(live: Path) -> None:
    """Recording and timelines of a real run agree: rewards, tokens, and the versions that generated them."""
    recording = Recording(live)
    headers = {"authorization": "Bearer " + "t" * 16}
    with TestClient(app(RunFolder(live), "t" * 16, ["*"]), headers=headers) as client:
        asked = {"run": live.name}
        assert [one["step"] for one in client.get("/api/batches", params=asked).json()] == recording.steps
        for step in recording.steps:
            shown, groups = (
                client.get("/api/anatomy", params={**asked, "step": step}).json(),
                recording.batch(step).groups,
            )
            assert [one[0] for one in shown["groups"]] == [group.uid for group in groups]
            episodes = [one for group in groups for one in group.trajectories]
            assert [one[2] for one in shown["episodes"]] == [one.total for one in episodes]
            written = [(one[3], other.num_tokens) for one, other in zip(shown["episodes"], episodes, strict=True)]
            assert all(generated >= kept for generated, kept in written)
            assert "forward" in {span[0] for lane in shown["lanes"] for span in lane["spans"]}
            rows = [shown["intervals"][at : at + 5] for at in range(0, len(shown["intervals"]), 5)]
            versions = {row[3] for row in rows if shown["phases"][row[0]] == "decode" and row[3] >= 0}
            spans = [span for one in episodes for turn in one.turns for span in turn.completion.versions]
            assert versions <= {span.version for span in spans}
            assert shown["straggler"]["uid"] in {group.uid for group in groups}
            assert all(0 <= row[1] <= row[2] <= shown["end"] for row in rows)


def test_replay_repeats_a_run_to_the_last_bit(live: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert trained(replay(again, live, *SLACK)) == trained(lines(live / "metrics.jsonl"))
    assert weights(again) == weights(live)
    assert {log.stem for log in (again / "logs").iterdir()} == {"trainer-0"}
    nothing_is_left(again)


def test_groups_compressed_elsewhere_train_to_the_last_bit(tmp_path: Path) -> None:
    """processes.count: the recorded events, and the batches and ledgers that their schedule gives, too."""
    source, again = tmp_path / "run", tmp_path / "again"
    steps = run(source, *SMALL, *SLACK, "record=true", "processes.count=2")
    assert trained(replay(again, source, *SLACK, "replay.schedule=true")) == trained(steps)
    assert weights(again) == weights(source)


def test_other_losses_and_repeated_batches_are_trained(live: Path, tmp_path: Path) -> None:
    other = replay(tmp_path / "other", live, *SLACK, "algo.loss=cispo", "replay.first=2", "replay.last=3")
    assert [step["version"] for step in other] == [3, 4]
    assert [step["reward/mean"] for step in other] == [
        step["reward/mean"] for step in lines(live / "metrics.jsonl")[2:4]
    ]
    assert "algo.loss.name: ppo -> cispo" in (tmp_path / "other.out").read_text()
    keep = "replay.keep=asyncrl.rollout.hooks:has_signal"  # gives a reason, not false, for the others
    first = next(step["version"] - 1 for step in lines(live / "metrics.jsonl") if step["groups/signal"])
    batch = (f"replay.first={first}", f"replay.last={first}")
    looped = replay(tmp_path / "loop", live, *SLACK, keep, *batch, "replay.loop=3")
    assert {step["groups/signal"] for step in looped} == {1.0}
    assert [step["version"] for step in looped] == [first + 1, first + 2, first + 3]
    assert len({step["staleness/mean"] for step in looped}) == len({step["reward/mean"] for step in looped}) == 1
    assert looped[2]["loss"] != looped[0]["loss"]


def test_too_many_bad_steps_end_the_run_and_say_so(live: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    bad = ("trainer.bad_grad_norm=1e-9", "trainer.max_bad_steps=3")
    with start(run_dir, *SMALL, *SLACK, *bad, "mode=replay", f"replay.from={live}") as process:
        code, text = finish(process, run_dir)
    assert code == 1, text
    assert "bad step 3 in a row (trainer.bad_grad_norm=1e-09, trainer.on_bad_step=skip" in text
    assert [step["step/bad"] for step in lines(run_dir / "metrics.jsonl")] == [1.0, 1.0]
    nothing_is_left(run_dir)


def same_schedule(live: Path, again: Path, *settings: str) -> None:
    """Check that batches, ledgers and weights equal those of the recorded run."""
    replayed = replay(again, live, "replay.schedule=true", *settings)
    assert trained(replayed) == trained(lines(live / "metrics.jsonl"))
    assert weights(again) == weights(live)
    assert {log.stem for log in (again / "logs").iterdir()} == {"rollout", "trainer-0"}
    ledgers = [json.loads((folder / "summary.json").read_text())["ledger"] for folder in (live, again)]
    assert ledgers[1]["groups"]["trained"] == ledgers[0]["groups"]["trained"]
    nothing_is_left(again)


PARTS = [*SLACK, "trainer.batch_parts=3"]


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a run that trains each batch in parts."""
    folder = tmp_path_factory.mktemp("recorded") / "parts"
    run(folder, *SMALL, *PARTS, "record=true")
    return folder


@pytest.mark.campaign  # test_resume.py replays a run with parts and publishes beside training
def test_run_with_batch_parts_repeats_to_the_last_bit(in_parts: Path, tmp_path: Path) -> None:
    assert all(step["staleness/max"] <= 4 for step in lines(in_parts / "metrics.jsonl"))
    again = tmp_path / "again"
    assert trained(replay(again, in_parts, *PARTS)) == trained(lines(in_parts / "metrics.jsonl"))
    assert weights(again) == weights(in_parts)


@pytest.mark.campaign  # the same
def test_whole_schedule_of_batches_in_parts_is_repeated(in_parts: Path, tmp_path: Path) -> None:
    same_schedule(in_parts, tmp_path / "again", *PARTS)


OVERLAP = [*SLACK, "weights.overlap=true"]


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a run that publishes each version while it trains the next batch, in two parts."""
    folder = tmp_path_factory.mktemp("recorded") / "overlapped"
    run(folder, *SMALL, *OVERLAP, "trainer.batch_parts=2", "record=true")
    return folder


def test_batches_during_publishes_keep_the_bound(overlapped: Path) -> None:
    steps = lines(overlapped / "metrics.jsonl")
    assert all(0 <= step["staleness/max"] <= 4 for step in steps)
    assert [step["time/publish_background"] > 0 for step in steps] == [False, *[True] * 5]
    events = [event for event in Recording(overlapped).events() if isinstance(event, PartTaken | Taken | Published)]
    published = [event.version for event in events if isinstance(event, Published)]
    assert published == [1, 2, 3, 4, 5, 6]
    served, ahead = 0, 0
    for event in events:
        if isinstance(event, Published):
            served = event.version
            assert event.ledger["groups"]["trained"] == 4 * served
        else:
            assert event.step - served in (0, 1)
            ahead += event.step - served
    assert ahead > 0
    spans = [one for one in TimelineReader(overlapped).new() if isinstance(one, ProcessSpan)]
    assert [one.step for one in spans if one.process == "trainer 0 publish"] == [0, 1, 2, 3, 4, 5]
    assert json.loads((overlapped / "summary.json").read_text())["ledger"]["groups"]["trained"] == 24


def test_run_publishing_beside_training_repeats_bitwise(overlapped: Path, tmp_path: Path) -> None:
    settings = [*OVERLAP, "trainer.batch_parts=2"]
    assert trained(replay(tmp_path / "again", overlapped, *settings)) == trained(lines(overlapped / "metrics.jsonl"))
    assert weights(tmp_path / "again") == weights(overlapped)


@pytest.mark.campaign  # the same
def test_whole_schedule_of_publishes_beside_training_is_repeated(overlapped: Path, tmp_path: Path) -> None:
    same_schedule(overlapped, tmp_path / "again", *OVERLAP, "trainer.batch_parts=2")


def test_schedule_with_overlap_is_refused_without_the_setting(overlapped: Path, tmp_path: Path) -> None:
    settings = ["mode=replay", f"replay.from={overlapped}", "replay.schedule=true", "weights.overlap=false"]
    with start(tmp_path / "other", *SMALL, *settings) as process:
        code, text = finish(process, tmp_path / "other")
    assert code == 1
    assert "set weights.overlap=true, as in the recorded run" in text


@pytest.mark.campaign
def test_whole_schedule_gives_the_same_batches_and_weights(live: Path, tmp_path: Path) -> None:
    """A run that was killed and resumed is replayed in test_resume.py."""
    same_schedule(live, tmp_path / "again", *SLACK)


def test_buffer_with_another_rule_is_told_apart(live: Path, tmp_path: Path) -> None:
    other = ["mode=replay", f"replay.from={live}", "replay.schedule=true", "rollout.max_staleness=1", "rollout.lead=1"]
    with start(tmp_path / "other", *SMALL, *other) as process:
        code, text = finish(process, tmp_path / "other")
    assert code == 1
    assert "but the recording has" in text


@pytest.mark.campaign
def test_cut_schedule_is_done_again_to_its_last_batch(live: Path, tmp_path: Path) -> None:
    """The run was killed while writing a frame, before it published its last step."""
    shutil.copytree(live / "records", tmp_path / "killed/records")
    folder = tmp_path / "killed/records"
    places = [
        frame.place.offset
        for frame in Frames(folder)
        if any(isinstance(event, Published) and event.version == 5 for event in decode(frame.data))
    ]
    os.truncate(path_of(folder, 0), places[0] + 20)
    steps = replay(tmp_path / "again", tmp_path / "killed", "replay.schedule=true", *SLACK)
    assert [step["version"] for step in steps] == [1, 2, 3, 4, 5]
    assert trained(steps) == trained(lines(live / "metrics.jsonl")[:5])


@pytest.mark.campaign
def test_schedule_that_drops_groups_comes_to_the_same(tmp_path: Path) -> None:
    run(tmp_path / "live", *SMALL, *DROPPING, "engine.count=2", "record=true")
    same_schedule(tmp_path / "live", tmp_path / "again", *DROPPING)


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_replay_repeats_a_run_in_every_layout(layout: list[str], tmp_path: Path) -> None:
    recorded = run(tmp_path / "live", *SMALL, *layout, "record=true")
    assert trained(replay(tmp_path / "again", tmp_path / "live", *layout)) == trained(recorded)
    assert weights(tmp_path / "again") == weights(tmp_path / "live")


@pytest.mark.campaign
def test_replay_of_a_language_model_in_bfloat16_repeats_its_run(tmp_path: Path) -> None:
    """Replay SmolLM2-135M from the beginning, and from a checkpoint."""
    model = ["model=smollm2-135m", "task=count_bits", "trainer.dtype=bfloat16", "engine.dtype=bfloat16"]
    shape = [*model, "run.max_steps=4", "eval.questions=0", "rollout.max_new_tokens=6", "trainer.optimizer.lr=1e-5"]
    sizes = ["rollout.batch_groups=4", "rollout.group_size=8", "algo.entropy_bonus=0"]
    live, again, later = (tmp_path / name for name in ("live", "again", "later"))
    steps = run(live, *shape, *sizes, "record=true", "checkpoint.every=2")
    assert trained(run(again, *shape, *sizes, "mode=replay", f"replay.from={live}")) == trained(steps)
    assert weights(again) == weights(live)
    from_two = [f"replay.from={live}", f"resume={live / 'checkpoints/00000002'}"]
    assert trained(run(later, *shape, *sizes, "mode=replay", *from_two)) == trained(steps)  # with those before it
    assert weights(later) == weights(live)


@pytest.mark.campaign
def test_run_is_compared_with_a_recorded_one_token_for_token(tmp_path: Path) -> None:
    """An engine is deterministic if it has one request at a time."""
    alone = ["engine.max_running_requests=1", "rollout.max_running_groups=1", "rollout.max_staleness=0"]
    small = ["run.max_steps=2", "eval.questions=0", "rollout.batch_groups=3", "rollout.group_size=4", *alone]
    first, again = tmp_path / "first", tmp_path / "again"
    run(first, *small, "record=true")
    steps = run(again, *small, f"replay.compare={first}")
    assert (steps[-1]["compare/same"], steps[-1]["compare/others"]) == (1.0, 0.0)
    assert steps[-1]["compare/gap"] < 1e-5
    told = lines(again / "compare.jsonl")
    assert len(told) >= 2 * 3 * 4
    assert all(line["same"] and "token" not in line for line in told)


def test_stop_strings_give_exact_versions_and_logprobs(tmp_path: Path) -> None:
    """Engines know no text; what they send until they have aborted an answer is dropped."""
    run_dir = tmp_path / "stopped"
    stream = ["engine.stream_interval=1", "rollout.max_new_tokens=16", "task.params.digits=8"]
    steps = run(run_dir, *SMALL, *stream, "run.max_steps=3", "record=true", "rollout.stop=['7','34']")
    recording, tokenizer = Recording(run_dir), load_tokenizer(catalog.resolve("builtin:tiny"), None)
    groups = [group for step in range(3) for group in recording.batch(step).groups]
    answers = [turn.completion for group in groups for one in group.trajectories for turn in one.turns]
    texts = [tokenizer.decode(one.token_ids) for one in answers]
    stopped = [text for text in texts if text.endswith(("7", "34"))]
    assert len(stopped) > 10
    assert not any("7" in text[:-1] or "34" in text[:-1] for text in texts)
    assert not any(span.inferred for one in answers for span in one.versions)
    assert all(one.finish_reason == "stop" for one, text in zip(answers, texts, strict=True) if text in stopped)
    assert max(step["logprob_gap/lag0"] for step in steps if step.get("logprob_gap/lag0") is not None) < 1e-4


def test_batch_of_a_recording_is_the_one_that_was_trained(live: Path, tmp_path: Path) -> None:
    """Replays that are impossible are refused before anything runs."""
    steps, recording = lines(live / "metrics.jsonl"), Recording(live)
    events = list(recording.events())
    assert [event.step for event in events if isinstance(event, Taken)] == list(range(6))
    assert [event.version for event in events if isinstance(event, Published)] == [1, 2, 3, 4, 5, 6]
    for step, record in enumerate(steps):
        batch = recording.batch(step)
        assert encode(batch) == encode(type(batch)(step, [recording.group(g.uid) for g in batch.groups], batch.rollout))
        rewards = [t.reward for group in batch.groups for t in group.trajectories]
        assert sum(rewards) / len(rewards) == pytest.approx(record["reward/mean"], rel=1e-12)
    for overrides, told in (
        (["mode=replay"], "replay.from"),
        (["mode=replay", f"replay.from={tmp_path}"], "This folder has no recording"),
        (["mode=replay", f"replay.from={live}", "replay.first=9"], "holds batches 0 to 5"),
    ):
        with start(tmp_path / "refused", *SMALL, *overrides, "run.overwrite=true") as process:
            code, text = finish(process, tmp_path / "refused")
        assert code == 2
        assert told in text
