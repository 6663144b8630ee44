"""The examples of results/plans.md: what asyncrl-plan says about three models, and the plot of the first.

python scripts/plans.py             writes them (some minutes of CPU)
python scripts/plans.py --check     checks the figures that do not need the simulation
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.extensions.plan import inputs
from asyncrl.extensions.plan.report import COLUMNS, assumed, cells, chosen, findings, overrides, svg, uncertainty
from asyncrl.extensions.plan.search import Choices, Plan, search
from scripts import sizes

DOCS = Path(__file__).parent.parent / "results" / "plans.md"
PLOT = DOCS.parent.parent / "docs" / "pictures" / "plan_8b_64.svg"
BATCH = {"group_size": 8, "prompt": 300, "longest": 8192, "max_staleness": 8}
EXAMPLES: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen3_8b": ("Qwen3-8B", {"gpus": 64, "batch_groups": 256, **BATCH, "mean": 2500}, 3),
    "llama3_70b": ("Llama-3.1-70B", {"gpus": 256, "batch_groups": 512, **BATCH, "mean": 2500}, 3),
    "qwen3_235b_a22b": ("Qwen3-235B-A22B", {"gpus": 1024, "batch_groups": 1024, **BATCH, "mean": 4000}, 2),
}
"""Name of the model, fields, and seeds."""


def planned(name: str, few: int) -> tuple[Plan, inputs.PlanInput]:
    """Return the plan of an example with this many simulated plans."""
    _, fields, seeds = EXAMPLES[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(sizes.MODELS[name]))
        given = inputs.parse({"model": folder, **fields})
        found = search(
            inputs.splits(given), given.workload, Choices.up_to(given.max_staleness), few=few, seeds=seeds, say=print
        )
    return found, given


def command(name: str) -> str:
    """Return the command of an example."""
    model, fields, seeds = EXAMPLES[name]
    words = " ".join(f"{field}={value}" for field, value in fields.items())
    return f"asyncrl-plan model={model} {words}" + (f" --seeds {seeds}" if seeds != 3 else "")


def markers(name: str) -> tuple[str, str]:
    """Return the lines around an example."""
    return f"<!-- plan of {name}: written by scripts/plans.py -->\n", f"<!-- end of the plan of {name} -->\n"


def written(name: str, plan: Plan, given: inputs.PlanInput) -> Iterator[str]:
    """Yield the lines of an example."""
    yield f"```\n{command(name)}\n```\n\n"
    yield "| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS) + "\n"
    named = [("best", plan.best), *(("", one) for one in plan.others)]
    for label, one in [*named, *([("synchronous", plan.colocated)] if plan.colocated else [])]:
        yield "| " + " | ".join(cells(label, one)) + " |\n"
    yield "\n"
    for line in (*findings(plan, given), *uncertainty(plan, None), *assumed(plan, given)):
        yield f"- {line}\n"
    yield f"\n```\n{_wrapped(overrides(chosen(plan)))}```\n"


def _wrapped(words: list[str]) -> str:
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > 118:
            lines.append("")
        lines[-1] += word + " "
    return "".join(line.rstrip() + "\n" for line in lines)


def documented(name: str) -> str:
    """Return what the documentation says about an example."""
    begin, end = markers(name)
    return DOCS.read_text().partition(begin)[2].partition(end)[0]


def disagreements(name: str) -> list[str]:
    """Return what the documentation says about an example that the laws do not say now."""
    plan, _ = planned(name, few=0)
    text = documented(name)
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    rows = [row for row in table[2:] if row[0] != "synchronous"]
    wrong = [] if command(name) in text and rows else ["the command"]
    for row in rows:
        same = [one for one in plan.laws if all(cells("", one)[at] == row[at] for at in (1, 2, 3, 5, 9, 10))]
        if not same:
            wrong.append(" | ".join(row))
        elif row[0] == "best" and not any(_wrapped(overrides(one)) in text for one in same):
            wrong.append("the overrides")
    if name == "qwen3_8b" and _lines(svg(plan)) != _lines(PLOT.read_text()):
        wrong.append(str(PLOT.name))
    return wrong


def _lines(plot: str) -> list[str]:
    return [line for line in plot.splitlines() if line.startswith("<polyline")]


def main() -> int:
    """Write the examples, or check them."""
    if sys.argv[1:] == ["--check"]:
        found = {name: disagreements(name) for name in EXAMPLES}
        print("\n".join(f"{name}: {wrong}" for name, wrong in found.items()))
        return int(any(found.values()))
    for name in sys.argv[1:] or EXAMPLES:
        plan, given = planned(name, few=4)
        begin, end = markers(name)
        before, _, rest = DOCS.read_text().partition(begin)
        DOCS.write_text(before + begin + "".join(written(name, plan, given)) + end + rest.partition(end)[2])
        if name == "qwen3_8b":
            PLOT.write_text(svg(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main())
