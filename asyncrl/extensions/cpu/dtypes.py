"""Choice of the number format on CPUs (`dtype: auto`): the one with the faster matrix multiplication on the machines
that will run the part (probe.py). The slowest machine decides, so that all ranks agree."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import LaunchError
from asyncrl.extensions.cpu import probe
from asyncrl.extensions.cpu.probe import DTYPES, Rates
from asyncrl.launch.precision import DtypeChoice
from asyncrl.platforms import Everywhere

AUTO = "auto"
SLOW = 1.5
"""Slowdown of an explicit dtype, relative to the other one, from which a warning is given."""


def choose(
    config: Config,
    choices: Sequence[DtypeChoice],
    models: Mapping[str, dict[str, Any]],
    machines: Mapping[str, Sequence[str]],
    everywhere: Everywhere,
) -> list[DtypeChoice]:
    """Return the choices with none left open, and with the rates of the slowest machine of each (Platform.choose).
    Raises LaunchError if a machine cannot be measured, but for a warning and an estimate alone it prints that."""
    wanted = {one.part: [(_shape(models[one.part]), machine) for machine in machines[one.part]] for one in choices}
    try:
        rates = probe.ask(list(dict.fromkeys(pair for pairs in wanted.values() for pair in pairs)), everywhere)
    except LaunchError as error:
        if any(getattr(config, one.part).dtype == AUTO for one in choices):
            raise
        text = f"asyncrl: there is no time estimate and no warning about a slow dtype: {error}"
        print(text, file=sys.stderr, flush=True)
        return list(choices)
    slowest = {
        part: min((rates[pair] for pair in pairs), key=lambda one: max(one.of(part).values()))
        for part, pairs in wanted.items()
    }
    return [_chosen(one, getattr(config, one.part).dtype, slowest[one.part]) for one in choices]


def measured(hf: dict[str, Any], machines: Sequence[str], everywhere: Everywhere) -> Rates:
    """Return the rates of the slowest of these machines for a model. Raises LaunchError if one cannot be measured."""
    found = probe.ask([(_shape(hf), machine) for machine in machines], everywhere)
    return min(found.values(), key=lambda rates: max(rates.train.values()))


def _chosen(choice: DtypeChoice, setting: str, rates: Rates) -> DtypeChoice:
    part, where = choice.part, f"{rates.host} ({rates.cpu})"
    faster = rates.faster(part)
    if setting != AUTO and (factor := rates.slowdown(part, setting)) >= SLOW:
        why = f"as set; {faster} is {factor:.1f} times as fast on {where} (measured)"
        return DtypeChoice(part, setting, why, rates, f"Set {part}.dtype=auto, or {faster}.")
    if choice.dtype != AUTO:
        return replace(choice, rates=rates)
    (other,) = set(DTYPES) - {faster}
    factor = rates.slowdown(part, other)
    return DtypeChoice(part, faster, f"auto: {factor:.1f} times as fast as {other} on {where} (measured)", rates)


def _shape(hf: dict[str, Any]) -> str:
    return f"{hf['hidden_size']}x{hf.get('intermediate_size') or 4 * hf['hidden_size']}"
