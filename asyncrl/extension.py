"""The seam between the core and its extensions.

An extension is a class that the core never imports by name. It is found in a folder of asyncrl/extensions, by an
installed package's entry point of the group `asyncrl.extensions`, or by its import path in the setting `extensions`.
Its settings are the section of the configuration that has its name. Every process that it takes part in asks it for its
hooks there, whose methods do nothing unless an extension overrides them. What fails in a hook fails as the core's own
code would.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from asyncrl.errors import ConfigError
from asyncrl.settings import Section
from asyncrl.user_code import load

if TYPE_CHECKING:
    from starlette.routing import Route
    from torch import Tensor

    from asyncrl.algo.table import LossRows, TokenTable
    from asyncrl.config import AuxiliaryModelConfig, Config
    from asyncrl.engine.stream import Headers
    from asyncrl.launch.checks.findings import Finding
    from asyncrl.launch.cluster import Cluster
    from asyncrl.launch.placement import Placement, Seat
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.launch.prepare import Preparation
    from asyncrl.network.addresses import Addresses
    from asyncrl.observability.timeline import Record
    from asyncrl.rollout.limiter import ConcurrencyLimiter
    from asyncrl.rollout.parts import PlaysEpisodes
    from asyncrl.rollout.reporters import RolloutRun
    from asyncrl.rollout.server import RolloutServer
    from asyncrl.schema import Batch, Group, Prompt, Trajectory
    from asyncrl.trainer.batch_source import BatchSource
    from asyncrl.trainer.microbatches import Groups
    from asyncrl.trainer.policy import Policy
    from asyncrl.weights.checksum import SentWeights

T = TypeVar("T")
GROUP = "asyncrl.extensions"
NOBODY = "No extension that is installed does this: leave it unset."
NAMED = "ASYNCRL_EXTENSIONS"
"""Environment variable with extensions that the setting names, for processes that read no configuration."""


class Planned(Protocol):
    """The settings that were chosen for a run with cluster.plan."""

    @property
    def config(self) -> Config:
        """The run with these settings."""
        ...

    def lines(self) -> list[str]:
        """Return what the console and --check say of them."""
        ...

    def write(self, run_dir: Path) -> None:
        """Keep them in the run folder, where a resumed run finds them."""
        ...


class Pilot(Protocol):
    """What changes a run in progress, with cluster.elastic."""

    def each_poll(self) -> None:
        """Look at the run, and act. Must not block: the launcher renews the run's lease between two calls."""
        ...

    def end(self) -> None:
        """Undo what must not outlive the run."""
        ...


class StepListener(Protocol):
    """Receives the steps of a run, in the first trainer rank or in what takes batches without training."""

    def write(self, record: Mapping[str, Any], batch: Batch) -> None:
        """Take the record of a step, as in metrics.jsonl, and its batch. Must not block."""
        ...

    def close(self) -> bool:
        """Send what is left. Return whether nothing of it runs any longer; otherwise the process ends at once."""
        ...


@dataclass(frozen=True)
class OfferedTransport:
    """A transport of new weights (weights/transport.py)."""

    path: str
    """Import path of its class, which is created with keyword arguments: fleet, folder, stage, ranks (of an engine),
    host and gpu, as in weights/publish.py."""
    by_file: bool = False
    """Whether it writes files to weights.folder before the pause."""
    loader: str | None = None
    """SGLang's custom_weight_loader that loads what it sends, as module.function."""


@dataclass(frozen=True)
class OfferedBase:
    """A format of the frozen weights below adapters."""

    path: str
    """Import path of its class (trainer/lora.py, BaseFormat), which is created with the name."""
    bytes: float
    """Bytes of an element, with its share of what it needs beside."""


@dataclass(frozen=True)
class OfferedMode:
    """A value of the setting `mode` beside those of the core."""

    trains: bool = False
    """Whether trainers run without engines, on the batches of TrainerHooks.batches. Otherwise engines run without
    trainers."""
    program: str = ""
    """Module that is run as python -m MODULE RUN_DIR in place of the rollout process, and asks the engines; the run
    ends with it. Empty: the run ends with a process of LaunchHooks.processes, which takes the rollout process's
    batches."""
    continues: bool = False
    """Whether a stopped run goes on with resume=auto from what its program wrote, without a checkpoint."""


class LaunchHooks:
    """What an extension does in the launcher of a run."""

    def plan(self, preparation: Preparation) -> Planned | None:
        """Choose the settings of a run with cluster.plan; None if this extension plans nothing. Raises ConfigError."""
        return None

    def pilot(
        self, config: Config, run_dir: Path, addresses: Addresses, placement: Placement, cluster: Cluster
    ) -> Pilot | None:
        """Return the pilot of a run with cluster.elastic; None if this extension has none."""
        return None

    def check_model(self, config: Config, model: dict[str, Any], gpus: int) -> Iterator[ConfigError]:
        """Yield every problem of this extension with the model. `model` holds the fields of its config.json and of
        Megatron's arguments, `gpus` is the number of each machine."""
        return iter(())

    def layers_held(self, config: Config) -> int | None:
        """Return the number of layers whose activations are on the device of a trainer at a time; None for all."""
        return None

    def check_gpu(self, config: Config, gpu: str) -> Iterator[ConfigError]:
        """Yield every problem with an engine on a GPU of this name."""
        return iter(())

    def ports(self) -> int:
        """Return the number of ports that it needs on the rollout process's machine."""
        return 0

    def shared(self, ports: Sequence[Seat]) -> dict[str, str]:
        """Return what its processes find in Addresses.extensions under its name; `ports` are those that it needs."""
        return {}

    def changed(self, spec: ProcessSpec, addresses: Addresses, run_dir: Path) -> ProcessSpec:
        """Return a process of the run as it shall be started, with further arguments or environment."""
        return spec

    def processes(
        self, config: Config, addresses: Addresses, placement: Placement, run_dir: Path
    ) -> Sequence[ProcessSpec]:
        """Return further processes of the run."""
        return ()

    def refuse(self, prepared: Preparation) -> None:
        """Raise ConfigError for a run that must not start. The preflight, at each start and with --check, reports it;
        without one (cluster.preflight=false) it ends the start."""

    def preflight(self, prepared: Preparation) -> Iterator[Finding]:
        """Check more of a run before it starts, after the core's own checks except that of the network between
        machines: at each start, and with --check. `prepared.weights` has the tensors of the model folders that are
        complete."""
        return iter(())

    def notes(self, prepared: Preparation) -> list[str]:
        """Return lines for the console at the start. May refuse the run, too."""
        return []

    def begins(self, prepared: Preparation) -> None:
        """Write to the run folder what the run or its summary needs, before its processes start."""

    def offers(self, config: Config, run_dir: Path) -> Iterator[tuple[str, str]]:
        """Yield what a finished run offers, in a few words each, and the command or file with which to see it."""
        return iter(())

    def sweep(self) -> None:
        """Remove what killed runs have left on this machine: called at the end of every run and before others start.
        It has the default settings, since the run is not known. An extension that has to be named is not called."""


class EngineHooks:
    """What an extension does to the engines of the policy, and to those of teacher and judge."""

    def arguments(self, config: Config) -> dict[str, Any]:
        """Return further arguments of SGLang for the policy's engines, by name. Called in the launcher."""
        return {}

    def needs_weights(self, config: Config) -> bool:
        """Return whether the engines hold other weights than the model folder before the first step, so that they need
        those of the trainers first."""
        return False

    def linear_bytes(self, config: Config) -> int | None:
        """Return the bytes of an element of the layers' linear maps; None for those of engine.dtype."""
        return None

    def install(self, argv: Sequence[str]) -> None:
        """Patch SGLang's modules when they are imported (import_hooks.after_import). Called in every process of an
        engine, before it imports sglang. `argv` is the command line, all that the process knows of the run."""


class TrainerHooks:
    """What an extension does on a trainer rank. Every rank calls the same methods in the same order."""

    def sent(self, weights: SentWeights) -> SentWeights:
        """Return what the publisher sends to the engines in place of these weights."""
        return weights

    def batches(self) -> tuple[BatchSource, int | None] | None:
        """Return the batches of a run in a mode of this extension that trains without engines, and the version after
        the last, if there is one; None in other modes."""
        return None

    def before_update(self, batch: Batch) -> Sequence[Group]:
        """Return groups that are trained beside those of the batch, in the same steps."""
        return ()

    scored: bool = True
    """Whether engines have given the log-probabilities of the tokens in `batches`, with which the trainer's are
    compared."""

    signal: bool = False
    """Whether `credited` or `loss` train groups whose rewards give no gradient."""

    def columns(self, groups: Groups, table: TokenTable, version: int) -> TokenTable:
        """Return the table of a batch that makes this version with further columns, for `credited`, `loss` and the
        reference of the KL."""
        return table

    def credited(self, logprobs: Tensor, rows: LossRows) -> LossRows:
        """Return the rows of a micro-batch with other advantages. `logprobs` [T] are the policy's, with gradient."""
        return rows

    def loss(self, losses: Tensor, logprobs: Tensor, rows: LossRows) -> Tensor:
        """Return the losses of the tokens of a micro-batch, [T], with a term of its own."""
        return losses

    def distances(self, logprobs: Tensor, table: TokenTable, ran: Tensor) -> dict[str, float]:
        """Return metrics of the policy that a batch's steps started from. `logprobs` [N] are its own, and `ran` tells
        which tokens were run."""
        return {}

    def after_update(self, version: int) -> dict[str, float]:
        """Act on the weights after the optimizer steps that make this version. Return metrics of the step."""
        return {}

    def state(self) -> bytes | None:
        """Return what a checkpoint keeps; None if nothing has to be kept. Only that of rank 0 is written."""
        return None

    def restore(self, state: bytes) -> None:
        """Go on from the state of a checkpoint. Raises ValueError if it cannot be read."""


class RolloutHooks:
    """What an extension does in the rollout process. Its methods must not block."""

    def start(self, run: RolloutRun) -> None:
        """Begin, before anything else is called."""

    def plays(self, run: RolloutRun) -> PlaysEpisodes | None:
        """Return what plays all episodes, instead of this process; None to leave it to others."""
        return None

    def limits(self, run: RolloutRun) -> ConcurrencyLimiter | None:
        """Return what limits how many groups run at once with rollout.max_running_groups=auto; None to leave it to
        others. Without any, as many run as admission allows."""
        return None

    def routes(self, server: RolloutServer, status: Callable[[], Mapping[str, Any]]) -> Sequence[Route]:
        """Return further routes of the rollout process's server. `server.guarded` lets only those who have a key call
        an endpoint; `status` returns the content of status.json."""
        return ()

    def group(self, group: Group) -> None:
        """Listen to every group that was played to its end, accepted or rejected, before it is recorded."""

    def record(self, record: Record) -> None:
        """Listen to every group, batch and publish that has ended (observability/timeline.py)."""

    def figures(self) -> dict[str, float]:
        """Return metrics since the previous batch."""
        return {}

    async def close(self) -> None:
        """Release what is held, at the end of the run."""


class PlayerHooks:
    """What an extension does in each process that plays episodes: the rollout process, or those of an extension."""

    def headers(self, config: Config, addresses: Addresses) -> Headers | None:
        """Return what makes headers of every request to an engine; None if no request needs any."""
        return None

    def sampling(self, config: Config) -> Mapping[str, Any]:
        """Return further sampling parameters of every request of a mode of this extension, which trains nothing."""
        return {}

    async def start(self, timeout: float) -> None:
        """Wait for what episodes need, for this many seconds. Raises DeadlineExceeded."""

    async def annotate(self, prompt: Prompt, trajectory: Trajectory, group: str) -> list[dict[str, Any]]:
        """Return fields that change in each turn of a training episode, while its reward is computed. Raises
        EpisodeFailed."""
        return []

    def take_sums(self) -> dict[str, tuple[float, float]]:
        """Return what was counted since the last call (rollout/player.py, Sums)."""
        return {}

    async def close(self) -> None:
        """Release what the episodes shared, after the last one."""


class Extension:
    """Base class of an extension. Every method is optional."""

    Settings: ClassVar[type[Section]] = Section
    """The settings in the section of its name; each has a default with which the extension does nothing harmful."""
    tasks: ClassVar[Mapping[str, str]] = {}
    """Import paths of task classes by their name in task.kind; each is created with its section (TaskConfig)."""
    rewards: ClassVar[Mapping[str, str]] = {}
    """Import paths of rewards by their name in task.reward (rewards/build.py)."""
    advantages: ClassVar[Mapping[str, str]] = {}
    """Import paths of advantage estimators by their name in algo.advantage (algo/registry.py)."""
    transports: ClassVar[Mapping[str, OfferedTransport]] = {}
    """Transports of new weights by their name in weights.transport."""
    bases: ClassVar[Mapping[str, OfferedBase]] = {}
    """Formats of the frozen base by their name in trainer.lora.base."""
    clusters: ClassVar[Mapping[str, str]] = {}
    """Import paths of subclasses of launch.cluster.Cluster by their name in cluster.launcher."""
    modes: ClassVar[Mapping[str, OfferedMode]] = {}
    """Further values of the setting `mode`, by name."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """Fields that it adds to metrics.jsonl, each with its meaning (metrics/fields.py). `<word>` stands for any text."""
    summary_metrics: ClassVar[Mapping[str, str]] = {}
    """Fields that it adds to summary.json."""
    trains: ClassVar[bool] = True
    """Whether its settings can change what is trained. Those that cannot are not taken from a recorded run by a replay,
    and may differ when a run is resumed."""
    wrappers: ClassVar[Mapping[str, str]] = {}
    """Import paths of what wraps the task of a section (TaskConfig) that sets a field, by that field; called with the
    task and the section."""
    hosting: ClassVar[str] = ""
    """Import path of an EnvironmentHosts (envs/pool.py): processes that hold environments which block or may hang."""
    question: ClassVar[str] = ""
    """Import path of a function of a question and the chat template, which returns the question as the model is shown
    it."""

    models: ClassVar[Mapping[str, type[AuxiliaryModelConfig]]] = {}
    """Further sections by name: models that are not trained, whose engines the launcher starts beside the policy's."""
    references: ClassVar[Sequence[str]] = ()
    """Columns of the token table that it fills and that algo.kl.reference may name."""
    platform: ClassVar[str] = ""
    """Import path of a Platform for machines without GPUs (platforms.py), of an extension that need not be named."""

    serves: ClassVar[Sequence[str]] = ()
    """Settings of the core that are refused without an extension that names them here."""

    def __init__(self, settings: Any) -> None:
        """Create the extension in one process, with its validated settings."""
        self.settings = settings

    @property
    def signal(self) -> bool:
        """Return whether it trains without rewards, so that algo.advantage=none makes sense."""
        return False

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Yield every problem of this extension with the settings."""
        return iter(())

    def launch(self) -> LaunchHooks:
        """Return the hooks in the launcher."""
        return LaunchHooks()

    def engine(self) -> EngineHooks:
        """Return the hooks of engines. In an engine's process, the extension has its default settings."""
        return EngineHooks()

    def trainer(self, policy: Policy) -> TrainerHooks:
        """Return the hooks on a trainer rank, whose networks hold the weights of the model folder. Blocks around a
        network's micro-batches are added to its `around_forward`."""
        return TrainerHooks()

    def steps(
        self, config: Config, run_dir: Path, model: Path, warn: Callable[[str, int], None], first: int | None
    ) -> StepListener | None:
        """Return what receives the steps of a run; None if nothing does. `model` is the folder with the tokenizer,
        `warn` takes a text and a step, and `first` is the step with which a resumed run goes on."""
        return None

    def summary(self, config: Config, run_dir: Path, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of summary.json. `figures` are those of the core. Called in the first trainer rank."""
        return {}

    def rollout(self) -> RolloutHooks:
        """Return the hooks in the rollout process."""
        return RolloutHooks()

    def player(self, config: Config, addresses: Addresses) -> PlayerHooks:
        """Return the hooks in a process that plays episodes."""
        return PlayerHooks()


@cache
def shipped() -> dict[str, str]:
    """Return the import paths of the extensions in asyncrl/extensions, by the name of their folder."""
    folders = sorted(file.parent.name for file in (Path(__file__).parent / "extensions").glob("*/extension.py"))
    return {name: f"{__package__}.extensions.{name}.extension:Own" for name in folders}


@cache
def installed() -> dict[str, str]:
    """Return the import paths of the extensions of installed packages, by name."""
    return {found.name: found.value for found in entry_points(group=GROUP)}


def classes(named: Mapping[str, str]) -> dict[str, type[Extension]]:
    """Return all extensions by name: those of asyncrl and of installed packages, and those that the setting names.
    Raises ConfigError."""
    found = {}
    for name, path in {**shipped(), **installed(), **named}.items():
        found[name] = kind = load(path, f"extensions.{name}")
        if not (isinstance(kind, type) and issubclass(kind, Extension)):
            remedy = "Must be a subclass of asyncrl.extension.Extension."
            raise ConfigError(f"extensions.{name}", path, remedy)
    return found


def sections(kinds: Mapping[str, type[Extension]]) -> dict[str, type[Section]]:
    """Return the sections of the configuration that are those of extensions, by name."""
    found = dict[str, type[Section]]()
    for name, kind in kinds.items():
        found |= {name: kind.Settings} if kind.Settings is not Section else {}
        found |= kind.models
    return found


def active(config: Config) -> dict[str, Extension]:
    """Return a new instance of every extension, by name."""
    settings = config.model_extra or {}
    return {name: kind(settings.get(name, Section())) for name, kind in classes(config.extensions).items()}


def engine_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments that all extensions add to those of the policy's engines."""
    return {name: value for one in active(config).values() for name, value in one.engine().arguments(config).items()}


def needs_weights(config: Config) -> bool:
    """Return whether the engines of some extension need the trainers' weights before the first step."""
    return any(one.engine().needs_weights(config) for one in active(config).values())


def linear_bytes(config: Config) -> int | None:
    """Return the bytes of an element of the linear maps in the engines; None for those of engine.dtype."""
    found = (one.engine().linear_bytes(config) for one in active(config).values())
    return next((size for size in found if size is not None), None)


def layers_held(config: Config) -> int | None:
    """Return the number of layers whose activations are on the device of a trainer at a time; None for all."""
    found = (one.launch().layers_held(config) for one in active(config).values())
    return next((layers for layers in found if layers is not None), None)


def sent(hooks: Iterable[TrainerHooks], weights: SentWeights) -> SentWeights:
    """Return what the publisher sends in place of these weights: what each extension makes of the one before."""
    for one in hooks:
        weights = one.sent(weights)
    return weights


def step_listeners(
    config: Config, run_dir: Path, model: Path, warn: Callable[[str, int], None], first: int | None = None
) -> list[StepListener]:
    """Return what receives the steps of a run of all extensions."""
    found = (one.steps(config, run_dir, model, warn, first) for one in active(config).values())
    return [listener for listener in found if listener is not None]


def engine_environment(config: Config) -> dict[str, str]:
    """Return the environment in which an engine's process finds those extensions with hooks that the setting names."""
    kinds = classes(config.extensions)
    named = {name: path for name, path in config.extensions.items() if kinds[name].engine is not Extension.engine}
    return {NAMED: json.dumps(named)} if named else {}


def install_in_engine(argv: Sequence[str]) -> None:
    """Install the hooks of all extensions in an engine's process. Raises ConfigError."""
    for kind in classes(json.loads(os.environ.get(NAMED, "{}"))).values():
        kind(kind.Settings()).engine().install(argv)


def first(config: Config, field: str, ask: Callable[[LaunchHooks], T | None]) -> T:
    """Return what the first extension answers in the launcher. Raises ConfigError for the field that needs an answer if
    none has one."""
    for one in active(config).values():
        if (answer := ask(one.launch())) is not None:
            return answer
    value: Any = reduce(getattr, field.split("."), config)
    raise ConfigError(field, value, NOBODY)


def sweep() -> None:
    """Remove what killed runs have left on this machine of the extensions that need not be named."""
    for kind in classes({}).values():
        kind(kind.Settings()).launch().sweep()


def shared(config: Config, placement: Placement) -> dict[str, dict[str, str]]:
    """Return what the processes of each extension share: Addresses.extensions."""
    every = {name: one.launch().shared(placement.ports.get(name, [])) for name, one in active(config).items()}
    return {name: told for name, told in every.items() if told}


def offered(table: str, named: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what extensions offer in a table of their classes (tasks, rewards, advantages, bases, ...), by
    name: those that need not be named, and with `named` also those that the setting names."""
    return {name: one for kind in classes(named or {}).values() for name, one in getattr(kind, table).items()}


@cache
def loaded(attribute: str) -> list[Any]:
    """Return the objects at the import paths that extensions offer in an attribute of their classes (question,
    hosting), of those that need not be named."""
    paths = (getattr(kind, attribute) for kind in classes({}).values())
    return [load(path, "extensions") for path in paths if path]


def apart(named: Mapping[str, str]) -> set[str]:
    """Return the names of the extensions whose settings cannot change what is trained."""
    return {name for name, kind in classes(named).items() if not kind.trains}


def wrapped(task: T, section: Any, field: str) -> T:
    """Return the task of a section that sets this field as an extension wraps it. Raises ConfigError if none does."""
    for kind in classes({}).values():
        if field in kind.wrappers:
            made: T = load(kind.wrappers[field], f"task.{field}")(task, section)
            return made
    raise ConfigError(f"task.{field}", getattr(section, field), NOBODY)
