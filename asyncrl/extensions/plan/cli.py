"""`asyncrl-plan`: choose the split of GPUs between engines and trainer, the lead, the bound and the concurrency.

examples:
    asyncrl-plan model=FOLDER gpu=h100 gpus=64 batch_groups=256 prompt=300 mean=2500 longest=8192
    asyncrl-plan gpus=32 per_token=0.012 per_request=0.00012 train_rate=10000 mean=8000 longest=27000
    asyncrl-plan RUN gpus=16 --json plan.json --svg plan.svg          a recorded run, with its own timings
    asyncrl-plan numbers.yaml max_staleness=4

FOLDER holds a model's config.json. Later arguments override earlier ones. The last line of the output has overrides of
asyncrl-train. asyncrl/extensions/plan/README.md explains what is assumed.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import AsyncRLError, ConfigError, visible
from asyncrl.network.addresses import MACHINE

if TYPE_CHECKING:
    from asyncrl.extensions.plan.fit import Comparison, Fit


ENGINE = {
    "engine_gpus": "engine.tensor_parallel",
    "max_running": "engine.max_running_requests",
    "kv_tokens": "engine.max_total_tokens",
}
"""Fields that a recorded run sets, and its settings that they come from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan. Returns 0 on success, 2 for wrong arguments and 1 for any other error, after one line on stderr."""
    options = _parser().parse_args(argv)
    from asyncrl.extensions.plan import (
        inputs,  # imported after parsing, so that wrong arguments are answered immediately
    )
    from asyncrl.extensions.plan.fit import in_words
    from asyncrl.extensions.plan.report import report, show, svg
    from asyncrl.extensions.plan.run_memory import RunMemory
    from asyncrl.extensions.plan.search import Choices, search

    try:
        _check_files(options)
        settings, runs = _settings(options.input)
        given = inputs.parse(settings)
        choices, possible = Choices.up_to(given.max_staleness), inputs.splits(given, _kept(settings, runs))
        if runs and given.model is None:
            remembered = RunMemory(runs[-1], gpu=not on_cpus(runs[-1]))
            possible = [remembered.added(one) for one in possible]
        plan = search(possible, given.workload, choices, few=options.simulate, seeds=options.seeds, say=_say)
        compared = [run.compare() for run in runs]
        notes = [line for run, one in zip(runs, compared, strict=True) for line in (in_words(one), *run.notes)]
        show(plan, given, notes, _own_error(compared))
        if options.json:
            options.json.write_text(json.dumps(report(plan, given), indent=2) + "\n")
        if options.svg:
            options.svg.write_text(svg(plan))
    except (AsyncRLError, OSError) as error:
        print(visible(f"asyncrl-plan: error: {' '.join(str(error).split())}"), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _say(line: str) -> None:
    print(f"asyncrl-plan: {line}", file=sys.stderr, flush=True)


def _check_files(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before a plan is made."""
    for name, path in (("--json", options.json), ("--svg", options.svg)):
        if path and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(name, str(path), "Name a file in a folder that exists.")


def _kept(settings: dict[str, Any], runs: Sequence[Fit]) -> list[str]:
    """Return the settings of asyncrl-train that a recorded run has already."""
    own = runs[-1].fields if runs else {}
    return [name for field, name in ENGINE.items() if field in own and settings.get(field) == own[field]]


def _own_error(compared: Sequence[Comparison]) -> float | None:
    """Return how far the last recorded run is predicted off in its own setting, as a fraction."""
    if not compared:
        return None
    predicted, made = compared[-1]["samples_per_s"]
    return predicted / made - 1


class _Help(argparse.Action):
    """Prints the help with all fields, which are read from the sources."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        parser.print_help()
        print("\nfields:\n" + "\n".join(_fields()))
        parser.exit()


def _fields() -> Iterator[str]:
    """Yield the fields of the input with their meanings."""
    tree = ast.parse((Path(__file__).parent / "inputs.py").read_text())
    (section,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "PlanInput")
    for one, below in itertools.pairwise(section.body):
        if isinstance(one, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            default = f" ({ast.unparse(one.value)})" if one.value and ast.unparse(one.value) != "None" else ""
            name, meaning = ast.unparse(one.target) + default, " ".join(str(below.value.value).split())
            yield textwrap.fill(meaning, 100, initial_indent=f"  {name:20}", subsequent_indent=" " * 22)


def _at_least(least: int) -> Callable[[str], int]:
    """Return a type of whole numbers with a minimum."""

    def number(word: str) -> int:
        if (value := int(word)) < least:
            raise argparse.ArgumentTypeError(f"got {value}: at least {least}")
        return value

    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="print this, and all fields")
    parser.add_argument(
        "input", nargs="*", metavar="INPUT", help="folder of a run or its metrics.jsonl, YAML file, or FIELD=VALUE"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a plot of throughput by number of engines")
    parser.add_argument(
        "--simulate", type=_at_least(0), default=4, metavar="N", help="plans to simulate (default: 4; 0: laws only)"
    )
    parser.add_argument("--seeds", type=_at_least(1), default=3, metavar="N", help="simulations of each (default: 3)")
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
            from asyncrl.extensions.plan.fit import fit

            runs.append(fit(Path(word) if Path(word).is_dir() else Path(word).parent))
            found |= runs[-1].fields
            if on_cpus(runs[-1]):
                found["switch"] = 0.0  # without GPUs no memory changes hands
        else:
            try:
                fields = yaml.safe_load(Path(word).read_text())
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise ConfigError("INPUT", word, f"Name a run, a YAML file or FIELD=VALUE ({error}).") from None
            if not isinstance(fields, dict):
                raise ConfigError("INPUT", word, "The file must hold fields and values.")
            found |= fields
    return found, runs


def on_cpus(run: Fit) -> bool:
    """Return whether a recorded run worked without GPUs: it has an estimate from the speed of its CPUs."""
    machine = run.run / MACHINE
    return run.settings.trainer.device == "cpu" or (
        machine.exists() and json.loads(machine.read_text()).get("estimate") is not None
    )


if __name__ == "__main__":
    sys.exit(main())
