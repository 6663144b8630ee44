"""Benchmark of the cost of recordings and checkpoints, and of the speed of a replay.

    python scripts/bench_replay.py [--quick] [OVERRIDE ...]

It records a real run (experiment=count_bits; --quick: tiny) and replays it. Then it writes and reads long answers of
random tokens in one process. The last line is JSON:

    recording_overhead    processor seconds of the recording / seconds of the steps
    bytes_per_token       size of the run's recording on disk per token, including prompts
    long_bytes_per_token  the same for groups of 16 answers of 4,096 random tokens
    long_us_per_token     processor time for one of these tokens: packing, compressing and writing
    read_us_per_token     processor time to read it back as a batch
    replay_over_step      seconds of the replay's steps / seconds of training in them
    save_stall            seconds that a checkpoint blocks the trainer / seconds to copy as many bytes in memory
    save_stall_s          seconds that a checkpoint blocks the trainer
    checkpoint_gb         size of weights and moments in GB
    train_beside_write    seconds of training while a checkpoint is written / while none is
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl.extensions.recording.events import Committed, Event, packed
from asyncrl.extensions.recording.reader import Recording
from asyncrl.extensions.recording.writer import Writer
from asyncrl.rollout.events import Taken
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan
from scripts import machine

GROUPS, SAMPLES, TOKENS = 8, 16, 4096


def run(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run a training and return its steps except the first two."""
    command = [sys.executable, "-m", "asyncrl.launch.main", f"run.dir={folder}", "eval.questions=0", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][2:]


def total(steps: list[dict[str, Any]], name: str) -> float:
    """Return the sum of a metric over all steps."""
    return float(sum(step[name] for step in steps))


def recorded(folder: Path, *overrides: str) -> dict[str, float]:
    """Measure a recorded run and its replay."""
    settings = [*overrides, "run.max_steps=14"]
    live = run(folder / "live", *settings, "record=true")
    again = run(folder / "again", *settings, "mode=replay", f"replay.from={folder / 'live'}")
    return {
        "recording_overhead": total(live, "time/recording") / total(live, "time/step"),
        "bytes_per_token": total(live, "recording/bytes") / total(live, "tokens/generated"),
        "replay_over_step": total(again, "time/step") / total(again, "time/train"),
    }


def saved(folder: Path, *overrides: str) -> dict[str, float]:
    """Measure a run with checkpoints."""
    every = 4
    settings = [*overrides, "run.max_steps=17", f"checkpoint.every={every}", "checkpoint.keep_last=1"]
    steps = run(
        folder, *settings, "rollout.max_staleness=0"
    )  # engines are idle during training, with or without writing
    stalls = [step["time/save"] for step in steps if "time/save" in step]
    behind = [step["time/train"] for step in steps if "time/save" in step]
    others = [step["time/train"] for step in steps if (step["step"] - 1) % every > 1]
    (policy,) = (folder / "checkpoints").glob("*/policy")
    size = sum(file.stat().st_size for file in policy.glob("*.distcp"))
    return {
        "save_stall": statistics.median(stalls) / copying(size),
        "save_stall_s": statistics.median(stalls),
        "checkpoint_gb": size / 1e9,
        "train_beside_write": statistics.median(behind) / statistics.median(others),
    }


def copying(size: int) -> float:
    """Return the seconds to copy this many bytes into memory touched before, in one thread like the trainer."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def made_up() -> list[Group]:
    """Return groups of long answers with realistic token ids and log-probabilities."""
    draw, noise = random.Random(0), np.random.default_rng(0)

    def answer() -> Trajectory:
        ids = [min(150_000, int(100 * draw.paretovariate(0.5))) for _ in range(TOKENS)]
        logprobs = np.log(noise.random(TOKENS, dtype=np.float32)).tolist()
        spans = [VersionSpan(3, 0, TOKENS // 2), VersionSpan(4, TOKENS // 2, TOKENS)]
        return Trajectory([Turn([], Completion(ids, logprobs, spans, "stop"))], 1.0)

    prompt = [draw.randrange(150_000) for _ in range(256)]
    return [Group(f"g{slot}", slot, prompt, [answer() for _ in range(SAMPLES)], "task") for slot in range(GROUPS)]


def long_answers(folder: Path) -> dict[str, float]:
    """Measure writing and reading long answers."""
    groups, tokens = made_up(), GROUPS * SAMPLES * TOKENS
    started = time.process_time()  # CPU time of both threads
    writer = Writer[Event](folder)
    for group in groups:
        writer.write(Committed(group.slot, packed(group), 0))
    writer.write(Taken(0, [group.uid for group in groups], {}))
    writer.close()
    written = time.process_time()
    batch = Recording(folder).batch(0)
    read = time.process_time()
    assert [group.num_tokens for group in batch.groups] == [SAMPLES * TOKENS] * GROUPS
    return {
        "long_bytes_per_token": writer.written / tokens,
        "long_us_per_token": (written - started) / tokens * 1e6,
        "read_us_per_token": (read - written) / tokens * 1e6,
    }


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model")
    parser.add_argument("overrides", nargs="*", help="further settings of the runs, such as trainer.dtype=float32")
    options = parser.parse_args()
    this = machine.report()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = [f"experiment={'tiny' if options.quick else 'count_bits'}", *options.overrides]
        found = {**recorded(folder, *settings), **long_answers(folder / "long"), **saved(folder / "saved", *settings)}
    print(json.dumps({**{name: round(value, 4) for name, value in found.items()}, "machine": this}))


if __name__ == "__main__":
    main()
