"""Configuration of engines and rollouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from asyncrl.errors import ConfigError
from asyncrl.parallel import EngineParallel
from asyncrl.settings import Count, Dtype, Million, Natural, Part, Positive, Section, Text


def _with_underscores(arguments: dict[str, Any]) -> dict[str, Any]:
    named = {name.replace("-", "_"): value for name, value in arguments.items()}
    if len(named) < len(arguments):
        twice = next(name for name in arguments if "-" in name and name.replace("-", "_") in arguments)
        raise ConfigError("server_args", twice, "It is there with underscores, too: remove one of the two.")
    return named


ServerArgs = Annotated[dict[str, Any], AfterValidator(_with_underscores)]
"""Arguments of SGLang by name, with underscores whichever way they were given; true for a bare flag."""
MOST_DRAFTS = 24
"""Largest number of tokens in a step of speculative decoding, where SGLang chooses it."""


class EngineConfig(Section):
    """The fleet of SGLang servers and the router in front of it."""

    count: Natural
    """Number of engines to start; 0 is only allowed with `urls`."""
    urls: list[str]
    """Engines that are already running elsewhere, used in addition: this run sends them its weights and requests. They
    accept the run's API key, which must then be set as ASYNCRL_API_KEY in the environment (docs/rollouts.md)."""
    tensor_parallel: Count
    """GPUs (or CPU processes) of each pipeline stage of an engine."""
    expert_parallel: Count
    """Groups of a stage's GPUs among which the routed experts are divided; the GPUs of a group divide each of its
    experts. Must divide tensor_parallel (SGLang's --ep-size)."""
    data_parallel: Count
    """Replicas of attention within a stage, each with requests and a KV cache of its own; the GPUs of a replica divide
    its heads. Must divide tensor_parallel (SGLang's --dp-size with --enable-dp-attention). All requests of a group go
    to the same replica."""
    pipeline_parallel: Count
    """Pipeline stages of an engine, which takes tensor_parallel × pipeline_parallel GPUs. A run that trains needs
    weights.pause_mode=abort or drain, because SGLang does not pause the steps that are between stages."""
    device: Literal["auto", "cpu", "cuda"]
    """Device of the engines; auto uses CUDA if the machine has it."""
    dtype: Dtype
    """Precision of the weights in the engines. auto: bfloat16 on GPUs; on CPUs the format with the faster matrix
    multiplication."""
    max_total_tokens: Count | None
    """KV cache size of one engine, or of each of its replicas of attention, in tokens; unset: what fits on its GPUs, as
    SGLang measures it, or 16,384 on a CPU."""
    memory_fraction: Part | None
    """Fraction of the whole memory of each of its GPUs that an engine fills with weights and KV cache, whatever others
    use (engine/sglang_hooks.py); its CUDA graphs and activations come on top. Unset: what SGLang chooses
    (mem_fraction_static), or 0.4 with cluster.placement=shared, where trainers get the rest up to 0.9. Without meaning
    on CPUs."""
    max_running_requests: Count
    """Maximum number of requests that one engine decodes concurrently."""
    stream_interval: Count
    """Tokens per chunk of a streamed answer. More tokens cost less overhead, but more work is lost when an engine
    dies."""
    server_args: ServerArgs
    """Additional SGLang arguments, as name: value (true for a bare flag)."""
    metrics: bool
    """Start the engines with SGLang's counters (--enable-metrics), from which the run takes tokens per second, cache
    hits and preemptions of each. Engines of engine.urls that have them are asked, too."""
    router_policy: Literal["manual", "consistent_hashing", "cache_aware", "round_robin", "random"]
    """Load-balancing policy of the router (docs/rollouts.md). manual: a new group goes to the engine with the fewest
    requests, and all of its requests and turns stay on that engine, which holds their shared prefix cache."""
    hicache: Count | None
    """Gigabytes of host memory for prefix caches, for each rank of an engine on GPUs (SGLang's HiCache,
    --hicache-size); unset: none."""
    start_timeout: Positive
    """Timeout in seconds for the startup of an engine, of any model, or of the router. On a GPU it includes
    the first requests, which compile kernels (engine/warmup.py)."""
    request_timeout: Positive
    """Seconds without receiving a byte after which a request to the router counts as broken."""
    retry_timeout: Positive
    """Seconds for which the rest of a broken answer is retried while no token arrives; then its group is dropped. Must
    be longer than an engine takes to restart."""

    @model_validator(mode="after")
    def _has_some(self) -> EngineConfig:
        if not self.started and not self.urls:
            raise ConfigError("engine.count", 0, "Start at least one engine, or name running ones in engine.urls.")
        for url in self.urls:
            if not url.startswith("http://"):
                raise ConfigError("engine.urls", url, "Must be the address of an engine, as http://HOST:PORT.")
        if len(set(self.urls)) < len(self.urls):
            raise ConfigError("engine.urls", self.urls, "It lists an engine twice: remove one of the two.")
        self._check_shape()
        return self

    def _check_shape(self) -> None:
        for field in ("expert_parallel", "data_parallel"):
            if self.tensor_parallel % getattr(self, field):
                remedy = f"Must divide the GPUs of a stage, engine.tensor_parallel={self.tensor_parallel}."
                raise ConfigError(f"engine.{field}", getattr(self, field), remedy)

    @property
    def started(self) -> int:
        """Return the number of engines that the launcher starts."""
        return self.count

    @property
    def speculates(self) -> bool:
        """Return whether the engines decode speculatively."""
        return self.server_args.get("speculative_algorithm") is not None

    @property
    def draft_room(self) -> int:
        """Return how many tokens a request needs in the KV cache beyond its own. SGLang allocates twice what a step of
        speculative decoding may add (mem_cache/allocation_sizing.py)."""
        return 2 * (self.server_args.get("speculative_num_draft_tokens") or MOST_DRAFTS) if self.speculates else 0

    @property
    def parallel(self) -> EngineParallel:
        """Return the division of the model among the ranks of an engine."""
        return EngineParallel(self.tensor_parallel, self.expert_parallel, self.data_parallel, self.pipeline_parallel)

    @property
    def ranks(self) -> int:
        """Return the number of GPUs (or CPU processes) of an engine."""
        return self.parallel.ranks


class AuxiliaryModelConfig(Section):
    """Engines of a model that is not trained: the base class of sections of extensions (Extension.models)."""

    model: str | None = None
    """HF folder of the model, or a built-in; unset: no such model."""
    count: Count = 1
    """Number of engines to start."""
    tensor_parallel: Count = 1
    """GPUs (or CPU processes) per engine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engines; auto uses CUDA if the machine has it."""
    dtype: Dtype = "auto"
    """Precision of the weights. auto: bfloat16 on GPUs; on CPUs the format with the faster matrix multiplication."""
    max_total_tokens: Count | None = None
    """KV cache size of one engine, in tokens; unset: what fits on its GPUs, as SGLang measures it, or 16,384 on a
    CPU."""
    max_running: Count = 64
    """Maximum number of concurrent requests: to all engines of a teacher together, in each engine of a judge."""
    server_args: ServerArgs = Field(default_factory=dict)
    """Additional SGLang arguments, as name: value (true for a bare flag)."""

    @property
    def started(self) -> int:
        """Return the number of engines that the launcher starts."""
        return self.count if self.model else 0

    @property
    def elsewhere(self) -> list[str]:
        """Return the URLs of engines that others started."""
        return []

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of SGLang that its use requires."""
        return {}

    @property
    def ranks(self) -> int:
        """Return the number of GPUs (or CPU processes) of an engine."""
        return self.tensor_parallel


class RolloutConfig(Section):
    """Asynchrony, batch shape, sampling, timeouts and failure limits of rollouts."""

    batch_groups: Million
    """Groups (prompts) per batch."""
    group_size: Million
    """Completions per prompt, unless the task overrides it."""
    max_staleness: Natural
    """Maximum staleness of every trained token, in versions. 0 is synchronous, 1 is one step off-policy."""
    lead: Natural | None
    """Number of batches that may be admitted ahead of the one in training; unset: max_staleness."""
    max_running_groups: Count | Literal["auto"] | None
    """Maximum number of groups in flight. auto: as many as keep engines and trainer busy, which needs an
    extension that limits them (docs/rollouts.md). null: as many as admission allows."""
    max_new_tokens: Count
    """Maximum length of a completion, in tokens."""
    overlong_prompts: Literal["skip", "refuse"]
    """Handling of prompts that leave no room for max_new_tokens within the model's context length, or whose images are
    refused. skip: they are left out and counted; refuse: the run does not start. The lengths in a task with a known
    number of questions are checked before the run. An endless task is checked as its questions are drawn, and so are
    images: refuse ends the run, skip continues with another question."""
    stop: list[Text]
    """Texts that end an answer, besides the model's own end-of-answer tokens. The answer ends with the token that
    completes the first of them; its text holds it. The client looks for them, because engines know only token ids, and
    samples then share no request (`coalesce`)."""
    temperature: Positive
    """Sampling temperature; the trainer divides its logits by the same number."""
    coalesce: bool
    """Send the siblings of a group as one request with n samples."""
    spread_siblings: Literal["auto"] | bool
    """Send each sibling of a group to the engine with the fewest requests, instead of all to the same engine, where
    they share the cache of their prompt (engine.router_policy=manual). auto: if answers are at least 4 times as long as
    their prompt, and there are several engines or replicas of attention. Siblings that are spread are not sent as one
    request."""
    cache_key: Literal["version", "group"]
    """Which requests may share a prefix cache. version: requests with the same weights, so that a later turn is
    prefilled again after a publish; group: the turns of a group, whatever their weights, as in one long answer under
    in_place."""
    adapter_per: Literal["completion", "episode"]
    """With weights.lora=versions, what keeps one adapter from its first to its last token. completion: later turns of
    an episode use the newest adapter, which prefills their history again; the staleness of the episode is that of its
    oldest turn. episode: all turns use the adapter of the first, also when the episode is tried again."""
    accept: str
    """Import path, module:function of (group) -> True, False, or the reason of a rejection. A rejected group is counted
    and replaced by a group of another prompt (dynamic sampling: asyncrl.rollout.hooks:has_signal)."""
    select: str
    """Import path, module:function of (ready groups, count) -> groups: selects the groups that complete a batch,
    besides those that must be trained now. There is only a choice if lead is below max_staleness."""
    oversample: Natural
    """Number of extra groups that run with each batch; the first to finish are trained, the others are aborted and
    discarded. Favours short answers."""
    over_age: Literal["wait", "drop"]
    """Handling of a group that is still running when it must be trained. wait: the batch waits for it; drop: the batch
    is completed without it if other groups are ready. Dropping favours short answers."""
    episode_timeout: Positive | None
    """Timeout of a whole episode in seconds, including its reward; unset: only the timeouts of its parts apply."""
    agent_timeout: Positive
    """Maximum seconds that an agent, or the environment it talks to, may spend between two requests to the model. When
    any limit is exceeded, the group is dropped with the limit's name as the reason, and replaced."""
    reward_timeout: Positive
    """Timeout of the reward of one answer, in seconds."""
    retries: Natural
    """Number of times that an episode is replayed, or its reward requested again, after an environment, a judge or
    another external component has failed; then its group is rejected with the reason."""
    max_failures: Count
    """End the run after this many consecutive failed groups: their agent, environment or reward raised an error or
    hung, or no engine answered."""
    max_rejections: Count
    """End the run after this many consecutive groups that rollout.accept rejected."""
    batch_timeout: Positive
    """Seconds that the trainer waits for a batch. After that the run ends and reports what the rollout side was
    doing."""

    @property
    def effective_lead(self) -> int:
        """Return the lead in effect."""
        return self.max_staleness if self.lead is None else self.lead
