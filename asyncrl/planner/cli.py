"""`asyncrl-plan`: choose the split of GPUs between engines and trainer, the lead, the bound and the concurrency.

examples:
    asyncrl-plan model=Qwen3-8B gpu=h100 gpus=64 batch_groups=256 prompt=300 mean=2500 longest=8192
    asyncrl-plan gpus=32 per_token=0.012 per_request=0.00012 train_rate=10000 mean=8000 longest=27000
    asyncrl-plan RUN gpus=16 --json plan.json --svg plan.svg          a recorded run, with its own timings
    asyncrl-plan numbers.yaml max_staleness=4

Later arguments override earlier ones. The last line of the output has overrides of asyncrl-train. docs/planning.md
explains every field, and what is assumed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import AsyncRLError, ConfigError, visible

if TYPE_CHECKING:
    from asyncrl.planner.fit import Fit


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan. Returns 0 on success, 2 for wrong arguments and 1 for any other error, after one line on stderr."""
    options = _parser().parse_args(argv)
    from asyncrl.planner import inputs  # imported after parsing, so that --help is answered immediately
    from asyncrl.planner.report import report, show, svg
    from asyncrl.planner.search import Choices, search

    try:
        settings, runs = _settings(options.input)
        given = inputs.parse(settings)
        choices = Choices.up_to(given.max_staleness)
        plan = search(inputs.splits(given), given.workload, choices, few=options.simulate, seeds=options.seeds)
        if options.json:
            options.json.write_text(json.dumps(report(plan), indent=2) + "\n")
        if options.svg:
            options.svg.write_text(svg(plan))
    except (AsyncRLError, OSError) as error:
        print(visible(f"asyncrl-plan: error: {' '.join(str(error).split())}"), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    show(plan, [line for run in runs for line in (run.check(), *run.notes)])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "input", nargs="*", metavar="INPUT", help="folder of a run or its metrics.jsonl, YAML file, or FIELD=VALUE"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a plot of throughput by number of engines")
    parser.add_argument(
        "--simulate", type=int, default=4, metavar="N", help="plans to simulate (default: 4; 0: laws only)"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="simulations of each (default: 3)")
    return parser


def _settings(words: Sequence[str]) -> tuple[dict[str, Any], list[Fit]]:
    """Return the fields of all inputs, and the fits of recorded runs."""
    import yaml

    found, runs = dict[str, Any](), list["Fit"]()
    for word in words:
        name, equals, value = word.partition("=")
        if equals and not Path(word).exists():
            found[name] = yaml.safe_load(value)
        elif Path(word).is_dir() or Path(word).name == "metrics.jsonl":
            from asyncrl.planner.fit import fit

            runs.append(fit(Path(word) if Path(word).is_dir() else Path(word).parent))
            found |= runs[-1].fields
        else:
            try:
                fields = yaml.safe_load(Path(word).read_text())
            except (OSError, yaml.YAMLError) as error:
                raise ConfigError("INPUT", word, f"Name a run, a YAML file or FIELD=VALUE ({error}).") from None
            if not isinstance(fields, dict):
                raise ConfigError("INPUT", word, "The file must hold fields and values.")
            found |= fields
    return found, runs


if __name__ == "__main__":
    sys.exit(main())
