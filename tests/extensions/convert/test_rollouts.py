"""Rollouts come in from slime and go out as tables, token for token, and no pickle is run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from asyncrl.extensions.convert.cli import main
from asyncrl.extensions.recording.reader import Recording
from asyncrl.schema import VersionSpan


def sample(group: int, index: int, **changes: Any) -> dict[str, Any]:
    """Return a sample as slime's Sample.to_dict() does."""
    response = [7, 8, 9, 10][: 2 + index]
    found = {
        "group_index": group,
        "index": index,
        "prompt": "What?",
        "tokens": [1, 2, group, *response],
        "response": "text",
        "response_length": len(response),
        "label": "42",
        "reward": float(index),
        "loss_mask": None,
        "weight_versions": ["5"],
        "rollout_log_probs": [-0.25 * place for place in range(len(response))],
        "status": "completed",
        "metadata": {"source": ["a"]},
        "spec_info": {"completion_token_num": 0},
    }
    return found | changes


def dump(path: Path, rollout: int, samples: list[Any]) -> Path:
    torch.save({"rollout_id": rollout, "samples": samples}, path)
    return path


def test_dumps_become_batches_with_their_tokens_turns_and_ages(tmp_path: Path, capsys) -> None:
    masked = {"loss_mask": [1, 1, 0, 1], "rollout_log_probs": [-0.5, -0.75, 0.0, -1.0], "weight_versions": ["3", "5"]}
    second = [sample(4, 0), sample(4, 2, **masked), sample(4, 1, status="aborted"), sample(6, 1, status="truncated")]
    dumps = [dump(tmp_path / "b.pt", 8, second), dump(tmp_path / "a.pt", 7, [sample(0, 0), sample(0, 1)])]
    assert main(["from-slime", *map(str, dumps), str(tmp_path / "run")]) == 0
    assert "5 samples, 1 left out" in capsys.readouterr().out
    recording = Recording(tmp_path / "run")
    assert recording.steps == [7, 8]
    (group,) = recording.batch(7).groups
    assert (group.prompt_ids, [t.reward for t in group.trajectories]) == ([1, 2, 0], [0.0, 1.0])
    assert group.trajectories[1].turns[0].completion.token_ids == [7, 8, 9]
    assert group.trajectories[1].turns[0].completion.logprobs == [0.0, -0.25, -0.5]
    batch = recording.batch(8)
    assert [group.staleness(8) for group in batch.groups] == [[0, 2], [0]]  # version 5 is the newest of the dump
    first, last = batch.groups[0].trajectories[1].turns
    assert (first.completion.token_ids, last.observation, last.completion.token_ids) == ([7, 8], [9], [10])
    assert last.completion.logprobs == [-1.0]
    assert last.completion.versions == [VersionSpan(6, 0, 1, inferred=True)]
    assert batch.groups[1].trajectories[0].turns[0].completion.finish_reason == "length"


class Harm:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {Path(__file__).parent}/harmed",)


@pytest.mark.parametrize(
    ("samples", "told"),
    [
        ([sample(0, 0, metadata=Harm())], "more than numbers, texts and tensors"),
        ([sample(0, 0, rollout_log_probs=None)], "needs that many rollout_log_probs"),
        ([sample(0, 0), sample(0, 1, tokens=[1, 5, 0, 7, 8, 9])], "different prompts"),
        ([sample(0, 0, reward={"math": 1.0})], "group 0"),
        ([sample(0, 0, loss_mask=[0, 0])], "selects no token"),
    ],
)
def test_what_no_recording_can_hold_is_refused(samples, told: str, tmp_path: Path, capsys) -> None:
    assert main(["from-slime", str(dump(tmp_path / "a.pt", 0, samples)), str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert "a.pt" in error
    assert not (Path(__file__).parent / "harmed").exists()
    assert not (tmp_path / "run/records").exists()


@pytest.mark.parametrize("content", [b"", b"no pickle", torch.save])
def test_files_that_are_no_dumps_are_refused(content: Any, tmp_path: Path, capsys) -> None:
    path = tmp_path / "a.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save([1, 2], path)
    assert main(["from-slime", str(path), str(tmp_path / "run")]) == 1
    assert "a.pt" in capsys.readouterr().err


def test_exported_rows_hold_tokens_logprobs_and_versions(tmp_path: Path, capsys) -> None:
    masked = {"loss_mask": [1, 1, 0, 1], "rollout_log_probs": [-0.1, -0.75, 0.0, -1.0]}
    source = dump(tmp_path / "a.pt", 0, [sample(0, 0), sample(0, 2, **masked)])
    assert main(["from-slime", str(source), str(tmp_path / "run")]) == 0
    for name in ("out.jsonl", "out.parquet"):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / name)]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == lines
    assert [line["reward"] for line in lines] == [0.0, 2.0]
    assert lines[1]["token_ids"] == [7, 8, 9, 10]
    assert lines[1]["written"] == [True, True, False, True]
    assert lines[1]["logprobs"] == [-0.1, -0.75, None, -1.0]
    assert lines[1]["versions"] == [0, 0, None, 0]
    assert (lines[1]["prompt_ids"], lines[1]["place"]) == ([1, 2, 0], "0")
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out.jsonl")]) == 2
    assert "It already exists" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out.csv")]) == 2
