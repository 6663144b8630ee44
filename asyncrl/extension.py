"""The seam between the core and its extensions.

An extension is a class that the core never imports by name; lookup.py finds it. Its settings are the section of the
configuration that has its name. Every process that it takes part in asks it for its hooks there, whose methods do
nothing unless an extension overrides them. What fails in a hook fails as the core's own code would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from asyncrl.settings import Section

if TYPE_CHECKING:
    from pathlib import Path

    import httpx
    from rich.console import Console
    from starlette.routing import Route
    from torch import Tensor

    from asyncrl.algo.table import LossRows, TokenTable
    from asyncrl.config import AuxiliaryModelConfig, Config
    from asyncrl.engine.served import ServedWeights
    from asyncrl.engine.session import Request
    from asyncrl.engine.stream import Headers
    from asyncrl.errors import ConfigError
    from asyncrl.launch.checks.findings import Finding
    from asyncrl.launch.cluster import Cluster
    from asyncrl.launch.placement import Placement, Seat
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.launch.prepare import Preparation
    from asyncrl.network.addresses import Addresses
    from asyncrl.observability.timeline import Record, RecordListener
    from asyncrl.rollout.events import Event
    from asyncrl.rollout.groups import ConcurrencyLimiter
    from asyncrl.rollout.parts import PlaysEpisodes
    from asyncrl.rollout.reporters import RolloutRun, Warn
    from asyncrl.rollout.server import RolloutServer
    from asyncrl.schema import Batch, Completion, Group, Prompt, Trajectory
    from asyncrl.trainer.batch_source import BatchSource
    from asyncrl.trainer.microbatches import Groups
    from asyncrl.trainer.policy import Policy
    from asyncrl.trainer.publishers import Publishing
    from asyncrl.trainer.transformation import Transformation
    from asyncrl.weights.checksum import SentWeights
    from asyncrl.weights.publish import StagedPublisher


class Pilot(Protocol):
    """What changes a run in progress."""

    def each_poll(self) -> Sequence[str]:
        """Look at the run, and act. Return lines for the console. Must not block: the launcher renews the run's lease
        between two calls."""
        ...

    def end(self) -> None:
        """Undo what must not outlive the run."""
        ...


class Display(Protocol):
    """Draws a run on a terminal, below what the console prints of it (metrics/console.py)."""

    def step(self, record: dict[str, Any], left: float, samples_per_second: float) -> None:
        """Take a step's record, the seconds that are left, and the throughput."""
        ...

    def evaluated(self, line: dict[str, Any]) -> None:
        """Take a line of eval.jsonl."""
        ...

    def warned(self) -> None:
        """Count a warning, whose text is printed."""
        ...

    def draw(self) -> None:
        """Redraw. Called at every poll of the launcher."""
        ...

    def close(self) -> None:
        """Stop redrawing."""
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
    """What an extension does in the launcher of a run. The methods stand in the order of their calls. For `plan`,
    `resolved`, and from `refuse` to `begins`, one object is asked, by launch/prepare.py; the others may be called on a
    new one each time."""

    plans: bool = False
    """Whether `plan` changes the settings, so that a job has to start before its processes can be placed."""

    def plan(self, preparation: Preparation) -> Config:
        """Return the settings of the run, or others that are chosen by its machines. Called before machines are
        assigned, at each start and with --check, except for a job that has not been submitted. Raises ConfigError."""
        return preparation.config

    def ports(self) -> int:
        """Return the number of ports that it needs on the rollout process's machine. Called when processes are assigned
        to machines (launch/placement.py)."""
        return 0

    def check_gpu(self, config: Config, gpu: str) -> Iterator[ConfigError]:
        """Yield every problem with an engine on a GPU of this name. Called once the machines of engines are known, for
        each kind of GPU, and for engines that join (launch/checks/machines.py)."""
        return iter(())

    def model(self, config: Config) -> str | None:
        """Return the model with the config and tokenizer of model.path, if that is something of which `begins` makes a
        model folder; None otherwise. Called when the folder is looked for (launch/prepare.py)."""
        return None

    def check_model(self, config: Config, model: dict[str, Any], gpus: int) -> Iterator[ConfigError]:
        """Yield every problem of this extension with the model. `model` holds the fields of its config.json and of
        Megatron's arguments, `gpus` is the number of each machine. Called once the model's folder has been found
        (launch/checks/model.py)."""
        return iter(())

    def memory(self, config: Config) -> Mapping[str, int]:
        """Return what it changes in the memory of a run: `layers_held`, the number of layers whose activations are on
        the device of a trainer at a time, `states_away`, 1 if the states of optimizers are there during a step alone,
        `linear_bytes`, the bytes of an element of the layers' linear maps in an engine, and `tower_trained`, 1 if a
        tower beside the text model is trained. Called by whoever estimates memory."""
        return {}

    def resolved(self, config: Config, model: dict[str, Any], gpus: int) -> Config:
        """Return the settings with a choice for those of this extension that are auto. `model` is the content of its
        config.json, `gpus` the number of each machine. Called once the model is found, before number formats are chosen
        (launch/prepare.py)."""
        return config

    def follows(self, config: Config) -> Path | None:
        """Return the folder of an earlier run whose number formats and layers this one takes where its own are auto.
        The console names the settings that differ. Called more than once."""
        return None

    def formats(self, prepared: Preparation) -> Mapping[str, tuple[str, str]]:
        """Return the number formats that parts of the run have already, each with the reason, for those whose dtype is
        auto, by section. Called when number formats are chosen (launch/prepare.py). Raises ConfigError."""
        return {}

    def refuse(self, prepared: Preparation) -> None:
        """Raise ConfigError for a run that must not start. Called after the core's own checks: the preflight, at each
        start and with --check, reports it; without one (cluster.preflight=false) it ends the start."""

    def preflight(self, prepared: Preparation) -> Iterator[Finding]:
        """Check more of a run before it starts. Called by the preflight (launch/checks/run.py), after the core's own
        checks and `refuse`: at each start, and with --check. `prepared.weights` has the tensors of the model folders
        that are complete."""
        return iter(())

    def examine(self, prepared: Preparation) -> Iterator[Finding]:
        """Check what takes too long before each start. Called with --check alone, after the preflight
        (launch/run.py)."""
        return iter(())

    def notes(self, prepared: Preparation) -> list[str]:
        """Return lines for the console. Called at each start, after all checks. May refuse the run, too."""
        return []

    def begins(self, prepared: Preparation) -> None:
        """Write to the run folder what the run or its summary needs. Called once the folder is there, before its
        processes start."""

    def shared(self, ports: Sequence[Seat]) -> dict[str, str]:
        """Return what its processes find in Addresses.extensions under its name; `ports` are those that it needs.
        Called before `processes` (launch/run.py)."""
        return {}

    def processes(
        self, config: Config, addresses: Addresses, placement: Placement, run_dir: Path
    ) -> Sequence[ProcessSpec]:
        """Return further processes of the run. Called when all processes are planned (launch/plan.py)."""
        return ()

    def changed(self, config: Config, spec: ProcessSpec, addresses: Addresses, run_dir: Path) -> ProcessSpec:
        """Return a process as it shall be started, with further arguments or environment. Called for each process of
        the run, those of extensions and engines that join included (launch/plan.py)."""
        return spec

    def pilot(
        self, config: Config, run_dir: Path, addresses: Addresses, placement: Placement, cluster: Cluster
    ) -> Pilot | None:
        """Return what changes this run while it works; None if nothing does. Called right before the processes start
        (launch/run.py)."""
        return None

    def display(self, config: Config, run_dir: Path, out: Console) -> Display | None:
        """Return what draws the run on this terminal, where the console prints no line for each step then; None to
        leave it to others. Called when the run begins (metrics/console.py)."""
        return None

    def offers(self, config: Config, run_dir: Path) -> Iterator[tuple[str, str]]:
        """Yield what a finished run offers, in a few words each, and the command or file with which to see it. Called
        when the console sums the run up (metrics/console.py)."""
        return iter(())

    def sweep(self) -> None:
        """Remove what killed runs have left on this machine. Called at the end of every run and before others start, by
        the launcher and on each machine of a job (launch/leftovers.py). It has the default settings, since the run is
        not known. An extension that has to be named is not called."""


class EngineHooks:
    """What an extension does to the engines of the policy, and to those of teacher and judge."""

    def arguments(self, config: Config, *, gpu: bool) -> dict[str, Any]:
        """Return further arguments of SGLang for the policy's engines, by name; `gpu` says where they run. Called in
        the launcher, for the command line of each of them (launch/plan.py)."""
        return {}

    def keeps_versions(self, config: Config) -> bool:
        """Return whether the engines hold several versions at once, each of which is loaded without a pause and answers
        requests until it is unloaded (Extension.served). Called in each process of a run, which must all agree."""
        return False

    def needs_weights(self, config: Config) -> bool:
        """Return whether the engines hold other weights than the model folder before the first step, so that they need
        those of the trainers first. Called in each process of a run, which must all agree."""
        return False

    def install(self, argv: Sequence[str]) -> None:
        """Patch SGLang's modules when they are imported (import_hooks.after_import). Called in every process of an
        engine, before it imports sglang (engine/serve.py). `argv` is the command line, all that the process knows of
        the run."""


class TrainerHooks:
    """What an extension does on a trainer rank, where trainer/policy.py and its objective call it. Every rank calls the
    same methods in the same order."""

    scored: bool = True
    """Whether engines have given the log-probabilities of the tokens in `batches`, with which the trainer's are
    compared."""

    starts: bool = False
    """Whether it needs a pass over a batch with the weights that its optimizer steps start from, if they are
    several."""

    signal: bool = False
    """Whether `credited` or `loss` train groups whose rewards give no gradient."""

    def restore(self, state: bytes) -> None:
        """Go on from the state of a checkpoint. Called before the first batch of a run that resumes. Raises ValueError
        if it cannot be read."""

    def batches(self, client: Callable[[], BatchSource]) -> BatchSource | None:
        """Return the batches of a run in a mode of this extension that trains without engines; None in other modes.
        `client` returns the batches of a process of this extension that is a server in place of the rollout process.
        Called once, before the first batch."""
        return None

    def around_update(self, batch: Batch, run_dir: Path) -> AbstractContextManager[None]:
        """Return a block around the update of a batch, or of a part of one. The time of what it does itself does not
        count as training. Called with each of them (trainer/__main__.py)."""
        return nullcontext()

    def before_update(self, batch: Batch) -> Sequence[Group]:
        """Return groups that are trained beside those of the batch, in the same steps. Called with each batch."""
        return ()

    def samples(self, groups: Sequence[Group], samples: Groups, *, first: bool) -> Groups:
        """Return the samples of a batch with what the networks need beside tokens. Called with each batch, or each of
        its parts, of which one is the `first`."""
        return samples

    def passes(self, *, start: bool) -> AbstractContextManager[None]:
        """Return a block around passes of the policy, which is not the reference: those of its optimizer steps, and at
        the `start` that before them."""
        return nullcontext()

    def columns(self, groups: Groups, table: TokenTable, version: int) -> TokenTable:
        """Return the table of a batch that makes this version with further columns, for `credited`, `loss` and the
        reference of the KL. Called with each batch, before its advantages are computed."""
        return table

    def credited(self, logprobs: Tensor, rows: LossRows) -> LossRows:
        """Return the rows of a micro-batch with other advantages. Called after each forward pass, before the loss.
        `logprobs` [T] are the policy's, with gradient."""
        return rows

    def loss(self, losses: Tensor, logprobs: Tensor, rows: LossRows) -> Tensor:
        """Return the losses of the tokens of a micro-batch, [T], with a term of its own. Called after the core's loss
        and its KL."""
        return losses

    def distances(self, logprobs: Tensor, table: TokenTable, ran: Tensor) -> dict[str, float]:
        """Return metrics of the policy that a batch's steps started from. Called after the steps of a batch, if a token
        was run. `logprobs` [N] are its own, and `ran` tells which tokens were run."""
        return {}

    def after_update(self, version: int) -> dict[str, float]:
        """Act on the weights after the optimizer steps that make this version. Return metrics of the step. Called
        after each batch, before the weights are published."""
        return {}

    def sent(self, weights: SentWeights) -> SentWeights:
        """Return what the publisher sends to the engines in place of these weights, which may be those of another
        extension. Called once, when the publisher is built (trainer/publishers.py)."""
        return weights

    def publisher(self, publishing: Publishing) -> tuple[StagedPublisher, str] | None:
        """Return what publishes versions, and the reason for it, in place of the publisher of all weights; None to
        leave it to others. Called once, before the first batch (trainer/publishers.py)."""
        return None

    def state(self) -> bytes | None:
        """Return what a checkpoint keeps; None if nothing has to be kept. Called for each checkpoint. Only that of rank
        0 is written."""
        return None


class RolloutHooks:
    """What an extension does in the rollout process. Its methods must not block. The first four are called once, while
    the parts are built (rollout/build.py)."""

    def start(self, run: RolloutRun) -> None:
        """Begin, before anything else is called."""

    def plays(self, run: RolloutRun) -> PlaysEpisodes | None:
        """Return what plays all episodes, instead of this process; None to leave it to others."""
        return None

    def limits(self, run: RolloutRun) -> ConcurrencyLimiter | None:
        """Return what limits how many groups run at once with rollout.max_running_groups=auto; None to leave it to
        others. A run without any is refused. Called with that setting alone."""
        return None

    def routes(self, server: RolloutServer, status: Callable[[], Mapping[str, Any]]) -> Sequence[Route]:
        """Return further routes of the rollout process's server. `server.guarded` lets only those who have a key call
        an endpoint; `status` returns the content of status.json."""
        return ()

    def restore(self, state: bytes) -> None:
        """Go on from the state of a checkpoint, or of a rollout process that died. Called before the first prompt is
        drawn. Raises RecordError if it cannot be read."""

    def mixture(self, weights: Mapping[str, float], version: int) -> Mapping[str, float]:
        """Return the weights with which the task of the next prompt is drawn, by name, in place of these: those of the
        settings, or of another extension. Called for each prompt; the engines serve the version."""
        return weights

    def group(self, group: Group) -> None:
        """Listen to a group. Called for every one that was played to its end, accepted or rejected, before its
        event."""

    def event(self, event: Event) -> None:
        """Listen to what the buffer is told and decides (rollout/events.py). Called for each event, in their order."""

    def flush(self) -> None:
        """Wait until all events so far would survive the death of this process. Called in a thread, for each snapshot
        of the rollout process."""

    def record(self, record: Record) -> None:
        """Listen to a group, a batch, a publish or a phase of this process that has ended (observability/timeline.py).
        Called for each."""

    async def engines(self, http: httpx.AsyncClient, urls: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
        """Return what status.json shall say of these engines beside their load, by URL. Called whenever they were asked
        for their load, about once a second (engine/loads.py); `http` has the run's key."""
        return {}

    def status(self) -> Mapping[str, Any]:
        """Return further fields of status.json. Called about once a second (rollout/status.py)."""
        return {}

    def figures(self) -> dict[str, float]:
        """Return metrics since the previous batch. Called when the trainer takes a batch."""
        return {}

    def state(self) -> bytes | None:
        """Return what a checkpoint keeps; None if nothing has to be kept. Called for each snapshot of the rollout
        process (rollout/snapshot.py)."""
        return None

    async def close(self) -> None:
        """Release what is held. Called at the end of the run."""


class PlayerHooks:
    """What an extension does in each process that plays episodes: the rollout process, or those of an extension. The
    first three methods are called once, when the process builds its client of the engines (rollout/parts.py)."""

    def headers(self, config: Config, addresses: Addresses) -> Headers | None:
        """Return what makes headers of every request to an engine; None if no request needs any."""
        return None

    def fields(self, config: Config) -> Mapping[str, Any]:
        """Return further fields of every request to an engine of the policy (SGLang's GenerateReqInput)."""
        return {}

    def sampling(self, config: Config) -> Mapping[str, Any]:
        """Return further sampling parameters of every request of a mode of this extension, which trains nothing."""
        return {}

    reads: Mapping[str, Any] = MappingProxyType({})
    """Further fields of an engine's answers (meta_info, with the last chunk) that it reads, with their types; bytes are
    base64 on the wire."""

    def asks(self, requests: Sequence[Request]) -> Mapping[str, Any]:
        """Return further fields of one request to an engine, for the next part of the answer to each of these
        requests. Called right before it is sent, also again after a publish (engine/inflight.py)."""
        return {}

    def part(self, request: Request) -> None:
        """Read the part of an answer that has ended, complete or not: request.parts[-1]. Raises EngineError."""

    def completed(self, request: Request, completion: Completion) -> Completion:
        """Return a complete answer with what its parts told of its tokens. An answer from the saved state of a run
        has it already, and no parts. Raises EngineError."""
        return completion

    def played(self, group: Group) -> Group:
        """Return a group that was played to its end as it is handed in (rollout/player.py)."""
        return group

    async def start(self, timeout: float, warn: Warn) -> None:
        """Wait for what episodes need, for this many seconds. Called once the policy's engines can answer, before
        agents and environments start. `warn` takes warnings from then on. Raises DeadlineExceeded."""

    async def annotate(self, prompt: Prompt, trajectory: Trajectory, group: str) -> list[dict[str, Any]]:
        """Return fields that change in each turn of a training episode. Called when its agent has ended, while its
        reward is computed (rollout/player.py). Raises EpisodeFailed."""
        return []

    def take_sums(self) -> dict[str, tuple[float, float]]:
        """Return what was counted since the last call (rollout/player.py, Sums). Called with each batch, and more often
        where several processes play."""
        return {}

    async def close(self) -> None:
        """Release what the episodes shared. Called after the last one."""


class Extension:
    """Base class of an extension. Every method is optional. What stands in the class is read in every process; each
    process creates an instance of its own where it needs the methods, sometimes more than one (lookup.active)."""

    Settings: ClassVar[type[Section]] = Section
    """The settings in the section of its name; each has a default with which the extension does nothing harmful."""
    tasks: ClassVar[Mapping[str, str]] = {}
    """Import paths of task classes by their name in task.kind; each is created with its section (TaskConfig)."""
    rewards: ClassVar[Mapping[str, str]] = {}
    """Import paths of rewards by their name in task.reward (rewards/build.py)."""
    advantages: ClassVar[Mapping[str, str]] = {}
    """Import paths of advantage estimators by their name in algo.advantage (algo/registry.py)."""
    losses: ClassVar[Mapping[str, str]] = {}
    """Import paths of losses by their name in algo.loss."""
    families: ClassVar[Mapping[str, str]] = {}
    """Import paths of the records of model families (models/family.py) by their architecture."""
    builtin: ClassVar[Mapping[str, str]] = {}
    """Import paths of models that are written when they are needed (models/catalog.py, Builtin), by their name after
    `builtin:` in model.path."""
    transports: ClassVar[Mapping[str, OfferedTransport]] = {}
    """Transports of new weights by their name in weights.transport."""
    clusters: ClassVar[Mapping[str, str]] = {}
    """Import paths of subclasses of launch.cluster.Cluster by their name in cluster.launcher."""
    flags: ClassVar[Mapping[str, str]] = {}
    """Flags of asyncrl-train, each with the import path of a function that takes the words of the command line and
    returns others in their place, which Hydra knows; None if it has done all that was asked for (launch/compose.py)."""
    modes: ClassVar[Mapping[str, OfferedMode]] = {}
    """Further values of the setting `mode`, by name."""
    placements: ClassVar[Mapping[str, str]] = {}
    """Import paths of subclasses of trainer.gpu_sharing.GpuSharing by their name in cluster.placement: other ways in
    which engines use the trainers' GPUs."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """Fields that it adds to metrics.jsonl, each with its meaning (metrics/fields.py). `<word>` stands for any text."""
    summary_metrics: ClassVar[Mapping[str, str]] = {}
    """Fields that it adds to summary.json."""
    trains: ClassVar[bool] = True
    """Whether its settings can change what is trained. Those that cannot may differ when a run is resumed, and are not
    taken from an earlier run by `composed`."""
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
    enables: ClassVar[Sequence[str]] = ()
    """Settings of the core that need it: of an engine's shape, to be above 1, and `trainer.lora.rank`
    (launch/checks/model.py), `record`, and `rollout.max_running_groups`, to be auto (config/rules.py)."""
    platform: ClassVar[str] = ""
    """Import path of a Platform for machines without GPUs (platforms.py), of an extension that need not be named."""

    @classmethod
    def composed(
        cls, values: dict[str, Any], arguments: Sequence[str], defaults: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the settings of a run in place of these, which Hydra composed and nobody has validated. `arguments`
        are those of the command line, and `defaults` returns what is composed without any. Called in the launcher
        (launch/compose.py), before an instance is created. Raises ConfigError."""
        return values

    def __init__(self, settings: Any) -> None:
        """Create the extension in one process, with its validated settings."""
        self.settings = settings

    @property
    def signal(self) -> bool:
        """Return whether it trains without rewards, so that algo.advantage=none makes sense."""
        return False

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Yield every problem of this extension with the settings. Called in every process of a run, and by --check,
        when the configuration is validated (config/rules.py)."""
        return iter(())

    def launch(self) -> LaunchHooks:
        """Return the hooks in the launcher. Called there."""
        return LaunchHooks()

    def engine(self) -> EngineHooks:
        """Return the hooks of engines. Called in the launcher, and in each process of an engine, where the extension
        has its default settings."""
        return EngineHooks()

    def transformation(self, config: Config) -> Transformation | None:
        """Return what the policy trains in place of the model folder's weights; None to leave it to others. Called on
        each trainer rank once, before the model is built (trainer/policy.py)."""
        return None

    def trainer(self, policy: Policy) -> TrainerHooks:
        """Return the hooks on a trainer rank. Called on each of them once, when its networks hold the weights of the
        model folder (trainer/policy.py). Blocks around a network's micro-batches are added to its `around_forward`,
        further networks that are trained to `policy.others`, and what follows the steps of a batch to
        `policy.following`. An optimizer's `memory` may be set to one that moves its states."""
        return TrainerHooks()

    def steps(
        self, config: Config, run_dir: Path, model: Path, warn: Callable[[str, int], None], first: int | None
    ) -> StepListener | None:
        """Return what receives the steps of a run; None if nothing does. Called once in the first trainer rank, or in
        what takes batches without training, before the first batch. `model` is the folder with the tokenizer, `warn`
        takes a text and a step, and `first` is the step with which a resumed run goes on."""
        return None

    def summary(self, config: Config, run_dir: Path, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields of summary.json. `figures` are those of the core. Called once in the first trainer rank, after
        the last batch."""
        return {}

    def phases(self, config: Config, run_dir: Path, process: str, warn: Callable[[str], None]) -> RecordListener | None:
        """Return what receives the phases of a process, such as "trainer 0"; None if nothing does. Called once in each
        trainer rank, and in the launcher when it starts a process again. `warn` takes a text."""
        return None

    def rollout(self) -> RolloutHooks:
        """Return the hooks in the rollout process. Called there once (rollout/build.py)."""
        return RolloutHooks()

    def served(self, config: Config, addresses: Addresses) -> ServedWeights | None:
        """Return what chooses which of the versions or models that the engines hold answers a request; None to leave it
        to others. Called once in each process that plays episodes, and in the rollout process (rollout/parts.py)."""
        return None

    def player(self, config: Config, addresses: Addresses) -> PlayerHooks:
        """Return the hooks in a process that plays episodes. Called in each of them once (rollout/parts.py)."""
        return PlayerHooks()
