"""Locks pin everything and no CUDA, pyproject.toml agrees with them, the wheel carries conf/, recipes and the lock."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from asyncrl import __version__
from tests.pins import ROOT, lock, pins, project

LOCKS = ["cpu.txt", "dev.txt", "docs.txt"]
SCRIPTS = ("lock.sh", "container_check.py", "clean_root.py", "debian_tools.py")
ELSEWHERE = ("../pyproject.toml", "../Dockerfile", *(f"../scripts/{name}" for name in SCRIPTS))


@pytest.mark.parametrize("name", LOCKS)
def test_lock_pins_every_line_exactly_and_without_cuda(name):
    forbidden = ("nvidia-", "cuda-", "triton", "torchvision", "sglang-kernel", "flashinfer")
    assert not [package for package in lock(name) if package.startswith(forbidden)]


def test_locks_do_not_overlap():
    assert not lock("cpu.txt").keys() & lock("dev.txt").keys()
    assert not (lock("cpu.txt") | lock("dev.txt")).keys() & lock("docs.txt").keys()


def test_te_tests_use_the_versions_of_the_gpu_lock():
    assert lock("te.txt").items() <= lock("gpu.txt").items()


@pytest.mark.parametrize("name", [*LOCKS, "gpu.txt", "te.txt", *ELSEWHERE])
def test_no_index_or_machine_path_is_written_down(name):
    text = (ROOT / "requirements" / name).read_text()
    assert not re.search(r"https?://|file:|^--|/home/|/root/|/work/", text, re.MULTILINE)


def test_pyproject_agrees_with_the_locks():
    table = project()["project"]
    locked = lock("cpu.txt") | lock("dev.txt") | lock("docs.txt")
    shared = pins(table["dependencies"]) | pins(table["optional-dependencies"]["dev"])
    shared |= pins([line.replace("[python]", "") for line in table["optional-dependencies"]["docs"]])
    assert {name: locked.get(name) for name in shared} == shared
    assert pins(table["optional-dependencies"]["gpu"])["sglang"] == locked["sglang"]
    assert pins(project()["build-system"]["requires"])["hatchling"] == locked["hatchling"]


def test_every_declared_python_has_checked_locks():
    declared = [line.split()[-1] for line in project()["project"]["classifiers"] if "Python :: 3." in line]
    (checked,) = re.findall(r"^PYTHONS=\((.*?)\)", (ROOT / "scripts" / "lock.sh").read_text(), re.MULTILINE)
    assert declared == checked.split()
    assert project()["project"]["requires-python"] == f">={declared[0]}"


def test_make_refuses_another_python_than_the_environments(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for path, version in (
        (python, "3.11.2"),
        (tmp_path / "python-new", "3.12.1"),
        (tmp_path / "python-same", "3.11.2"),
    ):
        path.write_text(f"#!/bin/sh\necho Python {version}\n")
        path.chmod(0o755)

    def make(**environment):
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS")}
        command = ["make", "interpreter"]
        done = subprocess.run(
            command, cwd=tmp_path, env=clean | environment, capture_output=True, text=True, check=False
        )
        return done.returncode == 0, done.stderr

    assert make() == (True, "")
    assert make(PYTHON="./python-same") == (True, "")
    fine, said = make(PYTHON="./python-new")
    assert not fine
    assert ".venv has Python 3.11.2, and PYTHON=./python-new is Python 3.12.1: unset PYTHON, or rename .venv" in said


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_carries_conf_recipes_lock_and_commands(wheel):
    assert wheel.name.startswith(f"asyncrl-{__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    conf = {f"asyncrl/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    recipes = {
        f"asyncrl_{path.relative_to(ROOT)}"
        for path in (ROOT / "recipes").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "asyncrl").rglob("*.*") if path.is_file()}
    assert {name for name in package if "__pycache__" not in name} <= names, "scripts and styles of pages too"
    assert {"asyncrl/conf/train.yaml", "asyncrl/requirements/cpu.txt", "asyncrl_recipes/__init__.py"} <= names
    assert conf | recipes <= names
    assert not [name for name in names if name.startswith(("tests/", "conf/", "recipes/")) or "__pycache__" in name]
    assert "asyncrl-train = asyncrl.launch.main:main" in entry_points
    assert "asyncrl-convert = asyncrl.extensions.convert.cli:main" in entry_points
    assert "asyncrl-watch = asyncrl.extensions.view.watch.cli:main" in entry_points
    assert "asyncrl-install = asyncrl.extensions.install.command:main" in entry_points


def test_sdist_carries_what_the_wheel_is_built_from(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(*tmp_path.glob("*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = [
        path
        for top in ("asyncrl", "conf", "recipes")
        for path in (ROOT / top).rglob("*.*")
        if "__pycache__" not in path.parts
    ]
    assert {str(path.relative_to(ROOT)) for path in files if path.is_file()} <= names


COMPOSE = """
import json, re, sys
from asyncrl.config import load
from asyncrl.user_code import load as imported
from asyncrl.launch.compose import compose
from asyncrl.launch.main import CONF

found = {}
for name in sys.argv[1].split(","):
    sys.argv[1:] = [f"experiment={name}", "model.path=/models/m", "task.train_file=/rows.jsonl"]
    (composed,) = compose(CONF)
    config = load(composed.values)
    paths = re.findall(r"asyncrl\\w*(?:\\.\\w+)+:\\w+", json.dumps(composed.values))
    modules = [imported(path, name).__module__ for path in paths]
    found[name] = {"name": config.run.name, "modules": {module: sys.modules[module].__file__ for module in modules}}
print(json.dumps(found))
"""


@pytest.mark.parametrize("installation", ["wheel", "clone"])
def test_experiments_compose_where_they_are_installed(installation, wheel, tmp_path):
    """The wheel is alone in its folder: neither conf/ nor recipes/ of the clone is in reach. That the experiments in
    the clone's conf/ compose is tested in test_config.py, and the wheel has the same files, so that two of them show
    that they are found there."""
    target = tmp_path if installation == "wheel" else ROOT
    if installation == "wheel":
        pip = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(wheel)]
        subprocess.run([sys.executable, "-m", "pip", *pip], check=True)
    files = list((ROOT / "recipes").rglob("experiment/*.yaml"))
    if installation == "wheel":
        files += [ROOT / "conf" / "experiment" / f"{name}.yaml" for name in ("default", "tiny")]
    names = sorted(file.stem for file in files)
    command = [sys.executable, "-c", COMPOSE, ",".join(names)]
    environment = {**os.environ, "PYTHONPATH": str(target)}  # before what .venv has installed
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: one["name"] for name, one in found.items()} == {name: name for name in names}
    modules = {module: file for one in found.values() for module, file in one["modules"].items()}
    recipes = {file.parents[2].name for file in files if file.is_relative_to(ROOT / "recipes")}
    assert recipes == {module.split(".")[1] for module in modules if module.startswith("asyncrl_recipes.")} != set()
    assert [file for file in modules.values() if not Path(file).is_relative_to(target)] == []


def test_clone_keeps_the_packages_name_for_its_recipes():
    """So that import paths are the same in an editable install."""
    assert (ROOT / "asyncrl_recipes").samefile(ROOT / "recipes")
