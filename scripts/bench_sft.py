"""Benchmark of a step of mode=sft: packing, shared prompts, and transformers on equal work.

    python scripts/bench_sft.py [--quick] [--trl PYTHON]

The model is a random Llama with SmolLM2's proportions, but smaller, in float32 and one thread. Every step is complete:
forward, backward, gradient norm, clipping, AdamW, on the same 32 rows of `task=chat`. Lengths are log-normal, with
prompts of their own, or eight answers to each prompt, as rejection sampling leaves them. Each way runs in its own
process. The loop of transformers' Trainer has eight padded rows in a forward, `labels`, `num_items_in_batch`, and
torch's fused AdamW. TRL is no dependency: PYTHON is an interpreter that imports it besides what this repository needs
(README of the extension). Its SFTTrainer gets the same tokens and masks, forwards of eight rows, padded or with
`padding_free`, and neither checkpointed activations nor logs. Rates are trained tokens per CPU-second, and ratios
compare measurements of this run. The last line is JSON:

    packing_gain         rate of our network and optimizer with packs / with padding, without shared prompts
    shared_prefix_gain   rate of mode=sft with trainer.share_prompts / without, eight answers to a prompt
    over_transformers    rate of mode=sft / transformers' loop, prompts of their own
    over_transformers_siblings    the same with eight answers to a prompt
    over_trl             rate of mode=sft / the faster one of TRL's two ways, prompts of their own
    over_trl_siblings    the same with eight answers to a prompt
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl.algo.samples import Sample, build_samples  # noqa: E402
from scripts import machine  # noqa: E402
from scripts.bench_train import BUDGET, Bench, cpu_seconds, our_step, write_model  # noqa: E402

ROWS, SIBLINGS, ROWS_OF_A_FORWARD = 32, 8, 8
MEDIAN, SPREAD, LONGEST = 48, 1.0, 512
WAYS = {"own": ("padded", "packed", "sft", "transformers"), "siblings": ("unshared", "sft", "transformers")}
"""Ways to train the rows with prompts of their own, and those of siblings."""
TRL_WAYS = ("trl", "trl padding-free")


def write_rows(file: Path, siblings: int) -> None:
    """Write the rows of one step, `siblings` of them with the same prompt."""
    draw = random.Random(0)

    def text() -> str:
        length = min(LONGEST, max(1, round(MEDIAN * draw.lognormvariate(0, SPREAD))))
        return "".join(draw.choice("0123456789") for _ in range(length))

    rows = []
    for _ in range(ROWS // siblings):
        prompt = text()
        rows += [{"messages": prompt, "completion": text()} for _ in range(siblings)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def case(folder: Path, kind: str, way: str, seconds: float) -> dict[str, float]:
    """Return the minimum CPU-seconds of a step of all rows."""
    if way in TRL_WAYS:
        return {"step": min(trl_seconds(folder, kind, way, seconds))}
    run = {"sft": sft_step, "unshared": sft_step, "transformers": transformers_step}.get(way, network_step)
    step: Callable[[], object] = run(folder, kind, way)
    step()
    times: list[float] = []
    while sum(times) < seconds and len(times) < 9:
        times.append(cpu_seconds(step))
    return {"step": min(times)}


def composed(folder: Path, kind: str, *settings: str) -> Any:
    """Return the configuration of supervised training on these rows."""
    from asyncrl.config import load
    from tests.fakes import compose_values

    own = [f"task.train_file={folder / kind}.jsonl", "eval.questions=0", f"rollout.batch_groups={ROWS}"]
    same = ["trainer.dtype=float32", f"trainer.micro_batch_tokens={BUDGET}", "trainer.optimizer.clip_grad=0.001"]
    return load(compose_values("experiment=warmup", "model=tiny", *own, *same, *settings))


def samples_of(folder: Path, kind: str) -> list[list[Sample]]:
    """Return the rows as mode=sft trains them, with a spare row of the table behind each, for padding."""
    from asyncrl.extensions.sft.rows import ChatRows
    from asyncrl.extensions.sft.training import Conversations

    config = composed(folder, kind)
    policy: Any = SimpleNamespace(folder=folder, hf=json.loads((folder / "config.json").read_text()))
    conversations = Conversations(config, policy, ChatRows(config.task))
    conversations.read(range(ROWS))
    groups = build_samples(conversations.groups(list(range(ROWS)), 0))
    return [[replace(one, first_row=one.first_row + one.number) for one in group] for group in groups]


def network_step(folder: Path, kind: str, way: str) -> Callable[[], None]:
    """Return a step of our network and optimizer, padded or packed."""
    return our_step(folder, samples_of(folder, kind), way)[0]


def sft_step(folder: Path, kind: str, way: str) -> Callable[[], object]:
    """Return a step of mode=sft, as a trainer rank takes it."""
    from asyncrl.platforms import here

    here().prepare_trainer()
    from asyncrl.network.ports import free_port
    from asyncrl.schema import decode_batch
    from asyncrl.trainer.batch_source import BatchSource
    from asyncrl.trainer.parallel import initialize
    from asyncrl.trainer.policy import Policy

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port("127.0.0.1"))
    config = composed(folder, kind, f"trainer.share_prompts={json.dumps(way == 'sft')}")
    policy = Policy(config, folder, initialize(config.trainer, gpu=False, seed=0, timeout=60.0))

    def no_server() -> BatchSource:
        raise LookupError("mode=sft asks no server for batches")

    given = policy.batches(no_server)
    assert given
    batch = decode_batch(given.batch(0, interrupt=lambda: False))
    return lambda: policy.update(batch)


def transformers_step(folder: Path, kind: str, _: str) -> Callable[[], None]:
    """Return a step of the loop of transformers' Trainer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rows = [sample for group in samples_of(folder, kind) for sample in group]
    count = sum(row.num_trained for row in rows)
    batches = []
    for start in range(0, len(rows), ROWS_OF_A_FORWARD):
        some = rows[start : start + ROWS_OF_A_FORWARD]
        longest = max(len(row.prompt_ids) + len(row.token_ids) for row in some)
        ids, mask = (torch.zeros(len(some), longest, dtype=torch.int64) for _ in range(2))
        labels = torch.full((len(some), longest), -100)
        for number, row in enumerate(some):
            begin, end = len(row.prompt_ids), len(row.prompt_ids) + len(row.token_ids)
            ids[number, :end] = torch.tensor([*row.prompt_ids, *row.token_ids])
            mask[number, :end] = 1
            labels[number, begin:end] = ids[number, begin:end].where(torch.tensor(row.mask), -100)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})

    def step() -> None:
        optimizer.zero_grad()
        for batch in batches:
            model(**batch, num_items_in_batch=count, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)
        optimizer.step()

    return step


def trl_seconds(folder: Path, kind: str, way: str, seconds: float) -> list[float]:
    """Return the CPU-seconds of steps of TRL's SFTTrainer, each from the end of the one before to its own."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            ends.append(time.process_time())
            control.should_training_stop = len(ends) > 2 and (ends[-1] - ends[1] > seconds or len(ends) > 10)

    rows = [sample for group in samples_of(folder, kind) for sample in group]
    columns = {
        "input_ids": [[*row.prompt_ids, *row.token_ids] for row in rows],
        "completion_mask": [[0] * len(row.prompt_ids) + [int(bit) for bit in row.mask] for row in rows],
    }
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=100,
        per_device_train_batch_size=ROWS_OF_A_FORWARD,
        gradient_accumulation_steps=ROWS // ROWS_OF_A_FORWARD,
        max_length=None,
        completion_only_loss=True,  # what it would find only in rows with the columns prompt and completion
        padding_free=way == "trl padding-free",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        optim="adamw_torch_fused",
        learning_rate=1e-5,
        adam_beta2=0.95,
        max_grad_norm=0.001,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    data, tokenizer = Dataset.from_dict(columns), AutoTokenizer.from_pretrained(folder)
    SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]).train()
    return [after - before for before, after in itertools.pairwise(ends[1:])]  # the first step is a warm-up


class SftBench(Bench):
    """Runner of all ways."""

    script = __file__


def main() -> None:
    """Measure, and print a line for each way and one of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--trl", metavar="PYTHON", help="an interpreter that has TRL, to compare with")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)  # one way, in its own process
    arguments = parser.parse_args()
    if arguments.case:
        folder, kind, way, seconds = arguments.case
        print(json.dumps(case(Path(folder), kind, way, float(seconds))))
        return
    from asyncrl.models import tiny

    this = machine.report()
    seconds, rate = 0.5 if arguments.quick else 3.0, dict[tuple[str, str], float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_model(folder, width=192 if arguments.quick else 384, layers=4, vocab=1024, dtype="float32")
        special = {"bos_token": tiny.BOS, "eos_token": tiny.EOS, "pad_token": tiny.PAD, "unk_token": tiny.UNK}
        letters = tiny.tokenizer_json(tiny.TOKENS, tiny.UNK, (tiny.BOS, tiny.EOS, tiny.PAD, tiny.UNK))
        tiny.write_tokenizer(folder, letters, tiny.CHAT_TEMPLATE, special, 2048)
        bench = SftBench(Path(name), seconds)
        for kind, ways in WAYS.items():
            write_rows(folder / f"{kind}.jsonl", SIBLINGS if kind == "siblings" else 1)
            trained = sum(row.num_trained for group in samples_of(folder, kind) for row in group)
            for way in (*ways, *(TRL_WAYS if arguments.trl else ())):
                python = arguments.trl if way in TRL_WAYS else sys.executable
                rate[kind, way] = trained / bench.apart("model", (kind, way, seconds), python)["step"]
                print(f"{kind:<9} {way:<16} {rate[kind, way]:8.0f} trained tokens per CPU-second", flush=True)
    figures = {
        "packing_gain": rate["own", "packed"] / rate["own", "padded"],
        "shared_prefix_gain": rate["siblings", "sft"] / rate["siblings", "unshared"],
        "over_transformers": rate["own", "sft"] / rate["own", "transformers"],
        "over_transformers_siblings": rate["siblings", "sft"] / rate["siblings", "transformers"],
    }
    if arguments.trl:
        for kind, name in (("own", "over_trl"), ("siblings", "over_trl_siblings")):
            figures[name] = rate[kind, "sft"] / max(rate[kind, way] for way in TRL_WAYS)
    print(json.dumps({**{name: round(value, 4) for name, value in figures.items()}, "machine": this}))


if __name__ == "__main__":
    main()
