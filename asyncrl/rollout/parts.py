"""The parts of the rollout side that play episodes, put together from the settings. They are in the rollout process, or
in several processes of their own that an extension starts."""

from __future__ import annotations

import json
import os
import resource
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.agents.template import ChatTemplate
from asyncrl.config import Config, cache_tokens, on_gpu
from asyncrl.engine.client import ClientSettings, GenerationClient
from asyncrl.engine.served import ServedWeights
from asyncrl.engine.stop_strings import StopStrings
from asyncrl.engine.stream import GenerateEndpoint, Headers, no_headers
from asyncrl.errors import ConfigError
from asyncrl.extension import PlayerHooks
from asyncrl.images import ImageReader
from asyncrl.import_hooks import imported_without
from asyncrl.lookup import active
from asyncrl.models.architectures import flat
from asyncrl.models.families import family_of
from asyncrl.network.addresses import Addresses
from asyncrl.rollout.agent import Agent, agents, close_all, figures, start_all
from asyncrl.rollout.episode import EpisodeTimeouts
from asyncrl.rollout.player import GroupPlayer, PlaysGroups, Sums, means
from asyncrl.rollout.prompts import Ahead
from asyncrl.rollout.reporters import FailureReporter, Warn
from asyncrl.tasks import Task
from asyncrl.tasks.scores import rewards
from asyncrl.user_code import load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OTHER_FILES = 256
"""Open files of a process besides the connections of its episodes."""


@dataclass(frozen=True)
class ModelParts:
    """What the rollout side needs of the model's folder."""

    hf: dict[str, Any]  # config.json
    template: ChatTemplate
    stop: list[int]  # ids of the tokens that end an answer
    images: ImageReader
    cache: int | None  # size of an engine's KV cache in tokens, if it is known before the engines run

    @classmethod
    def load(cls, config: Config, model: Path, gpus: int = 0) -> ModelParts:
        """Read the folder. `gpus` are those of the engines' machines."""
        tokenizer = load_tokenizer(model, config.model.chat_template)
        hf = flat(json.loads((model / "config.json").read_text()))
        return cls(
            hf,
            ChatTemplate(tokenizer, config.model.chat_template_kwargs),
            stop_tokens(model, tokenizer),
            image_reader(config, model, hf),
            cache_tokens(config.engine, gpu=on_gpu(config.engine, gpus)),
        )


def load_tokenizer(model: Path, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, with another chat template if one is given. Raises ConfigError if it has
    none."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that torch is missing
    with imported_without("torch", "transformers"):  # importing torch takes 1.7 CPU seconds and 250 MB
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).expanduser().read_text()
    if tokenizer.chat_template is None:
        raise ConfigError(
            "model.chat_template", None, f"The tokenizer in {model} has no chat template: set the path of a jinja file."
        )
    return tokenizer


def stop_tokens(model: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that end an answer: those of the generation config and the tokenizer's own."""
    file = model / "generation_config.json"
    ends = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    ids = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}
    return sorted(token for token in ids if token is not None)


def image_reader(config: Config, model: Path, hf: dict[str, Any]) -> ImageReader:
    """Return how a model folder reads images. `hf` is its config.json. Raises ConfigError."""
    if (tower := family_of(hf).tower) is None:
        return ImageReader()
    reader: ImageReader = load(tower.reader, "model.path")(config, model, hf)
    return reader


class PlaysEpisodes(Protocol):
    """What plays all episodes of a run: parts of this process, or what an extension has for it."""

    @property
    def client(self) -> Any:
        """The client of the engines, as everything else in this process sees it (engine/client.py)."""

    @property
    def groups(self) -> PlaysGroups:
        """What plays groups, and the questions of evaluations."""

    @property
    def ahead(self) -> Ahead:
        """What renders questions before they are drawn."""

    async def serve(self) -> None:
        """Do what has to be done while the run goes on, until cancelled."""

    async def start(self) -> None:
        """Wait until episodes can be played. The engines can answer."""

    def take_played(self) -> dict[str, float]:
        """Return the figures since the last call, under their names in metrics.jsonl."""

    async def close(self) -> None:
        """Close everything."""


@dataclass(frozen=True)
class PlayingParts:
    """Everything that plays episodes in this process."""

    client: GenerationClient
    agents: dict[str, Agent]
    rewards: dict[str, Any]
    groups: GroupPlayer
    start_timeout: float
    warn: Warn
    hooks: Sequence[PlayerHooks] = ()
    ahead: Ahead = field(default_factory=Ahead)

    @classmethod
    def build(
        cls,
        config: Config,
        addresses: Addresses,
        model: ModelParts,
        tasks: dict[str, Task],
        warn: Warn,
        requests: str = "",
        processes: int = 1,
    ) -> PlayingParts:
        """Build all of them. Nothing is started. `warn` receives warnings, with tracebacks where there are any;
        `requests` begins the names of requests to engines; `processes` share the episodes."""
        allow_files(config, warn, processes)
        rollout = config.rollout
        hooks = [one.player(config, addresses) for one in active(config).values()]
        client = _client(config, addresses, model, requests, hooks)
        playing, scores = agents(config, tasks, warn), rewards(config, tasks)
        timeouts = EpisodeTimeouts(rollout.agent_timeout, rollout.reward_timeout, rollout.episode_timeout)
        groups = GroupPlayer(
            playing,
            scores,
            model.template,
            timeouts,
            FailureReporter(warn),
            retries=rollout.retries,
            hooks=hooks,
            accept=load(rollout.accept, "rollout.accept"),
        )
        return cls(client, playing, scores, groups, config.engine.start_timeout, warn, hooks)

    async def serve(self) -> None:
        """Do nothing: episodes run in the worker's tasks."""

    async def start(self) -> None:
        """Start the extensions, then the agents."""
        for hooks in self.hooks:
            await hooks.start(self.start_timeout, self.warn)
        await start_all(self.agents.values())

    def take_sums(self) -> Sums:
        """Return what was counted since the last call."""
        return {**dict(ChainMap(*(one.take_sums() for one in self.hooks))), **self.groups.take_sums()}

    def proxies(self) -> dict[str, float]:
        """Return the counters of agents that work through a proxy."""
        return figures(self.agents.values())

    def take_played(self) -> dict[str, float]:
        """Return the figures since the last call, under their names in metrics.jsonl."""
        return {**means(self.take_sums()), **self.proxies()}

    async def close(self) -> None:
        """Close everything."""
        await close_all([*self.agents.values(), *self.rewards.values()], self.warn)
        await close_all([*self.hooks, self.client], self.warn)


def allow_files(config: Config, warn: Warn, processes: int = 1) -> None:
    """Raise this process's limit of open files as far as it goes. If it is too low for the connections of the episodes
    that may run at once, raises ConfigError, or warns where rollout.max_running_groups=auto may stay below it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rollout, size = config.rollout, max(map(config.group_size, config.mixture))
    admitted = (rollout.effective_lead + 1) * (rollout.batch_groups + rollout.oversample)
    auto = rollout.max_running_groups == "auto"
    groups = admitted if auto else min(admitted, int(rollout.max_running_groups or admitted))
    wanted = -(-groups // processes) * size + OTHER_FILES
    if most == resource.RLIM_INFINITY or wanted <= most:
        return
    text = (
        f"{groups} groups of {size} need up to {wanted} open files in each of {processes} processes, but "
        f"the limit is {most}"
    )
    remedy = "raise the limit (ulimit -Hn), or let more processes play"
    if not auto:
        raise ConfigError("rollout.max_running_groups", rollout.max_running_groups, f"{text}: lower it, {remedy}.")
    warn(f"{text}: requests fail if rollout.max_running_groups=auto lets that many run; set a number, {remedy}")


def _client(
    config: Config, addresses: Addresses, model: ModelParts, requests: str, hooks: Sequence[PlayerHooks] = ()
) -> GenerationClient:
    context = int(config.engine.server_args.get("context_length") or model.hf["max_position_embeddings"])
    replicas = config.engine.data_parallel
    several = (len(addresses.engines) + len(addresses.attached)) * replicas > 1
    settings = ClientSettings(
        run=addresses.run_id,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        stop_token_ids=model.stop,
        retry_timeout=config.engine.retry_timeout,
        coalesce=config.rollout.coalesce,
        spread=config.rollout.spread_siblings if several else False,
        cache_key=config.rollout.cache_key,
        pause_mode=config.weights.pause_mode,
        fields={name: value for one in hooks for name, value in one.fields(config).items()},
        further={name: value for one in hooks for name, value in one.sampling(config).items()},
        hooks=hooks,
        replicas=replicas,
        seed=config.run.seed if config.deterministic else None,
        context=min(context, model.cache - config.engine.draft_room if model.cache else context),
        vocabulary=int(model.hf["vocab_size"]),
        images=model.images,
        requests=requests,
        stop=StopStrings(config.rollout.stop, model.template.spell),
    )
    reads = {name: kind for one in hooks for name, kind in one.reads.items()}
    http = GenerateEndpoint(addresses.router, addresses.access, config.engine.request_timeout, reads=reads)
    return GenerationClient(http, settings, headers_of(config, addresses, hooks), served_by(config, addresses))


def served_by(config: Config, addresses: Addresses) -> ServedWeights:
    """Return what answers requests: the choice of the first extension that has one."""
    chosen = (one.served(config, addresses) for one in active(config).values())
    return next((served for served in chosen if served), ServedWeights())


def headers_of(config: Config, addresses: Addresses, hooks: Sequence[PlayerHooks]) -> Headers:
    """Return what makes the headers that extensions add to requests."""
    makers = [headers for one in hooks if (headers := one.headers(config, addresses))]
    if len(makers) < 2:
        return makers[0] if makers else no_headers
    return lambda *request: {name: value for one in makers for name, value in one(*request).items()}
