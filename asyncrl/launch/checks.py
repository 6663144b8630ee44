"""Checks of a configuration against the model, the machine and the task, before anything starts."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl import tasks
from asyncrl.config import AuxiliaryModelConfig, Config, EngineConfig, TrainerConfig, on_gpu
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.extension import active
from asyncrl.imports import announced
from asyncrl.launch.engine_shape import check_shape
from asyncrl.models.architectures import check_architecture, megatron_arguments, routing_shape
from asyncrl.models.families import family_of
from asyncrl.models.vision import deepstack, image_shape
from asyncrl.platforms import without_gpu
from asyncrl.tasks.scores import rewards
from asyncrl.weights.choice import not_served
from asyncrl.weights.peft_config import check_start


def check_model(config: Config, hf: dict[str, Any], gpus: int = 0) -> None:
    """Refuse models and layouts that cannot be built. `hf` is the model folder's config.json, `gpus` the number of each
    machine."""
    check_architecture(hf)
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads", hf["num_attention_heads"])
    serves = [d for d in range(1, heads + 1) if heads % d == 0 and (kv_heads % d == 0 or d % kv_heads == 0)]
    rows = (heads + 2 * kv_heads) * (hf.get("head_dim") or hf.get("hidden_size", heads) // heads)
    trains = [d for d in serves if rows % d == 0]  # Megatron shares out the rows of queries, keys and values
    for field, degree, allowed in (
        ("trainer", config.trainer.tensor_parallel, trains),
        ("engine", config.engine.parallel.attention, serves),  # SGLang replicates KV heads
    ):
        if degree not in allowed:
            number, what = (heads, "attention heads") if heads % degree else (kv_heads, "key-value heads")
            remedy = f"Must divide the model's {number} {what}: one of {allowed}."
            raise ConfigError(f"{field}.tensor_parallel", degree, remedy)
    _check_layers(config.trainer, hf["num_hidden_layers"])
    family = megatron_arguments(hf)
    _check_serving(config, hf)
    check_shape(config, hf, family.get("num_moe_experts", 0))
    _check_roles(config, hf)
    _check_recompute(config.trainer, hf["num_hidden_layers"], family)
    _check_features(config.trainer, {**hf, **family})
    _check_experts(config.trainer, family.get("num_moe_experts", 0))
    _check_dispatcher(config.trainer, family.get("num_moe_experts", 0))
    _check_replay(config, hf)
    _check_vision(config, hf)
    for one in active(config).values():
        for problem in one.launch().check_model(config, {**hf, **family}, gpus):
            raise problem
    longest = hf.get("max_position_embeddings", 0)
    if config.trainer.lora.path:
        check_start(config.trainer.lora, config.adapters)
    if config.rollout.max_new_tokens >= longest:
        raise ConfigError(
            "rollout.max_new_tokens",
            config.rollout.max_new_tokens,
            f"Must leave room for a prompt within the model's {longest} positions.",
        )


def _check_serving(config: Config, hf: dict[str, Any]) -> None:
    """Refuse what engines or adapters cannot do with models of this family."""
    of = family_of(hf)
    for found, remedy in of.serving.unsupported(hf):
        raise ConfigError("model.path", found, remedy)
    context = int(config.engine.server_args.get("context_length") or hf.get("max_position_embeddings", 0))
    longest = of.serving.longest(hf)
    if longest and context > longest:
        why = f"SGLang computes another function than transformers from position {longest} on"
        remedy = f"{why}: set +engine.server_args.context_length={longest}."
        raise ConfigError("engine.server_args.context_length", context, remedy)
    if config.trainer.lora.rank and not of.adapters:
        remedy = f"Adapters of {of.architecture} are not supported, because its files hold fused layers: set null."
        raise ConfigError("trainer.lora.rank", config.trainer.lora.rank, remedy)


def check_platforms(config: Config, gpus: int) -> None:
    """Refuse parts without GPUs if no extension has a platform for them, and engines with what their platform lacks."""
    for name, section, _ in _fleets(config):
        if on_gpu(section, gpus):
            continue
        try:
            platform = without_gpu()
        except LaunchError as error:
            raise ConfigError(f"{name}.device", section.device, str(error)) from None
        if name == "engine":
            platform.check_engine(config.engine)


def _check_roles(config: Config, hf: dict[str, Any]) -> None:
    """Refuse roles with adapters of their own or past versions if engines cannot serve adapters of the model."""
    if config.mode == "train" and config.agents.need_versions and (problem := not_served(hf)):
        remedy = f"Roles have adapters of their own or past versions, but {problem}: remove them."
        raise ConfigError("agents.roles", sorted(config.agents.roles), remedy)


def _check_layers(trainer: TrainerConfig, layers: int) -> None:
    """Check that pipeline stages and their chunks can share the layers as they are told to, and that none is empty."""
    try:
        chunks = trainer.split.chunk_layers(layers)
    except ValueError as error:
        field, problem = error.args
        raise ConfigError(
            f"trainer.{field}",
            getattr(trainer, field),
            f"The model has {layers} layers, and {problem}: change it, or set trainer.pipeline_split.",
        ) from None
    if chunks[-1][-1].stop != layers or not all(len(chunk) for stage in chunks for chunk in stage):
        sizes = [[len(chunk) for chunk in stage] for stage in chunks]
        raise ConfigError(
            "trainer.pipeline_split", sizes, f"These are not the model's {layers} layers, at least one in each chunk."
        )


def _check_recompute(trainer: TrainerConfig, layers: int, family: dict[str, Any]) -> None:
    """Check that the units of layers divide each chunk, and that the model has the modules that are recomputed."""
    recompute, field = trainer.recompute, "trainer.recompute"
    if recompute.granularity == "full" and recompute.method == "uniform":
        for chunk in (len(chunk) for stage in trainer.split.chunk_layers(layers) for chunk in stage):
            if chunk % recompute.num_layers:
                raise ConfigError(
                    f"{field}.num_layers",
                    recompute.num_layers,
                    f"Must divide the {chunk} layers of a pipeline stage's chunk: set method=block, or a divisor.",
                )
    if recompute.granularity != "selective":
        return
    experts, latent = family.get("num_moe_experts"), family.get("multi_latent_attention")
    shared = family.get("moe_shared_expert_intermediate_size")
    for module, has in (("moe", experts), ("moe_act", experts), ("shared_experts", shared), ("mla_up_proj", latent)):
        if module in recompute.modules and not has:
            raise ConfigError(f"{field}.modules", module, "The model has no such module: remove it.")
    if "moe_act" in recompute.modules and (trainer.layers != "transformer_engine" or trainer.lora.rank):
        remedy = "Only grouped experts have it: set trainer.layers=transformer_engine without trainer.lora, or use moe."
        raise ConfigError(f"{field}.modules", "moe_act", remedy)


def _check_features(trainer: TrainerConfig, model: dict[str, Any]) -> None:
    """Check that tensor-parallel ranks can divide every MLP evenly. Heads are checked elsewhere, and the vocabulary is
    padded."""
    if "kv_lora_rank" in model:
        model = {**model, "latent": model["kv_lora_rank"] + model["qk_rope_head_dim"]}
    tensor, expert_tensor = trainer.tensor_parallel, trainer.expert_tensor_parallel or trainer.tensor_parallel
    for field, degree, of, features in (
        ("tensor_parallel", tensor, "an MLP", "intermediate_size"),
        ("tensor_parallel", tensor, "the shared experts", "moe_shared_expert_intermediate_size"),
        ("tensor_parallel", tensor, "the latent queries", "q_lora_rank"),
        ("tensor_parallel", tensor, "the latent keys and values", "latent"),
        ("expert_tensor_parallel", expert_tensor, "a routed expert", "moe_ffn_hidden_size"),
    ):
        if (model.get(features) or 0) % degree:
            raise ConfigError(
                f"trainer.{field}",
                getattr(trainer, field),
                f"{degree} ranks cannot share the {model[features]} features of {of} evenly: set it to a divisor.",
            )


def _check_experts(trainer: TrainerConfig, experts: int) -> None:
    """Check that the expert parallelism divides the routed experts, and is only set for models that have some."""
    for field, value, off in (
        ("expert_parallel", trainer.expert_parallel, 1),
        ("expert_tensor_parallel", trainer.expert_tensor_parallel, None),
    ):
        if not experts and value != off:
            raise ConfigError(f"trainer.{field}", value, f"The model has no routed experts: set it to {off}.")
    if experts % trainer.expert_parallel:
        raise ConfigError(
            "trainer.expert_parallel", trainer.expert_parallel, f"Must divide the model's {experts} routed experts."
        )
    if experts and trainer.tensor_parallel > 1 and not trainer.sequence_parallel:
        raise ConfigError(
            "trainer.sequence_parallel",
            False,
            "Megatron trains routed experts under trainer.tensor_parallel > 1 only with it: set it to true.",
        )


def _check_dispatcher(trainer: TrainerConfig, experts: int) -> None:
    """Check that the kernels of a token dispatcher are installed, and have ranks to exchange tokens between."""
    kind = trainer.token_dispatcher
    ranks = trainer.expert_parallel * (trainer.expert_tensor_parallel or trainer.tensor_parallel)
    for wrong, why in (
        (not experts, "The model has no routed experts"),
        (ranks == 1, "One rank holds all experts"),
        (trainer.device == "cpu", "Its kernels are for GPUs"),
        (find_spec("deep_ep") is None, "The package deep_ep, which has its kernels, is not installed"),
    ):
        if kind != "alltoall" and wrong:
            raise ConfigError("trainer.token_dispatcher", kind, f"{why}: set alltoall.")


def _check_replay(config: Config, hf: dict[str, Any]) -> None:
    """Check that routing replay has routers to replay, and for R3 engines that report their routing."""
    replay = config.algo.routing_replay
    if replay == "none":
        return
    if routing_shape(hf) is None:
        raise ConfigError("algo.routing_replay", replay, "The model has no routed experts: set none.")
    if replay == "R3" and not family_of(hf).serving.reports_experts:
        name = hf["architectures"][0].removesuffix("ForCausalLM")
        raise ConfigError("algo.routing_replay", "R3", f"SGLang's {name} does not report its experts: set R2 or none.")


def _check_vision(config: Config, hf: dict[str, Any]) -> None:
    """Refuse what a model that sees cannot do yet: everything that reads images with another vision tower than the
    policy's, or under another distribution than the one without image tokens."""
    if image_shape(hf) is None:
        return
    for field, value, why in (
        ("algo.kl.reference_path", config.algo.kl.reference_path, "The reference sees with the policy's vision tower"),
        ("algo.critic.path", config.algo.critic.path, "The critic sees with the policy's vision tower"),
    ):
        if value:
            raise ConfigError(field, value, f"{why}: unset it, or choose a text model.")
    levels, split = deepstack(hf), config.trainer.split
    if levels > len(split.chunk_layers(hf["num_hidden_layers"])[0][0]):
        remedy = f"The first {levels} layers add features of images, and must be on the first stage: set fewer stages."
        field = "virtual_pipeline" if config.trainer.virtual_pipeline > 1 else "pipeline_parallel"
        raise ConfigError(f"trainer.{field}", getattr(config.trainer, field), remedy)
    if config.trainer.vision.tower == "frozen":
        return
    if config.trainer.lora.rank:
        raise ConfigError("trainer.vision.tower", "trained", "Adapters are trained on frozen weights: set frozen.")
    if levels and config.trainer.recompute.granularity == "full":
        remedy = (
            "Recomputed layers would repeat the backward pass of the vision tower whose features they add: set none."
        )
        raise ConfigError("trainer.recompute.granularity", "full", remedy)
    if config.weights.verify and (levels or config.engine.tensor_parallel > 1):
        remedy = "How engines of this model or layout lay out a trained vision tower is not known: set it to false."
        raise ConfigError("weights.verify", True, remedy)


ON_THE_SAME = "Or let engines use the trainers' GPUs: set cluster.placement=shared, or colocated (docs/parallelism.md)."


def check_devices(config: Config, gpus: int) -> None:
    """Refuse more GPU ranks than GPUs; on CPU any number of processes may share the cores."""
    wanted = 0
    for name, section, ranks in _fleets(config):
        if section.device == "cuda" and gpus == 0:
            raise ConfigError(f"{name}.device", "cuda", "This machine has no visible GPU: use cpu or auto.")
        wanted += ranks if on_gpu(section, gpus) else 0
    if config.cluster.shares_gpus and on_gpu(config.engine, gpus):
        wanted -= config.engine.started * config.engine.ranks  # they use the trainers'
    if wanted > gpus:
        raise ConfigError(
            "trainer × engine ranks",
            wanted,
            f"The machine has {gpus} GPUs: lower trainer.tensor_parallel, pipeline_parallel, context_parallel or "
            f"data_parallel ({config.trainer.world_size} ranks), or engine.count × engine.tensor_parallel"
            + "".join(
                f", or {role}.count × {role}.tensor_parallel" for role, one in config.frozen.items() if one.started
            )
            + (f". {ON_THE_SAME}" if config.mode == "train" and not config.cluster.shares_gpus else "."),
        )


def _fleets(config: Config) -> Iterator[tuple[str, TrainerConfig | EngineConfig | AuxiliaryModelConfig, int]]:
    """Yield name and section of each part of which this run starts ranks, and their number."""
    trains, generates = config.mode != "rollout_only", config.mode != "replay"
    if trains:
        yield "trainer", config.trainer, config.trainer.world_size
    for name, section in config.fleets.items() if generates else ():
        if section.started:
            yield name, section, section.started * section.ranks


def check_request_fields(config: Config) -> None:
    """Refuse fields of requests that SGLang does not know, and would ignore. They are read from its source, since its
    import takes seconds."""
    spec = find_spec("sglang") if config.engine.request_fields else None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        tree = ast.parse(Path(folder, "srt/managers/io_struct.py").read_text())
        (known,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "GenerateReqInput")
        names = [ast.unparse(one.target) for one in known.body if isinstance(one, ast.AnnAssign)]
        for name, value in config.engine.request_fields.items():
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                remedy = "Requests to SGLang's /generate have no such field" + (
                    f": did you mean {near[0]}?" if near else "."
                )
                raise ConfigError(f"engine.request_fields.{name}", value, remedy)


def installed(package: str) -> bool:
    """Return whether a package can be imported, without importing more than its parents."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def check_files(config: Config) -> list[object]:
    """Refuse tasks, rewards and agents that cannot be built, and a missing chat template.
    Return the parts that they announce to extensions."""
    from asyncrl.rollout.agent import agents  # imports a web server

    check_request_fields(config)
    with announced() as parts:
        built = tasks.build_all(config)
        rewards(config, built)
        if config.mode != "replay":
            agents(config, built, tell=print)
    template = config.model.chat_template
    if template is not None and not Path(template).expanduser().is_file():
        raise ConfigError("model.chat_template", template, "There is no such file: set the path of a jinja file.")
    return parts
