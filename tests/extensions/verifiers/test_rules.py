"""Settings, secrets, the comparison of tasks in a resumed run, and the virtual environments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.extensions.verifiers import envs
from asyncrl.extensions.verifiers.extension import FILE, VerifiersLaunch
from asyncrl.extensions.verifiers.task import Verifiers
from tests.extensions.verifiers.playing import fake, faked, made_of
from tests.fakes import compose_values, tiny_config


@pytest.mark.parametrize(
    ("field", "value"),
    [("agent", "a:b"), ("system", "Be brief."), ("shots", 1), ("tools", [{"use": "calculator"}]), ("reward", "exact")],
)
def test_what_the_environment_decides_is_not_set_beside_it(field: str, value: Any) -> None:
    settings: dict[str, Any] = {"task.kind": "verifiers", "task.name": "e", f"task.{field}": value}
    with pytest.raises(ConfigError, match=rf"task\.{field}: got .*the environment decides it"):
        tiny_config(**settings)


def test_settings_compose_and_unknown_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)
    values = compose_values("experiment=tiny", "task=verifiers", "task.name=m", "task.params.args={taskset: {size: 3}}")
    assert values["task"]["params"]["args"] == {"taskset": {"size": 3}}
    config = tiny_config(**{"task.kind": "verifiers", "task.name": "m", "task.params": {"args": {}, "size": 3}})
    with pytest.raises(ConfigError, match=r"task\.params: .*size"):
        Verifiers(config.task)


def test_missing_venv_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    config = tiny_config(**{"task.kind": "verifiers", "task.name": "owner/my-env@1.0", "task.params": {}})
    with pytest.raises(ConfigError, match=rf"task\.params\.venv: got '{tmp_path}/envs/my_env'.*asyncrl-envs install"):
        Verifiers(config.task)


GIVEN = {
    "HOME": "/root",
    "LC_TIME": "C",
    "https_proxy": "http://proxy:3128",
    "ASYNCRL_RUN_ID": "r",
    "ASYNCRL_TEACHER_API_KEY": "t",
    "PRIME_API_KEY": "p",
    "HF_TOKEN": "h",
    "DATABASE_URL": "d",
    "my_pass": "m",
    "HTTP_PROXY": "http://user:password@proxy:3128",
    "PIP_INDEX_URL": "https://token@index/simple",
    "GIVEN": "to the worker",
}


@pytest.mark.parametrize("named", [[], ["GIVEN", "PIP_INDEX_URL"]])
def test_worker_has_only_harmless_or_named_variables(named: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    has = [one["name"] for one in made_of(tells=True, environment=named)._tasks]
    assert sorted(GIVEN.keys() & set(has)) == sorted(["ASYNCRL_RUN_ID", "HOME", "LC_TIME", "https_proxy", *named])
    assert "ASYNCRL_PROXY_API_KEY" in has


def test_unreachable_variable_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)
    monkeypatch.setenv("JUDGE", "secret")
    monkeypatch.delenv("ABSENT", raising=False)
    with pytest.raises(
        ConfigError, match=r"task\.params\.environment: got \['ABSENT'\].*the variable ABSENT must be set"
    ):
        made_of(environment=["ABSENT"])
    with pytest.raises(ConfigError, match=r"task\.params\.environment: got \(\).*the variable JUDGE .*listed here"):
        made_of(judges=[{"api_key_var": "JUDGE"}])
    made_of(judges=[{"api_key_var": "JUDGE"}], environment=["JUDGE"])
    made_of(harness={"env": {"JUDGE": "a value of its own"}})


# --- resume -------------------------------------------------------------------------------------------------


def prepared(run_dir: Path, origin: Path | None, *tasks: Verifiers) -> Any:
    """Return what the hooks read of a run that is about to start."""
    named = {f"t{number}": task.section for number, task in enumerate(tasks)}
    config = SimpleNamespace(mixture=named, eval_sets={}, field_of=lambda name: f"tasks.{name}")
    resumed = SimpleNamespace(run_dir=origin) if origin else None
    return SimpleNamespace(run_dir=run_dir, origin=resumed, announced=[object(), *tasks], config=config)


def test_resume_with_other_tasks_names_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)
    before, hooks = fake(["1", "0", "nan"]), VerifiersLaunch()
    hooks.begins(prepared(tmp_path, None, before))
    assert json.loads((tmp_path / FILE).read_text()) == {"t0": before.keys}

    same = prepared(tmp_path, tmp_path, fake(["1", "0", "nan"]))
    hooks.refuse(same)
    assert list(hooks.preflight(same)) == []

    changed = fake(["1", "nan", "nan"])
    with pytest.raises(ConfigError, match=f"Task 1 of t0 had the key {before.keys[1]}") as refused:
        hooks.refuse(prepared(tmp_path, tmp_path, changed))
    assert (refused.value.field, refused.value.value) == ("tasks.t0.name", changed.keys[1])
    with pytest.raises(ConfigError, match="t0 had 3 tasks"):
        hooks.refuse(prepared(tmp_path, tmp_path, fake(["1", "0"])))

    hooks.refuse(prepared(tmp_path, tmp_path, before, changed))  # a task may be added
    (found,) = hooks.preflight(prepared(tmp_path, tmp_path / "moved", before))
    assert found.level == "warning"


def test_run_without_such_tasks_keeps_nothing(tmp_path: Path) -> None:
    VerifiersLaunch().begins(prepared(tmp_path, None))
    assert list(tmp_path.iterdir()) == []


# --- asyncrl-envs -------------------------------------------------------------------------------------------


class Commands:
    """Stands in for subprocess.run: makes the folder of the virtual environment, and notes the commands."""

    def __init__(self, fails: str = "nothing") -> None:
        self.fails, self.asked = fails, list[list[str]]()
        self.variables: list[dict[str, str]] = []

    def __call__(self, command: list[str], **options: Any) -> None:
        self.asked.append(command)
        self.variables.append(options["env"])
        if "venv" in command:
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            (Path(command[-1]) / "lib" / version / "site-packages").mkdir(parents=True)
            (Path(command[-1]) / "bin").mkdir()
            (Path(command[-1]) / "bin" / "python").touch()
        status = int(any(self.fails in word for word in command))
        if status:
            written = "ModuleNotFoundError: no such taskset" if options.get("stderr") else None
            raise subprocess.CalledProcessError(status, command, None, written)


@pytest.mark.parametrize(
    ("source", "installed", "on_path"),
    [
        ("my-package==1.0", ["my-package==1.0"], False),
        ("bare", [], True),
        ("packed", ["packed"], False),
        (None, [], False),
    ],
)
def test_install_makes_a_venv_with_pinned_verifiers(
    source: str | None,
    installed: list[str],
    on_path: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MINE", "secret")
    monkeypatch.setenv("PIP_INDEX_URL", "https://token@index/simple")
    monkeypatch.setattr(envs.subprocess, "run", commands := Commands())
    assert envs.main(["install", "owner/My-Env@2", *(["--from", source] if source else [])]) == 0
    made, filled, loaded = commands.asked
    assert made[-1] == str(tmp_path / "cache/envs/my_env")
    at = [str(tmp_path / one) if one == "packed" else one for one in installed]
    assert filled[-2 - len(at) :] == ["verifiers==0.4.0", "renderers==0.1.12", *at]
    assert loaded[-1] == "my_env"
    assert ["PIP_INDEX_URL" in one for one in commands.variables] == [True, True, False]
    assert not any("MINE" in one for one in commands.variables)
    paths = [file.read_text() for file in tmp_path.glob("cache/envs/my_env/lib/*/site-packages/my_env.pth")]
    assert paths == ([f"{tmp_path / 'bare'}\n"] if on_path else [])
    assert "task=verifiers task.name=my_env" in capsys.readouterr().out
    assert envs.main(["list"]) == 0
    assert capsys.readouterr().out == f"my_env {tmp_path / 'cache/envs/my_env'}\n"


@pytest.mark.parametrize(("fails", "told"), [("verifiers==", "exit status 1"), ("taskset_class", "does not load: Mod")])
def test_install_that_fails_says_why(
    fails: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    monkeypatch.setattr(envs.subprocess, "run", Commands(fails))
    assert envs.main(["install", "e"]) == 1
    assert told in capsys.readouterr().err
