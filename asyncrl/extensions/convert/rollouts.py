"""Conversion of rollouts: slime's dumps to a recording, and a recording to JSONL or parquet.

slime (slime/utils/types.py, --save-debug-rollout-data) writes a pickle for each rollout: its number and its samples.
torch's restricted unpickler reads it, which builds dicts, lists, numbers, strings and tensors, and executes nothing.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO

from asyncrl.errors import ConfigError, RecordError
from asyncrl.extensions.recording.events import Committed, packed
from asyncrl.extensions.recording.reader import Recording
from asyncrl.extensions.recording.writer import RECORDS, Writer
from asyncrl.extensions.view.inspection.rows import rows_of
from asyncrl.rollout.events import Taken
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan

UNTRAINED = ("pending", "aborted", "failed")
"""Status values of slime's samples that are no answers."""
ROWS = 512
"""Number of trajectories in memory at a time."""


# -- from slime --------------------------------------------------------------------------------------------


def from_slime(dumps: Sequence[Path], out: Path, *, reward_key: str | None = None) -> tuple[int, int]:
    """Write a recording to OUT/records, with one batch per dump. Returns how many samples were converted and left out.
    Raises RecordError for a dump that is damaged, or that holds what a recording cannot."""
    if (out / RECORDS).exists():
        raise ConfigError("OUT", str(out), "It already holds a recording: choose another folder.")
    order = sorted(dumps, key=lambda dump: _load(dump)[0])  # holds one dump in memory at a time
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".records-") as folder:
        part = Path(folder) / RECORDS
        counts = _write(order, Writer(part), reward_key)
        part.rename(out / RECORDS)
    return counts


def _write(dumps: Sequence[Path], writer: Writer, reward_key: str | None) -> tuple[int, int]:
    taken = left = slot = 0
    try:
        for dump in dumps:
            step, samples = _load(dump)
            newest = max((_version(sample, step) for sample in samples), default=step)
            groups = []
            for members in _by_group(samples):
                answers = [one for one in members if one.get("status") not in UNTRAINED and one.get("response_length")]
                taken, left = taken + len(answers), left + len(members) - len(answers)
                if answers:
                    groups.append(_group(slot, answers, step, newest, reward_key, dump))
                    slot += 1
            for group in groups:
                writer.write(Committed(group.slot, packed(group), 0))
            figures = {
                "samples/generated": float(sum(len(group.trajectories) for group in groups)),
                "tokens/generated": float(sum(group.num_tokens for group in groups)),
                "time/engine_busy": 0.0,
            }
            writer.write(Taken(step, [group.uid for group in groups], figures))
    finally:
        writer.close()
    if writer.failed:
        raise writer.failed
    return taken, left


def _load(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of the rollout, and its samples."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return int(content["rollout_id"]), list(content["samples"])
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecordError(f"{path} holds more than numbers, texts and tensors, or is damaged: {reason}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is not a rollout dump of slime: {error}") from None


def _by_group(samples: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield groups in the order of the dump. A sample without a group forms its own."""
    numbered = enumerate(samples)
    for _, members in groupby(numbered, key=lambda one: one[1].get("group_index", -1 - one[0])):
        yield [sample for _, sample in members]


def _version(sample: dict[str, Any], otherwise: int) -> int:
    """Return the oldest version that wrote the sample, as far as slime reports it: per request, not per token."""
    told = [int(version) for version in sample.get("weight_versions") or [] if str(version).isdigit()]
    return min(told, default=otherwise)


def _group(
    slot: int, samples: list[dict[str, Any]], step: int, newest: int, reward_key: str | None, dump: Path
) -> Group:
    """Build a group. Raises RecordError if its samples are inconsistent."""
    try:
        return _made_of(slot, samples, step, newest, reward_key)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{dump}, group {samples[0].get('group_index')}: {error}") from None


def _made_of(slot: int, samples: list[dict[str, Any]], step: int, newest: int, reward_key: str | None) -> Group:
    prompts = [list(sample["tokens"][: -sample["response_length"]]) for sample in samples]
    if any(prompt != prompts[0] for prompt in prompts):
        raise ValueError("its samples have different prompts")
    trajectories = []
    for sample in samples:
        age = max(0, newest - _version(sample, newest))
        if step < age:
            raise ValueError(f"rollout {step} cannot hold tokens that are {age} versions old")
        reward = sample["reward"][reward_key] if reward_key else sample["reward"]
        trajectories.append(Trajectory(_turns(sample, step - age), float(reward)))
    return Group(f"g{slot:08d}a0000", slot, prompts[0], trajectories, "slime")


def _turns(sample: dict[str, Any], version: int) -> list[Turn]:
    """Split a sample into turns. Tokens outside the loss mask are observations; those at the end are dropped."""
    length = sample["response_length"]
    ids, logprobs = list(sample["tokens"][-length:]), sample.get("rollout_log_probs")
    mask = sample.get("loss_mask") or [1] * length
    if logprobs is None or len(logprobs) != length or len(mask) != length:
        raise ValueError(
            f"a sample of {length} tokens needs that many rollout_log_probs, and a loss_mask of that length or none"
        )
    finish = "length" if sample.get("status") == "truncated" else "stop"
    turns: list[Turn] = []
    observation: list[int] = []
    for written, run in groupby(range(length), key=lambda position: bool(mask[position])):
        places = list(run)
        chosen = [int(ids[place]) for place in places]
        if not written:
            observation = chosen
            continue
        spans = [VersionSpan(version, 0, len(chosen), inferred=True)]
        answer = Completion(chosen, [float(logprobs[place]) for place in places], spans, finish)
        turns.append(Turn(observation, answer))
        observation = []
    if not turns:
        raise ValueError("the loss_mask of a sample selects no token")
    return turns


# -- to tables ---------------------------------------------------------------------------------------------


def export(run: Path, out: Path) -> int:
    """Write every trajectory of a recording as a row of OUT, a .jsonl or .parquet file. Returns the number of rows.

    `token_ids` holds the tokens of all turns, after the prompt. `written` says which of them the policy wrote;
    `logprobs` and `versions` are those of the written tokens, and null elsewhere.
    """
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError("OUT", str(out), "The name of the file must end in .jsonl or .parquet.")
    if out.exists():
        raise ConfigError("OUT", str(out), "It already exists: choose another file.")
    recording, count = Recording(run), 0
    part = out.with_name(f".{out.name}.part")
    with part.open("wb") as file:
        table = _Jsonl(file) if out.suffix == ".jsonl" else _Parquet(file)
        found = _rows(recording)
        while rows := list(islice(found, ROWS)):
            table.write(rows)
            count += len(rows)
        table.close()
    part.rename(out)
    return count


def _rows(recording: Recording) -> Iterator[dict[str, Any]]:
    for found in rows_of(recording)[0]:
        group = recording.group(found.uid)
        for number, trajectory in enumerate(group.trajectories):
            yield {
                "uid": group.uid,
                "task": group.task,
                "place": found.place,
                "trajectory": number,
                "reward": trajectory.total,
                "prompt_ids": group.prompt_ids,
                **_tokens(trajectory),
                "finish_reason": trajectory.turns[-1].completion.finish_reason,
            }


def _tokens(trajectory: Trajectory) -> dict[str, list[Any]]:
    ids: list[int] = []
    written: list[bool] = []
    logprobs: list[float | None] = []
    versions: list[int | None] = []
    for turn in trajectory.turns:
        seen, answer = len(turn.observation), turn.completion
        ids += [*turn.observation, *answer.token_ids]
        written += [False] * seen + [True] * len(answer.token_ids)
        logprobs += [*[None] * seen, *answer.logprobs]
        versions += [None] * seen
        for span in answer.versions:
            versions += [span.version] * (span.end - span.start)
    return {"token_ids": ids, "written": written, "logprobs": logprobs, "versions": versions}


class _Jsonl:
    """Writes one JSON line per row."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, rows: list[dict[str, Any]]) -> None:
        self._file.writelines(json.dumps(row).encode() + b"\n" for row in rows)

    def close(self) -> None:
        """Do nothing: the format has no footer."""


class _Parquet:
    """Writes one row group per batch of rows."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        ids = pa.list_(pa.int32())
        self._schema = pa.schema(
            {
                "uid": pa.string(),
                "task": pa.string(),
                "place": pa.string(),
                "trajectory": pa.int32(),
                "reward": pa.float64(),
                "prompt_ids": ids,
                "token_ids": ids,
                "written": pa.list_(pa.bool_()),
                "logprobs": pa.list_(pa.float64()),
                "versions": ids,
                "finish_reason": pa.string(),
            }
        )
        self._table, self._writer = pa.Table, pq.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, rows: list[dict[str, Any]]) -> None:
        self._writer.write_table(self._table.from_pylist(rows, self._schema))

    def close(self) -> None:
        self._writer.close()
