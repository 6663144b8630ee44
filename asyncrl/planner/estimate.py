"""How long a step and a run will take on CPUs, from measured rates and the operations of a step. Pure.

    forward      2 operations for each parameter and token; with both gradients 6 (arXiv 2001.08361, section 2.1)
    trainer      6 body packed + 6 head written             packed: common beginnings once (algo/pack.py)
    engines      2 body (read + written) + 2 head written    read: each new version prefills its prompts anew
                 and PASS for each layer of each pass    passes: one for each token of an answer, two for each prompt
    step         max(trainer, engines, what both need over what the cores give); one after the other at bound 0;
                 and PUBLISH

Nobody can know before the run how long answers get and which groups carry a signal: ANSWER and SIGNAL are assumptions.
TRAINER, ENGINE, PASS, PUBLISH and START_UP are what a run takes beside its matrix products, measured on 2 cores of an
AMD EPYC (Zen 3, AVX2) with the default run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.planner.memory import Shape, Weight, active

ANSWER = 0.5
"""Length of an answer, as a share of rollout.max_new_tokens."""
SIGNAL = 0.4
"""Share of groups that carry a signal; the others are not trained."""
TRAINER, ENGINE = 1.2, 1.6
"""Time over that of the matrix products at the measured rates."""
PASS = 1.0e-3
"""Seconds of Python for each layer of a pass of an engine."""
PUBLISH = 0.3
"""Seconds of a step for the batch on its way and the weights."""
START_UP = 30.0
"""Seconds from the command to the first batch, beside the first evaluation."""


@dataclass(frozen=True)
class Model:
    """Parameters that multiply each token."""

    body: float
    head: float
    """Of the output layer, which multiplies only tokens that are predicted."""
    layers: int

    @classmethod
    def of(cls, weights: Sequence[Weight], shape: Shape) -> Model:
        """`weights` as memory.counted gives them."""
        head = shape.vocab * shape.hidden
        return cls(active(weights, shape) - head, head, shape.layers)


@dataclass(frozen=True)
class Workload:
    """Tokens of a step and of an evaluation."""

    groups: int
    group_size: int
    beginning: float
    """Tokens that all prompts begin with."""
    question: float
    """Further tokens of a prompt."""
    answer: float
    """Tokens of an answer."""
    steps: int
    share_prompts: bool
    synchronous: bool
    questions: int
    """Of an evaluation; there are two: before and after."""


@dataclass(frozen=True)
class Machine:
    """What the processes get: operations per second of one of them, and how many run at full speed at once."""

    train: float
    generate: float
    trainers: int
    engines: int
    cores: int
    two: float
    """Rate of two processes over one."""

    def speedup(self, processes: int) -> float:
        """Rate of so many processes at once, over that of one."""
        return 1 + (min(processes, self.cores) - 1) * (self.two - 1)


@dataclass(frozen=True)
class Estimate:
    """Seconds."""

    trainer: float
    engines: float
    step: float
    run: float
    steps: int
    """Of the run: a number, not seconds."""


def estimate(model: Model, work: Workload, machine: Machine) -> Estimate:
    """Time of a step and of the run."""
    samples = work.groups * work.group_size
    written = samples * work.answer
    read = work.beginning + work.groups * work.question + samples  # a sibling's last prompt token is computed anew
    apart = samples * (work.beginning + work.question + work.answer)
    shared = SIGNAL * work.groups * (work.question + work.group_size * work.answer)
    shared += min(1.0, SIGNAL * work.groups) * work.beginning
    packed = shared if work.share_prompts else SIGNAL * apart
    training = TRAINER * 6 * (model.body * packed + model.head * SIGNAL * written) / machine.train
    passes = PASS * model.layers * (work.answer + 2 * work.groups)
    generating = _forward(model, read + written, written + samples, machine) + passes
    asked = work.questions * (work.question + work.answer) + work.beginning
    evaluation = _forward(model, asked, work.questions * work.answer, machine) / _of(machine, machine.engines)

    trainer, engines = training / _of(machine, machine.trainers), generating / _of(machine, machine.engines)
    both = (training + generating) / machine.speedup(machine.trainers + machine.engines)
    step = PUBLISH + (trainer + engines if work.synchronous else max(trainer, engines, both))
    return Estimate(trainer, engines, step, START_UP + 2 * evaluation + work.steps * step, work.steps)


def _forward(model: Model, tokens: float, predicted: float, machine: Machine) -> float:
    """Seconds of one process."""
    return ENGINE * 2 * (model.body * tokens + model.head * predicted) / machine.generate


def _of(machine: Machine, processes: int) -> float:
    return machine.speedup(max(1, processes))
