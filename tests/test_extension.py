"""An extension by import path has settings, rules and hooks; what is wrong about it is refused by field and remedy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from asyncrl import extension, lookup, user_code
from asyncrl.config import Config, TaskConfig, load, under_new_names
from asyncrl.errors import ConfigError
from asyncrl.launch import leftovers
from asyncrl.launch.checks.machines import check_gpu_kinds
from asyncrl.launch.checks.model import check_model
from asyncrl.launch.placement import Node, imagined, place
from asyncrl.launch.plan import plan
from asyncrl.models.catalog import resolve
from asyncrl.network.addresses import Addresses
from asyncrl.observability.timeline import GroupTimeline, PublishTimeline
from asyncrl.rollout import build as rollout_build
from asyncrl.rollout.groups import ConcurrencyLimiter
from asyncrl.rollout.limiter import FixedConcurrency
from asyncrl.rollout.parts import ModelParts, PlayingParts
from asyncrl.rollout.prompts import question_of
from asyncrl.rollout.reporters import RolloutRun
from asyncrl.tasks import Task
from asyncrl.tasks.build import build, build_all
from asyncrl.weights.transports import build_transport
from tests.fakes import GIVEN, FakeTemplate, addresses, compose_values, tiny_config, tiny_values
from tests.launch.checks.worlds import machine, nodes, placed

PAGE = (Path(__file__).parents[1] / "docs" / "extensions.md").read_text()
CODE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
assert CODE


@pytest.fixture(autouse=True)
def sleepy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the page's example importable."""
    (tmp_path / "sleepy.py").write_text(CODE[1])
    monkeypatch.syspath_prepend(tmp_path)


def configured(**changes: object) -> Config:
    return tiny_config(extensions={"sleepy": "sleepy:Sleepy"}, **changes)


def test_page_example_adds_setting_listener_and_metric() -> None:
    assert CODE[1].count("\n") <= 40
    made = lookup.active(configured(sleepy={"slow": 2.0}))["sleepy"]
    hooks = made.rollout()
    for seconds in (1.0, 3.0, 9.0):
        hooks.record(GroupTimeline("g", 0, "task", "training", 0, 100.0, 100.0 + seconds, "committed", []))
    hooks.record(PublishTimeline(1, 0.0, 50.0))
    assert hooks.figures() == {"sleepy/slow": 2.0}
    assert hooks.figures() == {"sleepy/slow": 0.0}
    hooks = made.trainer(None)  # type: ignore[arg-type]
    assert (hooks.before_update(None), hooks.after_update(1), hooks.state()) == ((), {}, None)  # type: ignore[arg-type]


def test_settings_have_defaults_and_survive_other_processes() -> None:
    assert configured().sleepy.slow == 60.0
    config = configured(sleepy={"slow": 1.5})
    again = load(json.loads(config.model_dump_json()))
    assert again == config
    assert again.sleepy.slow == 1.5


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"sleepy": {"slow": -1.0}}, "sleepy.slow", "greater than 0"),
        ({"sleepy": {"fast": 1.0}}, "sleepy.fast", "No such field"),
        ({"sleepy": {"slow": 1e9}}, "sleepy.slow", "batch_timeout"),  # the extension's own rule
        ({"extensions": "sleepy:Sleepy"}, "extensions", "names to import paths"),
        ({"extensions": {"sleepy": ["sleepy:Sleepy"]}}, "extensions", "names to import paths"),
        ({"extensions": {"sleepy": "sleepy:Nobody"}}, "extensions.sleepy", "import path"),
        ({"extensions": {"sleepy": "sleepy:Hooks"}}, "extensions.sleepy", "subclass"),
        ({"extensions": {"rollout": "sleepy:Sleepy"}}, "extensions.rollout", "choose another"),
        ({"extensions": {}, "sleepy": {"slow": 1.0}}, "sleepy", "no extension has this name"),
    ],
)
def test_what_is_wrong_is_refused_by_field(changes: dict[str, object], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny_config(**{"extensions": {"sleepy": "sleepy:Sleepy"}, **changes})
    assert refused.value.field == field
    assert remedy in refused.value.remedy


def test_extension_of_an_installed_package_need_not_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoints([EntryPoint("sleepy", "sleepy:Sleepy", lookup.GROUP)])
    monkeypatch.setattr(lookup, "entry_points", lambda group: found.select(group=group))
    lookup.installed.cache_clear()
    try:
        assert load({**tiny_values(), "sleepy": {"slow": 3.0}}).sleepy.slow == 3.0
    finally:
        lookup.installed.cache_clear()


def test_old_names_of_settings_are_refused_but_read() -> None:
    moved = {"tracing": "observe", "rollout.processes": "processes.count"}
    for old, new in moved.items():
        with pytest.raises(ConfigError, match=f"It moved: set {new}"):
            tiny_config(**{old: {}})
    recorded = {"tracing": {"engines": True}, "rollout": {"processes": 2, "lead": 1}, "mode": "train"}
    found = {"observe": {"engines": True}, "processes": {"count": 2}, "rollout": {"lead": 1}, "mode": "train"}
    assert under_new_names(recorded) == found
    assert recorded["rollout"] == {"processes": 2, "lead": 1}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("asyncrl.agents.proxied:Proxied", "asyncrl.extensions.proxy.agents:Proxied"),
        ("asyncrl.sandbox.local:LocalSandboxes", "asyncrl.extensions.sandbox.local:LocalSandboxes"),
        ("asyncrl.envs.shell:ShellEnv", "asyncrl.extensions.tools.shell:ShellEnv"),
        ("asyncrl.envs.tools.toolbox:ToolboxEnv", "asyncrl.extensions.tools.toolbox:ToolboxEnv"),
    ],
)
def test_old_name_of_a_moved_module_is_refused(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"set {new}.")):
        user_code.load(old, "agent")


class Wrapping(extension.Extension):
    """Wraps tasks with tools, changes every question, and counts what is closed and swept."""

    wrappers = {"tools": f"{__name__}:wrap"}  # noqa: RUF012
    question = f"{__name__}:louder"
    closed = swept = 0

    def player(self, config: Any, addresses: Any) -> extension.PlayerHooks:
        return Closing()

    def launch(self) -> extension.LaunchHooks:
        return Sweeping()


class Closing(extension.PlayerHooks):
    async def close(self) -> None:
        Wrapping.closed += 1


class Sweeping(extension.LaunchHooks):
    def sweep(self) -> None:
        Wrapping.swept += 1


def wrap(task: Task, section: TaskConfig) -> tuple[Task, int]:
    return task, len(section.tools)


def louder(question: dict[str, Any], template: object) -> dict[str, Any]:
    return {**question, "messages": [{**one, "content": one["content"] + "!"} for one in question["messages"]]}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Replace the extensions of this checkout; the result holds those that a test adds."""
    found: dict[str, str] = {}
    monkeypatch.setattr(lookup, "shipped", lambda: found)
    lookup.loaded.cache_clear()
    yield found
    lookup.loaded.cache_clear()


def bare(**changes: Any) -> Config:
    """Return a configuration without the sections of extensions that the defaults choose."""
    values = tiny_values(**{"rollout.max_running_groups": None, **changes})
    return load({name: value for name, value in values.items() if name in Config.model_fields})


def test_field_of_a_task_that_no_extension_serves_is_refused(alone: dict[str, str]) -> None:
    config = bare(**{"task.tools": [{"use": "python"}]})
    with pytest.raises(ConfigError, match=r"task\.tools: .* No extension that is installed does this"):
        build(config.task)
    alone["wrapping"] = f"{__name__}:Wrapping"
    assert build(config.task)[1] == 1  # type: ignore[index]


def test_question_goes_through_the_functions_of_extensions(alone: dict[str, str]) -> None:
    task = build(bare().task)
    plain = question_of(task, FakeTemplate(), 3, "task")
    assert plain == task.question(3)
    alone["wrapping"] = f"{__name__}:Wrapping"
    lookup.loaded.cache_clear()
    assert question_of(task, FakeTemplate(), 3, "task")["messages"][-1]["content"].endswith("!")


def test_hooks_of_a_playing_process_are_closed_with_its_parts(alone: dict[str, str]) -> None:
    alone["wrapping"] = f"{__name__}:Wrapping"
    config = bare()
    urls = ("http://engine",), "http://router", "http://rollout"
    addresses = Addresses("run", "key", resolve("builtin:tiny"), *urls, gpus=0, started_at=0.0)

    async def play() -> None:
        parts = PlayingParts.build(
            config, addresses, ModelParts.load(config, addresses.model), build_all(config), print
        )
        await parts.close()

    before = Wrapping.closed
    asyncio.run(play())
    assert Wrapping.closed == before + 1


def test_leftovers_of_extensions_are_removed_with_those_of_a_run(alone: dict[str, str]) -> None:
    alone["wrapping"] = f"{__name__}:Wrapping"
    before = Wrapping.swept
    leftovers.sweep("no such run", [])
    assert Wrapping.swept == before + 1


class Limiting(extension.Extension):
    """Limits how many groups run at once."""

    enables = ("rollout.max_running_groups",)

    def rollout(self) -> extension.RolloutHooks:
        return Five()


class Five(extension.RolloutHooks):
    def limits(self, run: RolloutRun) -> ConcurrencyLimiter:
        return FixedConcurrency(5)


def test_extension_limits_groups_or_auto_is_refused(alone: dict[str, str], tmp_path: Path) -> None:
    def limiter(most: int | str | None) -> ConcurrencyLimiter:
        run = RolloutRun(bare(**{"rollout.max_running_groups": most}), addresses(), tmp_path, Mock())
        return rollout_build._limiter(run, rollout_build._started_hooks(run))

    with pytest.raises(ConfigError, match=r"rollout\.max_running_groups: got 'auto'\. No extension that is installed"):
        limiter("auto")
    assert type(limiter(None)) is ConcurrencyLimiter
    alone["limiting"] = f"{__name__}:Limiting"
    assert isinstance(chosen := limiter("auto"), FixedConcurrency)
    assert chosen._most == 5
    assert isinstance(chosen := limiter(3), FixedConcurrency)
    assert chosen._most == 3


COURIER = """
from asyncrl.extension import Extension, OfferedTransport


class Sent:
    def __init__(self, **parts):
        self.parts = parts


class Courier(Extension):
    transports = {"courier": OfferedTransport("courier:Sent", by_file=True, loader="courier.load")}
"""


@pytest.fixture
def courier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    (tmp_path / "courier.py").write_text(COURIER)
    monkeypatch.syspath_prepend(tmp_path)
    return tiny_config(extensions={"courier": "courier:Courier"}, **{"weights.transport": "courier"})


def test_transport_of_an_extension_is_built_by_its_name(courier: Config, tmp_path: Path) -> None:
    fleet: Any = SimpleNamespace(urls=["http://127.0.0.1:1"])
    where: dict[str, Any] = {"host": "127.0.0.1", "stage": 1, "gpu": False, "folder": tmp_path}
    made, why = build_transport(courier, fleet, alone=True, **where)
    assert made.parts == {**where, "fleet": fleet, "ranks": 1}  # type: ignore[attr-defined]
    assert why == f"courier in {tmp_path} (as configured)"


def test_engines_know_what_the_transport_of_an_extension_needs(courier: Config) -> None:
    placement = place(courier, imagined(courier, 1, 0))
    engine, *_ = plan(courier, addresses(), placement, Path("/run"))
    assert "--custom-weight-loader courier.load" in " ".join(engine.argv)
    assert courier.sends_files


def test_unknown_transport_is_refused_with_the_known() -> None:
    with pytest.raises(ConfigError, match="Must be one of auto, tensor, distributed") as refused:
        tiny_config(**{"weights.transport": "courier"})
    assert refused.value.field == "weights.transport"


PATCHES = """
from asyncrl.extension import EngineHooks, Extension

class Hooks(EngineHooks):
    def arguments(self, config, *, gpu):
        return {"sampling_backend": "pytorch", "num_reserved_decode_tokens": config.run.max_steps}

    def install(self, argv):
        import sys
        print("installed", argv[1:], "sglang" in sys.modules)

class Patches(Extension):
    def engine(self):
        return Hooks()
"""


def test_engines_get_arguments_and_patches_of_an_extension(tmp_path: Path) -> None:
    (tmp_path / "patches.py").write_text(PATCHES)
    settings = [
        "+extensions.patches=patches:Patches",
        "run.max_steps=7",
        "trainer.dtype=float32",
        "engine.dtype=float32",
    ]
    config = load(compose_values("experiment=tiny", *settings))
    node = Node("", "127.0.0.1", (), tuple(range(20000, 20100)))
    placed = place(config, [node])
    (engine,) = (one for one in plan(config, addresses(), placed, tmp_path) if one.name == "engine-0")
    at = engine.argv.index("--num-reserved-decode-tokens")
    assert engine.argv[at + 1] == "7"
    code = "import asyncrl.engine.serve"
    named = {lookup.NAMED: engine.env[lookup.NAMED]}  # not the run's id, by which other tests end leftovers
    env = {**os.environ, **named, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code, *engine.argv[at : at + 2]]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "installed ['--num-reserved-decode-tokens', '7'] False"


def test_engines_import_no_extension_without_hooks_for_them() -> None:
    assert lookup.engine_environment(configured()) == {}


NARROW = """
from asyncrl.errors import ConfigError
from asyncrl.extension import EngineHooks, Extension, LaunchHooks
from asyncrl.settings import Section


class Settings(Section):
    bytes: int | None = None


class Launch(LaunchHooks):
    def check_model(self, config, model, gpus):
        yield ConfigError("narrow.bytes", model["hidden_size"], f"Not with {gpus} GPUs.")

    def check_gpu(self, config, gpu):
        yield ConfigError("narrow.bytes", gpu, "Another GPU.")


class Engine(EngineHooks):
    def needs_weights(self, config):
        return config.narrow.bytes is not None


class Narrow(Extension):
    Settings = Settings

    def check(self, config):
        if self.settings.bytes == 0:
            yield ConfigError("narrow.bytes", 0, "Set 1.")

    def launch(self):
        return Launch()

    def engine(self):
        return Engine()
"""


@pytest.fixture
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "narrow.py").write_text(NARROW)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda **changes: tiny_config(extensions={"narrow": "narrow:Narrow"}, **changes)


def test_engines_with_other_weights_get_the_trainers_first(narrow: Any) -> None:
    assert [narrow(narrow={"bytes": size}).changes_base for size in (None, 1)] == [False, True]
    assert not narrow(narrow={"bytes": 1}, **GIVEN).changes_base


def test_models_and_gpus_are_shown_to_extensions_before_a_start(narrow: Any) -> None:
    dims = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 512}
    llama = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "vocab_size": 16, **dims}
    with pytest.raises(ConfigError, match="Not with 3 GPUs") as refused:
        check_model(narrow(), llama, gpus=3)
    assert refused.value.value == 64
    known = machine(gpus=2)
    with pytest.raises(ConfigError, match="Another GPU") as refused:
        check_gpu_kinds(narrow(), placed(narrow(), 1, 2).engines[0], nodes(narrow(), 1, 2), [known])
    assert refused.value.value == known.gpus[1].name


class Asking(extension.Extension):
    """An extension with a mode of each kind."""

    modes = {"ask": extension.OfferedMode(program="asking.program"), "drill": extension.OfferedMode(trains=True)}  # noqa: RUF012


ASKING = {"extensions": {"asking": f"{__name__}:Asking"}}


@pytest.mark.parametrize(
    ("mode", "names", "trains", "generates"),
    [
        ("ask", ["engine-0", "router", "rollout"], False, True),
        ("drill", ["trainer-0"], True, False),
        ("train", ["engine-0", "router", "rollout", "trainer-0"], True, True),
    ],
)
def test_mode_decides_which_processes_run_and_end_it(
    mode: str, names: list[str], trains: bool, generates: bool
) -> None:
    config = tiny_config(mode=mode, **ASKING)
    placement = place(config, imagined(config, 1, 0))
    specs = plan(config, addresses(), placement, Path("/runs/r"))
    assert [spec.name for spec in specs] == names
    assert (config.trains, config.generates) == (trains, generates)
    assert [spec.name for spec in specs if spec.ends_the_run] == names[-1:]
    assert ("asking.program" in specs[-1].argv) is (mode == "ask")


def test_unknown_mode_is_refused_with_the_known() -> None:
    with pytest.raises(ConfigError, match=r"mode: .*'ask'.*one of train") as refused:
        tiny_config(mode="ask")
    assert "drill" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"mode: .*one of .*ask, drill"):
        tiny_config(mode="asks", **ASKING)


def test_mode_that_trains_nothing_has_no_checkpoints() -> None:
    tiny_config(mode="drill", **ASKING, **{"checkpoint.every": 1})
    with pytest.raises(ConfigError, match=r"checkpoint\.every: .*mode=ask trains nothing"):
        tiny_config(mode="ask", **ASKING, **{"checkpoint.every": 1})
