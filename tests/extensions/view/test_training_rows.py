"""Rejection sampling: what is trained of a recorded answer is what the model wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.algo.samples import build_samples
from asyncrl.config import TaskConfig
from asyncrl.errors import RecordError
from asyncrl.extensions.recording.events import Committed, Rejected, packed
from asyncrl.extensions.recording.writer import Writer
from asyncrl.extensions.view.inspection import cli
from asyncrl.extensions.view.inspection.training_rows import RENDERED, decoder, rows
from asyncrl.models.tiny import write
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan
from tests.fakes import compose_values, tiny_config


def turn(observation: list[int], ids: list[int], **changes: Any) -> Turn:
    return Turn(observation, Completion(ids, [-1.0] * len(ids), [VersionSpan(0, 0, len(ids))], "stop"), **changes)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A recorded group of the tiny model, with a right and a wrong answer, and a rejected one of two turns."""
    from transformers import AutoTokenizer

    write(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def prompt(text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

    right, wrong = (Trajectory([turn([], ids(f"{text}<eos>"))], reward) for text, reward in (("21", 1.0), ("2", 0.0)))
    several = Trajectory(
        [turn([], ids("4")), turn(prompt("5"), ids("5<eos>")), turn(prompt("6"), ids("7"), begins=True)], 1.0
    )
    writer = Writer(tmp_path / "records")
    writer.write(Committed(0, packed(Group("g0", 0, prompt("12"), [right, wrong], "copy")), 0))
    writer.write(Rejected(1, "no_signal", 0, packed(Group("g1", 1, prompt("3"), [several], "copy"))))
    writer.close()
    (tmp_path / "addresses.json").write_text(json.dumps({"model": str(tmp_path / "model")}))
    return tmp_path


def inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert cli.main([str(argument) for argument in arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_right_answers_of_a_recording_are_trained(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(capsys, run, "--reward", "1:", "--rows")
    assert [(one["uid"], one["reward"]) for one in found] == [("g0", 1.0), ("g1", 1.0), ("g1", 1.0)]
    assert [one[RENDERED][1::2] for one in found] == [["21<eos>"], ["4", "5<eos>"], ["7"]]
    sft = pytest.importorskip("asyncrl.extensions.sft.rows")
    (run / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    values = compose_values("experiment=warmup", "model=tiny")["task"]
    read = sft.ChatRows(TaskConfig.model_validate({**values, "train_file": str(run / "rows.jsonl")}))
    trained, decode = sft.Trained(run / "model", tiny_config()), decoder(run)
    from asyncrl.extensions.recording.reader import Recording

    recorded = [
        sample for uid in ("g0", "g1") for (own,) in [build_samples([Recording(run).group(uid)])] for sample in own
    ]
    recorded.pop(1)  # the wrong answer
    for number, sample in enumerate(recorded):
        texts = read.rendered(number)
        assert texts
        parts = trained.of_rendered(texts, "Row")
        assert [token for one in parts for token in [*one.observation, *one.written]] == [
            *sample.prompt_ids,
            *sample.token_ids,
        ]
        written = [token for one in parts for token in one.written]
        assert decode(written) == "".join(texts[1::2])
        assert written == [token for token, kept in zip(sample.token_ids, sample.mask, strict=True) if kept]


def test_all_groups_become_rows_and_their_lengths_choose(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(inspected(capsys, run, "--rows")) == 4
    assert [one["uid"] for one in inspected(capsys, run, "--rows", "--length", "3:3", "--reward", "1")] == ["g0"]
    assert [one["uid"] for one in inspected(capsys, run, "--rows", "--reason", "no_signal")] == ["g1", "g1"]


def test_what_rows_cannot_hold_is_left_out_or_refused(run: Path) -> None:
    one = Group("g", 0, [1, 2], [Trajectory([turn([], [3])], 1.0)], "copy")
    assert list(rows(one, lambda ids: "\ufffd", lambda _: True)) == []
    with pytest.raises(RecordError, match="group g has images"):
        list(rows(msgspec.structs.replace(one, prompt_images=["a"]), lambda ids: "x", lambda _: True))
    (run / "addresses.json").write_text("{}")
    with pytest.raises(RecordError, match="the model of this run"):
        decoder(run)
