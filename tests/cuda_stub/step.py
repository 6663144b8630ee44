"""One rank of a trainer on a fake GPU: it loads a model, makes updates, fills weight buckets, and reports what it saw.

`report` runs in a process of its own (conftest.py forks it), because what it replaces stays replaced.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.cuda_stub import device, fake  # isort: skip
from asyncrl import config as configuration
from asyncrl.config import Config
from asyncrl.models.tiny import write_random_model
from asyncrl.parallel import EngineParallel
from asyncrl.schema import Batch, Completion, Group, Trajectory, Turn, VersionSpan
from tests.cuda_stub import attention, memory, ranks
from tests.fakes import changed, compose_values, in_parts

VOCAB = 320
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"heads": 8, "kv_heads": 8, "tied": False},
    "tied llama": {"heads": 9, "kv_heads": 3, "tied": True, "hidden": 288},
    "qwen3": {"heads": 8, "kv_heads": 4, "tied": False},
    "qwen3_moe": {"heads": 8, "kv_heads": 4, "tied": False},
    "deepseek_v3": {"heads": 8, "kv_heads": 8, "tied": False},
}
"""Small models by architecture; the heads' ratio is that of a shipped experiment's model."""


@dataclass(frozen=True)
class Case:
    """What one process does."""

    model: str
    layers: int = 4
    experiment: str = "default"
    changes: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # of the model's config.json
    sizes: dict[str, int] = field(default_factory=dict)
    splits: str = "even"
    rank: int = 0
    updates: int = 2
    answers: int = 60  # tokens of an answer, about


def settings(case: Case) -> Config:
    """Return the configuration of a case, on a GPU."""
    values = compose_values(f"experiment={case.experiment}", "model.path=.", "task.train_file=.")
    if values["trainer"]["dtype"] == "auto":
        values["trainer"]["dtype"] = "bfloat16"  # which the launcher chooses on GPUs
    values["trainer"]["layers"] = "local"  # which it chooses without TransformerEngine
    values["trainer"]["micro_batch_tokens"] = 512
    return configuration.load(changed(values, case.changes))


def write_model(folder: Path, case: Case, dtype: str) -> None:
    """Write the model of a case."""
    shape = {"hidden": 256, "layers": case.layers, "intermediate": 512, "vocab": VOCAB, **MODELS[case.model]}
    kind = case.model.rpartition(" ")[2]
    write_random_model(folder, kind, **shape | case.sizes, fields=case.fields, seed=0, dtype=dtype, max_positions=512)


def batch(version: int, count: int, length: int, roles: Sequence[str] = ()) -> Batch:
    """Return groups of four answers, of two turns each, with rewards that differ. Each group has one of the roles."""
    draw = random.Random(version)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(draw.randint(low, high))]

    def turn(observation: list[int], role: str) -> Turn:
        ids = tokens(length // 4, length // 2)
        answer = Completion(ids, [-0.5] * len(ids), [VersionSpan(version, 0, len(ids))], "stop")
        return Turn(observation, answer, role=role)

    def group(number: int) -> Group:
        role = roles[number % len(roles)] if roles else ""
        played = [Trajectory([turn([], role), turn(tokens(1, 4), role)], float(i % 2)) for i in range(4)]
        return Group(f"g{version}-{number}", number, tokens(10, 20), played, "copy")

    return Batch(version, [group(number) for number in range(count)], {})


def report(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case. Returns what it saw."""
    torch.set_num_threads(1)
    config = settings(case)
    write_model(folder, case, config.trainer.dtype)
    world = config.trainer.world_size
    os.environ.update(RANK=str(case.rank), LOCAL_RANK="0", WORLD_SIZE=str(world), CUDA_DEVICE_MAX_CONNECTIONS="1")
    device.install()
    fake.install()
    ranks.be_rank(case.rank, world)
    _replace_kernels(case)

    from asyncrl.trainer.parallel import initialize
    from asyncrl.trainer.policy import Policy

    parallel = initialize(config.trainer, gpu=True, seed=0, timeout=100.0)
    with fake.OnDevice():
        policy = Policy(config, folder, parallel)
        for offload in getattr(policy.hooks.get("offload"), "offloads", []):
            offload.least = 0  # these models are small
        count = max(8, 2 * config.trainer.data_parallel)
        seen: dict[str, Any] = {"figures": [], "waits": []}
        for version in range(case.updates):
            fake.MODE.ledger.restart()
            device.Synchronizations.count = 0
            whole = batch(version, count, case.answers, sorted(config.agents.roles))
            seen["figures"].append([policy.update(part) for part in in_parts(whole, config.trainer.batch_parts)][-1])
            seen["waits"].append({**fake.MODE.ledger.waits, "synchronize": device.Synchronizations.count})
        seen["passes"] = ranks.PASSES
        seen["memory"] = memory.held(policy, config, folder, parallel.pp_rank, max(map(max, ranks.PASSES)))
        seen["devices"] = sorted({str(p.device) for p in policy.network.parameters()})
        seen["published"] = _fill(policy, parallel, config.engine.tensor_parallel)
        if config.weights.overlap:
            seen["beside"] = _publish_beside(policy, parallel, config, batch(case.updates, count, case.answers))
    return {"case": asdict(case), **seen}


def _replace_kernels(case: Case) -> None:
    """Replace what no fake tensor can run: compiled functions (test_kernels.py compiles them), and a norm that Megatron
    builds of tensors."""
    from asyncrl import platforms

    assert platforms.here() is platforms.CUDA, "torch sees no GPU: run with the stand-ins preloaded (make cuda-stub)"
    import megatron.core.optimizer.clip_grads as clip_grads
    from megatron.core.transformer.moe.router import TopKRouter

    from asyncrl.trainer import tree_attention

    TopKRouter._apply_expert_bias = TopKRouter._apply_expert_bias._torchdynamo_orig_callable
    tree_attention._flex_attention = lambda: attention.flex_attention  # type: ignore[assignment]
    apply, norm = clip_grads.multi_tensor_applier, object()
    clip_grads.l2_norm_impl = norm
    clip_grads.multi_tensor_applier = lambda function, *args: (
        (torch.ones(1, device="cuda:0"), None) if function is norm else apply(function, *args)
    )
    ranks.answer_shapes()
    ranks.route(case.splits)


def _fill(policy: Any, parallel: Any, engine_ranks: int) -> dict[str, Any]:
    """Fill the buckets of a publish as weights/publish.py does, and expect checksums. Returns counts."""
    from asyncrl.weights.bucket import fill, nbytes, plan_buckets
    from asyncrl.weights.checksum import ExpectedChecksums

    buckets, stream = plan_buckets(policy.weights.described(), 1 << 20), policy.weights.stream()
    places: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        places |= fill(torch.empty(nbytes(bucket), dtype=torch.uint8, device=parallel.device), bucket, stream)
    assert not list(stream), "tensors that were not planned"
    assert bool(places) == parallel.exports
    checksums = ExpectedChecksums(policy.hf, EngineParallel(engine_ranks), dtype=torch.bfloat16, device="cuda")
    for name, tensor in policy.weights.hf_tensors():
        checksums.add(name, tensor)
    assert {str(x.device) for x in places.values()} <= {"cuda:0"}
    return {"tensors": len(places), "checksums": len((checksums.result() or [()])[0])}


def _publish_beside(policy: Any, parallel: Any, config: Config, following: Batch) -> dict[str, Any]:
    """Publish to no engine, and train a batch before the first bucket is sent. Returns how often staging
    waited for the device, the devices of the buckets, and the figures of the batch."""
    from asyncrl.engine.fleet import Fleet
    from asyncrl.engine.update import Update
    from asyncrl.network.addresses import Access
    from asyncrl.weights.background import Background
    from asyncrl.weights.bucket import Bucket
    from asyncrl.weights.checksum import ExpectedChecksums
    from asyncrl.weights.publish import Outgoing, Publisher
    from asyncrl.weights.transport import Transport
    from tests.integration.publisher import FakeRollout

    trained, sent = threading.Event(), list[str]()

    class Waiting(Transport):
        def send(self, flat: torch.Tensor, bucket: Bucket) -> None:
            assert trained.wait(600), "training waits for the publish"
            sent.append(str(flat.device))

    publisher = Publisher(
        parallel,
        Update(Fleet([], Access(""), 1.0, on_lost=lambda *_: None), mode="in_place"),
        Waiting(),
        Outgoing(
            policy.weights,
            lambda: ExpectedChecksums(policy.hf, EngineParallel(), dtype=torch.bfloat16, device="cuda"),
        ),
        config.weights,
        FakeRollout(),
        group=torch.distributed.new_group(backend="gloo"),
    )
    background = Background(publisher)
    before = device.Synchronizations.count
    background.publish(1)
    waits = device.Synchronizations.count - before
    figures = policy.update(following)
    trained.set()
    background.finish()
    return {"waits": waits, "sent": sent, "buckets": len(publisher._plan or []), "figures": figures}


TP, SP, PP = "trainer.tensor_parallel", "trainer.sequence_parallel", "trainer.pipeline_parallel"
VPP, CP, DP = "trainer.virtual_pipeline", "trainer.context_parallel", "trainer.data_parallel"
EP, ETP = "trainer.expert_parallel", "trainer.expert_tensor_parallel"
