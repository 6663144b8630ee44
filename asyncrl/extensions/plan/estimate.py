"""Estimated duration of a step and of a run on CPUs, from measured rates and the operations of a step. Pure.

    forward      2 operations per parameter and token; with both gradients 6 (arXiv 2001.08361, section 2.1),
                 with that of the input alone 4 (frozen weights)
    trainer      6 body packed + 6 head written             packed: shared prefixes once (algo/pack.py); 4 of a frozen
                 base, and 6 of its adapters
    engines      2 body (read + written) + 2 head written    read: each new version prefills its prompts again
                 and PASS per layer and forward pass     passes: one per token of an answer, two per prompt
    step         max(trainer, engines, both together at the rate of the cores); trainer + engines at staleness 0;
                 plus PUBLISH

The length of answers and the fraction of groups with a signal are unknown before the run: ANSWER and SIGNAL are
assumptions. TRAINER, ENGINE, PASS, PUBLISH and START_UP account for everything besides matrix products, as measured on
2 cores of an AMD EPYC (Zen 3, AVX2) with the default run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.extensions.plan.adapters import Adapters
from asyncrl.extensions.plan.shapes import Shape, active
from asyncrl.extensions.plan.tensors import Weight

ANSWER = 0.5
"""Assumed mean length of an answer, as a fraction of rollout.max_new_tokens."""
SIGNAL = 0.4
"""Assumed fraction of groups with a signal; the others are not trained."""
TRAINER, ENGINE = 1.2, 1.6
"""Measured time relative to that of the matrix products alone."""
PASS = 1.0e-3
"""Python overhead in seconds per layer and forward pass of an engine."""
PUBLISH = 0.3
"""Seconds per step for transferring the batch and publishing the weights."""
PAUSE = 0.5
"""Fraction of PUBLISH for which the engines are paused, as measured with experiment=tiny."""
START_UP = 30.0
"""Seconds from the command to the first batch, excluding the first evaluation."""


@dataclass(frozen=True)
class ModelSize:
    """Number of parameters that each token is multiplied with."""

    body: float
    head: float
    """Parameters of the output layer, which is only applied to predicted tokens."""
    layers: int
    adapters: float | None = None
    """Parameters of the adapters that are trained while body and head are frozen; None: all is trained."""

    @classmethod
    def of(cls, weights: Sequence[Weight], shape: Shape, adapters: Adapters | None = None) -> ModelSize:
        """Count the parameters of a model. `weights` is a result of shapes.counted."""
        head = shape.vocab * shape.hidden
        trained = active(adapters.matrices(weights), shape, embedding=False) if adapters else None
        return cls(active(weights, shape) - head, head, shape.layers, trained)

    def training(self, packed: float, written: float) -> float:
        """Return the operations of training on these tokens of a pack, some of which are predicted."""
        each = 6 if self.adapters is None else 4
        return each * (self.body * packed + self.head * written) + 6 * (self.adapters or 0) * packed


@dataclass(frozen=True)
class StepWorkload:
    """Token counts of a step and of an evaluation."""

    groups: int
    group_size: float  # mean over the tasks of a mixture
    beginning: float
    """Number of tokens in the prefix common to all prompts."""
    question: float
    """Number of further tokens of a prompt."""
    answer: float
    """Number of tokens of an answer."""
    steps: int
    share_prompts: bool
    synchronous: bool
    questions: int
    """Questions per evaluation; there are two evaluations, before and after training."""


@dataclass(frozen=True)
class MachineRates:
    """Measured speed of the machine: operations per second of one process, and how many processes run at full speed
    concurrently."""

    train: float
    generate: float
    trainers: int
    engines: int
    cores: int
    two: float
    """Throughput of two processes relative to one."""

    def speedup(self, processes: int) -> float:
        """Return the throughput of this many concurrent processes relative to one."""
        return 1 + (min(processes, self.cores) - 1) * (self.two - 1)


@dataclass(frozen=True)
class Estimate:
    """Estimated durations in seconds."""

    trainer: float
    engines: float
    step: float
    run: float
    steps: int
    """Number of steps of the run."""


def estimate(model: ModelSize, work: StepWorkload, machine: MachineRates) -> Estimate:
    """Estimate the duration of a step and of the run."""
    samples = work.groups * work.group_size
    written = samples * work.answer
    read = work.beginning + work.groups * work.question + samples  # the last prompt token is computed for each sibling
    training = _training(model, work, machine)
    passes = PASS * model.layers * (work.answer + 2 * work.groups)
    generating = _forward(model, read + written, written + samples, machine) + passes
    asked = work.questions * (work.question + work.answer) + work.beginning
    evaluation = _forward(model, asked, work.questions * work.answer, machine) / _of(machine, machine.engines)

    trainer, engines = training / _of(machine, machine.trainers), generating / _of(machine, machine.engines)
    both = (training + generating) / machine.speedup(machine.trainers + machine.engines)
    step = PUBLISH + (trainer + engines if work.synchronous else max(trainer, engines, both))
    return Estimate(trainer, engines, step, START_UP + 2 * evaluation + work.steps * step, work.steps)


def plan_fields(model: ModelSize, work: StepWorkload, machine: MachineRates) -> dict[str, float]:
    """Return the fields of PlanInput about the speed of one process of a run, while all of them work."""
    processes = machine.trainers + machine.engines
    share = machine.speedup(processes) / processes
    prompt = work.beginning + work.question
    prefill = _forward(model, work.beginning / work.groups + work.question + work.group_size, work.group_size, machine)
    return {
        "prompt": prompt,
        "per_token": PASS * model.layers / share,
        "per_request": _forward(model, 1, 1, machine) / share,
        "prefill_rate": share * prompt / (prefill + 2 * PASS * model.layers),
        "train_rate": share * work.groups * work.group_size * work.answer / _training(model, work, machine),
        "train_fixed": (1 - PAUSE) * PUBLISH,
        "pause": PAUSE * PUBLISH,
    }


def _training(model: ModelSize, work: StepWorkload, machine: MachineRates) -> float:
    """Return the seconds of training on a batch in one process."""
    samples = work.groups * work.group_size
    apart = samples * (work.beginning + work.question + work.answer)
    shared = SIGNAL * work.groups * (work.question + work.group_size * work.answer)
    shared += min(1.0, SIGNAL * work.groups) * work.beginning
    packed = shared if work.share_prompts else SIGNAL * apart
    return TRAINER * model.training(packed, SIGNAL * samples * work.answer) / machine.train


def _forward(model: ModelSize, tokens: float, predicted: float, machine: MachineRates) -> float:
    """Return the seconds of a forward pass in one process."""
    return ENGINE * 2 * (model.body * tokens + model.head * predicted) / machine.generate


def _of(machine: MachineRates, processes: int) -> float:
    return machine.speedup(max(1, processes))
