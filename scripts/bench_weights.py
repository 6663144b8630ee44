"""Benchmark of publishing weights by transport, staging and bucket size, compared with memcpy and a raw broadcast.

    python scripts/bench_weights.py [--quick] [--repeats N] [OVERRIDE ...]

One real SGLang engine serves SmolLM2-135M (--quick: the tiny model). The weights come from Megatron at TP=1 through
the resharder, and every transport then publishes them. Ratios compare measurements of this run: memcpy copies the same
bytes between memory regions touched before (best of five); the raw broadcast sends the same buckets over gloo to a
process that drops them. The times of a transport are medians. The last line is JSON:

    export_over_memcpy          memcpy's seconds / those of gathering, converting and flattening into buckets
    tensor_over_memcpy          memcpy's seconds / those of a publish over shared memory, from pause to continue,
                                including filling the buckets
    distributed_over_broadcast  raw broadcast's seconds / those of sending all buckets by `distributed`
    bucketed_over_per_tensor    seconds of sending tensors one by one / in buckets (tensor transport)
    peak_extra_buckets          peak extra memory of staging=stream in a publish, in buckets
    pause_ms                    time for which engines are paused, with staging=full over shared memory
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl.platforms import here  # noqa: E402

here().prepare_trainer()  # before anything imports megatron.core

import httpx  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from asyncrl.config import Config  # noqa: E402
from asyncrl.network.ports import free_port  # noqa: E402
from asyncrl.trainer import model as megatron  # noqa: E402
from asyncrl.trainer.parallel import initialize  # noqa: E402
from asyncrl.weights.bucket import fill, nbytes, plan_buckets  # noqa: E402
from asyncrl.weights.distributed import group_beside_the_default  # noqa: E402
from asyncrl.weights.layouts import dims_of  # noqa: E402
from asyncrl.weights.loading import load  # noqa: E402
from asyncrl.weights.publish import Publisher  # noqa: E402
from asyncrl.weights.reshard import Resharder  # noqa: E402
from scripts import machine  # noqa: E402
from tests.integration.fleet import LOADER, OF_EXTENSIONS, Engines, engines  # noqa: E402
from tests.integration.publisher import make  # noqa: E402

MiB = 1 << 20
STREAM_MB = 64
"""Bucket size for staging=stream in MiB, because SmolLM2 would fit into one bucket of the default size."""
SINK = """
import sys, torch, torch.distributed as dist
port, sizes, repeats = int(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")], int(sys.argv[3])
from asyncrl.weights.distributed import group_beside_the_default
group = group_beside_the_default("gloo", f"tcp://127.0.0.1:{port}", 2, "sink", 60.0, rank=1)
memory = [torch.ones(size, dtype=torch.uint8) for size in sizes]
for _ in range(repeats):
    for flat in memory:
        dist.broadcast(flat, group=group, group_src=0)
dist.destroy_process_group(group)
"""


def main() -> None:
    """Measure, and print tables and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny model, two repeats")
    parser.add_argument("--repeats", type=int, default=5, help="publishes of each kind (default 5)")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)  # one rank of a layout, under torchrun
    parser.add_argument("overrides", nargs="*", help="further settings, such as trainer.dtype=float32")
    arguments = parser.parse_args()
    if arguments.rank:
        export_on_this_rank(*arguments.rank)
        return
    this = machine.report()
    experiment, repeats = ("tiny", 2) if arguments.quick else ("count_bits", arguments.repeats)
    figures: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        engines(Path(folder), *LOADER, *arguments.overrides, experiment=experiment) as fleet,
    ):
        bench = Bench(fleet, Path(folder), repeats)
        figures |= bench.export()
        bench.layouts()
        figures |= bench.transports()
        figures |= bench.sweep()
    print(json.dumps({**{name: round(value, 4) for name, value in figures.items()}, "machine": this}))


class Bench:
    """Measurements on one engine and Megatron's weights at TP=1."""

    def __init__(self, fleet: Engines, folder: Path, repeats: int) -> None:
        self.fleet, self.folder, self.repeats = fleet, folder, repeats
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
            os.environ[name] = value
        os.environ["MASTER_PORT"] = str(free_port("127.0.0.1"))
        self.weights = resharder(fleet.config, fleet.addresses.model)
        self.described = list(self.weights.described())
        self.bytes = sum(shape.numel() * dtype.itemsize for _, dtype, shape in self.described)
        self.memcpy = self._memcpy()
        self.console = Console()
        self.version = 0

    def _memcpy(self) -> float:
        """Return the best time of five copies of as many bytes as the weights have, between memory regions touched
        before."""
        source, target = (torch.ones(self.bytes, dtype=torch.uint8) for _ in range(2))
        return min(timed(lambda: target.copy_(source)) for _ in range(5))

    # -- what the trainer does alone -----------------------------------------------------------------------

    def export(self) -> dict[str, float]:
        """Measure iterating over the stream, and copying it into buckets."""
        converting, whole = export_seconds(self.weights, self.bucket_mb)
        table = Table("", "ms", "GB/s", title=f"{self.bytes / 1e6:.0f} MB, {len(self.described)} tensors, TP=1")
        for name, seconds in (
            ("memcpy", self.memcpy),
            ("gather + convert", converting),
            ("gather + convert + flatten", whole),
        ):
            table.add_row(name, f"{seconds * 1e3:.1f}", f"{self.bytes / seconds / 1e9:.2f}")
        self.console.print(table)
        return {"export_over_memcpy": self.memcpy / whole}

    def layouts(self) -> None:
        """Measure the same in other layouts with one process per rank. Print bytes and seconds of the first stage."""
        table = Table("", "MB", "gather + convert ms", "+ flatten ms", "GB/s", title="export by layout")
        for name, field, ranks in (
            ("TP 2", "tensor_parallel", 2),
            ("TP 3", "tensor_parallel", 3),
            ("PP 2", "pipeline_parallel", 2),
        ):
            model, config = self.fleet.addresses.model, self.folder / f"{field}-{ranks}.json"
            trainer = self.fleet.config.trainer.model_copy(update={field: ranks})
            heads = json.loads((model / "config.json").read_text())["num_key_value_heads"]
            if field == "tensor_parallel" and heads % ranks:
                continue
            config.write_text(self.fleet.config.model_copy(update={"trainer": trainer}).model_dump_json())
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [*torchrun, __file__, "--rank", str(config), str(model)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
            if done.returncode != 0:
                sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
            size, converting, whole = json.loads(done.stdout.splitlines()[-1])
            table.add_row(
                name, f"{size / 1e6:.0f}", f"{converting * 1e3:.0f}", f"{whole * 1e3:.0f}", f"{size / whole / 1e9:.2f}"
            )
        self.console.print(table)

    # -- publishing ----------------------------------------------------------------------------------------

    def transports(self) -> dict[str, float]:
        """Measure every transport and staging with a request in flight."""
        columns = ("", "fill", "pause", "seen", "verify", "publish", "GB/s", "extra MB")
        title = (
            f"publish, milliseconds (median of {self.repeats}); buckets of {self.bucket_mb} MiB, streams of {STREAM_MB}"
        )
        table = Table(*columns, title=title)
        found: dict[str, dict[str, float]] = {}
        for transport, staging in (
            ("tensor", "full"),
            ("tensor", "stream"),
            ("distributed", "full"),
            ("distributed", "stream"),
            *((name, "stream") for name in OF_EXTENSIONS),
        ):
            name = f"{transport} {staging}"
            size = STREAM_MB if staging == "stream" else self.bucket_mb
            found[name] = f = self.publishes(transport=transport, staging=staging, bucket_mb=size)
            cells = [f"{f[key] * 1e3:.0f}" for key in ("fill", "pause", "seen", "verify", "publish")]
            table.add_row(name, *cells, f"{self.bytes / f['publish'] / 1e9:.2f}", f"{f['extra'] / 1e6:.0f}")
        self.console.print(table)
        raw = self.raw_broadcast()
        sent = found["distributed full"]["best send"]
        self.console.print(
            f"memcpy {self.memcpy * 1e3:.0f} ms, raw gloo broadcast {raw * 1e3:.0f} ms, "
            f"sending by distributed {sent * 1e3:.0f} ms"
        )
        return {
            "tensor_over_memcpy": self.memcpy / found["tensor full"]["best"],
            "distributed_over_broadcast": raw / sent,
            "peak_extra_buckets": found["tensor stream"]["extra"] / (STREAM_MB * MiB),
            "pause_ms": found["tensor full"]["pause"] * 1e3,
        }

    @property
    def bucket_mb(self) -> int:
        """Return the configured bucket size."""
        return self.fleet.config.weights.bucket_mb

    def publishes(self, *, in_flight: bool = True, **settings: Any) -> dict[str, float]:
        """Return medians over several publishes, after a first one that connects and verifies.

        Also return the best times, which the ratios compare on both sides, and the peak of the extra memory.
        """
        weights = self.fleet.config.weights.model_copy(update={"timeout": 120.0, **settings})
        config = self.fleet.config.model_copy(update={"weights": weights})
        before = resident()
        reset_peak()
        publisher = make(config, self.fleet.addresses, self.weights, self.folder / "weights")  # type: ignore[arg-type]
        sends: list[float] = []
        count_sends(publisher, sends)
        self.version += 1
        verified = publisher.publish(self.version)["verify"]
        results = []
        for _ in range(self.repeats):
            self.version += 1
            sends.clear()
            figures = self._published(publisher)
            sent = sum(sends)
            if in_flight:  # decoding takes a core from the trainer, so the pause is measured separately
                self.version += 1
                with Stream(self.fleet) as stream:
                    self._published(publisher)
                figures["seen"] = stream.pause
            results.append({"seen": 0.0, **figures, "send": sent})
        extra = peak() - before
        publisher.fleet.close()
        medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
        best = {"best": min(r["publish"] for r in results), "best send": min(r["send"] for r in results)}
        return {**medians, **best, "extra": float(extra), "verify": verified}

    def _published(self, publisher: Publisher) -> dict[str, float]:
        started = time.monotonic()
        figures = publisher.publish(self.version)
        return {**figures, "publish": time.monotonic() - started}

    def raw_broadcast(self) -> float:
        """Return the seconds to broadcast the same buckets to one process that drops them."""
        sizes = [nbytes(bucket) for bucket in plan_buckets(self.described, self.bucket_mb * MiB)]
        port, repeats = free_port("127.0.0.1"), self.repeats + 1
        sink = subprocess.Popen(
            [sys.executable, "-c", SINK, str(port), ",".join(map(str, sizes)), str(repeats)], cwd=ROOT
        )
        group = group_beside_the_default("gloo", f"tcp://127.0.0.1:{port}", 2, "sink", 60.0)
        memory = [torch.ones(size, dtype=torch.uint8) for size in sizes]

        def send() -> None:
            for flat in memory:
                dist.broadcast(flat, src=0, group=group)

        times = [timed(send) for _ in range(repeats)]
        dist.destroy_process_group(group)
        sink.wait(30)
        return min(times[1:])

    def sweep(self) -> dict[str, float]:
        """Measure several bucket sizes, and sending tensors one by one."""
        table = Table("bucket", "send ms", "pause ms", title="bucket size (tensor, full, nothing in flight)")
        sends: dict[int, float] = {}
        for size in (0, 1, 4, 16, 64, 256, 512):
            found = self.publishes(in_flight=False, transport="tensor", staging="full", bucket_mb=size)
            sends[size] = found["send"]
            table.add_row(
                f"{size} MiB" if size else "1 tensor", f"{found['send'] * 1e3:.0f}", f"{found['pause'] * 1e3:.0f}"
            )
        self.console.print(table)
        return {"bucketed_over_per_tensor": sends[0] / sends[512]}


class Stream:
    """Request in flight that measures how much the longest interval between two of its chunks exceeds the usual one."""

    def __init__(self, fleet: Engines) -> None:
        self._url, self._http = fleet.addresses.engines[0], fleet.addresses.access.http
        self._stop = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._gaps: list[float] = []

    @property
    def pause(self) -> float:
        """Return the pause that the request saw.

        Chunks have engine.stream_interval tokens and arrive at a steady pace.
        """
        return max(self._gaps) - statistics.median(self._gaps)

    def __enter__(self) -> Stream:
        self._thread.start()
        assert self._started.wait(60), "the request in flight got no token within 60 s"
        time.sleep(1.0)  # collect some regular intervals
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.5)
        self._stop.set()
        self._thread.join(60)

    def _read(self) -> None:
        while not self._stop.is_set():
            for gap in self._pieces():
                self._gaps.append(gap)
                self._started.set()
                if self._stop.is_set():
                    return

    def _pieces(self) -> Iterator[float]:
        """Yield the seconds between consecutive chunks of one answer."""
        body = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 50, "ignore_eos": True},
            "stream": True,
        }
        previous = None
        with httpx.stream("POST", f"{self._url}/generate", json=body, timeout=60.0, **self._http) as response:
            for _ in response.iter_raw():
                now = time.monotonic()
                if previous is not None:
                    yield now - previous
                previous = now


def resharder(config: Config, model: Path) -> Resharder:
    """Return this rank's part of the loaded model."""
    parallel = initialize(config.trainer, gpu=False, seed=0, timeout=120.0)
    hf = megatron.read_hf_config(model)
    built = megatron.build_model(hf, megatron.transformer_config(hf, config.trainer))
    weights = Resharder([built.to(getattr(torch, config.trainer.dtype))], hf["architectures"][0], dims_of(hf), parallel)
    load(weights, model)
    return weights


def export_seconds(weights: Resharder, bucket_mb: int) -> tuple[float, float]:
    """Return the best of five times for iterating over the stream, and for copying it into buckets. Collective."""
    plan = plan_buckets(weights.described(), bucket_mb * MiB)
    memory = [torch.ones(nbytes(bucket), dtype=torch.uint8) for bucket in plan]

    def walk() -> None:
        for _ in weights.stream():
            pass
        dist.barrier()

    def flatten() -> None:
        stream = weights.stream()
        for flat, bucket in zip(memory, plan, strict=True):
            fill(flat, bucket, stream)
        for _ in stream:
            pass
        dist.barrier()

    return min(timed(walk) for _ in range(5)), min(timed(flatten) for _ in range(5))


def export_on_this_rank(config: str, model: str) -> None:
    """Print on rank 0 the bytes of this stage, and the seconds of gathering and converting, without and with
    flattening."""
    settings = Config.model_validate_json(Path(config).read_text())
    weights = resharder(settings, Path(model))
    size = sum(shape.numel() * dtype.itemsize for _, dtype, shape in weights.described())
    seconds = export_seconds(weights, settings.weights.bucket_mb)
    if dist.get_rank() == 0:
        print(json.dumps([size, *seconds]))
    dist.destroy_process_group()


def count_sends(publisher: Publisher, sends: list[float]) -> None:
    """Record the seconds of sending each bucket in `sends`."""
    transport = publisher._transport
    send = transport.send

    def counted(*arguments: Any) -> None:
        sends.append(timed(lambda: send(*arguments)))

    transport.send = counted  # type: ignore[method-assign, assignment]


def timed(step: Callable[[], Any]) -> float:
    """Return the seconds that a step takes."""
    started = time.monotonic()
    step()
    return time.monotonic() - started


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return _status("VmRSS")


def peak() -> int:
    """Return the peak of the resident memory in bytes since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Reset the peak of the resident memory (on Linux by writing 5 to clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
