"""A recorded run as one self-contained HTML file: curves over the steps, and trajectories token by token."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.inspection.render import Decode, heading
from asyncrl.inspection.rows import GroupRow, StepRow
from asyncrl.records.reading import Recording
from asyncrl.schema import Completion, Group

TEMPLATE = Path(__file__).with_name("page.html")
PLACE = "/*DATA*/null"
DIGITS = 4


def page(title: str, recording: Recording, steps: Sequence[StepRow], rows: Sequence[GroupRow],
         trained: dict[int, dict[str, float]], decode: Decode) -> str:  # fmt: skip
    """Return the HTML text. `rows` are the groups whose trajectories are shown; `trained` is metrics.jsonl by step."""
    images: dict[str, str] = {}
    data = {
        "title": title,
        "steps": [_step(row, trained.get(row.step + 1, {})) for row in steps],
        "groups": [_group(recording, row, decode, images) for row in rows],
        "images": images,
    }
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    text = text.replace("</", "<\\/").replace("<!--", "<\\!--")  # these would end the script that holds the data
    text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return TEMPLATE.read_text().replace(PLACE, text)


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


def _group(recording: Recording, row: GroupRow, decode: Decode, images: dict[str, str]) -> dict[str, Any]:
    """Return what the page shows of a group, and add its images to `images`, each of which the page holds once."""
    group = recording.group(row.uid)
    images |= {name: base64.b64encode(png).decode() for name, png in group.images.items()}
    scores = recording.scores(int(row.place)).get(row.uid, []) if row.place.isdigit() else []
    return {
        "uid": row.uid,
        "task": row.task,
        "place": row.place,
        "prompt": "".join(decode(token) for token in group.prompt_ids),
        "images": group.prompt_images,
        "trajectories": _trajectories(group, row, scores, decode),
    }


def _trajectories(group: Group, row: GroupRow, scores: Sequence[float], decode: Decode) -> list[dict[str, Any]]:
    told, found = iter(scores), []
    for number, one in enumerate(group.trajectories):
        turns = [
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
        age = row.staleness[number] if row.staleness else None
        found.append({"reward": one.total, "length": one.num_tokens, "staleness": age, "turns": turns})
    return found


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
