"""Facts about this machine: its CPU, and the rate of two busy processes over that of one.

    python scripts/machine.py

Every scripts/bench_*.py prints this line first and puts the figures under `machine` in its last line of JSON. On a
machine without a GPU the engine and the trainer are two processes on the same cores, so what asynchrony can gain is
limited by `two_over_one`: 2 where every process has a core of its own, about 1 where two cores share the units that
multiply. A ratio of asynchronous over synchronous means little without the bound that follows from it
(`overlap_bound`). The measurement takes two to three seconds and needs an idle machine.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SHAPE = (512, 576, 1536)
"""Shape of the timed matrix product: 512 tokens through one MLP matrix of SmolLM2-135M, the default model."""
ROUNDS, SECONDS = 5, 0.1
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""Flags of /proc/cpuinfo that decide how fast float32 and bfloat16 products are, on x86 and on ARM."""
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True)
class Machine:
    """Figures of a machine. `two_over_one` is the rate of two processes together over that of one."""

    cpu: str
    cores: int
    features: list[str]
    torch: str
    running: float
    """Fraction of the time that the single process had a core. If it is well below 1, other processes use the machine,
    and the rates and the ratio are not valid."""
    gflops_one: float
    gflops_two: float
    two_over_one: float

    def line(self) -> str:
        """Return a readable line with the figures."""
        bfloat16 = "" if BFLOAT16 & set(self.features) else ", no bfloat16 arithmetic"
        busy = "" if self.running > 0.9 else f"; BUSY WITH OTHERS, a process ran {self.running:.0%} of the time"
        rows, inner, columns = SHAPE
        return (
            f"machine: {self.cpu}, {self.cores} cores, {' '.join(self.features)}{bfloat16}; torch {self.torch}; "
            f"float32 {rows}x{inner}x{columns}: {self.gflops_one:.0f} GFLOP/s in one process, "
            f"{self.gflops_two:.0f} in two ({self.two_over_one:.2f} x){busy}"
        )


def overlap_bound(generate: float, train: float, two_over_one: float) -> float:
    """Return the largest ratio of asynchronous over synchronous throughput that this machine allows.

    A synchronous step generates and then trains, each alone on the machine, in g + t seconds. An asynchronous step does
    the same work, and can be no shorter than each of these:

        g            one engine generates the batch, at best as fast as alone;
        t            one trainer trains it, at best as fast as alone;
        (g + t) / r  there are g + t seconds of one process's work, and two concurrent processes do at most r seconds of
                     it in a second, where r is `two_over_one`. (One process at a time does 1 <= r.)

    So the ratio is at most (g + t) / max(g, t, (g + t) / r). It is at most r, and at most 2, for g = t.

    It holds for one engine and one trainer of one thread each, which are busy all the time. It is optimistic in that
    it leaves out what the router and the rollout process take, and that decoding needs more of the memory's bandwidth
    than the product that r is measured with. It is pessimistic where g has waits that need no processor, such as those
    for tools: a run can then exceed it. r is clipped to 1 to 2, beyond which it is noise: where two processes do less
    than one, they can still take turns.
    """
    r = min(max(two_over_one, 1.0), 2.0)
    return (generate + train) / max(generate, train, (generate + train) / r)


def report() -> dict[str, Any]:
    """Measure this machine, print the line, and return the figures for a last line of JSON."""
    found = measured()
    print(found.line(), flush=True)
    return asdict(found)


def measured() -> Machine:
    """Measure in a process of its own, which gets one thread whatever the caller has set or imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__, "--rates"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    rates = json.loads(done.stdout)
    info = Path("/proc/cpuinfo")
    cpu, features = described(info.read_text() if info.exists() else "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cpu, cores, features, rates["torch"], rates["running"], **summary(rates["one"], rates["two"]))


def described(cpuinfo: str) -> tuple[str, list[str]]:
    """Return the CPU's name and those of its features that matter, from the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name") or platform.machine(), [one for one in FEATURES if one in flags]


def summary(one: list[float], two: list[float]) -> dict[str, float]:
    """Return medians of the rounds. The ratio is that of neighbours, which saw the same machine."""
    return {
        "gflops_one": round(statistics.median(one), 1),
        "gflops_two": round(statistics.median(two), 1),
        "two_over_one": round(statistics.median(b / a for a, b in zip(one, two, strict=True)), 3),
    }


# --- the process that measures --------------------------------------------------------------------------------


def rate(begin: float) -> tuple[float, float]:
    """Return the GFLOP/s of one process from the time `begin` on, and the fraction of the time that it had a core."""
    import torch

    rows, inner, columns = SHAPE
    left, right, out = torch.ones(rows, inner), torch.ones(inner, columns), torch.empty(rows, columns)
    torch.mm(left, right, out=out)  # touches the memory
    time.sleep(max(0.0, begin - time.monotonic()))
    count, started, seconds, cpu = 0, time.monotonic(), 0.0, time.process_time()
    while seconds < SECONDS:
        torch.mm(left, right, out=out)
        count, seconds = count + 1, time.monotonic() - started
    return 2.0 * rows * inner * columns * count / seconds / 1e9, (time.process_time() - cpu) / seconds


def rates() -> dict[str, Any]:
    """Return the rates of one process and of two concurrent ones, measured alternately."""
    import torch

    torch.set_num_threads(1)
    one: list[float] = []
    two: list[float] = []
    running: list[float] = []
    with get_context("fork").Pool(2) as pool:  # torch is imported once and has started no thread yet
        for _ in range(ROUNDS):
            for count, found in ((1, one), (2, two)):
                begin = time.monotonic() + 0.02
                told = pool.map(rate, [begin] * count, chunksize=1)
                found.append(sum(gflops for gflops, _ in told))
                running += [share for _, share in told] if count == 1 else []
    return {"torch": torch.__version__, "one": one, "two": two, "running": round(statistics.median(running), 3)}


if __name__ == "__main__":
    print(json.dumps(rates() if "--rates" in sys.argv else report()))
