"""Parts of scripts/bench_gpu.py, each a program of its own: python scripts/gpu_parts.py PART [--quick] [--rehearse].

    mfu SHAPE        a trainer's step on random weights, one rank on each GPU: model FLOPs over the card's peak
                     (--tokens: the length of a sample, which decides what attention costs)
    publish HOW      publishes to a real engine over ipc or nccl, against a copy on the device and over the link
    pause            tokens and pauses of running episodes while versions are published, by pause mode
    engine SETTING   publishes to engines of a setting, and their log-probabilities (scripts/gpu_engines.py)
    colocated        a run whose engines and trainers take turns on all GPUs
    shared           the same run with both at once on all GPUs, each with a share of the memory
    accuracy         the default run on all GPUs, side by side, with its accuracy before and after
    run [WHAT]       a run whose engines and trainers have GPUs of their own; with WHAT, a batch is trained during each
                     publish (overlap)

The last line is JSON. With --rehearse everything is tiny and runs on the CPU, over shared memory and gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl.platforms import here  # noqa: E402

here().prepare_trainer()  # before anything imports megatron.core

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.algo.pack import Pack  # noqa: E402
from asyncrl.algo.samples import Sample  # noqa: E402
from asyncrl.extensions.plan import memory  # noqa: E402
from asyncrl.extensions.plan.activations import Training  # noqa: E402
from asyncrl.extensions.plan.shapes import ParallelLayout, counted, shape_of  # noqa: E402
from asyncrl.extensions.plan.tensors import Weight, tensors  # noqa: E402
from asyncrl.models.tiny import write_random_model  # noqa: E402
from asyncrl.network.ports import free_port  # noqa: E402
from scripts.gpu_engines import BACKENDS, check  # noqa: E402
from scripts.sizes import MODELS, QWEN3  # noqa: E402
from tests.fakes import tiny_config  # noqa: E402

SMALL = {**QWEN3, "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        **SMALL,
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
    },
    "4b": {
        **SMALL,
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "intermediate_size": 9728,
    },
    "8b": MODELS["qwen3_8b"],
    "moe": MODELS["qwen3_30b_a3b"],
}
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 257,
}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FILLED = 0.8
"""Fraction of a GPU's memory that the planned bytes of a rank may take; it gets as many layers as fit."""
TOKENS, ROWS = 4096, 8192
"""Tokens of a sample, unless --tokens says otherwise, and rows of a micro-batch, which holds at least one sample."""
GiB = 1 << 30


# -- a trainer's step ------------------------------------------------------------------------------------------


def mfu(options: argparse.Namespace) -> dict[str, Any]:
    """Write a random model of the shape, and train it on every GPU."""
    tiny, gpus = options.rehearse, torch.cuda.device_count()
    ranks = 2 if tiny else max(1, gpus)
    hf = dict(SHAPES[options.what])
    whole = hf["num_hidden_layers"]
    if tiny:
        hf |= TINY | (TINY_EXPERTS if "num_experts" in hf else {})
    else:
        room = torch.cuda.get_device_properties(0).total_memory * FILLED
        hf["num_hidden_layers"] = fitting(hf, ranks, room, max(ROWS, *options.tokens))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "model", hf, "float32" if tiny else "bfloat16")
        flags = [f"--{name}" for name in ("rehearse", "quick") if getattr(options, name)]
        figures: dict[str, Any] = {"layers": hf["num_hidden_layers"], "of_layers": whole, "gpus": 0 if tiny else ranks}
        for tokens in options.tokens:
            figures[f"{tokens}_tokens"] = on_ranks(ranks, ["mfu-rank", folder, "--tokens", str(tokens), *flags])
            print(json.dumps(figures), flush=True)  # the next length may outlast the part's deadline
    return figures


def fitting(hf: dict[str, Any], ranks: int, room: float, rows: int) -> int:
    """Return the largest number of layers with which a rank of data parallelism fits, up to that of the model."""
    training = Training("bfloat16", tokens=rows, logit_rows=1024, publishes=False, fused_norms=True)
    for layers in range(hf["num_hidden_layers"], 1, -1):
        cut = {**hf, "num_hidden_layers": layers}
        parts = memory.trainer_rank(weights_of(cut), shape_of(cut), ParallelLayout(data=ranks), training)
        if sum(parts.values()) <= room:
            return layers
    return 1


def weights_of(hf: dict[str, Any]) -> list[Weight]:
    """Return the weights of a model, from its config alone."""
    return counted(tensors(hf), shape_of(hf))


def write(folder: Path, hf: dict[str, Any], dtype: Any) -> None:
    """Write a model of random weights."""
    experts = {name: hf[name] for name in (*TINY_EXPERTS, "norm_topk_prob", "head_dim") if name in hf}
    write_random_model(
        folder,
        "qwen3_moe" if "num_experts" in hf else "qwen3",
        vocab=hf["vocab_size"],
        hidden=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"],
        intermediate=hf["intermediate_size"],
        tied=bool(hf.get("tie_word_embeddings")),
        seed=0,
        dtype=dtype,
        max_positions=1 << 17,
        fields=experts,
    )


def on_ranks(ranks: int, arguments: list[str]) -> dict[str, Any]:
    """Run this program as so many ranks and return what rank 0 reports. The first rank that fails ends the others."""
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port("127.0.0.1")), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, __file__, *arguments]
    with tempfile.TemporaryFile("w+") as out:  # a pipe that nobody reads would block the rank
        started = [
            subprocess.Popen(
                command,
                env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=sys.stderr if rank else out,
            )
            for rank in range(ranks)
        ]
        try:
            while any(one.poll() is None for one in started) and not any(one.poll() for one in started):
                time.sleep(0.2)
        finally:
            for one in started:
                if one.poll() is None:
                    one.kill()
        out.seek(0)
        told = out.read()
    if any(one.wait() for one in started):
        sys.exit(f"{' '.join(command)}: ranks ended with {[one.returncode for one in started]}\n{told}")
    figures: dict[str, Any] = json.loads(told.splitlines()[-1])
    return figures


def mfu_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Time the steps of one rank. A step has as many tokens on each rank as two micro-batches."""
    from asyncrl.trainer.head import Head
    from asyncrl.trainer.meter import peak_rate
    from asyncrl.trainer.network import Network
    from asyncrl.trainer.operations import operations_of
    from asyncrl.trainer.optimizer import NetworkOptimizer
    from asyncrl.trainer.parallel import initialize

    tiny, ranks = options.rehearse, int(os.environ["WORLD_SIZE"])
    tokens, rows = (16, 64) if tiny else (options.tokens[0], max(ROWS, options.tokens[0]))
    dtype = "float32" if tiny else "bfloat16"
    settings = {"trainer.data_parallel": ranks, "trainer.dtype": dtype, "trainer.micro_batch_tokens": rows}
    trainer = tiny_config(**settings).trainer
    parallel = initialize(trainer, gpu=not tiny, seed=0, timeout=600.0)
    network = Network(trainer, Path(options.what) / "model", parallel)
    optimizer = NetworkOptimizer(trainer, network, 100)
    count = 2 * rows // tokens * ranks
    groups = samples(count, tokens, network.hf["vocab_size"])

    def visit(head: Head, pack: Pack) -> Tensor:
        return -head.score(pack, 1.0)[0].mean()

    def step() -> None:
        optimizer.zero_grad()
        network.train(network.packs(groups), visit)
        optimizer.step()

    seconds = timed(
        step, warm=1 if tiny else 2 if options.quick else 3, repeats=2 if tiny else 4 if options.quick else 10
    )
    operations = operations_of(network.hf)
    rate = sum(float(operations.of(pack)) for pack in network.packs(groups)) / seconds  # of this rank's replica
    peak = None if tiny else peak_rate(torch.cuda.get_device_name())
    torch.distributed.destroy_process_group()  # gloo's threads would abort the process at its end (pytorch#190489)
    return {
        "step_s": seconds,
        "tokens_per_s_per_gpu": count * tokens / seconds / ranks,
        "tflops_per_gpu": rate / 1e12,
        "mfu": rate / peak if peak else None,
        "memory_gb": None if tiny else torch.cuda.max_memory_allocated() / 1e9,
    }


def samples(count: int, tokens: int, vocab: int) -> list[list[Sample]]:
    """Return groups of one sample each, of which an eighth is the prompt."""
    draw = torch.Generator().manual_seed(0)
    prompt, made, row = tokens // 8, [], 0
    for _ in range(count):
        ids = torch.randint(vocab, (tokens,), generator=draw).tolist()
        made.append([Sample(ids[:prompt], ids[prompt:], [True] * (tokens - prompt), 0, row)])
        row += tokens - prompt
    return made


def timed(action: Callable[[], object], *, warm: int, repeats: int) -> float:
    """Return the median seconds of an action, after the device has finished."""
    seconds = []
    for number in range(warm + repeats):
        began = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number >= warm:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


# -- a publish -------------------------------------------------------------------------------------------------


def publish(options: argparse.Namespace) -> dict[str, Any]:
    """Publish versions to one engine: over IPC it shares the trainer's GPU, over NCCL it has the next one."""
    from tests.integration.fleet import engines
    from tests.integration.publisher import SeededWeights, make

    class OnDevice(SeededWeights):
        """The model's weights on the trainer's device, the same in every version."""

        def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
            yield from self._base.items()

        def move(self, device: str) -> None:
            self._base = {name: tensor.to(device) for name, tensor in self._base.items()}

    tiny, over_nccl = options.rehearse, options.what == "nccl"
    device = "cpu" if tiny else "cuda:0"
    gpus = 0 if tiny else 1 + over_nccl
    transport = "distributed" if over_nccl else "tensor"
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        dtype = model_of(home / "model", options)
        overrides = [f"model.path={home / 'model'}", f"engine.dtype={dtype}", f"weights.transport={transport}"]
        overrides += [f"trainer.device={'auto' if over_nccl or tiny else 'cpu'}"]  # `cpu`: the engine gets GPU 0
        overrides += [] if tiny else ["engine.memory_fraction=0.5"]
        with engines(home, *overrides, gpus=gpus) as fleet:
            source = OnDevice(fleet.addresses.model)
            source.move(device)
            publisher = make(fleet.config, fleet.addresses, source, home, device=device)
            figures = [publisher.publish(version) for version in range(1, 3 if options.quick else 8)]
    nbytes = figures[0]["bytes"]
    pause = statistics.median(one["pause"] - one["verify"] for one in figures[1:])
    return {
        "bytes": nbytes,
        "fill_s": statistics.median(one["fill"] for one in figures[1:]),
        "pause_s": pause,
        "gb_per_s": nbytes / pause / 1e9,
        **copies(device, 1 << 24 if tiny else GiB),
    }


def copies(device: str, nbytes: int) -> dict[str, float | None]:
    """Return the bandwidths of a copy on the device, and to the next GPU if there is one."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    targets = {"device_copy_gb_per_s": torch.empty_like(source), "link_gb_per_s": None}
    if torch.cuda.device_count() > 1:
        targets["link_gb_per_s"] = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1")
    return {
        name: None if target is None else nbytes / timed(lambda to=target: to.copy_(source), warm=2, repeats=5) / 1e9  # type: ignore[misc]
        for name, target in targets.items()
    }


def pause(options: argparse.Namespace) -> dict[str, Any]:
    """Publish while episodes run, in each pause mode (scripts/bench_pause.py)."""
    from scripts.bench_pause import CHANGED, WAYS, measured
    from tests.integration.fleet import engines
    from tests.integration.publisher import SeededWeights

    short = options.quick or options.rehearse
    counts = argparse.Namespace(
        episodes=2 if short else 16, publishes=2 if short else 8, every=0.3 if short else 2.0, checked=0
    )
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        dtype = model_of(home / "model", options)
        overrides = [f"model.path={home / 'model'}", f"engine.dtype={dtype}", "trainer.device=cpu"]
        with engines(home, *overrides, "engine.max_total_tokens=32768", gpus=0 if options.rehearse else 1) as fleet:
            weights = SeededWeights(fleet.addresses.model, share=CHANGED)
            for number, (mode, key) in enumerate(WAYS):
                first = 1 + number * (counts.publishes + 1)
                found[f"{mode}, {key}"] = asyncio.run(measured(fleet, weights, mode, key, first, counts))
    return found


def model_of(folder: Path, options: argparse.Namespace) -> str:
    """Write the model that an engine serves, and return its precision."""
    dtype = "float32" if options.rehearse else "bfloat16"
    cut = {**TINY, "vocab_size": 20480} if options.rehearse else {"num_hidden_layers": 8} if options.quick else {}
    write(folder, {**SHAPES["0.6b"], **cut}, dtype)
    return dtype


def engine(options: argparse.Namespace) -> dict[str, Any]:
    """Publish to engines of one setting, and compare their log-probabilities with transformers."""
    with tempfile.TemporaryDirectory() as folder:
        return check(options.what, Path(folder), rehearse=options.rehearse)


# -- whole runs ------------------------------------------------------------------------------------------------


GAP = 0.2
"""Bound of the mean difference of log-probabilities between trainers and engines, which is 0.05 in bfloat16, and more
where tokens are older. Other weights give 1 and more."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run asyncrl-train, and return what its summary and its last steps say."""
    gpus, together = torch.cuda.device_count(), options.part != "run"
    steps = 5 if options.rehearse else 20 if options.quick else 40
    overrides = [f"experiment={'tiny' if options.rehearse else 'default'}", f"run.max_steps={steps}"]
    overrides += ["eval.questions=0"] if options.part != "accuracy" else []
    if options.part == "colocated":
        overrides += ["cluster.placement=colocated", "weights.pause_mode=retract", "weights.staging=stream"]
        overrides += ["rollout.max_staleness=0", "weights.verify_every=1"]
    elif together:
        overrides += ["cluster.placement=shared", "weights.verify_every=1"]
    overrides += ["weights.overlap=true", "weights.verify_every=1"] if options.what == "overlap" else []
    if not options.rehearse:
        trainers = gpus if together else gpus // 2
        overrides += [f"trainer.data_parallel={trainers}", f"engine.count={gpus if together else gpus - trainers}"]
        overrides += BACKENDS if together else []
        overrides += ["model=smollm2-135m", "trainer.dtype=bfloat16", "engine.dtype=bfloat16"]
    else:
        overrides += ["rollout.batch_groups=4"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "asyncrl.launch.main", *overrides, f"run.dir={folder}/run"]
        subprocess.run(command, check=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        evaluations = Path(folder) / "run" / "eval.jsonl"
        evaluated = [json.loads(line) for line in evaluations.read_text().splitlines()] if evaluations.exists() else []
    last = [json.loads(line) for line in lines[1:]]
    spans = ("step", "wait_batch", "release", "train", "publish", "pause", "publish_background")
    times = {f"time/{name}": [step[f"time/{name}"] for step in last if f"time/{name}" in step] for name in spans}
    assert summary["logprob_gap/mean"] < GAP, summary["logprob_gap/mean"]
    kept = ("steps", "tokens_per_s/generated", "tokens_per_s/trained", "logprob_gap/mean", "transport")
    return {
        **{name: summary[name] for name in kept},
        **({"accuracy": [told["accuracy"] for told in evaluated]} if evaluated else {}),
        **{name: statistics.median(values) for name, values in times.items() if values},
    }


PARTS = {"mfu": mfu, "mfu-rank": mfu_rank, "publish": publish, "pause": pause, "engine": engine}
PARTS |= {"colocated": run, "shared": run, "accuracy": run, "run": run}


def main() -> None:
    """Run one part and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("what", nargs="?", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=[TOKENS], help="of a sample, for mfu")
    options = parser.parse_args()
    print(json.dumps(PARTS[options.part](options)), flush=True)


if __name__ == "__main__":
    main()
