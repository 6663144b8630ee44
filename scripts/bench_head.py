"""Benchmark of log-probabilities and their gradient over the vocabulary: memory and time in chunks and for all rows.

    python scripts/bench_head.py [--quick] [--entropy] [--dtype bfloat16] [--chunk-rows 1024] [--repeats N]

It runs forward and backward on one rank with the head of SmolLM2-135M (49,152 tokens of width 576), random hidden
states and one token to predict per row. The weight's gradient is added to a float32 buffer, as in Megatron's data
parallelism. `all rows` computes the same with autograd: float32 logits, log-sum-exp, and the logits of the chosen
tokens. Times are medians of alternating runs; memory is the peak of the process minus what it held before. The last
line is JSON:

    chunked_peak_bytes            by the number of rows
    all_rows_peak_bytes           by the number of rows
    one_chunk_peak_over_all_rows  ratio of the peaks if the rows are one chunk
    peak_growth                   chunked: peak at the most rows over that at one chunk
    one_chunk_over_all_rows       ratio of the times if the rows are one chunk
    many_chunks_over_all_rows     ratio of the times at four times as many rows
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.trainer.head import Head  # noqa: E402
from scripts import machine  # noqa: E402

VOCAB, WIDTH = 49152, 576
TEMPERATURE = 0.9
MiB = 1 << 20
M_MMAP_THRESHOLD = -3  # malloc.h
ALONE: Any = SimpleNamespace(cp=1, tp=1, tp_rank=0)


class Bench:
    """Weight of the head and its gradient buffer."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings, self.dtype = settings, getattr(torch, settings.dtype)
        vocab = VOCAB // 8 if settings.quick else VOCAB
        self.weight = (torch.randn(vocab, WIDTH) * 0.05).to(self.dtype).requires_grad_()
        self.buffer = torch.zeros(vocab, WIDTH)

    def case(self, rows: int) -> tuple[Tensor, Any]:
        """Return hidden states, and the token that follows each."""
        targets = torch.randint(0, len(self.weight), (rows,))
        hidden = torch.randn(rows, WIDTH).to(self.dtype).requires_grad_()
        return hidden, SimpleNamespace(row_of_target=torch.arange(rows), targets=targets)

    def chunked(self, hidden: Tensor, pack: Any) -> None:
        """Compute in chunks, as the trainer does."""
        self.weight.main_grad = self.buffer  # type: ignore[attr-defined]
        head = Head(hidden, self.weight, len(self.weight), self.settings.chunk_rows, ALONE)
        logprobs, entropy = head.score(pack, TEMPERATURE, entropy=self.settings.entropy)
        (logprobs.sum() if entropy is None else logprobs.sum() + 0.1 * entropy.sum()).backward()
        assert self.weight.grad is None

    def all_rows(self, hidden: Tensor, pack: Any) -> None:
        """Compute with autograd, from the logits of all rows."""
        scaled = (hidden @ self.weight.t()).float() / TEMPERATURE
        log_z = torch.logsumexp(scaled, -1)
        total = (scaled[pack.row_of_target, pack.targets] - log_z).sum()
        if self.settings.entropy:
            total = total + 0.1 * (log_z - ((scaled - log_z[:, None]).exp() * scaled).sum(-1)).sum()
        del scaled
        total.backward()
        assert self.weight.grad is not None
        self.buffer += self.weight.grad
        self.weight.grad = None

    def peak(self, way: Callable[[Tensor, Any], None], rows: int) -> int:
        """Return the peak memory of a run in bytes, minus what was held before it."""
        hidden, pack = self.case(rows)
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # Linux: sets the high-water mark back
        way(hidden, pack)
        return memory("VmHWM") - before

    def seconds(self, rows: int) -> tuple[float, float]:
        """Return the median times in chunks and for all rows."""
        found: dict[str, list[float]] = {"chunked": [], "all_rows": []}
        for _ in range(self.settings.repeats):
            for name, times in found.items():
                hidden, pack = self.case(rows)
                start = time.perf_counter()
                getattr(self, name)(hidden, pack)
                times.append(time.perf_counter() - start)
        return statistics.median(found["chunked"]), statistics.median(found["all_rows"])


def memory(field: str) -> int:
    """Return a field of this process's /proc status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the vocabulary and of the rows")
    parser.add_argument("--entropy", action="store_true", help="the entropy and its gradient too")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--chunk-rows", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each way (default 5)")
    settings = parser.parse_args()
    this = machine.report()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MiB)  # glibc returns freed memory, so that peaks are visible
    if settings.quick:
        settings.chunk_rows //= 8
    one = settings.chunk_rows
    bench = Bench(settings)
    bench.seconds(one)  # warm-up
    sizes = [one // 2, one, 2 * one, 4 * one, 8 * one]
    times = {rows: bench.seconds(rows) for rows in (one, 4 * one)}
    chunked = {rows: bench.peak(bench.chunked, rows) for rows in sizes}
    every = {rows: bench.peak(bench.all_rows, rows) for rows in sizes[:-1]}
    table = Table("rows", "chunked MiB", "all rows MiB", "chunked s", "all rows s", title=f"chunks of {one} rows")
    for rows in sizes:
        seconds = [f"{value:.2f}" for value in times.get(rows, ())] or ["", ""]
        whole = f"{every[rows] / MiB:.0f}" if rows in every else ""
        table.add_row(str(rows), f"{chunked[rows] / MiB:.0f}", whole, *seconds)
    Console().print(table)
    figures = {
        "chunked_peak_bytes": chunked,
        "all_rows_peak_bytes": every,
        "one_chunk_peak_over_all_rows": round(chunked[one] / every[one], 4),
        "peak_growth": round(chunked[sizes[-1]] / chunked[one], 4),
        "one_chunk_over_all_rows": round(times[one][0] / times[one][1], 4),
        "many_chunks_over_all_rows": round(times[4 * one][0] / times[4 * one][1], 4),
        "machine": this,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
