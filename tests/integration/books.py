"""What the folder of a finished run says: what it trained, its weights, and that its books balance."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from asyncrl.extensions.recording.events import Committed, unpacked
from asyncrl.extensions.recording.reader import Recording
from asyncrl.rollout.events import Admitted, Published, Taken
from asyncrl.rollout.ledger import Ledger
from asyncrl.schema import Group
from tests.integration.running import BATCH, BOUND, GROUP, RUN, STEPS, lines, run

TRAINED = ("loss", "grad_norm", "lr", "entropy", "tokens/trained", "logprob_gap/mean", "reward/mean", "staleness/mean")


def trained(steps: list[dict[str, Any]]) -> list[list[float | None]]:
    """Return what each step computed, not how long it took. Entropy is absent without an entropy bonus."""
    return [[step.get(name) for name in TRAINED] for step in steps]


def weights(run_dir: Path) -> str:
    """Return a digest of all weights that the run exported."""
    digest = hashlib.sha256()
    for file in sorted((run_dir / "hf").rglob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def balanced(run_dir: Path) -> Ledger:
    """Return the ledger of the summary, or of the last step of a stopped run. It must balance, and count tokens."""
    summary, last = run_dir / "summary.json", run_dir / "ledger.json"
    told = json.loads(summary.read_text())["ledger"] if summary.exists() else json.loads(last.read_text())
    told.pop("version", None)  # in ledger.json alone
    ledger = msgspec.convert(told, Ledger)
    assert asdict(ledger) == told  # nothing is left out
    ledger.check()
    assert ledger.tokens.generated > 0
    return ledger


def check_books(run_dir: Path, number: int = STEPS) -> None:
    """Check that each of `number` steps ran once, every group was trained once, the bound holds, and the ledger of the
    whole run balances."""
    steps = lines(run_dir / "metrics.jsonl")
    assert [step["version"] for step in steps] == list(range(1, number + 1))
    assert max(step["staleness/max"] for step in steps) <= BOUND
    ledger, summary = balanced(run_dir), json.loads((run_dir / "summary.json").read_text())
    assert ledger.groups.trained == ledger.prompts.trained == number * BATCH
    assert ledger.trajectories.trained == number * BATCH * GROUP == sum(summary["staleness/histogram"].values())
    events = list(Recording(run_dir).events())
    taken = Counter(uid for event in events if isinstance(event, Taken) for uid in event.uids)
    assert sorted(taken.values()) == [1] * number * BATCH
    prompts = [event.prompt for event in events if isinstance(event, Admitted)]
    assert len(set(prompts)) == len(prompts)
    # between the last version and its own end a run still begins groups, which its summary may not know
    last = max(number for number, event in enumerate(events) if isinstance(event, Published))
    admitted = sum(isinstance(event, Admitted) for event in events[:last])
    assert admitted == events[last].ledger["prompts"]["issued"] <= ledger.prompts.issued
    committed = Counter(event.group.uid for event in events if isinstance(event, Committed))
    assert set(committed.values()) == {1}
    assert {line["version_max"] for line in lines(run_dir / "eval.jsonl")} == {0, number}


def check_replay(run_dir: Path, tmp_path: Path, *settings: str, schedule: bool = True) -> None:
    """Check that an uninterrupted run on the recorded answers gives the same results."""
    shape = [one for one in RUN if not one.startswith(("record", "resume", "checkpoint"))]
    again = [*shape, *settings, "mode=replay", f"replay.from={run_dir}"]
    whole = run(tmp_path / "whole", *again, *(["replay.schedule=true"] if schedule else []))
    assert trained(whole) == trained(lines(run_dir / "metrics.jsonl"))
    assert weights(tmp_path / "whole") == weights(run_dir)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of an HF folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def groups_of(run_dir: Path) -> list[Group]:
    """Return the groups of the run's recording."""
    return [unpacked(event.group) for event in Recording(run_dir).events() if isinstance(event, Committed)]
