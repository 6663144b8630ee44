"""Engines of many settings on GPUs: scripts/bench_gpu.py makes a part of each.

`check` starts engines of a setting on a small model of random weights and publishes two versions by each transport,
which the engines' checksums verify. The log-probabilities that the engines return for their own tokens must be those
that transformers computes in float32 with the version's weights. `rehearse` does the same on a CPU, with what a CPU has
of the setting; families that SGLang serves on GPUs alone are not rehearsed.

The bounds on a GPU are twice what CPUs gave: engines in bfloat16 a mean difference of 0.07 (0.11 with experts, because
some tokens go to others), and transformers with inputs in fp8 0.59, in int8 0.22. Other weights give 18 and more.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DENSE, SPARSE, FP8, INT8 = 0.15, 0.25, 1.2, 0.45
TWO, REPLICAS = "engine.tensor_parallel=2", "engine.data_parallel=2"
EXPERTS, STAGES = "engine.expert_parallel=2", ("engine.pipeline_parallel=2", "weights.pause_mode=abort")
CODES = "quantized.format"
HICACHE = ("engine.hicache=1", "rollout.cache_key=version")
BACKENDS = ("+engine.server_args.attention_backend=triton", "+engine.server_args.sampling_backend=pytorch")
"""Backends that are compiled on the machine, in place of those that SGLang chooses: FlashAttention 3 and FlashInfer."""
SMALL_CACHE = "engine.max_total_tokens=1024"
"""Room for half of what is asked, so that prefixes must leave the GPU before they are asked for again."""


@dataclass(frozen=True)
class Setting:
    """Engines of one setting."""

    arch: str
    overrides: tuple[str, ...]
    gpus: int = 1  # of all its engines
    gap: float = SPARSE
    """Largest mean difference of log-probabilities between the engines on GPUs and transformers."""
    on_cpu: tuple[str, ...] | None = None  # in place of `overrides`, where a CPU cannot run them
    fields: dict[str, Any] = field(default_factory=dict)  # of the model's config.json

    @property
    def rehearsed(self) -> bool:
        """Return whether SGLang serves the model's family on CPUs, too."""
        from asyncrl.models.families import of_type

        return of_type(self.arch).serving.on_cpu


LATENT = {
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "moe_intermediate_size": 256,
}
"""Widths of latent attention as in all published models, for which SGLang's kernels are made."""
SETTINGS = {
    "triton": Setting("qwen3", BACKENDS, gap=DENSE, on_cpu=()),
    "plain": Setting("qwen3", (), gap=DENSE),
    "experts": Setting("qwen3_moe", (TWO, EXPERTS), gpus=2),
    "replicas": Setting("qwen3_moe", (TWO, EXPERTS, REPLICAS), gpus=2),
    "stages": Setting("qwen3_moe", STAGES, gpus=2),
    "all": Setting("qwen3_moe", (TWO, EXPERTS, REPLICAS, *STAGES), gpus=4),
    "hicache": Setting("qwen3", (*HICACHE, SMALL_CACHE), gap=DENSE, on_cpu=(SMALL_CACHE,)),
    "fp8": Setting("qwen3_moe", (f"{CODES}=fp8",), gap=FP8, on_cpu=(f"{CODES}=fp8_simulated",)),
    "int8": Setting("qwen3_moe", (f"{CODES}=int8",), gap=INT8, on_cpu=(f"{CODES}=int8_simulated",)),
    "deepseek": Setting("deepseek_v3", (), fields=LATENT),
    "glm-flash": Setting("glm4_moe_lite", (), fields={**LATENT, "n_shared_experts": 1}),
}
ON_CPU = 5e-4
"""The same on a CPU in float32, of any single token."""
VOCAB, TEMPERATURE = 1024, 0.2
SIZES: dict[str, Any] = {"vocab": VOCAB, "hidden": 512, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 512}
"""Heads of 128, and whole blocks of fp8 in every part of two ranks."""
FROM_HOST = 0.4
"""Least share of prompt tokens in a cache under HiCache, of which the GPU alone has room for 0.25."""


def write(folder: Path, setting: Setting) -> None:
    """Write the model of a setting into the folder."""
    from asyncrl.models.tiny import write_random_model

    fields = {"moe_intermediate_size": 256} if setting.arch.endswith("moe") else setting.fields
    write_random_model(folder, setting.arch, **SIZES, tied=False, seed=1, dtype="bfloat16", fields=fields)


def overrides(setting: Setting, model: Path, *, rehearse: bool, spare: bool = False) -> list[str]:
    """Return the overrides of a run with these engines. `spare`: the trainer has a GPU of its own."""
    common = [f"model.path={model}", "weights.transport=tensor"]
    if rehearse:
        own = setting.overrides if setting.on_cpu is None else setting.on_cpu
        return [*common, "engine.dtype=float32", *own]
    common += [f"trainer.device={'auto' if spare else 'cpu'}", "engine.dtype=bfloat16"]
    common += ["engine.memory_fraction=0.3"]
    return [*common, *setting.overrides]


def composed(name: str, folder: Path, *, spare: bool) -> list[Any]:
    """Write the models of a setting, and return the engines that `check` would start on GPUs. Raises ConfigError."""
    from asyncrl.launch.checks.machines import check_devices, check_platforms
    from asyncrl.launch.checks.model import check_model
    from tests.integration.fleet import planned

    setting, model = SETTINGS[name], folder / "model"
    write(model, setting)
    gpus = setting.gpus + spare
    config, _, specs = planned(folder, *overrides(setting, model, rehearse=False, spare=spare), gpus=gpus)
    check_model(config, json.loads((model / "config.json").read_text()), gpus)
    check_platforms(config, gpus)
    check_devices(config, gpus)
    return [spec for spec in specs if spec.name != "router"]


def check(name: str, folder: Path, *, rehearse: bool) -> dict[str, Any]:
    """Publish to engines of a setting, and compare what they generate. Return the differences, by transport."""
    import torch

    from tests.integration.fleet import engines, settings
    from tests.integration.publisher import SeededWeights, make, publish

    setting, model = SETTINGS[name], folder / "model"
    spare = not rehearse and torch.cuda.device_count() > setting.gpus
    composed(name, folder, spare=spare)
    device, gpus = ("cpu", 0) if rehearse else ("cuda:0", setting.gpus + spare)
    bound, figures = ON_CPU if rehearse else setting.gap, {}
    with engines(folder, *overrides(setting, model, rehearse=rehearse, spare=spare), gpus=gpus) as fleet:
        weights = SeededWeights(model, device=device)
        for first, transport in enumerate(["tensor", "distributed"][: 1 + (spare or rehearse)]):  # NCCL wants two GPUs
            config = settings(fleet.config, transport=transport, verify_every=1, timeout=120.0)
            publisher = make(config, fleet.addresses, weights, folder / transport, device=device)
            for version in (2 * first + 1, 2 * first + 2):
                told = publish(publisher, version)
                assert (told["engines"], told["verify"] > 0) == (fleet.config.engine.started, True), told
                answers, caches = ask(fleet, version)
                assert not fleet.config.engine.hicache or caches["cached"] > FROM_HOST, caches
                assert {span.version for _, found in answers for span in found.versions} == {version}
                served = differences(answers, weights, config, version, folder)
                assert (served.max() if rehearse else served.mean()) < bound, f"version {version}: {served}"
            before = differences(answers, weights, config, version - 1, folder)
            assert before.mean() > 5 * setting.gap, "no test: both versions give these log-probabilities"
            gaps = {"mean": served.mean().item(), "largest": served.max().item(), "to_other": before.mean().item()}
            figures[transport] = {**gaps, "pause_s": told["pause"], **caches}
            publisher.fleet.close()
    return figures


def ask(fleet: Any, version: int) -> tuple[list[tuple[list[int], Any]], dict[str, float]]:
    """Return prompts with their answers, and the figures of caches. Every prompt is asked twice, the second
    time with a cache."""
    import torch

    from tests.integration.fleet import client

    prompts = torch.randint(VOCAB, (16, 96), generator=torch.Generator().manual_seed(version)).tolist()
    engine = fleet.config.engine
    shape = {"replicas": engine.data_parallel}

    async def answers() -> tuple[list[tuple[list[int], Any]], dict[str, float]]:
        made = client(fleet, run="settings", max_new_tokens=32, temperature=TEMPERATURE, **shape)
        found: list[tuple[list[int], Any]] = []
        made.inflight.release(version)
        for _ in range(2):
            asked = [made.generate(group=f"g{number}")(prompt) for number, prompt in enumerate(prompts)]
            found += zip(prompts, await asyncio.gather(*asked), strict=True)
        await made.close()
        told = made.inflight.figures
        return found, {"cached": told.cached_tokens / told.prompt_tokens}

    return asyncio.run(answers())


def differences(answers: Any, weights: Any, config: Any, version: int, folder: Path) -> Any:
    """Return by how much the log-probability of each token differs from that of transformers, which computes in float32
    with what the engines hold of the version."""
    import torch

    from tests.integration.fleet import reloaded
    from tests.integration.publisher import quantized

    tensors, kind = weights.at(version), config.quantized.format
    if kind != "none":  # the values that the codes stand for
        hf, weights.version = json.loads((folder / "model" / "config.json").read_text()), version
        kind = f"{kind.removesuffix('_simulated')}_simulated"
        stream = quantized(weights, hf, kind, getattr(torch, config.engine.dtype)).stream()
        tensors = {name: pieces.tensor() for name, pieces in stream}
    model = reloaded(folder / "model", tensors, Path(tempfile.mkdtemp(dir=folder)) / "served")
    found = []
    with torch.no_grad():
        for prompt, answer in answers:
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
            every = (logits / TEMPERATURE).log_softmax(-1)
            told = every.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            found.append((told - torch.tensor(answer.logprobs)).abs())
    return torch.cat(found)
