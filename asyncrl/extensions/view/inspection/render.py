"""Rows and groups as tables and coloured text."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from asyncrl.errors import RecordError, visible
from asyncrl.extensions.view.inspection.rows import GroupRow, StepRow
from asyncrl.jsonl import read_object
from asyncrl.schema import Completion, Group, Trajectory, Turn

Decode = Callable[[int], str]
GAPS = ((0.01, "default"), (0.1, "green"), (0.5, "yellow"), (2.0, "red"))
"""Colours by the absolute difference of log-probabilities between trainer and engine."""
COLOURS, SURPRISE = ((-0.05, "default"), (-0.7, "green"), (-2.3, "yellow"), (-5.0, "red")), "bold red"
"""Colours by a token's log-probability: how much it surprised the engine that wrote it."""

MOST_BYTES = 256 << 20
"""Size of a tokenizer's file, above which it is refused."""


def decoder(run: Path) -> Decode:
    """Return a decoder of single tokens that uses the run's tokenizer, or shows token ids if there is none."""
    model = (read_object(run / "addresses.json") or {}).get("model")
    if not isinstance(model, str) or not (file := Path(model) / "tokenizer.json").is_file():
        return lambda token: f" {token}"
    from tokenizers import Tokenizer  # imported late, because tables do not need it

    if (size := file.stat().st_size) > MOST_BYTES:
        raise RecordError(f"{file}: it has {size} bytes, and a tokenizer has at most {MOST_BYTES}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises nothing more specific
        raise RecordError(f"{file}: it is no tokenizer: {error}") from None
    return lambda token: visible(str(tokenizer.decode([token], skip_special_tokens=False)))


def steps_table(rows: Iterable[StepRow], trained: dict[int, dict[str, float]]) -> Table:
    """Build a table with a row for each batch; `trained` is metrics.jsonl by step."""
    table = Table("step", "groups", "reward", "length", "truncated", "staleness", "loss", "gap")
    for row in rows:
        rewards, lengths, ages = (_all(row.groups, name) for name in ("rewards", "lengths", "staleness"))
        figures = trained.get(row.step + 1, {})
        table.add_row(
            str(row.step),
            str(len(row.groups)),
            f"{_mean(rewards):.3f}",
            f"{_mean(lengths):.1f}",
            f"{sum(group.truncated for group in row.groups) / max(1, len(lengths)):.0%}",
            f"{_mean(ages):.1f} ≤ {max(ages, default=0):.0f}",
            f"{figures['loss']:+.4f}" if "loss" in figures else "",
            f"{figures['logprob_gap/mean']:.4f}" if "logprob_gap/mean" in figures else "",
        )
    return table


def reasons_line(rows: Iterable[GroupRow]) -> str:
    """Count the groups by place: trained, ready, or the reason why they were rejected."""
    places = Counter("trained" if row.place.isdigit() else row.place for row in rows)
    return ", ".join(f"{visible(place)} {count}" for place, count in places.most_common())


def groups_table(rows: Iterable[GroupRow]) -> Table:
    """Build a table with a row for each group."""
    table = Table("uid", "task", "batch or reason", "rewards", "lengths", "turns", "staleness", "truncated")
    for row in rows:
        table.add_row(
            *(escape(visible(text)) for text in (row.uid, row.task, row.place)),
            _few([f"{reward:g}" for reward in row.rewards]),
            _few([str(length) for length in row.lengths]),
            str(row.turns),
            _few([str(age) for age in row.staleness]),
            str(row.truncated),
        )
    return table


def group_text(group: Group, decode: Decode, scores: Sequence[float] | None = None) -> RenderableType:
    """Render the prompt, and each trajectory with its turns and version boundaries. Tokens are coloured by surprise, or
    by the gap to `scores`, the trainer's log-probabilities of all tokens of the group."""
    lines: list[Text] = [Text(visible(f"{group.uid}  {group.task}"), "bold")]
    lines.append(Text("".join(decode(token) for token in group.prompt_ids), "dim"))
    lines += [Text(_image(name, group), "blue") for name in group.prompt_images]
    told = iter(scores) if scores is not None else None
    for number, trajectory in enumerate(group.trajectories):
        lines.append(Text(f"-- {number}: reward {trajectory.total:g}, {trajectory.num_tokens} tokens", "bold"))
        lines.append(_trajectory(trajectory, decode, told, group))
    return Lines(*lines)


def _image(name: str, group: Group) -> str:
    width, height = struct.unpack(">II", group.images[name][16:24])  # in the header of every PNG file
    return f"⟨image {name[:8]}, {width} x {height}⟩"


def _trajectory(trajectory: Trajectory, decode: Decode, scores: Iterator[float] | None, group: Group) -> Text:
    text = Text()
    for place, turn in enumerate(trajectory.turns):
        text.append(visible(heading(trajectory, place)), "bold magenta")
        if turn.observation:
            text.append("".join(decode(token) for token in turn.observation), "italic blue")
        text.append("".join(_image(name, group) for name in turn.images), "blue")
        _completion(text, turn.completion, decode, scores)
        if turn.reward:
            text.append(f" [turn's reward {turn.reward:g}]", "bold")
    return text


def heading(trajectory: Trajectory, place: int) -> str:
    """Return the heading of a turn: its role if that changes, and the turn that it follows if that is not the previous
    one. Empty for most turns."""
    turn: Turn = trajectory.turns[place]
    before = trajectory.turns[place - 1] if place else None
    told = [turn.role] if turn.role and (before is None or before.role != turn.role) else []
    if turn.fork is not None:
        told.append(f"again after turn {turn.fork}" if turn.fork >= 0 else "again from the beginning")
    elif turn.begins:
        told.append("a context of its own")
    return f"⟨{': '.join(told)}⟩" if told else ""


def _completion(text: Text, completion: Completion, decode: Decode, scores: Iterator[float] | None) -> None:
    begins = {span.start: span for span in completion.versions if span.end > span.start}
    for position, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        if position in begins:
            span = begins[position]
            text.append(f"⟨v{span.version}{'?' if span.inferred else ''}⟩", "cyan")
        text.append(decode(token), _gap_colour(next(scores) - logprob) if scores else _colour(logprob))
    text.append(visible(f"⟨{completion.finish_reason}⟩"), "cyan")


def _colour(logprob: float) -> str:
    return next((colour for least, colour in COLOURS if logprob >= least), SURPRISE)


def _gap_colour(gap: float) -> str:
    """Return the colour of a gap; dim if the trainer did not run the token."""
    return next((colour for most, colour in GAPS if abs(gap) <= most), "dim" if gap != gap else SURPRISE)


def _all(groups: Iterable[GroupRow], name: str) -> list[float]:
    return [value for group in groups for value in getattr(group, name)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _few(values: Sequence[str], most: int = 8) -> str:
    return " ".join(values[:most]) + (f" … ({len(values)})" if len(values) > most else "")
