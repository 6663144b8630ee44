"""Benchmark of the trainer's step with padding, packing and shared prefixes, and of plain transformers with padding.

    python scripts/bench_train.py [--quick] [--dtype float32|bfloat16] [--large-dtype float32|bfloat16]

The model is a random Llama with SmolLM2's proportions, but smaller; it runs in one thread. Every step is complete:
forward, backward, gradient norm, clipping, AdamW. Each case runs in its own process, which also reports its peak
memory. Rates are trained tokens and samples per CPU-second. Ratios compare measurements of this run. The last line is
JSON:

    packed_over_padded_longtail        rate of our step with packing / with padding, log-normal lengths, groups of 8
    shared_prefix_over_packed_128_4    rate with shared prefixes / packing: prompts of 128, answers of 4, groups of 8
    shared_prefix_over_tokens_64_64    the same ratio at 64/64, over the ratio of tokens that go through the model
    shared_prefix_over_tokens_512_512  the same at 512/512
    packed_over_padded_worst           the smallest ratio of packing to padding over all cases
    ours_over_hf                       rate of our step / transformers', equal padded rows; geometric mean of all cases
    per_parameter_over_adamw           CPU-seconds of all work per parameter in a step / those of one fused AdamW pass
    partition_s                        CPU-seconds to share 100,000 samples out over 1,024 ranks
    partition_imbalance                largest load / mean - 1 in that partition
    partition_imbalance_64_8           the same for 64 samples over 8 ranks, mean of 20 draws
    karmarkar_karp_imbalance_64_8      the same by the largest differencing method
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import heapq
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from asyncrl.algo.balance import Costs, measure, partition  # noqa: E402
from asyncrl.algo.samples import Sample  # noqa: E402
from asyncrl.platforms import without_gpu  # noqa: E402
from scripts import machine  # noqa: E402

BUDGET = 8192
"""Tokens of a micro-batch, including padding."""
WAYS = ("transformers", "padded", "packed", "shared")


@dataclass(frozen=True)
class Shape:
    """Shape of the groups of one step. Lengths are fixed, or medians of log-normal distributions."""

    name: str
    prompt: int
    answer: int
    samples: int
    spread: float = 0.0
    longest: int = 512


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("128/4", 128, 4, 64),
        Shape("64/64", 64, 64, 32),
        Shape("512/512", 512, 512, 16),
        Shape("long-tailed", 48, 48, 32, spread=1.0),
    )
}


def groups_of(shape: Shape, siblings: int, vocab: int) -> list[list[Sample]]:
    """Return groups of random tokens. Siblings share their prompt, and other tokens only by chance."""
    rng = random.Random(0)

    def length(median: int) -> int:
        return (
            max(1, min(shape.longest, round(median * rng.lognormvariate(0, shape.spread)))) if shape.spread else median
        )

    groups: list[list[Sample]] = []
    row = 0
    for _ in range(shape.samples // siblings):
        prompt = [rng.randrange(vocab) for _ in range(length(shape.prompt))]
        groups.append([])
        for _ in range(siblings):
            count = length(shape.answer)
            answer = [rng.randrange(vocab) for _ in range(count)]
            groups[-1].append(Sample(prompt, answer, [True] * count, 0, row))
            row += count + 1  # a spare row for `lengthened`
    return groups


# --- one case, in a process of its own ----------------------------------------------------------------------


def case(folder: Path, way: str, shape: Shape, siblings: int, seconds: float) -> dict[str, float]:
    """Return the minimum CPU-seconds of a step, the number of trained tokens and samples, and the peak memory."""
    hf = json.loads((folder / "config.json").read_text())
    groups = groups_of(shape, siblings, hf["vocab_size"])
    runner: Any = transformers_step if way == "transformers" else our_step
    step, tokens = runner(folder, groups, way)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    step()
    times: list[float] = []
    while sum(times) < seconds and len(times) < 9:
        times.append(cpu_seconds(step))
    samples = [sample for group in groups for sample in group]
    return {
        "step": min(times),
        "tokens": tokens,
        "trained": sum(sample.num_trained for sample in samples),
        "samples": len(samples),
        "memory": peak_memory() - before,
    }


def cpu_seconds(action: Callable[[], object]) -> float:
    """Return the CPU-seconds that an action takes in this process."""
    started = time.process_time()
    action()
    return time.process_time() - started


def peak_memory() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def padded(groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
    """Return micro-batches in order that stay within the budget when all samples are padded to the longest."""
    batches: list[list[Sample]] = [[]]
    for sample in (sample for group in groups for sample in group):
        longest = max(s.num_inputs for s in [*batches[-1], sample])
        if batches[-1] and longest * (len(batches[-1]) + 1) > BUDGET:
            batches.append([])
        batches[-1].append(sample)
    return batches


class Model:
    """Megatron model with asyncrl's packs, on one rank."""

    def __init__(self, folder: Path, dtype: str, *settings: str) -> None:
        from asyncrl.platforms import here

        here().prepare_trainer()
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf

        from asyncrl import CONF, lookup
        from asyncrl.config import load
        from asyncrl.network.ports import free_port
        from asyncrl.trainer.encoder import encoder_of
        from asyncrl.trainer.network import Network
        from asyncrl.trainer.optimizer import NetworkOptimizer
        from asyncrl.trainer.parallel import initialize

        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(free_port("127.0.0.1"))
        with initialize_config_dir(str(CONF), version_base=None):
            overrides = ["experiment=tiny", f"trainer.dtype={dtype}", "trainer.optimizer.clip_grad=0.001", *settings]
            raw: Any = OmegaConf.to_container(compose("train", overrides), resolve=True)
        config = load(raw)
        self.parallel = initialize(config.trainer, gpu=False, seed=0, timeout=60.0)
        encoder = encoder_of(config, folder, self.parallel)
        changes = (one.transformation(config) for one in lookup.active(config).values())
        transformation = next((found for found in changes if found), None)
        self.network = Network(config.trainer, folder, self.parallel, encoder=encoder, transformation=transformation)
        self.optimizer = NetworkOptimizer(config.trainer, self.network, 1000)

    def step(self, packs: list[Any], weights: Any) -> None:
        """Compute the gradient of the weighted sum of log-probabilities, and update the weights."""

        def visit(head: Any, pack: Any) -> Any:
            logprobs, _ = head.score(pack, 1.0)
            return -(weights[pack.table_rows] * logprobs).sum()

        self.optimizer.zero_grad()
        self.network.train(packs, visit)
        self.optimizer.step()


def our_step(folder: Path, groups: list[list[Sample]], way: str) -> tuple[Callable[[], None], int]:
    """Return a step of the trainer, and the number of tokens that go through the model."""
    dtype = json.loads((folder / "config.json").read_text())["dtype"]
    model = Model(folder, dtype)
    import torch

    from asyncrl.algo.balance import assign_micro_batches
    from asyncrl.algo.pack import pack
    from asyncrl.trainer.operations import costs_of

    samples = [sample for group in groups for sample in group]
    weights = torch.zeros(samples[-1].first_row + samples[-1].num_trained + 1)
    for sample in samples:
        weights[sample.first_row : sample.first_row + sample.num_trained] = 1.0
    weights /= weights.sum()

    def packs() -> list[Any]:
        if way == "padded":
            return [pack([lengthened(batch)], share=False) for batch in padded(groups)]
        share = way == "shared"
        batches = assign_micro_batches(groups, 1, BUDGET, costs_of(model.network.hf), share=share)[0]
        return [pack(batch, share=share) for batch in batches]

    return lambda: model.step(packs(), weights), sum(p.num_tokens for p in packs())


def lengthened(batch: list[Sample]) -> list[Sample]:
    """Extend all samples to the length of the longest.

    The padding predicts one token of weight 0, or it would be skipped.
    """
    longest = max(s.num_inputs for s in batch)
    found = []
    for s in batch:
        more = longest - s.num_inputs
        mask = s.mask + [False] * (more - 1) + [True] * (more > 0)
        found.append(Sample(s.prompt_ids, s.token_ids + [0] * more, mask, s.number, s.first_row))
    return found


def transformers_step(folder: Path, groups: list[list[Sample]], _: str) -> tuple[Callable[[], None], int]:
    """Return the same step with transformers' model and torch's AdamW.

    Only rows of answers become logits, as in asyncrl.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    batches = padded(groups)
    total = sum(sample.num_trained for group in groups for sample in group)

    def step() -> None:
        optimizer.zero_grad()
        for batch in batches:
            longest = max(s.num_inputs for s in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            rows, targets = [], []
            for i, s in enumerate(batch):
                ids[i, : s.num_inputs] = torch.tensor((s.prompt_ids + s.token_ids)[: s.num_inputs])
                rows += [i * longest + len(s.prompt_ids) - 1 + t for t in range(len(s.token_ids))]
                targets += s.token_ids
            hidden = model.model(
                input_ids=ids, use_cache=False
            ).last_hidden_state  # padding comes last, so the causal mask is enough
            logits = model.lm_head(hidden.flatten(0, 1)[torch.tensor(rows)])
            loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(targets), reduction="sum") / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)
        optimizer.step()

    return step, sum(len(batch) * max(s.num_inputs for s in batch) for batch in batches)


def per_parameter(folder: Path) -> dict[str, float]:
    """Measure a step of one token with float32 masters, without forward and backward of the layers, and one AdamW
    pass."""
    import torch

    model = Model(folder, json.loads((folder / "config.json").read_text())["dtype"])
    from asyncrl.algo.pack import pack
    from asyncrl.trainer.network import forward, head_weight

    packs = [pack([[Sample([1], [2], [True], 0, 0)]])]
    wrapped, weights = model.network.wrapped[0], torch.ones(1)
    inner = list(model.network.parameters())

    def plain() -> None:
        """Run only forward and backward, and drop the gradients."""
        chunk = getattr(wrapped.module, "module", wrapped.module)  # with bfloat16 Megatron adds another wrapper
        hidden = forward(wrapped.module, chunk, packs[0])[0]
        torch.autograd.grad((hidden @ head_weight(chunk).t()).float().logsumexp(-1).sum(), inner)

    fresh = [torch.zeros(p.shape) for p in inner]
    for p in fresh:
        p.grad = torch.full(p.shape, 1e-3)
    adamw = torch.optim.AdamW(fresh, lr=1e-5, fused=True)
    found = {
        name: min(cpu_seconds(action) for _ in range(9))
        for name, action in (
            ("step", lambda: model.step(packs, weights)),
            ("plain", plain),
            ("adamw", adamw.step),
        )
    }
    return {**found, "parameters": float(sum(p.numel() for p in inner))}


# --- all of them --------------------------------------------------------------------------------------------


class Bench:
    """Runner of all cases, which keeps their results."""

    script = __file__

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.found: dict[tuple[str, int, str], dict[str, float]] = {}

    def apart(self, model: str, what: Sequence[object], python: str = sys.executable) -> dict[str, float]:
        """Run a case in its own process with the environment of a trainer rank, by another interpreter if need be."""
        command = [python, self.script, "--case", str(self.folder / model), *map(str, what)]
        environment = {**os.environ, **without_gpu().environment, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-3000:]}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    def measure(self, shape: str, siblings: int, ways: Sequence[str]) -> None:
        """Measure one case in several ways."""
        for way in ways:
            self.found[shape, siblings, way] = self.apart("model", (way, shape, siblings, self.seconds))

    def faster(self, shape: str, siblings: int, way: str, other: str) -> float:
        """Return the rate of one way over that of another."""
        return self.found[shape, siblings, other]["step"] / self.found[shape, siblings, way]["step"]

    def fewer(self, shape: str, siblings: int, way: str, other: str) -> float:
        """Return the ratio of the tokens that go through the model."""
        return self.found[shape, siblings, other]["tokens"] / self.found[shape, siblings, way]["tokens"]

    def table(self) -> Table:
        """Return a table of rates and memory."""
        columns = ("prompt/answer", "group", "way", "tokens", "trained tokens/CPU-s", "samples/CPU-s", "extra MB")
        table = Table(*columns, title="one step, one thread")
        for (shape, siblings, way), f in self.found.items():
            rates = (f"{f['trained'] / f['step']:.0f}", f"{f['samples'] / f['step']:.1f}")
            table.add_row(shape, str(siblings), way, f"{f['tokens']:.0f}", *rates, f"{f['memory'] / 1e6:.0f}")
        return table


def write_model(folder: Path, *, width: int, layers: int, vocab: int, dtype: Literal["float32", "bfloat16"]) -> None:
    """Write a Llama with SmolLM2's proportions, except for the vocabulary, whose cost does not depend on shared
    prefixes."""
    from asyncrl.models.tiny import write_random_model

    sizes: dict[str, Any] = {"heads": width // 64, "kv_heads": width // 192, "intermediate": width * 8 // 3}
    shape: dict[str, Any] = {"vocab": vocab, "hidden": width, "layers": layers, "tied": True, **sizes}
    write_random_model(folder, "llama", seed=0, dtype=dtype, max_positions=2048, **shape)


def partition_figures() -> dict[str, float]:
    """Measure the partition, and compare it with the largest differencing method where that is feasible."""
    rng = random.Random(0)

    def costs(count: int) -> list[int]:
        return [int(1e6 * rng.lognormvariate(0, 1)) for _ in range(count)]

    def imbalance(largest: int, drawn: list[int], ranks: int) -> float:
        return largest * ranks / sum(drawn) - 1

    def ours(drawn: list[int], ranks: int) -> int:
        return max(sum(drawn[i] for i in share) for share in partition(drawn, ranks))

    answers = [[Sample([0] * 64, [1] * n, [True] * n, 0, 0)] for n in (max(1, c // 10**4) for c in costs(100_000))]
    started = time.process_time()
    drawn = [measure(group, Costs(20, 400_000)).cost for group in answers]
    shares = partition(drawn, 1024)
    seconds = time.process_time() - started
    largest = max(sum(drawn[i] for i in share) for share in shares)
    small = [costs(64) for _ in range(20)]
    return {
        "partition_s": seconds,
        "partition_imbalance": imbalance(largest, drawn, 1024),
        "partition_imbalance_64_8": sum(imbalance(ours(d, 8), d, 8) for d in small) / 20,
        "karmarkar_karp_imbalance_64_8": sum(imbalance(karmarkar_karp(d, 8), d, 8) for d in small) / 20,
    }


def karmarkar_karp(costs: list[int], ranks: int) -> int:
    """Return the largest load by the largest differencing method (Karmarkar and Karp 1982)."""
    heap = [(-cost, i, [cost] + [0] * (ranks - 1)) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    base = 0
    for number in range(len(costs), 2 * len(costs) - 1):
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        both = sorted((a + b for a, b in zip(one, reversed(other), strict=True)), reverse=True)
        base += both[-1]
        heapq.heappush(heap, (both[-1] - both[0], number, [load - both[-1] for load in both]))
    return heap[0][2][0] + base


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, groups of 8 only")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    large = "of the larger model, whose work per parameter is measured (default bfloat16)"
    parser.add_argument("--large-dtype", choices=("float32", "bfloat16"), default="bfloat16", help=large)
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)  # one case, in its own process
    arguments = parser.parse_args()
    if arguments.case:
        folder, way, *rest = arguments.case
        if way == "per_parameter":
            print(json.dumps(per_parameter(Path(folder))))
        else:
            shape, siblings, seconds = rest
            print(json.dumps(case(Path(folder), way, SHAPES[shape], int(siblings), float(seconds))))
        return
    this = machine.report()
    with tempfile.TemporaryDirectory() as folder:
        width = 192 if arguments.quick else 384
        write_model(Path(folder) / "model", width=width, layers=4, vocab=1024, dtype=arguments.dtype)
        write_model(Path(folder) / "large", width=576, layers=3 * width // 96, vocab=16384, dtype=arguments.large_dtype)
        bench = Bench(Path(folder), 0.5 if arguments.quick else 3.0)
        ways = WAYS if arguments.dtype == "float32" else WAYS[1:]  # plain transformers has no float32 masters
        for shape in SHAPES:
            for siblings in (8,) if arguments.quick else (8, 16):
                bench.measure(shape, siblings, ways)
        work = bench.apart("large", ("per_parameter",))
    Console().print(bench.table())
    print(f"per step and parameter, {work['parameters'] / 1e6:.1f} M: {json.dumps(work)}")
    cases = {(shape, siblings) for shape, siblings, _ in bench.found}
    figures = {
        "packed_over_padded_longtail": bench.faster("long-tailed", 8, "packed", "padded"),
        "shared_prefix_over_packed_128_4": bench.faster("128/4", 8, "shared", "packed"),
        **{
            f"shared_prefix_over_tokens_{n}_{n}": bench.faster(f"{n}/{n}", 8, "shared", "packed")
            / bench.fewer(f"{n}/{n}", 8, "shared", "packed")
            for n in (64, 512)
        },
        "packed_over_padded_worst": min(bench.faster(*one, "packed", "padded") for one in cases),
        "per_parameter_over_adamw": (work["step"] - work["plain"]) / work["adamw"],
        **partition_figures(),
    }
    if arguments.dtype == "float32":
        ratios = [bench.faster(*one, "padded", "transformers") for one in cases]
        figures["ours_over_hf"] = statistics.geometric_mean(ratios)
    print(json.dumps({**{name: round(value, 7) for name, value in figures.items()}, "machine": this}))


if __name__ == "__main__":
    main()
