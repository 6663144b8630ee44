"""Measurement of how fast one CPU core of this machine multiplies matrices, in bfloat16 and in float32.

    python -m asyncrl.extensions.cpu.probe HIDDENxINNER [HIDDENxINNER ...]

These rates decide `dtype: auto` (dtypes.py), and the estimated duration of a run is based on them. A CPU
without bfloat16 arithmetic (AVX2 alone, or AVX-512 before Cooper Lake) takes up to 40 times as long in bfloat16 as in
float32; one with AVX-512 BF16 or AMX takes half as long or less.

Rates are cached for each host, CPU, torch version and shape, so torch is imported only once on a machine. Only
`measure` imports torch: the launcher, which asks all machines (`ask`), reads cached rates without it.

waits for     the probe of each machine (PROBE_SECONDS)
on a hang     raises LaunchError, which names the machine
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from asyncrl.errors import LaunchError
from asyncrl.models.catalog import cache_dir
from asyncrl.platforms import Everywhere

DTYPES = ("bfloat16", "float32")
"""The number formats between which measured rates decide."""
TRAIN_ROWS, GENERATE_ROWS = 64, 32
"""Tokens per product: as in a short micro-batch, and as in an engine that decodes for this many requests."""
LARGEST = 1 << 20
"""Maximum number of elements of a weight. A larger weight is shrunk, so that a measurement takes milliseconds."""
HOPELESS = 3.0
"""A product that takes this many times as long as in the other dtype is not repeated."""
REPEATS = 3
WINDOW = 0.15
"""Seconds for which the operations of two processes are counted."""
MARK = "asyncrl-rates "
"""Prefix of the result line, which tells it from what modules and prologs print."""
PROBE_SECONDS = 120.0
"""Timeout of the probe. A cold import of torch from a shared file system takes most of it."""
SWITCHES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that hide CPU instructions from torch and its libraries."""


@dataclass(frozen=True)
class Rates:
    """Floating-point operations per second of one thread, by dtype, in products with the weights of one MLP."""

    host: str
    cpu: str
    train: dict[str, float]
    """Forward and both gradient products, as in a short micro-batch."""
    generate: dict[str, float]
    """Forward product only, as in an engine that decodes."""
    cores: int
    """Number of CPUs that a process may use."""
    two: float
    """Float32 throughput of two concurrent processes relative to one: 2, or 1 if the cores share arithmetic units."""

    def of(self, part: str) -> dict[str, float]:
        """Return the rates that apply to a part of a run, which is its trainer or generates."""
        return self.train if part == "trainer" else self.generate

    def faster(self, part: str) -> str:
        """Return the faster dtype for a part of a run."""
        return max(DTYPES, key=self.of(part).__getitem__)

    def slowdown(self, part: str, dtype: str) -> float:
        """Return how many times as long a part takes in `dtype` as in the faster dtype."""
        return max(self.of(part).values()) / self.of(part)[dtype]

    @classmethod
    def parse(cls, text: str) -> Rates:
        """Parse what `line` returns. Raises ValueError for anything else."""
        try:
            found = cls(**json.loads(text))
            rates = [one[dtype] for one in (found.train, found.generate) for dtype in DTYPES]
            positive = min(*rates, found.cores, found.two) > 0
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"these are not measured rates: {text[:200]!r}") from error
        if not positive:
            raise ValueError(f"these rates are not positive: {text[:200]!r}")
        return found

    def line(self) -> str:
        """Return the rates as text."""
        return json.dumps(asdict(self))


def cached(hidden: int, inner: int) -> Rates | None:
    """Return the cached rates of this machine, or None."""
    try:
        return Rates.parse(_cache_file(hidden, inner).read_text())
    except (OSError, ValueError):
        return None


def rates(hidden: int, inner: int) -> Rates:
    """Return the rates of this machine for a model with such an MLP, measuring and caching them if necessary."""
    if known := cached(hidden, inner):
        return known
    found = measure(hidden, inner)
    file = _cache_file(hidden, inner)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(found.line())
        partial.rename(file)
    except OSError as error:  # without a cache, probing is only slower
        print(
            f"asyncrl.extensions.cpu.probe: cannot save the measured rates in {file.parent}: {error}", file=sys.stderr
        )
    return found


def measure(hidden: int, inner: int) -> Rates:
    """Measure the rates. This takes about 0.5 s, besides the import of torch."""
    import torch

    torch.set_num_threads(1)
    hidden, inner = shortened(hidden, inner)
    train: dict[str, float] = {}
    generate: dict[str, float] = {}

    def product(dtype: str, rows: int, *, gradients: bool) -> Callable[[], None]:
        shapes = ((rows, hidden), (inner, hidden), (rows, inner))
        x, weight, gradient = (torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes)

        def multiply() -> None:
            x @ weight.t()
            if gradients:
                gradient @ weight
                gradient.t() @ x

        return multiply

    for dtype in reversed(DTYPES):  # float32 first, because it is slow on no CPU
        for found, rows, gradients in ((train, TRAIN_ROWS, True), (generate, GENERATE_ROWS, False)):
            flops = (3 if gradients else 1) * 2 * rows * hidden * inner
            limit = HOPELESS * flops / max(found.values()) if found else float("inf")
            found[dtype] = flops / _seconds(product(dtype, rows, gradients=gradients), limit)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    two = _two_over_one(product("float32", TRAIN_ROWS, gradients=False)) if cores > 1 else 1.0
    return Rates(socket.gethostname(), cpu_name(), train, generate, cores, two)


def _seconds(work: Callable[[], None], limit: float) -> float:
    """Return the minimum CPU time of REPEATS calls after a warm-up. A call that exceeds `limit` is not repeated."""
    found: list[float] = []
    for _ in range(1 + REPEATS):
        began = time.process_time()  # excludes the time of other processes
        work()
        found.append(time.process_time() - began)
        if len(found) > 1 and found[-1] > limit:
            break
    return min(found[1:])


def _two_over_one(work: Callable[[], None]) -> float:
    """Return the throughput of this process and a fork of it together, relative to this process alone: from 1 to 2.

    Throughput is measured per second of CPU time, so that waiting for a busy core does not look like a shared unit.
    """

    def rate() -> float:
        count, began, end = 0, time.process_time(), time.perf_counter() + WINDOW
        while time.perf_counter() < end or count == 0:
            work()
            count += 1
        return count / (time.process_time() - began)

    alone = rate()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, repr(rate()).encode())
        os._exit(0)
    mine = rate()
    os.waitpid(child, 0)
    theirs = float(os.read(reading, 64) or b"0")
    os.close(reading)
    os.close(writing)
    return min(2.0, max(1.0, (mine + theirs) / alone))


def shortened(hidden: int, inner: int) -> tuple[int, int]:
    """Return the shape of the weight that is measured: the model's own, unless it has more than LARGEST elements."""
    factor = min(1.0, (LARGEST / (hidden * inner)) ** 0.5)
    return max(1, round(hidden * factor)), max(1, round(inner * factor))


def cpu_name() -> str:
    """Return the CPU model as the kernel names it."""
    return _cpu_field("model name") or platform.processor() or platform.machine()


def _cpu_field(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _cache_file(hidden: int, inner: int) -> Path:
    """Return the cache file for this machine, torch version and shape.

    Its name also depends on the environment variables that hide CPU instructions from torch.
    """
    hidden_by = [os.environ.get(name, "") for name in SWITCHES]
    facts = [socket.gethostname(), cpu_name(), _cpu_field("flags"), version("torch"), *shortened(hidden, inner)]
    digest = hashlib.sha256(json.dumps([*facts, *hidden_by]).encode()).hexdigest()[:16]
    return cache_dir() / "rates" / f"{digest}.json"


def ask(wanted: Sequence[tuple[str, str]], everywhere: Everywhere) -> dict[tuple[str, str], Rates]:
    """Return the rates for each shape of a model's MLP, HIDDENxINNER, on each machine. Raises LaunchError if a
    measurement is missing."""
    shapes = list(dict.fromkeys(shape for shape, _ in wanted))
    here = {(shape, ""): rates for shape in shapes if (rates := cached(*_sides(shape)))}
    if here.keys() >= {*wanted}:
        return here
    program = [sys.executable, "-m", __name__, *shapes]
    outputs = everywhere(program, PROBE_SECONDS, list(dict.fromkeys(machine for _, machine in wanted)))
    found = {(shape, machine): rates for output in outputs for shape, machine, rates in _parsed(output)}
    if missing := [machine or "this machine" for shape, machine in wanted if (shape, machine) not in found]:
        said = "\n".join(output[-1000:] for output in outputs)
        raise LaunchError(
            f"the speed of {missing} could not be measured within {PROBE_SECONDS:.0f} s: set trainer.dtype, "
            f"engine.dtype, teacher.dtype and judge.dtype, so that no measurement is needed. The probe printed:\n{said}"
        )
    return found


def _sides(shape: str) -> tuple[int, int]:
    hidden, _, inner = shape.partition("x")
    return int(hidden), int(inner)


def _parsed(output: str) -> Iterator[tuple[str, str, Rates]]:
    """Yield shape, machine and rates from each line of the probe; lines of other programs are ignored."""
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            shape, machine, rates = text.split(" ", 2)
            yield shape, machine, Rates.parse(rates)


def main(shapes: list[str]) -> int:
    """Print a line for each shape: the shape, the machine's name if the run has several, and the rates."""
    for shape in shapes:
        found = rates(*_sides(shape))
        sys.stdout.write(f"{MARK}{shape} {os.environ.get('ASYNCRL_NODE', '')} {found.line()}\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
