"""Comparison of two evaluations: asyncrl-inspect A B --compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

from asyncrl.errors import RecordError
from asyncrl.extensions.evaluate.extension import RESULTS
from asyncrl.extensions.evaluate.figures import differences
from asyncrl.jsonl import read_object

WHOLE = ("mean", "accuracy")
"""Figures that decide which of two is better: the first that both have."""


def compared(first: Path, second: Path, *, as_json: bool) -> Iterator[str]:
    """Yield what differs in the settings and the figures of each set, and which of the two is better on it. Raises
    RecordError if one is no evaluation, or if they share no question."""
    results = [_read(folder) for folder in (first, second)]
    before, now = (one["settings"] for one in results)
    if not as_json:
        yield f"A  {first}"
        yield f"B  {second}"
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                texts = (shorten(json.dumps(one.get(name)), 80, placeholder=" ...") for one in (before, now))
                yield f"other {name}: {' -> '.join(texts)}"
    shared = [name for name in results[0]["sets"] if name in results[1]["sets"]]
    found = {name: differences(*(one["sets"][name]["questions"] for one in results)) for name in shared}
    found = {name: figures for name, figures in found.items() if figures}
    if not found:
        raise RecordError(f"{first} and {second} have no question in common: evaluate both on the same eval.sets")
    for name, figures in found.items():
        counts = [len(one["sets"][name]["questions"]) for one in results]
        if as_json:
            told = {figure: {**vars(one), "verdict": one.verdict} for figure, one in figures.items()}
            yield json.dumps({"set": name, "questions": counts, "figures": told})
            continue
        yield f"{name}: {counts[0]} and {counts[1]} questions"
        for figure, one in figures.items():
            yield f"  {figure:<12} {one}"
        decides = next(figure for figure in (*WHOLE, *figures) if figure in figures)
        yield f"  => {figures[decides].verdict} ({decides}, {figures[decides].questions} shared questions)"


def _read(folder: Path) -> dict[str, Any]:
    file = folder / RESULTS if folder.is_dir() else folder
    found = read_object(file)
    if not found or not {"settings", "sets"} <= found.keys():
        raise RecordError(f"{file} has no results of an evaluation: run asyncrl-train mode=evaluate to its end")
    return found
