"""Each rule between settings has a case that breaks it, and a broken rule is refused with field, value and remedy."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin
from unittest import mock

import pytest

import asyncrl
from asyncrl import lookup
from asyncrl.algo.loss import LOSSES, LossTraits, ppo
from asyncrl.config import Config
from asyncrl.config.running import TRANSPORTS
from asyncrl.errors import ConfigError
from asyncrl.extension import Extension, OfferedTransport
from asyncrl.launch.checks import model
from asyncrl.settings import Rule, require
from tests.fakes import ALONE, GIVEN, JOB, tiny_config

ROOT = Path(asyncrl.__file__).parent
FILE: dict[str, Any] = {"task.kind": "file", "task.reward": "exact"}
EVALUATED = {"eval.questions": 2, "eval.sets": {"digits": {**tiny_config().task.model_dump(), "name": "digits"}}}
BASES: dict[str, list[dict[str, Any]]] = {
    "_lengths": [{}, {"algo.shaping.overlong_buffer": 1}, {"trainer.optimizer.schedule": "linear"}],
    "_modes": [{}, ALONE],
    "_extended": [{}],
    "_evaluation": [EVALUATED],
    "_server_args": [{}],
    "_speculation": [{"engine.server_args": {"speculative_algorithm": "EAGLE"}}],
    "_host_caches": [{"engine.hicache": 64}],
    "_batch_parts": [{"trainer.batch_parts": 2}],
    "_overlap": [{"weights.overlap": True, "rollout.max_staleness": 2}],
    "_shared_gpus": [{"cluster.placement": "shared"}],
    "_tasks": [{}],
    "_group_sizes": [{"algo.advantage": "grpo"}],
    "_signal": [{"algo.advantage": "none"}],
    "_shape": [{"engine.tensor_parallel": 2, f"engine.{size}_parallel": 2} for size in ("expert", "data", "pipeline")],
    **({"auto_plan": [{}]} if (ROOT / "extensions/plan").exists() else {}),
}
"""Settings by the subject whose rules hold under them: a function of config/rules.py, or another module. Every field of
a rule is then set to values of its type."""

CAUSES: dict[str, list[dict[str, Any]]] = {
    "_lengths": [
        {"rollout.max_new_tokens": 8, "algo.shaping.overlong_buffer": 9},
        {"trainer.optimizer.lr": 1e-9},
        {"trainer.optimizer.warmup_steps": 10**6},
    ],
    "_extended": [{"weights.transport": "x"}],
    "_modes": [{"deterministic": True, "rollout.max_staleness": 1}],
    "_evaluation": [{"eval.questions": 0}, {"task.name": "digits"}],
    "_server_args": [
        *({"engine.server_args": {name: value}} for name, value in (("tp", 2), ("load_format", "dummy"))),
        *({"engine.server_args": {name: True}} for name in ("torchao_config", "enable_dp_lm_head")),
        {"engine.server_args": {"disaggregation_mode": "prefill"}},
    ],
    "_speculation": [
        {"engine.server_args": {"speculative_algorithm": "NGRAM", "speculative_accept_threshold_acc": 0.5}},
        {"extensions": {"courier": f"{__name__}:Courier"}, "weights.transport": "courier"},
    ],
    "_host_caches": [
        {"engine.server_args": {"hicache_storage_backend": "file"}},
        {"rollout.cache_key": "group", "weights.pause_mode": "in_place"},
    ],
    "_batch_parts": [{"algo.advantage": "reinforce_pp"}],
    "_overlap": [{"rollout.max_staleness": 0}, {"rollout.max_staleness": 2, "rollout.lead": 0}],
    "_shared_gpus": [{"engine.memory_fraction": 0.9}],
    "_tasks": [
        {"task.kind": "benchmark"},
        *({"task.kind": "hf", "task.dataset": "d", "task.train_split": split} for split in ("test", None)),
        FILE,
    ],
    "auto_plan": [{**JOB, "cluster.trainer_nodes": 1}],
}
"""Settings by subject that break rules whose cause is in other fields than the one that they name."""
EVERYWHERE: list[dict[str, Any]] = [
    ALONE,
    GIVEN,
    {"deterministic": True, "rollout.max_staleness": 0},
]

HEADS = {"num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **HEADS, "tie_word_embeddings": True}
OF_TRANSFORMERS: dict[str, Any] = {"architectures": ["SmolLM3ForCausalLM"], **HEADS, "num_key_value_heads": 1}
SPARSE: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], **HEADS}

APART = {"algorithm", "training", "precision"}
"""Modules with limits of one section, or rules of what is resolved, whose tests break them."""
Place = tuple[str, int, str, int]
"""A rule: its subject, the line that requires it, its field, and which of the rules of this field."""


class Courier(Extension):
    """A transport with files, which only extensions have."""

    transports: ClassVar = {"courier": OfferedTransport("courier:Sent", by_file=True)}


class Recorded(Exception):
    """Ends a check outside the configuration behind its rules."""


class Rules:
    """The rules that were looked at, and those that were broken."""

    def __init__(self) -> None:
        self.seen, self.broken = set[Place](), set[Place]()

    def note(self, subject: str, line: int, prefix: str, found: Iterable[Rule]) -> None:
        counts: dict[str, int] = {}
        for field, *_, broken, _ in found:
            counts[field] = counts.get(field, 0) + 1
            # rules about each argument of SGLang that was given are the same for all arguments
            each = subject == "_server_args"
            name = re.sub(r"server_args\.\w+", "server_args.*", field) if each else field
            name = re.sub(r"eval\.sets\.\w+", "task", name)
            place = subject, line, prefix + name, counts[field]
            self.seen.add(place)
            if broken:
                self.broken.add(place)

    @contextmanager
    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Record every rule of every module, and refuse nothing."""
        with monkeypatch.context() as patched:
            for module in with_rules():
                imported = importlib.import_module(module)
                patched.setattr(imported, "require", self._instead(module))
            yield

    def _instead(self, module: str) -> Any:
        def note(section: Any, found: Iterable[Rule], *, prefix: str = "") -> None:
            subject = getattr(found, "__name__", "")
            self.note(
                subject if subject in BASES else module.rpartition(".")[2], sys._getframe(1).f_lineno, prefix, found
            )
            if not module.startswith("asyncrl.config"):
                raise Recorded

        return note


def with_rules() -> list[str]:
    """Return the modules that state rules."""
    uses = re.compile(r"^from asyncrl.settings import .*\brequire\b", re.MULTILINE)
    files = [file for file in ROOT.rglob("*.py") if file.stem not in APART and uses.search(file.read_text())]
    return [".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__") for file in files]


def values(field: str) -> list[Any]:
    """Return values of a field's type."""
    if field == "weights.transport":
        return [*TRANSPORTS, *lookup.offered("transports")]
    kind: Any = Config
    for name in field.split("."):
        fields = getattr(kind, "model_fields", {})
        named = {one.alias or own: one for own, one in fields.items()}
        if name not in named:
            return ["x", True, 2]  # arguments of SGLang
        kind = named[name].annotation
    return list(of_kind(kind))


def of_kind(kind: Any) -> Iterator[Any]:
    some: dict[Any, list[Any]] = {
        bool: [True, False],
        int: [0, 1, 2, 40],
        float: [0.5, 2.0],
        str: ["http://127.0.0.1:1"],
        list: [["http://127.0.0.1:1"]],
        type(None): [None],
    }
    yield from some.get(get_origin(kind) or kind, [])
    for one in get_args(kind):
        if get_origin(kind) is Literal:
            yield one
        elif get_origin(kind) not in (list, dict):
            yield from of_kind(one)


def tried(changes: dict[str, Any]) -> Config | None:
    with suppress(ConfigError):  # of checks that are not rules
        return tiny_config(**changes)
    return None


def outside(module: str, config: Config | None) -> None:
    """Run the checks of a module that looks at more than the configuration."""
    if config is None:
        return
    if module == "_shape":
        for hf, experts in ((LLAMA, 0), (SPARSE, 3), (OF_TRANSFORMERS, 0)):
            for enabled in (model.enabled, set):  # the second: where no extension enables any shape
                with suppress(Recorded), mock.patch.object(model, "enabled", enabled):
                    model.require(config, model._shape(config, hf, experts))
    if module == "auto_plan":
        planner = importlib.import_module("asyncrl.extensions.plan.auto_plan")
        with suppress(Recorded):
            planner.make(config, [], Path(), {}, planner.Devices())


def test_each_rule_has_a_case_that_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Rules()
    # a loss that decides over the whole batch, which only extensions have
    monkeypatch.setitem(LOSSES._traits, ppo, LossTraits(selection=lambda table: table.keep))
    with found.recorded(monkeypatch):
        with mock.patch.object(lookup, "enabled", set):  # where no extension records, or knows how many groups to run
            tried({"record": True, "rollout.max_running_groups": "auto"})
        for subject, bases in BASES.items():
            for base in bases:
                outside(subject, tried(base))
                fields = {field for name, _, field, _ in found.seen if name == subject}
                cases = [base | {field: value} for field in fields for value in values(field)]
                for case in cases + [base | cause for cause in CAUSES.get(subject, []) + EVERYWHERE]:
                    outside(subject, tried(case))
    assert {subject for subject, *_ in found.broken} == BASES.keys()
    assert {module.rpartition(".")[2] for module in with_rules()} == {"rules", "model"} | BASES.keys() & {"auto_plan"}
    assert found.seen == found.broken


def test_rules_are_refused_in_order_with_field_value_and_remedy() -> None:
    config = tiny_config()
    passes: Rule = ("mode", False, "never")
    require(config, [passes])
    broken: list[Rule] = [passes, ("rollout.lead", True, "Lower it"), ("mode", True, "later")]
    with pytest.raises(ConfigError) as caught:
        require(config, broken)
    assert (caught.value.field, caught.value.value) == ("rollout.lead", config.rollout.lead)
    assert caught.value.remedy == "Lower it"
    with pytest.raises(ConfigError) as caught:
        require(config.engine, [("count", "shown", True, "Raise it")], prefix="engine.")
    assert (caught.value.field, caught.value.value) == ("engine.count", "shown")


def test_auto_is_refused_where_no_extension_has_it() -> None:
    with mock.patch.object(lookup, "enabled", set), pytest.raises(ConfigError) as caught:
        tiny_config(**{"rollout.max_running_groups": "auto"})
    assert (caught.value.field, caught.value.value) == ("rollout.max_running_groups", "auto")


def test_estimator_without_a_gradient_may_be_measured() -> None:
    assert tiny_config(**{"algo.kl.estimator": "k1", "algo.kl.measure_every": 5}).algo.measures_reference
