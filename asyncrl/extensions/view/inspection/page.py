"""A recorded run as one self-contained HTML file: curves over the steps, and trajectories token by token."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import RecordError
from asyncrl.extensions.view.inspection.render import Decode, heading
from asyncrl.extensions.view.inspection.rows import GroupRow, StepRow
from asyncrl.extensions.view.recording import ViewedRecording
from asyncrl.schema import Completion, Group, Trajectory

TEMPLATE = Path(__file__).with_name("page.html")
STATIC = Path(__file__).with_name("static")
"""Scripts and styles that this page holds and the live page (watch/server.py) serves."""
PLACE = re.compile(r"/\*(DATA|[\w.]+\.(?:js|css))\*/(?:null)?")
MODULE = re.compile(r"^(?:import .*\n|export (?=const|let|function|class|async))", re.MULTILINE)
"""What makes a script a module, which one inside the page is not."""
DIGITS = 4


def page(title: str, recording: ViewedRecording, steps: Sequence[StepRow], rows: Sequence[GroupRow],
         trained: dict[int, dict[str, float]], decode: Decode, advantage: str = "grpo") -> str:  # fmt: skip
    """Return the HTML text. `rows` are the groups whose trajectories are shown; `trained` is metrics.jsonl by step."""
    images: dict[str, str] = {}
    for row in rows:
        images |= {name: base64.b64encode(png).decode() for name, png in recording.group(row.uid).images.items()}
    data = {
        "title": title,
        "steps": [_step(row, trained.get(row.step + 1, {})) for row in steps],
        "groups": [group_content(recording, row, decode, advantage=advantage) for row in rows],
        "images": images,
    }
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    text = text.replace("</", "<\\/").replace("<!--", "<\\!--")  # these would end the script that holds the data
    text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")

    def filled(place: re.Match[str]) -> str:
        return text if place[1] == "DATA" else MODULE.sub("", (STATIC / place[1]).read_text())

    return PLACE.sub(filled, TEMPLATE.read_text())


def _step(row: StepRow, trained: dict[str, float]) -> dict[str, Any]:
    rewards = [reward for group in row.groups for reward in group.rewards]
    lengths = [length for group in row.groups for length in group.lengths]
    ages = [age for group in row.groups for age in group.staleness]
    figures = {name: trained[name] for name in ("loss", "grad_norm", "entropy", "logprob_gap/mean") if name in trained}
    return {
        "step": row.step,
        "reward": _mean(rewards),
        "length": _mean(lengths),
        "longest": max(lengths, default=0),
        "staleness": _mean(ages),
        "stalest": max(ages, default=0),
        **{name: value for name, value in figures.items() if math.isfinite(value)},
    }


def group_content(
    recording: ViewedRecording, row: GroupRow, decode: Decode, *, only: range | None = None, advantage: str = "grpo"
) -> dict[str, Any]:
    """Return what pages show of a group: all of it, or the turns of the trajectories in `only`. `advantage` is the
    run's estimator."""
    group = recording.group(row.uid)
    scores = recording.scores(int(row.place)).get(row.uid, []) if row.place.isdigit() else []
    values, estimator = advantages(row.rewards, advantage)
    return {
        "uid": row.uid,
        "task": row.task,
        "place": row.place,
        "question": row.question,
        "prompt": "".join(decode(token) for token in group.prompt_ids),
        "images": group.prompt_images,
        "estimator": estimator,
        "trajectories": [
            {
                "reward": one.total,
                "length": one.num_tokens,
                "staleness": row.staleness[number] if row.staleness else None,
                "advantage": round(values[number], DIGITS),
                "turns": _turns(one, own, decode) if only is None or number in only else None,
            }
            for number, (one, own) in enumerate(_with_scores(group, scores))
        ],
    }


def section(record: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return an object inside an object, by the names that lead to it; empty if there is none. Raises RecordError if
    something else is there."""
    for place, name in enumerate(names, 1):
        record = record.get(name, {})
        if not isinstance(record, dict):
            raise RecordError(
                f"{'.'.join(names[:place])}: got {record!r:.40}, where an object belongs: repair the file"
            )
    return record


def estimator_of(config: dict[str, Any]) -> str:
    """Return the run's advantage estimator. Raises RecordError for settings that have none because they are damaged."""
    return str(section(config, "algo", "advantage").get("name", "grpo"))


def advantages(rewards: Sequence[float], estimator: str) -> tuple[list[float], str]:
    """Return the advantages of a group's trajectories, and how they were computed. Only estimators that compare whole
    episodes with their siblings can be computed from rewards; for the others it is that of GRPO (algo/advantage.py)."""
    mean, count = _mean(rewards), len(rewards)
    scale = {"dr_grpo": 1.0, "rloo": count / max(1, count - 1)}.get(estimator)
    name = estimator if scale is not None else "grpo"
    if scale is None:
        scale = 1 / (math.sqrt(sum((one - mean) ** 2 for one in rewards) / max(1, count - 1)) + 1e-6)
    told = name if name == estimator else f"{name}, from the group's rewards (the run used {estimator})"
    signal = len(set(rewards)) > 1
    return [scale * (one - mean) if signal else 0.0 for one in rewards], told


def _with_scores(group: Group, scores: Sequence[float]) -> Iterator[tuple[Trajectory, Sequence[float]]]:
    """Yield each trajectory with the trainer's log-probabilities of its tokens, as far as there are any."""
    start = 0
    for one in group.trajectories:
        yield one, scores[start : start + one.num_tokens]
        start += one.num_tokens


def _turns(one: Trajectory, scores: Sequence[float], decode: Decode) -> list[dict[str, Any]]:
    told = iter(scores)
    return [
        {
            "heading": heading(one, place),
            "observation": "".join(decode(token) for token in turn.observation),
            "images": turn.images,
            "tokens": _tokens(turn.completion, [next(told, math.nan) for _ in turn.completion.token_ids], decode),
            "reason": turn.completion.finish_reason,
            "reward": turn.reward,
        }
        for place, turn in enumerate(one.turns)
    ]


def _tokens(completion: Completion, scores: Sequence[float], decode: Decode) -> list[list[Any]]:
    """Return [text, log-probability, gap or null, version, whether the version is inferred] of each token."""
    spans = [span for span in completion.versions for _ in range(span.start, span.end)]
    return [
        [
            decode(token),
            round(logprob, DIGITS),
            round(score - logprob, DIGITS) if math.isfinite(score) else None,
            span.version,
            span.inferred,
        ]
        for token, logprob, score, span in zip(completion.token_ids, completion.logprobs, scores, spans, strict=True)
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
